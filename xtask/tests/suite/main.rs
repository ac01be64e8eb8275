//! The commands of the workspace as programs.

mod commands;
mod gpu_check;
