//! One action of a training schedule, in PyTorch's notation.

use std::fmt;

/// Which way something moves between two stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Way {
    /// An activation, to the next stage.
    Forward,
    /// A gradient, to the stage before.
    Backward,
}

/// Names the kind of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Op {
    /// `F`: the forward of a microbatch.
    Forward,
    /// `I`: its backward for the input, which gives the gradient for the stage before.
    BackwardInput,
    /// `W`: its backward for the weights. Nobody waits for it.
    BackwardWeight,
    /// `B`: both backwards as one.
    Backward,
    /// `SEND_F`, `SEND_B`: sends what the stage made.
    Send(Way),
    /// `RECV_F`, `RECV_B`: receives what the stage needs.
    Receive(Way),
    /// `WAIT_SEND_F`, `WAIT_SEND_B`: waits until a send is done, so that its memory is free.
    WaitSend(Way),
    /// `UNSHARD`: gathers the weights of the stage (FSDP).
    Unshard,
    /// `RESHARD`: drops the weights that were gathered.
    Reshard,
    /// `REDUCE_GRAD`: adds up the gradients of the data-parallel copies of the stage.
    ReduceGrad,
    /// `WAIT_REDUCE_GRAD`: waits until that is done.
    WaitReduceGrad,
}

impl Op {
    /// As PyTorch writes it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "F",
            Self::BackwardInput => "I",
            Self::BackwardWeight => "W",
            Self::Backward => "B",
            Self::Send(Way::Forward) => "SEND_F",
            Self::Send(Way::Backward) => "SEND_B",
            Self::Receive(Way::Forward) => "RECV_F",
            Self::Receive(Way::Backward) => "RECV_B",
            Self::WaitSend(Way::Forward) => "WAIT_SEND_F",
            Self::WaitSend(Way::Backward) => "WAIT_SEND_B",
            Self::Unshard => "UNSHARD",
            Self::Reshard => "RESHARD",
            Self::ReduceGrad => "REDUCE_GRAD",
            Self::WaitReduceGrad => "WAIT_REDUCE_GRAD",
        }
    }

    /// The action with this name.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let both = [Way::Forward, Way::Backward];
        let moves = [Self::Send, Self::Receive, Self::WaitSend];
        let moves = moves.into_iter().flat_map(|op| both.map(op));
        let others = [
            Self::Forward,
            Self::BackwardInput,
            Self::BackwardWeight,
            Self::Backward,
            Self::Unshard,
            Self::Reshard,
            Self::ReduceGrad,
            Self::WaitReduceGrad,
        ];
        let mut all = others.into_iter().chain(moves);
        all.find(|op| op.name() == name)
    }

    /// Says whether it is about a whole stage and names no microbatch.
    #[must_use]
    pub const fn is_of_stage(self) -> bool {
        matches!(
            self,
            Self::Unshard | Self::Reshard | Self::ReduceGrad | Self::WaitReduceGrad
        )
    }

    /// Says whether it computes: `F`, `I`, `W` or `B`.
    #[must_use]
    pub const fn is_compute(self) -> bool {
        matches!(
            self,
            Self::Forward | Self::BackwardInput | Self::BackwardWeight | Self::Backward
        )
    }
}

/// One action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// The stage that acts. A send names the sender's stage, a receive the receiver's.
    pub stage: u32,
    /// What it does.
    pub op: Op,
    /// The microbatch; 0 where the action is about the whole stage.
    pub microbatch: u32,
}

impl Action {
    /// An action.
    #[must_use]
    pub const fn new(stage: u32, op: Op, microbatch: u32) -> Self {
        Self {
            stage,
            op,
            microbatch,
        }
    }

    /// The microbatch; `None` where the action is about the whole stage.
    pub(crate) fn numbered(self) -> Option<u32> {
        (!self.op.is_of_stage()).then_some(self.microbatch)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.stage, self.op.name())?;
        match self.op.is_of_stage() {
            true => Ok(()),
            false => write!(f, "{}", self.microbatch),
        }
    }
}

/// What a rank does at once: one action, or a forward and a backward of two stages as one (`OVERLAP_F_B`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// One action.
    One(Action),
    /// A forward and a backward that begin and end together.
    Overlapped {
        /// The forward.
        forward: Action,
        /// The backward.
        backward: Action,
    },
}

impl Step {
    /// A single action.
    pub(super) const fn one(stage: u32, op: Op, microbatch: u32) -> Self {
        Self::One(Action::new(stage, op, microbatch))
    }

    /// Its actions, the forward first.
    pub fn actions(&self) -> impl Iterator<Item = Action> + use<> {
        let (first, second) = match *self {
            Self::One(action) => (action, None),
            Self::Overlapped { forward, backward } => (forward, Some(backward)),
        };
        std::iter::once(first).chain(second)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(action) => action.fmt(f),
            Self::Overlapped { forward, backward } => {
                write!(f, "({forward};{backward})OVERLAP_F_B")
            }
        }
    }
}
