//! What a viewer gets of a running job: a page in a browser, metrics for Prometheus, and `pp top`.

mod access;
mod server;
mod token;
