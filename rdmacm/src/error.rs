//! Errors, sorted by who can do something about them.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};
use thiserror::Error as ThisError;
use verbs::CloseReason;

use crate::private_data::PrivateData;
use crate::proto;
use crate::sys::CallError;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a connection could not be made, used or ended.
///
/// Every variant converts to [`io::Error`] with the kind that a socket program expects ([`Error::kind`]), and stays
/// reachable inside it (`io::Error::get_ref` and `downcast_ref::<rdmacm::Error>()`).
#[derive(Clone, Debug, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// The operating system or the RDMA stack refused a call.
    #[error("{call}: {}{}", errno.desc(), Remedy(remedy.as_deref()))]
    Os {
        /// The C function.
        call: &'static str,
        /// What it left in errno.
        errno: Errno,
        /// What to do about it, where known.
        remedy: Option<Cow<'static, str>>,
    },
    /// Nobody listens at the address (the transport's reject code 8, or a reset on iWARP).
    #[error("connection to {peer} refused: nobody listens there")]
    Refused {
        /// Whom we asked.
        peer: SocketAddr,
    },
    /// The peer's program refused the connection, or its listener is full or gone.
    #[error("connection to {peer} rejected by the peer's program{}", RejectedWith(private_data))]
    Rejected {
        /// Whom we asked.
        peer: SocketAddr,
        /// What the peer's program sent with its refusal.
        private_data: PrivateData,
    },
    /// The transport refused the connection.
    #[error("connection to {peer} rejected by the transport: {reason}")]
    TransportRejected {
        /// Whom we asked.
        peer: SocketAddr,
        /// Why.
        reason: RejectReason,
    },
    /// The network does not reach the peer, or the peer's connection manager does not answer.
    #[error("{peer} is unreachable: {}{}", errno.desc(), Remedy(*remedy))]
    Unreachable {
        /// Whom we asked.
        peer: SocketAddr,
        /// The cause as the kernel gave it.
        errno: Errno,
        /// What to do about it, where known.
        remedy: Option<&'static str>,
    },
    /// The other side went away before the connection was up.
    #[error("{peer} gave up before the connection was established")]
    Aborted {
        /// The other side.
        peer: SocketAddr,
    },
    /// A deadline came first.
    #[error("timed out after {after:?} {step}")]
    TimedOut {
        /// What was going on.
        step: TimedOutStep,
        /// How long it was given.
        after: Duration,
    },
    /// The attempt was ended from another thread.
    #[error("cancelled")]
    Cancelled,
    /// The RDMA device was removed.
    #[error("the RDMA device was removed")]
    DeviceRemoved,
    /// Somebody listens there already, on this address or on all.
    #[error("{address} is in use: another listener holds the port, on this address or on all")]
    AddrInUse {
        /// What was asked for.
        address: SocketAddr,
    },
    /// A loopback address cannot be listened on.
    #[error(
        "cannot listen on {0}: no RDMA device serves the loopback interface, and the kernel would accept connections from \
         the network instead; bind the address of an RDMA interface (`rdma link` shows them), or 0.0.0.0 or [::] for all"
    )]
    Loopback(SocketAddr),
    /// The listener is closed.
    #[error("the listener is closed")]
    ListenerClosed,
    /// A host name has no address, or could not be looked up.
    #[error("{0}")]
    Lookup(String),
    /// Private data does not fit; nothing was sent.
    #[error("private data of {asked} bytes does not fit: {what} carries at most {allowed}")]
    PrivateDataTooLong {
        /// The message that would carry it.
        what: &'static str,
        /// The bytes given.
        asked: usize,
        /// The bytes that fit.
        allowed: usize,
    },
    /// The call cannot be meant as it was made.
    #[error("{0}")]
    Misuse(&'static str),
    /// The event-channel thread is gone; every handle of its manager is dead.
    #[error("the connection manager's event thread has ended")]
    ManagerGone,
    /// The process was forked after RDMA was set up.
    #[error(
        "this process was forked after RDMA was set up: its parent's connections, listeners and memory regions are not its \
         own; fork before the first use, or exec a new program"
    )]
    Forked,
    /// The data path: a failed operation, a closed connection, a local limit, or misuse.
    #[error(transparent)]
    Verbs(#[from] verbs::Error),
}

impl Error {
    /// The nearest [`io::ErrorKind`].
    #[must_use]
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Os { errno, .. } => match errno {
                Errno::ENODEV => io::ErrorKind::NotFound,
                Errno::EADDRNOTAVAIL => io::ErrorKind::AddrNotAvailable,
                errno => io::Error::from_raw_os_error(*errno as i32).kind(),
            },
            Self::Refused { .. } | Self::Rejected { .. } => io::ErrorKind::ConnectionRefused,
            Self::TransportRejected { reason, .. } => reason.kind(),
            Self::Unreachable { errno, .. } => match errno {
                Errno::ENETUNREACH => io::ErrorKind::NetworkUnreachable,
                Errno::EADDRNOTAVAIL | Errno::ENODEV => io::ErrorKind::AddrNotAvailable,
                Errno::ETIMEDOUT => io::ErrorKind::TimedOut,
                _ => io::ErrorKind::HostUnreachable,
            },
            Self::Aborted { .. } => io::ErrorKind::ConnectionAborted,
            Self::TimedOut { .. } => io::ErrorKind::TimedOut,
            Self::Cancelled => io::ErrorKind::Interrupted,
            Self::AddrInUse { .. } => io::ErrorKind::AddrInUse,
            Self::Loopback(_) => io::ErrorKind::AddrNotAvailable,
            Self::DeviceRemoved => io::ErrorKind::NotConnected,
            Self::ListenerClosed => io::ErrorKind::NotConnected,
            Self::Lookup(_) => io::ErrorKind::NotFound,
            Self::PrivateDataTooLong { .. } | Self::Misuse(_) => io::ErrorKind::InvalidInput,
            Self::ManagerGone => io::ErrorKind::BrokenPipe,
            Self::Forked => io::ErrorKind::Unsupported,
            Self::Verbs(error) => error.kind(),
        }
    }

    /// The errno behind the error, where one is.
    #[must_use]
    pub fn raw_os_error(&self) -> Option<i32> {
        match self {
            Self::Os { errno, .. } | Self::Unreachable { errno, .. } => Some(*errno as i32),
            Self::Verbs(verbs::Error::Os(error)) => Some(error.errno as i32),
            _ => None,
        }
    }

    /// The connection ended because the peer closed it.
    #[must_use]
    pub fn is_closed_by_peer(&self) -> bool {
        matches!(self, Self::Verbs(verbs::Error::Closed(CloseReason::Peer)))
    }

    /// `errno` says that `peer` is not reached. Devices that this process may not use are as good as none to librdmacm.
    fn unreachable(peer: SocketAddr, errno: Errno) -> Self {
        match Self::check_nodes() {
            Err(forbidden) if errno == Errno::ENODEV => forbidden,
            _ => Self::Unreachable { peer, errno, remedy: resolve_remedy(peer, errno) },
        }
    }

    /// What an empty list of devices means: `Err` if there are device nodes that this process may not use.
    pub(crate) fn check_nodes() -> Result<()> {
        let nodes = std::fs::read_dir(NODES).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_verbs = |node: &std::path::PathBuf| {
            node.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("uverbs"))
        };
        if nodes.filter(is_verbs).any(|node| node_is_forbidden(&node)) {
            return Err(CallError { call: "rdma_get_devices", errno: Errno::EACCES }.into());
        }
        Ok(())
    }

    /// The operating system gave us no thread.
    pub(crate) fn spawn(error: &io::Error) -> Self {
        let errno = Errno::from_raw(error.raw_os_error().unwrap_or(Errno::EAGAIN as i32));
        Self::Os {
            call: "pthread_create",
            errno,
            remedy: Some("the process or the system has too many threads".into()),
        }
    }

    /// Whether the cause can pass by itself, so that trying to connect again makes sense: refused, rejected by a stale
    /// connection or for want of resources, timed out, unreachable, the client or the device gone. Not what the program or
    /// the peer's program would have to change.
    #[must_use]
    pub fn can_pass(&self) -> bool {
        match self {
            Self::Refused { .. }
            | Self::Unreachable { .. }
            | Self::Aborted { .. }
            | Self::TimedOut { .. }
            | Self::DeviceRemoved => true,
            Self::TransportRejected { reason, .. } => matches!(
                *reason,
                RejectReason::NO_QP
                    | RejectReason::NO_RESOURCES
                    | RejectReason::TIMEOUT
                    | RejectReason::STALE_CONNECTION
            ),
            // A listener that is full or just ended rejects without data; a program that has something to say means it.
            Self::Rejected { private_data, .. } => private_data.data().is_none(),
            Self::Os { errno, .. } => matches!(errno, Errno::ENODEV | Errno::EAGAIN | Errno::ENETDOWN),
            Self::Cancelled
            | Self::AddrInUse { .. }
            | Self::Loopback(_)
            | Self::ListenerClosed
            | Self::Lookup(_)
            | Self::PrivateDataTooLong { .. }
            | Self::Misuse(_)
            | Self::ManagerGone
            | Self::Forked
            | Self::Verbs(_) => false,
        }
    }

    /// What a failed bind or listen means for `address`. With a wildcard involved the kernel says EADDRNOTAVAIL where
    /// sockets say EADDRINUSE (`cma.c`, `cma_check_port`), so the two are told apart by asking whether the address is ours.
    pub(crate) fn from_bind(call: &'static str, errno: Errno, address: SocketAddr) -> Self {
        let in_use = match errno {
            Errno::EADDRINUSE => true,
            Errno::EADDRNOTAVAIL => address.ip().is_unspecified() || is_local(address),
            _ => false,
        };
        match errno {
            _ if in_use => Self::AddrInUse { address },
            Errno::EADDRNOTAVAIL => {
                Self::Os { call, errno, remedy: Some("the address belongs to none of this host's interfaces".into()) }
            }
            Errno::EINVAL if address.is_ipv6() => {
                Self::Os { call, errno, remedy: resolve_remedy(address, errno).map(Cow::Borrowed) }
            }
            Errno::ENODEV => Self::check_nodes().err().unwrap_or_else(|| CallError { call, errno }.into()),
            errno => CallError { call, errno }.into(),
        }
    }

    /// What a failed set-up means for the user who asked.
    pub(crate) fn from_failure(failure: proto::Failure, context: &FailureContext<'_>) -> Self {
        use proto::{Event, Failure};
        let peer = context.peer;
        match failure {
            // Whatever reason the client's kernel gives when the client ends in the middle.
            Failure::Event(Event::Rejected, _) if context.passive => Self::Aborted { peer },
            Failure::Event(Event::Rejected, status) => rejected(peer, status, context.private_data),
            Failure::Event(Event::DeviceRemoval, _) => Self::DeviceRemoved,
            Failure::Event(Event::Disconnected | Event::ConnectResponse, _) => Self::Aborted { peer },
            Failure::Event(Event::AddrError, -110) => {
                Self::TimedOut { step: TimedOutStep::Address, after: context.after }
            }
            Failure::Event(event, status) => match (event, status_errno(status, context.errno)) {
                (Event::ConnectError, Errno::ECONNREFUSED) => Self::Refused { peer },
                (_, errno) => Self::unreachable(peer, errno),
            },
            Failure::Call(proto::Call::Accept, _) => Self::Aborted { peer },
            Failure::Call(call, errno) => {
                let errno = Errno::from_raw(errno);
                match (call, errno) {
                    // iWARP connects its TCP socket inside the call.
                    (proto::Call::Connect, Errno::ECONNREFUSED) => Self::Refused { peer },
                    (proto::Call::ResolveAddr | proto::Call::ResolveRoute, _)
                    | (proto::Call::Connect, Errno::EHOSTUNREACH | Errno::ENETUNREACH | Errno::ETIMEDOUT) => {
                        Self::unreachable(peer, errno)
                    }
                    (call, errno) => CallError { call: call.c_name(), errno }.into(),
                }
            }
            Failure::Deadline(step) => Self::TimedOut { step: step.into(), after: context.after },
            Failure::Cancelled | Failure::Released => Self::Cancelled,
        }
    }
}

/// What the driver knows beside the failure itself.
#[derive(Debug)]
pub(crate) struct FailureContext<'a> {
    pub(crate) peer: SocketAddr,
    /// This side accepts.
    pub(crate) passive: bool,
    /// The time that the whole set-up was given.
    pub(crate) after: Duration,
    /// errno as `rdma_get_cm_event` left it, for events whose status is -1.
    pub(crate) errno: Errno,
    /// The private data of the event.
    pub(crate) private_data: &'a PrivateData,
}

/// librdmacm reports its own failures as -1 with errno set, the kernel's as a negative errno.
fn status_errno(status: i32, errno: Errno) -> Errno {
    match status {
        -1 => errno,
        other => Errno::from_raw(other.saturating_abs()),
    }
}

/// The status of REJECTED is a positive IB reject reason (IBTA 12.6.7), or a negative errno on iWARP.
fn rejected(peer: SocketAddr, status: i32, private_data: &PrivateData) -> Error {
    match status {
        8 => Error::Refused { peer },
        28 => Error::Rejected { peer, private_data: private_data.clone() },
        reason if reason >= 0 => {
            Error::TransportRejected { peer, reason: RejectReason(u16::try_from(reason).unwrap_or(u16::MAX)) }
        }
        errno => match Errno::from_raw(errno.saturating_abs()) {
            // Soft-iWARP reports the peer program's refusal as a reset.
            Errno::ECONNRESET => Error::Rejected { peer, private_data: private_data.clone() },
            Errno::ECONNREFUSED => Error::Refused { peer },
            errno => Error::Unreachable { peer, errno, remedy: None },
        },
    }
}

/// Whether an interface of this host has the address: an ordinary socket can be bound to it.
fn is_local(address: SocketAddr) -> bool {
    let mut any_port = address;
    any_port.set_port(0);
    std::net::UdpSocket::bind(any_port).is_ok()
}

fn resolve_remedy(peer: SocketAddr, errno: Errno) -> Option<&'static str> {
    match errno {
        Errno::ENODEV if peer.ip().is_loopback() => Some(
            "the loopback interface has no RDMA device; use the address of an interface that has one (`rdma link` shows them)",
        ),
        Errno::ENODEV => Some("no RDMA device is attached to the interface that leads there (`rdma link` shows them)"),
        Errno::ENETUNREACH => Some("no route leads there"),
        Errno::EINVAL if peer.is_ipv6() => {
            Some("a link-local IPv6 address needs its interface, as in fe80::1%eth0 (the scope id of SocketAddrV6)")
        }
        Errno::EACCES | Errno::EPERM => Some(PERMISSION),
        _ => None,
    }
}

/// Why the transport refused, as the InfiniBand specification numbers it (IBTA 12.6.7.2); RoCE uses the same numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RejectReason(pub u16);

impl RejectReason {
    /// No queue pair to be had at the peer.
    pub const NO_QP: Self = Self(1);
    /// No resources at the peer.
    pub const NO_RESOURCES: Self = Self(3);
    /// The peer's connection manager waited in vain for our answer.
    pub const TIMEOUT: Self = Self(4);
    /// Nobody listens (reported as [`Error::Refused`]).
    pub const INVALID_SERVICE_ID: Self = Self(8);
    /// The peer still holds an older connection of this queue pair number; trying again later helps.
    pub const STALE_CONNECTION: Self = Self(10);
    /// The peer does not know the address that we asked for.
    pub const INVALID_GID: Self = Self(12);
    /// The peer's program refused (reported as [`Error::Rejected`]).
    pub const CONSUMER: Self = Self(28);

    fn kind(self) -> io::ErrorKind {
        match self {
            Self::TIMEOUT => io::ErrorKind::TimedOut,
            Self::NO_QP | Self::NO_RESOURCES => io::ErrorKind::OutOfMemory,
            Self::STALE_CONNECTION => io::ErrorKind::ConnectionReset,
            Self::INVALID_GID => io::ErrorKind::AddrNotAvailable,
            _ => io::ErrorKind::ConnectionRefused,
        }
    }

    fn words(self) -> Option<&'static str> {
        Some(match self {
            Self::NO_QP => "no queue pair available",
            Self::NO_RESOURCES => "no resources available",
            Self::TIMEOUT => "the handshake timed out at the peer",
            Self::INVALID_SERVICE_ID => "nobody listens",
            Self::STALE_CONNECTION => "stale connection: the peer has not yet forgotten an older one, try again",
            Self::INVALID_GID => "the peer does not own the address (wrong GID)",
            Self::CONSUMER => "the peer's program refused",
            _ => return None,
        })
    }
}

impl fmt::Debug for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RejectReason({}", self.0)?;
        if let Some(words) = self.words() {
            write!(f, ": {words}")?;
        }
        f.write_str(")")
    }
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.words() {
            Some(words) => write!(f, "{words} (reason {})", self.0),
            None => write!(f, "reason {}", self.0),
        }
    }
}

/// What a deadline cut short.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TimedOutStep {
    /// Waiting for the peer's neighbour address (ARP or neighbour discovery).
    Address,
    /// Waiting for the route.
    Route,
    /// Waiting for the peer's answer to the connect request.
    Connect,
    /// Waiting for the client's acknowledgement of the accept.
    Accept,
    /// Waiting for a client to connect.
    Request,
    /// Waiting for the peer's answer to the disconnect.
    Disconnect,
    /// Waiting for something to happen to a connection.
    Event,
}

impl fmt::Display for TimedOutStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Address => "waiting for the peer's neighbour address (ARP or neighbour discovery)",
            Self::Route => "waiting for the route to the peer",
            Self::Connect => "waiting for the peer to accept the connection",
            Self::Accept => "waiting for the client to acknowledge the accept",
            Self::Request => "waiting for a client to connect",
            Self::Disconnect => "waiting for the peer to answer the disconnect",
            Self::Event => "waiting for something to happen to the connection",
        })
    }
}

impl From<proto::Step> for TimedOutStep {
    fn from(step: proto::Step) -> Self {
        match step {
            proto::Step::Address => Self::Address,
            proto::Step::Route => Self::Route,
            proto::Step::Connect => Self::Connect,
            proto::Step::Accept => Self::Accept,
            proto::Step::Queue => Self::Request,
            proto::Step::Disconnect => Self::Disconnect,
        }
    }
}

impl proto::Call {
    /// The C function behind the call.
    pub(crate) fn c_name(self) -> &'static str {
        match self {
            Self::Bind => "rdma_bind_addr",
            Self::Listen => "rdma_listen",
            Self::ResolveAddr => "rdma_resolve_addr",
            Self::ResolveRoute => "rdma_resolve_route",
            Self::Connect => "rdma_connect",
            Self::Accept => "rdma_accept",
            Self::Reject => "rdma_reject",
            Self::Notify => "rdma_notify",
            Self::Disconnect => "rdma_disconnect",
            Self::Destroy => "rdma_destroy_id",
        }
    }
}

/// The device nodes of librdmacm and libibverbs.
const NODES: &str = "/dev/infiniband";
const CM_NODE: &str = "/dev/infiniband/rdma_cm";

/// Whether a node exists and this process may not use it.
fn node_is_forbidden(node: &Path) -> bool {
    access(node, AccessFlags::F_OK).is_ok() && access(node, AccessFlags::R_OK | AccessFlags::W_OK).is_err()
}

const NO_DEVICE: &str = "no RDMA device: plug one in and load its driver, or add a software one with \
     `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev <interface>` (`rdma link` and `ibv_devices` show what there is)";
const PERMISSION: &str = "no permission on the RDMA device nodes: /dev/infiniband/rdma_cm and /dev/infiniband/uverbs* \
     must be readable and writable by this user";

impl From<CallError> for Error {
    fn from(CallError { call, errno }: CallError) -> Self {
        let errno = match (call, errno) {
            // librdmacm says ENOENT for a node that it may not open.
            ("rdma_create_event_channel", Errno::ENOENT) if node_is_forbidden(Path::new(CM_NODE)) => Errno::EACCES,
            (_, errno) => errno,
        };
        let remedy = match (call, errno) {
            ("rdma_create_event_channel" | "rdma_get_devices", Errno::ENODEV | Errno::ENOENT) => Some(NO_DEVICE),
            (_, Errno::EACCES) if call == "rdma_bind_addr" => Some("ports below 1024 need CAP_NET_BIND_SERVICE"),
            (_, Errno::EACCES | Errno::EPERM) => Some(PERMISSION),
            ("rdma_bind_addr", Errno::ENODEV) => {
                Some("the interface with this address has no RDMA device (`rdma link` shows them)")
            }
            ("rdma_create_qp", Errno::ENOMEM) => {
                Some("the device or the process has no room for another queue pair (see RLIMIT_MEMLOCK)")
            }
            // Names the limit and its value.
            (_, Errno::EMFILE) => return Self::Os { call, errno, remedy: verbs::OsError::new(call, errno).remedy },
            _ => None,
        };
        Self::Os { call, errno, remedy: remedy.map(Cow::Borrowed) }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        Self::new(error.kind(), error)
    }
}

/// Appends a remedy to a message.
struct Remedy<'a>(Option<&'a str>);

impl fmt::Display for Remedy<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(remedy) => write!(f, " ({remedy})"),
            None => Ok(()),
        }
    }
}

struct RejectedWith<'a>(&'a PrivateData);

impl fmt::Display for RejectedWith<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.data() {
            Some(data) if !data.is_empty() => match std::str::from_utf8(data) {
                Ok(text) if !text.chars().any(char::is_control) => write!(f, ": {text}"),
                _ => write!(f, " with {} bytes of private data", data.len()),
            },
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Call, Event, Failure, Step};

    fn context(private_data: &PrivateData) -> FailureContext<'_> {
        FailureContext {
            peer: "10.1.2.3:7471".parse().expect("a literal address"),
            passive: false,
            after: Duration::from_secs(1),
            errno: Errno::EACCES,
            private_data,
        }
    }

    #[track_caller]
    fn check(failure: Failure, kind: io::ErrorKind, text: &str) {
        let none = PrivateData::default();
        let error = Error::from_failure(failure, &context(&none));
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(text), "{error:?} says {error}");
    }

    #[test]
    fn a_failed_set_up_says_why() {
        use io::ErrorKind as Kind;
        check(Failure::Event(Event::Rejected, 8), Kind::ConnectionRefused, "10.1.2.3:7471 refused: nobody listens");
        check(Failure::Event(Event::Rejected, 28), Kind::ConnectionRefused, "rejected by the peer's program");
        check(Failure::Event(Event::Rejected, 10), Kind::ConnectionReset, "stale connection");
        check(Failure::Event(Event::Rejected, 12), Kind::AddrNotAvailable, "wrong GID");
        check(Failure::Event(Event::Rejected, 4242), Kind::ConnectionRefused, "reason 4242");
        check(Failure::Event(Event::Rejected, -111), Kind::ConnectionRefused, "nobody listens");
        check(Failure::Event(Event::Rejected, -104), Kind::ConnectionRefused, "peer's program");
        check(Failure::Event(Event::AddrError, -110), Kind::TimedOut, "neighbour");
        check(Failure::Event(Event::AddrError, -19), Kind::AddrNotAvailable, "no RDMA device is attached");
        // Status -1 means: look at errno.
        check(Failure::Event(Event::AddrError, -1), Kind::HostUnreachable, "no permission on the RDMA device nodes");
        check(Failure::Event(Event::Unreachable, -110), Kind::TimedOut, "unreachable");
        check(Failure::Event(Event::Disconnected, 0), Kind::ConnectionAborted, "gave up");
        check(Failure::Event(Event::DeviceRemoval, 0), Kind::NotConnected, "removed");
        check(Failure::Call(Call::ResolveAddr, 101), Kind::NetworkUnreachable, "no route");
        check(Failure::Call(Call::Connect, 111), Kind::ConnectionRefused, "nobody listens");
        check(Failure::Call(Call::Accept, 22), Kind::ConnectionAborted, "gave up");
        check(Failure::Deadline(Step::Connect), Kind::TimedOut, "after 1s waiting for the peer to accept");
        check(Failure::Cancelled, Kind::Interrupted, "cancelled");
    }

    #[test]
    fn a_client_that_ends_in_the_middle_gave_up_whatever_its_kernel_says() {
        let none = PrivateData::default();
        for reason in [4, 8, 28, -104] {
            let context = FailureContext { passive: true, ..context(&none) };
            let error = Error::from_failure(Failure::Event(Event::Rejected, reason), &context);
            assert!(matches!(error, Error::Aborted { .. }), "{error:?}");
        }
    }

    #[test]
    fn an_io_error_keeps_ours_inside() {
        let error = io::Error::from(Error::Refused { peer: "10.1.2.3:1".parse().expect("a literal address") });
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
        assert!(matches!(inner, Some(Error::Refused { .. })));
    }
}
