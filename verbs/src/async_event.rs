//! What a device reports on its own account: ports that go down and up, queues that fail.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::device::Context;
use crate::error::{OsError, Result};
use crate::sys;

/// The asynchronous events of a device, read without blocking. With several readers of one device each event goes to one
/// of them.
#[derive(Debug)]
pub struct AsyncEvents {
    context: Context,
}

impl AsyncEvents {
    /// Makes the device's descriptor non-blocking.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) from `fcntl`.
    pub fn new(context: &Context) -> Result<AsyncEvents> {
        let events = AsyncEvents { context: context.clone() };
        let failed = |errno| OsError::new("fcntl", errno);
        let flags = fcntl(&events, FcntlArg::F_GETFL).map_err(failed)?;
        fcntl(&events, FcntlArg::F_SETFL(OFlag::from_bits_retain(flags) | OFlag::O_NONBLOCK)).map_err(failed)?;
        Ok(events)
    }

    /// The device.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The next event, copied out and acknowledged (`ibv_get_async_event`, `ibv_ack_async_event`); `None` when there is
    /// none.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os), for instance when the device is gone.
    #[doc(alias = "ibv_get_async_event")]
    pub fn try_next(&mut self) -> Result<Option<AsyncEvent>> {
        loop {
            // SAFETY: the context is open.
            match unsafe { sys::next_async_event(self.context.raw()) } {
                Ok((kind, element)) => {
                    let kind = AsyncEventKind(kind);
                    return Ok(Some(AsyncEvent { kind, subject: AsyncSubject::of(kind, element) }));
                }
                Err(Errno::EAGAIN) => return Ok(None),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(OsError::new("ibv_get_async_event", errno).into()),
            }
        }
    }
}

impl AsFd for AsyncEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open as long as `self`, and so is its descriptor.
        unsafe { BorrowedFd::borrow_raw(sys::async_fd(self.context.raw())) }
    }
}

/// Something that a device reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncEvent {
    /// What happened.
    pub kind: AsyncEventKind,
    /// To what.
    pub subject: AsyncSubject,
}

/// What an event is about. Addresses of C objects are only good for comparing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncSubject {
    /// The device as a whole.
    Device,
    /// A port, counted from 1.
    Port(u32),
    /// The queue pair with this number.
    QueuePair(u32),
    /// The completion queue at this address.
    CompletionQueue(usize),
    /// The shared receive queue at this address.
    SharedReceiveQueue(usize),
    /// Something that this version does not know.
    Other,
}

impl AsyncSubject {
    fn of(kind: AsyncEventKind, element: sys::AsyncElement) -> AsyncSubject {
        use AsyncEventKind as Kind;
        match kind {
            Kind::CQ_ERR => AsyncSubject::CompletionQueue(element.address),
            Kind::SRQ_ERR | Kind::SRQ_LIMIT_REACHED => AsyncSubject::SharedReceiveQueue(element.address),
            Kind::DEVICE_FATAL => AsyncSubject::Device,
            Kind::PORT_ACTIVE
            | Kind::PORT_ERR
            | Kind::LID_CHANGE
            | Kind::PKEY_CHANGE
            | Kind::SM_CHANGE
            | Kind::CLIENT_REREGISTER
            | Kind::GID_CHANGE => AsyncSubject::Port(element.port),
            _ => element.qp_num.map_or(AsyncSubject::Other, AsyncSubject::QueuePair),
        }
    }
}

/// The kind of an event, by its number in `enum ibv_event_type`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct AsyncEventKind(pub u32);

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $number:literal),* $(,)?) => {
        impl AsyncEventKind {
            $($(#[$doc])* pub const $name: AsyncEventKind = AsyncEventKind($number);)*

            fn name(self) -> Option<&'static str> {
                match self {
                    $(AsyncEventKind::$name => Some(concat!("IBV_EVENT_", stringify!($name))),)*
                    _ => None,
                }
            }
        }
    };
}

kinds! {
    /// A completion queue overran.
    CQ_ERR = 0,
    /// A queue pair failed.
    QP_FATAL = 1,
    /// The peer sent an invalid request.
    QP_REQ_ERR = 2,
    /// The peer asked for what it may not.
    QP_ACCESS_ERR = 3,
    /// A message arrived before the connection manager knew of the connection.
    COMM_EST = 4,
    /// A send queue drained.
    SQ_DRAINED = 5,
    /// A connection moved to its alternate path.
    PATH_MIG = 6,
    /// A connection could not move to its alternate path.
    PATH_MIG_ERR = 7,
    /// The device failed.
    DEVICE_FATAL = 8,
    /// A port came up.
    PORT_ACTIVE = 9,
    /// A port went down.
    PORT_ERR = 10,
    /// A port's local identifier changed.
    LID_CHANGE = 11,
    /// A port's partition table changed.
    PKEY_CHANGE = 12,
    /// The subnet manager changed.
    SM_CHANGE = 13,
    /// A shared receive queue failed.
    SRQ_ERR = 14,
    /// A shared receive queue is low.
    SRQ_LIMIT_REACHED = 15,
    /// A queue pair took its last receive from a shared queue.
    QP_LAST_WQE_REACHED = 16,
    /// The subnet manager asks for registrations again.
    CLIENT_REREGISTER = 17,
    /// A port's GID table changed.
    GID_CHANGE = 18,
    /// A work queue failed.
    WQ_FATAL = 19,
}

impl fmt::Debug for AsyncEventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "AsyncEventKind({})", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_numbers_stay_numbers() {
        assert_eq!(format!("{:?}", AsyncEventKind::PORT_ERR), "IBV_EVENT_PORT_ERR");
        assert_eq!(format!("{:?}", AsyncEventKind(4711)), "AsyncEventKind(4711)");
        let nothing = sys::AsyncElement { address: 0, port: 0, qp_num: None };
        assert_eq!(AsyncSubject::of(AsyncEventKind(4711), nothing), AsyncSubject::Other);
    }
}
