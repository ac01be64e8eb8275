//! What a program brings for each rank, and what a front has when it came to its end.

use std::path::Path;
use std::time::Duration;

use pp_runtime::driver::FrontSummary;
use pp_runtime::report::{Measures, View, default_warm_up, write_chrome_trace, write_json};
use pp_transport::backend::Edges;
use serde::Serialize;

use crate::error::Error;
use crate::output::{OutputError, write_file};

/// What a front brings.
#[derive(Debug)]
pub struct FrontPart<F, T> {
    /// Source, encode, decode and sink.
    pub stages: F,
    /// Both edges, the same as in [`PhaseBPart`]. `up` leads to Phase B. The depth of `down` is the most chunks in
    /// flight. `up` needs as many slots, and one more for each of `context_chunks` if the job may restart.
    pub edges: Edges,
    /// How many earlier chunks Phase B must know before it can begin with a chunk. If the job may restart, their
    /// payloads stay in slots of `up`.
    pub context_chunks: u32,
    /// What Phase B must know of the input before it opens its stages.
    pub shape: T,
}

impl<F, T> FrontPart<F, T> {
    /// The most chunks in flight.
    pub(crate) fn depth(&self) -> Result<u32, Error> {
        match self.edges.down.depth {
            0 => Err(Error::Usage(
                "the edges have a depth of 0; give them one slot or more".into(),
            )),
            depth => Ok(depth),
        }
    }
}

impl<F> FrontPart<F, ()> {
    /// Stages whose Phase B must know nothing ahead, and needs no chunk before the one that it begins with.
    pub fn new(stages: F, edges: Edges) -> Self {
        Self {
            stages,
            edges,
            context_chunks: 0,
            shape: (),
        }
    }
}

/// What Phase B brings.
#[derive(Debug)]
pub struct PhaseBPart<S> {
    /// The stages of Phase B.
    pub stages: S,
    /// Both edges, as the front has them.
    pub edges: Edges,
}

/// What each rank does. Each closure is called once, on its own rank alone.
#[derive(Debug)]
pub struct Ranks<A, B, C> {
    /// Rank 0: opens source, stages and sink. Other threads ring the bell when the source or the sink is ready again.
    pub front: A,
    /// Rank 1: opens Phase B for the shape that the front found.
    pub phase_b: B,
    /// Rank 0: stores and prints the results, once everything is emitted.
    pub finish: C,
}

/// A front that came to its end.
#[derive(Debug)]
pub struct Finished {
    /// What the driver counted and recorded.
    pub summary: FrontSummary,
    /// How often another Phase B was awaited.
    pub restarts: u32,
    /// From the first connection to the end.
    pub wall: Duration,
    /// The signal that ended the run before the end of its input.
    pub interrupted: Option<u8>,
}

impl Finished {
    /// Writes the report as JSON: the run (`restarts`, `wall_ms`, `interrupted_by`), its measures, and the record of each
    /// chunk.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_report(&self, path: &Path) -> Result<(), OutputError> {
        #[derive(Serialize)]
        struct Run {
            restarts: u32,
            wall_ms: f64,
            interrupted_by: Option<u8>,
        }
        let run = Run {
            restarts: self.restarts,
            wall_ms: self.wall.as_secs_f64() * 1e3,
            interrupted_by: self.interrupted,
        };
        let FrontSummary {
            recorder, restarts, ..
        } = &self.summary;
        let warm_up = default_warm_up(recorder.totals().chunks);
        let measures = Measures::of(recorder, warm_up, restarts);
        write_file(path, |out| write_json(out, &run, &measures, recorder))
    }

    /// Writes the trace that Perfetto and `chrome://tracing` show.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_trace(&self, path: &Path) -> Result<(), OutputError> {
        let view = View {
            restarts: self.summary.restarts.clone(),
            ..View::default()
        };
        write_file(path, |out| {
            write_chrome_trace(out, &self.summary.recorder, &view)
        })
    }
}
