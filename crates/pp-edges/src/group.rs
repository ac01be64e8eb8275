//! The members of a group: ranks that run a stage together.

use std::fmt;
use std::sync::Arc;

use pp_contract::pipeline::MAX_RANKS;
use pp_contract::{DType, Rank};

use crate::error::TransportError;

/// A group as one of its members sees it. All members have the same name and the same ranks in the same order. An
/// operation names a rank by its place in that order. The first rank is the leader.
#[derive(Clone, Debug)]
pub struct Members {
    name: Arc<str>,
    ranks: Arc<[Rank]>,
    own: usize,
}

impl Members {
    /// Returns the group with this name and these ranks, of which `own` is this rank.
    ///
    /// # Errors
    /// This rank is no member, a rank is a member twice, or there are too many ranks.
    pub fn new(name: &str, ranks: &[Rank], own: Rank) -> Result<Self, TransportError> {
        let mut members = Self {
            name: name.into(),
            ranks: ranks.into(),
            own: 0,
        };
        members.own = members.place_of(own)?;
        // A rank that is listed twice would have two places.
        let mut places = ranks.iter().enumerate();
        if let Some((_, rank)) = places.find(|(place, rank)| ranks[..*place].contains(rank)) {
            return Err(members.wrong(format!("rank {rank} is a member twice")));
        }
        if ranks.len() > MAX_RANKS as usize {
            let why = format!("{} members are over the bound of {MAX_RANKS}", ranks.len());
            return Err(members.wrong(why));
        }
        Ok(members)
    }

    /// Returns the name of the group.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns all ranks, in the order of their places.
    #[must_use]
    pub fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// Returns the place of this rank.
    #[must_use]
    pub fn own_place(&self) -> usize {
        self.own
    }

    /// Returns this rank.
    #[must_use]
    pub fn own(&self) -> Rank {
        self.ranks[self.own]
    }

    /// Tells whether this rank is the leader.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.own == 0
    }

    /// Returns the leader.
    #[must_use]
    pub fn leader(&self) -> Rank {
        self.ranks[0]
    }

    fn place_of(&self, rank: Rank) -> Result<usize, TransportError> {
        let place = self.ranks.iter().position(|member| *member == rank);
        place.ok_or_else(|| {
            let all: Vec<String> = self.ranks.iter().map(ToString::to_string).collect();
            let all = all.join(", ");
            self.wrong(format!("rank {rank} is none of its members, ranks {all}"))
        })
    }

    /// Returns the rank at a place that an operation names.
    pub fn at(&self, place: u32) -> Result<(usize, Rank), TransportError> {
        let rank = self.ranks.get(place as usize).copied();
        rank.map(|rank| (place as usize, rank)).ok_or_else(|| {
            let count = self.ranks.len();
            self.wrong(format!("there is no member {place}; it has {count}"))
        })
    }

    /// Returns the rank at a place, which may not be this rank's own.
    pub fn other_at(&self, place: u32) -> Result<(usize, Rank), TransportError> {
        let (place, rank) = self.at(place)?;
        if place == self.own {
            return Err(self.wrong(format!("rank {rank} is this rank")));
        }
        Ok((place, rank))
    }

    /// Returns the offset at which this member's part begins and the end of the last part. The parts lie one behind the
    /// other.
    fn starts(&self, parts: &[u64]) -> Result<(u64, u64), TransportError> {
        if parts.len() != self.ranks.len() {
            let (count, members) = (parts.len(), self.ranks.len());
            return Err(self.wrong(format!("{count} parts for {members} members")));
        }
        let sum = |parts: &[u64]| {
            parts
                .iter()
                .try_fold(0_u64, |sum, part| sum.checked_add(*part))
        };
        let too_large = || self.wrong("the parts together are over the address space".into());
        let total = sum(parts).filter(|total| isize::try_from(*total).is_ok());
        let total = total.ok_or_else(too_large)?;
        Ok((sum(&parts[..self.own]).unwrap_or(total), total))
    }

    /// Returns the place and rank of the root of a call with these parts, the offset of this member's part, and the end
    /// of the last part. Each member has a buffer `one` for its part, and the root a buffer `all`: each is given by its
    /// name and its length.
    pub fn shares(
        &self,
        root: u32,
        parts: &[u64],
        one: (&str, usize),
        all: (&str, usize),
    ) -> Result<((usize, Rank), u64, u64), TransportError> {
        let root = self.at(root)?;
        let (start, total) = self.starts(parts)?;
        self.check_length(one, parts[self.own])?;
        if root.0 == self.own {
            self.check_length(all, total)?;
        }
        Ok((root, start, total))
    }

    /// Checks that elements of this type can be summed, and that `bytes` is a whole number of them.
    pub fn check_sum(&self, dtype: DType, bytes: u64) -> Result<(), TransportError> {
        if !dtype.is_summed() {
            let sums = "i32, i64, bf16, f16 or f32";
            let why = format!("elements of type {dtype} are not summed; use {sums}");
            return Err(self.wrong(why));
        }
        if !bytes.is_multiple_of(dtype.size_bytes()) {
            let why = format!("{bytes} bytes are no whole number of elements of type {dtype}");
            return Err(self.wrong(why));
        }
        Ok(())
    }

    /// Checks that the length of a range matches the parts of a call.
    fn check_length(
        &self,
        (what, found): (&str, usize),
        wanted: u64,
    ) -> Result<(), TransportError> {
        if found as u64 == wanted {
            return Ok(());
        }
        let why = format!("{what} has {found} bytes where the parts say {wanted}");
        Err(self.wrong(why))
    }

    /// Returns an error of the caller of a collective.
    pub fn wrong(&self, why: String) -> TransportError {
        TransportError::WrongGroup {
            group: self.name.to_string(),
            why,
        }
    }
}

/// Formats the group as it is written in a pipeline: `phase_b of ranks 0+1`.
impl fmt::Display for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks: Vec<String> = self.ranks.iter().map(ToString::to_string).collect();
        write!(f, "{} of ranks {}", self.name, ranks.join("+"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(ranks: &[u32], own: u32) -> Result<Members, String> {
        let ranks: Vec<Rank> = ranks.iter().copied().map(Rank::new).collect();
        Members::new("pair", &ranks, Rank::new(own)).map_err(|e| e.to_string())
    }

    #[test]
    fn members_know_their_places_and_strangers_are_refused() {
        let members = of(&[4, 2], 2).unwrap();
        assert_eq!((members.own_place(), members.leader()), (1, Rank::new(4)));
        assert!(!members.is_leader());
        assert_eq!(members.to_string(), "pair of ranks 4+2");
        assert_eq!(members.other_at(0).unwrap(), (0, Rank::new(4)));
        let error = |result: Result<(usize, Rank), TransportError>| result.unwrap_err().to_string();
        assert!(error(members.other_at(1)).contains("rank 2 is this rank"));
        assert!(error(members.at(2)).contains("no member 2; it has 2"));
        let error = of(&[4, 2], 1).unwrap_err();
        assert!(
            error.contains("rank 1 is none of its members, ranks 4, 2"),
            "{error}"
        );
        let error = of(&[4, 2, 4], 2).unwrap_err();
        assert!(error.contains("rank 4 is a member twice"), "{error}");
        assert!(of(&[], 0).is_err());
        let many: Vec<u32> = (0..=MAX_RANKS).collect();
        assert!(of(&many, 0).unwrap_err().contains("over the bound"));
    }

    #[test]
    fn parts_lie_one_behind_the_other() {
        let members = of(&[4, 2], 2).unwrap();
        assert_eq!(members.starts(&[3, 0]).unwrap(), (3, 3));
        assert_eq!(members.starts(&[3, 9]).unwrap(), (3, 12));
        assert!(members.starts(&[3]).is_err());
        assert!(members.starts(&[u64::MAX, 1]).is_err());
        assert!(members.starts(&[1 << 63, 1]).is_err());
        assert!(members.check_sum(DType::Bf16, 6).is_ok());
        assert!(members.check_sum(DType::F32, 6).is_err());
        for never in [DType::U8, DType::Bool, DType::F64, DType::F8E5m2] {
            assert!(members.check_sum(never, 8).is_err());
        }
    }
}
