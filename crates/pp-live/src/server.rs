//! The server: one thread at low priority, with a bound for everything that a caller can take.
//!
//! Hazard: a caller that says nothing, says it byte by byte, takes no answer, or calls without end, and so takes memory,
//! descriptors or time from the job. Guarantee: at most [`CONNECTIONS`] are open, each for at most [`HEAD_WITHIN`] and
//! [`ANSWER_WITHIN`]; at most [`CALLS`] are taken and [`ANSWERS`] made in a second. One more caller ends the oldest that has
//! not asked yet, so those that say nothing shut nobody out. A connection has one answer, so it holds nothing between two.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use hyper::http::request::Parts;
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::access::{Access, Route};

/// The most that are open at once.
pub(crate) const CONNECTIONS: usize = 16;
/// The most bytes of a request.
pub(crate) const HEAD_BYTES: usize = 8 << 10;
/// Time in which a request must arrive whole.
pub(crate) const HEAD_WITHIN: Duration = Duration::from_secs(2);
/// Time in which a caller must take its answer.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// The most answers in a second, to those who have the token.
pub(crate) const ANSWERS: u32 = 20;
/// The most callers in a second. Those above wait in the queue of the kernel.
pub(crate) const CALLS: u32 = 50;
/// Time between two snapshots for a caller that asks for the next one.
const NEXT_AFTER: Duration = Duration::from_secs(1);
/// Time that callers have, after the end, to take the last snapshot.
const TOLD_WITHIN: Duration = Duration::from_millis(200);
/// How often it is looked meanwhile whether they have it.
const LOOKS: u32 = 20;
/// What every answer has.
const HEADERS: [(&str, &str); 5] = [
    ("cache-control", "no-store"),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("x-frame-options", "DENY"),
];
/// After an accept that failed, as where no descriptor is left.
const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// An answer before the headers that all have.
pub(crate) type Answer = Response<Full<Bytes>>;

/// Where callers come from.
pub(crate) trait Door {
    type Stream: AsyncRead + AsyncWrite + Unpin + 'static;
    /// The next one. May be given up at any time.
    fn next(&mut self) -> impl Future<Output = io::Result<Self::Stream>>;
}

impl Door for TcpListener {
    type Stream = TcpStream;
    async fn next(&mut self) -> io::Result<TcpStream> {
        let (stream, _) = self.accept().await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

/// How many there were in the second that goes on.
#[derive(Debug)]
struct Pace {
    most: u32,
    taken: u32,
    since: Instant,
}

impl Pace {
    fn new(most: u32) -> Self {
        Self {
            most,
            taken: 0,
            since: Instant::now(),
        }
    }

    /// Takes one more. The error is when there is one again.
    fn take(&mut self) -> Result<(), Instant> {
        let (now, next) = (Instant::now(), self.since + Duration::from_secs(1));
        if now >= next {
            (self.since, self.taken) = (now, 0);
        }
        if self.taken == self.most {
            return Err(next);
        }
        self.taken += 1;
        Ok(())
    }
}

/// What all connections share: who is let in, and the answers.
pub(crate) struct Desk<A> {
    access: Access,
    pace: RefCell<Pace>,
    answers: A,
    /// Wakes those who wait for the next snapshot when the job has ended.
    news: Notify,
    has_ended: Cell<bool>,
    open: Cell<usize>,
    /// When somebody took the next snapshot last.
    followed: Cell<Option<Instant>>,
}

impl<A: Fn(Route) -> Answer> Desk<A> {
    /// `answers` makes the answer to a request that was let in.
    pub(crate) fn new(access: Access, answers: A) -> Self {
        Self {
            access,
            pace: RefCell::new(Pace::new(ANSWERS)),
            answers,
            news: Notify::new(),
            has_ended: Cell::new(false),
            open: Cell::new(0),
            followed: Cell::new(None),
        }
    }

    async fn answer(&self, request: &Parts) -> Answer {
        let judged = self.access.judge(request).and_then(|route| {
            // A stranger who asks for the health takes no answer from those who have the token.
            let is_free = route == Route::Health || self.pace.borrow_mut().take().is_ok();
            is_free
                .then_some(route)
                .ok_or(StatusCode::TOO_MANY_REQUESTS)
        });
        if judged == Ok(Route::Next) {
            if !self.has_ended.get() {
                let _ = timeout(NEXT_AFTER, self.news.notified()).await;
            }
            self.followed.set(Some(Instant::now()));
        }
        let mut answer = judged.map_or_else(refusal, &self.answers);
        for (name, value) in HEADERS {
            answer
                .headers_mut()
                .insert(name, HeaderValue::from_static(value));
        }
        let nothing = HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'");
        let policy = answer.headers_mut().entry("content-security-policy");
        policy.or_insert(nothing);
        answer
    }

    /// Tells those who wait for the next snapshot, or have just taken one, that the job has ended, and gives them time to
    /// take it.
    pub(crate) async fn end(&self) {
        let begun = Instant::now();
        let follows = |at: Instant| begun.duration_since(at) < 2 * NEXT_AFTER && at < begun;
        self.has_ended.set(true);
        self.news.notify_waiters();
        // Each look gives the callers a turn, which on a busy machine comes late.
        for _ in 0..LOOKS {
            if self.open.get() == 0 && !self.followed.get().is_some_and(follows) {
                break;
            }
            sleep(TOLD_WITHIN / LOOKS).await;
        }
    }
}

/// An answer of text.
pub(crate) fn text(status: StatusCode, kind: &'static str, text: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(text.into()));
    *answer.status_mut() = status;
    let kind = HeaderValue::from_static(kind);
    answer.headers_mut().insert("content-type", kind);
    answer
}

fn refusal(status: StatusCode) -> Answer {
    let (why, header) = match status {
        StatusCode::UNAUTHORIZED => (
            "give the token: the page as /?token=TOKEN, anything else as the header Authorization: Bearer TOKEN",
            Some((WWW_AUTHENTICATE, "Bearer")),
        ),
        StatusCode::METHOD_NOT_ALLOWED => ("only GET is answered", Some((ALLOW, "GET"))),
        StatusCode::TOO_MANY_REQUESTS => {
            ("more than 20 answers in a second", Some((RETRY_AFTER, "1")))
        }
        StatusCode::MISDIRECTED_REQUEST => (
            "Host names another machine; call localhost, or the address that --live names",
            None,
        ),
        StatusCode::PAYLOAD_TOO_LARGE => ("a request has no body", None),
        StatusCode::NOT_FOUND => (
            "there are /, /snapshot.json, /next.json, /report.json, /metrics, /thumb/before, /thumb/after and /healthz",
            None,
        ),
        _ => ("the request cannot be read", None),
    };
    let mut answer = text(status, "text/plain; charset=utf-8", format!("{why}\n"));
    if let Some((name, value)) = header {
        answer
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    answer
}

/// A connection.
struct Call {
    task: JoinHandle<()>,
    has_asked: Rc<Cell<bool>>,
}

/// Answers all callers, for ever. Runs in a `LocalSet`.
pub(crate) async fn serve<D: Door, A>(mut door: D, desk: Rc<Desk<A>>)
where
    A: Fn(Route) -> Answer + 'static,
{
    let mut calls: VecDeque<Call> = VecDeque::new();
    let mut pace = Pace::new(CALLS);
    loop {
        if let Err(again) = pace.take() {
            sleep_until(again).await;
            continue;
        }
        let Ok(stream) = door.next().await else {
            sleep(AGAIN_AFTER).await;
            continue;
        };
        calls.retain(|call| !call.task.is_finished());
        if calls.len() == CONNECTIONS {
            let silent = calls.iter().position(|call| !call.has_asked.get());
            if let Some(call) = calls.remove(silent.unwrap_or(0)) {
                call.task.abort();
            }
        }
        let has_asked = Rc::default();
        let task = spawn_local(answer_one(stream, Rc::clone(&desk), Rc::clone(&has_asked)));
        calls.push_back(Call { task, has_asked });
    }
}

/// Counts a connection, also one that is given up.
struct Open<'a>(&'a Cell<usize>);

impl<'a> Open<'a> {
    fn of(count: &'a Cell<usize>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Takes one request and gives its answer.
async fn answer_one<S, A>(stream: S, desk: Rc<Desk<A>>, has_asked: Rc<Cell<bool>>)
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
    A: Fn(Route) -> Answer + 'static,
{
    let asked = Notify::new();
    let _open = Open::of(&desk.open);
    let service = service_fn(async |request: Request<Incoming>| {
        has_asked.set(true);
        asked.notify_one();
        let (request, _) = request.into_parts();
        Ok::<_, Infallible>(desk.answer(&request).await)
    });
    let connection = Builder::new()
        .keep_alive(false)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let too_late = async {
        if timeout(HEAD_WITHIN, asked.notified()).await.is_ok() {
            sleep(ANSWER_WITHIN).await;
        }
    };
    tokio::select! {
        // An error is a caller that went away, or whose request hyper has refused.
        _ = connection => {}
        () = too_late => {}
    }
}

#[cfg(test)]
mod tests;
