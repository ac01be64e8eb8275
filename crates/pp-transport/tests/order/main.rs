//! Edges of GPUs keep their order whatever the timing, over NCCL, by copy engine and beside host memory: proven on
//! recordings of the fakes. And the proof is worth something: every rule is shown to catch what it is for, on small traces
//! written by hand and on runs of the real transport that the fakes spoil.

#[path = "../control_support/mod.rs"]
mod control_support;
#[path = "../edges_support/mod.rs"]
mod edges_support;
mod host;
mod job;
mod lifetimes;
mod local;
mod mesh;
mod puts;
mod runs;
mod traces;
#[path = "../two_way/mod.rs"]
mod two_way;
