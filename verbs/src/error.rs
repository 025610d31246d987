//! Errors, sorted by who can do something about them.

mod work;

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};

pub use work::{Opcode, WorkError, WorkStatus};

/// What this crate's functions return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation did not succeed.
///
/// `Clone`, because several threads learn the one reason why a connection broke. Converts to
/// [`io::Error`] with the matching kind and itself kept inside (see [`io::Error::downcast`]).
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call to the operating system or the device failed.
    #[error(transparent)]
    Os(OsError),
    /// More was asked for than the device or the set-up allows.
    #[error(transparent)]
    Limit(LimitError),
    /// A posted operation ended with an error, which also ends the connection.
    #[error(transparent)]
    Work(WorkError),
    /// The connection is over.
    #[error("{0}")]
    Closed(CloseReason),
    /// The time allowed for the wait is over; what was waited for. Nothing is lost.
    #[error("timed out while waiting for {0}")]
    TimedOut(&'static str),
    /// Nothing can be done without waiting, and the caller asked not to wait.
    #[error("the operation would have to wait")]
    WouldBlock,
    /// A rule of this library or of verbs was not kept; which one.
    #[error("{0}")]
    Misuse(Cow<'static, str>),
    /// The next message is longer than the buffer given. It is kept for the next call.
    #[error("the next message has {len} bytes, the buffer only {capacity}: call again with a larger one")]
    Truncated {
        /// Length of the message, in bytes.
        len: usize,
        /// Length of the buffer, in bytes.
        capacity: usize,
    },
    /// The message to be sent is larger than this end's send buffers.
    #[error("a message of {len} bytes is larger than the {limit} bytes agreed on: raise the message size of both ends")]
    TooLong {
        /// Length of the message, in bytes.
        len: usize,
        /// The largest possible, in bytes.
        limit: usize,
    },
    /// The device, its driver or its transport does not offer this; what.
    #[error("not supported: {0}")]
    Unsupported(&'static str),
    /// The device or its driver did something that verbs does not allow; what.
    #[error("the device or its driver broke a rule: {0}")]
    Provider(&'static str),
}

impl Error {
    pub(crate) fn misuse(why: impl Into<Cow<'static, str>>) -> Error {
        Error::Misuse(why.into())
    }

    /// The nearest [`io::ErrorKind`].
    pub fn kind(&self) -> io::ErrorKind {
        use io::ErrorKind as Kind;
        match self {
            Error::Os(e) => e.kind(),
            Error::Limit(_) | Error::Misuse(_) | Error::Truncated { .. } | Error::TooLong { .. } => Kind::InvalidInput,
            Error::Work(e) => e.kind(),
            Error::Closed(reason) => reason.kind(),
            Error::TimedOut(_) => Kind::TimedOut,
            Error::WouldBlock => Kind::WouldBlock,
            Error::Unsupported(_) => Kind::Unsupported,
            Error::Provider(_) => Kind::Other,
        }
    }

    /// Whether this says only that the operation was flushed, not what broke the connection.
    pub fn is_flush(&self) -> bool {
        matches!(self, Error::Work(e) if e.status == WorkStatus::FLUSHED)
    }
}

impl From<Error> for io::Error {
    fn from(e: Error) -> io::Error {
        io::Error::new(e.kind(), e)
    }
}

impl From<OsError> for Error {
    fn from(e: OsError) -> Error {
        Error::Os(e)
    }
}

/// A failed call: which one, the errno, and what to do about it where that is known.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OsError {
    /// The C function.
    pub call: &'static str,
    /// Its error number.
    pub errno: Errno,
    /// What the user can do.
    pub remedy: Option<Cow<'static, str>>,
}

impl OsError {
    /// The failure of `call`, with the remedy that fits the error number.
    pub fn new(call: &'static str, errno: Errno) -> OsError {
        let remedy: Option<&'static str> = match errno {
            Errno::EMFILE => return OsError { call, errno, remedy: Some(Cow::Owned(too_many_files())) },
            Errno::EPERM if crate::sys::in_child() => Some(
                "this process was forked after RDMA was set up: its parent's connections and memory regions are not its \
                 own; fork before the first use, or exec a new program",
            ),
            Errno::ENODEV | Errno::ENXIO => Some(
                "no RDMA device, or it went away: see that `rdma link` lists one (for Soft-RoCE: \
                 rdma link add rxe0 type rxe netdev <interface>) and that its user-space driver is installed",
            ),
            Errno::EACCES | Errno::EPERM => {
                Some("no permission: see that /dev/infiniband/uverbs* can be read and written by this user")
            }
            Errno::ENOENT => Some("see that the kernel module ib_uverbs is loaded"),
            _ => None,
        };
        OsError { call, errno, remedy: remedy.map(Cow::Borrowed) }
    }

    /// Like [`OsError::new`] for calls that pin `bytes` of memory: `ENOMEM` then names the limit on
    /// locked memory, which is its usual cause.
    pub fn pinning(call: &'static str, errno: Errno, bytes: usize) -> OsError {
        let mut e = OsError::new(call, errno);
        if errno == Errno::ENOMEM {
            let limit = value_of(Resource::RLIMIT_MEMLOCK, " bytes");
            e.remedy = Some(Cow::Owned(format!(
                "{bytes} bytes were to be pinned and RLIMIT_MEMLOCK is {limit}: raise it with `ulimit -l` or \
                 LimitMEMLOCK=, or use less"
            )));
        }
        e
    }

    fn kind(&self) -> io::ErrorKind {
        match self.errno {
            // Without a stable kind in std.
            Errno::ENODEV | Errno::ENXIO => io::ErrorKind::NotFound,
            errno => io::Error::from(errno).kind(),
        }
    }
}

/// What `EMFILE` means: the limit, with its value, and how to raise it.
fn too_many_files() -> String {
    let limit = value_of(Resource::RLIMIT_NOFILE, "");
    format!("RLIMIT_NOFILE is {limit}: raise it with `ulimit -n` or LimitNOFILE=, or close some")
}

/// The value of this process's limit that is in force.
fn value_of(resource: Resource, unit: &str) -> String {
    match getrlimit(resource) {
        Ok((nix::libc::RLIM_INFINITY, _)) => "unlimited".to_owned(),
        Ok((soft, _)) => format!("{soft}{unit}"),
        Err(_) => "unknown".to_owned(),
    }
}

impl fmt::Display for OsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, self.errno.desc().to_lowercase())?;
        match &self.remedy {
            Some(remedy) => write!(f, " ({remedy})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for OsError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.errno)
    }
}

/// More was asked for than is allowed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{what}: {asked} asked for, at most {allowed} possible ({remedy})")]
#[non_exhaustive]
pub struct LimitError {
    /// Which limit, with the option that asks for it and the device attribute that bounds it.
    pub what: &'static str,
    /// What was asked for.
    pub asked: u64,
    /// The most that is possible.
    pub allowed: u64,
    /// What the user can do.
    pub remedy: &'static str,
}

impl LimitError {
    /// `Ok` when `asked` is at most `allowed`.
    pub(crate) fn check(what: &'static str, asked: u64, allowed: u64, remedy: &'static str) -> Result<()> {
        if asked <= allowed { Ok(()) } else { Err(Error::Limit(LimitError { what, asked, allowed, remedy })) }
    }
}

/// Why a connection is over, where nothing that was posted failed by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CloseReason {
    /// The peer closed it in good order, or its process ended.
    Peer,
    /// This side closed it.
    Local,
    /// The device was removed.
    DeviceRemoved,
    /// The network says that the peer cannot be reached any more.
    Unreachable,
    /// The peer no longer answers, though nothing says why: it, or the way to it, is dead or stopped.
    Unresponsive,
    /// Something else; what.
    Failed(Arc<str>),
}

impl CloseReason {
    /// [`CloseReason::Failed`] with this text.
    pub fn failed(why: impl Into<Arc<str>>) -> CloseReason {
        CloseReason::Failed(why.into())
    }

    fn kind(&self) -> io::ErrorKind {
        match self {
            CloseReason::Peer => io::ErrorKind::ConnectionReset,
            CloseReason::Local | CloseReason::DeviceRemoved => io::ErrorKind::NotConnected,
            CloseReason::Unreachable => io::ErrorKind::HostUnreachable,
            CloseReason::Unresponsive => io::ErrorKind::TimedOut,
            CloseReason::Failed(_) => io::ErrorKind::ConnectionAborted,
        }
    }
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CloseReason::Peer => f.write_str("the peer closed the connection"),
            CloseReason::Local => f.write_str("this side closed the connection"),
            CloseReason::DeviceRemoved => f.write_str("the RDMA device was removed"),
            CloseReason::Unreachable => f.write_str("the peer cannot be reached any more"),
            CloseReason::Unresponsive => f.write_str("the peer no longer answers"),
            CloseReason::Failed(why) => write!(f, "the connection failed: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_lower_case_without_period_and_name_cause_and_remedy() {
        let memlock = Error::Os(OsError::pinning("ibv_reg_mr", Errno::ENOMEM, 1 << 20)).to_string();
        assert!(memlock.contains("RLIMIT_MEMLOCK") && memlock.contains("1048576"), "{memlock}");
        assert!(Error::Os(OsError::new("ibv_open_device", Errno::ENODEV)).to_string().contains("no RDMA device"));
        assert!(Error::Os(OsError::new("ibv_open_device", Errno::EACCES)).to_string().contains("permission"));
        let files = Error::Os(OsError::new("ibv_create_comp_channel", Errno::EMFILE)).to_string();
        let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).expect("the limit can be read");
        assert!(files.contains(&format!("RLIMIT_NOFILE is {limit}")), "{files}");
    }

    #[test]
    fn io_error_keeps_ours_inside() {
        let e = io::Error::from(Error::Closed(CloseReason::Peer));
        assert_eq!(e.kind(), io::ErrorKind::ConnectionReset);
        let inner = e.downcast::<Error>().expect("our error is inside");
        assert!(matches!(inner, Error::Closed(CloseReason::Peer)));
    }
}
