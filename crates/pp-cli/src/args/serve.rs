//! The options that show a running job.

use std::path::PathBuf;

use clap::Args;
use pp_job::{Error, ThisRank};
use pp_live::{Live, Serving};

/// How a job is shown while it runs.
#[derive(Args, Clone, Debug)]
pub struct ServeArgs {
    /// Show the job in a browser while it runs, from rank 0: a page, /metrics for Prometheus, /report.json. A port alone
    /// is one of this machine, and 0 one that is free; any other address must be typed, and nothing is encrypted.
    #[arg(long, value_name = "[ADDRESS:]PORT")]
    live: Option<Live>,
    /// The token that a viewer must know, in a file of this user alone; by default a new one, which is printed.
    #[arg(long, value_name = "FILE", requires = "live")]
    live_token_file: Option<PathBuf>,
}

impl ServeArgs {
    /// Shows the job, on rank 0 and if it is asked for, until the value is dropped: behind the job.
    ///
    /// # Errors
    /// The file of the token is refused, or nothing can listen at this address.
    pub fn serve(&self, rank: ThisRank<'_>) -> Result<Option<Serving>, Error> {
        let asked = self.live.as_ref().zip(rank.viewer());
        let file = self.live_token_file.as_deref();
        let serving = asked.map(|(live, viewer)| live.clone().token_file(file).serve(viewer));
        serving.transpose()
    }
}

/// The arguments of `pp top`.
#[derive(Args, Clone, Debug)]
pub struct TopArgs {
    /// The process of the job's rank 0; without it the only job there is, or a list of all.
    #[arg(value_name = "PROCESS")]
    pub(crate) process: Option<u32>,
    /// Print a snapshot of each job as a line of JSON, once.
    #[arg(long)]
    pub(crate) json: bool,
}
