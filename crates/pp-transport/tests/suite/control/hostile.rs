//! Strangers at the rendezvous: whatever they send, and however many they are, the ranks of the
//! job still meet, and no stranger is let in.

use pp_testing::assert_has;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pp_contract::{FaultKind, Rank};
use pp_transport::control::{Message, Peers, RendezvousError, TurnedAway};
use pp_transport::launch::Via;

use crate::control_support::{Job, call_through, connect, relay};

/// What a rank writes first, and what it writes once rank 0 has answered; prefixes included.
const CALL_BYTES: usize = 66;
const CONFIRM_BYTES: usize = 25;

/// Rank 0 of a job of two over TCP, listening; a stranger may call now.
struct Meeting {
    job: Job,
    zero: JoinHandle<Result<Peers, RendezvousError>>,
}

impl Meeting {
    fn new(tune: impl FnOnce(&mut Job)) -> Self {
        let mut job = Job::new(2, Via::Tcp);
        tune(&mut job);
        let zero = job.start(0);
        let meeting = Self { job, zero };
        drop(meeting.call());
        meeting
    }

    fn call(&self) -> TcpStream {
        connect(self.job.port)
    }

    /// Rank 1 joins and the two talk.
    fn succeeds(self) {
        let mut one = self.job.start(1).join().unwrap().unwrap();
        let mut zero = self.zero.join().unwrap().unwrap();
        let zero = zero.get_mut(Rank::new(1)).unwrap();
        let one = one.get_mut(Rank::new(0)).unwrap();
        zero.sender()
            .send(&Message::Bye, crate::control_support::later())
            .unwrap();
        one.receiver()
            .recv_deadline(crate::control_support::later())
            .unwrap();
    }

    /// No caller joins: what rank 0 says of those that tried.
    fn fails(self) -> String {
        self.zero.join().unwrap().unwrap_err().to_string()
    }
}

/// True once the other side has closed the connection without a word.
fn is_hung_up_on(mut stream: TcpStream) -> bool {
    let mut byte = [0];
    match stream.read(&mut byte) {
        Ok(read) => read == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn caller_of_another_version_hears_ours_and_nothing_else() {
    let meeting = Meeting::new(|_| {});
    let mut stranger = meeting.call();
    let call = [&[62, 0, 0, 0][..], b"PPC1\x09\x00", &[0; 56]].concat();
    stranger.write_all(&call).unwrap();
    let mut answer = Vec::new();
    stranger.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, b"\x0a\0\0\0PPC1\x03\0\0\0\0\0");
    meeting.succeeds();
}

#[test]
fn lying_length_is_hung_up_on_before_it_is_believed() {
    let meeting = Meeting::new(|job| job.options.timeout = Duration::from_secs(3));
    let mut stranger = meeting.call();
    stranger.write_all(&u32::MAX.to_le_bytes()).unwrap();
    assert!(is_hung_up_on(stranger));
    let text = meeting.fails();
    assert!(text.contains("1 call with garbage"), "{text}");
}

#[test]
fn rank_with_another_secret_is_not_let_in() {
    let meeting = Meeting::new(|job| job.options.timeout = Duration::from_secs(6));
    let mut other = meeting.job.clone();
    other.options.timeout = Duration::from_secs(30);
    other.secret = "the secret of some other job";
    let error = other.start(1).join().unwrap().unwrap_err();
    assert!(
        matches!(error, RendezvousError::WrongSecret { rank, .. } if rank == Rank::new(1)),
        "long before its time is over: {error}"
    );
    let fault = error.fault(Rank::new(1));
    assert_eq!(fault.kind, FaultKind::HandshakeMismatch);
    for word in ["PP_JOB_SECRET", "PP_JOB_ID", "tcp:127.0.0.1:"] {
        assert!(fault.to_string().contains(word), "{fault}");
    }
    let text = meeting.fails();
    assert!(text.contains("rank 1 of 2 did not join"), "{text}");
    assert_has(
        &text,
        &["without the secret of this job (the last as rank 1 from 127.0.0.1)"],
    );
}

#[test]
fn word_of_a_wrong_secret_is_not_believed_while_rank_0_may_still_come() {
    // An impostor has the port first and says what rank 0 would say to a wrong secret.
    let job = Job::new(2, Via::Tcp);
    let impostor = TcpListener::bind(("127.0.0.1", job.port)).unwrap();
    let said = std::thread::spawn(move || {
        for caller in impostor.incoming().take(4) {
            let mut caller = caller.unwrap();
            let mut call = [0; CALL_BYTES];
            caller.read_exact(&mut call).unwrap();
            caller
                .write_all(b"\x0b\0\0\0PPC1\x03\0\0\0\0\0\x01")
                .unwrap();
            // Reset, so that the port is free at once.
            rustix::net::sockopt::set_socket_linger(&caller, Some(Duration::ZERO)).unwrap();
        }
    });
    let one = job.start(1);
    said.join().unwrap();
    let zero = job.start(0).join().unwrap().unwrap();
    assert_eq!(zero.iter().count(), 1);
    assert_eq!(*zero.turned_away(), TurnedAway::default());
    one.join().unwrap().unwrap();
}

#[test]
fn slow_writer_is_dropped_in_the_middle() {
    let meeting = Meeting::new(|job| job.options.stranger_timeout = Duration::from_secs(1));
    let started = Instant::now();
    let mut slow = meeting.call();
    // Never a whole message.
    let message = [&[62, 0, 0, 0][..], b"PPC1\x03\x00"].concat();
    let mut bytes = message.iter().chain(std::iter::repeat(&0)).take(61);
    let is_taken = |byte: &u8| {
        std::thread::sleep(Duration::from_millis(50));
        slow.write_all(std::slice::from_ref(byte)).is_ok()
    };
    let is_dropped = !bytes.all(is_taken);
    assert!(is_dropped || is_hung_up_on(slow));
    assert!(started.elapsed() >= Duration::from_secs(1));
    meeting.succeeds();
}

#[test]
fn silent_caller_is_dropped_after_its_time() {
    let meeting = Meeting::new(|job| job.options.stranger_timeout = Duration::from_secs(1));
    let stranger = meeting.call();
    assert!(is_hung_up_on(stranger));
    meeting.succeeds();
}

#[test]
fn connection_cut_at_any_byte_of_the_handshake_leaves_the_meeting_whole() {
    let all = CALL_BYTES + CONFIRM_BYTES;
    for cut in [
        1,
        4,
        5,
        20,
        CALL_BYTES - 1,
        CALL_BYTES,
        CALL_BYTES + 4,
        all - 1,
    ] {
        let meeting = Meeting::new(|_| {});
        let (port, _) = relay(meeting.job.port, cut);
        call_through(&meeting.job, port, Duration::from_millis(20)).unwrap_err();
        meeting.succeeds();
    }
}

#[test]
fn stranger_in_the_place_of_rank_0_is_not_believed() {
    let mut job = Job::new(2, Via::Tcp);
    job.options.timeout = Duration::from_secs(3);
    let listener = TcpListener::bind(("127.0.0.1", job.port)).unwrap();
    std::thread::spawn(move || {
        for caller in listener.incoming() {
            let mut caller = caller.unwrap();
            let mut call = [0; CALL_BYTES];
            let _ = caller.read_exact(&mut call);
            let _ =
                caller.write_all(&[&[58, 0, 0, 0][..], b"PPC1\x03\0\0\0\0\0", &[7; 48]].concat());
        }
    });
    let text = job.start(1).join().unwrap().unwrap_err().to_string();
    assert_has(&text, &["does not hold the secret of this job"]);
}

#[test]
fn of_two_callers_of_one_rank_the_first_to_confirm_is_it() {
    let job = Job::new(3, Via::Tcp);
    let zero = job.start(0);
    // Both calls are answered before either caller's next frame is let through.
    let both_answered = Arc::new(pp_testing::Barrier::new(2));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let to = job.port;
    std::thread::spawn(move || {
        for caller in listener.incoming().take(2) {
            let mut caller = caller.unwrap();
            let both_answered = Arc::clone(&both_answered);
            std::thread::spawn(move || {
                let mut server = connect(to);
                let mut call = [0; CALL_BYTES];
                caller.read_exact(&mut call).unwrap();
                server.write_all(&call).unwrap();
                let (mut from, mut back) =
                    (server.try_clone().unwrap(), caller.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut from, &mut back));
                let mut confirm = [0; CONFIRM_BYTES];
                caller.read_exact(&mut confirm).unwrap();
                both_answered.wait();
                server.write_all(&confirm).unwrap();
            });
        }
    });
    let call = || {
        let job = job.clone();
        std::thread::spawn(move || call_through(&job, port, Duration::from_secs(30)))
    };
    let twins = [call(), call()];
    while !twins.iter().any(JoinHandle::is_finished) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let two = job.start(2);
    let refused = twins.map(|twin| twin.join().unwrap().is_err());
    assert_eq!(refused.iter().filter(|refused| **refused).count(), 1);
    assert_eq!(zero.join().unwrap().unwrap().iter().count(), 2);
    two.join().unwrap().unwrap();
}

#[test]
fn unix_socket_that_leads_nowhere_leaves_the_port() {
    let mut job = Job::new(2, Via::Auto);
    // Rank 0 over TCP only; a stranger of our own user has the Unix name.
    let name = job.unix_name();
    job.via = Via::Tcp;
    let zero = job.start(0);
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
    let listener = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    job.via = Via::Auto;
    job.start(1).join().unwrap().unwrap();
    zero.join().unwrap().unwrap();
}
