//! Where rank 0 listens, or a rank that another is introduced to.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixListener;

use pp_contract::Rank;
use rustix::io::Errno;
use rustix::net::{SocketFlags, acceptfrom_with};

use super::error::RendezvousError;
use crate::control::secure::JobKey;
use crate::control::socket::{Connected, SocketKind, retry, trusted_pid};
use crate::launch::{Address, Launch, LocalJob, Via};
use crate::limit::lift_limit;

/// Callers that the kernel holds until they are accepted; more than a crowd can send while rank 0
/// looks at those before them. The system's `net.core.somaxconn` caps it.
const BACKLOG: i32 = 4096;

const PORT_TAKEN: &str = "another program has the port, or another run of this job: set PP_PORT to \
                          a free port on every rank";
const NAME_TAKEN: &str = "another rank 0 of this job runs on this host: end it, or give this run \
                          its own PP_JOB_ID on every rank";
const TWICE_HERE: &str = "another rank 0 of this job runs on this host: a supervised `Job::run` runs main once for each \
                          rank, so a program has one; give every other job one rank and `Config::alone`, or start the \
                          ranks of each with a PP_JOB_ID of its own";
const NOT_OURS: &str = "set MASTER_ADDR to an address of rank 0's host, on every rank";

/// What to do where a limit on this process was met.
fn limit(error: &io::Error) -> Option<&'static str> {
    Errno::from_io_error(error).and_then(lift_limit)
}

/// The address of a caller. An IPv6 network of 64 bits counts as one, since one host may have it whole.
fn source(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => ip,
        IpAddr::V6(long) => long.to_ipv4_mapped().map_or_else(
            || IpAddr::V6(Ipv6Addr::from_bits(long.to_bits() >> 64 << 64)),
            IpAddr::V4,
        ),
    }
}

/// Somebody who was let up to the door.
pub(super) struct Accepted {
    pub(super) connected: Connected,
    /// Where it comes from, as far as the kernel vouches for it: a process of this host, or an address.
    pub(super) source: String,
}

/// A listening socket that does not block.
#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    pub(super) kind: SocketKind,
    /// The port, on TCP.
    pub(super) port: Option<u16>,
    /// Where it listens, in words.
    at: String,
}

impl Listener {
    /// The Unix socket first: a rank that finds the port open may count on it.
    pub(super) fn open_all(launch: &Launch, key: &JobKey) -> Result<Vec<Self>, RendezvousError> {
        let mut listeners = Vec::new();
        if launch.via() != Via::Tcp {
            listeners.push(Self::unix(launch, &key.socket_name())?);
        }
        if let Some(address) = launch.address().filter(|_| launch.via() != Via::Unix) {
            Self::tcp(launch.rank(), address, &mut listeners)?;
        }
        Ok(listeners)
    }

    fn new(
        socket: impl Into<OwnedFd>,
        kind: SocketKind,
        port: Option<u16>,
        at: String,
    ) -> io::Result<Self> {
        let socket = socket.into();
        rustix::net::listen(&socket, BACKLOG)?;
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self {
            socket,
            kind,
            port,
            at,
        })
    }

    fn unix(launch: &Launch, name: &str) -> Result<Self, RendezvousError> {
        let is_supervised = launch.job_id().starts_with(LocalJob::ID_PREFIX);
        let at = || format!("unix:@{name}");
        let address = std::os::unix::net::SocketAddr::from_abstract_name(name);
        address
            .and_then(|address| UnixListener::bind_addr(&address))
            .and_then(|listener| Self::new(listener, SocketKind::Unix, None, at()))
            .map_err(|source| RendezvousError::Listen {
                rank: launch.rank(),
                at: at(),
                remedy: limit(&source).unwrap_or(match is_supervised {
                    true => TWICE_HERE,
                    false => NAME_TAKEN,
                }),
                source,
            })
    }

    /// Port 0 takes one that is free, the same at each address.
    fn tcp(
        rank: Rank,
        address: &Address,
        listeners: &mut Vec<Self>,
    ) -> Result<(), RendezvousError> {
        let failed = |source: io::Error| RendezvousError::Listen {
            rank,
            at: format!("tcp:{address}"),
            remedy: limit(&source).unwrap_or(match source.kind() {
                io::ErrorKind::AddrInUse => PORT_TAKEN,
                _ => NOT_OURS,
            }),
            source,
        };
        let mut opened = false;
        let mut port = address.port;
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for mut at in places(address).map_err(failed)? {
            at.set_port(port);
            match Self::at(at) {
                Ok(listener) => {
                    port = listener.port.unwrap_or(port);
                    listeners.push(listener);
                    opened = true;
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && !opened => {
                    return Err(failed(error));
                }
                Err(error) => last = error,
            }
            // Everything is listened to already.
            if opened && at.ip().is_unspecified() {
                break;
            }
        }
        if opened { Ok(()) } else { Err(failed(last)) }
    }

    fn at(address: SocketAddr) -> io::Result<Self> {
        let bound = TcpListener::bind(address)?;
        let address = bound.local_addr()?;
        let port = Some(address.port());
        Self::new(bound, SocketKind::Tcp, port, format!("tcp:{address}"))
    }

    /// The next caller, if one waits; `PermissionDenied` for another user of this host.
    pub(super) fn accept(&self) -> io::Result<Option<Accepted>> {
        let accepted = retry(|| acceptfrom_with(&self.socket, SocketFlags::CLOEXEC));
        let (socket, from) = match accepted {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            accepted => accepted?,
        };
        let (pid, source) = match self.kind {
            SocketKind::Unix => {
                let pid = trusted_pid(&socket)?.ok_or(io::ErrorKind::PermissionDenied)?;
                (Some(pid), format!("process {}", pid.as_raw_nonzero()))
            }
            SocketKind::Tcp => {
                rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
                let from = from.and_then(|from| SocketAddr::try_from(from).ok());
                let from = from.ok_or(io::ErrorKind::InvalidData)?;
                (None, source(from.ip()).to_string())
            }
        };
        let connected = Connected::new(socket, self.kind, pid);
        Ok(Some(Accepted { connected, source }))
    }
}

/// The addresses to listen at. An address is taken at its word and a loopback name stays on the
/// host; any other name may mean different addresses on different hosts (and 127.0.1.1 on its
/// own), so it is served at all of this host's.
fn places(address: &Address) -> io::Result<Vec<SocketAddr>> {
    let port = address.port;
    let everywhere = [
        SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port),
        SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port),
    ];
    if let Ok(ip) = address.host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    if address.host.eq_ignore_ascii_case("localhost") {
        return Ok((address.host.as_str(), port).to_socket_addrs()?.collect());
    }
    Ok(everywhere.to_vec())
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.at)
    }
}
