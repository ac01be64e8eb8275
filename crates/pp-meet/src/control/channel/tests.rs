use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::*;
use crate::control::secure;

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(50)
}

/// Two ends over sockets that hold less than the largest message.
fn narrow_pair() -> (ControlChannel, ControlChannel) {
    let (zero, one) = UnixStream::pair().unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&zero, 4096).unwrap();
    let (session_one, session_zero) = secure::testing::session();
    let channel = |peer, stream: UnixStream, session| {
        let socket = Arc::new(Socket::new(stream));
        ControlChannel::new(Rank::new(peer), SocketKind::Unix, None, socket, session)
    };
    (channel(1, zero, session_zero), channel(0, one, session_one))
}

#[test]
fn send_cut_in_the_middle_breaks_the_stream_for_good() {
    let (zero, mut one) = narrow_pair();
    let frame = vec![7; MAX_MESSAGE_BYTES];
    let error = zero.sender().send(&Message::Frame(&frame), soon());
    assert!(
        matches!(error, Err(ControlError::TimedOut { .. })),
        "{error:?}"
    );
    for _ in 0..2 {
        let error = zero.sender().send(&Message::Heartbeat, soon());
        assert!(
            matches!(error, Err(ControlError::Broken { .. })),
            "{error:?}"
        );
    }
    // The peer waits for the rest, and sees a loss in its place.
    assert_eq!(one.receiver().try_recv().unwrap(), None);
    drop(zero);
    let error = one.receiver().recv_deadline(soon()).unwrap_err();
    assert!(matches!(error, ControlError::PeerLost { .. }), "{error}");
}

#[test]
fn send_that_times_out_before_its_first_byte_does_no_harm() {
    let (zero, mut one) = narrow_pair();
    let body = [7; 256];
    let mut sent = 0;
    let error = loop {
        match zero.sender().send(&Message::Frame(&body), soon()) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, ControlError::TimedOut { .. }), "{error}");
    for _ in 0..sent {
        let message = one.receiver().recv_deadline(soon()).unwrap();
        assert_eq!(message, Message::Frame(&body));
    }
    zero.sender().send(&Message::Heartbeat, soon()).unwrap();
    let message = one.receiver().recv_deadline(soon()).unwrap();
    assert_eq!(message, Message::Heartbeat);
}

#[test]
fn message_larger_than_the_socket_arrives_while_it_is_read() {
    let (zero, mut one) = narrow_pair();
    let frame = vec![7; MAX_MESSAGE_BYTES];
    let later = Instant::now() + Duration::from_secs(30);
    std::thread::scope(|scope| {
        scope.spawn(|| zero.sender().send(&Message::Frame(&frame), later).unwrap());
        let message = one.receiver().recv_deadline(later).unwrap();
        assert_eq!(message, Message::Frame(&frame));
    });
}

#[test]
fn frame_that_nobody_sealed_is_a_peer_that_misbehaves() {
    let (zero, mut one) = narrow_pair();
    let error = [&21_u32.to_le_bytes()[..], &[7; 21]].concat();
    let socket = &zero.sender().shared.socket;
    socket.write_all(&error, soon()).unwrap();
    let error = one.receiver().try_recv().unwrap_err();
    assert!(
        matches!(error, ControlError::PeerMisbehaved { .. }),
        "{error}"
    );
}

#[test]
fn ticket_without_its_descriptors_is_refused() {
    for (nonce, fds) in [(false, true), (true, false)] {
        let (zero, mut one) = narrow_pair();
        let ticket = Ticket::new(1);
        let carrier = if nonce { &ticket } else { &Ticket::new(1) };
        let sender = zero.sender();
        sender
            .send_raw(wire::FDS, &ticket.encode(), None, soon())
            .unwrap();
        let socket = &sender.shared.socket;
        if fds {
            fds::send(socket, carrier, &[socket.as_fd()], soon()).unwrap();
        } else {
            socket.write_all(&carrier.encode()[1..], soon()).unwrap();
        }
        let error = one.receiver().try_recv_any(soon()).unwrap_err();
        assert!(
            matches!(error, ControlError::PeerMisbehaved { .. }),
            "{error}"
        );
    }
}

#[test]
fn descriptors_beyond_those_announced_are_refused() {
    let (zero, mut one) = narrow_pair();
    let ticket = Ticket::new(1);
    let sender = zero.sender();
    let fd = sender.shared.socket.as_fd();
    sender
        .send_raw(
            wire::FDS,
            &ticket.encode(),
            Some((&ticket, &[fd, fd, fd])),
            soon(),
        )
        .unwrap();
    let error = one.receiver().try_recv_any(soon()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("3 descriptors came, 1 were announced"),
        "{error}"
    );
}

#[test]
fn a_goodbye_comes_behind_what_was_announced() {
    let (zero, mut one) = narrow_pair();
    let sender = zero.sender();
    let announced = sender.announce();
    let error = sender.send(&Message::Bye, soon()).unwrap_err();
    assert!(matches!(error, ControlError::TimedOut { .. }), "{error}");
    sender.send(&Message::Frame(&[7]), soon()).unwrap();
    drop(announced);
    sender.send(&Message::Bye, soon()).unwrap();
    for expected in [Message::Frame(&[7]), Message::Bye] {
        assert_eq!(one.receiver().recv_deadline(soon()).unwrap(), expected);
    }
}
