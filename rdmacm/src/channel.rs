//! The event channel: where librdmacm reports what happens to ids.
//!
//! Each event is copied out completely and acknowledged before anything is done about it, because `rdma_destroy_id`
//! waits for the acknowledgement of every event of its id (`cma.c`, `ucma_destroy_kern_id` and `rdma_destroy_id`).

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::id::{Id, Key};
use crate::private_data::PrivateData;
use crate::proto;
use crate::sys::{self, CallError};

/// Owns an `rdma_event_channel` in non-blocking mode. The ids on it share its ownership, so that it is closed after the
/// last of them.
#[derive(Debug)]
pub(crate) struct EventChannel {
    raw: NonNull<sys::rdma_event_channel>,
}

// SAFETY: librdmacm keeps no thread-local state; ids may be created on and used from any thread. Only the driver's
// thread reads events: `Events` is not `Clone`, and it is the only type that calls `rdma_get_cm_event`.
unsafe impl Send for EventChannel {}
// SAFETY: as above; through `&EventChannel` only ids are created, which the library serialises in the kernel.
unsafe impl Sync for EventChannel {}

impl EventChannel {
    /// Opens a channel: `rdma_create_event_channel`.
    pub(crate) fn open() -> Result<(Arc<Self>, Events), CallError> {
        let raw = sys::create_event_channel()?;
        let raw = NonNull::new(raw).expect("create_event_channel refuses NULL");
        let channel = Arc::new(Self { raw });
        let fd = channel.as_fd();
        let failed = |errno| CallError { call: "fcntl", errno };
        let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL).map_err(failed)?);
        fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)).map_err(failed)?;
        Ok((Arc::clone(&channel), Events { channel }))
    }

    pub(crate) fn as_raw(&self) -> *mut sys::rdma_event_channel {
        self.raw.as_ptr()
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `raw` is live until drop, and so is its descriptor, which `self` owns for as long as it is borrowed.
        unsafe { BorrowedFd::borrow_raw(sys::event_channel_fd(self.as_raw())) }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: `raw` is live, and no id is left on it: each holds an `Arc` of this channel.
        unsafe { sys::destroy_event_channel(self.as_raw()) }
    }
}

/// The right to read a channel's events: one value for each channel.
#[derive(Debug)]
pub(crate) struct Events {
    channel: Arc<EventChannel>,
}

impl Events {
    pub(crate) fn channel(&self) -> &Arc<EventChannel> {
        &self.channel
    }

    /// The next event, copied out and acknowledged; `None` when there is none now. A readable channel may have none:
    /// librdmacm swallows some events (`cma.c`, `rdma_get_cm_event`).
    pub(crate) fn next(&mut self) -> Result<Option<Received>, CallError> {
        // SAFETY: the channel is live and non-blocking, and `&mut self` makes this thread its only reader.
        let Some(raw) = (unsafe { sys::get_cm_event(self.channel.as_raw()) })? else {
            return Ok(None);
        };
        let errno = Errno::last();
        // SAFETY: `raw` was just fetched and is not acknowledged yet; the ids it names are live, because an id is only
        // destroyed by the driver (this thread) or after its last loan, and destroying waits for this acknowledgement.
        let received = unsafe { Received::copy(raw, errno, &self.channel) };
        // SAFETY: `raw` is acknowledged once, and everything needed was copied.
        unsafe { sys::ack_cm_event(raw) };
        Ok(Some(received))
    }
}

/// An event, copied out.
#[derive(Debug)]
pub(crate) struct Received {
    /// Whom it concerns: for a connect request the listener.
    pub(crate) key: Key,
    pub(crate) event: proto::Event,
    /// A negative errno, a transport's reject code, or -1 for "see `errno`".
    pub(crate) status: i32,
    /// errno as the library left it; only meaningful with status -1.
    pub(crate) errno: Errno,
    /// A connect request's new id.
    pub(crate) child: Option<Id>,
    /// The peer's wishes (request) or the negotiated values (reply); see [`ConnectionDepths`].
    pub(crate) depths: ConnectionDepths,
    pub(crate) private_data: PrivateData,
}

/// How many RDMA reads and atomics may be outstanding, from the receiver's point of view.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ConnectionDepths {
    /// The most that this side must serve at once.
    pub(crate) responder_resources: u8,
    /// The most that this side may have outstanding.
    pub(crate) initiator_depth: u8,
}

impl Received {
    /// # Safety
    /// `raw` is a fetched, unacknowledged event of `channel`, and the ids it names are live.
    unsafe fn copy(raw: *mut sys::rdma_cm_event, errno: Errno, channel: &Arc<EventChannel>) -> Self {
        // SAFETY: the caller's promise; plain fields of a live struct.
        let (id, listen_id, event, status) = unsafe { ((*raw).id, (*raw).listen_id, (*raw).event, (*raw).status) };
        let event = proto::Event::from_raw(event);
        let is_request = event == proto::Event::ConnectRequest;
        let subject = if is_request { listen_id } else { id };
        // SAFETY: the ids of an event are live until it is acknowledged; `context` is written only when an id is made.
        let key = unsafe { Key::of(subject) };
        let (mut depths, mut private_data) = (ConnectionDepths::default(), PrivateData::default());
        if carries_connection(event) {
            // SAFETY: the event is of the connect family of an RDMA_PS_TCP id.
            let conn = unsafe { sys::event_conn(raw) };
            depths = ConnectionDepths {
                responder_resources: conn.responder_resources,
                initiator_depth: conn.initiator_depth,
            };
            if !conn.private_data.is_null() {
                // SAFETY: librdmacm points to its own copy of at least `private_data_len` bytes, alive until the
                // acknowledgement; the bytes are copied here.
                private_data = PrivateData::received(unsafe {
                    std::slice::from_raw_parts(conn.private_data.cast::<u8>(), usize::from(conn.private_data_len))
                });
            }
        }
        // SAFETY: a connect request hands over a new id on this channel.
        let child = is_request.then(|| unsafe { Id::adopt(id, channel) });
        Self { key, event, status, errno, child, depths, private_data }
    }
}

/// The events whose parameter is an `rdma_conn_param`.
fn carries_connection(event: proto::Event) -> bool {
    use proto::Event;
    matches!(event, Event::ConnectRequest | Event::ConnectResponse | Event::Established | Event::Rejected)
}
