//! Where a job is shown, and the thread that shows it.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::str::FromStr;
use std::thread::JoinHandle;

use pp_contract::{Fault, FaultKind};
use pp_job::command_line::{host_name, say_aside};
use pp_job::seen::{Viewer, at_low_priority};
use pp_job::{Error, RANK_0};
use tokio::net::{TcpListener, TcpSocket};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::task::LocalSet;

use crate::access::Access;
use crate::server::{Desk, serve};
use crate::shown::Shown;
use crate::token::Token;

/// Callers that wait in the kernel; one more has to call again.
const BACKLOG: u32 = 16;

/// Where a job is shown, and to whom: what `--live` and `--live-token-file` say.
///
/// From text: `ADDRESS:PORT`, where ADDRESS is an IP address or `localhost`; `PORT` alone is that port of this machine, and port
/// 0 one that is free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Live {
    address: SocketAddr,
    token_file: Option<PathBuf>,
}

impl FromStr for Live {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let local = |port: &str| {
            let port = port.parse().ok()?;
            Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port))
        };
        let port = text.strip_prefix("localhost:").unwrap_or(text);
        let address = local(port).or_else(|| text.parse().ok());
        let address = address.ok_or(
            "it takes ADDRESS:PORT, such as 127.0.0.1:8000 or [::1]:8000, or a port of this machine",
        )?;
        Ok(Self {
            address,
            token_file: None,
        })
    }
}

impl Live {
    /// The token is in this file, of this user and closed to others: 16 to 4,096 letters, digits and `-._~`. Without it one is
    /// made for each job.
    #[must_use]
    pub fn token_file(mut self, file: Option<&Path>) -> Self {
        self.token_file = file.map(Path::to_path_buf);
        self
    }

    /// Shows a job until the value is dropped, and says on standard error where.
    ///
    /// # Errors
    /// The file of the token is refused, or nothing can listen at this address.
    pub fn serve(&self, viewer: Viewer) -> Result<Serving, Error> {
        let token = match &self.token_file {
            Some(file) => Token::read(file)?,
            None => Token::random(),
        };
        let failed = |error: io::Error| {
            let detail = match error.kind() {
                ErrorKind::AddrNotAvailable => format!(
                    "--live {}: {} is no address of this machine; name one of its own, or 0.0.0.0 for all of them",
                    self.address,
                    self.address.ip()
                ),
                ErrorKind::AddrInUse | ErrorKind::PermissionDenied => {
                    format!(
                        "--live {}: {error}; port 0 takes one that is free",
                        self.address
                    )
                }
                _ => format!("--live {}: {error}", self.address),
            };
            Error::from(Fault::new(
                FaultKind::Io,
                RANK_0,
                "listen for viewers",
                detail,
            ))
        };
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(failed)?;
        let (listener, address) = self.listen(&runtime).map_err(failed)?;
        let shown = match &self.token_file {
            Some(_) => "TOKEN",
            None => token.as_text(),
        };
        let url = url(address, shown);
        let access = Access::new(token, address);
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new().name("pp-live".into());
        let thread = thread.spawn(move || {
            at_low_priority();
            LocalSet::new().block_on(&runtime, show(listener, access, viewer, stopped));
        });
        let thread = thread.map_err(failed)?;
        say_aside(self.told(&url));
        Ok(Serving {
            url,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    fn listen(&self, runtime: &Runtime) -> io::Result<(TcpListener, SocketAddr)> {
        let _here = runtime.enter();
        let socket = match self.address {
            SocketAddr::V4(_) => TcpSocket::new_v4()?,
            SocketAddr::V6(_) => TcpSocket::new_v6()?,
        };
        socket.set_reuseaddr(true)?;
        socket.bind(self.address)?;
        let listener = socket.listen(BACKLOG)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    }

    /// What is said where the job begins.
    fn told(&self, url: &str) -> String {
        let in_file = self.token_file.as_deref().map_or_else(String::new, |file| {
            format!(" (TOKEN is in {})", file.display())
        });
        let open = match self.address.ip().is_loopback() {
            true => "",
            false => {
                "\npp: note: the page is not encrypted: who can read this network reads the token and the pictures"
            }
        };
        format!("pp: live page: {url}{in_file}{open}")
    }
}

fn url(address: SocketAddr, token: &str) -> String {
    let host = match address.ip() {
        ip if !ip.is_unspecified() => SocketAddr::new(ip, address.port()).to_string(),
        _ => format!("{}:{}", host_name(), address.port()),
    };
    format!("http://{host}/?token={token}")
}

async fn show(
    listener: TcpListener,
    access: Access,
    viewer: Viewer,
    stopped: oneshot::Receiver<()>,
) {
    let shown = Rc::new(Shown::new(viewer));
    let answers = Rc::clone(&shown);
    let desk = Rc::new(Desk::new(access, move |route| answers.answer(route)));
    tokio::select! {
        () = serve(listener, Rc::clone(&desk)) => {}
        () = shown.rest() => {}
        () = async {
            // Dropped, or sent: the end either way.
            let _ = stopped.await;
            desk.end().await;
        } => {}
    }
}

/// The server of a job.
///
/// # If dropped
/// Open pages are told how the job ended, for at most 200 ms; then the server stops. So drop it behind
/// [`Job::run`](pp_job::Job::run).
#[derive(Debug)]
pub struct Serving {
    url: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Serving {
    /// The page, with its token unless a file has it.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic was told by its hook.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_address_than_this_machine_must_be_typed_and_is_told_of() {
        let parse = |text: &str| text.parse::<Live>();
        for (text, address) in [
            ("8000", "127.0.0.1:8000"),
            ("localhost:0", "127.0.0.1:0"),
            ("127.0.0.1:8000", "127.0.0.1:8000"),
            ("[::1]:8000", "[::1]:8000"),
        ] {
            let live = parse(text).unwrap();
            assert_eq!(live.address.to_string(), address);
            assert!(!live.told("x").contains("not encrypted"));
        }
        for text in ["0.0.0.0:8000", "[::]:8000", "192.0.2.7:80"] {
            assert!(parse(text).unwrap().told("x").contains("not encrypted"));
        }
        for text in ["", ":8000", "host:80", "::1:80:", "127.0.0.1", "70000"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
