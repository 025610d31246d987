//! Posted operations that ended with an error.

use std::fmt;
use std::io;

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
    pub(super) fn kind(&self) -> io::ErrorKind {
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
    /// The empty RDMA write that asks whether the peer still answers ([`Control::probe`](crate::Control::probe)).
    Probe = 6,
    /// An atomic compare-and-swap.
    CompareAndSwap = 7,
    /// An atomic fetch-and-add.
    FetchAndAdd = 8,
    /// The binding of a memory window.
    Bind = 9,
    /// The revocation of a memory window.
    Invalidate = 10,
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
            6 => Opcode::Probe,
            7 => Opcode::CompareAndSwap,
            8 => Opcode::FetchAndAdd,
            9 => Opcode::Bind,
            10 => Opcode::Invalidate,
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
            Opcode::Probe => "keepalive probe",
            Opcode::CompareAndSwap => "compare-and-swap",
            Opcode::FetchAndAdd => "fetch-and-add",
            Opcode::Bind => "binding of a memory window",
            Opcode::Invalidate => "revocation of a memory window",
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn names_are_those_of_c_and_texts_are_lower_case_without_period() {
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
    fn every_opcode_survives_its_code() {
        for op in [Opcode::Send, Opcode::Recv, Opcode::Write, Opcode::Read, Opcode::Flush] {
            assert_eq!(Opcode::from_code(op as u8), Some(op));
        }
        assert_eq!(Opcode::from_code(0), None);
    }
}
