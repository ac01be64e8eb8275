//! The calls of a group's members: as numbers, which the members compare, and in words.

use pp_contract::DType;

use crate::flight;
use crate::group::Members;
use pp_words::group::{Call, Side, Waiting};

/// A collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Barrier = 1,
    Broadcast = 2,
    Scatter = 3,
    Gather = 4,
    AllReduce = 5,
}

const KINDS: [Kind; 5] = [
    Kind::Barrier,
    Kind::Broadcast,
    Kind::Scatter,
    Kind::Gather,
    Kind::AllReduce,
];
const DTYPES: [DType; 6] = [
    DType::U8,
    DType::I32,
    DType::I64,
    DType::Bf16,
    DType::F16,
    DType::F32,
];

impl Kind {
    /// Returns the kind that the flight recorder uses.
    pub(super) fn recorded(self) -> flight::Kind {
        match self {
            Self::Barrier => flight::Kind::Barrier,
            Self::Broadcast => flight::Kind::Broadcast,
            Self::Scatter => flight::Kind::Scatter,
            Self::Gather => flight::Kind::Gather,
            Self::AllReduce => flight::Kind::AllReduce,
        }
    }

    /// Encodes the call in numbers, with the place of the root if there is one.
    pub(super) fn call(self, root: u32, dtype: DType, bytes: u64, parts: &[u64]) -> Call {
        let what = self as u64 | (dtype as u64) << 8 | u64::from(root) << 32;
        // FNV-1a.
        let digest = parts
            .iter()
            .fold(0xcbf2_9ce4_8422_2325_u64, |digest, part| {
                (digest ^ part).wrapping_mul(0x0100_0000_01b3)
            });
        Call {
            what,
            bytes,
            digest,
        }
    }
}

/// Describes the call in which a member waits. The numbers come from any member, and may be anything.
pub(super) fn in_words(waiting: Waiting, members: &Members) -> String {
    let call = match waiting {
        Waiting::Collective(call) => call,
        Waiting::Transfer { side, other, bytes } => {
            let rank = rank_at(members, other);
            return match side {
                Side::Sender => format!("a send of {bytes} bytes to {rank}"),
                Side::Receiver => format!("a receive of {bytes} bytes from {rank}"),
            };
        }
    };
    let kind = KINDS
        .into_iter()
        .find(|kind| *kind as u64 == call.what & 0xff);
    let is_dtype = |dtype: &DType| *dtype as u64 == call.what >> 8 & 0xff;
    let (Some(kind), Some(dtype)) = (kind, DTYPES.into_iter().find(is_dtype)) else {
        return format!("no call that there is ({:#x})", call.what);
    };
    let (bytes, root) = (call.bytes, rank_at(members, (call.what >> 32) as usize));
    match kind {
        Kind::Barrier => "a barrier".into(),
        Kind::Broadcast => format!("a broadcast of {bytes} bytes from {root}"),
        Kind::Scatter => format!("a scatter of {bytes} bytes from {root}"),
        Kind::Gather => format!("a gather of {bytes} bytes to {root}"),
        Kind::AllReduce => format!("an all-reduce of {bytes} bytes of {dtype}"),
    }
}

pub(super) fn rank_at(members: &Members, place: usize) -> String {
    match members.ranks().get(place) {
        Some(rank) => format!("rank {rank}"),
        None => format!("no member (place {place})"),
    }
}
