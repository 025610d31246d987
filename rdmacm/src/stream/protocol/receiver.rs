//! What an end knows of its own room: the ring, and what of it the peer was told.

use std::ops::Range;

use super::{Message, Opening, Sge, Violation};

/// The ring that the peer writes into, and the credits that it was given.
///
/// Positions count bytes from the start of the stream; a place in the ring is a position modulo its size.
#[derive(Clone, Debug)]
pub(crate) struct Receiver {
    /// Bytes of a half.
    half: u64,
    /// The ring's first byte, for the peer.
    addr: u64,
    key: u32,
    /// Bytes that arrived.
    arrived: u64,
    /// Bytes that were read.
    read: u64,
    /// Where the halves end that the peer knows of.
    published: u64,
    /// Receives posted.
    depth: u16,
    /// Data messages that arrived.
    sequence: u16,
    /// The sequence number from which on the peer should get new credits.
    renew_at: u16,
    /// The peer's array for entries.
    entries: Sge,
    /// The entry of the peer's array that is written next.
    next_entry: u32,
}

/// What the peer must be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Update {
    pub(crate) message: Message,
    /// A half that is free again.
    pub(crate) entry: Option<EntryWrite>,
}

/// A write into the peer's array of entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryWrite {
    pub(crate) addr: u64,
    pub(crate) key: u32,
    pub(crate) bytes: [u8; Sge::LEN],
}

impl Receiver {
    pub(crate) fn new(opening: &Opening) -> Self {
        let (ours, peers) = (&opening.ours, &opening.peers);
        Self {
            half: u64::from(ours.buffer.len),
            addr: ours.buffer.addr,
            key: ours.buffer.key,
            arrived: 0,
            read: 0,
            published: u64::from(ours.buffer.len),
            depth: ours.credits,
            sequence: 0,
            renew_at: (ours.credits / 2).max(1),
            entries: peers.entries,
            next_entry: 1 % peers.entries.len.max(1),
        }
    }

    /// Data arrived: a write of `bytes` at the current place.
    pub(crate) fn data(&mut self, bytes: u32) -> Result<(), Violation> {
        // Neither beyond what was published, nor across the end of a half.
        let room = (self.published - self.arrived).min(self.half - self.arrived % self.half);
        if u64::from(bytes) > room {
            return Err(Violation::TooMuchData { bytes, room: room as usize });
        }
        self.arrived += u64::from(bytes);
        self.sequence = self.sequence.wrapping_add(1);
        Ok(())
    }

    /// Bytes that can be read.
    #[inline]
    pub(crate) fn available(&self) -> usize {
        (self.arrived - self.read) as usize
    }

    /// Bytes of the ring, both halves.
    pub(crate) fn size(&self) -> usize {
        2 * self.half as usize
    }

    /// The places in the ring of the next `want` readable bytes, `skip` bytes after the next one: what lies together, so
    /// that there may be more at the ring's start.
    #[inline]
    pub(crate) fn readable(&self, skip: usize, want: usize) -> Range<usize> {
        let skip = skip.min(self.available());
        let start = ((self.read + skip as u64) % (2 * self.half)) as usize;
        let len = want.min(self.available() - skip).min(self.size() - start);
        start..start + len
    }

    /// The next `bytes` were read.
    #[inline]
    pub(crate) fn consume(&mut self, bytes: usize) {
        assert!(bytes <= self.available(), "only what arrived can be read");
        self.read += bytes as u64;
    }

    /// Whether the peer must be told of new room.
    #[inline]
    pub(crate) fn owes_update(&self) -> bool {
        self.has_free_half() || self.sequence.wrapping_sub(self.renew_at) < 1 << 15
    }

    /// The half after those published lies where bytes of half a ring ago were, all of them read.
    #[inline]
    fn has_free_half(&self) -> bool {
        self.published - self.half <= self.read
    }

    /// What to tell the peer, if anything; it counts as told.
    pub(crate) fn update(&mut self, opening: &Opening) -> Option<Update> {
        if !self.owes_update() {
            return None;
        }
        let entry = self.has_free_half().then(|| {
            let sge = Sge {
                addr: self.addr + self.published % (2 * self.half),
                key: self.key,
                len: u32::try_from(self.half).expect("made from 32 bits"),
            };
            let place = u64::from(self.next_entry) * Sge::LEN as u64;
            self.published += self.half;
            self.next_entry = (self.next_entry + 1) % self.entries.len.max(1);
            EntryWrite {
                addr: self.entries.addr + place,
                key: self.entries.key,
                bytes: sge.to_bytes(opening.peers.order),
            }
        });
        self.renew_at = self.sequence.wrapping_add((self.depth / 2).max(1));
        let limit = self.sequence.wrapping_add(self.depth);
        Some(Update { message: Message::Credit { limit, entry: entry.is_some() }, entry })
    }

    /// What must hold between any two calls.
    #[cfg(test)]
    pub(crate) fn invariants(&self) {
        let ring = 2 * self.half;
        assert!(self.read <= self.arrived && self.arrived <= self.published, "{self:?}");
        assert!(self.published <= self.read + ring, "a half is published when it was read: {self:?}");
        assert!(self.published.is_multiple_of(self.half), "{self:?}");
    }
}
