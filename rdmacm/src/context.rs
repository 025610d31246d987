//! The device contexts of librdmacm: it opens each device once, and ids only work with objects of that context.

use std::ptr::NonNull;
use std::sync::Arc;

use nix::errno::Errno;
use verbs::Context;

use crate::sys::{self, CallError};

/// Names a device context of librdmacm. It says nothing about whether the context is still open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ContextAddress(usize);

impl ContextAddress {
    pub(crate) fn of(raw: *mut sys::ibv_context) -> Self {
        Self(raw.addr())
    }

    /// Whether `context` is the one that is named.
    pub(crate) fn names(self, context: &Context) -> bool {
        self == Self::of(context.as_raw())
    }
}

/// A reference on a device of librdmacm, which keeps its context open. Without one, librdmacm closes the context of a
/// device that has vanished as soon as no id uses it, whatever else was made on it (`cma.c`, `remove_cma_dev`).
#[derive(Debug)]
pub(crate) struct DeviceReference {
    raw: NonNull<sys::ibv_context>,
}

// SAFETY: a verbs context may be used from any thread, and librdmacm counts its references under a lock.
unsafe impl Send for DeviceReference {}
// SAFETY: as above.
unsafe impl Sync for DeviceReference {}

impl DeviceReference {
    /// A reference on each device that there is now, in librdmacm's order.
    pub(crate) fn all() -> Result<Vec<Self>, CallError> {
        Ok(sys::device_references()?.into_iter().map(|raw| Self { raw }).collect())
    }

    /// A reference on the device with this context.
    pub(crate) fn of(address: ContextAddress) -> Result<Self, CallError> {
        let found = Self::all()?.into_iter().find(|device| device.address() == address);
        found.ok_or(CallError { call: "rdma_get_devices", errno: Errno::ENODEV })
    }

    pub(crate) fn address(&self) -> ContextAddress {
        ContextAddress::of(self.raw.as_ptr())
    }

    /// The context as the data path wants it, which keeps the reference.
    pub(crate) fn into_context(self) -> Context {
        let raw = self.raw.as_ptr();
        // SAFETY: an open context of librdmacm's, which stays open until the reference, given along, is dropped.
        unsafe { Context::from_raw(raw, Arc::new(self)) }
    }
}

impl Drop for DeviceReference {
    fn drop(&mut self) {
        // SAFETY: this value is one reference of `device_references`, released once.
        unsafe { sys::release_device(self.raw) }
    }
}
