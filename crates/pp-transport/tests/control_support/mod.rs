//! Ranks as threads, for the tests of the control channel.
#![allow(dead_code, reason = "each test crate uses its part")]

use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};
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
