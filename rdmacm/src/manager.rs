//! The connection manager: one event-channel thread, and a protection domain for each device.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};

use verbs::{Access, AsyncEvents, Context, MemoryRegion, ProtectionDomain};

use crate::channel::EventChannel;
use crate::context::{ContextAddress, DeviceReference};
use crate::counters::{CounterCells, Counters};
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::handle::{Command, Mailbox};
use crate::sys;

/// Owns the event-channel thread and the devices' protection domains.
///
/// Most programs never name one: [`Connector`](crate::Connector) and [`Listener`](crate::Listener) use
/// [`Manager::global`]. Clones are the same manager. The thread ends with the last clone and the last connection,
/// listener, request or device of it.
///
/// All connections of one manager on one device share a protection domain, and so can use the same memory regions.
#[derive(Clone)]
pub struct Manager {
    inner: Arc<Inner>,
}

struct Inner {
    mailbox: Arc<Mailbox>,
    counters: Arc<CounterCells>,
    thread: Option<JoinHandle<()>>,
    domains: Arc<Domains>,
}

impl Manager {
    /// The manager that the process shares, started if there is none.
    ///
    /// # Errors
    /// As [`Manager::new`].
    pub fn global() -> Result<Self> {
        static GLOBAL: Mutex<Weak<Inner>> = Mutex::new(Weak::new());
        let known = lock(&GLOBAL).upgrade().filter(Inner::is_alive);
        if let Some(inner) = known {
            return Ok(Self { inner });
        }
        // Made without the lock, since it goes to the kernel; of two threads here the first stays.
        let made = Self::new()?;
        let mut global = lock(&GLOBAL);
        match global.upgrade().filter(Inner::is_alive) {
            Some(inner) => Ok(Self { inner }),
            None => {
                *global = Arc::downgrade(&made.inner);
                Ok(made)
            }
        }
    }

    /// A manager of its own, with its own thread and protection domains. Calls `rdma_create_event_channel`.
    ///
    /// # Errors
    /// [`Error::Os`]: ENODEV when there is no RDMA device, EACCES when `/dev/infiniband/rdma_cm` may not be opened,
    /// EMFILE when the process has too many open files.
    #[doc(alias = "rdma_create_event_channel")]
    pub fn new() -> Result<Self> {
        sys::watch_forks();
        if sys::in_child() {
            return Err(Error::Forked);
        }
        let (_, events) = EventChannel::open()?;
        let (mailbox, commands) = Mailbox::new()?;
        let counters = Arc::new(CounterCells::default());
        let domains = Arc::new(Domains::default());
        let driver = Driver::new(events, commands, Arc::clone(&mailbox), Arc::clone(&counters), Arc::clone(&domains));
        let thread = thread::Builder::new()
            .name("rdmacm-events".into())
            .spawn(move || driver.run())
            .map_err(|error| Error::spawn(&error))?;
        Ok(Self { inner: Arc::new(Inner { mailbox, counters, thread: Some(thread), domains }) })
    }

    /// The RDMA devices that connections may use, in librdmacm's order. Calls `rdma_get_devices`.
    ///
    /// # Errors
    /// [`Error::Os`] when the list cannot be had, or a protection domain cannot be made.
    #[doc(alias = "rdma_get_devices")]
    pub fn devices(&self) -> Result<Vec<Device>> {
        if sys::in_child() {
            return Err(Error::Forked);
        }
        let references = DeviceReference::all()?;
        if references.is_empty() {
            // librdmacm passes over devices that it cannot open.
            Error::check_nodes()?;
        }
        references.into_iter().map(|reference| self.device_of(reference)).collect()
    }

    /// What happened on this manager so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.inner.counters.snapshot()
    }

    /// The device of a context that is open now.
    pub(crate) fn device(&self, address: ContextAddress) -> Result<Device> {
        match self.known(address) {
            Some(device) => Ok(device),
            None => self.device_of(DeviceReference::of(address)?),
        }
    }

    /// The device that a reference is on, with its protection domain, made at the first use.
    fn device_of(&self, reference: DeviceReference) -> Result<Device> {
        let address = reference.address();
        if let Some(device) = self.known(address) {
            return Ok(device);
        }
        let context = reference.into_context();
        let made = ProtectionDomain::new(&context)?;
        // Two threads that come here at once have the device watched twice, which does no harm.
        self.mailbox().send(Command::Watch(AsyncEvents::new(&context)?));
        Ok(Device { pd: self.inner.domains.first(address, made), _manager: self.clone() })
    }

    fn known(&self, address: ContextAddress) -> Option<Device> {
        Some(Device { pd: self.inner.domains.get(address)?, _manager: self.clone() })
    }

    pub(crate) fn mailbox(&self) -> &Arc<Mailbox> {
        &self.inner.mailbox
    }
}

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let handles = Arc::strong_count(&self.inner);
        f.debug_struct("Manager").field("devices", &self.inner.domains.len()).field("handles", &handles).finish()
    }
}

impl Inner {
    /// Whether the event-channel thread runs; should it have panicked, a new manager takes over.
    fn is_alive(self: &Arc<Self>) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if sys::in_child() {
            // The thread is the parent's.
            std::mem::forget(self.thread.take());
            return;
        }
        self.mailbox.send(Command::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::warn!("the event-channel thread panicked");
        }
    }
}

/// An RDMA device, and the protection domain on it that all connections of one manager share.
#[derive(Clone)]
pub struct Device {
    pd: ProtectionDomain,
    _manager: Manager,
}

impl Device {
    /// The device's name, as `rdma link` shows it.
    #[must_use]
    pub fn name(&self) -> String {
        self.context().name()
    }

    /// The open device: attributes, ports, GIDs.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.pd.context()
    }

    /// The protection domain that connections on this device use.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Registers `len` bytes of zeroed memory that all connections on this device can use, and peers as far as `access`
    /// says.
    ///
    /// # Errors
    /// As [`MemoryRegion::new`].
    pub fn register(&self, len: usize, access: Access) -> Result<MemoryRegion> {
        Ok(MemoryRegion::new(&self.pd, len, access)?)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// The protection domain of each device that is in use. A domain keeps its device's context open, so that the address of
/// a context in the map cannot have become another device's.
#[derive(Debug, Default)]
pub(crate) struct Domains {
    by_context: Mutex<HashMap<ContextAddress, ProtectionDomain>>,
}

impl Domains {
    fn get(&self, address: ContextAddress) -> Option<ProtectionDomain> {
        lock(&self.by_context).get(&address).cloned()
    }

    /// Keeps `made`, unless another thread was first: then that one's, and `made` is dropped without the lock.
    fn first(&self, address: ContextAddress, made: ProtectionDomain) -> ProtectionDomain {
        let spare = made.clone();
        let first = lock(&self.by_context).entry(address).or_insert(made).clone();
        drop(spare);
        first
    }

    /// Forgets a device that was removed: whoever still uses its domain is the last to keep the context open.
    pub(crate) fn forget(&self, address: ContextAddress) {
        let forgotten = lock(&self.by_context).remove(&address);
        drop(forgotten);
    }

    fn len(&self) -> usize {
        lock(&self.by_context).len()
    }
}

/// The map and the global handle stay whole whatever a panicking thread did: each change is one insertion or assignment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
