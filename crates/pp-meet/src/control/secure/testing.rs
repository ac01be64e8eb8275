//! Keys and sessions for tests.

use std::sync::OnceLock;

use pp_contract::WorldSize;

use super::*;
use crate::launch::{JobSecret, Via};

pub(crate) const ZERO: Rank = Rank::new(0);
pub(crate) const ONE: Rank = Rank::new(1);

pub(crate) fn key(secret: &str, job_id: &str) -> JobKey {
    let world = WorldSize::new(2).unwrap();
    let secret = JobSecret::new(secret).unwrap();
    let launch = Launch::new(ZERO, world, 0, None, Via::Unix, job_id, secret).unwrap();
    JobKey::derive(&launch)
}

pub(crate) fn ours() -> JobKey {
    key("a secret of many bytes", "job")
}

/// A session between two holders of one key: rank 1's end, rank 0's end.
pub(crate) fn session() -> (Session, Session) {
    let (caller, call) = Caller::new(&ours(), ONE, ZERO, 2);
    let answerer = Answerer::new(&ours(), ZERO, &call[PREFIX_BYTES..]).unwrap();
    assert_eq!((answerer.caller, answerer.world_size), (ONE, 2));
    let (answer, zero) = answerer.accept().unwrap();
    let Ok(Answer::Session(one)) = caller.finish(ZERO, &answer[PREFIX_BYTES..]) else {
        panic!("the handshake of two honest ranks");
    };
    (one, zero)
}

/// A session with the keys of one handshake: a handshake costs more than what fuzzing does with a
/// session.
pub(crate) fn session_of_known_keys() -> (Session, Session) {
    static KEYS: OnceLock<(Session, Session)> = OnceLock::new();
    let (one, zero) = KEYS.get_or_init(session);
    let again = |session: &Session| Session::with(Arc::clone(&session.opener.keys));
    (again(one), again(zero))
}
