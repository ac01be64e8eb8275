//! (being written)

#[allow(dead_code)]
mod video;

fn main() {}
