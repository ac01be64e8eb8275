//! The cells of the matrix: what we are doing, what becomes of the peer, and what is wished of us.

use std::fmt;

/// What the ranks run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ground {
    /// Shared memory.
    Host,
    /// The tests' stand-ins for the CUDA driver and NCCL.
    Fakes,
    /// Real GPUs.
    Gpus,
}

impl Ground {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Fakes => "nccl, stand-ins",
            Self::Gpus => "nccl, GPUs",
        }
    }

    pub(crate) fn is_host(self) -> bool {
        self == Self::Host
    }
}

/// The rank that is "us": the other one is the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Front,
    PhaseB,
}

impl Side {
    const ALL: [Self; 2] = [Self::Front, Self::PhaseB];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Front => "front",
            Self::PhaseB => "phase_b",
        }
    }

    pub(crate) fn rank(self) -> usize {
        match self {
            Self::Front => 0,
            Self::PhaseB => 1,
        }
    }

    pub(crate) fn peer(self) -> Self {
        match self {
            Self::Front => Self::PhaseB,
            Self::PhaseB => Self::Front,
        }
    }
}

/// What we are doing when it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ours {
    Idle,
    Queued,
    Send,
    Receive,
    SetUp,
    /// Inside NCCL, which connects the ranks.
    Connect,
}

impl Ours {
    const ALL: [Self; 6] = [
        Self::Idle,
        Self::Queued,
        Self::Send,
        Self::Receive,
        Self::SetUp,
        Self::Connect,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Queued => "queued",
            Self::Send => "send",
            Self::Receive => "receive",
            Self::SetUp => "set-up",
            Self::Connect => "connect",
        }
    }

    /// Nothing was admitted yet: there is nothing to drain.
    pub(crate) fn is_before_the_first_chunk(self) -> bool {
        matches!(self, Self::SetUp | Self::Connect)
    }
}

/// What becomes of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Nothing: it does its part.
    Computing,
    Left,
    Killed,
    Stopped,
    Cut,
}

impl Event {
    const ALL: [Self; 5] = [
        Self::Computing,
        Self::Left,
        Self::Killed,
        Self::Stopped,
        Self::Cut,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Computing => "computing",
            Self::Left => "left",
            Self::Killed => "killed",
            Self::Stopped => "stopped",
            Self::Cut => "cut",
        }
    }
}

/// What is wished of us at that moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// Nothing: we notice by ourselves.
    GoOn,
    /// One interrupt.
    Drain,
    /// Two.
    Abort,
}

impl Wish {
    const ALL: [Self; 3] = [Self::GoOn, Self::Drain, Self::Abort];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::GoOn => "go-on",
            Self::Drain => "drain",
            Self::Abort => "abort",
        }
    }
}

/// One cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) side: Side,
    pub(crate) ours: Ours,
    pub(crate) event: Event,
    pub(crate) wish: Wish,
    /// Both ranks were started by `pp`, which is whom the wishes go to.
    pub(crate) supervised: bool,
}

impl Cell {
    /// All of them; those that cannot be on this ground as well, which then say why.
    pub(crate) fn all(ground: Ground) -> Vec<Self> {
        let mut cells = Vec::new();
        for side in Side::ALL {
            for ours in Ours::ALL {
                if ours == Ours::Connect && ground.is_host() {
                    continue;
                }
                for wish in Wish::ALL {
                    for event in Event::ALL {
                        cells.push(Self {
                            side,
                            ours,
                            event,
                            wish,
                            supervised: false,
                        });
                    }
                }
            }
        }
        // Whoever only goes on while the peer works on does not end.
        cells.retain(|cell| cell.wish != Wish::GoOn || cell.event != Event::Computing);
        cells.extend(Self::supervised(ground));
        cells
    }

    /// Whether Phase B is started again, and the job goes on.
    pub(crate) fn restarts(self) -> bool {
        self.supervised && self.ours == Ours::Connect
    }

    /// The supervisor's own path: a few.
    fn supervised(ground: Ground) -> Vec<Self> {
        let events = [
            (Event::Computing, Wish::Drain),
            (Event::Computing, Wish::Abort),
            (Event::Killed, Wish::GoOn),
            (Event::Killed, Wish::Drain),
            (Event::Stopped, Wish::GoOn),
            (Event::Stopped, Wish::Drain),
            (Event::Stopped, Wish::Abort),
        ];
        let cell = |side, ours, event, wish| Self {
            side,
            ours,
            event,
            wish,
            supervised: true,
        };
        let queued = |side| events.map(|(event, wish)| cell(side, Ours::Queued, event, wish));
        let mut cells: Vec<Self> = Side::ALL.into_iter().flat_map(queued).collect();
        if !ground.is_host() {
            cells.push(cell(Side::Front, Ours::Connect, Event::Killed, Wish::GoOn));
        }
        cells
    }

    /// Why it cannot be run on this ground, if so.
    pub(crate) fn impossible(self, ground: Ground) -> Option<&'static str> {
        (self.event == Event::Cut && ground.is_host())
            .then_some("the ranks share memory on one host: there is no network between them")
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.supervised { "supervised-" } else { "" };
        write!(
            f,
            "{how}{}/{}/{}/{}",
            self.side.name(),
            self.ours.name(),
            self.event.name(),
            self.wish.name()
        )
    }
}
