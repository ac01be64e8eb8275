//! Ranks as threads, for the tests of the control channel.
#![allow(dead_code, reason = "each test crate uses its part")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pp_contract::{Rank, WorldSize};
use pp_transport::control::{
    ControlChannel, Peers, RendezvousError, RendezvousOptions, rendezvous,
};
use pp_transport::launch::{Address, JobSecret, Launch, Via};

pub(crate) const SECRET: &str = "the secret of the job under test";

/// Far enough away that only a hang reaches it.
pub(crate) fn later() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

pub(crate) fn world(ranks: u32) -> WorldSize {
    WorldSize::new(ranks).unwrap()
}

/// A job of its own per test: a port that was free a moment ago, and an id.
#[derive(Clone)]
pub(crate) struct Job {
    pub(crate) ranks: u32,
    pub(crate) port: u16,
    pub(crate) id: String,
    pub(crate) via: Via,
    pub(crate) secret: &'static str,
    pub(crate) options: RendezvousOptions,
}

impl Job {
    pub(crate) fn new(ranks: u32, via: Via) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        Self {
            ranks,
            port,
            id: format!("test/{}/{count}", std::process::id()),
            via,
            secret: SECRET,
            options: RendezvousOptions {
                timeout: Duration::from_secs(30),
                ..RendezvousOptions::default()
            },
        }
    }

    pub(crate) fn launch(&self, rank: u32) -> Launch {
        let address = Address {
            host: "127.0.0.1".into(),
            port: self.port,
        };
        Launch::new(
            Rank::new(rank),
            world(self.ranks),
            rank,
            Some(address),
            self.via,
            self.id.clone(),
            JobSecret::new(self.secret).unwrap(),
        )
        .unwrap()
    }

    pub(crate) fn start(&self, rank: u32) -> JoinHandle<Result<Peers, RendezvousError>> {
        let (launch, options) = (self.launch(rank), self.options.clone());
        std::thread::spawn(move || rendezvous(&launch, &options))
    }

    /// The name of the job's Unix socket, as a rank without a rank 0 tells it.
    pub(crate) fn unix_name(&self) -> String {
        let mut job = self.clone();
        job.via = Via::Unix;
        job.options.timeout = Duration::ZERO;
        let error = job.start(1).join().unwrap().unwrap_err().to_string();
        let (_, rest) = error.split_once("unix:@").unwrap();
        let end = rest.find(' ').unwrap();
        rest[..end].to_owned()
    }

    /// All ranks, met; in order.
    pub(crate) fn meet(&self) -> Vec<Peers> {
        let ranks: Vec<_> = (0..self.ranks).map(|rank| self.start(rank)).collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap().unwrap())
            .collect()
    }
}

/// Two ranks and the channel between them: rank 0's end, rank 1's end.
pub(crate) fn pair(via: Via) -> (ControlChannel, ControlChannel) {
    let mut peers = Job::new(2, via).meet();
    let one = peers[1].take(Rank::new(0)).unwrap();
    let zero = peers[0].take(Rank::new(1)).unwrap();
    (zero, one)
}

/// A connection, once somebody listens.
pub(crate) fn connect(port: u16) -> TcpStream {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => {
                stream
                    .set_read_timeout(Some(Duration::from_secs(30)))
                    .unwrap();
                return stream;
            }
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A relay that writes down what the caller says; can cut the connection after so many bytes.
pub(crate) fn relay(to: u16, cut_after: usize) -> (u16, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let said = Arc::new(Mutex::new(Vec::new()));
    let record = Arc::clone(&said);
    std::thread::spawn(move || {
        for caller in listener.incoming() {
            let mut caller = caller.unwrap();
            let mut server = connect(to);
            let (mut from, mut back) = (server.try_clone().unwrap(), caller.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut back);
                let _ = back.shutdown(Shutdown::Both);
            });
            let mut left = cut_after;
            let mut bytes = [0; 1024];
            while let Ok(read @ 1..) = caller.read(&mut bytes) {
                let read = read.min(left);
                left -= read;
                record.lock().unwrap().extend_from_slice(&bytes[..read]);
                if server.write_all(&bytes[..read]).is_err() || left == 0 {
                    break;
                }
            }
            let _ = server.shutdown(Shutdown::Both);
        }
    });
    (port, said)
}

/// Rank 1, calling at another port.
pub(crate) fn call_through(
    job: &Job,
    port: u16,
    timeout: Duration,
) -> Result<Peers, RendezvousError> {
    let address = Address {
        host: "127.0.0.1".into(),
        port,
    };
    let launch = Launch::new(
        Rank::new(1),
        world(job.ranks),
        1,
        Some(address),
        Via::Tcp,
        job.id.clone(),
        JobSecret::new(job.secret).unwrap(),
    );
    let options = RendezvousOptions {
        timeout,
        ..job.options.clone()
    };
    rendezvous(&launch.unwrap(), &options)
}
