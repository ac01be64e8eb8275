//! Two ranks with a channel: messages, descriptors, deadlines, and every way it can end.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use pp_contract::{CacheEpoch, Fault, FaultKind, Rank};
use pp_transport::control::{
    ControlChannel, ControlError, ControlReceiver, MAX_FDS, MAX_MESSAGE_BYTES, Message, Received,
    SocketKind, Vitals,
};
use pp_transport::launch::Via;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::control_support::{later, pair};

const BOTH: [Via; 2] = [Via::Unix, Via::Tcp];

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(100)
}

fn is_readable(receiver: &ControlReceiver) -> bool {
    let mut fds = [PollFd::new(receiver, PollFlags::IN)];
    let none = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut fds, Some(&none)).unwrap() == 1
}

fn wait_readable(receiver: &ControlReceiver) {
    let mut fds = [PollFd::new(receiver, PollFlags::IN)];
    let long = Timespec {
        tv_sec: 30,
        tv_nsec: 0,
    };
    assert_eq!(poll(&mut fds, Some(&long)).unwrap(), 1);
}

#[test]
fn every_kind_of_message_arrives_as_it_was_sent() {
    for via in BOTH {
        let (zero, mut one) = pair(via);
        let fault = Fault::new(FaultKind::Plugin, Rank::new(1), "phase_b", "it failed");
        let frame = vec![0xa5; MAX_MESSAGE_BYTES];
        let messages = [
            Message::Hello(b"hello"),
            Message::Verdict(b""),
            Message::Heartbeat,
            Message::Frame(&frame),
            Message::Frame(b""),
            Message::Introduce(b"words"),
            Message::Drain(15),
            Message::Cut(CacheEpoch::new(u64::MAX)),
            Message::Ask(true),
            Message::Ask(false),
            Message::Vitals(Vitals {
                resident_bytes: u64::MAX,
                queued: 3,
                device_bytes: [1, 2],
            }),
            Message::Abort(fault),
            Message::Bye,
        ];
        std::thread::scope(|scope| {
            // In a thread of its own: the largest frame may not fit into the socket at once.
            scope.spawn(|| {
                for message in &messages {
                    zero.sender().send(message, later()).unwrap();
                }
            });
            for message in &messages {
                assert_eq!(&one.receiver().recv_deadline(later()).unwrap(), message);
            }
        });
    }
}

#[test]
fn channel_knows_its_ends() {
    let (zero, one) = pair(Via::Unix);
    assert_eq!((zero.peer(), one.peer()), (Rank::new(1), Rank::new(0)));
    assert_eq!(zero.socket_kind(), SocketKind::Unix);
    let own = Some(rustix::process::getpid());
    assert_eq!((zero.peer_pid(), one.peer_pid()), (own, own));
    let (zero, _one) = pair(Via::Tcp);
    assert_eq!(
        (zero.socket_kind(), zero.peer_pid()),
        (SocketKind::Tcp, None)
    );
}

#[test]
fn auto_takes_the_unix_socket_on_one_host() {
    let (zero, _one) = pair(Via::Auto);
    assert_eq!(zero.socket_kind(), SocketKind::Unix);
}

#[test]
fn try_recv_does_not_wait_and_poll_tells_the_truth() {
    for via in BOTH {
        let (zero, mut one) = pair(via);
        assert!(!is_readable(one.receiver()));
        assert_eq!(one.receiver().try_recv().unwrap(), None);
        zero.sender()
            .send(&Message::Frame(b"one"), later())
            .unwrap();
        zero.sender()
            .send(&Message::Frame(b"two"), later())
            .unwrap();
        for expected in [b"one", b"two"] {
            wait_readable(one.receiver());
            assert_eq!(
                one.receiver().try_recv().unwrap(),
                Some(Message::Frame(expected))
            );
        }
        assert!(!is_readable(one.receiver()));
        assert_eq!(one.receiver().try_recv().unwrap(), None);
    }
}

#[test]
fn silent_peer_times_out_and_the_channel_still_works() {
    let (zero, mut one) = pair(Via::Unix);
    let error = one.receiver().recv_deadline(soon()).unwrap_err();
    assert!(matches!(error, ControlError::TimedOut { rank, .. } if rank == Rank::new(0)));
    assert_eq!(error.fault("waiting").kind, FaultKind::TimedOut);
    zero.sender().send(&Message::Heartbeat, later()).unwrap();
    assert_eq!(
        one.receiver().recv_deadline(later()).unwrap(),
        Message::Heartbeat
    );
}

#[test]
fn senders_in_many_threads_take_turns() {
    let (zero, mut one) = pair(Via::Unix);
    const EACH: usize = 200;
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let sender = zero.sender().clone();
            scope.spawn(move || {
                for _ in 0..EACH {
                    let body = vec![thread; 1 + usize::from(thread) * 9_000];
                    sender.send(&Message::Frame(&body), later()).unwrap();
                }
            });
        }
        let mut count = [0; 4];
        for _ in 0..4 * EACH {
            match one.receiver().recv_deadline(later()).unwrap() {
                Message::Frame(body) => {
                    assert!(
                        body.iter().all(|byte| *byte == body[0]),
                        "bodies do not mix"
                    );
                    count[usize::from(body[0])] += 1;
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(count, [EACH; 4]);
    });
}

#[test]
fn goodbye_is_told_from_loss() {
    for via in BOTH {
        let (zero, mut one) = pair(via);
        zero.sender().send(&Message::Bye, later()).unwrap();
        assert_eq!(one.receiver().recv_deadline(later()).unwrap(), Message::Bye);
        for _ in 0..2 {
            let error = one.receiver().recv_deadline(later()).unwrap_err();
            assert!(matches!(error, ControlError::PeerLeft { .. }), "{error}");
        }
        let error = zero
            .sender()
            .send(&Message::Heartbeat, later())
            .unwrap_err();
        assert!(matches!(error, ControlError::ApiMisuse { .. }), "{error}");

        let (zero, mut one) = pair(via);
        drop(zero);
        let error = one.receiver().recv_deadline(later()).unwrap_err();
        assert!(matches!(error, ControlError::PeerLost { .. }), "{error}");
        assert_eq!(error.fault("waiting").kind, FaultKind::PeerDied);
        assert!(one.receiver().try_recv().is_err());
    }
}

#[test]
fn goodbye_leaves_the_other_direction_open() {
    let (mut zero, one) = pair(Via::Tcp);
    zero.sender().send(&Message::Bye, later()).unwrap();
    one.sender()
        .send(&Message::Frame(b"the rest"), later())
        .unwrap();
    one.sender().send(&Message::Bye, later()).unwrap();
    assert_eq!(
        zero.receiver().recv_deadline(later()).unwrap(),
        Message::Frame(b"the rest")
    );
    assert_eq!(
        zero.receiver().recv_deadline(later()).unwrap(),
        Message::Bye
    );
}

#[test]
fn each_send_to_a_lost_peer_says_so_and_its_last_words_are_still_there() {
    for via in BOTH {
        let (mut zero, one) = pair(via);
        let fault = Fault::new(FaultKind::Plugin, Rank::new(1), "phase_b", "it failed");
        one.sender()
            .send(&Message::Abort(fault.clone()), later())
            .unwrap();
        drop(one);
        let error = loop {
            // The first write after the end may still find room.
            if let Err(error) = zero.sender().send(&Message::Heartbeat, later()) {
                break error;
            }
        };
        let again = zero.sender().send(&Message::Heartbeat, later());
        for error in [error, again.unwrap_err()] {
            assert!(matches!(error, ControlError::PeerLost { .. }), "{error}");
        }
        assert_eq!(
            zero.receiver().try_recv().unwrap(),
            Some(Message::Abort(fault))
        );
        let error = zero.receiver().try_recv().unwrap_err();
        assert!(matches!(error, ControlError::PeerLost { .. }), "{error}");
    }
}

#[test]
fn message_over_the_bound_is_refused_before_it_is_sent() {
    let (zero, mut one) = pair(Via::Unix);
    let large = vec![0; MAX_MESSAGE_BYTES + 1];
    let error = zero
        .sender()
        .send(&Message::Frame(&large), later())
        .unwrap_err();
    assert!(matches!(error, ControlError::ApiMisuse { .. }), "{error}");
    zero.sender().send(&Message::Heartbeat, later()).unwrap();
    assert_eq!(
        one.receiver().recv_deadline(later()).unwrap(),
        Message::Heartbeat
    );
}

fn memfd(text: &str) -> File {
    let mut file = File::from(memfd_create("pp-test", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(text.as_bytes()).unwrap();
    file
}

/// The descriptors that come next.
fn descriptors(channel: &mut ControlChannel) -> Vec<OwnedFd> {
    match channel.receiver().try_recv_any(later()).unwrap() {
        Some(Received::Descriptors(fds)) => fds,
        other => panic!("{other:?}"),
    }
}

#[test]
fn descriptors_arrive_in_order_between_messages() {
    let (zero, mut one) = pair(Via::Unix);
    let files: Vec<File> = (0..MAX_FDS).map(|i| memfd(&format!("file {i}"))).collect();
    let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    zero.sender().send(&Message::Heartbeat, later()).unwrap();
    zero.sender().send_fds(&fds, later()).unwrap();
    zero.sender().send_fds(&fds[3..4], later()).unwrap();
    zero.sender()
        .send(&Message::Frame(b"after"), later())
        .unwrap();
    assert_eq!(
        one.receiver().recv_deadline(later()).unwrap(),
        Message::Heartbeat
    );
    let received = descriptors(&mut one);
    for (i, fd) in received.into_iter().enumerate() {
        assert!(
            rustix::io::fcntl_getfd(&fd)
                .unwrap()
                .contains(rustix::io::FdFlags::CLOEXEC)
        );
        let mut file = File::from(fd);
        let mut text = String::new();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, format!("file {i}"));
    }
    assert_eq!(descriptors(&mut one).len(), 1);
    assert_eq!(
        one.receiver().recv_deadline(later()).unwrap(),
        Message::Frame(b"after")
    );
}

#[test]
fn descriptors_that_are_not_expected_are_an_error_and_are_closed() {
    let file = memfd("text");
    let fds = [file.as_fd(), file.as_fd()];

    let (zero, mut one) = pair(Via::Unix);
    zero.sender().send_fds(&fds, later()).unwrap();
    let error = one.receiver().recv_deadline(later()).unwrap_err();
    assert!(
        error.to_string().contains("when none were expected"),
        "{error}"
    );
}

#[test]
fn descriptors_need_a_unix_socket_and_a_count_in_bounds() {
    let file = memfd("text");
    let (zero, _one) = pair(Via::Tcp);
    let error = zero
        .sender()
        .send_fds(&[file.as_fd()], later())
        .unwrap_err();
    assert!(matches!(error, ControlError::ApiMisuse { .. }), "{error}");
    let (zero, _one) = pair(Via::Unix);
    for count in [0, MAX_FDS + 1] {
        let fds = vec![file.as_fd(); count];
        let error = zero.sender().send_fds(&fds, later()).unwrap_err();
        assert!(matches!(error, ControlError::ApiMisuse { .. }), "{error}");
    }
}
