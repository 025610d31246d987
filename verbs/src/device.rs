//! Devices: the list, the opened [`Context`], and what can be asked of it.

mod attributes;

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use nix::errno::Errno;

use crate::error::{OsError, Result};
use crate::sys;

pub(crate) use attributes::mtu_bytes;
pub use attributes::{AtomicCap, DeviceAttributes, GidEntry, GidType, LinkLayer, PortAttributes, PortState, Transport};

/// Lists the RDMA devices of this machine (`ibv_get_device_list`). No device is an empty list.
///
/// # Errors
/// [`Error::Os`](crate::Error::Os) when the list cannot be read, for instance for want of permission.
#[doc(alias = "ibv_get_device_list")]
pub fn devices() -> Result<Vec<Device>> {
    // SAFETY: no precondition; the list is freed by `DeviceList`.
    let (raw, count) = match unsafe { sys::get_device_list() } {
        Ok(list) => list,
        // How libibverbs says that the kernel has no RDMA at all.
        Err(Errno::ENOSYS | Errno::ENODEV | Errno::ENOENT) => return Ok(Vec::new()),
        Err(errno) => return Err(OsError::new("ibv_get_device_list", errno).into()),
    };
    let list = Arc::new(DeviceList { raw });
    Ok((0..count)
        .filter_map(|i| {
            // SAFETY: the list has `count` entries.
            let raw = NonNull::new(unsafe { *raw.as_ptr().add(i) })?;
            Some(Device { raw, list: list.clone() })
        })
        .collect())
}

/// A device of the list. Keeps the list, so that its pointers stay valid.
#[derive(Clone)]
pub struct Device {
    raw: NonNull<sys::ibv_device>,
    list: Arc<DeviceList>,
}

// SAFETY: the structure behind `raw` is constant until the list is freed, which `list` prevents, and
// libibverbs may be called from any thread.
unsafe impl Send for Device {}
// SAFETY: as above; nothing is written through `&Device`.
unsafe impl Sync for Device {}

impl Device {
    /// The kernel's name of the device, such as `mlx5_0` or `rxe0`.
    pub fn name(&self) -> String {
        // SAFETY: the device lives as long as `self.list`.
        unsafe { sys::device_name(self.raw) }
    }

    /// The globally unique identifier of the node, in host byte order.
    pub fn guid(&self) -> u64 {
        // SAFETY: the device lives as long as `self.list`.
        unsafe { sys::device_guid(self.raw) }
    }

    /// Which protocol family the device speaks.
    pub fn transport(&self) -> Transport {
        // SAFETY: the device lives as long as `self.list`; the field is written at creation only.
        Transport::from_raw(unsafe { (*self.raw.as_ptr()).transport_type })
    }

    /// Opens the device (`ibv_open_device`).
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os): no permission on `/dev/infiniband/uverbs*`, or the device is gone.
    #[doc(alias = "ibv_open_device")]
    pub fn open(&self) -> Result<Context> {
        sys::watch_forks();
        // SAFETY: the device lives as long as `self.list`.
        let raw = unsafe { sys::open_device(self.raw) }.map_err(|errno| OsError::new("ibv_open_device", errno))?;
        Ok(Context { inner: Arc::new(ContextInner::new(raw, true, self.list.clone())) })
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.name())
            .field("guid", &format_args!("{:016x}", self.guid()))
            .field("transport", &self.transport())
            .finish_non_exhaustive()
    }
}

/// The array of `ibv_get_device_list`.
struct DeviceList {
    raw: NonNull<*mut sys::ibv_device>,
}

// SAFETY: the array is constant until it is freed by the last owner.
unsafe impl Send for DeviceList {}
// SAFETY: as above.
unsafe impl Sync for DeviceList {}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: made by `get_device_list`, freed once.
        unsafe { sys::free_device_list(self.raw) }
    }
}

/// An opened device. Clones share it; what is made on it keeps it alive.
#[derive(Clone)]
pub struct Context {
    inner: Arc<ContextInner>,
}

/// What is asked of a device once.
struct Constants {
    attributes: DeviceAttributes,
    max_message: usize,
}

struct ContextInner {
    raw: NonNull<sys::ibv_context>,
    /// Whether closing it is our business.
    opened_here: bool,
    /// What does not change while the device lives: each connection asks for it.
    constants: OnceLock<Constants>,
    /// Dropped last, after the context was closed: what the pointer depends on.
    keep: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: verbs on one context may be called from any number of threads (`ibv_open_device(3)`), and the
// fields read here are constant.
unsafe impl Send for ContextInner {}
// SAFETY: as above.
unsafe impl Sync for ContextInner {}

impl ContextInner {
    fn new(raw: NonNull<sys::ibv_context>, opened_here: bool, keep: Arc<dyn Any + Send + Sync>) -> ContextInner {
        ContextInner { raw, opened_here, constants: OnceLock::new(), keep: Some(keep) }
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        if self.opened_here {
            // SAFETY: opened by us, closed once; whatever was made on it held a clone, so nothing is left.
            if let Err(errno) = unsafe { sys::close_device(self.raw) } {
                log::warn!("ibv_close_device: {errno}");
            }
        }
        drop(self.keep.take());
    }
}

impl Context {
    /// Wraps a context that someone else opened, such as one of librdmacm's. It is never closed from here.
    ///
    /// # Safety
    /// `raw` is an open context and stays open until `keep` is dropped, or for ever.
    ///
    /// # Panics
    /// When `raw` is null.
    pub unsafe fn from_raw(raw: *mut sys::ibv_context, keep: Arc<dyn Any + Send + Sync>) -> Context {
        let raw = NonNull::new(raw).expect("an open context is not null");
        sys::watch_forks();
        Context { inner: Arc::new(ContextInner::new(raw, false, keep)) }
    }

    /// The C object, alive as long as this handle or a clone.
    #[doc(hidden)]
    #[inline]
    pub fn as_raw(&self) -> *mut sys::ibv_context {
        self.inner.raw.as_ptr()
    }

    #[inline]
    pub(crate) fn raw(&self) -> NonNull<sys::ibv_context> {
        self.inner.raw
    }

    /// The name of the device's node in `/dev/infiniband`, such as `uverbs0`.
    pub fn node_name(&self) -> String {
        // SAFETY: the context is alive, and its device with it.
        unsafe { NonNull::new((*self.as_raw()).device).map_or_else(String::new, |device| sys::device_node(device)) }
    }

    /// The name of the device.
    pub fn name(&self) -> String {
        // SAFETY: the context is alive, and its device with it.
        unsafe {
            match NonNull::new((*self.as_raw()).device) {
                Some(device) => sys::device_name(device),
                None => String::new(),
            }
        }
    }

    /// Which protocol family the device speaks.
    pub fn transport(&self) -> Transport {
        // SAFETY: the context is alive, and its device with it.
        unsafe {
            match NonNull::new((*self.as_raw()).device) {
                Some(device) => Transport::from_raw((*device.as_ptr()).transport_type),
                None => Transport::Other(-1),
            }
        }
    }

    /// The limits and abilities of the device, asked for once (`ibv_query_device`).
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os), for instance when the device is gone.
    #[doc(alias = "ibv_query_device")]
    pub fn attributes(&self) -> Result<DeviceAttributes> {
        Ok(self.constants()?.attributes.clone())
    }

    /// The largest message that all ports of the device carry, in bytes.
    pub(crate) fn max_message(&self) -> Result<usize> {
        Ok(self.constants()?.max_message)
    }

    fn constants(&self) -> Result<&Constants> {
        if let Some(constants) = self.inner.constants.get() {
            return Ok(constants);
        }
        // SAFETY: the context is alive.
        let raw = unsafe { sys::query_device(self.raw()) }.map_err(|errno| OsError::new("ibv_query_device", errno))?;
        let attributes = DeviceAttributes::from_raw(&raw);
        let mut max_message = usize::MAX;
        for port in 1..=attributes.ports {
            // Ports that are not there report none.
            match self.port(port)?.max_message {
                0 => {}
                bytes => max_message = max_message.min(bytes),
            }
        }
        if max_message == usize::MAX {
            max_message = 1 << 30;
        }
        Ok(self.inner.constants.get_or_init(|| Constants { attributes, max_message }))
    }

    /// The state of a port, counted from 1 (`ibv_query_port`).
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os): `EINVAL` for a port that the device does not have.
    #[doc(alias = "ibv_query_port")]
    pub fn port(&self, number: u8) -> Result<PortAttributes> {
        // SAFETY: the context is alive.
        let raw =
            unsafe { sys::query_port(self.raw(), number) }.map_err(|errno| OsError::new("ibv_query_port", errno))?;
        Ok(PortAttributes::from_raw(number, &raw))
    }

    /// The valid entries of all ports' GID tables (`ibv_query_gid_table`).
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os), for instance when the device is gone.
    #[doc(alias = "ibv_query_gid_table")]
    pub fn gid_table(&self) -> Result<Vec<GidEntry>> {
        let mut max = 0;
        for port in 1..=self.attributes()?.ports {
            max += self.port(port)?.gid_table_len;
        }
        // SAFETY: the context is alive.
        let raw = unsafe { sys::query_gid_table(self.raw(), max) }
            .map_err(|errno| OsError::new("ibv_query_gid_table", errno))?;
        Ok(raw.iter().map(GidEntry::from_raw).collect())
    }

    /// Whether both are the same opened device (not only the same hardware).
    pub fn same_as(&self, other: &Context) -> bool {
        self.inner.raw == other.inner.raw
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("device", &self.name()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_devices_has_an_empty_list() {
        // Anything but an error; a machine with devices lists them.
        let list = devices().expect("listing works with and without devices");
        for device in &list {
            assert!(!device.name().is_empty());
        }
    }
}
