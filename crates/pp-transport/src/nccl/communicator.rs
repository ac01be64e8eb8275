//! The communicator of a group of ranks.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use pp_contract::{Generation, Rank};

use super::calls::Comm;
use super::connect::{self, Stop};
use super::edge::check_queues;
use super::id::UniqueId;
use super::issuer::{Issuer, Patience, Tenant};
use super::life::{AbortHandle, How, Life};
use crate::edge::GroupEnd;
use crate::error::TransportError;
use crate::flight::{FlightRecorder, GroupLog, Record, State};
use crate::gpu::{EdgesLife as _, Remains, lock};
use crate::group::Members;
use pp_device::{Device, DeviceBuffer};

/// What a communicator is made of. All members give the same, but for `me` and `issuer`.
#[derive(Debug)]
pub struct CommOptions<'a> {
    /// Who issues on this rank's device.
    pub issuer: Issuer,
    /// Name of the group, for errors and recordings.
    pub name: &'a str,
    /// Its members, in the same order everywhere.
    pub members: Vec<Rank>,
    /// This rank.
    pub me: Rank,
    /// Made by one member for all.
    pub id: UniqueId,
    /// That of a second communicator, for gathers: what comes behind a gather on another stream does not wait for it.
    pub gathers: Option<UniqueId>,
    /// When to give up.
    pub deadline: Instant,
    /// As in [`NcclOptions`](super::NcclOptions).
    pub blocking: bool,
}

/// The communicator of a group of ranks.
///
/// # If dropped
/// Ends on a thread of its own: in order when nothing is in flight, else by an abort. Waits for
/// that, 3 seconds at most.
#[derive(Debug)]
pub struct Communicator {
    pub(super) life: Arc<Life>,
    pub(super) comm: Comm,
    /// That of the gathers, which may be the same.
    pub(super) gathers: Comm,
    pub(super) members: Members,
    pub(super) flights: Arc<Flights>,
    pub(super) log: GroupLog,
    /// `None` once it has ended.
    pub(super) last: Option<Last>,
    /// Makes it `!Sync`.
    _tenant: Tenant,
}

/// The collectives on memory that the caller keeps.
#[derive(Debug)]
pub(super) struct Last {
    /// A byte on the device. What was issued last counts as a use of it.
    pub(super) word: DeviceBuffer,
    /// Of those that may be under way.
    pub(super) records: VecDeque<Record>,
}

/// What is in flight, for all operations of a communicator.
#[derive(Debug, Default)]
pub(super) struct Flights {
    /// Operations whose buffers are not back with their owners.
    count: AtomicUsize,
    /// Buffers that no handle waits for any more.
    orphans: Mutex<Vec<DeviceBuffer>>,
}

impl Flights {
    /// An operation is over, and its buffer is its owner's again.
    pub(super) fn end(&self) {
        self.count.fetch_sub(1, Ordering::AcqRel);
    }

    /// Keeps the buffer of an operation that no handle waits for, until it is over.
    pub(super) fn adopt(&self, buffer: DeviceBuffer) {
        lock(&self.orphans).push(buffer);
    }

    /// Frees the orphans whose operations are over.
    pub(super) fn sweep(&self) {
        lock(&self.orphans).retain(|buffer| {
            let over = matches!(buffer.is_idle(), Ok(true));
            if over {
                self.end();
            }
            !over
        });
    }
}

impl Communicator {
    /// Joins the group and moves a byte between all members, so that no first use is left for
    /// later; every member does the same at the same time.
    ///
    /// # Errors
    /// [`TransportError::NotInTime`] when a member did not come by the deadline: a thread that waits
    /// inside NCCL is left behind then. This rank is no member, or one is twice; NCCL refuses.
    pub fn connect(options: CommOptions<'_>) -> Result<Self, TransportError> {
        let patience = Patience::until(options.deadline);
        Self::connect_with(options, &patience)
    }

    /// As [`Communicator::connect`], for as long as there is patience.
    pub(super) fn connect_with(
        options: CommOptions<'_>,
        patience: &Patience<'_>,
    ) -> Result<Self, TransportError> {
        let CommOptions { name, blocking, .. } = options;
        let ids: Vec<UniqueId> = [options.id].into_iter().chain(options.gathers).collect();
        let members = Members::new(name, &options.members, options.me)?;
        check_queues();
        let (place, ranks) = (members.own_place() as u32, members.ranks().len() as u32);
        let tenant = Tenant::new(&options.issuer);
        let what = format!("group {name}");
        let made = connect::by(&options.issuer, what, patience, move |life, progress| {
            progress.at("create the communicator")?;
            life.core.device.bind()?;
            let comms = connect::join(life, &ids, (place, ranks), blocking)?;
            for comm in &comms {
                connect::all_pairs(life, progress, *comm, place, ranks)?;
            }
            let word = DeviceBuffer::new(&life.core.device, 1)?;
            let gathers = comms.last().copied().ok_or(Stop::GivenUp)?;
            Ok((comms[0], gathers, word))
        });
        let (life, (comm, gathers, word)) = made?;
        Ok(Self {
            comm,
            gathers,
            life,
            members,
            flights: Arc::default(),
            log: GroupLog::new(&FlightRecorder::off(), "", &[], Generation::new(0)),
            last: Some(Last {
                word,
                records: VecDeque::new(),
            }),
            _tenant: tenant,
        })
    }

    /// Who the members are.
    #[must_use]
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// This rank's device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.life.core.device
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.members.name()
    }

    /// Records from now on what this group does. All members begin at the same operation.
    pub fn record(&mut self, recorder: &FlightRecorder, generation: Generation) {
        let (name, ranks) = (self.members.name(), self.members.ranks());
        self.log = GroupLog::new(recorder, name, ranks, generation);
    }

    /// What gives this communicator up, from any thread.
    #[must_use]
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle(Arc::clone(&self.life))
    }

    /// Ends the communicator as a drop does, with a bound of the caller's.
    ///
    /// # Errors
    /// It did not end by the deadline, or not as it should.
    pub fn close(mut self, deadline: Instant) -> Result<(), TransportError> {
        self.end(deadline)
    }

    /// Counts one operation more in flight.
    pub(super) fn begin_flight(&self) -> Arc<Flights> {
        self.flights.count.fetch_add(1, Ordering::AcqRel);
        Arc::clone(&self.flights)
    }

    /// The place of a member.
    pub(super) fn place_of(&self, rank: Rank) -> Result<u32, TransportError> {
        self.members.place_of(rank).map(|place| place as u32)
    }

    /// The place of another member.
    pub(super) fn other(&self, rank: Rank) -> Result<u32, TransportError> {
        let (place, _) = self.members.other_at(self.place_of(rank)?)?;
        Ok(place as u32)
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
        self.flights.sweep();
        let in_flight = self.flights.count.load(Ordering::Acquire) > 0;
        let is_over = !in_flight && !self.life.is_dead() && matches!(word.is_idle(), Ok(true));
        let state = if is_over {
            State::Done
        } else {
            State::Poisoned
        };
        records.iter().for_each(|record| record.end(state));
        self.life.bury(Remains {
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

    /// NCCL ends a communicator in order together with the other members, and waits for them.
    fn peer_is_gone(&mut self) {
        self.life.kill("a member is gone");
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if let Err(error) = self.end(Instant::now() + crate::times::ENDED_WITHIN) {
            tracing::warn!(%error, "a group did not end as it should");
        }
    }
}
