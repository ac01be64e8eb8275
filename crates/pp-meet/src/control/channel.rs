//! An authenticated channel to one peer.
//!
//! Hazard: a peer that stops reading blocks the thread that writes to it, and a peer that dies
//! looks like one that is silent. Guarantee: every call has a deadline or does not wait; the end of
//! the stream without a goodbye is [`ControlError::PeerLost`], and with one
//! [`ControlError::PeerLeft`].
//!
//! Choices: two halves for two threads over one socket. The sender is shared: its clones take
//! turns, a whole message at a time. The receiver reads one frame and not a byte more, so a
//! level-triggered `poll` on it is right. Buffers are reused; a frame costs no allocation.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use pp_contract::{Fault, Rank};
use rustix::event::PollFlags;
use rustix::process::Pid;

use super::error::ControlError;
use super::fds::{self, MAX_FDS, TICKET_BYTES, Ticket};
use super::frame::{FrameError, FrameReader, ReadProgress};
use super::message::{Message, kind as wire};
use super::secure::{
    MAX_MESSAGE_BYTES, MAX_SEALED_BYTES, MIN_SEALED_BYTES, Opener, Sealer, Session,
};
use super::socket::{Socket, SocketKind};

/// An authenticated channel to one peer; both halves together.
#[derive(Debug)]
pub struct ControlChannel {
    sender: ControlSender,
    receiver: ControlReceiver,
    pid: Option<Pid>,
}

impl ControlChannel {
    pub(super) fn new(
        peer: Rank,
        kind: SocketKind,
        pid: Option<Pid>,
        socket: Arc<Socket>,
        session: Session,
    ) -> Self {
        Self {
            sender: ControlSender {
                shared: Arc::new(Shared {
                    peer,
                    kind,
                    socket: Arc::clone(&socket),
                    writing: Mutex::new(Writing {
                        turn: Turn::Free(session.sealer),
                        announced: 0,
                    }),
                    changed: Condvar::new(),
                }),
            },
            receiver: ControlReceiver {
                peer,
                kind,
                socket,
                reader: FrameReader::new(MIN_SEALED_BYTES, MAX_SEALED_BYTES),
                opener: session.opener,
                ended: false,
            },
            pid,
        }
    }

    /// The rank at the other end.
    #[must_use]
    pub fn peer(&self) -> Rank {
        self.receiver.peer
    }

    /// Which kind of socket this is.
    #[must_use]
    pub fn socket_kind(&self) -> SocketKind {
        self.receiver.kind
    }

    /// The peer's process, when it shares this host: the kernel's word, good for a pidfd.
    #[must_use]
    pub fn peer_pid(&self) -> Option<Pid> {
        self.pid
    }

    /// The half that sends.
    #[must_use]
    pub fn sender(&self) -> &ControlSender {
        &self.sender
    }

    /// The half that receives.
    pub fn receiver(&mut self) -> &mut ControlReceiver {
        &mut self.receiver
    }

    /// Sends one message, as [`ControlSender::send`] does.
    ///
    /// # Errors
    /// The fault that this is. Of a peer that is gone it is the reason that the peer gave, if it gave one.
    pub(super) fn tell(
        &mut self,
        message: &Message<'_>,
        operation: &str,
        deadline: Instant,
    ) -> Result<(), Fault> {
        let sent = self.sender.send(message, deadline);
        sent.map_err(|error| {
            let reason = self.receiver.reason();
            reason.unwrap_or_else(|| error.fault(operation))
        })
    }

    /// Both halves, for two threads.
    #[must_use]
    pub fn split(self) -> (ControlSender, ControlReceiver) {
        (self.sender, self.receiver)
    }
}

impl AsFd for ControlChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }
}

/// The sending half. Clones share the channel; whole messages go out in turn.
#[derive(Clone)]
pub struct ControlSender {
    shared: Arc<Shared>,
}

struct Shared {
    peer: Rank,
    kind: SocketKind,
    socket: Arc<Socket>,
    writing: Mutex<Writing>,
    changed: Condvar,
}

/// What the senders of a channel have in common.
struct Writing {
    turn: Turn,
    /// Messages that are announced: a goodbye comes behind them.
    announced: usize,
}

/// Who may write. The lock is held only to take and give back the sealer, never while writing, so
/// that waiting for a turn has a deadline too.
enum Turn {
    Free(Sealer),
    Taken,
    /// Said goodbye.
    Done,
    /// Cut in the middle of a frame.
    Broken,
    /// The peer is gone.
    Lost,
}

impl ControlSender {
    /// The rank at the other end.
    #[must_use]
    pub fn peer(&self) -> Rank {
        self.shared.peer
    }

    /// Both addresses, this end's and the peer's; `None` where the ranks share a Unix socket.
    pub(super) fn addresses(&self) -> Option<[IpAddr; 2]> {
        self.shared.socket.addresses()
    }

    /// Says that a message will be sent, by whatever thread: a goodbye waits for it.
    pub fn announce(&self) -> Announced {
        self.lock().announced += 1;
        Announced(self.clone())
    }

    /// Sends one message, or gives up at the deadline. A goodbye waits for messages that are announced.
    ///
    /// After [`ControlError::PeerLost`] the peer's last words may still lie unread: ask the
    /// receiver once.
    ///
    /// # Errors
    /// [`ControlError::TimedOut`] when the peer does not read, [`ControlError::PeerLost`] when it
    /// is gone, [`ControlError::Broken`] after a message that was cut short,
    /// [`ControlError::ApiMisuse`] for a body over [`MAX_MESSAGE_BYTES`] or after a goodbye.
    pub fn send(&self, message: &Message<'_>, deadline: Instant) -> Result<(), ControlError> {
        let encoded = message.encode();
        let (kind, body) = encoded.map_err(|error| self.misuse(error.to_string()))?;
        self.send_raw(kind, &body, None, deadline)
    }

    /// Passes descriptors to a peer on this host, which takes them with
    /// [`ControlReceiver::try_recv_any`]. They stay open here.
    ///
    /// # Errors
    /// As [`ControlSender::send`]; [`ControlError::ApiMisuse`] over TCP, for none, and for more
    /// than [`MAX_FDS`].
    pub fn send_fds(&self, fds: &[BorrowedFd<'_>], deadline: Instant) -> Result<(), ControlError> {
        if self.shared.kind != SocketKind::Unix {
            return Err(self.misuse("descriptors pass only between ranks of one host".into()));
        }
        if fds.is_empty() || fds.len() > MAX_FDS {
            return Err(self.misuse(format!("{} descriptors; 1 to {MAX_FDS} pass", fds.len())));
        }
        let ticket = Ticket::new(fds.len());
        self.send_raw(wire::FDS, &ticket.encode(), Some((&ticket, fds)), deadline)
    }

    pub(super) fn send_raw(
        &self,
        kind: u8,
        body: &[u8],
        fds: Option<(&Ticket, &[BorrowedFd<'_>])>,
        deadline: Instant,
    ) -> Result<(), ControlError> {
        if body.len() > MAX_MESSAGE_BYTES {
            return Err(self.misuse(format!(
                "a message of {} bytes; {MAX_MESSAGE_BYTES} are allowed",
                body.len()
            )));
        }
        let started = Instant::now();
        let mut sealer = self.take_turn(kind == wire::BYE, started, deadline)?;
        // A peer that reads nothing is found before anything is sealed: then no harm is done.
        let sent = match self.shared.socket.wait(PollFlags::OUT, deadline) {
            Ok(()) => {
                let frame = sealer.seal(kind, body);
                self.write(frame, fds, deadline).map(|()| sealer)
            }
            Err(error) => {
                self.give_back(Turn::Free(sealer));
                return Err(self.failed(error, started));
            }
        };
        match sent {
            Ok(_) if kind == wire::BYE => {
                self.shared.socket.finish_writing();
                self.give_back(Turn::Done);
                Ok(())
            }
            Ok(sealer) => {
                self.give_back(Turn::Free(sealer));
                Ok(())
            }
            Err(error) => {
                let error = self.failed(error, started);
                self.give_back(match error {
                    ControlError::PeerLost { .. } => Turn::Lost,
                    // A sealed frame that did not go out whole leaves the peer waiting for the rest.
                    _ => Turn::Broken,
                });
                Err(error)
            }
        }
    }

    fn write(
        &self,
        frame: &[u8],
        fds: Option<(&Ticket, &[BorrowedFd<'_>])>,
        deadline: Instant,
    ) -> io::Result<()> {
        self.shared.socket.write_all(frame, deadline)?;
        match fds {
            Some((ticket, fds)) => fds::send(&self.shared.socket, ticket, fds, deadline),
            None => Ok(()),
        }
    }

    fn failed(&self, error: io::Error, started: Instant) -> ControlError {
        match error.kind() {
            io::ErrorKind::TimedOut => self.late(started),
            _ => ControlError::socket(self.shared.peer, error),
        }
    }

    fn give_back(&self, turn: Turn) {
        self.lock().turn = turn;
        self.shared.changed.notify_all();
    }

    /// Takes the sealer out, waiting for another sender to finish; for a goodbye, for all that are announced.
    fn take_turn(
        &self,
        is_last: bool,
        started: Instant,
        deadline: Instant,
    ) -> Result<Sealer, ControlError> {
        let left = deadline.saturating_duration_since(started);
        let is_early = |writing: &Writing| is_last && writing.announced > 0;
        let (mut writing, _) = self
            .shared
            .changed
            .wait_timeout_while(self.lock(), left, |writing| {
                matches!(writing.turn, Turn::Taken) || is_early(writing)
            })
            .unwrap_or_else(PoisonError::into_inner);
        if is_early(&writing) {
            return Err(self.late(started));
        }
        let rank = self.shared.peer;
        let (turn, error) = match std::mem::replace(&mut writing.turn, Turn::Taken) {
            Turn::Free(sealer) => return Ok(sealer),
            Turn::Taken => return Err(self.late(started)),
            Turn::Done => {
                let what = "nothing can be sent after a goodbye";
                (Turn::Done, self.misuse(what.into()))
            }
            Turn::Broken => (Turn::Broken, ControlError::Broken { rank }),
            Turn::Lost => (Turn::Lost, ControlError::PeerLost { rank, source: None }),
        };
        writing.turn = turn;
        Err(error)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Writing> {
        // Every critical section is one assignment: there is no half-made state to fear.
        self.shared
            .writing
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn late(&self, started: Instant) -> ControlError {
        ControlError::TimedOut {
            what: "sending to",
            rank: self.shared.peer,
            after: started.elapsed(),
        }
    }

    fn misuse(&self, what: String) -> ControlError {
        ControlError::ApiMisuse {
            rank: self.shared.peer,
            what,
        }
    }
}

/// A message that will be sent.
///
/// # If dropped
/// It was sent, or will not be.
#[derive(Debug)]
pub struct Announced(ControlSender);

impl Drop for Announced {
    fn drop(&mut self) {
        self.0.lock().announced -= 1;
        self.0.shared.changed.notify_all();
    }
}

impl fmt::Debug for ControlSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ControlSender(to rank {})", self.shared.peer)
    }
}

/// The receiving half. Its descriptor is for `poll`: readable means [`ControlReceiver::try_recv`]
/// has something to say.
pub struct ControlReceiver {
    peer: Rank,
    kind: SocketKind,
    socket: Arc<Socket>,
    reader: FrameReader,
    opener: Opener,
    /// A goodbye was received.
    ended: bool,
}

impl ControlReceiver {
    /// The rank at the other end.
    #[must_use]
    pub fn peer(&self) -> Rank {
        self.peer
    }

    /// A message, if one is there whole; never waits.
    ///
    /// # Errors
    /// [`ControlError::PeerLost`], [`ControlError::PeerLeft`] after the goodbye, and
    /// [`ControlError::PeerMisbehaved`] for bytes the peer did not seal, in this order, for us.
    pub fn try_recv(&mut self) -> Result<Option<Message<'_>>, ControlError> {
        if !self.fill()? {
            return Ok(None);
        }
        self.message().map(Some)
    }

    /// Why the peer ended, if it said so and that was not read yet; what it said before is dropped.
    pub(super) fn reason(&mut self) -> Option<Fault> {
        loop {
            match self.try_recv() {
                Ok(Some(Message::Abort(why))) => return Some(why),
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return None,
            }
        }
    }

    /// The next message, or [`ControlError::TimedOut`] at the deadline.
    ///
    /// # Errors
    /// As [`ControlReceiver::try_recv`], and when the deadline passes first.
    pub fn recv_deadline(&mut self, deadline: Instant) -> Result<Message<'_>, ControlError> {
        self.wait_frame(deadline)?;
        self.message()
    }

    /// The next message or the next descriptors, for a caller that listens to a peer whatever the
    /// peer sends. Never waits, but for descriptors that were announced and are right behind.
    ///
    /// # Errors
    /// As [`ControlReceiver::try_recv`]; [`ControlError::TimedOut`] when announced descriptors have
    /// not come by the deadline.
    pub fn try_recv_any(
        &mut self,
        deadline: Instant,
    ) -> Result<Option<Received<'_>>, ControlError> {
        if !self.fill()? {
            return Ok(None);
        }
        let (rank, kind) = (self.peer, self.kind);
        let (message, body) = open(rank, &mut self.opener, &self.reader)?;
        if message == wire::FDS && kind == SocketKind::Unix {
            let ticket = Ticket::decode(body).ok_or_else(|| {
                let what = format!("a ticket that is not {TICKET_BYTES} bytes");
                ControlError::misbehaved(rank, what)
            })?;
            let fds = redeem(rank, &self.socket, &ticket, deadline)?;
            return Ok(Some(Received::Descriptors(fds)));
        }
        let message =
            Message::parse(message, body).map_err(|what| ControlError::misbehaved(rank, what))?;
        self.ended = message == Message::Bye;
        Ok(Some(Received::Message(message)))
    }

    /// The next message as kind and body, for the rendezvous.
    pub(super) fn recv_raw(&mut self, deadline: Instant) -> Result<(u8, &[u8]), ControlError> {
        self.wait_frame(deadline)?;
        open(self.peer, &mut self.opener, &self.reader)
    }

    fn wait_frame(&mut self, deadline: Instant) -> Result<(), ControlError> {
        let started = Instant::now();
        while !self.fill()? {
            match self.socket.wait(PollFlags::IN, deadline) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    return Err(late(self.peer, started));
                }
                Err(error) => return Err(ControlError::socket(self.peer, error)),
            }
        }
        Ok(())
    }

    /// Reads on; true when a frame is whole.
    fn fill(&mut self) -> Result<bool, ControlError> {
        let rank = self.peer;
        if self.ended {
            return Err(ControlError::PeerLeft { rank });
        }
        match self.reader.poll(|buf| self.socket.try_read(buf)) {
            Ok(ReadProgress::Frame) => Ok(true),
            Ok(ReadProgress::Pending) => Ok(false),
            Ok(ReadProgress::Eof { .. }) => Err(ControlError::PeerLost { rank, source: None }),
            Err(FrameError::Io(error)) => Err(ControlError::socket(rank, error)),
            Err(error) => Err(ControlError::misbehaved(rank, error)),
        }
    }

    fn message(&mut self) -> Result<Message<'_>, ControlError> {
        let rank = self.peer;
        let (kind, body) = open(rank, &mut self.opener, &self.reader)?;
        let message =
            Message::parse(kind, body).map_err(|what| ControlError::misbehaved(rank, what))?;
        self.ended = message == Message::Bye;
        Ok(message)
    }
}

/// Holds a message or descriptors that came from a peer.
#[derive(Debug)]
pub enum Received<'a> {
    /// A message.
    Message(Message<'a>),
    /// Descriptors, closed on exec.
    Descriptors(Vec<OwnedFd>),
}

fn late(rank: Rank, started: Instant) -> ControlError {
    ControlError::TimedOut {
        what: "waiting for a message from",
        rank,
        after: started.elapsed(),
    }
}

/// The descriptors that a ticket has announced.
fn redeem(
    rank: Rank,
    socket: &Socket,
    ticket: &Ticket,
    deadline: Instant,
) -> Result<Vec<OwnedFd>, ControlError> {
    let started = Instant::now();
    fds::recv(socket, ticket, deadline).map_err(|error| match error.kind() {
        io::ErrorKind::TimedOut => late(rank, started),
        io::ErrorKind::UnexpectedEof => ControlError::PeerLost { rank, source: None },
        io::ErrorKind::InvalidData => ControlError::misbehaved(rank, error),
        _ => ControlError::socket(rank, error),
    })
}

fn open<'a>(
    rank: Rank,
    opener: &'a mut Opener,
    reader: &FrameReader,
) -> Result<(u8, &'a [u8]), ControlError> {
    opener
        .open(reader.frame())
        .map_err(|error| ControlError::misbehaved(rank, error))
}

impl AsFd for ControlReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl fmt::Debug for ControlReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ControlReceiver(from rank {})", self.peer)
    }
}

#[cfg(test)]
mod tests;
