//! Rank 0: listening until the other ranks have joined. Or a rank that awaits one it was introduced to.

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pp_contract::{Fault, Rank, WorldSize};
use rustix::event::{PollFd, PollFlags};

use super::error::{RendezvousError, TurnedAway, list};
use super::listen::{Accepted, Listener};
use super::waiting::{RendezvousOptions, Waiting};
use crate::control::channel::ControlChannel;
use crate::control::frame::{FrameError, FrameReader, ReadProgress};
use crate::control::message::{Message, kind as wire};
use crate::control::secure::{
    Answerer, AuthError, JobKey, MAX_CALL_BYTES, MIN_CALL_BYTES, MIN_SEALED_BYTES, NOT_OURS,
    Session, claimed_rank, notice,
};
use crate::control::socket::{Connected, SocketKind, poll_until};
use crate::launch::Launch;
use crate::times::{DECLINE_WITHIN, WANTED_LOOK_EVERY};

/// Callers taken from one listener before the others get their turn.
const ACCEPT_AT_ONCE: usize = 16;
/// Calls that are remembered, to tell a copy before it costs anything. A copy that is older is
/// answered, and gets no further.
const CALLS_REMEMBERED: usize = 256;

/// The ranks that came, and who else did.
pub(super) struct Met {
    pub(super) channels: BTreeMap<Rank, ControlChannel>,
    pub(super) turned_away: TurnedAway,
}

/// Says whether this process may open no more descriptors.
fn is_own_limit(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::MFILE.raw_os_error())
}

/// Asked often; its error ends a meeting that is not wanted any more.
pub(super) type Stop<'a> = &'a mut dyn FnMut() -> Result<(), Fault>;

/// Listens until the ranks of `awaited` have joined.
pub(super) fn gather<'a>(
    launch: &Launch,
    key: &'a JobKey,
    listeners: Vec<Listener>,
    awaited: BTreeSet<Rank>,
    options: &'a RendezvousOptions,
    started: Instant,
    stop: Option<Stop<'a>>,
) -> Result<Met, RendezvousError> {
    let mut meeting = Meeting {
        admission: Admission {
            key,
            own: launch.rank(),
            world_size: launch.world_size(),
            awaited,
            calls: VecDeque::with_capacity(CALLS_REMEMBERED),
        },
        options,
        started,
        stop,
        listeners,
        pending: Vec::new(),
        joined: BTreeMap::new(),
        left: BTreeSet::new(),
        over: options.declines.clone(),
        turned_away: TurnedAway::default(),
    };
    let met = meeting.run();
    let result = match meeting.over.take() {
        Some(why) => Err(why.into()),
        None => met.and_then(|()| meeting.welcome()),
    };
    if let Err(error) = &result {
        meeting.dismiss(error.fault(launch.rank()));
    }
    if meeting.turned_away != TurnedAway::default() {
        tracing::info!(callers = %meeting.turned_away, "strangers at the rendezvous");
    }
    result.map(|()| Met {
        channels: meeting.joined,
        turned_away: meeting.turned_away,
    })
}

/// Decides which callers rank 0 admits.
struct Admission<'a> {
    key: &'a JobKey,
    own: Rank,
    world_size: WorldSize,
    awaited: BTreeSet<Rank>,
    /// The keys of the calls that were answered, the oldest first.
    calls: VecDeque<[u8; 32]>,
}

impl Admission<'_> {
    /// Says whether this is the first call with this key; a rank makes a new one for each.
    fn is_new(&mut self, ephemeral: [u8; 32]) -> bool {
        if self.calls.contains(&ephemeral) {
            return false;
        }
        if self.calls.len() == CALLS_REMEMBERED {
            self.calls.pop_front();
        }
        self.calls.push_back(ephemeral);
        true
    }
}

struct Meeting<'a> {
    admission: Admission<'a>,
    options: &'a RendezvousOptions,
    started: Instant,
    stop: Option<Stop<'a>>,
    listeners: Vec<Listener>,
    /// In the order they came.
    pending: Vec<Pending>,
    joined: BTreeMap<Rank, ControlChannel>,
    /// Of those that have joined, the ones that have left again.
    left: BTreeSet<Rank>,
    /// Why a rank has ended the meeting. Those that come all the same are told.
    over: Option<Fault>,
    turned_away: TurnedAway,
}

/// A caller that has not proven itself.
struct Pending {
    to: Connected,
    source: String,
    deadline: Instant,
    reader: FrameReader,
    stage: Stage,
}

enum Stage {
    /// Nothing said yet.
    Calling,
    /// Said what a rank would say, which can be a recording; its first sealed frame cannot.
    Answered { rank: Rank, session: Session },
}

/// What became of a caller after it was heard.
enum Heard {
    Waiting,
    Joined(Rank, Session),
    Away(Why),
}

enum Why {
    Silent,
    Replay,
    AuthError(AuthError),
    Refused(String),
}

impl Meeting<'_> {
    fn run(&mut self) -> Result<(), RendezvousError> {
        let mut end = self.started + self.options.timeout;
        let mut waiting = Waiting::new(self.options, self.started);
        while self.joined.len() < self.admission.awaited.len() {
            let now = Instant::now();
            if let Some(stop) = &mut self.stop {
                stop()?;
            }
            if now >= end {
                return Err(self.missing());
            }
            self.drop_late(now);
            waiting.look(self.admission.own, || self.awaited());
            let deadlines = self.pending.iter().map(|caller| caller.deadline);
            let look = self.stop.is_some().then_some(now + WANTED_LOOK_EVERY);
            let wake = deadlines.chain(waiting.next).chain(look).min();
            let ready = self.wait(wake.map_or(end, |wake| wake.min(end)))?;
            if let Some(rank) = ready.joined
                && let Some(left) = self.hear_joined(rank)
            {
                self.left.insert(rank);
                match left {
                    RendezvousError::Ended(why) if self.over.is_none() => {
                        self.over = Some(why);
                        end = end.min(now + DECLINE_WITHIN);
                    }
                    _ if self.over.is_some() => {}
                    left => return Err(left),
                }
            }
            // From the last to the first, so that taking one out leaves the other indices right.
            for index in ready.callers.into_iter().rev() {
                self.hear(index);
            }
            for index in ready.listeners {
                self.accept(index)?;
            }
        }
        Ok(())
    }

    /// Waits for callers, new callers, and for the end of those who have joined.
    fn wait(&self, until: Instant) -> io::Result<Ready> {
        let (listeners, pending) = (self.listeners.len(), self.pending.len());
        let mut fds = Vec::with_capacity(listeners + pending + self.joined.len());
        fds.extend(self.listeners.iter().map(|l| PollFd::new(l, PollFlags::IN)));
        let callers = self.pending.iter();
        fds.extend(callers.map(|caller| PollFd::new(&caller.to.socket, PollFlags::IN)));
        let here = |rank: &&Rank| !self.left.contains(*rank);
        let here: Vec<Rank> = self.joined.keys().filter(here).copied().collect();
        let joined = here.iter().map(|rank| &self.joined[rank]);
        fds.extend(joined.map(|channel| PollFd::new(channel, PollFlags::IN)));
        poll_until(&mut fds, until)?;
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let which = |fds: &[PollFd<'_>]| {
            let ready = fds.iter().enumerate().filter(|(_, fd)| is_ready(fd));
            ready.map(|(index, _)| index).collect()
        };
        let (rest, joined) = fds.split_at(listeners + pending);
        let (new, known) = rest.split_at(listeners);
        let joined = joined.iter().position(is_ready);
        Ok(Ready {
            listeners: which(new),
            callers: which(known),
            joined: joined.map(|index| here[index]),
        })
    }

    /// Why a rank that has joined leaves, if it does. It has nothing else to say before all have joined.
    fn hear_joined(&mut self, rank: Rank) -> Option<RendezvousError> {
        let channel = self.joined.get_mut(&rank)?;
        let world_size = self.admission.world_size;
        match channel.receiver().try_recv() {
            Ok(None) => None,
            Ok(Some(Message::Abort(why))) => Some(why.into()),
            _ => Some(RendezvousError::RankLeft { rank, world_size }),
        }
    }

    fn accept(&mut self, listener: usize) -> io::Result<()> {
        for taken in 0..ACCEPT_AT_ONCE {
            let accepted = match self.listeners[listener].accept() {
                Ok(Some(caller)) => caller,
                Ok(None) => break,
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    self.turned_away.other_user += 1;
                    continue;
                }
                // The kernel asks for a descriptor before it looks whether a caller waits.
                Err(_) if taken > 0 => break,
                // This process is at its limit without any caller, so no room can be made.
                Err(error) if self.pending.is_empty() && is_own_limit(&error) => return Err(error),
                // The next caller may fare better, once those before it are gone.
                Err(error) => {
                    tracing::debug!(%error, "a caller could not be accepted");
                    self.make_room(self.listeners[listener].kind, None);
                    std::thread::sleep(crate::times::ACCEPT_REST);
                    break;
                }
            };
            let kind = accepted.connected.kind;
            let same_kind = self.pending.iter().filter(|caller| caller.to.kind == kind);
            if same_kind.count() >= self.options.max_pending.max(1) {
                self.make_room(kind, Some(&accepted.source));
            }
            let patience = self.options.stranger_timeout;
            self.pending.push(Pending::new(accepted, patience));
            // A rank's call is there already, more often than not; once it is answered, the rank
            // does not make room for a crowd that says nothing.
            self.hear(self.pending.len() - 1);
        }
        Ok(())
    }

    /// Drops a caller of a kind: of the source that most come from, with the newcomer, the oldest;
    /// first among those who have said nothing of worth. A crowd from elsewhere so makes room for
    /// a rank by itself.
    fn make_room(&mut self, kind: SocketKind, newcomer: Option<&str>) {
        let callers = self.pending.iter().enumerate();
        let here = callers.filter(|(_, caller)| caller.to.kind == kind);
        let mut crowds: HashMap<&str, usize> = HashMap::new();
        let sources = here.clone().map(|(_, caller)| &*caller.source);
        for source in sources.chain(newcomer) {
            *crowds.entry(source).or_default() += 1;
        }
        let last = here.max_by_key(|(index, caller)| {
            let is_calling = matches!(caller.stage, Stage::Calling);
            (crowds[&*caller.source], is_calling, Reverse(*index))
        });
        if let Some((index, _)) = last {
            self.pending.remove(index);
            self.turned_away.crowded_out += 1;
        }
    }

    fn drop_late(&mut self, now: Instant) {
        let before = self.pending.len();
        self.pending.retain(|caller| caller.deadline > now);
        self.turned_away.silent += (before - self.pending.len()) as u64;
    }

    /// Reads what a caller has sent.
    fn hear(&mut self, index: usize) {
        let caller = &mut self.pending[index];
        match caller.hear(&mut self.admission) {
            Heard::Waiting => {}
            Heard::Joined(rank, session) => {
                let caller = self.pending.remove(index);
                self.join(rank, caller, session);
            }
            Heard::Away(why) => {
                let caller = self.pending.remove(index);
                self.turn_away(&caller, why);
            }
        }
    }

    fn join(&mut self, rank: Rank, caller: Pending, session: Session) {
        let Connected { socket, kind, pid } = caller.to;
        let channel = ControlChannel::new(rank, kind, pid, Arc::new(socket), session);
        let tell = |kind: u8, body: &[u8]| {
            let soon = Instant::now() + crate::times::SMALL_WRITE_WITHIN;
            channel.sender().send_raw(kind, body, None, soon).is_ok()
        };
        match self.joined.entry(rank) {
            Entry::Vacant(free) => {
                if tell(wire::JOINED, &[]) {
                    tracing::debug!(rank = rank.get(), ?kind, "joined");
                    self.options.has_met(channel.sender());
                    free.insert(channel);
                }
            }
            // Of two callers of one rank, the first to prove itself has it.
            Entry::Occupied(_) => {
                let reason = duplicate(rank);
                tell(wire::REFUSED, reason.as_bytes());
                self.turned_away.refused = Some(reason);
            }
        }
    }

    fn turn_away(&mut self, caller: &Pending, why: Why) {
        let count = match why {
            Why::Silent => &mut self.turned_away.silent,
            Why::Replay => &mut self.turned_away.replay,
            Why::AuthError(AuthError::Key) => {
                let _ = caller
                    .to
                    .socket
                    .try_write(&notice(self.admission.own, &NOT_OURS));
                self.note_wrong_secret(caller);
                &mut self.turned_away.wrong_secret
            }
            Why::AuthError(AuthError::Version { theirs }) => {
                tracing::debug!(theirs, "a caller of another control version");
                let _ = caller.to.socket.try_write(&notice(self.admission.own, &[]));
                &mut self.turned_away.other_version
            }
            Why::AuthError(_) => &mut self.turned_away.garbage,
            Why::Refused(reason) => {
                self.turned_away.refused = Some(reason);
                return;
            }
        };
        *count += 1;
    }

    /// Keeps which rank the caller claims to be, so that the user can find that rank.
    fn note_wrong_secret(&mut self, caller: &Pending) {
        let from = &caller.source;
        let last = match claimed_rank(caller.reader.frame()) {
            Some(rank) => format!("as rank {rank} from {from}"),
            None => format!("from {from}"),
        };
        if self.turned_away.wrong_secret == 0 {
            tracing::info!(%last, "a caller does not hold the secret of this job");
        }
        self.turned_away.last_wrong_secret = Some(last);
    }

    /// All are here: closes the listeners and lets everybody go on.
    fn welcome(&mut self) -> Result<(), RendezvousError> {
        self.listeners.clear();
        self.pending.clear();
        let soon = Instant::now() + self.options.stranger_timeout;
        let ranks: Vec<Rank> = self.joined.keys().copied().collect();
        for rank in ranks {
            let to = self.joined[&rank].sender();
            if to.send_raw(wire::WELCOME, &[], None, soon).is_err() {
                let world_size = self.admission.world_size;
                let left = self.hear_joined(rank);
                return Err(left.unwrap_or(RendezvousError::RankLeft { rank, world_size }));
            }
        }
        Ok(())
    }

    /// Tells those who wait why it came to nothing.
    fn dismiss(&self, why: Fault) {
        let soon = Instant::now() + crate::times::SMALL_WRITE_WITHIN;
        let why = Message::Abort(why);
        for channel in self.joined.values() {
            // One that is gone needs no reason.
            let _ = channel.sender().send(&why, soon);
        }
    }

    /// The ranks that have not joined.
    fn missing_ranks(&self) -> Vec<Rank> {
        let is_missing = |rank: &&Rank| !self.joined.contains_key(rank);
        let awaited = self.admission.awaited.iter();
        awaited.filter(is_missing).copied().collect()
    }

    fn places(&self) -> String {
        let places: Vec<String> = self.listeners.iter().map(ToString::to_string).collect();
        places.join(" and ")
    }

    /// Who is waited for, and where.
    fn awaited(&self) -> String {
        let missing = self.missing_ranks();
        let ranks = if missing.len() == 1 { "rank" } else { "ranks" };
        format!(
            "{ranks} {} at {}{}",
            list(&missing),
            self.places(),
            self.turned_away
        )
    }

    fn missing(&self) -> RendezvousError {
        RendezvousError::MissingRanks {
            missing: self.missing_ranks(),
            world_size: self.admission.world_size,
            after: self.started.elapsed(),
            listening: self.places(),
            turned_away: Box::new(self.turned_away.clone()),
        }
    }
}

/// What `poll` found, by index.
struct Ready {
    listeners: Vec<usize>,
    callers: Vec<usize>,
    joined: Option<Rank>,
}

impl Pending {
    fn new(Accepted { connected, source }: Accepted, patience: Duration) -> Self {
        Self {
            to: connected,
            source,
            deadline: Instant::now() + patience,
            reader: FrameReader::new(MIN_CALL_BYTES, MAX_CALL_BYTES),
            stage: Stage::Calling,
        }
    }

    fn hear(&mut self, admission: &mut Admission<'_>) -> Heard {
        match self.reader.poll(|buf| self.to.socket.try_read(buf)) {
            Ok(ReadProgress::Frame) => {}
            Ok(ReadProgress::Pending) => return Heard::Waiting,
            Ok(ReadProgress::Eof { .. }) | Err(FrameError::Io(_)) => {
                return Heard::Away(Why::Silent);
            }
            Err(FrameError::Length { .. }) => {
                return Heard::Away(match self.stage {
                    Stage::Calling => Why::AuthError(AuthError::Garbage),
                    Stage::Answered { .. } => Why::Replay,
                });
            }
        }
        match std::mem::replace(&mut self.stage, Stage::Calling) {
            Stage::Calling => {
                let answerer =
                    match Answerer::new(admission.key, admission.own, self.reader.frame()) {
                        Ok(answerer) => answerer,
                        Err(error) => return Heard::Away(Why::AuthError(error)),
                    };
                // Before any curve arithmetic, which is what an answer costs.
                if !admission.is_new(answerer.ephemeral) {
                    return Heard::Away(Why::Replay);
                }
                self.answer(answerer, admission)
            }
            Stage::Answered { rank, mut session } => {
                match session.opener.open(self.reader.frame()) {
                    Ok((wire::CONFIRM, [])) => Heard::Joined(rank, session),
                    _ => Heard::Away(Why::Replay),
                }
            }
        }
    }

    fn answer(&mut self, answerer: Answerer, admission: &Admission<'_>) -> Heard {
        let (rank, own, world_size) = (answerer.caller, admission.own, admission.world_size);
        let theirs = answerer.world_size;
        let reason = if theirs != world_size.get() {
            format!(
                "rank {rank} was started in a world of {theirs} ranks, rank {own} in one of {world_size}"
            )
        } else if !world_size.contains(rank) {
            format!("rank {rank} is not of a world of {world_size}")
        } else if !admission.awaited.contains(&rank) {
            duplicate(rank)
        } else {
            return match answerer.accept() {
                Ok((frame, session)) if self.write(&frame) => {
                    self.reader = FrameReader::new(MIN_SEALED_BYTES, MIN_SEALED_BYTES);
                    self.stage = Stage::Answered { rank, session };
                    Heard::Waiting
                }
                Ok(_) => Heard::Away(Why::Silent),
                Err(error) => Heard::Away(Why::AuthError(error)),
            };
        };
        self.write(&answerer.refuse(&reason));
        Heard::Away(Why::Refused(reason))
    }

    /// Writes a small frame into a buffer that is empty, or not at all.
    fn write(&self, frame: &[u8]) -> bool {
        matches!(self.to.socket.try_write(frame), Ok(written) if written == frame.len())
    }
}

fn duplicate(rank: Rank) -> String {
    format!("rank {rank} has joined already; give each process a rank of its own")
}

#[cfg(any(test, feature = "fuzz"))]
pub(crate) mod fuzz;
