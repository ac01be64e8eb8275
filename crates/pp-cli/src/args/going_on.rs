//! The options of a run that may end early, and of one that goes on behind it.

use clap::Args;
use pp_command::whole;

/// What is kept of an output that is not finished, and where a run begins.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct GoingOnArgs {
    /// Write --output under its name with .part behind it, and name it --output when it is finished: what was written is
    /// kept also if the job ends early. A message says how many whole frames that are.
    #[arg(long, requires = "output")]
    pub(crate) keep_partial: bool,
    /// Write the output from frame N of the input on, 0 to 18446744073709551615, with the bytes of the whole run; what stages
    /// must know before that is worked on again. With --keep-partial go on in what was kept.
    #[arg(long, value_name = "N", requires = "output", default_value_t = 0, value_parser = whole(0..=u64::MAX))]
    pub(crate) skip: u64,
}
