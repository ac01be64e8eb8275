//! The options about real time.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use pp_runtime::core::Late;

use crate::whole;

/// What the output has in the place of frames that were dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Fill {
    /// The last frame before them once more for each; before the first frame, the next one.
    #[default]
    Repeat,
    /// Nothing.
    Skip,
}

/// How a run keeps up with its source.
#[derive(Args, Clone, Debug)]
pub struct LiveArgs {
    /// What happens to chunks that come faster than they are worked on: block lets the source wait, drop drops the oldest
    /// that are not begun. A file has all its frames at once, so drop takes a pipe, or --pace.
    #[arg(long, value_parser = late(), default_value = "block")]
    pub late: Late,
    /// What the output has in the place of frames that were dropped; by default repeat.
    #[arg(long, value_enum)]
    pub fill: Option<Fill>,
    /// Latency that no chunk is to exceed, such as 80ms or 1.5s, 1ms to 3600s, from when its first frame is there; by default
    /// none. Fewer chunks are in flight, fewer steps are made (--min-steps), and late chunks are dropped (--late drop).
    #[arg(long, value_name = "TIME", value_parser = latency)]
    pub max_latency: Option<Duration>,
    /// Denoising steps that a chunk gets at least, 1 to 1024, where --late drop with --max-latency asks for fewer; by default all.
    #[arg(long, value_name = "N", value_parser = whole(1..=1024_u32), requires = "max_latency")]
    pub min_steps: Option<u32>,
    /// Read a file at the rate in its header, as a camera gives it.
    #[arg(long)]
    pub pace: bool,
    /// Drop the same frames and make the same steps as the run of this report, from a file with the same frames.
    #[arg(long, value_name = "REPORT.json", conflicts_with_all = ["late", "max_latency", "min_steps", "pace", "chunks"])]
    pub replay: Option<PathBuf>,
}

impl LiveArgs {
    /// Says whether frames may be missing between two chunks.
    #[must_use]
    pub fn has_gaps(&self) -> bool {
        self.late == Late::Drop || self.replay.is_some()
    }

    /// Says whether the sink repeats frames.
    #[must_use]
    pub fn repeats(&self) -> bool {
        self.has_gaps() && self.fill.unwrap_or_default() == Fill::Repeat
    }
}

fn late() -> impl TypedValueParser<Value = Late> {
    PossibleValuesParser::new(["block", "drop"]).map(|text| match &*text {
        "drop" => Late::Drop,
        _ => Late::Block,
    })
}

fn latency(text: &str) -> Result<Duration, String> {
    let seconds = match (text.strip_suffix("ms"), text.strip_suffix('s')) {
        (Some(ms), _) => ms.parse().map(|ms: f64| ms / 1e3).ok(),
        (None, Some(s)) => s.parse().ok(),
        _ => None,
    };
    let seconds = seconds.filter(|seconds| (1e-3..=3_600.0).contains(seconds));
    let refuse = || "it takes a time from 1ms to 3600s, such as 80ms or 1.5s".into();
    seconds.map(Duration::from_secs_f64).ok_or_else(refuse)
}
