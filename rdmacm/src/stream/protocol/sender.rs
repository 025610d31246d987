//! What an end knows of the peer's room.

use super::{CONTROL_RECEIVES, ENTRIES, Message, Opening, Sge, Violation};

/// Where the next bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) addr: u64,
    pub(crate) key: u32,
    pub(crate) len: usize,
}

/// The peer's room, as it told us.
#[derive(Clone, Debug)]
pub(crate) struct Sender {
    /// Data messages sent.
    sequence: u16,
    /// The sequence number to stop before.
    limit: u16,
    /// The peer's receives.
    depth: u16,
    /// What remains of the peer's halves; a length of 0 is one that was filled.
    entries: [Sge; ENTRIES],
    /// The entry that is being filled.
    current: usize,
    /// The entry of our array that the peer writes next.
    expected: usize,
}

impl Sender {
    pub(crate) fn new(opening: &Opening) -> Self {
        let peer = &opening.peers;
        Self {
            sequence: 0,
            limit: peer.credits,
            depth: peer.credits,
            entries: [peer.buffer, Sge::default()],
            current: 0,
            expected: 1,
        }
    }

    /// Bytes that can be sent as one message now, 0 when the peer must make room first.
    ///
    /// The last credits are not used. Control messages take receives of the peer too, which rsocket leaves to the device's
    /// trying again; Soft-RoCE gives that up after a while if the peer's program does not look.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        let credits = self.limit.wrapping_sub(self.sequence);
        if credits <= spare(self.depth) { 0 } else { (self.entries[self.current].len as usize).min(Message::MAX_DATA) }
    }

    /// Where up to `want` bytes go, as one message; `None` when there is no room. Nothing changes until it is
    /// [`sent`](Self::sent).
    #[inline]
    pub(crate) fn segment(&self, want: usize) -> Option<Segment> {
        let Sge { addr, key, .. } = self.entries[self.current];
        let len = want.min(self.room());
        (len != 0).then_some(Segment { addr, key, len })
    }

    /// Takes note that a segment was posted, and gives the word that it must carry.
    #[inline]
    pub(crate) fn sent(&mut self, segment: &Segment) -> Message {
        let entry = &mut self.entries[self.current];
        let len = u32::try_from(segment.len).expect("a segment lies in an entry");
        debug_assert!(len != 0 && len <= entry.len && segment.addr == entry.addr, "the segment is the current one");
        entry.addr += u64::from(len);
        entry.len -= len;
        if entry.len == 0 {
            self.current = (self.current + 1) % ENTRIES;
        }
        self.sequence = self.sequence.wrapping_add(1);
        Message::Data(len)
    }

    /// The peer gave credits, and with `entry` the half that it wrote into our array.
    pub(crate) fn credit(&mut self, limit: u16, entry: Option<Sge>) -> Result<(), Violation> {
        let (granted, sent, depth) = (self.limit, self.sequence, self.depth);
        // All of them wrap; seen from what was sent they lie within the peer's queue, in this order.
        let ahead = limit.wrapping_sub(sent);
        if ahead > depth || ahead < granted.wrapping_sub(sent) {
            return Err(Violation::BadLimit { limit, granted, sent, depth });
        }
        if let Some(sge) = entry {
            let place = &mut self.entries[self.expected];
            if place.len != 0 {
                return Err(Violation::EntryInUse);
            }
            if !sge.is_possible(1) {
                return Err(Violation::BadEntry);
            }
            *place = sge;
            self.expected = (self.expected + 1) % ENTRIES;
        }
        self.limit = limit;
        Ok(())
    }

    /// As if a message had been sent, for tests of what comes later in a stream.
    #[cfg(test)]
    pub(crate) fn skip(&mut self) {
        self.sequence = self.sequence.wrapping_add(1);
    }
}

/// How many credits of a queue are left for control messages: as many as there may be while the peer looks at none, or what
/// a small queue can spare. Less than half, after which the peer gives new ones.
fn spare(depth: u16) -> u16 {
    (depth / 8).min(CONTROL_RECEIVES)
}
