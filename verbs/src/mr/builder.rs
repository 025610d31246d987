//! Regions of all kinds of memory.

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;

use nix::errno::Errno;

use super::{Access, Backing, MemoryRegion, Registered, View, refused};
use crate::error::{Error, Result};
use crate::pages::Pages;
use crate::pd::ProtectionDomain;
use crate::sys;

/// What a [`MemoryRegion`] is to be made of; from [`MemoryRegion::builder`].
///
/// ```no_run
/// use verbs::{Access, MemoryRegion};
///
/// # fn example(pd: &verbs::ProtectionDomain) -> Result<(), verbs::Error> {
/// // Memory of the program's own, which comes back in the end.
/// let region = MemoryRegion::builder(pd, Access::REMOTE_READ).own(vec![7; 1000]).map_err(|(e, _)| e)?;
/// // ... operations ...
/// let bytes = region.into_bytes().expect("the last handle");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RegionBuilder {
    pd: ProtectionDomain,
    access: Access,
    huge_pages: bool,
    iova: Option<u64>,
}

impl RegionBuilder {
    pub(super) fn new(pd: &ProtectionDomain, access: Access) -> RegionBuilder {
        RegionBuilder { pd: pd.clone(), access, huge_pages: false, iova: None }
    }

    /// Has [`zeroed`](Self::zeroed) use huge pages: fewer entries in the device's tables.
    #[must_use]
    pub fn huge_pages(mut self) -> Self {
        self.huge_pages = true;
        self
    }

    /// Chooses the address at which peers and the device see the first byte, instead of its address in this process. It
    /// must be at the same place within a page.
    #[must_use]
    pub fn device_address(mut self, address: u64) -> Self {
        self.iova = Some(address);
        self
    }

    /// Maps and registers zeroed bytes.
    ///
    /// # Errors
    /// * [`Error::Misuse`] for a length of 0, or rights that verbs does not allow together.
    /// * [`Error::Os`]: no huge pages, or RLIMIT_MEMLOCK too low; the text says so.
    /// * [`Error::Unsupported`] for on-demand paging on a device without it.
    pub fn zeroed(self, len: usize) -> Result<MemoryRegion> {
        let len = self.check(len)?;
        let pages = if self.huge_pages { Pages::huge(len)? } else { Pages::new(len)? };
        self.pages(pages, len, View::ReadWrite)
    }

    /// Registers the bytes of a vector, which [`into_bytes`](MemoryRegion::into_bytes) gives back after deregistration.
    ///
    /// # Errors
    /// Those of [`zeroed`](Self::zeroed); the vector comes back with the error.
    pub fn own(self, bytes: Vec<u8>) -> Result<MemoryRegion, (Error, Vec<u8>)> {
        if let Err(e) = self.check(bytes.len()) {
            return Err((e, bytes));
        }
        let len = bytes.len();
        let backing = Backing::vector(bytes);
        let Backing::Vector(addr, ..) = backing else { unreachable!("just made one") };
        // SAFETY: the vector was taken apart, so nobody refers to its bytes until it is put together.
        match unsafe { Registered::register(&self.pd, addr, len, self.iova, self.access, backing) } {
            Ok(registered) => Ok(MemoryRegion::of(registered, self.access, View::ReadWrite)),
            Err((e, backing)) => Err((e, backing.into_vector().expect("the vector"))),
        }
    }

    /// Registers bytes that never change, to be sent or read by peers.
    ///
    /// # Errors
    /// [`Error::Misuse`] for rights to write; those of [`zeroed`](Self::zeroed).
    pub fn constant(self, bytes: &'static [u8]) -> Result<MemoryRegion> {
        let len = self.check(bytes.len())?;
        if !(Access::REMOTE_READ | Access::ON_DEMAND | Access::RELAXED_ORDERING).contains(self.access) {
            return Err(Error::misuse("a region of constant bytes can only be read by peers"));
        }
        let addr = NonNull::from(bytes).cast();
        // SAFETY: the bytes live for ever; without a right to write nobody does.
        let made =
            unsafe { Registered::register(&self.pd, addr, len.get(), self.iova, self.access, Backing::Elsewhere) };
        Ok(MemoryRegion::of(made.map_err(|(e, _)| e)?, self.access, View::Read))
    }

    /// Maps a part of a file, and registers it. What is written to the region is written to the file. `offset` is a
    /// multiple of the page size. Without [`Access::LOCAL_WRITE`] the file need only be readable.
    ///
    /// If somebody makes the file shorter meanwhile, reading the lost part through the region ends the process (`SIGBUS`).
    ///
    /// # Errors
    /// Those of [`zeroed`](Self::zeroed); [`Error::Os`] also when the kernel does not pin pages of this file system for
    /// writing: since Linux 6.5 only those of tmpfs and hugetlbfs.
    pub fn file(self, file: impl AsFd, offset: u64, len: usize) -> Result<MemoryRegion> {
        let len = self.check(len)?;
        let offset = i64::try_from(offset).map_err(|_| Error::misuse("an offset beyond the largest possible file"))?;
        let writable = self.access.contains(Access::LOCAL_WRITE);
        let pages = Pages::file(file, offset, len, writable)?;
        self.pages(pages, len, if writable { View::ReadWrite } else { View::Read })
    }

    /// Registers device memory that a DMA-BUF descriptor stands for, such as that of a graphics processor
    /// (`ibv_reg_dmabuf_mr`). This process does not see it. The descriptor can be closed afterwards.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the device cannot; [`Error::Misuse`] as [`zeroed`](Self::zeroed).
    #[doc(alias = "ibv_reg_dmabuf_mr")]
    pub fn dmabuf(self, descriptor: impl AsFd, offset: u64, len: usize) -> Result<MemoryRegion> {
        let len = self.check(len)?.get();
        let (fd, iova) = (descriptor.as_fd().as_raw_fd(), self.iova.unwrap_or(offset));
        // SAFETY: the domain is alive and the descriptor open.
        let raw = unsafe { sys::reg_dmabuf_mr(self.pd.raw(), offset, len, iova, fd, self.access.bits()) };
        let raw = raw.map_err(|errno| match errno {
            Errno::EOPNOTSUPP | Errno::ENOSYS => Error::Unsupported("DMA-BUF memory: the device cannot reach it"),
            errno => refused("ibv_reg_dmabuf_mr", errno, len, self.access),
        })?;
        let registered = Registered::adopt(&self.pd, raw, NonNull::dangling(), iova, len, Backing::Elsewhere);
        Ok(MemoryRegion::of(registered, self.access, View::None))
    }

    /// Registers memory that somebody else owns.
    ///
    /// # Errors
    /// Those of [`zeroed`](Self::zeroed).
    ///
    /// # Safety
    /// There are `len` bytes at `addr`, initialised, and they stay until the last handle of the region, and every
    /// operation that uses it, is gone: no sooner than the queue pairs it was used with are destroyed. Until then no
    /// reference covers them, and others access them by volatile or atomic accesses only.
    pub unsafe fn raw(self, addr: NonNull<u8>, len: usize) -> Result<MemoryRegion> {
        let len = self.check(len)?.get();
        // SAFETY: as the caller says.
        let made = unsafe { Registered::register(&self.pd, addr, len, self.iova, self.access, Backing::Elsewhere) };
        Ok(MemoryRegion::of(made.map_err(|(e, _)| e)?, self.access, View::ReadWrite))
    }

    fn pages(self, pages: Pages, len: NonZeroUsize, view: View) -> Result<MemoryRegion> {
        let addr = pages.addr();
        // SAFETY: the pages stay mapped until they are dropped, and nobody refers to them.
        let made =
            unsafe { Registered::register(&self.pd, addr, len.get(), self.iova, self.access, Backing::Pages(pages)) };
        Ok(MemoryRegion::of(made.map_err(|(e, _)| e)?, self.access, view))
    }

    fn check(&self, len: usize) -> Result<NonZeroUsize> {
        self.access.check()?;
        if self.iova.is_some_and(|at| at.checked_add(len as u64).is_none()) {
            return Err(Error::misuse("the device addresses of the region would wrap around"));
        }
        match NonZeroUsize::new(len) {
            None => Err(Error::misuse("a memory region must have at least one byte")),
            Some(len) if len.get() > isize::MAX as usize => {
                Err(Error::misuse("a memory region cannot be larger than half of the address space"))
            }
            Some(len) => Ok(len),
        }
    }
}
