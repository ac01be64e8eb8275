//! Training schedules: what is built, read, merged, lowered, checked and simulated, against PyTorch's
//! own lists and against slower ways to the same results.

mod build;
mod check;
mod golden;
mod lower;
mod oracle;
mod simulate;
mod text;
