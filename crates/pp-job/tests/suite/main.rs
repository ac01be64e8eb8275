//! Jobs of a program that embeds the library.

mod command;
mod flow;
mod mistakes;
mod open;
mod seen;
mod signals;
mod two_jobs;
