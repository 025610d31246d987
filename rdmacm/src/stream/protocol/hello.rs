//! What both ends tell each other when they connect, as private data.

use super::{ENTRIES, Order, Sge, Violation};

/// Bytes of a [`Hello`].
pub(crate) const HELLO_LEN: usize = 40;

const VERSION: u8 = 1;
/// The sender is big-endian.
const FLAG_NET: u8 = 1;
/// The byte with the number of mappings is valid.
const FLAG_IOMAP: u8 = 2;

/// What an end says of itself: how much it can take, and where.
///
/// | offset | bytes | content |
/// |---|---|---|
/// | 0 | 1 | version, 1 |
/// | 1 | 1 | flags: 1 big-endian sender, 2 the byte at 7 is valid |
/// | 2 | 2 | credits: receives posted |
/// | 4 | 3 | zero |
/// | 7 | 1 | mappings offered: n up to 128, above that 128 \| n / 256 |
/// | 8 | 16 | the array for buffer entries: address, key, number of entries |
/// | 24 | 16 | the first buffer: address, key, bytes |
///
/// All numbers are big-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) order: Order,
    pub(crate) credits: u16,
    /// `len` is a number of entries.
    pub(crate) entries: Sge,
    pub(crate) buffer: Sge,
}

impl Hello {
    /// Of this end: its array and the first half of its ring.
    pub(crate) fn new(credits: u16, entries: (u64, u32), buffer: Sge) -> Self {
        let (addr, key) = entries;
        let entries = Sge { addr, key, len: u32::try_from(ENTRIES).expect("2 fits") };
        Self { order: Order::NATIVE, credits, entries, buffer }
    }

    pub(crate) fn to_bytes(self) -> [u8; HELLO_LEN] {
        let mut bytes = [0; HELLO_LEN];
        bytes[0] = VERSION;
        bytes[1] = FLAG_IOMAP | if self.order == Order::Big { FLAG_NET } else { 0 };
        bytes[2..4].copy_from_slice(&self.credits.to_be_bytes());
        bytes[8..24].copy_from_slice(&self.entries.to_bytes(Order::Big));
        bytes[24..].copy_from_slice(&self.buffer.to_bytes(Order::Big));
        bytes
    }

    /// Reads what the peer says. Bytes after it are padding.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, Violation> {
        if let Some(&version) = bytes.first()
            && version != VERSION
        {
            return Err(Violation::Version(version));
        }
        let Some(bytes) = bytes.first_chunk::<HELLO_LEN>() else {
            return Err(Violation::HelloTooShort(bytes.len()));
        };
        let part = |at: usize| bytes[at..at + Sge::LEN].try_into().expect("sixteen bytes");
        let hello = Self {
            order: if bytes[1] & FLAG_NET == 0 { Order::Little } else { Order::Big },
            credits: u16::from_be_bytes([bytes[2], bytes[3]]),
            entries: Sge::from_bytes(part(8), Order::Big),
            buffer: Sge::from_bytes(part(24), Order::Big),
        };
        let possible = hello.credits != 0 && hello.entries.is_possible(Sge::LEN as u64) && hello.buffer.is_possible(1);
        possible.then_some(hello).ok_or(Violation::BadHello)
    }
}

/// What both ends said.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opening {
    pub(crate) ours: Hello,
    pub(crate) peers: Hello,
}
