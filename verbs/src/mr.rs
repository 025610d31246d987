//! Memory regions: registered memory that devices and peers may reach.

mod builder;

use std::fmt;
use std::mem::ManuallyDrop;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
use nix::errno::Errno;

use crate::error::{Error, OsError, Result};
use crate::pages::{self, Pages};
use crate::pd::ProtectionDomain;
use crate::remote::RemoteRegion;
use crate::sys;

pub use builder::RegionBuilder;

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
        /// The pages are not pinned but brought in when they are needed, by devices with on-demand paging.
        const ON_DEMAND = 64;
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

/// A registered region: the C object and the memory under it.
///
/// The memory is released only when deregistration succeeded. If it fails, the device may still reach it, so it is
/// leaked.
pub(crate) struct Registered {
    raw: NonNull<sys::ibv_mr>,
    /// `None` only while being dropped.
    backing: Option<Backing>,
    /// Where this process sees it; dangling for memory that it does not see.
    addr: NonNull<u8>,
    /// Where the device sees it.
    device_addr: u64,
    len: usize,
    lkey: u32,
    rkey: u32,
    /// That of `pd`, at hand for the data path.
    domain: NonNull<sys::ibv_pd>,
    // Last: a domain must outlive what is registered in it.
    pd: ProtectionDomain,
}

// SAFETY: the C object may be used from any thread; the memory is accessed by the owners under the rules
// written there, and nothing here gives out references to it.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

/// The memory under a region.
enum Backing {
    /// Mapped by us.
    Pages(#[expect(dead_code, reason = "held, not read")] Pages),
    /// A vector of the program's, taken apart: address, length and capacity.
    Vector(NonNull<u8>, usize, usize),
    /// Somebody else sees to it that it lives.
    Elsewhere,
}

impl Backing {
    fn vector(bytes: Vec<u8>) -> Backing {
        let mut bytes = ManuallyDrop::new(bytes);
        let (len, capacity) = (bytes.len(), bytes.capacity());
        Backing::Vector(NonNull::new(bytes.as_mut_ptr()).expect("a vector's pointer is never null"), len, capacity)
    }

    /// The vector, if it is one.
    fn into_vector(self) -> Option<Vec<u8>> {
        match self {
            // SAFETY: the parts of a vector, taken apart once in `vector` and put together once, here.
            Backing::Vector(at, len, capacity) => Some(unsafe { Vec::from_raw_parts(at.as_ptr(), len, capacity) }),
            Backing::Pages(_) | Backing::Elsewhere => None,
        }
    }
}

impl Registered {
    /// Maps and registers `len` zeroed bytes.
    pub(crate) fn new(pd: &ProtectionDomain, len: NonZeroUsize, access: Access) -> Result<Registered> {
        let pages = Pages::new(len)?;
        let addr = pages.addr();
        // SAFETY: the pages stay mapped until the region is deregistered.
        unsafe { Registered::register(pd, addr, len.get(), None, access, Backing::Pages(pages)) }.map_err(|(e, _)| e)
    }

    /// Registers memory that exists; on failure it comes back.
    ///
    /// # Safety
    /// There are `len` bytes at `addr`, and until `backing` is dropped they stay and are accessed by the rules of regions
    /// only.
    unsafe fn register(
        pd: &ProtectionDomain,
        addr: NonNull<u8>,
        len: usize,
        iova: Option<u64>,
        access: Access,
        backing: Backing,
    ) -> Result<Registered, (Error, Backing)> {
        // SAFETY: the domain is alive; the memory stays as the caller says (see `Drop`).
        let raw = unsafe {
            match iova {
                None => sys::reg_mr(pd.raw(), addr, len, access.bits()),
                Some(iova) => sys::reg_mr_iova(pd.raw(), addr, len, iova, access.bits()),
            }
        };
        let device_addr = iova.unwrap_or(addr.as_ptr().expose_provenance() as u64);
        match raw {
            Ok(raw) => Ok(Registered::adopt(pd, raw, addr, device_addr, len, backing)),
            Err(errno) => Err((refused("ibv_reg_mr", errno, len, access), backing)),
        }
    }

    fn adopt(
        pd: &ProtectionDomain,
        raw: NonNull<sys::ibv_mr>,
        addr: NonNull<u8>,
        device_addr: u64,
        len: usize,
        backing: Backing,
    ) -> Registered {
        // SAFETY: a live region; both keys are constant.
        let (lkey, rkey) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        let domain = pd.raw();
        Registered { raw, backing: Some(backing), addr, device_addr, len, lkey, rkey, domain, pd: pd.clone() }
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

    /// Deregisters and gives the bytes back: the vector that was given, or a copy.
    fn into_bytes(mut self, visible: bool) -> Vec<u8> {
        let backing = self.backing.take().expect("the backing is there until the region is dropped");
        // SAFETY: the last owner deregisters once; afterwards (or if it fails) nothing uses `raw`.
        let deregistered = unsafe { sys::dereg_mr(self.raw) };
        let copy = || {
            let mut bytes = vec![0; if visible { self.len } else { 0 }];
            // SAFETY: this process sees `len` bytes there, or none are copied; the copy tolerates a device that still
            // writes, which can only be if deregistration failed.
            unsafe { pages::copy_out(self.addr, bytes.as_mut_ptr(), bytes.len()) };
            bytes
        };
        match (deregistered, backing) {
            (Ok(()), backing @ Backing::Vector(..)) => backing.into_vector().expect("a vector"),
            (deregistered, backing) => {
                let bytes = copy();
                Self::release(deregistered, backing);
                bytes
            }
        }
    }

    fn release(deregistered: sys::Result<()>, backing: Backing) {
        if let Err(errno) = deregistered {
            log::warn!("ibv_dereg_mr: {errno}; its memory is leaked, since the device may still use it");
            std::mem::forget(backing);
        } else {
            // A vector is put together to be freed; pages unmap themselves.
            drop(backing.into_vector());
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(backing) = self.backing.take() {
            // SAFETY: registered by us, deregistered once (`into_bytes` takes the backing first).
            Self::release(unsafe { sys::dereg_mr(self.raw) }, backing);
        }
    }
}

/// Why a registration failed, as far as it is known.
fn refused(call: &'static str, errno: Errno, len: usize, access: Access) -> Error {
    if access.contains(Access::ON_DEMAND) && matches!(errno, Errno::EOPNOTSUPP | Errno::EINVAL) {
        return Error::Unsupported("on-demand paging: the device has it not");
    }
    OsError::pinning(call, errno, len).into()
}

/// A registered region of memory that peers may reach as far as its [`Access`] allows.
///
/// Clones share it, also between threads and connections of the same [`ProtectionDomain`]. An operation in
/// flight holds a clone, so the memory outlives it, whatever the program drops. The pages are owned, zeroed at
/// first, and page-aligned; they are unmapped only after deregistration. [`builder`](Self::builder) has other kinds of
/// memory.
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
    /// What this process may do with the memory.
    view: View,
    /// How long a write may be that takes its data from where this process sees it: 0 or anything.
    inline_cap: usize,
}

/// What this process may do with the memory under a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum View {
    /// It does not see it.
    None,
    Read,
    ReadWrite,
}

impl MemoryRegion {
    /// Maps `len` zeroed bytes and registers them (`ibv_reg_mr`).
    ///
    /// # Errors
    /// * [`Error::Misuse`] for a length of 0, or a combination of rights that verbs does not allow.
    /// * [`Error::Os`]: `ENOMEM` usually means that RLIMIT_MEMLOCK is too low; the text gives its value.
    #[doc(alias = "ibv_reg_mr")]
    pub fn new(pd: &ProtectionDomain, len: usize, access: Access) -> Result<MemoryRegion> {
        RegionBuilder::new(pd, access).zeroed(len)
    }

    fn of(registered: Registered, access: Access, view: View) -> MemoryRegion {
        let seen = view != View::None && registered.device_addr == registered.addr.as_ptr().addr() as u64;
        let inline_cap = if seen { usize::MAX } else { 0 };
        MemoryRegion { inner: Arc::new(MrInner { registered, access, view, inline_cap }) }
    }

    /// Begins a region of another kind of memory: huge pages, a vector of the program's, a file, a constant.
    pub fn builder(pd: &ProtectionDomain, access: Access) -> RegionBuilder {
        RegionBuilder::new(pd, access)
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
        let at = self.at(offset, buf.len(), View::Read)?;
        // SAFETY: in range; the region's memory is accessed through `pages` only; `buf` is exclusive.
        unsafe { pages::copy_out(at, buf.as_mut_ptr(), buf.len()) };
        Ok(())
    }

    /// Copies bytes into the region, from `offset` on.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the range does not lie in the region.
    pub fn write_at(&self, offset: usize, data: &[u8]) -> Result<()> {
        let at = self.at(offset, data.len(), View::ReadWrite)?;
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
        let at = self.at(range.start, range.len(), View::ReadWrite)?;
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
        let at = self.word(offset, View::Read)?;
        // SAFETY: in range and aligned; accessed through `pages` only.
        Ok(unsafe { pages::load_u64(at) })
    }

    /// Writes eight bytes in one access, in host byte order, and after everything that went before.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the offset is no multiple of 8 or too large.
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<()> {
        let at = self.word(offset, View::ReadWrite)?;
        // SAFETY: in range and aligned; accessed through `pages` only.
        unsafe { pages::store_u64(at, value) };
        Ok(())
    }

    /// Copies a value of plain data out of the region, from any offset.
    ///
    /// # Errors
    /// [`Error::Misuse`] when it does not lie in the region.
    pub fn read_value<T: AnyBitPattern + NoUninit>(&self, offset: usize) -> Result<T> {
        let mut value = T::zeroed();
        self.read_at(offset, bytemuck::bytes_of_mut(&mut value))?;
        Ok(value)
    }

    /// Copies a value of plain data into the region, to any offset.
    ///
    /// # Errors
    /// Those of [`write_at`](Self::write_at).
    pub fn write_value<T: NoUninit>(&self, offset: usize, value: &T) -> Result<()> {
        self.write_at(offset, bytemuck::bytes_of(value))
    }

    /// Deregisters the region and gives its contents back, if this is the last handle; operations in flight
    /// hold handles too. Afterwards peers that try to reach it are refused. Memory that was given as a vector
    /// ([`RegionBuilder::own`]) comes back itself, other memory as a copy; what this process does not see, as nothing.
    ///
    /// # Errors
    /// The region itself, when there are other handles.
    pub fn into_bytes(self) -> Result<Vec<u8>, MemoryRegion> {
        match Arc::try_unwrap(self.inner) {
            Ok(inner) => Ok(inner.registered.into_bytes(inner.view != View::None)),
            Err(inner) => Err(MemoryRegion { inner }),
        }
    }

    /// The domain, to be compared only.
    #[inline]
    pub(crate) fn domain(&self) -> NonNull<sys::ibv_pd> {
        self.inner.registered.domain()
    }

    /// The C object, alive as long as a handle.
    pub(crate) fn as_raw(&self) -> *mut sys::ibv_mr {
        self.inner.registered.raw.as_ptr()
    }

    /// The address of an offset, as devices see it.
    #[inline]
    pub(crate) fn addr(&self, offset: usize) -> u64 {
        self.inner.registered.device_addr + offset as u64
    }

    /// How long a write may be that takes its data from where this process sees it: 0 or anything.
    #[inline]
    pub(crate) fn inline_cap(&self) -> usize {
        self.inner.inline_cap
    }

    #[inline]
    pub(crate) fn check_range(&self, range: Range<usize>) -> Result<Range<usize>> {
        if range.start <= range.end && range.end <= self.len() { Ok(range) } else { Err(outside(range, self.len())) }
    }

    #[inline]
    fn at(&self, offset: usize, len: usize, view: View) -> Result<NonNull<u8>> {
        self.check_range(offset..offset.saturating_add(len))?;
        if self.inner.view != View::ReadWrite && (view == View::ReadWrite || self.inner.view == View::None) {
            return Err(unseen(self.inner.view));
        }
        // SAFETY: `offset` is at most the length of the mapping.
        Ok(unsafe { self.inner.registered.addr.add(offset) })
    }

    #[inline]
    fn word(&self, offset: usize, view: View) -> Result<NonNull<u8>> {
        if !offset.is_multiple_of(8) {
            return Err(Error::misuse("a 64-bit word must lie at an offset that is a multiple of 8"));
        }
        self.at(offset, 8, view)
    }
}

#[cold]
fn unseen(view: View) -> Error {
    Error::misuse(match view {
        View::None => "this process does not see the memory of this region: only devices reach it",
        _ => "the memory of this region is read-only",
    })
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
            (Access::ON_DEMAND, C::IBV_ACCESS_ON_DEMAND),
            (Access::RELAXED_ORDERING, C::IBV_ACCESS_RELAXED_ORDERING),
        ] {
            assert_eq!(ours.bits(), theirs.0);
        }
    }
}
