//! The communicator of a group of ranks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::calls::Comm;
use super::connect::{self, Stop};
use super::edge::check_queues;
use super::id::UniqueId;
use super::issuer::{ConnectWait, Issuer, IssuerUser};
use super::life::{How, Life};
use crate::gpu::{EdgesLife as _, PendingFree, abort_of};
use pp_device::{Device, DeviceBuffer};
use pp_edges::backend::{Abort, are_ends_left_to_process};
use pp_edges::edge::GroupEnd;
use pp_edges::error::TransportError;
use pp_edges::flight::{GroupLog, Record, State};
use pp_edges::group::Members;

/// The communicator of a group of ranks.
///
/// # If dropped
/// Ends on a thread of its own: in order if nothing is in flight, else by an abort. The drop waits for that for at most
/// 3 seconds.
#[derive(Debug)]
pub struct Communicator {
    pub(super) life: Arc<Life>,
    pub(super) comm: Comm,
    /// The communicator of the gathers. Work on another stream does not wait for a gather on this one.
    pub(super) gathers: Comm,
    pub(super) members: Members,
    pub(super) log: GroupLog,
    /// `None` once it has ended.
    pub(super) last: Option<Last>,
    /// Makes it `!Sync`.
    _user: IssuerUser,
}

/// The record of collectives on memory that the caller keeps.
#[derive(Debug)]
pub(super) struct Last {
    /// A byte on the device. The last issued operation counts as a use of it.
    pub(super) word: DeviceBuffer,
    /// The records of operations that may be in progress.
    pub(super) records: VecDeque<Record>,
}

impl Communicator {
    /// Joins the group and moves a byte between all members, so that no first use is left for later. Every member does
    /// the same at the same time. The members have agreed on both ids for this group.
    ///
    /// # Errors
    /// [`TransportError::NotInTime`] if a member did not come by the deadline, or the group is not wanted any more; a
    /// thread that waits inside NCCL is then left behind. NCCL refuses.
    pub(super) fn connect(
        issuer: &Issuer,
        (members, ids): (Members, [UniqueId; 2]),
        blocking: bool,
        wait: &ConnectWait<'_>,
        log: GroupLog,
    ) -> Result<Self, TransportError> {
        check_queues();
        let (place, ranks) = (members.own_place() as u32, members.ranks().len() as u32);
        let user = IssuerUser::new(issuer);
        let what = format!("group {}", members.name());
        let made = connect::by(issuer, what, wait, move |life, progress| {
            progress.at("create the communicator")?;
            life.core.device.bind()?;
            let comms = connect::join(life, &ids, (place, ranks), blocking)?;
            for comm in &comms {
                connect::all_pairs(life, progress, *comm, place, ranks)?;
            }
            let word = DeviceBuffer::new(&life.core.device, 1)?;
            let [comm, gathers] = comms[..] else {
                return Err(Stop::GivenUp);
            };
            Ok((comm, gathers, word))
        });
        let (life, (comm, gathers, word)) = made?;
        Ok(Self {
            comm,
            gathers,
            life,
            members,
            log,
            last: Some(Last {
                word,
                records: VecDeque::new(),
            }),
            _user: user,
        })
    }

    /// Returns the members of the group.
    #[must_use]
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// Returns this rank's device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.life.core.device
    }

    /// Returns the name of the group.
    #[must_use]
    pub fn name(&self) -> &str {
        self.members.name()
    }

    pub(super) fn abort(&self) -> Abort {
        abort_of(Arc::clone(&self.life) as _)
    }

    pub(super) fn check_device(&self, ordinal: u32, what: &str) -> Result<(), TransportError> {
        let own = self.life.core.device.about().ordinal;
        if ordinal == own {
            return Ok(());
        }
        let why = format!("{what} of device {ordinal}; it issues on device {own}");
        Err(self.members.wrong(why))
    }

    fn end(&mut self, deadline: Instant) -> Result<(), TransportError> {
        let Some(Last { word, records }) = self.last.take() else {
            return Ok(());
        };
        let is_over = !self.life.is_dead() && matches!(word.is_idle(), Ok(true));
        let state = if is_over {
            State::Done
        } else {
            State::Poisoned
        };
        records.iter().for_each(|record| record.end(state));
        self.life.free_later(PendingFree {
            buffer: word,
            events: Vec::new(),
            stream: None,
        });
        if !is_over {
            self.life.kill("it was dropped with operations in flight");
            return self.life.finish(How::Abort, deadline);
        }
        self.life.finish(How::Destroy, deadline)
    }
}

impl GroupEnd for Communicator {
    fn look(&self) -> Result<(), TransportError> {
        self.life.poll()
    }

    /// Aborts the communicator: NCCL can end it in order only together with the other members, and would wait for them.
    fn peer_is_gone(&mut self) {
        self.life.kill("a member is gone");
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if let Err(error) = self.end(Instant::now() + crate::times::ENDED_WITHIN)
            && !are_ends_left_to_process()
        {
            tracing::warn!(%error, "a group did not end as it should");
        }
    }
}
