//! Errors, sorted by who can do something about them.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};

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
            Errno::ENODEV | Errno::ENXIO => Some(
                "no RDMA device, or it went away: see that `rdma link` lists one (for Soft-RoCE: \
                 rdma link add rxe0 type rxe netdev <interface>) and that its user-space driver is installed",
            ),
            Errno::EACCES | Errno::EPERM => {
                Some("no permission: see that /dev/infiniband/uverbs* can be read and written by this user")
            }
            Errno::EMFILE => Some("too many open files: raise `ulimit -n`"),
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
            let limit = match getrlimit(Resource::RLIMIT_MEMLOCK) {
                Ok((nix::libc::RLIM_INFINITY, _)) => "unlimited".into(),
                Ok((soft, _)) => format!("{soft} bytes"),
                Err(_) => "unknown".to_string(),
            };
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

/// A posted operation that ended with an error.
///
/// An error completion carries only its status, so the kind of operation is the one remembered here.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WorkError {
    /// The status of the completion.
    pub status: WorkStatus,
    /// The kind of operation that failed.
    pub opcode: Opcode,
    /// The vendor's own code, for the vendor's documentation.
    pub vendor: u32,
    /// For a receive: the size of its buffer, in bytes.
    pub buffer: Option<usize>,
}

impl WorkError {
    fn kind(&self) -> io::ErrorKind {
        match (self.status, self.buffer) {
            (WorkStatus::LOCAL_OPERATION, Some(_)) => io::ErrorKind::InvalidData,
            (status, _) => status.kind(),
        }
    }
}

impl fmt::Display for WorkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.status, self.buffer) {
            (WorkStatus::LOCAL_LENGTH, Some(bytes)) => {
                write!(f, "{}: message larger than the receive buffer ({bytes} bytes)", self.opcode)?;
            }
            // All that Soft-RoCE says of it.
            (WorkStatus::LOCAL_OPERATION, Some(bytes)) => write!(
                f,
                "{}: {}, most likely for a message larger than the receive buffer ({bytes} bytes)",
                self.opcode, self.status
            )?,
            (status, _) => write!(f, "{}: {status}", self.opcode)?,
        }
        if self.vendor != 0 {
            write!(f, " (vendor code {:#x})", self.vendor)?;
        }
        Ok(())
    }
}

impl std::error::Error for WorkError {}

/// The kind of a posted operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Opcode {
    /// A message sent.
    Send = 1,
    /// A message received.
    Recv = 2,
    /// An RDMA write.
    Write = 3,
    /// An RDMA read.
    Read = 4,
    /// The empty RDMA write whose completion tells that everything before it is done.
    Flush = 5,
}

impl Opcode {
    #[inline]
    pub(crate) fn from_code(code: u8) -> Option<Opcode> {
        Some(match code {
            1 => Opcode::Send,
            2 => Opcode::Recv,
            3 => Opcode::Write,
            4 => Opcode::Read,
            5 => Opcode::Flush,
            _ => return None,
        })
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Opcode::Send => "send",
            Opcode::Recv => "receive",
            Opcode::Write => "RDMA write",
            Opcode::Read => "RDMA read",
            Opcode::Flush => "flush",
        })
    }
}

/// The status of a completion (`enum ibv_wc_status`). Unknown numbers are carried as they are.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct WorkStatus(pub u32);

impl WorkStatus {
    /// Done.
    pub const SUCCESS: WorkStatus = WorkStatus(0);
    /// The message is larger than the receive buffer, or the request larger than the device allows.
    pub const LOCAL_LENGTH: WorkStatus = WorkStatus(1);
    /// The local queue pair could not carry out the operation. Soft-RoCE says this of a receive whose buffer
    /// is too small.
    pub const LOCAL_OPERATION: WorkStatus = WorkStatus(2);
    /// The local memory was not registered for this use.
    pub const LOCAL_PROTECTION: WorkStatus = WorkStatus(4);
    /// Flushed unperformed, because the queue pair is in the error state.
    pub const FLUSHED: WorkStatus = WorkStatus(5);
    /// The peer refused the message.
    pub const REMOTE_INVALID_REQUEST: WorkStatus = WorkStatus(9);
    /// The peer's memory does not allow the access.
    pub const REMOTE_ACCESS: WorkStatus = WorkStatus(10);
    /// The peer could not complete the operation.
    pub const REMOTE_OPERATION: WorkStatus = WorkStatus(11);
    /// The peer did not acknowledge.
    pub const RETRY_EXCEEDED: WorkStatus = WorkStatus(12);
    /// The peer had no receive posted.
    pub const RNR_RETRY_EXCEEDED: WorkStatus = WorkStatus(13);

    /// (C name, sentence), indexed by number.
    const TEXTS: [(&'static str, &'static str); 24] = [
        ("IBV_WC_SUCCESS", "done"),
        ("IBV_WC_LOC_LEN_ERR", "message larger than the receive buffer, or than the device can send"),
        ("IBV_WC_LOC_QP_OP_ERR", "the local queue pair could not carry out the operation"),
        ("IBV_WC_LOC_EEC_OP_ERR", "local end-to-end context error"),
        ("IBV_WC_LOC_PROT_ERR", "the local memory is not registered for this operation, or the range is too long"),
        ("IBV_WC_WR_FLUSH_ERR", "not carried out, because the connection was already broken or closed"),
        ("IBV_WC_MW_BIND_ERR", "the memory window could not be bound"),
        ("IBV_WC_BAD_RESP_ERR", "the peer sent an unexpected answer"),
        ("IBV_WC_LOC_ACCESS_ERR", "the local memory does not allow the access"),
        (
            "IBV_WC_REM_INV_REQ_ERR",
            "the peer refused the message: larger than its receive buffer or an operation it does not allow",
        ),
        (
            "IBV_WC_REM_ACCESS_ERR",
            "the peer's memory refused the access: outside the region, without the right to it, or the region is gone",
        ),
        (
            "IBV_WC_REM_OP_ERR",
            "the peer could not complete the operation: the message is larger than its receive buffer, or it has a fault",
        ),
        ("IBV_WC_RETRY_EXC_ERR", "the peer did not answer: retries exceeded"),
        (
            "IBV_WC_RNR_RETRY_EXC_ERR",
            "the peer had no receive buffer free for too long: receiver-not-ready retries exceeded",
        ),
        ("IBV_WC_LOC_RDD_VIOL_ERR", "local reliable datagram domain violation"),
        ("IBV_WC_REM_INV_RD_REQ_ERR", "the peer refused the reliable datagram request"),
        ("IBV_WC_REM_ABORT_ERR", "the peer aborted the operation"),
        ("IBV_WC_INV_EECN_ERR", "invalid end-to-end context number"),
        ("IBV_WC_INV_EEC_STATE_ERR", "invalid end-to-end context state"),
        ("IBV_WC_FATAL_ERR", "fatal transport error"),
        ("IBV_WC_RESP_TIMEOUT_ERR", "the peer did not respond in time"),
        ("IBV_WC_GENERAL_ERR", "general transport error"),
        ("IBV_WC_TM_ERR", "tag matching error"),
        ("IBV_WC_TM_RNDV_INCOMPLETE", "tag matching: rendezvous incomplete"),
    ];

    fn kind(self) -> io::ErrorKind {
        use io::ErrorKind as Kind;
        match self.0 {
            1 => Kind::InvalidData,
            4 | 8 | 9 => Kind::InvalidInput,
            5 => Kind::BrokenPipe,
            6 | 10 => Kind::PermissionDenied,
            7 | 11 | 16 => Kind::ConnectionAborted,
            12 | 13 | 20 => Kind::TimedOut,
            _ => Kind::Other,
        }
    }
}

impl fmt::Debug for WorkStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::TEXTS.get(self.0 as usize) {
            Some((name, _)) => f.write_str(name),
            None => write!(f, "WorkStatus({})", self.0),
        }
    }
}

impl fmt::Display for WorkStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::TEXTS.get(self.0 as usize) {
            Some((_, text)) => f.write_str(text),
            None => write!(f, "unknown completion status {}", self.0),
        }
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
        for (name, text) in WorkStatus::TEXTS {
            assert!(name.starts_with("IBV_WC_") && !text.ends_with('.') && !text.starts_with(char::is_uppercase));
        }
    }

    #[test]
    fn statuses_map_to_kinds_and_unknown_ones_are_carried() {
        let work = |status, buffer| {
            Error::Work(WorkError { status: WorkStatus(status), opcode: Opcode::Recv, vendor: 0, buffer })
        };
        assert_eq!(work(5, None).kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(work(12, None).kind(), io::ErrorKind::TimedOut);
        assert_eq!(work(10, None).kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(work(1, Some(4096)).kind(), io::ErrorKind::InvalidData);
        assert_eq!(work(1, Some(4096)).to_string(), "receive: message larger than the receive buffer (4096 bytes)");
        assert_eq!(work(77, None).to_string(), "receive: unknown completion status 77");
        assert_eq!(format!("{:?} {:?}", WorkStatus(12), WorkStatus(99)), "IBV_WC_RETRY_EXC_ERR WorkStatus(99)");
        assert!(work(5, None).is_flush() && !work(12, None).is_flush());
    }

    #[test]
    fn io_error_keeps_ours_inside() {
        let e = io::Error::from(Error::Closed(CloseReason::Peer));
        assert_eq!(e.kind(), io::ErrorKind::ConnectionReset);
        let inner = e.downcast::<Error>().expect("our error is inside");
        assert!(matches!(inner, Error::Closed(CloseReason::Peer)));
    }

    #[test]
    fn every_opcode_survives_its_code() {
        for op in [Opcode::Send, Opcode::Recv, Opcode::Write, Opcode::Read, Opcode::Flush] {
            assert_eq!(Opcode::from_code(op as u8), Some(op));
        }
        assert_eq!(Opcode::from_code(0), None);
    }
}
