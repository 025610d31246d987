//! Registered buffers to fill in place and send without a copy.

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::freelist::FreeList;
use crate::mr::{Access, Registered};
use crate::pd::ProtectionDomain;
use crate::sys;

/// Slots begin on cache lines, so that neighbours do not slow each other down.
const ALIGN: usize = 64;

/// `count` slots of equal size in registered pages. The rights are local only: no peer can reach them.
pub(crate) struct Arena {
    memory: Registered,
    stride: usize,
    size: usize,
    count: u32,
}

impl Arena {
    pub(crate) fn new(pd: &ProtectionDomain, count: u32, size: usize) -> Result<Arena> {
        let too_large = || Error::misuse(format!("{count} buffers of {size} bytes are more than memory can hold"));
        let stride = size.max(1).checked_next_multiple_of(ALIGN).ok_or_else(too_large)?;
        let total = stride.checked_mul(count as usize).filter(|&t| t <= isize::MAX as usize).ok_or_else(too_large)?;
        let total = NonZeroUsize::new(total).ok_or(Error::misuse("a pool must have at least one buffer"))?;
        Ok(Arena { memory: Registered::new(pd, total, Access::LOCAL_WRITE)?, stride, size, count })
    }

    /// The first byte of a slot.
    #[inline]
    pub(crate) fn slot(&self, slot: u32) -> NonNull<u8> {
        debug_assert!(slot < self.count, "slot {slot} of {}", self.count);
        // SAFETY: `slot` is below `count` (its givers check it), so the sum lies in the mapping.
        unsafe { self.memory.addr().add(slot as usize * self.stride) }
    }

    /// Bytes in a slot.
    #[inline]
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    #[inline]
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    #[inline]
    pub(crate) fn lkey(&self) -> u32 {
        self.memory.lkey()
    }

    pub(crate) fn pd(&self) -> &ProtectionDomain {
        self.memory.pd()
    }
}

/// A pool of registered buffers of one size. Clones share it.
#[derive(Clone)]
pub struct BufferPool {
    inner: Arc<PoolInner>,
}

struct PoolInner {
    free: FreeList,
    arena: Arena,
}

impl BufferPool {
    /// Maps and registers `count` buffers of `size` bytes.
    ///
    /// # Errors
    /// * [`Error::Misuse`] when `count` is 0, or more than memory can hold.
    /// * [`Error::Os`]: `ENOMEM` usually means that RLIMIT_MEMLOCK is too low; the text gives its value.
    pub fn new(pd: &ProtectionDomain, count: u32, size: usize) -> Result<BufferPool> {
        if count == u32::MAX {
            return Err(Error::misuse("a pool can have at most 2^32 - 2 buffers"));
        }
        let arena = Arena::new(pd, count, size)?;
        Ok(BufferPool { inner: Arc::new(PoolInner { free: FreeList::new(count), arena }) })
    }

    /// Takes a buffer, of length 0 at first; `None` when all are in use.
    #[inline]
    pub fn alloc(&self) -> Option<SendBuf> {
        let slot = self.inner.free.take()?;
        Some(SendBuf { slot, len: 0, pool: Some(self.inner.clone()) })
    }

    /// How many buffers there are, free or not.
    pub fn count(&self) -> usize {
        self.inner.arena.count() as usize
    }

    /// Bytes in each buffer.
    pub fn buffer_size(&self) -> usize {
        self.inner.arena.size()
    }

    /// The domain it belongs to.
    pub fn protection_domain(&self) -> &ProtectionDomain {
        self.inner.arena.pd()
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferPool")
            .field("count", &self.count())
            .field("buffer_size", &self.buffer_size())
            .finish_non_exhaustive()
    }
}

/// A registered buffer of a [`BufferPool`], the caller's alone until it is sent or dropped.
///
/// It derefs to its first `len` bytes; [`set_len`](Self::set_len) says how many are to be sent.
/// Its contents are what the previous user left there. While the device reads it, it belongs to the
/// endpoint; it returns to its pool with the completion.
pub struct SendBuf {
    slot: u32,
    len: usize,
    /// `None` only in an empty stand-in for a buffer that stays with the device; `len` is 0 then.
    pool: Option<Arc<PoolInner>>,
}

impl SendBuf {
    /// How many bytes it can hold.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.pool.as_ref().map_or(0, |pool| pool.arena.size())
    }

    /// Stands in for a buffer that cannot be given back.
    pub(crate) fn empty() -> SendBuf {
        SendBuf { slot: 0, len: 0, pool: None }
    }

    /// Sets how many bytes are sent.
    ///
    /// # Panics
    /// When `len` is larger than [`capacity`](Self::capacity).
    #[inline]
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "a length of {len} in a buffer of {}", self.capacity());
        self.len = len;
    }

    /// Replaces the contents by a copy of `data`.
    ///
    /// # Errors
    /// [`Error::TooLong`] when it does not fit.
    pub fn copy_from(&mut self, data: &[u8]) -> Result<()> {
        if data.len() > self.capacity() {
            return Err(Error::TooLong { len: data.len(), limit: self.capacity() });
        }
        self.len = data.len();
        self.copy_from_slice(data);
        Ok(())
    }

    #[inline]
    pub(crate) fn addr(&self) -> NonNull<u8> {
        self.pool.as_ref().map_or(NonNull::dangling(), |pool| pool.arena.slot(self.slot))
    }

    #[inline]
    pub(crate) fn lkey(&self) -> u32 {
        self.pool.as_ref().map_or(0, |pool| pool.arena.lkey())
    }

    /// The domain, to be compared only.
    #[inline]
    pub(crate) fn domain(&self) -> NonNull<sys::ibv_pd> {
        self.pool.as_ref().map_or(NonNull::dangling(), |pool| pool.arena.memory.domain())
    }
}

impl Deref for SendBuf {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the slot is taken by this handle alone; the device is not told of it before the handle
        // moves into the in-flight table, also when the driver refuses it; the bytes are initialised (pages begin as zeroes), `len` is
        // within the slot.
        unsafe { std::slice::from_raw_parts(self.addr().as_ptr(), self.len) }
    }
}

impl DerefMut for SendBuf {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.addr().as_ptr(), self.len) }
    }
}

impl Drop for SendBuf {
    #[inline]
    fn drop(&mut self) {
        if let Some(pool) = &self.pool {
            pool.free.put(self.slot);
        }
    }
}

impl fmt::Debug for SendBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendBuf").field("len", &self.len).field("capacity", &self.capacity()).finish_non_exhaustive()
    }
}

const _: () = {
    const fn assert_send_sync<T: Send + Sync>() {}
    assert_send_sync::<BufferPool>();
    assert_send_sync::<SendBuf>();
};
