//! How a rank is brought into a state: what its job is given, and how one sees that it is there.
//!
//! Nothing here guesses by time: each state has a sign (a record of the log, a thread's name, bytes
//! that came out), and only then is the peer touched.

use std::time::Duration;

use super::cell::{Cell, Event, Ours, Side};
use crate::trial::Ground;

/// How long a stage stalls where no rank waits for it to come back.
pub(super) const LONG: Duration = Duration::from_secs(30);
/// How long it stalls where the peer is to finish its work.
pub(super) const SHORT: Duration = Duration::from_millis(500);

/// What shows that a state is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Sign {
    /// A rank's log has a record with these words.
    Says(usize, Vec<String>),
    /// So many frames came out at the sink.
    Frames(u64),
    /// A rank has a thread of this name.
    Thread(usize, &'static str),
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

/// Frames that any slot holds.
const SMALL: Picture = Picture {
    width: 96,
    height: 64,
    frames_per_chunk: 1,
};

/// A job that comes into a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Scene {
    pub(super) picture: Picture,
    pub(super) depth: u32,
    /// Chunks that the source's input gives; without any not even the header.
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
    /// The stage's rank is started again: the input ends, and the output is a file.
    pub(super) restarts: bool,
    /// Said in the table: what the state is here.
    pub(super) means: &'static str,
}

fn record(rank: usize, what: &str, chunk: u64) -> Sign {
    Sign::Says(rank, vec![what.into(), format!("chunk_index={chunk} ")])
}

/// A rank has sent what it made of a chunk.
pub(super) fn sent(rank: usize, chunk: u64) -> Sign {
    record(rank, "message sent", chunk)
}

/// The stage of a rank stalls.
pub(super) fn stalls(rank: usize) -> Sign {
    Sign::Says(rank, vec!["fault hook: stall".into()])
}

/// The rank between source and sink.
const STAGE: usize = 1;

/// A stage of this rank does not come back from chunk 1 for a while.
pub(super) fn stall(rank: usize, time: Duration) -> Option<String> {
    Some(format!("stall@{rank}:chunk=1:ms={}", time.as_millis()))
}

impl Scene {
    pub(super) fn of(cell: Cell, ground: Ground) -> Self {
        // What the copy engine moves is there with its header, or right behind, and nothing waits in a library.
        let ground = if ground.has_nccl() {
            ground
        } else {
            Ground::Host
        };
        let mut scene = Self::before(cell.ours, cell.side, ground);
        let stalls = scene.fault.is_some();
        if cell.restarts() {
            scene.goes_on(ground);
        }
        match (cell.event, cell.side) {
            (Event::Computing, _) if stalls && !scene.holds_peer => {
                scene.fault = stall(STAGE, SHORT)
            }
            // A stage's rank has no reason to leave before the source's does: it is made to, in its stage.
            (Event::Left, Side::Source) if !cell.ours.is_before_the_first_chunk() => {
                scene.leaves(cell.ours);
            }
            // The source's rank leaves when it has drained, for which the stage has to come back.
            (Event::Left, Side::Stage) if stalls && !scene.holds_peer => {
                scene.fault = stall(STAGE, SHORT);
            }
            (Event::Left, Side::Stage) if cell.ours == Ours::Receive => {
                // A rank inside a send that hangs cannot leave: what comes is half read instead.
                scene = Self::before(cell.ours, cell.side, Ground::Host);
            }
            _ => {}
        }
        scene
    }

    /// The stage's rank ends in good order, in its stage or once it has nothing to do.
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

    /// The stage's rank is lost when it has joined the communicators and not used them, which the source's does.
    fn goes_on(&mut self, ground: Ground) {
        self.restarts = true;
        if ground == Ground::Fakes {
            self.fakes = [Some("ncclRecv:1:wait"); 2];
            self.signs = vec![Sign::AtGate];
        }
    }

    /// Two chunks are done, and the input gives nothing more.
    pub(super) fn new() -> Self {
        Self {
            picture: SMALL,
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
        }
    }

    #[expect(clippy::too_many_lines, reason = "one table")]
    fn before(ours: Ours, side: Side, ground: Ground) -> Self {
        let (scene, small) = (Self::new(), SMALL);
        match (ours, side) {
            (Ours::Idle, Side::Source) => Self {
                means: "two chunks are done, the input gives nothing more",
                ..scene
            },
            (Ours::Idle, Side::Stage) => Self {
                means: "two chunks are done, no message comes",
                ..scene
            },
            (Ours::Queued, Side::Source) => Self {
                depth: 1,
                chunks: 6,
                fault: stall(STAGE, LONG),
                signs: vec![sent(side.rank(), 1), stalls(STAGE)],
                means: "chunks are read and wait for the one slot, whose chunk the stage computes",
                ..scene
            },
            (Ours::Queued, Side::Stage) => Self {
                depth: 3,
                later: 1,
                fault: stall(STAGE, LONG),
                signs: vec![stalls(STAGE), sent(0, 2)],
                means: "it is inside its stage, and the next message lies before it",
                ..scene
            },
            (Ours::Send, Side::Source) => Self {
                picture: big_enough(ground, small),
                depth: 3,
                later: 1,
                fault: stall(STAGE, LONG),
                signs: vec![stalls(STAGE), sent(side.rank(), 2)],
                means: match ground {
                    Ground::Host => "what was sent lies in its slot, and its peer has not looked",
                    _ => "ncclSend is on its stream, and its peer has posted no receive",
                },
                ..scene
            },
            (Ours::Send, Side::Stage) => Self {
                picture: big_enough(ground, small),
                fault: stall(STAGE, Duration::from_millis(200)),
                signs: vec![stalls(STAGE), sent(side.rank(), 1)],
                holds_peer: true,
                means: match ground {
                    Ground::Host => "its result lies in its slot, and its peer does not look",
                    _ => "ncclSend is on its stream, and its peer has posted no receive",
                },
                ..scene
            },
            (Ours::Receive, Side::Source) if ground == Ground::Fakes => Self {
                fakes: [None, Some("ncclSend:3:hang")],
                stuck_ms: Some(1000),
                signs: vec![record(side.rank(), "receive posted", 1)],
                means: "ncclRecv waits for a payload whose ncclSend hangs at its peer",
                ..scene
            },
            (Ours::Receive, Side::Stage) if ground == Ground::Fakes => Self {
                fakes: [Some("ncclSend:3:hang"), None],
                stuck_ms: Some(1000),
                signs: vec![record(side.rank(), "receive posted", 1)],
                means: "ncclRecv waits for a payload whose ncclSend hangs at its peer",
                ..scene
            },
            (Ours::Receive, Side::Source) => Self {
                depth: 1,
                fault: stall(STAGE, LONG),
                signs: vec![sent(side.rank(), 1), stalls(STAGE)],
                means: "it waits for the result: a payload comes with its header, or right behind",
                ..scene
            },
            (Ours::Receive, Side::Stage) => Self {
                and_half: true,
                means: "it waits for a chunk, of which the source has read half",
                ..scene
            },
            (Ours::SetUp, _) => Self {
                chunks: 0,
                signs: [0, STAGE]
                    .map(|rank| Sign::Says(rank, vec!["all ranks agree".into()]))
                    .into(),
                means: match side {
                    Side::Source => "it opens its input, which does not say what it is",
                    Side::Stage => "it waits to hear what the input is",
                },
                ..scene
            },
            (Ours::Connect, _) => Self {
                fakes: match (ground, side) {
                    (Ground::Fakes, Side::Source) => [None, Some("ncclCommInitRankConfig:1:hang")],
                    (Ground::Fakes, Side::Stage) => [Some("ncclCommInitRankConfig:1:hang"), None],
                    _ => [None; 2],
                },
                signs: [0, STAGE]
                    .map(|rank| Sign::Thread(rank, "pp-nccl-connect"))
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
