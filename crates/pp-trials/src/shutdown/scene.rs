//! How a rank is brought into a state: what its job is given, and how one sees that it is there.
//!
//! Nothing here guesses by time: each state has a sign (a record of the log, a thread's name, bytes
//! that came out), and only then is the peer touched.

use std::time::Duration;

use super::cell::{Cell, Event, Ours, Side};
use crate::trial::Ground;

/// How long a stage of Phase B stalls where no rank waits for it to come back.
const LONG: Duration = Duration::from_secs(30);
/// How long it stalls where the peer is to finish its work.
pub(super) const SHORT: Duration = Duration::from_millis(500);

/// What shows that a state is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Sign {
    /// A rank's log has a record with these words.
    Says(Side, Vec<String>),
    /// So many frames came out at the front.
    Frames(u64),
    /// A rank has a thread of this name.
    Thread(Side, &'static str),
    /// A call waits at the gate of the stand-ins.
    AtGate,
}

/// Frames of a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Picture {
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) frames_per_chunk: usize,
}

impl Picture {
    pub(super) fn header(self) -> Vec<u8> {
        format!("YUV4MPEG2 W{} H{} F25:1 Cmono\n", self.width, self.height).into_bytes()
    }

    pub(super) fn frame(self) -> Vec<u8> {
        let mut frame = b"FRAME\n".to_vec();
        frame.resize(frame.len() + self.width * self.height, 100);
        frame
    }
}

/// A job that comes into a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Scene {
    pub(super) picture: Picture,
    pub(super) depth: u32,
    /// Chunks that the front's input gives; without any not even the header.
    pub(super) chunks: usize,
    /// And so many more once the first sign is there.
    pub(super) later: usize,
    /// And half of the next.
    pub(super) and_half: bool,
    /// `PP_FAULT` of the job.
    pub(super) fault: Option<String>,
    /// `PP_FAKE_FAULTS` of each rank.
    pub(super) fakes: [Option<&'static str>; 2],
    /// `PP_STUCK_MS` of the job.
    pub(super) stuck_ms: Option<u32>,
    pub(super) signs: Vec<Sign>,
    /// The peer is stopped once the first sign is there, so that it takes nothing in, and goes on
    /// (if it may) when the cell begins.
    pub(super) holds_peer: bool,
    /// Phase B is started again: the input ends, and the output is a file.
    pub(super) restarts: bool,
    /// Said in the table: what the state is here.
    pub(super) means: &'static str,
}

fn record(side: Side, what: &str, chunk: u64) -> Sign {
    Sign::Says(side, vec![what.into(), format!("chunk_index={chunk} ")])
}

fn marker(what: &str) -> Sign {
    Sign::Says(Side::PhaseB, vec![format!("fault hook: {what}")])
}

/// A stage of Phase B that does not come back from chunk 1 for a while.
fn stall(time: Duration) -> Option<String> {
    Some(format!("stall-compute@1:chunk=1:ms={}", time.as_millis()))
}

impl Scene {
    pub(super) fn of(cell: Cell, ground: Ground) -> Self {
        let mut scene = Self::before(cell.ours, cell.side, ground);
        let stalls = scene.fault.is_some();
        if cell.restarts() {
            scene.goes_on(ground);
        }
        match (cell.event, cell.side) {
            (Event::Computing, _) if stalls && !scene.holds_peer => scene.fault = stall(SHORT),
            // Phase B has no reason to leave before the front does: it is made to, in its stage.
            (Event::Left, Side::Front) if !cell.ours.is_before_the_first_chunk() => {
                scene.leaves(cell.ours);
            }
            // A front leaves when it has drained, for which Phase B has to come back.
            (Event::Left, Side::PhaseB) if stalls && !scene.holds_peer => {
                scene.fault = stall(SHORT);
            }
            (Event::Left, Side::PhaseB) if cell.ours == Ours::Receive => {
                // A front inside a send that hangs cannot leave: what comes is half read instead.
                scene = Self::before(cell.ours, cell.side, Ground::Host);
            }
            _ => {}
        }
        scene
    }

    /// Phase B ends in good order, in its stage or once it has nothing to do.
    fn leaves(&mut self, ours: Ours) {
        self.fakes = [None; 2];
        self.chunks += std::mem::take(&mut self.later);
        self.fault = Some("leave@1:chunk=1".into());
        // That it leaves is the event: the state is reached when it does.
        self.signs = match ours {
            Ours::Idle => {
                self.fault = Some("leave-idle@1:chunk=1".into());
                vec![Sign::Frames(2)]
            }
            _ => vec![],
        };
    }

    /// Phase B is lost when it has joined the communicators and not used them, which the front does.
    fn goes_on(&mut self, ground: Ground) {
        self.restarts = true;
        if ground == Ground::Fakes {
            self.fakes = [Some("ncclRecv:1:wait"); 2];
            self.signs = vec![Sign::AtGate];
        }
    }

    fn before(ours: Ours, side: Side, ground: Ground) -> Self {
        let small = Picture {
            width: 96,
            height: 64,
            frames_per_chunk: 1,
        };
        let scene = Self {
            picture: small,
            depth: 2,
            chunks: 2,
            later: 0,
            and_half: false,
            fault: None,
            fakes: [None; 2],
            stuck_ms: None,
            signs: vec![Sign::Frames(2)],
            holds_peer: false,
            restarts: false,
            means: "",
        };
        match (ours, side) {
            (Ours::Idle, Side::Front) => Self {
                means: "two chunks are done, the input gives nothing more",
                ..scene
            },
            (Ours::Idle, Side::PhaseB) => Self {
                means: "two chunks are done, no envelope comes",
                ..scene
            },
            (Ours::Queued, Side::Front) => Self {
                depth: 1,
                chunks: 6,
                fault: stall(LONG),
                signs: vec![record(side, "envelope sent", 1), marker("stall-compute")],
                means: "chunks are read and wait for the one slot, whose chunk Phase B computes",
                ..scene
            },
            (Ours::Queued, Side::PhaseB) => Self {
                depth: 3,
                later: 1,
                fault: stall(LONG),
                signs: vec![
                    marker("stall-compute"),
                    record(Side::Front, "envelope sent", 2),
                ],
                means: "it is inside its stage, and the next envelope lies before it",
                ..scene
            },
            (Ours::Send, Side::Front) => Self {
                picture: big_enough(ground, small),
                depth: 3,
                later: 1,
                fault: stall(LONG),
                signs: vec![marker("stall-compute"), record(side, "envelope sent", 2)],
                means: match ground {
                    Ground::Host => "what was sent lies in its slot, and Phase B has not looked",
                    _ => "ncclSend is on its stream, and Phase B has posted no receive",
                },
                ..scene
            },
            (Ours::Send, Side::PhaseB) => Self {
                picture: big_enough(ground, small),
                fault: stall(Duration::from_millis(200)),
                signs: vec![marker("stall-compute"), record(side, "result sent", 1)],
                holds_peer: true,
                means: match ground {
                    Ground::Host => "its result lies in its slot, and the front does not look",
                    _ => "ncclSend is on its stream, and the front has posted no receive",
                },
                ..scene
            },
            (Ours::Receive, Side::Front) if ground == Ground::Fakes => Self {
                fakes: [None, Some("ncclSend:3:hang")],
                stuck_ms: Some(1000),
                signs: vec![record(side, "receive posted", 1)],
                means: "ncclRecv waits for a payload whose ncclSend hangs at Phase B",
                ..scene
            },
            (Ours::Receive, Side::PhaseB) if ground == Ground::Fakes => Self {
                fakes: [Some("ncclSend:3:hang"), None],
                stuck_ms: Some(1000),
                signs: vec![record(side, "receive posted", 1)],
                means: "ncclRecv waits for a payload whose ncclSend hangs at the front",
                ..scene
            },
            (Ours::Receive, Side::Front) => Self {
                depth: 1,
                fault: stall(LONG),
                signs: vec![record(side, "envelope sent", 1), marker("stall-compute")],
                means: "it waits for the result: a payload comes with its header, or right behind",
                ..scene
            },
            (Ours::Receive, Side::PhaseB) => Self {
                and_half: true,
                means: "it waits for an envelope, of which the front has read half",
                ..scene
            },
            (Ours::SetUp, _) => Self {
                chunks: 0,
                signs: [Side::Front, Side::PhaseB]
                    .map(|side| Sign::Says(side, vec!["all ranks agree".into()]))
                    .into(),
                means: match side {
                    Side::Front => "it opens its input, which does not say what it is",
                    Side::PhaseB => "it waits to hear what the front's input is",
                },
                ..scene
            },
            (Ours::Connect, _) => Self {
                fakes: match (ground, side) {
                    (Ground::Fakes, Side::Front) => [None, Some("ncclCommInitRankConfig:1:hang")],
                    (Ground::Fakes, Side::PhaseB) => [Some("ncclCommInitRankConfig:1:hang"), None],
                    _ => [None; 2],
                },
                signs: [Side::Front, Side::PhaseB]
                    .map(|side| Sign::Thread(side, "pp-nccl-connect"))
                    .into(),
                means: match ground {
                    Ground::Fakes => "inside ncclCommInitRankConfig, which hangs at the peer",
                    _ => "inside NCCL, which connects the ranks",
                },
                ..scene
            },
        }
    }
}

/// A real send completes with no receiver up to 64 MiB and more.
fn big_enough(ground: Ground, small: Picture) -> Picture {
    match ground {
        Ground::Gpus => Picture {
            width: 4096,
            height: 4096,
            frames_per_chunk: 5,
        },
        _ => small,
    }
}
