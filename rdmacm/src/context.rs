//! The device contexts of librdmacm: it opens each device once, and ids only work with objects of that context.

use std::ptr::NonNull;
use std::sync::Arc;

use verbs::Context;

use crate::sys::{self, CallError};

/// A device context that librdmacm opened and keeps open for the life of the process (`cma.c`, `ucma_init_device`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LibraryContext(NonNull<sys::ibv_context>);

// SAFETY: a verbs context may be used from any thread.
unsafe impl Send for LibraryContext {}
// SAFETY: as above.
unsafe impl Sync for LibraryContext {}

impl LibraryContext {
    /// `None` for a null pointer: the id is not bound to a device.
    ///
    /// # Safety
    /// `raw` is null or a context of librdmacm's own.
    pub(crate) unsafe fn new(raw: *mut sys::ibv_context) -> Option<Self> {
        NonNull::new(raw).map(Self)
    }

    /// All of them, in librdmacm's order.
    pub(crate) fn all() -> Result<Vec<Self>, CallError> {
        Ok(sys::devices()?.into_iter().filter_map(|raw| NonNull::new(raw).map(Self)).collect())
    }

    /// As the data path wants it.
    pub(crate) fn context(self) -> Context {
        // SAFETY: librdmacm's own context, which it never closes; so nothing needs to be kept for it.
        unsafe { Context::from_raw(self.0.as_ptr(), Arc::new(())) }
    }

    /// Whether `context` is the same one.
    pub(crate) fn is(self, context: &Context) -> bool {
        std::ptr::eq(self.0.as_ptr(), context.as_raw())
    }
}
