//! The communicator of a group of ranks.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use pp_contract::{Generation, Rank};

use super::calls::Comm;
use super::connect;
use super::id::UniqueId;
use super::issuer::{Issuer, Patience, Tenant};
use super::life::{AbortHandle, How, Life, lock};
use crate::error::TransportError;
use crate::flight::{FlightRecorder, GroupLog};
use pp_device::DeviceBuffer;

/// What a communicator is made of. All members give the same, but for `me` and `issuer`.
#[derive(Debug)]
pub struct CommOptions {
    /// Who issues on this rank's device.
    pub issuer: Issuer,
    /// Name of the group: `mesh`.
    pub name: &'static str,
    /// Its members, in the same order everywhere.
    pub members: Vec<Rank>,
    /// This rank.
    pub me: Rank,
    /// Made by one member for all.
    pub id: UniqueId,
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
    name: &'static str,
    pub(super) members: Vec<Rank>,
    me: Rank,
    pub(super) flights: Arc<Flights>,
    pub(super) log: GroupLog,
    is_closed: bool,
    /// Makes it `!Sync`.
    _tenant: Tenant,
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
    pub fn connect(options: CommOptions) -> Result<Self, TransportError> {
        let CommOptions {
            name,
            id,
            me,
            blocking,
            ..
        } = options;
        let place = place_of(name, &options.members, me)?;
        check_once_each(name, &options.members)?;
        let ranks = options.members.len() as u32;
        let tenant = Tenant::new(&options.issuer);
        let (what, patience) = (format!("group {name}"), Patience::until(options.deadline));
        let made = connect::by(&options.issuer, what, &patience, move |life, progress| {
            progress.at("create the communicator")?;
            life.core.device.bind()?;
            let comm = connect::join_one(life, id, (place, ranks), blocking)?;
            connect::all_pairs(life, progress, comm, place, ranks)?;
            Ok(comm)
        });
        let (life, comm) = made?;
        Ok(Self {
            comm,
            life,
            name,
            members: options.members,
            me,
            flights: Arc::default(),
            log: GroupLog::new(&FlightRecorder::off(), "", &[], Generation::new(0)),
            is_closed: false,
            _tenant: tenant,
        })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Records from now on what this group does. All members begin at the same operation.
    pub fn record(&mut self, recorder: &FlightRecorder, generation: Generation) {
        self.log = GroupLog::new(recorder, self.name, &self.members, generation);
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
        self.is_closed = true;
        self.end(deadline)
    }

    /// Counts one operation more in flight.
    pub(super) fn begin_flight(&self) -> Arc<Flights> {
        self.flights.count.fetch_add(1, Ordering::AcqRel);
        Arc::clone(&self.flights)
    }

    /// The place of a member.
    pub(super) fn place_of(&self, rank: Rank) -> Result<u32, TransportError> {
        place_of(self.name, &self.members, rank)
    }

    /// The place of another member.
    pub(super) fn other(&self, rank: Rank) -> Result<u32, TransportError> {
        if rank == self.me {
            return Err(TransportError::WrongGroup {
                group: self.name,
                why: format!("rank {rank} is this rank"),
            });
        }
        self.place_of(rank)
    }

    pub(super) fn check_device(&self, ordinal: u32, what: &str) -> Result<(), TransportError> {
        let own = self.life.core.device.about().ordinal;
        if ordinal == own {
            return Ok(());
        }
        Err(TransportError::WrongGroup {
            group: self.name,
            why: format!("{what} of device {ordinal}; it issues on device {own}"),
        })
    }

    fn end(&self, deadline: Instant) -> Result<(), TransportError> {
        self.flights.sweep();
        if self.life.is_dead() || self.flights.count.load(Ordering::Acquire) > 0 {
            self.life.kill("it was dropped with operations in flight");
            return self.life.finish(How::Abort, deadline);
        }
        self.life.finish(How::Destroy, deadline)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.is_closed {
            return;
        }
        if let Err(error) = self.end(Instant::now() + crate::times::ENDED_WITHIN) {
            tracing::warn!(%error, "a group did not end as it should");
        }
    }
}

/// A rank that stands twice in a group would have to be in two places.
fn check_once_each(group: &'static str, members: &[Rank]) -> Result<(), TransportError> {
    let mut places = members.iter().enumerate();
    match places.find(|(place, rank)| members[..*place].contains(rank)) {
        None => Ok(()),
        Some((_, rank)) => Err(TransportError::WrongGroup {
            group,
            why: format!("rank {rank} is a member twice"),
        }),
    }
}

fn place_of(group: &'static str, members: &[Rank], rank: Rank) -> Result<u32, TransportError> {
    let place = members.iter().position(|member| *member == rank);
    place.map(|place| place as u32).ok_or_else(|| {
        let all: Vec<String> = members.iter().map(ToString::to_string).collect();
        TransportError::WrongGroup {
            group,
            why: format!(
                "rank {rank} is none of its members, ranks {}",
                all.join(", ")
            ),
        }
    })
}
