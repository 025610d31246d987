//! Memory windows: grants of a part of a region to one connection's peer, which can be taken back.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, OsError, Result};
use crate::mr::{Access, MemoryRegion};
use crate::remote::RemoteRegion;
use crate::sys;

/// A grant: the peer of one connection may access a range of a region as far as the rights say, until the window is
/// [revoked](crate::SendHalf::revoke), or dropped, or the peer gives it back ([`send_invalidate`]). Unlike with a region's
/// own key, the device enforces the bounds, and only for this connection. (Soft-RoCE enforces the bounds of the region
/// instead of those of the window.)
///
/// From [`SendHalf::grant`](crate::SendHalf::grant). It keeps the region.
///
/// [`send_invalidate`]: crate::SendHalf::send_invalidate
pub struct MemoryWindow {
    pub(crate) inner: Arc<Window>,
    remote: RemoteRegion,
}

/// The C object.
#[derive(Debug)]
pub(crate) struct Window {
    raw: NonNull<sys::ibv_mw>,
    // After the window, which `Drop` deallocates: a region with a window on it cannot be deregistered.
    region: MemoryRegion,
}

// SAFETY: the C object may be used from any thread; its fields are constant for us.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    /// Allocates a window (`ibv_alloc_mw`, type 2) for a region. Nobody can reach anything by it yet.
    pub(crate) fn new(region: &MemoryRegion) -> Result<Arc<Window>> {
        let pd = region.protection_domain();
        if pd.context().attributes()?.cap_flags & sys::DEVICE_MEM_WINDOW_TYPE_2 == 0 {
            return Err(Error::Unsupported("memory windows of type 2: the device has them not"));
        }
        if !region.access().contains(Access::MW_BIND) {
            return Err(Error::misuse("windows can only be bound to a region with the right MW_BIND"));
        }
        // SAFETY: the domain is alive.
        let raw = unsafe { sys::alloc_mw(pd.raw()) }.map_err(|errno| OsError::new("ibv_alloc_mw", errno))?;
        Ok(Arc::new(Window { raw, region: region.clone() }))
    }

    pub(crate) fn raw(&self) -> NonNull<sys::ibv_mw> {
        self.raw
    }

    pub(crate) fn region(&self) -> &MemoryRegion {
        &self.region
    }

    /// The key that the first binding gives: the one it was made with, with the next number in its lowest byte.
    pub(crate) fn next_key(&self) -> u32 {
        // SAFETY: alive; the field is constant, since nothing here changes it.
        let key = unsafe { (*self.raw.as_ptr()).rkey };
        (key & !0xff) | (key.wrapping_add(1) & 0xff)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: made by us, deallocated once, and no operation that names it is in flight: those hold it.
        if let Err(errno) = unsafe { sys::dealloc_mw(self.raw) } {
            log::warn!("ibv_dealloc_mw: {errno}; its region is leaked, since peers may still reach it");
            std::mem::forget(self.region.clone());
        }
    }
}

impl MemoryWindow {
    pub(crate) fn new(inner: Arc<Window>, remote: RemoteRegion) -> MemoryWindow {
        MemoryWindow { inner, remote }
    }

    /// What the peer needs to reach the range.
    pub fn remote(&self) -> RemoteRegion {
        self.remote
    }

    /// The region that it is a window on.
    pub fn region(&self) -> &MemoryRegion {
        self.inner.region()
    }
}

impl fmt::Debug for MemoryWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryWindow").field("remote", &self.remote).finish_non_exhaustive()
    }
}

const _: () = {
    const fn assert_send_sync<T: Send + Sync>() {}
    assert_send_sync::<MemoryWindow>();
};
