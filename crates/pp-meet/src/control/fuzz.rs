//! What reaches the control channel, run on any bytes: see [`crate::fuzz`].

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use super::channel::{ControlChannel, Received};
use super::fds::{self, MAX_FDS, Ticket};
use super::frame::{FrameReader, ReadProgress};
use super::message::{Message, kind as wire};
pub use super::rendezvous::fuzz::call;
use super::secure::testing::{ONE, ZERO, ours, session_of_known_keys};
use super::secure::{
    Answer, Caller, MAX_ANSWER_BYTES, MAX_MESSAGE_BYTES, MIN_ANSWER_BYTES, Sealer,
};
use super::socket::{Socket, SocketKind};
use pp_words::fuzz::Script;

/// What a program that listens in rank 0's place answers to a call: as it is, and with the form of
/// an answer. No program without the secret can make one that opens.
pub fn answer(bytes: &[u8]) {
    let (_, body) = bytes.split_at(4.min(bytes.len()));
    let mut formed = b"PPC1\x03\0\0\0\0\0".to_vec();
    formed.extend_from_slice(body);
    formed.truncate(MAX_ANSWER_BYTES);
    let mut framed = (formed.len() as u32).to_le_bytes().to_vec();
    framed.extend_from_slice(&formed);
    for stream in [bytes, &framed] {
        let mut rest = stream;
        let mut reader = FrameReader::new(MIN_ANSWER_BYTES, MAX_ANSWER_BYTES);
        let read = |buf: &mut [u8]| {
            let count = buf.len().min(rest.len());
            buf[..count].copy_from_slice(&rest[..count]);
            rest = &rest[count..];
            Ok(count)
        };
        if let Ok(ReadProgress::Frame) = reader.poll(read) {
            assert!(reader.frame().len() <= MAX_ANSWER_BYTES);
            let (caller, _) = Caller::new(&ours(), ONE, ZERO, 2);
            let answered = caller.finish(ZERO, reader.frame());
            assert!(answered.is_err(), "no secret was needed to answer");
        }
    }
    let (caller, _) = Caller::new(&ours(), ONE, ZERO, 2);
    if let Ok(Answer::Session(_) | Answer::Refused(_)) = caller.finish(ZERO, bytes) {
        panic!("no secret was needed to answer");
    }
}

/// A channel that is joined, and the socket of the peer, which need not seal anything.
pub fn channel() -> (ControlChannel, UnixStream) {
    let (socket, peer) = UnixStream::pair().expect("a pair of sockets");
    peer.set_nonblocking(true).expect("a socket");
    let (_, session) = session_of_known_keys();
    let socket = Arc::new(Socket::new(socket));
    let channel = ControlChannel::new(ONE, SocketKind::Unix, None, socket, session);
    (channel, peer)
}

/// What a peer that holds the secret sends once it has joined: sealed messages of every kind and
/// any body, descriptors that go with them or do not, and bytes that are not sealed.
pub fn messages(bytes: &[u8]) {
    let (socket, other) = UnixStream::pair().expect("a pair of sockets");
    other.set_nonblocking(true).expect("a socket");
    let (session_one, session_zero) = session_of_known_keys();
    let socket = Arc::new(Socket::new(socket));
    let mut channel = ControlChannel::new(ONE, SocketKind::Unix, None, socket, session_zero);
    let mut peer = Peer {
        raw: other.try_clone().expect("a descriptor"),
        socket: Socket::new(other),
        sealer: session_one.sealer,
    };
    let mut script = Script::new(bytes);
    while !script.is_over() {
        let takes_fds = peer.step(&mut script);
        loop {
            // What was sent is there.
            let now = Instant::now();
            let receiver = channel.receiver();
            let result = if takes_fds {
                receiver.try_recv_any(now).map(|received| {
                    received.map(|received| match received {
                        Received::Message(message) => survives(&message),
                        Received::Descriptors(fds) => assert!(fds.len() <= MAX_FDS),
                    })
                })
            } else {
                receiver
                    .try_recv()
                    .map(|message| message.map(|message| survives(&message)))
            };
            match result {
                Ok(Some(())) => {}
                Ok(None) => break,
                // The job would end here.
                Err(error) => {
                    assert!(!error.to_string().is_empty());
                    return;
                }
            }
        }
    }
}

/// What was accepted is what its own form says.
fn survives(message: &Message<'_>) {
    let (kind, body) = message.encode().expect("it came over the wire");
    assert!(body.len() <= MAX_MESSAGE_BYTES);
    assert_eq!(Message::parse(kind, &body).as_ref(), Ok(message));
    assert!(format!("{message:?}").len() < 1024);
}

struct Peer {
    raw: UnixStream,
    socket: Socket,
    sealer: Sealer,
}

impl Peer {
    /// Sends something; how many descriptors the other side expects now, if it does.
    fn step(&mut self, script: &mut Script<'_>) -> bool {
        match script.byte() {
            // Kinds that there are, and some that there are not.
            kind @ 0..32 => {
                let count = usize::from(script.byte()) * 8;
                let sealed = self.sealer.seal(kind, script.bytes(count));
                let _ = self.raw.write(sealed);
                false
            }
            // One byte of a sealed frame is another.
            at @ 32..96 => {
                let mut sealed = self.sealer.seal(wire::FRAME, script.bytes(24)).to_vec();
                let at = usize::from(at) % sealed.len();
                sealed[at] ^= script.byte();
                let _ = self.raw.write(&sealed);
                false
            }
            // Descriptors: announced, sent and expected as it comes.
            step @ 96..160 => {
                let announced = Ticket::new(usize::from(script.byte()) % (MAX_FDS + 2));
                let _ = self
                    .raw
                    .write(self.sealer.seal(wire::FDS, &announced.encode()));
                let own = self.raw.try_clone().expect("a descriptor");
                let count = usize::from(script.byte()) % (MAX_FDS + 1);
                let sent = vec![own.as_fd(); count];
                let other = Ticket::new(count);
                let ticket = if step < 128 { &announced } else { &other };
                if count > 0 {
                    let _ = fds::send(&self.socket, ticket, &sent, Instant::now());
                }
                step % 4 != 0
            }
            _ => {
                let count = usize::from(script.byte());
                let _ = self.raw.write(script.bytes(count));
                false
            }
        }
    }
}
