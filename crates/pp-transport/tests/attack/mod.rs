//! Attacks on the place where ranks meet, as a stranger would make them: from outside, over the
//! socket. Shared by the tests and by `examples/attack.rs`.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each user of this file takes a part"
)]

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use pp_contract::{Rank, WorldSize};
use pp_transport::control::{RendezvousOptions, rendezvous};
use pp_transport::launch::{Address, JobSecret, Launch, Via};

/// What a rank writes first, its length in front.
pub const CALL_BYTES: usize = 66;
/// Time for one connection; a queue that is full is tried again.
const CONNECT_WITHIN: Duration = Duration::from_millis(200);
/// Between two bytes of one that writes slowly: its call would take over three seconds.
const DRIP: Duration = Duration::from_millis(50);

/// What the stranger does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    /// Connects and says nothing; keeps 10,000 connections.
    Crowd,
    /// Connects and leaves at once, as often as it can.
    Churn,
    /// Says what a rank says, with random bytes for the proof.
    NoSecret,
    /// Proves another secret.
    WrongSecret,
    /// Proves the right secret for another job.
    OtherJob,
    /// Repeats what a rank of the job has said.
    Replay,
    /// Says something else.
    Garbage,
    /// Says what a rank says, a byte at a time.
    Slow,
    /// Announces four gigabytes and sends what it can.
    Oversized,
}

impl Attack {
    pub const ALL: [Self; 9] = [
        Self::Crowd,
        Self::Churn,
        Self::NoSecret,
        Self::WrongSecret,
        Self::OtherJob,
        Self::Replay,
        Self::Garbage,
        Self::Slow,
        Self::Oversized,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Crowd => "crowd",
            Self::Churn => "churn",
            Self::NoSecret => "no-secret",
            Self::WrongSecret => "wrong-secret",
            Self::OtherJob => "other-job",
            Self::Replay => "replay",
            Self::Garbage => "garbage",
            Self::Slow => "slow",
            Self::Oversized => "oversized",
        }
    }

    /// Connections that each of two threads keeps open.
    fn held(self) -> usize {
        match self {
            Self::Crowd => 5_000,
            Self::Slow => 200,
            Self::Churn => 0,
            _ => 100,
        }
    }

    /// What to say on a connection; `calls` are what ranks have said.
    fn words(self, calls: &[Vec<u8>], count: u64) -> Vec<u8> {
        match self {
            Self::Crowd | Self::Churn => Vec::new(),
            Self::NoSecret | Self::Slow => plausible(count),
            Self::WrongSecret | Self::OtherJob | Self::Replay => {
                calls[count as usize % calls.len()].clone()
            }
            Self::Garbage => match count % 3 {
                0 => b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
                1 => vec![0; 64],
                _ => [&[62, 0, 0, 0][..], &[b'x'; 62]].concat(),
            },
            Self::Oversized => [&u32::MAX.to_le_bytes()[..], &[7; 64 << 10]].concat(),
        }
    }
}

impl fmt::Display for Attack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Attack {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = Self::ALL.iter().find(|attack| attack.name() == text);
        named.copied().ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|attack| attack.name()).collect();
            format!("no attack {text:?}; there are {}", names.join(", "))
        })
    }
}

/// A call with the form of one and nothing behind it.
fn plausible(count: u64) -> Vec<u8> {
    let mut noise = (0..52_u64).map(|i| (count ^ (i + 1).wrapping_mul(0x9e37_79b9)) as u8);
    let mut call = [&[62, 0, 0, 0][..], b"PPC1\x03\x00", &[1, 0, 0, 0]].concat();
    call.extend(noise.by_ref());
    call
}

/// Where to attack.
#[derive(Clone, Debug)]
pub enum Target {
    Tcp(SocketAddr),
    /// The name of an abstract Unix socket.
    Unix(String),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:@") {
            Some(name) => Ok(Self::Unix(name.into())),
            None => text
                .parse()
                .map(Self::Tcp)
                .map_err(|error| format!("{text:?}: {error}; ADDRESS:PORT or unix:@NAME")),
        }
    }
}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    fn connect(target: &Target) -> io::Result<Self> {
        match target {
            Target::Tcp(address) => {
                let stream = TcpStream::connect_timeout(address, CONNECT_WITHIN)?;
                // Resets when it is closed: no port is left in TIME_WAIT.
                rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
                stream.set_nonblocking(true)?;
                Ok(Self::Tcp(stream))
            }
            Target::Unix(name) => {
                let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
                let stream = UnixStream::connect_addr(&address)?;
                stream.set_nonblocking(true)?;
                Ok(Self::Unix(stream))
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => stream.write(bytes),
        }
    }
}

/// An attack that goes on until it is stopped.
pub struct Attacker {
    stop: Arc<AtomicBool>,
    connected: Arc<AtomicU64>,
    refused: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl Attacker {
    /// Starts it on two threads. `calls` are for the attacks that repeat what ranks say.
    pub fn start(attack: Attack, target: &Target, calls: Vec<Vec<u8>>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let [connected, refused] = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
        let threads = (0..2_u64).map(|start| {
            let (stop, connected) = (Arc::clone(&stop), Arc::clone(&connected));
            let (refused, target, calls) = (Arc::clone(&refused), target.clone(), calls.clone());
            std::thread::spawn(move || {
                let mut held = VecDeque::new();
                let mut count = start;
                while !stop.load(Ordering::Relaxed) {
                    match Stream::connect(&target) {
                        Ok(stream) => {
                            connected.fetch_add(1, Ordering::Relaxed);
                            begin(attack, stream, &calls, count, &mut held);
                        }
                        Err(_) => {
                            refused.fetch_add(1, Ordering::Relaxed);
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    }
                    count += 2;
                }
            })
        });
        let threads = threads.collect();
        Self {
            stop,
            connected,
            refused,
            threads,
        }
    }

    /// Connections made so far.
    pub fn connected(&self) -> u64 {
        self.connected.load(Ordering::Relaxed)
    }

    /// Connections that were not to be had so far.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Stops it and closes what it holds.
    pub fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("an attacker does not panic");
        }
    }
}

fn begin(
    attack: Attack,
    mut stream: Stream,
    calls: &[Vec<u8>],
    count: u64,
    held: &mut VecDeque<(Stream, Vec<u8>)>,
) {
    let words = attack.words(calls, count);
    if attack == Attack::Slow {
        held.push_back((stream, words));
        let all = held.iter_mut().filter(|(_, words)| !words.is_empty());
        for (stream, words) in all.take(if count % 20 < 2 { usize::MAX } else { 0 }) {
            // One that was hung up on is replaced like any other.
            let _ = stream.write(&words[..1]);
            words.remove(0);
        }
        std::thread::sleep(DRIP / 10);
    } else {
        let _ = stream.write(&words);
        held.push_back((stream, words));
    }
    while held.len() > attack.held() {
        held.pop_front();
    }
}

/// What a rank 1 that holds this secret says first to a program that listens, a few times.
pub fn calls(secret: &str, job_id: &str) -> Vec<Vec<u8>> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("its number").port();
    let launch = Launch::new(
        Rank::new(1),
        WorldSize::new(2).expect("two"),
        1,
        Some(Address {
            host: "127.0.0.1".into(),
            port,
        }),
        Via::Tcp,
        job_id,
        JobSecret::new(secret).expect("long enough"),
    )
    .expect("a place");
    let options = RendezvousOptions {
        timeout: Duration::from_millis(500),
        ..RendezvousOptions::default()
    };
    let rank = std::thread::spawn(move || rendezvous(&launch, &options).is_err());
    listener.set_nonblocking(true).expect("a socket");
    let mut calls = Vec::new();
    while calls.len() < 4 && !rank.is_finished() {
        let Ok((mut caller, _)) = listener.accept() else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        caller.set_nonblocking(false).expect("a socket");
        let mut call = vec![0; CALL_BYTES];
        caller.read_exact(&mut call).expect("a whole call");
        calls.push(call);
    }
    assert!(!calls.is_empty(), "the rank made no call");
    drop(listener);
    assert!(rank.join().expect("a rank does not panic"));
    calls
}
