//! What is answered about a job.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use hyper::StatusCode;
use hyper::header::{CONTENT_SECURITY_POLICY, HeaderValue};
use pp_job::seen::{Thumb, Viewer, Watching};
use pp_transport::launch::random_text;
use tokio::time::{Instant, sleep};

use crate::access::Route;
use crate::server::{Answer, text};
use crate::{metrics, picture};

/// A job counts as looked at for so long after a request, so that Prometheus finds the figures of other ranks every time.
const WATCHED_FOR: Duration = Duration::from_secs(60);
const PAGE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
const SCRIPT: &str = include_str!("page/page.js");
const JSON: &str = "application/json";
const PLAIN: &str = "text/plain; charset=utf-8";

/// A job, and whether it is watched.
pub(crate) struct Shown {
    viewer: Viewer,
    watching: RefCell<Option<Watching>>,
    looked: Cell<Instant>,
}

impl Shown {
    pub(crate) fn new(viewer: Viewer) -> Self {
        Self {
            viewer,
            watching: RefCell::default(),
            looked: Cell::new(Instant::now()),
        }
    }

    pub(crate) fn answer(&self, route: Route) -> Answer {
        if route != Route::Health {
            self.looked.set(Instant::now());
            let mut watching = self.watching.borrow_mut();
            watching.get_or_insert_with(|| self.viewer.watch());
        }
        match route {
            Route::Page => page(),
            Route::Snapshot | Route::Next => match serde_json::to_vec(&self.viewer.snapshot()) {
                Ok(snapshot) => text(StatusCode::OK, JSON, snapshot),
                Err(error) => failed(&error),
            },
            Route::Report => {
                let mut report = Vec::new();
                match self.viewer.write_report(&mut report) {
                    Ok(()) => text(StatusCode::OK, JSON, report),
                    Err(error) => failed(&error),
                }
            }
            Route::Metrics => text(
                StatusCode::OK,
                metrics::KIND,
                metrics::text(&self.viewer.snapshot()),
            ),
            Route::Before => self.picture(Thumb::Before),
            Route::After => self.picture(Thumb::After),
            Route::Health => text(StatusCode::OK, PLAIN, "ok\n"),
        }
    }

    fn picture(&self, which: Thumb) -> Answer {
        let picture = self.viewer.thumbnail(which);
        let file = picture.and_then(|of| picture::bmp(of.width, of.height, &of.rgb));
        match file {
            Some(file) => text(StatusCode::OK, "image/bmp", file),
            None => text(StatusCode::NOT_FOUND, PLAIN, "there is no picture\n"),
        }
    }

    /// Ends the watch, again and again, when no request has come for [`WATCHED_FOR`]. Never returns.
    pub(crate) async fn rest(&self) {
        loop {
            sleep(WATCHED_FOR / 4).await;
            if self.looked.get().elapsed() >= WATCHED_FOR {
                self.watching.take();
            }
        }
    }
}

/// The page in one piece. A browser runs what has the number of this one answer, and nothing else.
fn page() -> Answer {
    let nonce = random_text();
    let page = PAGE
        .replacen(
            "<!--style-->",
            &format!("<style nonce=\"{nonce}\">{STYLE}</style>"),
            1,
        )
        .replacen(
            "<!--script-->",
            &format!("<script nonce=\"{nonce}\">{SCRIPT}</script>"),
            1,
        );
    let mut answer = text(StatusCode::OK, "text/html; charset=utf-8", page);
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'"
    );
    if let Ok(policy) = HeaderValue::from_str(&policy) {
        answer.headers_mut().insert(CONTENT_SECURITY_POLICY, policy);
    }
    answer
}

fn failed(error: &dyn std::error::Error) -> Answer {
    text(
        StatusCode::INTERNAL_SERVER_ERROR,
        PLAIN,
        format!("{error}\n"),
    )
}
