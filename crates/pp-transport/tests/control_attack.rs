//! A door under attack: rank 0 is a process of its own, a stranger does its worst for as long as
//! the test lasts, and the real rank 1 gets in all the same. No other caller does; rank 0's memory
//! and descriptors stay bounded; and it can say who came.

mod attack;
mod control_support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use attack::{Attack, Attacker, CALL_BYTES, Target};
use control_support::{Job, SECRET, call_through, connect, later, relay};
use pp_contract::Rank;
use pp_transport::control::{ControlError, Message, rendezvous};
use pp_transport::launch::{Launch, Via};

/// Set for the process that is rank 0.
const RANK_0: &str = "PP_TEST_ATTACKED";
/// What rank 0 says first on each of its lines.
const SAYS: &str = "rank 0: ";
/// How long a stranger is at it before the rank comes.
const HEAD_START: Duration = Duration::from_millis(300);
/// And so many callers at least. Rank 0 counts one when it has turned it away, and it holds 64 of them.
const FEWEST: u64 = 150;
/// Most that rank 0 may grow by while it is attacked, resident.
const MOST_GROWTH_KIB: u64 = 6 << 10;
/// Most descriptors of rank 0: 64 callers of each kind, the listeners, and what a process has.
const MOST_FDS: usize = 64 * 2 + 32;

/// One crowd at a time: two share the ports and the descriptors of this process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Not a test by itself: the process that the others start runs it.
#[test]
fn rank_0_of_an_attacked_job() {
    if std::env::var_os(RANK_0).is_none() {
        return;
    }
    let launch = Launch::from_env(|name| std::env::var(name).ok())
        .unwrap()
        .expect("a launcher's environment");
    let mut peers = rendezvous(&launch, &Job::new(2, launch.via()).options).unwrap();
    say(&format!("met {:?}", peers.turned_away()));
    let channel = peers.get_mut(Rank::new(1)).unwrap();
    channel.sender().send(&Message::Bye, later()).unwrap();
    // The peer is still there until it has said so, too.
    assert_eq!(
        channel.receiver().recv_deadline(later()).unwrap(),
        Message::Bye
    );
    say("done");
}

fn say(what: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{SAYS}{what}").unwrap();
    out.flush().unwrap();
}

/// Rank 0 as a process, listening.
struct Door {
    job: Job,
    zero: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    name: String,
    resident_kib: u64,
}

impl Door {
    fn open(via: Via) -> Self {
        let job = Job::new(2, via);
        let name = job.unix_name();
        let via = match via {
            Via::Auto => "auto",
            Via::Unix => "unix",
            Via::Tcp => "tcp",
        };
        let mut zero = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rank_0_of_an_attacked_job", "--nocapture"])
            .env(RANK_0, "1")
            .env("RANK", "0")
            .env("WORLD_SIZE", "2")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", job.port.to_string())
            .env("PP_RENDEZVOUS", via)
            .env("PP_JOB_ID", &job.id)
            .env("PP_JOB_SECRET", SECRET)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(zero.stdout.take().unwrap()).lines();
        if job.via == Via::Unix {
            let until = later();
            while !std::fs::read_to_string("/proc/net/unix")
                .unwrap()
                .contains(&name)
            {
                assert!(Instant::now() < until, "rank 0 never listened");
                std::thread::sleep(Duration::from_millis(2));
            }
        } else {
            drop(connect(job.port));
        }
        let resident_kib = memory(&zero, "VmRSS:");
        Self {
            job,
            zero,
            lines,
            name,
            resident_kib,
        }
    }

    fn target(&self) -> Target {
        match self.job.via {
            Via::Unix => Target::Unix(self.name.clone()),
            _ => Target::Tcp(SocketAddr::from(([127, 0, 0, 1], self.job.port))),
        }
    }

    fn fds(&self) -> usize {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", self.zero.id()));
        fds.unwrap().count()
    }

    /// The rank comes in, and so no other caller did; what rank 0 says of the others, by reason.
    fn rank_enters(mut self, what: impl std::fmt::Display) -> String {
        let started = Instant::now();
        let mut one = self.job.start(1).join().unwrap().unwrap();
        let after = started.elapsed();
        let one = one.get_mut(Rank::new(0)).unwrap();
        assert_eq!(one.receiver().recv_deadline(later()).unwrap(), Message::Bye);
        let grown = memory(&self.zero, "VmHWM:").saturating_sub(self.resident_kib);
        one.sender().send(&Message::Bye, later()).unwrap();
        let said = |line: std::io::Result<String>| {
            let line = line.unwrap();
            line.strip_prefix(SAYS).map(str::to_owned)
        };
        let said: Vec<String> = self.lines.by_ref().filter_map(said).collect();
        assert!(self.zero.wait().unwrap().success(), "{said:?}");
        assert_eq!(said.len(), 2, "{said:?}");
        println!(
            "{what}: in after {after:.1?}, {grown} KiB more, {}",
            said[0]
        );
        assert!(
            grown < MOST_GROWTH_KIB,
            "rank 0 grew by {grown} KiB under {what}"
        );
        said.into_iter().next().unwrap()
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        // Where a test failed before rank 0 had ended.
        let _ = self.zero.kill();
        let _ = self.zero.wait();
    }
}

/// A size of a process, in KiB.
fn memory(process: &Child, which: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(which));
    let size = line.unwrap().trim().trim_end_matches(" kB");
    size.parse().unwrap()
}

/// How many `what` stands for in the words of rank 0.
fn count(said: &str, what: &str) -> u64 {
    let (_, rest) = said.split_once(&format!("{what}: ")).expect(what);
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap();
    rest[..digits].parse().unwrap()
}

/// Attacks for as long as the rank needs to come in; what rank 0 says of who came.
fn under(attack: Attack, via: Via) -> String {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let door = Door::open(via);
    let calls = match attack {
        Attack::WrongSecret => attack::calls("the secret of some other job", &door.job.id),
        Attack::OtherJob => attack::calls(SECRET, "another job"),
        Attack::Replay => attack::calls(SECRET, &door.job.id),
        _ => Vec::new(),
    };
    let attacker = Attacker::start(attack, &door.target(), calls);
    let (head_start, hang) = (Instant::now() + HEAD_START, later());
    let mut most_fds = 0;
    while Instant::now() < head_start || attacker.connected() <= FEWEST {
        most_fds = most_fds.max(door.fds());
        assert!(
            Instant::now() < hang,
            "{attack}: {} callers are no attack",
            attacker.connected()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(most_fds <= MOST_FDS, "{attack}: {most_fds} descriptors");
    let said = door.rank_enters(format_args!("{attack} over {via:?}"));
    attacker.stop();
    said
}

#[test]
fn crowd_and_churn_keep_nobody_out() {
    for via in [Via::Tcp, Via::Unix] {
        let said = under(Attack::Crowd, via);
        assert!(count(&said, "crowded_out") + count(&said, "silent") > 30);
        let said = under(Attack::Churn, via);
        assert!(count(&said, "silent") > 30);
        assert_eq!(count(&said, "garbage") + count(&said, "wrong_secret"), 0);
    }
}

#[test]
fn strangers_without_the_secret_keep_nobody_out() {
    for attack in [Attack::NoSecret, Attack::WrongSecret, Attack::OtherJob] {
        let said = under(attack, Via::Tcp);
        assert!(count(&said, "wrong_secret") > 30, "{said}");
        assert_eq!(count(&said, "garbage") + count(&said, "replay"), 0);
        assert!(said.contains("as rank 1 from 127.0.0.1"), "{said}");
    }
    let said = under(Attack::NoSecret, Via::Unix);
    let from = format!("as rank 1 from process {}", std::process::id());
    assert!(said.contains(&from), "{said}");
}

#[test]
fn repeated_calls_keep_nobody_out() {
    for via in [Via::Tcp, Via::Unix] {
        let said = under(Attack::Replay, via);
        // Each of the few recordings was answered once at most, and led nowhere.
        assert!(count(&said, "replay") > 30, "{said}");
        assert_eq!(count(&said, "garbage") + count(&said, "wrong_secret"), 0);
    }
}

#[test]
fn garbage_slow_bytes_and_great_lengths_keep_nobody_out() {
    let said = under(Attack::Garbage, Via::Tcp);
    assert!(count(&said, "garbage") > 30, "{said}");
    let said = under(Attack::Slow, Via::Tcp);
    assert!(
        count(&said, "crowded_out") + count(&said, "silent") > 10,
        "{said}"
    );
    let said = under(Attack::Oversized, Via::Tcp);
    assert!(count(&said, "garbage") > 30, "{said}");
    let said = under(Attack::Garbage, Via::Unix);
    assert!(count(&said, "garbage") > 30, "{said}");
}

#[test]
fn ten_thousand_connections_at_once_keep_nobody_out() {
    const CROWD: usize = 10_000;
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let most = limit.current.unwrap_or(u64::MAX);
    if most < CROWD as u64 + 200 {
        let why = format!("{most} descriptors are allowed here, {CROWD} connections need more");
        assert!(std::env::var_os("PP_TESTS_MUST_RUN").is_none(), "{why}");
        println!("skipped: {why}");
        return;
    }
    let door = Door::open(Via::Tcp);
    let mut crowd = Vec::with_capacity(CROWD);
    let mut most_fds = 0;
    for count in 0..CROWD {
        let stranger = TcpStream::connect(("127.0.0.1", door.job.port)).unwrap();
        rustix::net::sockopt::set_socket_linger(&stranger, Some(Duration::ZERO)).unwrap();
        crowd.push(stranger);
        if count % 500 == 0 {
            most_fds = most_fds.max(door.fds());
        }
    }
    assert!(most_fds <= MOST_FDS, "{most_fds} descriptors");
    let said = door.rank_enters("10,000 connections");
    assert!(
        count(&said, "crowded_out") + count(&said, "silent") >= (CROWD - 64) as u64,
        "{said}"
    );
    drop(crowd);
}

/// A connection that comes from another address of this host.
fn connect_from(last: u8, port: u16) -> TcpStream {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
    // The ranks that other tests start must not inherit it.
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
    bind(&socket, &SocketAddr::from(([127, 0, 0, last], 0))).unwrap();
    connect(&socket, &SocketAddr::from(([127, 0, 0, 1], port))).unwrap();
    TcpStream::from(socket)
}

#[test]
fn crowd_from_elsewhere_makes_room_by_itself() {
    let job = Job::new(2, Via::Tcp);
    let call = attack::calls(SECRET, &job.id).remove(0);
    let zero = job.start(0);
    // A rank far away, whose call takes its time, and whose answer does too.
    let mut slow = connect(job.port);
    let (first, second) = call.split_at(CALL_BYTES / 2);
    slow.write_all(first).unwrap();
    let mut crowd: Vec<TcpStream> = (0..200).map(|_| connect_from(2, job.port)).collect();
    slow.write_all(second).unwrap();
    crowd.extend((0..200).map(|_| connect_from(3, job.port)));
    let mut answer = [0; 62];
    slow.read_exact(&mut answer).unwrap();
    job.start(1).join().unwrap().unwrap();
    let zero = zero.join().unwrap().unwrap();
    assert!(zero.turned_away().crowded_out > 200);
}

#[test]
fn impostor_that_listens_first_gets_nothing_it_can_use() {
    let job = Job::new(2, Via::Tcp);
    let impostor = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = impostor.local_addr().unwrap().port();
    let rank = {
        let job = job.clone();
        std::thread::spawn(move || call_through(&job, port, Duration::from_secs(10)))
    };
    // It hangs up, says nonsense, or says what a rank 0 of another secret says; and listens on.
    let answers = [
        &b""[..],
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"\x0b\0\0\0PPC1\x03\0\0\0\0\0\x01",
    ];
    let mut said: Vec<Vec<u8>> = Vec::new();
    for (caller, answer) in impostor.incoming().take(9).zip(answers.iter().cycle()) {
        let mut caller = caller.unwrap();
        let mut bytes = vec![0; CALL_BYTES];
        caller.read_exact(&mut bytes).unwrap();
        caller.write_all(answer).unwrap();
        // The rank may have read it, and hung up.
        let _ = caller.shutdown(std::net::Shutdown::Write);
        let _ = caller.read_to_end(&mut bytes);
        said.push(bytes);
    }
    drop(impostor);
    rank.join().unwrap().unwrap_err();
    for (at, call) in said.iter().enumerate() {
        // One call and not a byte more, with a proof that is new each time and names nothing.
        assert_eq!(call.len(), CALL_BYTES);
        assert!(said[..at].iter().all(|other| other[14..] != call[14..]));
        for secret in [SECRET.as_bytes(), job.id.as_bytes()] {
            assert!(!call.windows(8).any(|part| secret.starts_with(part)));
        }
    }
    // Said to the real rank 0 it gets one answer that only the real rank could read.
    let zero = job.start(0);
    for call in &said {
        for round in 0..2 {
            let mut stranger = connect(job.port);
            stranger.write_all(call).unwrap();
            stranger.write_all(&[0x55; 25]).unwrap();
            let mut answer = Vec::new();
            let _ = stranger.read_to_end(&mut answer);
            assert!(answer.len() < 100 && (round == 0 || answer.is_empty()));
        }
    }
    job.start(1).join().unwrap().unwrap();
    let zero = zero.join().unwrap().unwrap();
    let others = zero.turned_away();
    assert_eq!(others.replay, 2 * said.len() as u64);
    assert_eq!(others.garbage + others.silent + others.wrong_secret, 0);
}

#[test]
fn phase_b_of_before_is_not_taken_for_the_new_one() {
    for via in [Via::Tcp, Via::Auto] {
        let mut job = Job::new(2, via);
        let zero = job.start(0);
        // The first rank 1 joins, over a line that somebody records.
        job.via = Via::Tcp;
        let (port, said) = relay(job.port, usize::MAX);
        let mut old = call_through(&job, port, Duration::from_secs(30)).unwrap();
        let old = old.get_mut(Rank::new(0)).unwrap();
        let zero = zero.join().unwrap().unwrap();
        old.sender().send(&Message::Heartbeat, later()).unwrap();
        // Another has called, and was stopped before it said another word.
        let calls = attack::calls(SECRET, &job.id);
        // Rank 0 gives the generation up: its channels close, and it opens the door again.
        drop(zero);
        job.via = via;
        let zero = job.start(0);

        // The old one wakes up: its channel has ended, and what it says reaches no rank.
        let ended = old.receiver().recv_deadline(later()).unwrap_err();
        assert!(matches!(ended, ControlError::PeerLost { .. }), "{ended}");
        let until = later();
        while old.sender().send(&Message::Heartbeat, later()).is_ok() {
            assert!(Instant::now() < until, "it talks to somebody");
        }
        // What it said, said again to the open door, whole and in part, is not an entry.
        let said = said.lock().unwrap().clone();
        for bytes in [&said[..], &said[..CALL_BYTES], &calls[0]] {
            let mut stranger = connect(job.port);
            let _ = stranger.write_all(bytes);
            let _ = stranger.write_all(&[0x55; 25]);
            let mut answer = Vec::new();
            let _ = stranger.read_to_end(&mut answer);
            assert!(answer.len() < 100);
        }
        assert!(!zero.is_finished());

        let mut new = job.start(1).join().unwrap().unwrap();
        let mut zero = zero.join().unwrap().unwrap();
        assert_eq!(zero.turned_away().replay, 3);
        // Rank 0 hears the new one and nothing of the old.
        let new = new.get_mut(Rank::new(0)).unwrap();
        let zero = zero.get_mut(Rank::new(1)).unwrap();
        assert_eq!(zero.receiver().try_recv().unwrap(), None);
        new.sender().send(&Message::Bye, later()).unwrap();
        let heard = zero.receiver().recv_deadline(later()).unwrap();
        assert_eq!(heard, Message::Bye);
    }
}
