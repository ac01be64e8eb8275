//! The options that show a running job.

use std::path::PathBuf;

use clap::Args;
use pp_live::Live;

/// How a job is shown while it runs.
#[derive(Args, Clone, Debug)]
pub(crate) struct LiveArgs {
    /// Show the job in a browser while it runs, from rank 0: a page, /metrics for Prometheus, /report.json. A port alone
    /// is one of this machine, and 0 one that is free; any other address must be typed, and nothing is encrypted.
    #[arg(long, value_name = "[ADDRESS:]PORT")]
    live: Option<Live>,
    /// The token that a viewer must know, in a file of this user alone; by default a new one, which is printed.
    #[arg(long, value_name = "FILE", requires = "live")]
    live_token_file: Option<PathBuf>,
}

impl LiveArgs {
    /// Where, if the job is to be shown.
    pub(crate) fn live(&self) -> Option<Live> {
        let live = self.live.clone()?;
        Some(live.token_file(self.live_token_file.as_deref()))
    }
}

/// The arguments of `pp top`.
#[derive(Args, Clone, Debug)]
pub(crate) struct TopArgs {
    /// The process of the job's rank 0; without it the only job there is, or a list of all.
    #[arg(value_name = "PROCESS")]
    pub(crate) process: Option<u32>,
    /// Print a snapshot of each job as a line of JSON, once.
    #[arg(long)]
    pub(crate) json: bool,
}
