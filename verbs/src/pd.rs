//! Protection domains: what may be used together.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::device::Context;
use crate::error::{OsError, Result};
use crate::sys;

/// A protection domain. Memory regions, windows and queue pairs work together only within one.
///
/// Clones share it. Whatever is made in it keeps it alive, so it is deallocated last.
#[derive(Clone)]
pub struct ProtectionDomain {
    inner: Arc<PdInner>,
}

struct PdInner {
    raw: NonNull<sys::ibv_pd>,
    // After the domain, which `Drop` deallocates.
    context: Context,
}

// SAFETY: verbs may be called on one domain from any thread, and its structure is constant.
unsafe impl Send for PdInner {}
// SAFETY: as above.
unsafe impl Sync for PdInner {}

impl Drop for PdInner {
    fn drop(&mut self) {
        // SAFETY: allocated by us, deallocated once; its users held a clone and are gone. Should one of
        // them have been leaked, the call fails with `EBUSY` and nothing is freed.
        if let Err(errno) = unsafe { sys::dealloc_pd(self.raw) } {
            log::warn!("ibv_dealloc_pd: {errno}");
        }
    }
}

impl ProtectionDomain {
    /// Allocates a domain on the device (`ibv_alloc_pd`).
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os), for instance when the device has no more of them.
    #[doc(alias = "ibv_alloc_pd")]
    pub fn new(context: &Context) -> Result<ProtectionDomain> {
        // SAFETY: the context is alive.
        let raw = unsafe { sys::alloc_pd(context.raw()) }.map_err(|errno| OsError::new("ibv_alloc_pd", errno))?;
        Ok(ProtectionDomain { inner: Arc::new(PdInner { raw, context: context.clone() }) })
    }

    /// The device it is on.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The C object, alive as long as this handle or a clone.
    #[doc(hidden)]
    pub fn as_raw(&self) -> *mut sys::ibv_pd {
        self.inner.raw.as_ptr()
    }

    pub(crate) fn raw(&self) -> NonNull<sys::ibv_pd> {
        self.inner.raw
    }

    /// Whether both handles are the same domain.
    #[inline]
    pub fn same_as(&self, other: &ProtectionDomain) -> bool {
        self.inner.raw == other.inner.raw
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProtectionDomain").field("context", self.context()).finish_non_exhaustive()
    }
}
