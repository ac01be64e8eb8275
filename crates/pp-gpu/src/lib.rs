//! Edges between GPUs: slots in their memory, and the two movers of payloads between them, NCCL and the copy engine.
//!
//! A part of pp-transport, which shows these modules to other crates.

pub mod gpu;
pub mod gpu_backend;
pub mod nccl;
pub mod times;
