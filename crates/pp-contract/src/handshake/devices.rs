//! Which rank runs on which device, and whether that can work.

use core::fmt;

use super::{Hello, HelloParts};
use crate::bounded::Text;
use crate::ids::Rank;

/// The ranks of a job, each with its host and its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceMap(Vec<(Rank, Text<128>, Option<Text<64>>)>);

impl DeviceMap {
    /// Rank, host and device (`None` for host memory), in order of the ranks.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (Rank, &str, Option<&str>)> {
        self.0
            .iter()
            .map(|(rank, host, device)| (*rank, host.as_str(), device.as_deref()))
    }
}

/// On one line: `rank 0: host memory on a; rank 1: GPU-… on a`.
impl fmt::Display for DeviceMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (rank, host, device)) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            match device {
                Some(device) => write!(f, "{separator}rank {rank}: {device} on {host}")?,
                None => write!(f, "{separator}rank {rank}: host memory on {host}")?,
            }
        }
        Ok(())
    }
}

/// Ranks on devices on which they cannot be, with the map of all of them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{clash} (devices: {map})")]
pub struct DeviceConflict {
    /// What is wrong.
    pub clash: DeviceClash,
    /// All ranks.
    pub map: DeviceMap,
}

/// What is wrong with the devices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceClash {
    /// Two ranks on one device, which was not named for each of them.
    #[error(
        "ranks {first} and {second} are both on {device}; check CUDA_VISIBLE_DEVICES, or name the GPU for each of them with \
         --devices"
    )]
    Shared {
        /// UUID of the device.
        device: Text<64>,
        /// One rank.
        first: Rank,
        /// The other rank.
        second: Rank,
    },
    /// A rank is not on the device that it was given.
    #[error("rank {rank} was given {given} and is on {got}; check CUDA_VISIBLE_DEVICES")]
    NotAsGiven {
        /// The rank.
        rank: Rank,
        /// UUID of the device that it was given.
        given: Text<64>,
        /// What it is on.
        got: Text<64>,
    },
    /// Two processes say that they are this rank.
    #[error("two processes say that they are rank {rank}; check RANK")]
    RankTwice {
        /// The rank.
        rank: Rank,
    },
}

/// Checks that every rank is there once and that no two share a device that was not named for each of them, and gives the map.
///
/// # Errors
/// [`DeviceConflict`] with the map of all ranks to devices.
pub fn check_devices(hellos: &[Hello]) -> Result<DeviceMap, DeviceConflict> {
    let mut all: Vec<&Hello> = hellos.iter().collect();
    all.sort_by_key(|hello| hello.rank());
    let place = |hello: &&Hello| {
        let parts = hello.parts();
        (parts.rank, parts.host.clone(), parts.device.clone())
    };
    let map = DeviceMap(all.iter().map(place).collect());
    match find_clash(&all) {
        None => Ok(map),
        Some(clash) => Err(DeviceConflict { clash, map }),
    }
}

fn find_clash(by_rank: &[&Hello]) -> Option<DeviceClash> {
    for (index, hello) in by_rank.iter().enumerate() {
        let (rank, parts) = (hello.rank(), hello.parts());
        let others = &by_rank[..index];
        if others.iter().any(|other| other.rank() == rank) {
            return Some(DeviceClash::RankTwice { rank });
        }
        if let Some(given) = &parts.device_given
            && parts.device.as_ref() != Some(given)
        {
            let host_memory = || Text::truncated("host memory");
            return Some(DeviceClash::NotAsGiven {
                rank,
                given: given.clone(),
                got: parts.device.clone().unwrap_or_else(host_memory),
            });
        }
        if let Some(device) = &parts.device
            && let Some(other) = others.iter().find(|other| is_mistake(other.parts(), parts))
        {
            return Some(DeviceClash::Shared {
                device: device.clone(),
                first: other.rank(),
                second: rank,
            });
        }
    }
    None
}

/// Says whether two ranks share a device that was not named for both.
fn is_mistake(one: &HelloParts, other: &HelloParts) -> bool {
    one.device == other.device && !(one.device_named && other.device_named)
}
