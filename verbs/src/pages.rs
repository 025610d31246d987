//! Anonymous pages, and copies in and out of memory that others change meanwhile.
//!
//! # Why the copies are written as they are
//!
//! A peer, the device, or another thread may change the bytes at any time, so no Rust reference may cover
//! them and no plain access may read them. What these functions do is defined as a sequence of relaxed
//! atomic accesses *of single bytes*: any mixture of concurrent calls then races only between atomics of
//! one size, which is defined behaviour (each byte read is one that was written at some time). On x86-64
//! the sequence is carried out by wider moves in inline assembly, which the processor makes a refinement of
//! the byte-wise one; elsewhere, and under Miri, the bytes are accessed one by one.

use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
use std::sync::atomic::{AtomicU8, Ordering};

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::error::{OsError, Result};

/// Owned, page-aligned, zeroed pages.
pub(crate) struct Pages {
    addr: NonNull<u8>,
    mapped: usize,
}

// SAFETY: plain memory owned by this value; all access to it is up to its owner.
unsafe impl Send for Pages {}
// SAFETY: `&Pages` gives out only the address.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps at least `len` bytes, at least one.
    pub(crate) fn new(len: NonZeroUsize) -> Result<Pages> {
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing that exists.
        let addr =
            unsafe { mmap_anonymous(None, len, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE) }
                .map_err(|errno| OsError::new("mmap", errno))?;
        Ok(Pages { addr: addr.cast(), mapped: len.get() })
    }

    /// Maps at least `len` bytes in the system's huge pages of the usual size.
    pub(crate) fn huge(len: NonZeroUsize) -> Result<Pages> {
        let size = huge_page_size();
        let mapped = len.get().checked_next_multiple_of(size).and_then(NonZeroUsize::new);
        let mapped = mapped.ok_or_else(|| OsError::new("mmap", Errno::ENOMEM))?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_HUGETLB;
        // SAFETY: as in `new`.
        let addr = unsafe { mmap_anonymous(None, mapped, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags) }
            .map_err(|errno| {
                let mut e = OsError::new("mmap(MAP_HUGETLB)", errno);
                if errno == Errno::ENOMEM {
                    let pages = mapped.get() / size;
                    let remedy = format!("{pages} huge pages of {size} bytes are needed: raise vm.nr_hugepages");
                    e.remedy = Some(remedy.into());
                }
                e
            })?;
        Ok(Pages { addr: addr.cast(), mapped: mapped.get() })
    }

    /// Maps a part of a file, shared with everybody who has it open; `offset` is a multiple of the page size.
    pub(crate) fn file(file: impl AsFd, offset: i64, len: NonZeroUsize, writable: bool) -> Result<Pages> {
        let write = if writable { ProtFlags::PROT_WRITE } else { ProtFlags::empty() };
        // SAFETY: as in `new`.
        let addr = unsafe { mmap(None, len, ProtFlags::PROT_READ | write, MapFlags::MAP_SHARED, file, offset) }
            .map_err(|errno| OsError::new("mmap", errno))?;
        Ok(Pages { addr: addr.cast(), mapped: len.get() })
    }

    #[inline]
    pub(crate) fn addr(&self) -> NonNull<u8> {
        self.addr
    }
}

/// The usual size of huge pages, in bytes: what the kernel says, or 2 MiB.
fn huge_page_size() -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Hugepagesize:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<usize>().ok());
    kib.map_or(2 << 20, |kib| kib << 10)
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: our own mapping, unmapped once; the owner sees to it that no device uses it any more.
        if let Err(errno) = unsafe { munmap(self.addr.cast(), self.mapped) } {
            log::warn!("munmap: {errno}");
        }
    }
}

/// Copies `len` bytes out of memory that others may change meanwhile.
///
/// # Safety
/// `src` is readable for `len` bytes and only accessed by functions of this module or by devices; `dst` is
/// exclusively the caller's, for `len` bytes.
pub(crate) unsafe fn copy_out(src: NonNull<u8>, dst: *mut u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: both ranges are valid as the caller says; the block copies `len` bytes and changes nothing else.
    unsafe {
        rep_mov(src.as_ptr(), dst, len);
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    for i in 0..len {
        // SAFETY: both in range; the shared side by a relaxed atomic of one byte.
        unsafe { dst.add(i).write(AtomicU8::from_ptr(src.as_ptr().add(i)).load(Ordering::Relaxed)) }
    }
}

/// Copies `len` bytes into memory that others may read or change meanwhile.
///
/// # Safety
/// As for [`copy_out`], with the sides exchanged; `src` is not written by others during the call.
pub(crate) unsafe fn copy_in(dst: NonNull<u8>, src: *const u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: as in `copy_out`.
    unsafe {
        rep_mov(src, dst.as_ptr(), len);
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    for i in 0..len {
        // SAFETY: both in range; the shared side by a relaxed atomic of one byte.
        unsafe { AtomicU8::from_ptr(dst.as_ptr().add(i)).store(src.add(i).read(), Ordering::Relaxed) }
    }
}

/// Writes `len` times the same byte.
///
/// # Safety
/// As for [`copy_in`].
pub(crate) unsafe fn fill(dst: NonNull<u8>, byte: u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the caller's range is writable; the direction flag is clear on entry to inline assembly.
    unsafe {
        std::arch::asm!(
            "rep stosb",
            inout("rcx") len => _,
            inout("rdi") dst.as_ptr() => _,
            in("al") byte,
            options(nostack, preserves_flags),
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    for i in 0..len {
        // SAFETY: in range, by a relaxed atomic of one byte.
        unsafe { AtomicU8::from_ptr(dst.as_ptr().add(i)).store(byte, Ordering::Relaxed) }
    }
}

/// Eight bytes at an address that is a multiple of 8, in one access where the processor has one.
///
/// # Safety
/// As for [`copy_out`] with `len` 8; `src` is aligned to 8.
#[inline]
pub(crate) unsafe fn load_u64(src: NonNull<u8>) -> u64 {
    debug_assert!(src.as_ptr().addr().is_multiple_of(8), "an aligned word");
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: readable and aligned as the caller says. No `pure` or `nomem`: other memory accesses are
    // not moved across, and x86 orders a load before later ones.
    unsafe {
        let value: u64;
        std::arch::asm!("mov {}, [{}]", out(reg) value, in(reg) src.as_ptr(), options(nostack, preserves_flags));
        value
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    {
        let mut bytes = [0; 8];
        // SAFETY: as the caller says.
        unsafe { copy_out(src, bytes.as_mut_ptr(), 8) };
        std::sync::atomic::fence(Ordering::Acquire);
        u64::from_ne_bytes(bytes)
    }
}

/// The counterpart of [`load_u64`].
///
/// # Safety
/// As for [`copy_in`] with `len` 8; `dst` is aligned to 8.
#[inline]
pub(crate) unsafe fn store_u64(dst: NonNull<u8>, value: u64) {
    debug_assert!(dst.as_ptr().addr().is_multiple_of(8), "an aligned word");
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: writable and aligned as the caller says; x86 orders a store after earlier accesses.
    unsafe {
        std::arch::asm!("mov [{}], {}", in(reg) dst.as_ptr(), in(reg) value, options(nostack, preserves_flags));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    {
        let bytes = value.to_ne_bytes();
        std::sync::atomic::fence(Ordering::Release);
        // SAFETY: as the caller says.
        unsafe { copy_in(dst, bytes.as_ptr(), 8) };
    }
}

/// Words first, then the rest by bytes.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn rep_mov(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's ranges; the direction flag is clear on entry to inline assembly; the pointers
    // after the first instruction stand at the rest.
    unsafe {
        std::arch::asm!(
            "rep movsq",
            "mov rcx, {rest}",
            "rep movsb",
            rest = in(reg) len % 8,
            inout("rcx") len / 8 => _,
            inout("rsi") src => _,
            inout("rdi") dst => _,
            options(nostack, preserves_flags),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(len: usize) -> Pages {
        Pages::new(NonZeroUsize::new(len).expect("not empty")).expect("memory for a test")
    }

    #[test]
    fn copies_keep_every_byte_and_touch_no_other() {
        let pages = pages(4096);
        for offset in 0..9 {
            for len in [0, 1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 1000] {
                let data: Vec<u8> = (0..len).map(|i| (i * 7 + offset + 1) as u8).collect();
                let mut back = vec![0xee; len + 2];
                // SAFETY: within the 4096 bytes, which nobody else uses.
                unsafe {
                    fill(pages.addr(), 0xaa, 4096);
                    let at = pages.addr().add(16 + offset);
                    copy_in(at, data.as_ptr(), len);
                    copy_out(at, back[1..].as_mut_ptr(), len);
                    let mut edge = [0; 2];
                    copy_out(at.sub(1), edge.as_mut_ptr(), 1);
                    copy_out(at.add(len), edge[1..].as_mut_ptr(), 1);
                    assert_eq!(edge, [0xaa, 0xaa]);
                }
                assert_eq!(&back[1..len + 1], &data[..]);
                assert_eq!((back[0], back[len + 1]), (0xee, 0xee));
            }
        }
    }

    #[test]
    fn words_are_whole() {
        let pages = pages(64);
        // SAFETY: within the mapping; accessed by this module only.
        unsafe {
            std::thread::scope(|scope| {
                let addr = pages.addr().as_ptr().expose_provenance();
                scope.spawn(move || {
                    let p = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(addr)).expect("mapped");
                    for i in 0..0x1_0000_u64 {
                        store_u64(p, i * 0x0001_0001_0001_0001);
                    }
                });
                let p = pages.addr();
                for _ in 0..100_000 {
                    let v = load_u64(p);
                    assert_eq!(v, (v & 0xffff) * 0x0001_0001_0001_0001, "{v:x}");
                    if v >> 48 == 0xffff {
                        break;
                    }
                }
            });
        }
    }

    #[test]
    fn new_pages_are_zero_and_aligned() {
        let pages = pages(10_000);
        assert_eq!(pages.addr().as_ptr().addr() % 4096, 0);
        let mut back = vec![1; 10_000];
        // SAFETY: within the mapping.
        unsafe { copy_out(pages.addr(), back.as_mut_ptr(), 10_000) };
        assert!(back.iter().all(|&b| b == 0));
    }
}
