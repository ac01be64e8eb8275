//! A caller at rank 0's door, run on any bytes: see [`crate::fuzz`].

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use super::*;
use crate::control::secure::testing::{ONE, ZERO, ours};
use crate::control::secure::{Answer, Caller};
use crate::control::socket::Socket;
use pp_words::fuzz::Script;

/// What a caller says to rank 0, in pieces. It may begin with the call of a rank of the job, which
/// somebody else may repeat, whole or with changes; only who made it can go on from there.
pub fn call(bytes: &[u8]) {
    let key = ours();
    let mut script = Script::new(bytes);
    let mut admission = Admission {
        key: &key,
        own: ZERO,
        world_size: WorldSize::new(2).expect("two"),
        awaited: BTreeSet::from([ONE]),
        calls: VecDeque::new(),
    };
    let (socket, mut stranger) = UnixStream::pair().expect("a pair of sockets");
    stranger.set_nonblocking(true).expect("a socket");
    let connected = Connected {
        socket: Socket::new(socket),
        kind: SocketKind::Unix,
        pid: None,
    };
    let source = "a test".into();
    let mut caller = Pending::new(Accepted { connected, source }, Duration::from_secs(1));
    let form = script.byte();
    let world = u32::from(form % 4);
    let rank = Rank::new(u32::from(form / 4 % 4));
    let (made, call) = Caller::new(&key, rank, ZERO, world);
    let mut is_whole = false;
    if form >= 64 {
        let mut call = call;
        if form >= 160 {
            let at = usize::from(script.byte()) % call.len();
            let change = script.byte();
            call[at] ^= change;
            is_whole = change == 0;
        } else {
            is_whole = true;
        }
        let _ = stranger.write(&call);
    }
    let mut made = Some(made);
    loop {
        match caller.hear(&mut admission) {
            Heard::Waiting => {}
            // Only who made the call has the keys, and this script has them not.
            Heard::Joined(..) => panic!("a stranger was let in"),
            Heard::Away(_) => return,
        }
        assert!(caller.reader.frame().len() <= MAX_CALL_BYTES);
        if let Stage::Answered { rank, .. } = &caller.stage {
            assert!(is_whole && *rank == ONE && world == 2);
            let mut answer = [0; 256];
            if let Ok(length) = stranger.read(&mut answer)
                && let Some(made) = made.take()
            {
                let answer = made.finish(ZERO, &answer[4..length]);
                assert!(matches!(answer, Ok(Answer::Session(_))));
            }
        }
        if script.is_over() {
            return;
        }
        let count = 1 + usize::from(script.byte()) % 40;
        let _ = stranger.write(script.bytes(count));
    }
}
