//! Memory of a peer, as its owner described it.

use std::fmt;
use std::ops::Range;

use crate::error::{Error, Result};

/// What one needs to reach a peer's memory: address, length and key. Sent to the peer by any means.
///
/// Its fixed form of 24 bytes is big-endian: address (8), length (8), key (4), four zero bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteRegion {
    addr: u64,
    len: u64,
    rkey: u32,
}

impl RemoteRegion {
    /// A region of `len` bytes at `addr`, as its owner told.
    pub fn new(addr: u64, len: u64, rkey: u32) -> RemoteRegion {
        RemoteRegion { addr, len, rkey }
    }

    /// Its address in the peer.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its key.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// A part of it.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the range does not lie in the region, or the address would overflow.
    pub fn slice(&self, range: Range<u64>) -> Result<RemoteRegion> {
        let len = range.end.wrapping_sub(range.start);
        let addr = self.check(range.start, len, range.start <= range.end)?;
        Ok(RemoteRegion { addr, len, rkey: self.rkey })
    }

    /// The address of `len` bytes at `offset`, if they lie in the region.
    #[inline]
    pub(crate) fn locate(&self, offset: u64, len: u64) -> Result<u64> {
        self.check(offset, len, true)
    }

    #[inline]
    fn check(&self, offset: u64, len: u64, ordered: bool) -> Result<u64> {
        let in_region = ordered && offset.checked_add(len).is_some_and(|end| end <= self.len);
        let in_space = self.addr.checked_add(self.len).is_some();
        if in_region && in_space { Ok(self.addr + offset) } else { Err(self.outside(offset, len)) }
    }

    #[cold]
    fn outside(&self, offset: u64, len: u64) -> Error {
        let (whole, addr) = (self.len, self.addr);
        Error::misuse(format!(
            "{len} bytes at offset {offset} do not lie in the remote region of {whole} bytes at {addr:#x}"
        ))
    }

    /// The 24-byte form.
    pub fn to_bytes(&self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&self.addr.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_be_bytes());
        bytes[16..20].copy_from_slice(&self.rkey.to_be_bytes());
        bytes
    }

    /// Reads the 24-byte form. The last four bytes are ignored.
    pub fn from_bytes(bytes: &[u8; 24]) -> RemoteRegion {
        let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        RemoteRegion { addr: word(0), len: word(8), rkey: (word(16) >> 32) as u32 }
    }
}

impl fmt::Debug for RemoteRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteRegion {{ addr: {:#x}, len: {}, rkey: {:#x} }}", self.addr, self.len, self.rkey)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn remote_region_bytes_are_big_endian() {
        let region = RemoteRegion::new(0x0102_0304_0506_0708, 0x1112, 0xa1a2_a3a4);
        let bytes = region.to_bytes();
        assert_eq!(bytes[..8], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(bytes[8..16], [0, 0, 0, 0, 0, 0, 0x11, 0x12]);
        assert_eq!(bytes[16..], [0xa1, 0xa2, 0xa3, 0xa4, 0, 0, 0, 0]);
        assert_eq!(RemoteRegion::from_bytes(&bytes), region);
    }

    #[test]
    fn remote_region_slices_do_not_overflow() {
        let region = RemoteRegion::new(0x1000, 100, 7);
        assert_eq!(region.slice(10..20).expect("inside"), RemoteRegion::new(0x100a, 10, 7));
        assert!(region.slice(100..100).expect("the end").is_empty());
        assert!(region.slice(0..101).is_err());
        assert!(region.slice(u64::MAX..u64::MAX).is_err());
        #[expect(clippy::reversed_empty_ranges)]
        let reversed = 20..10;
        assert!(region.slice(reversed).is_err());
        let high = RemoteRegion::new(u64::MAX - 10, 100, 7);
        assert!(high.slice(0..1).is_err(), "an address range that wraps is refused as a whole");
        assert!(high.locate(0, 0).is_err());
    }

    proptest! {
        #[test]
        fn remote_region_survives_its_bytes(addr: u64, len: u64, rkey: u32) {
            let region = RemoteRegion::new(addr, len, rkey);
            prop_assert_eq!(RemoteRegion::from_bytes(&region.to_bytes()), region);
        }

        #[test]
        fn a_slice_lies_in_its_region(addr: u64, len: u64, a: u64, b: u64) {
            let region = RemoteRegion::new(addr, len, 1);
            if let Ok(part) = region.slice(a..b) {
                prop_assert!(part.addr() >= addr);
                prop_assert!(u128::from(part.addr()) + u128::from(part.len()) <= u128::from(addr) + u128::from(len));
            }
        }
    }
}
