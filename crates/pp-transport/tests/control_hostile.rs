//! Strangers at the rendezvous: whatever they send, and however many they are, the ranks of the
//! job still meet, and no stranger is let in.

mod control_support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use control_support::{Job, call_through, connect, relay};
use pp_contract::{FaultKind, Rank};
use pp_transport::control::{ControlError, Message, Peers, RendezvousError, TurnedAway};
use pp_transport::launch::Via;

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
            .send(&Message::Bye, control_support::later())
            .unwrap();
        one.receiver()
            .recv_deadline(control_support::later())
            .unwrap();
    }

    /// No caller joins: what rank 0 says of those that tried.
    fn fails(self) -> String {
        self.zero.join().unwrap().unwrap_err().to_string()
    }
}

fn short(job: &mut Job) {
    job.options.timeout = Duration::from_secs(3);
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
fn garbage_is_hung_up_on_at_once() {
    let meeting = Meeting::new(|_| {});
    let zeros = [0; 64];
    let ones = [0xff; 64];
    let plausible_length = [&[62, 0, 0, 0][..], &[b'x'; 62]].concat();
    let version = [&[62, 0, 0, 0][..], b"PPC1\x09\x00", &[0; 56]].concat();
    for bytes in [
        &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
        &zeros,
        &ones,
        &plausible_length,
    ] {
        let mut stranger = meeting.call();
        stranger.write_all(bytes).unwrap();
        assert!(is_hung_up_on(stranger));
    }
    let mut stranger = meeting.call();
    stranger.write_all(&version).unwrap();
    let mut answer = Vec::new();
    stranger.read_to_end(&mut answer).unwrap();
    assert_eq!(
        answer, b"\x0a\0\0\0PPC1\x01\0\0\0\0\0",
        "our version, and nothing else"
    );
    meeting.succeeds();
}

#[test]
fn lying_length_is_hung_up_on_before_it_is_believed() {
    let meeting = Meeting::new(short);
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
    assert!(
        text.contains("without the secret of this job (the last as rank 1 from 127.0.0.1)"),
        "{text}"
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
                .write_all(b"\x0b\0\0\0PPC1\x01\0\0\0\0\0\x01")
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
fn rank_of_another_job_with_the_same_secret_is_not_let_in() {
    let meeting = Meeting::new(|_| {});
    let mut other = meeting.job.clone();
    other.id.push('x');
    other.options.timeout = Duration::from_millis(100);
    other.start(1).join().unwrap().unwrap_err();
    meeting.succeeds();
}

#[test]
fn crowd_that_says_nothing_does_not_keep_a_rank_out() {
    let meeting = Meeting::new(|_| {});
    let crowd: Vec<TcpStream> = (0..500).map(|_| meeting.call()).collect();
    meeting.succeeds();
    drop(crowd);
}

#[test]
fn crowd_that_keeps_coming_does_not_keep_a_rank_out() {
    let meeting = Meeting::new(|job| job.options.max_pending = 4);
    let stop = Arc::new(AtomicBool::new(false));
    let port = meeting.job.port;
    let crowd: Vec<_> = (0..2)
        .map(|_| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                let mut held = std::collections::VecDeque::new();
                while !stop.load(Ordering::Relaxed) {
                    // Fails once the listener is closed, which is the end of the test. A caller
                    // that resets leaves no port in TIME_WAIT to starve the tests beside this one.
                    if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
                        let at_once = Some(Duration::ZERO);
                        rustix::net::sockopt::set_socket_linger(&stream, at_once).unwrap();
                        held.push_back(stream);
                    }
                    std::thread::sleep(Duration::from_micros(200));
                    if held.len() > 100 {
                        held.pop_front();
                    }
                }
            })
        })
        .collect();
    meeting.succeeds();
    stop.store(true, Ordering::Relaxed);
    for stranger in crowd {
        stranger.join().unwrap();
    }
}

#[test]
fn slow_writer_is_dropped_in_the_middle() {
    let meeting = Meeting::new(|job| job.options.stranger_timeout = Duration::from_secs(1));
    let mut slow = meeting.call();
    let started = Instant::now();
    // Never a whole message.
    let message = [&[62, 0, 0, 0][..], b"PPC1\x01\x00"].concat();
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
fn slow_writers_do_not_keep_a_rank_out() {
    let meeting = Meeting::new(|_| {});
    let stop = Arc::new(AtomicBool::new(false));
    let mut slow: Vec<TcpStream> = (0..20).map(|_| meeting.call()).collect();
    let writer = {
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                for stream in &mut slow {
                    let _ = stream.write_all(&[62]);
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        })
    };
    meeting.succeeds();
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
}

#[test]
fn silent_caller_is_dropped_after_its_time() {
    let meeting = Meeting::new(|job| job.options.stranger_timeout = Duration::from_secs(1));
    let stranger = meeting.call();
    assert!(is_hung_up_on(stranger));
    meeting.succeeds();
}

#[test]
fn recorded_rank_is_not_let_in_again() {
    // A whole join of rank 1 is recorded on its way to a first rank 0 ...
    let mut job = Job::new(2, Via::Tcp);
    let zero = job.start(0);
    let (port, said) = relay(job.port, usize::MAX);
    call_through(&job, port, Duration::from_secs(30)).unwrap();
    zero.join().unwrap().unwrap();
    let said = said.lock().unwrap().clone();
    assert_eq!(said.len(), CALL_BYTES + CONFIRM_BYTES);

    // ... and said again to a second one of the same job and secret.
    short(&mut job);
    let meeting = Meeting {
        zero: job.start(0),
        job,
    };
    let mut replay = meeting.call();
    replay.write_all(&said).unwrap();
    let mut answer = Vec::new();
    let _ = replay.read_to_end(&mut answer);
    assert!(
        answer.len() < 100,
        "an answer that only the recorded rank could have read"
    );
    let text = meeting.fails();
    assert!(
        text.contains("1 call with a repeated or broken handshake"),
        "{text}"
    );
    assert!(text.contains("rank 1 of 2 did not join"), "{text}");
}

#[test]
fn replays_do_not_keep_the_recorded_rank_out() {
    let job = Job::new(2, Via::Tcp);
    let zero = job.start(0);
    let (port, said) = relay(job.port, usize::MAX);
    call_through(&job, port, Duration::from_secs(30)).unwrap();
    zero.join().unwrap().unwrap();
    let call = said.lock().unwrap()[..CALL_BYTES].to_vec();

    let meeting = Meeting {
        zero: job.start(0),
        job,
    };
    let held: Vec<TcpStream> = (0..100)
        .map(|_| {
            let mut replay = meeting.call();
            // Some are dropped for want of room before they are done.
            let _ = replay.write_all(&call);
            replay
        })
        .collect();
    meeting.succeeds();
    drop(held);
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
                caller.write_all(&[&[58, 0, 0, 0][..], b"PPC1\x01\0\0\0\0\0", &[7; 48]].concat());
        }
    });
    let text = job.start(1).join().unwrap().unwrap_err().to_string();
    assert!(
        text.contains("does not hold the secret of this job"),
        "{text}"
    );
}

#[test]
fn altered_frame_after_the_join_is_a_peer_that_misbehaves() {
    let job = Job::new(2, Via::Tcp);
    let zero = job.start(0);
    // The first thing rank 1 says after joining gets one bit flipped.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let to = job.port;
    std::thread::spawn(move || {
        let (mut caller, _) = listener.accept().unwrap();
        let mut server = connect(to);
        let (mut from, mut back) = (server.try_clone().unwrap(), caller.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut from, &mut back));
        for part in [CALL_BYTES, CONFIRM_BYTES] {
            let mut bytes = vec![0; part];
            caller.read_exact(&mut bytes).unwrap();
            server.write_all(&bytes).unwrap();
        }
        let mut frame = [0; 25];
        caller.read_exact(&mut frame).unwrap();
        frame[10] ^= 4;
        server.write_all(&frame).unwrap();
    });
    let mut one = call_through(&job, port, Duration::from_secs(30)).unwrap();
    let mut zero = zero.join().unwrap().unwrap();
    let one = one.get_mut(Rank::new(0)).unwrap();
    one.sender()
        .send(&Message::Bye, control_support::later())
        .unwrap();
    let zero = zero.get_mut(Rank::new(1)).unwrap();
    let error = zero
        .receiver()
        .recv_deadline(control_support::later())
        .unwrap_err();
    assert!(
        matches!(error, ControlError::PeerMisbehaved { .. }),
        "{error}"
    );
}

#[test]
fn of_two_callers_of_one_rank_the_first_to_confirm_is_it() {
    let job = Job::new(3, Via::Tcp);
    let zero = job.start(0);
    // Both calls are answered before either caller's next frame is let through.
    let both_answered = Arc::new(std::sync::Barrier::new(2));
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

#[test]
fn strangers_on_the_unix_socket_are_turned_away_too() {
    let job = Job::new(2, Via::Unix);
    let address = std::os::unix::net::SocketAddr::from_abstract_name(job.unix_name()).unwrap();
    let zero = job.start(0);
    let mut strangers = Vec::new();
    while strangers.len() < 100 {
        match UnixStream::connect_addr(&address) {
            Ok(mut stranger) => {
                if strangers.len() % 2 == 0 {
                    let _ = stranger.write_all(b"let me in, I say");
                }
                strangers.push(stranger);
            }
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
    job.start(1).join().unwrap().unwrap();
    zero.join().unwrap().unwrap();
}
