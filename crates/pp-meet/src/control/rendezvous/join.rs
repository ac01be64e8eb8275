//! Any rank but 0: finding rank 0 and being let in. Or finding a rank that it was introduced to.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pp_contract::Rank;
use rustix::event::PollFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::error::RendezvousError;
use super::gather::Stop;
use super::waiting::{RendezvousOptions, Waiting};
use crate::control::channel::ControlChannel;
use crate::control::error::ControlError;
use crate::control::frame::{FrameReader, ReadProgress};
use crate::control::message::{Message, kind as wire};
use crate::control::secure::{
    Answer, AuthError, Caller, JobKey, MAX_ANSWER_BYTES, MIN_ANSWER_BYTES,
};
use crate::control::socket::{Connected, Socket, SocketKind, trusted_pid};
use crate::launch::{Launch, Via};

const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// How often, and for how long, and nothing else meanwhile, a rank is told that its proof does not
/// hold until it believes it. The word is not proven: any program that listens can say it. So the
/// rank to meet has this long to come and say otherwise, should another program say it.
const TOLD_OFTEN: u32 = 3;
const TOLD_FOR: Duration = Duration::from_secs(1);

/// An attempt that did not lead to the rank to meet.
enum Failed {
    /// No program listens there.
    Nobody(String),
    /// A program listens that did not prove to be the rank to meet, or did not let us in yet.
    NotMet(SocketKind, String),
    /// A program listens that says that our proof does not hold.
    TurnedAway(String),
    /// That rank itself, proven, said no.
    Refused(String),
}

/// Calls at `whom` until it has let this rank in.
pub(super) fn join(
    launch: &Launch,
    key: &JobKey,
    whom: Rank,
    options: &RendezvousOptions,
    started: Instant,
    mut stop: Option<Stop<'_>>,
) -> Result<ControlChannel, RendezvousError> {
    let deadline = started + options.timeout;
    let own = launch.rank();
    let mut pause = FIRST_PAUSE;
    let mut via = launch.via();
    let mut last = None;
    let mut told: Option<(Instant, u32)> = None;
    let mut waiting = Waiting::new(options, started);
    loop {
        if let Some(stop) = &mut stop {
            stop()?;
        }
        let until = deadline.min(Instant::now() + crate::times::ATTEMPT_WITHIN);
        let reason = match attempt(launch, via, key, whom, until) {
            Ok(channel) => {
                options.has_met(channel.sender());
                if let Some(why) = &options.declines {
                    // Rank 0 tells the others.
                    let told = Message::Abort(why.clone());
                    let _ = channel.sender().send(&told, deadline);
                    return Err(why.clone().into());
                }
                return wait_for_the_others(channel, launch, options, started);
            }
            Err(Failed::Refused(reason)) => {
                return Err(RendezvousError::Refused {
                    rank: own,
                    whom,
                    reason,
                });
            }
            Err(Failed::TurnedAway(reason)) => {
                let (since, times) = told.unwrap_or((Instant::now(), 0));
                told = Some((since, times + 1));
                let after = since.elapsed();
                if times + 1 >= TOLD_OFTEN && after >= TOLD_FOR {
                    return Err(RendezvousError::WrongSecret {
                        rank: own,
                        at: places(launch, key),
                        after,
                    });
                }
                reason
            }
            Err(Failed::Nobody(reason)) => {
                told = None;
                via = launch.via();
                reason
            }
            Err(Failed::NotMet(kind, reason)) => {
                told = None;
                // Where there are two ways and one led nowhere, the other has its turn.
                via = match (launch.via(), kind) {
                    (Via::Auto, SocketKind::Unix) => Via::Tcp,
                    (other, _) => other,
                };
                reason
            }
        };
        tracing::debug!(rank = own.get(), %whom, %reason, "a rank is not reached yet");
        waiting.look(own, || {
            format!("rank {whom} at {}: {reason}", places(launch, key))
        });
        let left = deadline.saturating_duration_since(Instant::now());
        // An attempt that the end cut short says less than the one before it.
        if last.is_none() || !left.is_zero() {
            last = Some(reason);
        }
        std::thread::sleep(pause.min(left));
        if left <= pause {
            return Err(RendezvousError::Unreachable {
                rank: own,
                whom,
                at: places(launch, key),
                after: started.elapsed(),
                last: last.unwrap_or_default(),
            });
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn places(launch: &Launch, key: &JobKey) -> String {
    let unix = (launch.via() != Via::Tcp).then(|| format!("unix:@{}", key.socket_name()));
    let tcp = match launch.via() {
        Via::Unix => None,
        Via::Auto | Via::Tcp => launch.address().map(|address| format!("tcp:{address}")),
    };
    [unix, tcp]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(" and ")
}

/// Connects, proves the secret, and has the rank to meet prove it.
fn attempt(
    launch: &Launch,
    via: Via,
    key: &JobKey,
    whom: Rank,
    deadline: Instant,
) -> Result<ControlChannel, Failed> {
    let Connected { socket, kind, pid } =
        connect(launch, via, key, deadline).map_err(Failed::Nobody)?;
    let not_met = |what: String| Failed::NotMet(kind, what);
    let own = launch.rank();
    let (caller, call) = Caller::new(key, own, whom, launch.world_size().get());
    let answered = exchange(&socket, &call, deadline).map_err(not_met)?;
    let answer = caller.finish(whom, answered.frame());
    let answer = answer.map_err(|error| {
        let reason = format!("the process at that address {error}");
        match error {
            AuthError::OtherSecret => Failed::TurnedAway(reason),
            _ => not_met(reason),
        }
    })?;
    let session = match answer {
        Answer::Session(session) => session,
        Answer::Refused(reason) => return Err(Failed::Refused(reason)),
    };
    let mut channel = ControlChannel::new(whom, kind, pid, Arc::new(socket), session);
    let failed = |error: ControlError| not_met(error.to_string());
    channel
        .sender()
        .send_raw(wire::CONFIRM, &[], None, deadline)
        .map_err(failed)?;
    // Until this answer we may still have been dropped for newer callers; after it, silence
    // means that others are awaited, and its end is the end.
    match channel.receiver().recv_raw(deadline).map_err(failed)? {
        (wire::JOINED, _) => Ok(channel),
        (wire::REFUSED, reason) => Err(Failed::Refused(text(reason))),
        (kind, _) => Err(not_met(format!("message kind {kind} in answer to ours"))),
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Says the call, and reads one frame back.
fn exchange(socket: &Socket, call: &[u8], deadline: Instant) -> Result<FrameReader, String> {
    let late = |error: io::Error| match error.kind() {
        io::ErrorKind::TimedOut => "connected, but nothing answered".to_owned(),
        _ => error.to_string(),
    };
    socket.write_all(call, deadline).map_err(late)?;
    let mut reader = FrameReader::new(MIN_ANSWER_BYTES, MAX_ANSWER_BYTES);
    loop {
        match reader.poll(|buf| socket.try_read(buf)) {
            Ok(ReadProgress::Frame) => return Ok(reader),
            Ok(ReadProgress::Pending) => socket.wait(PollFlags::IN, deadline).map_err(late)?,
            Ok(ReadProgress::Eof { .. }) => {
                return Err("the process at that address hung up".into());
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// The rank to meet welcomes all at once, when the last has joined. From here on its clock decides, and it
/// cannot have started later than now: so it, who knows which ranks are missing, gives up first.
fn wait_for_the_others(
    mut channel: ControlChannel,
    launch: &Launch,
    options: &RendezvousOptions,
    started: Instant,
) -> Result<ControlChannel, RendezvousError> {
    let deadline = Instant::now() + options.timeout + crate::times::WORD_LATER;
    let rank = launch.rank();
    let (whom, world_size) = (channel.peer(), launch.world_size());
    match channel.receiver().recv_raw(deadline) {
        Ok((wire::WELCOME, _)) => Ok(channel),
        Ok((kind, body)) => Err(match Message::parse(kind, body) {
            Ok(Message::Abort(why)) => why.into(),
            _ => RendezvousError::Refused {
                rank,
                whom,
                reason: format!("message kind {kind} in place of a welcome"),
            },
        }),
        Err(ControlError::TimedOut { .. }) => Err(RendezvousError::Incomplete {
            rank,
            world_size,
            after: started.elapsed(),
        }),
        Err(_) => Err(RendezvousError::MeetingLost { whom, world_size }),
    }
}

fn connect(
    launch: &Launch,
    via: Via,
    key: &JobKey,
    deadline: Instant,
) -> Result<Connected, String> {
    if via != Via::Tcp {
        match connect_unix(key) {
            Ok(connected) => return Ok(connected),
            Err(error) if via == Via::Unix => {
                return Err(format!("no process listens there ({error})"));
            }
            Err(_) => {}
        }
    }
    let connected = connect_tcp(launch, deadline).map_err(|error| error.to_string())?;
    if via == Via::Tcp {
        return Ok(connected);
    }
    // The Unix socket is opened before the port: now that the port answers, a rank of the same
    // host finds the former, even if it came a moment too early.
    Ok(connect_unix(key).unwrap_or(connected))
}

fn connect_unix(key: &JobKey) -> io::Result<Connected> {
    let name = SocketAddrUnix::new_abstract_name(key.socket_name().as_bytes())?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd: OwnedFd =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // A full backlog is an error here, not a wait.
    rustix::net::connect(&fd, &name)?;
    let pid =
        trusted_pid(&fd)?.ok_or_else(|| io::Error::other("another user listens under our name"))?;
    Ok(Connected::new(fd, SocketKind::Unix, Some(pid)))
}

fn connect_tcp(launch: &Launch, deadline: Instant) -> io::Result<Connected> {
    let address = launch
        .address()
        .ok_or_else(|| io::Error::other("no address to call at"))?;
    let mut last = io::Error::other("the name has no address");
    for address in (address.host.as_str(), address.port).to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(Connected::new(stream, SocketKind::Tcp, None));
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}
