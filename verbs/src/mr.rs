//! Memory regions: owned, registered pages that devices and peers may reach.

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, OsError, Result};
use crate::pages::{self, Pages};
use crate::pd::ProtectionDomain;
use crate::remote::RemoteRegion;
use crate::sys;

bitflags::bitflags! {
    /// What may be done with a region, beside the device reading it for sends, which is always allowed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Access: u32 {
        /// The device may write it: receives, results of RDMA reads and atomics.
        const LOCAL_WRITE = 1;
        /// The peer may write it. Needs [`Access::LOCAL_WRITE`].
        const REMOTE_WRITE = 2;
        /// The peer may read it.
        const REMOTE_READ = 4;
        /// The peer may do atomics on it. Needs [`Access::LOCAL_WRITE`].
        const REMOTE_ATOMIC = 8;
        /// Memory windows may be bound to it.
        const MW_BIND = 16;
        /// The device may reorder its accesses; it ignores this if it cannot.
        const RELAXED_ORDERING = 1 << 20;
    }
}

impl Access {
    /// Everything that a peer can be allowed: local write, remote read, write and atomics.
    pub const REMOTE_ALL: Access =
        Access::LOCAL_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_WRITE).union(Access::REMOTE_ATOMIC);

    /// Checks verbs' rules, which the kernel reports only as `EINVAL`.
    ///
    /// # Errors
    /// [`Error::Misuse`] that names the rule.
    pub fn check(self) -> Result<()> {
        if self.contains(Access::LOCAL_WRITE) {
            Ok(())
        } else if self.contains(Access::REMOTE_WRITE) {
            Err(Error::misuse("a region with remote write access must have local write access too"))
        } else if self.contains(Access::REMOTE_ATOMIC) {
            Err(Error::misuse("a region with remote atomic access must have local write access too"))
        } else {
            Ok(())
        }
    }
}

/// Registered pages: the C region and the memory under it.
///
/// The pages are unmapped only when deregistration succeeded. If it fails, the device may still reach them,
/// so they are leaked.
pub(crate) struct Registered {
    raw: NonNull<sys::ibv_mr>,
    /// `None` only while being dropped.
    pages: Option<Pages>,
    addr: NonNull<u8>,
    len: usize,
    lkey: u32,
    rkey: u32,
    /// That of `pd`, at hand for the data path.
    domain: NonNull<sys::ibv_pd>,
    // Last: a domain must outlive what is registered in it.
    pd: ProtectionDomain,
}

// SAFETY: the C object may be used from any thread; the pages are accessed by the owners under the rules
// written there, and nothing here gives out references to them.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    /// Maps and registers `len` zeroed bytes.
    pub(crate) fn new(pd: &ProtectionDomain, len: NonZeroUsize, access: Access) -> Result<Registered> {
        let pages = Pages::new(len)?;
        let addr = pages.addr();
        // SAFETY: the domain is alive; the pages stay mapped until the region is deregistered (see `Drop`).
        let raw = unsafe { sys::reg_mr(pd.raw(), addr, len.get(), access.bits()) }
            .map_err(|errno| OsError::pinning("ibv_reg_mr", errno, len.get()))?;
        // SAFETY: a live region; both keys are constant.
        let (lkey, rkey) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        let domain = pd.raw();
        Ok(Registered { raw, pages: Some(pages), addr, len: len.get(), lkey, rkey, domain, pd: pd.clone() })
    }

    #[inline]
    pub(crate) fn addr(&self) -> NonNull<u8> {
        self.addr
    }

    /// The domain, to be compared only.
    #[inline]
    pub(crate) fn domain(&self) -> NonNull<sys::ibv_pd> {
        self.domain
    }

    #[inline]
    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(crate) fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Deregisters and gives the bytes back.
    fn into_bytes(mut self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        let pages = self.pages.take().expect("pages are there until the region is dropped");
        // SAFETY: the last owner deregisters once; afterwards (or if it fails) nothing uses `raw`.
        let deregistered = unsafe { sys::dereg_mr(self.raw) };
        // SAFETY: the pages are mapped for `len` bytes; the copy tolerates a device that still writes,
        // which can only be if deregistration failed.
        unsafe { pages::copy_out(self.addr, bytes.as_mut_ptr(), self.len) };
        Self::release(deregistered, pages);
        bytes
    }

    fn release(deregistered: sys::Result<()>, pages: Pages) {
        if let Err(errno) = deregistered {
            log::warn!("ibv_dereg_mr: {errno}; its pages are leaked, since the device may still use them");
            pages.leak();
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(pages) = self.pages.take() {
            // SAFETY: registered by us, deregistered once (`into_bytes` takes the pages first).
            Self::release(unsafe { sys::dereg_mr(self.raw) }, pages);
        }
    }
}

/// A registered region of memory that peers may reach as far as its [`Access`] allows.
///
/// Clones share it, also between threads and connections of the same [`ProtectionDomain`]. An operation in
/// flight holds a clone, so the memory outlives it, whatever the program drops. The pages are owned, zeroed at
/// first, and page-aligned; they are unmapped only after deregistration.
///
/// The contents may change at any time, by a peer, the device or another thread. There is therefore no way to
/// borrow them: [`read_at`](Self::read_at) and [`write_at`](Self::write_at) copy,
/// [`load_u64`](Self::load_u64) and [`store_u64`](Self::store_u64) access whole words. A copy that races
/// with a writer may see some of its bytes and not others.
#[derive(Clone)]
pub struct MemoryRegion {
    inner: Arc<MrInner>,
}

struct MrInner {
    registered: Registered,
    access: Access,
}

impl MemoryRegion {
    /// Maps `len` zeroed bytes and registers them (`ibv_reg_mr`).
    ///
    /// # Errors
    /// * [`Error::Misuse`] for a length of 0, or a combination of rights that verbs does not allow.
    /// * [`Error::Os`]: `ENOMEM` usually means that RLIMIT_MEMLOCK is too low; the text gives its value.
    #[doc(alias = "ibv_reg_mr")]
    pub fn new(pd: &ProtectionDomain, len: usize, access: Access) -> Result<MemoryRegion> {
        access.check()?;
        let len = NonZeroUsize::new(len).ok_or(Error::misuse("a memory region must have at least one byte"))?;
        if len.get() > isize::MAX as usize {
            return Err(Error::misuse("a memory region cannot be larger than half of the address space"));
        }
        let registered = Registered::new(pd, len, access)?;
        Ok(MemoryRegion { inner: Arc::new(MrInner { registered, access }) })
    }

    /// Its length in bytes.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.inner.registered.len
    }

    /// The rights it was registered with.
    #[inline]
    pub fn access(&self) -> Access {
        self.inner.access
    }

    /// The key by which the local device names it.
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.inner.registered.lkey
    }

    /// The key by which a peer names it.
    #[inline]
    pub fn rkey(&self) -> u32 {
        self.inner.registered.rkey
    }

    /// The domain it belongs to.
    #[inline]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        self.inner.registered.pd()
    }

    /// What a peer needs to reach all of it.
    pub fn remote(&self) -> RemoteRegion {
        RemoteRegion::new(self.addr(0), self.len() as u64, self.rkey())
    }

    /// What a peer needs to reach a part of it. The rights are those of the whole region: the device does
    /// not enforce the bounds of the part.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the range does not lie in the region.
    pub fn remote_range(&self, range: Range<usize>) -> Result<RemoteRegion> {
        let range = self.check_range(range)?;
        Ok(RemoteRegion::new(self.addr(range.start), range.len() as u64, self.rkey()))
    }

    /// Copies bytes from `offset` on out of the region.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the range does not lie in the region.
    pub fn read_at(&self, offset: usize, buf: &mut [u8]) -> Result<()> {
        let at = self.at(offset, buf.len())?;
        // SAFETY: in range; the region's memory is accessed through `pages` only; `buf` is exclusive.
        unsafe { pages::copy_out(at, buf.as_mut_ptr(), buf.len()) };
        Ok(())
    }

    /// Copies bytes into the region, from `offset` on.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the range does not lie in the region.
    pub fn write_at(&self, offset: usize, data: &[u8]) -> Result<()> {
        let at = self.at(offset, data.len())?;
        // SAFETY: in range; the region's memory is accessed through `pages` only; `data` is borrowed.
        unsafe { pages::copy_in(at, data.as_ptr(), data.len()) };
        Ok(())
    }

    /// Sets all bytes of a range.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the range does not lie in the region.
    pub fn fill(&self, range: Range<usize>, byte: u8) -> Result<()> {
        let range = self.check_range(range)?;
        let at = self.at(range.start, range.len())?;
        // SAFETY: in range; the region's memory is accessed through `pages` only.
        unsafe { pages::fill(at, byte, range.len()) };
        Ok(())
    }

    /// Reads eight bytes in one access, in host byte order, and before everything that follows.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the offset is no multiple of 8 or too large.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> Result<u64> {
        let at = self.word(offset)?;
        // SAFETY: in range and aligned; accessed through `pages` only.
        Ok(unsafe { pages::load_u64(at) })
    }

    /// Writes eight bytes in one access, in host byte order, and after everything that went before.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the offset is no multiple of 8 or too large.
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<()> {
        let at = self.word(offset)?;
        // SAFETY: in range and aligned; accessed through `pages` only.
        unsafe { pages::store_u64(at, value) };
        Ok(())
    }

    /// Deregisters the region and gives its contents back, if this is the last handle; operations in flight
    /// hold handles too. Afterwards peers that try to reach it are refused.
    ///
    /// # Errors
    /// The region itself, when there are other handles.
    pub fn into_bytes(self) -> Result<Vec<u8>, MemoryRegion> {
        match Arc::try_unwrap(self.inner) {
            Ok(inner) => Ok(inner.registered.into_bytes()),
            Err(inner) => Err(MemoryRegion { inner }),
        }
    }

    /// The domain, to be compared only.
    #[inline]
    pub(crate) fn domain(&self) -> NonNull<sys::ibv_pd> {
        self.inner.registered.domain()
    }

    /// The address of an offset, as devices see it.
    #[inline]
    pub(crate) fn addr(&self, offset: usize) -> u64 {
        self.inner.registered.addr.as_ptr().addr() as u64 + offset as u64
    }

    #[inline]
    pub(crate) fn check_range(&self, range: Range<usize>) -> Result<Range<usize>> {
        if range.start <= range.end && range.end <= self.len() { Ok(range) } else { Err(outside(range, self.len())) }
    }

    #[inline]
    fn at(&self, offset: usize, len: usize) -> Result<NonNull<u8>> {
        self.check_range(offset..offset.saturating_add(len))?;
        // SAFETY: `offset` is at most the length of the mapping.
        Ok(unsafe { self.inner.registered.addr.add(offset) })
    }

    #[inline]
    fn word(&self, offset: usize) -> Result<NonNull<u8>> {
        if !offset.is_multiple_of(8) {
            return Err(Error::misuse("a 64-bit word must lie at an offset that is a multiple of 8"));
        }
        self.at(offset, 8)
    }
}

#[cold]
fn outside(range: Range<usize>, len: usize) -> Error {
    let (start, end) = (range.start, range.end);
    Error::misuse(format!("the range {start}..{end} does not lie in the memory region of {len} bytes"))
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryRegion")
            .field("remote", &self.remote())
            .field("access", &self.access())
            .finish_non_exhaustive()
    }
}

const _: () = {
    const fn assert_send_sync<T: Send + Sync>() {}
    assert_send_sync::<MemoryRegion>();
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_follow_the_rules_of_verbs() {
        assert!(Access::empty().check().is_ok());
        assert!(Access::REMOTE_READ.check().is_ok());
        assert!(Access::REMOTE_ALL.check().is_ok());
        let e = Access::REMOTE_WRITE.check().expect_err("needs local write");
        assert!(e.to_string().contains("local write"), "{e}");
        let e = (Access::REMOTE_ATOMIC | Access::REMOTE_READ).check().expect_err("needs local write");
        assert!(e.to_string().contains("atomic"), "{e}");
    }

    #[test]
    fn the_flags_are_those_of_c() {
        use sys::ibv_access_flags as C;
        for (ours, theirs) in [
            (Access::LOCAL_WRITE, C::IBV_ACCESS_LOCAL_WRITE),
            (Access::REMOTE_WRITE, C::IBV_ACCESS_REMOTE_WRITE),
            (Access::REMOTE_READ, C::IBV_ACCESS_REMOTE_READ),
            (Access::REMOTE_ATOMIC, C::IBV_ACCESS_REMOTE_ATOMIC),
            (Access::MW_BIND, C::IBV_ACCESS_MW_BIND),
            (Access::RELAXED_ORDERING, C::IBV_ACCESS_RELAXED_ORDERING),
        ] {
            assert_eq!(ours.bits(), theirs.0);
        }
    }
}
