//! The rsocket wire protocol, version 1, without any I/O: what each end knows, may send and must refuse.
//!
//! A stream is a reliable queue pair. Each end has a ring of two halves for what it receives, and an array of two entries
//! (address, key, length) that the peer fills in with the halves it may be written to:
//!
//! ```text
//!  sender                                             receiver
//!  ┌────────────┐   RDMA write + immediate: DATA n    ┌───────┬───────┐
//!  │ Sender     │ ──────────────────────────────────► │ half 0│ half 1│ ring, read in order
//!  │  entries[2]│ ◄────────────────────────────────── └───────┴───────┘
//!  └────────────┘   RDMA write + immediate: SGL limit     Receiver
//!                   (a half that was read, and credits)
//! ```
//!
//! * The bytes of DATA messages follow each other in the ring. A message never crosses the end of a half, and a half is
//!   filled to its end before the other is begun.
//! * A DATA message costs a credit. Credits are absolute: the receiver tells the sequence number to stop before.
//! * SGL and CTRL messages cost none; at most [`CONTROL_SLOTS`] of them may be unacknowledged.
//! * The first half, and the first credits, come with the connection's private data ([`Hello`]).
//!
//! Whatever the peer sends is checked here. What no honest peer sends is a [`Violation`], which ends the connection.

#![forbid(unsafe_code)]

mod hello;
mod incoming;
mod message;
mod receiver;
mod sender;
mod shutdown;
#[cfg(test)]
mod tests;

use thiserror::Error;

pub(crate) use hello::{HELLO_LEN, Hello, Opening};
pub(crate) use incoming::{Event, Incoming};
pub(crate) use message::Message;
pub(crate) use receiver::{Receiver, Update};
pub(crate) use sender::{Segment, Sender};
pub(crate) use shutdown::Ends;

/// How many SGL and CTRL messages may be posted and not yet done. rsocket reserves as many send requests.
pub(crate) const CONTROL_SLOTS: usize = 4;

/// How many control messages can come from a peer before it must be answered: an entry for each half, credits for what was
/// sent before, and the goodbyes.
pub(crate) const CONTROL_RECEIVES: u16 = 8;

/// Entries in the array where an end is told of the peer's halves.
pub(crate) const ENTRIES: usize = 2;

/// Something that no peer following the protocol sends.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub(crate) enum Violation {
    #[error("the private data is {0} bytes, not the {HELLO_LEN} of a stream")]
    HelloTooShort(usize),
    #[error("stream protocol version {0}, not 1")]
    Version(u8),
    #[error("no credits, or an empty or impossible buffer in the private data")]
    BadHello,
    #[error("a message of the reserved kind {0}")]
    ReservedKind(u8),
    #[error("an unknown control message ({0})")]
    UnknownControl(u32),
    #[error("a message without its word")]
    NoWord,
    #[error("a message that announces {announced} bytes and carries {written}")]
    WrongLength { announced: u32, written: u32 },
    #[error("{bytes} bytes of data where there was room for {room}")]
    TooMuchData { bytes: u32, room: usize },
    #[error("data after the end of the stream")]
    DataAfterEnd,
    #[error("the credit limit {limit} when {granted} was granted and {sent} used, of a queue of {depth}")]
    BadLimit { limit: u16, granted: u16, sent: u16, depth: u16 },
    #[error("a new buffer in place of one that was not filled yet")]
    EntryInUse,
    #[error("an empty or impossible buffer")]
    BadEntry,
    #[error("a mapping where none was offered")]
    NoMappings,
}

/// The byte order of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Little,
    Big,
}

impl Order {
    /// This machine's.
    pub(crate) const NATIVE: Self = if cfg!(target_endian = "big") { Self::Big } else { Self::Little };
}

/// An address, key and length as they stand in memory and on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sge {
    pub(crate) addr: u64,
    pub(crate) key: u32,
    pub(crate) len: u32,
}

impl Sge {
    /// Bytes of one.
    pub(crate) const LEN: usize = 16;

    pub(crate) fn to_bytes(self, order: Order) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let (addr, key, len) = match order {
            Order::Little => (self.addr.to_le_bytes(), self.key.to_le_bytes(), self.len.to_le_bytes()),
            Order::Big => (self.addr.to_be_bytes(), self.key.to_be_bytes(), self.len.to_be_bytes()),
        };
        bytes[..8].copy_from_slice(&addr);
        bytes[8..12].copy_from_slice(&key);
        bytes[12..].copy_from_slice(&len);
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8; Self::LEN], order: Order) -> Self {
        let addr = bytes[..8].try_into().expect("eight bytes");
        let key = bytes[8..12].try_into().expect("four bytes");
        let len = bytes[12..].try_into().expect("four bytes");
        match order {
            Order::Little => {
                Self { addr: u64::from_le_bytes(addr), key: u32::from_le_bytes(key), len: u32::from_le_bytes(len) }
            }
            Order::Big => {
                Self { addr: u64::from_be_bytes(addr), key: u32::from_be_bytes(key), len: u32::from_be_bytes(len) }
            }
        }
    }

    /// Whether `len` units of `size` bytes lie at the address, at least one.
    fn is_possible(self, size: u64) -> bool {
        self.len != 0 && self.addr.checked_add(u64::from(self.len) * size).is_some()
    }
}
