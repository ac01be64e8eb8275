//! The socket of a running job, for programs of the same user on the machine of rank 0.
//!
//! Hazard: a program that connects and does not read, or another user, holds up the job or learns of it. Guarantee: one thread
//! of low priority serves at most [`CLIENTS`] programs, waits for none of them, and drops each that does not read; no
//! program of another user gets a byte.
//!
//! Choices: a client gets one line of JSON a second, a [`Snapshot`](super::Snapshot), and says nothing. The same thread empties
//! the queue of records. Where there is no folder for sockets the job runs on without.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::process::Uid;

use super::viewer::{Viewer, Watching};
use super::{file_name, folders};
use crate::own_folder;
use crate::times::{DRAINED_EVERY, LAST_SEEN_WITHIN, LAST_TAKEN_WITHIN, SEEN_EVERY, STUCK_VIEWER};

/// Programs that may look at the same time.
pub(super) const CLIENTS: usize = 4;
/// Jobs of one process with the same number that may have a socket.
const NAMES: u32 = 8;

/// The thread that shows a job on a socket.
///
/// # If dropped
/// The thread sends the last snapshot, and removes the socket; it is waited for, at most a second.
pub(crate) struct Server {
    alarm: Arc<OwnedFd>,
    ended: Receiver<()>,
}

impl Server {
    /// Starts to show the job; `None` if no thread is to be had.
    pub(crate) fn start(viewer: Viewer, runtime_folder: Option<&Path>) -> Option<Self> {
        let about = viewer.about();
        let (pid, number) = (about.pid, about.number);
        let bound = folders(runtime_folder).into_iter().find_map(|folder| {
            let bound = bind(&folder, |again| file_name(pid, number, again));
            bound
                .inspect_err(|error| tracing::debug!(%error, ?folder, "no socket for viewers here"))
                .ok()
        });
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let alarm = Arc::new(eventfd(0, flags).ok()?);
        let (end, ended) = channel();
        let serving = Serving::new(viewer, bound);
        let own = Arc::clone(&alarm);
        let thread = std::thread::Builder::new().name("pp-seen".into());
        let started = thread.spawn(move || serving.run(&own, end));
        started.ok().map(|_| Self { alarm, ended })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.alarm, &1_u64.to_ne_bytes());
        let _ = self.ended.recv_timeout(LAST_SEEN_WITHIN);
    }
}

/// Listens in this folder, under the first of its names that no job has.
pub(super) fn bind(
    folder: &Path,
    name: impl Fn(u32) -> String,
) -> io::Result<(UnixListener, PathBuf)> {
    own_folder::make(folder)?;
    for path in (0..NAMES).map(|again| folder.join(name(again))) {
        match UnixStream::connect(&path) {
            // Another job of this process has it.
            Ok(_) => continue,
            // What is left of a process that had this number.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(&path)?;
            }
            Err(_) => {}
        }
        let listener = UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        return Ok((listener, path));
    }
    Err(io::Error::other("other jobs have all of its names"))
}

pub(super) struct Serving {
    pub(super) viewer: Viewer,
    bound: Option<(UnixListener, PathBuf)>,
    /// Held while there are clients. Dropped before them: once a client reads the end, the job is not watched.
    watching: Option<Watching>,
    clients: Vec<Spectator>,
    /// A caller waits who could not be taken, for want of descriptors: the next look is for the others alone.
    is_out_of_reach: bool,
}

impl Serving {
    pub(super) fn new(viewer: Viewer, bound: Option<(UnixListener, PathBuf)>) -> Self {
        Self {
            viewer,
            bound,
            clients: Vec::new(),
            watching: None,
            is_out_of_reach: false,
        }
    }

    fn run(mut self, alarm: &OwnedFd, end: Sender<()>) {
        super::at_low_priority();
        let mut next = Instant::now();
        loop {
            let is_over = self.sleep(alarm) || self.viewer.has_ended();
            self.viewer.drain();
            self.accept(rustix::process::getuid());
            let now = Instant::now();
            if is_over {
                break;
            }
            if now >= next || self.clients.iter().any(|client| client.is_new) {
                next = now + SEEN_EVERY;
                self.show(now);
            }
            self.write(now);
        }
        if let Some((_, path)) = self.bound.take() {
            let _ = std::fs::remove_file(path);
        }
        let until = Instant::now() + LAST_TAKEN_WITHIN;
        self.clients
            .iter_mut()
            .for_each(|client| client.is_new = true);
        self.show(Instant::now());
        // Even if that took all of the time, each client gets what it has room for.
        loop {
            self.write(Instant::now());
            let is_told = self.clients.iter().all(|client| client.rest.is_empty());
            if is_told || Instant::now() >= until {
                break;
            }
            std::thread::sleep(crate::times::LOOK_EVERY);
        }
        drop(self);
        drop(end);
    }

    /// Sleeps until there is something to do; true if the job is over.
    fn sleep(&self, alarm: &OwnedFd) -> bool {
        let bound = self.bound.iter().filter(|_| !self.is_out_of_reach);
        let listener = bound.map(|(listener, _)| listener.as_fd());
        let clients = self.clients.iter();
        let clients = clients.map(|client| (client.stream.as_fd(), client.wants()));
        let listened = listener.map(|fd| (fd, PollFlags::IN));
        let all = std::iter::once((alarm.as_fd(), PollFlags::IN));
        let mut fds: Vec<PollFd<'_>> = all
            .chain(listened)
            .chain(clients)
            .map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags))
            .collect();
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: DRAINED_EVERY.subsec_nanos().into(),
        };
        // An interrupted poll is a look without a reason.
        let _ = poll(&mut fds, Some(&timeout));
        fds[0].revents().contains(PollFlags::IN)
    }

    /// Accepts callers. A caller of another user, and one too many, finds the connection closed.
    pub(super) fn accept(&mut self, own: Uid) {
        let Some((listener, _)) = &self.bound else {
            return;
        };
        // No more than fit: a flood of callers must not keep this going.
        for _ in 0..2 * CLIENTS {
            let (stream, _) = match listener.accept() {
                Ok(caller) => caller,
                Err(error) => {
                    self.is_out_of_reach = error.kind() != std::io::ErrorKind::WouldBlock;
                    break;
                }
            };
            let peer = rustix::net::sockopt::socket_peercred(&stream);
            let is_own = peer.is_ok_and(|peer| peer.uid == own);
            let is_taken =
                is_own && self.clients.len() < CLIENTS && stream.set_nonblocking(true).is_ok();
            if is_taken {
                self.clients.push(Spectator {
                    stream,
                    rest: Vec::new(),
                    is_new: true,
                    moved: Instant::now(),
                });
            }
        }
        if self.clients.is_empty() {
            self.watching = None;
        } else if self.watching.is_none() {
            self.watching = Some(self.viewer.watch());
        }
    }

    /// Gives the next line to each client that has taken the last one.
    pub(super) fn show(&mut self, now: Instant) {
        if self.clients.is_empty() {
            return;
        }
        let Ok(mut line) = serde_json::to_vec(&self.viewer.snapshot()) else {
            return;
        };
        line.push(b'\n');
        for client in &mut self.clients {
            // A line is never cut: the last one may stand behind the rest of another.
            if client.rest.is_empty() || client.is_new {
                client.rest.extend_from_slice(&line);
                client.moved = now;
            }
            client.is_new = false;
        }
    }

    /// Writes what there is room for, and drops each client that is gone, writes something or takes nothing.
    pub(super) fn write(&mut self, now: Instant) {
        self.clients
            .retain_mut(|client| client.write(now).is_some());
        if self.clients.is_empty() {
            self.watching = None;
        }
    }

    #[cfg(test)]
    pub(super) fn waiting_bytes(&self) -> usize {
        self.clients.iter().map(|client| client.rest.len()).sum()
    }
}

/// A program that looks.
struct Spectator {
    stream: UnixStream,
    /// What it has not taken of the last line.
    rest: Vec<u8>,
    /// It has got no line, or is to get the last one.
    is_new: bool,
    /// When it took something, or had taken all.
    moved: Instant,
}

impl Spectator {
    fn wants(&self) -> PollFlags {
        match self.rest.is_empty() {
            true => PollFlags::IN,
            false => PollFlags::IN | PollFlags::OUT,
        }
    }

    /// Writes on; `None` if it is to be dropped.
    fn write(&mut self, now: Instant) -> Option<()> {
        match recv(&self.stream, &mut [0_u8; 1], RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            // It has left, or says something.
            _ => return None,
        }
        while !self.rest.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(&self.stream, &self.rest, flags) {
                Ok(count) => {
                    self.rest.drain(..count);
                    self.moved = now;
                }
                Err(Errno::AGAIN | Errno::INTR) => {
                    let waits = now.saturating_duration_since(self.moved);
                    return (waits < STUCK_VIEWER).then_some(());
                }
                Err(_) => return None,
            }
        }
        Some(())
    }
}
