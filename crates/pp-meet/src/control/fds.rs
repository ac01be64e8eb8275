//! Descriptors over a Unix socket (SCM_RIGHTS).
//!
//! Hazard: descriptors ride outside the sealed stream. Guarantee: they are taken only right behind
//! a sealed ticket that gives their number and a random nonce, with which their carrier message
//! must begin; what else arrives is closed. Reads that expect none give the kernel no room for
//! them, and it drops them.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::socket::{Socket, retry};
use crate::random::random_bytes;

/// Most descriptors passed at once.
pub const MAX_FDS: usize = 16;

const NONCE_BYTES: usize = 16;
pub(super) const TICKET_BYTES: usize = 1 + NONCE_BYTES;
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// Announces descriptors on the sealed stream.
pub(super) struct Ticket {
    count: u8,
    nonce: [u8; NONCE_BYTES],
}

impl Ticket {
    /// `count` is at most [`MAX_FDS`].
    pub(super) fn new(count: usize) -> Self {
        Self {
            count: count as u8,
            nonce: random_bytes(),
        }
    }

    pub(super) fn encode(&self) -> [u8; TICKET_BYTES] {
        let mut bytes = [self.count; TICKET_BYTES];
        bytes[1..].copy_from_slice(&self.nonce);
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (count, nonce) = bytes.split_first()?;
        Some(Self {
            count: *count,
            nonce: nonce.try_into().ok()?,
        })
    }
}

pub(super) fn send(
    socket: &Socket,
    ticket: &Ticket,
    fds: &[BorrowedFd<'_>],
    deadline: Instant,
) -> io::Result<()> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = socket.until(PollFlags::OUT, deadline, || {
        let mut space = [MaybeUninit::uninit(); SPACE];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let iov = [IoSlice::new(&ticket.nonce)];
        retry(|| sendmsg(socket, &iov, &mut control, flags))
    });
    match sent? {
        // So few bytes go as one piece or not at all.
        NONCE_BYTES => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// The descriptors of a ticket that the sealed stream has just given. `InvalidData` when what
/// comes is not them.
pub(super) fn recv(
    socket: &Socket,
    ticket: &Ticket,
    deadline: Instant,
) -> io::Result<Vec<OwnedFd>> {
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut nonce = [0; NONCE_BYTES];
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = socket.until(PollFlags::IN, deadline, || {
        retry(|| {
            let mut iov = [IoSliceMut::new(&mut nonce)];
            recvmsg(socket, &mut iov, &mut control, flags)
        })
    })?;
    // Owned from here on: whatever is refused below is closed.
    let fds: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    let (count, announced) = (fds.len(), usize::from(ticket.count));
    let is_cut = received.flags.contains(ReturnFlags::CTRUNC);
    match received.bytes {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        NONCE_BYTES if nonce != ticket.nonce => {
            Err(refused("descriptors came without their ticket".into()))
        }
        // There was room for all: this process may have no more descriptors.
        NONCE_BYTES if is_cut && count < announced => Err(Errno::MFILE.into()),
        NONCE_BYTES if is_cut || count != announced => Err(refused(format!(
            "{count} descriptors came, {announced} were announced"
        ))),
        NONCE_BYTES => Ok(fds),
        _ => Err(refused("descriptors came without their ticket".into())),
    }
}

fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
