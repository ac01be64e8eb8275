//! A stream socket whose every wait has a deadline.
//!
//! All calls pass `MSG_DONTWAIT` and waits are `poll`, so no peer can hold a thread beyond the
//! moment its caller named.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use rustix::process::Pid;

/// Which kind of socket joins two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketKind {
    /// Unix socket: the ranks share a host, and descriptors can be passed.
    Unix,
    /// TCP.
    Tcp,
}

#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
}

impl Socket {
    pub(crate) fn new(fd: impl Into<OwnedFd>) -> Self {
        Self { fd: fd.into() }
    }

    /// Reads what is there; `WouldBlock` when nothing is.
    pub(crate) fn try_read(&self, buf: &mut [u8]) -> io::Result<usize> {
        retry(|| rustix::net::recv(&self.fd, &mut *buf, RecvFlags::DONTWAIT))
            .map(|(_, bytes)| bytes)
    }

    /// Writes what fits; `WouldBlock` when nothing does.
    pub(crate) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        retry(|| rustix::net::send(&self.fd, bytes, flags))
    }

    /// Writes all of it, or fails; then some of it may have gone out.
    pub(crate) fn write_all(&self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = self.until(PollFlags::OUT, deadline, || self.try_write(bytes))?;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// Tries a call again whenever the socket is ready, until it gives something else than `WouldBlock`.
    pub(crate) fn until<T>(
        &self,
        flags: PollFlags,
        deadline: Instant,
        mut call: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            match call() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(flags, deadline)?;
                }
                other => return other,
            }
        }
    }

    /// Waits until the socket is ready (or broken, which the next call reports).
    pub(crate) fn wait(&self, flags: PollFlags, deadline: Instant) -> io::Result<()> {
        let mut fds = [PollFd::new(&self.fd, flags)];
        if poll_until(&mut fds, deadline)? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(())
    }

    /// Both addresses of a TCP connection: this end's, and the peer's.
    pub(crate) fn addresses(&self) -> Option<[IpAddr; 2]> {
        let own = rustix::net::getsockname(&self.fd).ok()?;
        let peer = rustix::net::getpeername(&self.fd).ok()??;
        let [own, peer] = [own, peer].map(|at| SocketAddr::try_from(at).ok());
        Some([own?, peer?].map(|at| at.ip().to_canonical()))
    }

    /// Tells the peer that nothing more will be written.
    pub(crate) fn finish_writing(&self) {
        // A peer that is already gone has no use for it.
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Write);
    }
}

/// A socket to another rank, or to a caller that may be a stranger.
pub(crate) struct Connected {
    pub(crate) socket: Socket,
    pub(crate) kind: SocketKind,
    /// The process at the other end, if it is one of this host.
    pub(crate) pid: Option<Pid>,
}

impl Connected {
    pub(crate) fn new(fd: impl Into<OwnedFd>, kind: SocketKind, pid: Option<Pid>) -> Self {
        let socket = Socket::new(fd);
        Self { socket, kind, pid }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// `poll` until a descriptor is ready or the deadline has passed (then 0).
pub(crate) fn poll_until(fds: &mut [PollFd<'_>], deadline: Instant) -> io::Result<usize> {
    retry(|| {
        let left = deadline.saturating_duration_since(Instant::now());
        // A day at most.
        let left = left.min(Duration::from_secs(86_400));
        let timeout = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        poll(fds, Some(&timeout))
    })
}

pub(crate) fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(rustix::io::Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}

/// The process at the other end of a Unix socket, if it is of our user or root; `None` for any
/// other user's. This is the kernel's word: of who connected, or of who called `listen`.
pub(crate) fn trusted_pid(fd: impl AsFd) -> io::Result<Option<Pid>> {
    let peer = rustix::net::sockopt::socket_peercred(fd)?;
    let trusted = peer.uid.is_root() || peer.uid == rustix::process::geteuid();
    Ok(trusted.then_some(peer.pid))
}
