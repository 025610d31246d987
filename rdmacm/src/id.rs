//! `rdma_cm_id`: one end of a connection, or a listener.

use std::net::SocketAddr;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use verbs::{Endpoint, EndpointBuilder, ProtectionDomain};

use crate::addr::{self, CAddr};
use crate::channel::EventChannel;
use crate::context::ContextAddress;
use crate::error::{Error, Result};
use crate::sys::{self, CallError, IdOption};

/// What an id is known by: never used twice in a process, and stored in the id's `context`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key(pub(crate) usize);

impl Key {
    /// A new one.
    pub(crate) fn next() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// # Safety
    /// `id` is live.
    pub(crate) unsafe fn of(id: *mut sys::rdma_cm_id) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { (*id).context }.addr())
    }
}

/// The id itself, destroyed when the last holder lets go: the driver's [`Id`], or a [`Loan`] that outlives it.
#[derive(Debug)]
struct Owned {
    raw: NonNull<sys::rdma_cm_id>,
    /// Closed after the id is destroyed.
    _channel: Arc<EventChannel>,
}

// SAFETY: librdmacm has no thread-local state. Calls on one id are never made from two threads at once: the driver makes
// them, and makes none while a `Loan` exists.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Owned {
    fn context(&self) -> ContextAddress {
        // SAFETY: the id is live; `verbs` is written once, inside librdmacm's calls on the driver's thread, before the id is
        // lent: no other thread reads it earlier.
        ContextAddress::of(unsafe { (*self.raw.as_ptr()).verbs.cast() })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: `raw` is live; this is the last holder, so nobody else uses it; the driver acknowledges each event
        // before it acts, so none is outstanding, or will be acknowledged soon by the driver's thread.
        if let Err(CallError { errno, .. }) = unsafe { sys::destroy_id(self.raw.as_ptr()) } {
            log::warn!("rdma_destroy_id: {errno}; the id is leaked");
        }
    }
}

/// The driver's hold on an id. Its methods are one call each and return at once.
#[derive(Debug)]
pub(crate) struct Id {
    owned: Arc<Owned>,
}

impl Id {
    /// `rdma_create_id` in `RDMA_PS_TCP`.
    pub(crate) fn create(channel: &Arc<EventChannel>, key: Key) -> Result<Self, CallError> {
        // SAFETY: the channel is live, and the new id keeps it so.
        let raw = unsafe { sys::create_id(channel.as_raw(), key.0) }?;
        // SAFETY: a new id, owned by nobody else, on this channel.
        Ok(unsafe { Self::adopt(raw, channel) })
    }

    /// # Safety
    /// `raw` is a live id on `channel` that nobody else will destroy.
    pub(crate) unsafe fn adopt(raw: *mut sys::rdma_cm_id, channel: &Arc<EventChannel>) -> Self {
        let raw = NonNull::new(raw).expect("librdmacm hands out no NULL id");
        Self { owned: Arc::new(Owned { raw, _channel: Arc::clone(channel) }) }
    }

    /// Gives a child id its own key: it comes with its listener's.
    pub(crate) fn set_key(&mut self, key: Key) {
        // SAFETY: the id is live and not lent yet; librdmacm never touches `context`.
        unsafe { (*self.raw()).context = ptr::without_provenance_mut(key.0) }
    }

    fn raw(&self) -> *mut sys::rdma_cm_id {
        self.owned.raw.as_ptr()
    }

    /// Lends the id to a user thread.
    pub(crate) fn lend(&self) -> Loan {
        debug_assert_eq!(Arc::strong_count(&self.owned), 1, "an id is lent once at a time");
        Loan { owned: Arc::clone(&self.owned) }
    }

    pub(crate) fn set_option(&self, option: IdOption, value: u8) -> Result<(), CallError> {
        // SAFETY: the id is live.
        unsafe { sys::set_option(self.raw(), option, value) }
    }

    pub(crate) fn bind(&self, address: SocketAddr) -> Result<(), CallError> {
        let address = CAddr::from(address);
        // SAFETY: the id is live; `address` is complete and outlives the call.
        unsafe { sys::bind_addr(self.raw(), address.as_ptr()) }
    }

    pub(crate) fn listen(&self) -> Result<(), CallError> {
        // The kernel's queue holds only requests that the driver has not fetched yet: as long as the system allows.
        // SAFETY: the id is live.
        unsafe { sys::listen(self.raw(), 0) }
    }

    pub(crate) fn resolve_addr(
        &self,
        source: Option<SocketAddr>,
        destination: SocketAddr,
        timeout: Duration,
    ) -> Result<(), CallError> {
        let source = source.map(CAddr::from);
        let destination = CAddr::from(destination);
        let source = source.as_ref().map_or(ptr::null(), CAddr::as_ptr);
        // SAFETY: the id is live; both addresses are complete and outlive the call.
        unsafe { sys::resolve_addr(self.raw(), source, destination.as_ptr(), timeout) }
    }

    pub(crate) fn resolve_route(&self, timeout: Duration) -> Result<(), CallError> {
        self.on_device("rdma_resolve_route")?;
        // SAFETY: the id is live and bound to a device.
        unsafe { sys::resolve_route(self.raw(), timeout) }
    }

    pub(crate) fn connect(&self, parameters: &Parameters) -> Result<(), CallError> {
        self.on_device("rdma_connect")?;
        // SAFETY: the id is live and bound to a device; the parameters point into `parameters`.
        unsafe { sys::connect(self.raw(), &mut parameters.to_c()) }
    }

    pub(crate) fn accept(&self, parameters: &Parameters) -> Result<(), CallError> {
        self.on_device("rdma_accept")?;
        // SAFETY: the id is a live child (the driver accepts no other) with a queue pair, made during its loan; the
        // parameters point into `parameters`.
        unsafe { sys::accept(self.raw(), &mut parameters.to_c()) }
    }

    pub(crate) fn reject(&self, private_data: &[u8]) -> Result<(), CallError> {
        // SAFETY: the id is a live child (the driver rejects no other).
        unsafe { sys::reject(self.raw(), private_data) }
    }

    pub(crate) fn notify_established(&self) -> Result<(), CallError> {
        // SAFETY: the id is live.
        unsafe { sys::notify_established(self.raw()) }
    }

    pub(crate) fn disconnect(&self) -> Result<(), CallError> {
        // SAFETY: the id is live. So is its queue pair: the driver's slot holds the endpoint's `Control` until after the
        // id is destroyed.
        unsafe { sys::disconnect(self.raw()) }
    }

    /// The library reads through `id->verbs` in some calls without a check; it is set once an address is resolved.
    fn on_device(&self, call: &'static str) -> Result<(), CallError> {
        // SAFETY: the id is live; `verbs` is written by this thread only, inside librdmacm's calls.
        if unsafe { (*self.raw()).verbs }.is_null() {
            return Err(CallError { call, errno: Errno::ENODEV });
        }
        Ok(())
    }

    /// The device that the id is bound to.
    pub(crate) fn context(&self) -> ContextAddress {
        self.owned.context()
    }

    pub(crate) fn local_addr(&self) -> Option<SocketAddr> {
        // SAFETY: the id is live, and its addresses change only inside librdmacm's calls on this thread.
        addr::from_storage(unsafe { sys::source_address(self.raw()) })
    }

    pub(crate) fn peer_addr(&self) -> Option<SocketAddr> {
        // SAFETY: as in `local_addr`.
        addr::from_storage(unsafe { sys::destination_address(self.raw()) })
    }
}

/// An id in the hands of a user thread, which makes the queue pair on it. Meanwhile the driver makes no call on the id.
#[derive(Debug)]
pub(crate) struct Loan {
    owned: Arc<Owned>,
}

impl Loan {
    fn raw(&self) -> *mut sys::rdma_cm_id {
        self.owned.raw.as_ptr()
    }

    /// The device that the id is bound to. Its context is open as long as the id is bound.
    pub(crate) fn context(&self) -> ContextAddress {
        self.owned.context()
    }

    /// The acknowledgement timeout of the queue pair; on the accepting side it takes effect until `rdma_accept`.
    pub(crate) fn set_ack_timeout(&mut self, exponent: u8) -> Result<(), CallError> {
        // SAFETY: the id is live and lent: the driver makes no call on it.
        unsafe { sys::set_option(self.raw(), IdOption::AckTimeout, exponent) }
    }

    /// Makes the queue pair (`rdma_create_qp`) on `pd` and the builder's completion queues, and posts the receives.
    /// Devices that refuse the inline size with EINVAL are asked again for less.
    pub(crate) fn build(&mut self, mut builder: EndpointBuilder, pd: &ProtectionDomain) -> Result<Endpoint> {
        if !self.context().names(pd.context()) {
            return Err(Error::Misuse("the protection domain belongs to another device than the connection"));
        }
        loop {
            let mut attr = builder.init_attr();
            // SAFETY: the id is live, bound to a device, and lent: the driver makes no call on it. `pd` and the queues of
            // `builder` are live and of the same device context, as checked above and by the builder.
            match unsafe { sys::create_qp(self.raw(), pd.as_raw().cast(), &mut attr) } {
                Ok(()) => {
                    // SAFETY: `qp` was just made on the id with the builder's attributes and is handed over: librdmacm
                    // never destroys the queue pair of an id by itself.
                    let endpoint = unsafe { builder.build((*self.raw()).qp.cast(), &attr) };
                    if endpoint.is_err() {
                        self.forget_qp();
                    }
                    return Ok(endpoint?);
                }
                Err(CallError { errno: Errno::EINVAL, .. }) if builder.reduce_inline() => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The queue pair is gone: the id must not name it any more.
    pub(crate) fn forget_qp(&mut self) {
        // SAFETY: the id is live and lent; the driver makes no call that reads `qp` before the loan's end.
        unsafe { (*self.raw()).qp = ptr::null_mut() }
    }
}

/// What goes into a request or a reply (`rdma_conn_param`).
#[derive(Clone, Debug, Default)]
pub(crate) struct Parameters {
    pub(crate) private_data: Vec<u8>,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
}

impl Parameters {
    fn to_c(&self) -> sys::rdma_conn_param {
        sys::rdma_conn_param {
            private_data: self.private_data.as_ptr().cast(),
            private_data_len: u8::try_from(self.private_data.len()).expect("checked against the carrier's field"),
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            flow_control: 1,
            retry_count: self.retry_count,
            rnr_retry_count: self.rnr_retry,
            srq: 0,
            qp_num: 0,
        }
    }
}
