//! The contract by what it promises: exact bytes, notation, order and rules, and what it refuses.

mod golden;
mod handshake;
mod hostile;
mod order;
mod pipeline;
mod property;
mod rules;
mod support;
