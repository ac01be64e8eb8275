//! Slow, stuck and hostile callers, on a clock that stands still while somebody works.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::LocalSet;

use super::*;

impl Door for UnboundedReceiver<DuplexStream> {
    type Stream = DuplexStream;
    async fn next(&mut self) -> io::Result<DuplexStream> {
        self.recv()
            .await
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

const GOOD: &str = "GET /snapshot.json HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer 0123456789abcdef\r\n\r\n";
const BODY: &str = "so it is";
/// Longer than any buffer of a test.
const LONG: usize = 1 << 20;

#[derive(Clone)]
struct Callers(UnboundedSender<DuplexStream>);

impl Callers {
    /// Connects, and says this much.
    async fn say(&self, text: &str) -> DuplexStream {
        let (mut here, there) = duplex(64 << 10);
        self.0.send(there).unwrap();
        here.write_all(text.as_bytes()).await.unwrap();
        here
    }

    /// The whole answer to a request, until the server ends the connection.
    async fn ask(&self, text: &str) -> String {
        rest(self.say(text).await).await
    }
}

async fn rest(mut stream: DuplexStream) -> String {
    let mut all = Vec::new();
    // What was not read when the other side went away is an error.
    let _ = stream.read_to_end(&mut all).await;
    String::from_utf8_lossy(&all).into_owned()
}

type TestDesk = Rc<Desk<fn(Route) -> Answer>>;

fn answers(route: Route) -> Answer {
    match route {
        Route::Report => text(StatusCode::OK, "text/plain", "x".repeat(LONG)),
        _ => text(StatusCode::OK, "text/plain", BODY),
    }
}

fn serving<F: Future<Output = ()>>(test: impl FnOnce(Callers) -> F) {
    serving_with(|callers, _| test(callers));
}

fn serving_with<F: Future<Output = ()>>(test: impl FnOnce(Callers, TestDesk) -> F) {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    let access = Access::of_test("127.0.0.1:8000", None);
    LocalSet::new().block_on(&runtime, async {
        let desk: TestDesk = Rc::new(Desk::new(access, answers));
        let (callers, door) = unbounded_channel();
        let server = spawn_local(serve(door, Rc::clone(&desk)));
        test(Callers(callers), desk).await;
        assert!(!server.is_finished());
    });
}

#[test]
fn an_answer_has_its_headers_and_ends_the_connection() {
    serving(async |callers: Callers| {
        let answer = callers.ask(GOOD).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.ends_with(&format!("\r\n\r\n{BODY}")), "{answer}");
        for header in [
            "connection: close",
            "cache-control: no-store",
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
            "content-security-policy: default-src 'none'",
        ] {
            assert!(
                answer.contains(&format!("\r\n{header}")),
                "{header}: {answer}"
            );
        }
    });
}

#[test]
fn a_refusal_says_what_to_do() {
    serving(async |callers: Callers| {
        for (from, to, words) in [
            ("GET", "POST", ["405", "allow: GET"]),
            ("abcdef", "abcdee", ["401", "www-authenticate: Bearer"]),
            ("localhost", "evil.example", ["421", "call localhost"]),
            ("/snapshot.json", "/none", ["404", "/metrics"]),
            (
                "\r\nHost",
                "\r\nContent-Length: 3\r\nHost",
                ["413", "no body"],
            ),
        ] {
            let answer = callers.ask(&GOOD.replace(from, to)).await;
            assert!(words.iter().all(|word| answer.contains(word)), "{answer}");
            assert!(
                answer.contains("\r\nreferrer-policy: no-referrer"),
                "{answer}"
            );
        }
        // The others are not HTTP/1, and get no more than a status.
        for not_http in [
            "\r\n\r\n\r\n",
            "\0\x16\x03\x01",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            "GET / HTTP/1.1\r\n: \r\n\r\n",
        ] {
            let answer = callers.ask(not_http).await;
            assert!(!answer.contains(BODY), "{answer}");
        }
    });
}

#[test]
fn a_request_that_is_not_whole_in_time_ends() {
    serving(async |callers: Callers| {
        let begun = Instant::now();
        assert_eq!(callers.ask("").await, "");
        assert_eq!(begun.elapsed().as_secs(), 2);
        assert_eq!(callers.ask(&GOOD[..GOOD.len() - 1]).await, "");
        assert_eq!(begun.elapsed().as_secs(), 4);
        // Byte by byte: each in time, and all of them not.
        let mut stream = callers.say("G").await;
        for byte in GOOD[1..].bytes() {
            sleep(Duration::from_millis(100)).await;
            if stream.write_all(&[byte]).await.is_err() {
                break;
            }
        }
        assert_eq!(rest(stream).await, "");
        assert_eq!(begun.elapsed().as_secs(), 6);
    });
}

#[test]
fn a_long_head_is_refused_before_it_is_whole() {
    serving(async |callers: Callers| {
        let begun = Instant::now();
        for long in [
            format!("GET /{}", "a".repeat(HEAD_BYTES)),
            GOOD.replace("\r\n\r\n", &format!("\r\nX: {}", "b".repeat(HEAD_BYTES))),
            GOOD.replace("\r\n\r\n", &"\r\nX: b".repeat(200)) + "\r\n\r\n",
        ] {
            let answer = callers.ask(&long).await;
            assert!(answer.starts_with("HTTP/1.1 4"), "{answer}");
        }
        assert_eq!(begun.elapsed(), Duration::ZERO);
        // A head just below the bound is not too long.
        let room = HEAD_BYTES - GOOD.len() - "\r\nX: ".len();
        let answer = callers
            .ask(&GOOD.replace("\r\n\r\n", &format!("\r\nX: {}\r\n\r\n", "b".repeat(room))))
            .await;
        assert!(answer.contains("200 OK"), "{answer}");
    });
}

#[test]
fn an_answer_that_is_not_taken_in_time_ends() {
    serving(async |callers: Callers| {
        let begun = Instant::now();
        let stream = callers.say(&GOOD.replace("snapshot", "report")).await;
        sleep(ANSWER_WITHIN - Duration::from_millis(1)).await;
        let stuck = callers.say(&GOOD.replace("snapshot", "report")).await;
        sleep(Duration::from_millis(2)).await;
        let taken = rest(stream).await.len();
        assert!(taken < LONG / 2, "{taken} bytes of {LONG}");
        // The other one has time left.
        assert!(rest(stuck).await.len() > LONG);
        assert_eq!(begun.elapsed().as_secs(), 5);
    });
}

#[test]
fn silent_callers_shut_nobody_out() {
    serving(async |callers: Callers| {
        let slow = callers.say(&GOOD.replace("snapshot", "report")).await;
        sleep(Duration::from_millis(1)).await;
        let mut silent = Vec::new();
        for _ in 1..CONNECTIONS {
            silent.push(callers.say("GET").await);
        }
        for _ in 0..3 {
            assert!(callers.ask(GOOD).await.ends_with(BODY));
        }
        // The oldest that had not asked had to go, and neither the others nor the one that had.
        let mut open = 0;
        for mut stream in silent {
            open += u32::from(stream.write_all(b" ").await.is_ok());
        }
        assert_eq!(open as usize, CONNECTIONS - 2);
        assert!(rest(slow).await.len() > LONG);
    });
}

#[test]
fn a_flood_is_answered_no_more_than_so_often_in_a_second() {
    serving(async |callers: Callers| {
        let begun = Instant::now();
        let mut answered = [0; 2];
        for at in 0..2 * CALLS {
            let answer = callers.ask(GOOD).await;
            assert_eq!(
                begun.elapsed().as_secs(),
                u64::from(at / CALLS),
                "call {at}"
            );
            let is_good = answer.contains("200 OK");
            assert!(is_good || answer.contains("\r\nretry-after: 1"), "{answer}");
            answered[usize::from(is_good)] += 1;
        }
        assert_eq!(answered, [2 * (CALLS - ANSWERS), 2 * ANSWERS]);
        // Whoever has no token takes none of them.
        sleep(Duration::from_secs(1)).await;
        for _ in 0..ANSWERS + 1 {
            assert!(
                callers
                    .ask(&GOOD.replace("abc", "abd"))
                    .await
                    .contains(" 401 ")
            );
        }
        assert!(callers.ask(GOOD).await.contains("200 OK"));
    });
}

#[test]
fn the_next_snapshot_comes_a_second_later_or_with_the_end() {
    serving_with(async |callers: Callers, desk: TestDesk| {
        let (begun, next) = (Instant::now(), GOOD.replace("snapshot", "next"));
        assert!(callers.ask(&next).await.ends_with(BODY));
        assert_eq!(begun.elapsed().as_millis(), 1_000);
        let waits = callers.say(&next).await;
        sleep(Duration::from_millis(100)).await;
        desk.end().await;
        assert!(rest(waits).await.ends_with(BODY));
        assert!(begun.elapsed().as_millis() < 1_200);
        // One that comes behind the end does not wait.
        let late = Instant::now();
        assert!(callers.ask(&next).await.ends_with(BODY));
        assert_eq!(late.elapsed(), Duration::ZERO);
        // One that says nothing does not hold up the end.
        let silent = callers.say("").await;
        sleep(Duration::from_millis(1)).await;
        let end = Instant::now();
        desk.end().await;
        assert_eq!(end.elapsed(), TOLD_WITHIN);
        drop(silent);
    });
}
