//! Where rank 0 listens.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixListener;

use rustix::process::Pid;

use super::error::RendezvousError;
use crate::control::secure::JobKey;
use crate::control::socket::{Socket, SocketKind, trusted_pid};
use crate::launch::{Address, Launch, Via};

/// Callers that the kernel holds until they are accepted; more than a crowd can send while rank 0
/// looks at those before them. The system's `net.core.somaxconn` caps it.
const BACKLOG: i32 = 4096;

const PORT_TAKEN: &str = "another program has the port, or another run of this job: set PP_PORT to \
                          a free port on every rank";
const NAME_TAKEN: &str = "another rank 0 of this job runs on this host: end it, or give this run \
                          its own PP_JOB_ID on every rank";
const NOT_OURS: &str = "set MASTER_ADDR to an address of rank 0's host, on every rank";

/// Where a caller comes from, as far as the kernel vouches for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Source {
    /// A process of this host.
    Process(Pid),
    /// An IPv4 address, or an IPv6 network of 64 bits, which one host may have whole.
    Network(IpAddr),
}

impl Source {
    fn of(ip: IpAddr) -> Self {
        Self::Network(match ip {
            IpAddr::V4(_) => ip,
            IpAddr::V6(long) => long.to_ipv4_mapped().map_or_else(
                || IpAddr::V6(Ipv6Addr::from_bits(long.to_bits() >> 64 << 64)),
                IpAddr::V4,
            ),
        })
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(pid) => write!(f, "process {}", pid.as_raw_nonzero()),
            Self::Network(ip) => ip.fmt(f),
        }
    }
}

/// Somebody who was let up to the door.
pub(super) struct Accepted {
    pub(super) socket: Socket,
    pub(super) kind: SocketKind,
    pub(super) source: Source,
}

/// A listening socket that does not block.
#[derive(Debug)]
pub(super) enum Listener {
    Unix {
        listener: UnixListener,
        name: String,
    },
    Tcp {
        listener: TcpListener,
        at: SocketAddr,
    },
}

impl Listener {
    /// The Unix socket first: a rank that finds the port open may count on it.
    pub(super) fn open_all(launch: &Launch, key: &JobKey) -> Result<Vec<Self>, RendezvousError> {
        let mut listeners = Vec::new();
        if launch.via() != Via::Tcp {
            listeners.push(Self::unix(key.socket_name())?);
        }
        if let Some(address) = launch.address().filter(|_| launch.via() != Via::Unix) {
            Self::tcp(address, &mut listeners)?;
        }
        Ok(listeners)
    }

    fn unix(name: String) -> Result<Self, RendezvousError> {
        let open = || {
            let address = std::os::unix::net::SocketAddr::from_abstract_name(&name)?;
            let listener = UnixListener::bind_addr(&address)?;
            rustix::net::listen(&listener, BACKLOG)?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        match open() {
            Ok(listener) => Ok(Self::Unix { listener, name }),
            Err(source) => Err(RendezvousError::Listen {
                at: format!("unix:@{name}"),
                source,
                remedy: NAME_TAKEN,
            }),
        }
    }

    fn tcp(address: &Address, listeners: &mut Vec<Self>) -> Result<(), RendezvousError> {
        let failed = |source: io::Error| RendezvousError::Listen {
            at: format!("tcp:{address}"),
            remedy: match source.kind() {
                io::ErrorKind::AddrInUse => PORT_TAKEN,
                _ => NOT_OURS,
            },
            source,
        };
        let mut opened = false;
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for at in places(address).map_err(failed)? {
            let open = || {
                let listener = TcpListener::bind(at)?;
                rustix::net::listen(&listener, BACKLOG)?;
                listener.set_nonblocking(true)?;
                Ok::<_, io::Error>(listener)
            };
            match open() {
                Ok(listener) => {
                    listeners.push(Self::Tcp { listener, at });
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

    pub(super) fn kind(&self) -> SocketKind {
        match self {
            Self::Unix { .. } => SocketKind::Unix,
            Self::Tcp { .. } => SocketKind::Tcp,
        }
    }

    /// The next caller, if one waits; `PermissionDenied` for another user of this host.
    pub(super) fn accept(&self) -> io::Result<Option<Accepted>> {
        let accepted = match self {
            Self::Unix { listener, .. } => listener.accept().and_then(|(stream, _)| {
                let pid = trusted_pid(&stream)?.ok_or(io::ErrorKind::PermissionDenied)?;
                Ok((Socket::new(stream), Source::Process(pid)))
            }),
            Self::Tcp { listener, .. } => listener.accept().and_then(|(stream, from)| {
                stream.set_nodelay(true)?;
                Ok((Socket::new(stream), Source::of(from.ip())))
            }),
        };
        let accepted = accepted.map(|(socket, source)| Accepted {
            socket,
            kind: self.kind(),
            source,
        });
        match accepted {
            Ok(caller) => Ok(Some(caller)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
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
        match self {
            Self::Unix { listener, .. } => listener.as_fd(),
            Self::Tcp { listener, .. } => listener.as_fd(),
        }
    }
}

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix { name, .. } => write!(f, "unix:@{name}"),
            Self::Tcp { at, .. } => write!(f, "tcp:{at}"),
        }
    }
}
