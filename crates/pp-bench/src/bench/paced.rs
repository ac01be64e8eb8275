//! A source that does not wait: chunk `n` is there `n` periods behind the first, whether it is taken or not.

use std::io;
use std::thread;
use std::time::Duration;

use pp_job::Error;
use pp_runtime::clock::now_ns;
use pp_transport::bell::Bell;

use crate::args::OverlapArgs;

/// When chunks are there.
pub(super) struct Paced {
    period_ns: u64,
    start_ns: u64,
    chunks: u64,
}

impl Paced {
    /// Begins now, and rings for each chunk that is there.
    pub(super) fn start(per_second: f64, chunks: u64, bell: Bell) -> io::Result<Self> {
        let period_ns = (1e9 / per_second) as u64;
        let start_ns = now_ns();
        let ring = move || {
            for chunk in 0..chunks {
                let due_ns = start_ns + chunk * period_ns;
                thread::sleep(Duration::from_nanos(due_ns.saturating_sub(now_ns())));
                bell.ring();
            }
        };
        thread::Builder::new().name("pace".into()).spawn(ring)?;
        Ok(Self {
            period_ns,
            start_ns,
            chunks,
        })
    }

    /// When the chunk is there of which and behind which so many are left; none where it is not yet.
    pub(super) fn there_ns(&self, left: u64) -> Option<u64> {
        let chunk = self.chunks.checked_sub(left).filter(|_| left > 0)?;
        let at_ns = self.start_ns + chunk * self.period_ns;
        (at_ns <= now_ns()).then_some(at_ns)
    }
}

/// Refuses a rate for a source that waits.
pub(super) fn check(args: &OverlapArgs) -> Result<(), Error> {
    match args.per_second {
        Some(_) if args.transport.is_on_gpus() => Err(Error::Usage(
            "--per-second is for stages on processors; use it with --transport host".into(),
        )),
        _ => Ok(()),
    }
}
