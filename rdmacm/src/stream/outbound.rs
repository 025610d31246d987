//! The sending side: a ring of registered memory that is copied into and written to the peer from.

use std::collections::VecDeque;

use verbs::{MemoryRegion, RemoteRegion, Result, Ticket};

use super::gather::Gather;
use super::protocol::{CONTROL_SLOTS, Message, Segment, Sender, Sge, Update};
use crate::connection::SendHalf;

/// The largest piece that is copied before it is posted, if the ring has room for two: large enough that its costs do not
/// matter, small enough that the device begins soon.
const CHUNK: usize = 128 * 1024;

/// What keeps bytes from being sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// Nothing: all were posted.
    Nothing,
    /// The peer must make room, or give credits.
    Peer,
    /// Something sent must be done first.
    Queue,
}

/// Everything that sending needs. The lock around it is held while bytes are copied and posted, never while waiting.
#[derive(Debug)]
pub(super) struct Outbound {
    half: SendHalf,
    pub(super) sender: Sender,
    /// The ring, then a place for each control message, then one for inline data.
    region: MemoryRegion,
    /// Bytes of the ring, and of the largest piece.
    ring: usize,
    chunk: usize,
    /// Bytes of the ring ever used, and ever free again.
    head: u64,
    tail: u64,
    /// What was posted and is not known to be done.
    flying: VecDeque<Flying>,
    /// How many of these are control messages.
    controls: usize,
    /// How many of the others there may be.
    data_slots: usize,
    /// Messages, and bytes of the ring, that were posted since the last one whose end is told.
    untold: usize,
    untold_bytes: usize,
    /// The place of the next control message.
    next_control: usize,
    inline: usize,
}

#[derive(Clone, Copy, Debug)]
struct Flying {
    ticket: Ticket,
    /// Where in the ring it ends.
    end: u64,
    control: bool,
}

impl Outbound {
    /// Bytes of local memory that are needed for a ring of `ring` bytes.
    pub(super) fn region_size(ring: usize, inline: usize) -> usize {
        ring + CONTROL_SLOTS * Sge::LEN + inline
    }

    /// With a region of at least [`region_size`](Self::region_size) bytes.
    pub(super) fn new(mut half: SendHalf, sender: Sender, region: MemoryRegion, ring: usize, queue: u32) -> Self {
        let data_slots = queue as usize - CONTROL_SLOTS;
        let room = region.len() - Self::region_size(ring, 0);
        Self {
            inline: half.raw().inline_size().min(room),
            half,
            sender,
            region,
            ring,
            chunk: CHUNK.min(ring / 2),
            head: 0,
            tail: 0,
            flying: VecDeque::with_capacity(queue as usize),
            controls: 0,
            data_slots,
            untold: 0,
            untold_bytes: 0,
            next_control: 0,
        }
    }

    /// Posts as much as there is room for, and says what keeps it from posting more.
    pub(super) fn push(&mut self, data: &mut Gather<'_, '_>) -> Result<Stop> {
        while data.left() != 0 {
            if self.flying.len() - self.controls >= self.data_slots {
                self.reap()?;
                if self.flying.len() - self.controls >= self.data_slots {
                    return Ok(Stop::Queue);
                }
            }
            let Some(mut segment) = self.sender.segment(data.left().min(self.chunk)) else { return Ok(Stop::Peer) };
            if segment.len <= self.inline {
                self.post_inline(data, &segment)?;
                continue;
            }
            if self.contiguous() == 0 {
                self.reap()?;
            }
            segment.len = segment.len.min(self.contiguous());
            if segment.len == 0 {
                return Ok(Stop::Queue);
            }
            self.post_from_ring(data, &segment)?;
        }
        Ok(Stop::Nothing)
    }

    /// Bytes of the ring that are free and lie together at its head.
    #[inline]
    fn contiguous(&self) -> usize {
        let used = (self.head - self.tail) as usize;
        (self.ring - used).min(self.ring - self.place())
    }

    #[inline]
    fn place(&self) -> usize {
        (self.head % self.ring as u64) as usize
    }

    fn post_inline(&mut self, data: &mut Gather<'_, '_>, segment: &Segment) -> Result<()> {
        let at = Self::region_size(self.ring, 0);
        data.take(segment.len, |offset, piece| self.region.write_at(at + offset, piece))?;
        let last = self.untold + 1 >= self.data_slots / 4;
        self.post_data(at, segment, 0, last)
    }

    fn post_from_ring(&mut self, data: &mut Gather<'_, '_>, segment: &Segment) -> Result<()> {
        let at = self.place();
        data.take(segment.len, |offset, piece| self.region.write_at(at + offset, piece))?;
        let last = self.untold + 1 >= self.data_slots / 4 || self.untold_bytes + segment.len >= self.ring / 4;
        self.post_data(at, segment, segment.len, last)
    }

    fn post_data(&mut self, at: usize, segment: &Segment, ring_bytes: usize, told: bool) -> Result<()> {
        let word = self.sender.sent(segment).word();
        let range = at..at + segment.len;
        let remote = RemoteRegion::new(segment.addr, segment.len as u64, segment.key);
        let half = self.half.raw();
        half.tell_each(told);
        let ticket = half.post_write(&self.region, range, &remote, 0, Some(word))?;
        self.head += ring_bytes as u64;
        self.count(ticket, ring_bytes, told, false);
        Ok(())
    }

    fn count(&mut self, ticket: Ticket, ring_bytes: usize, told: bool, control: bool) {
        self.flying.push_back(Flying { ticket, end: self.head, control });
        self.controls += usize::from(control);
        if told {
            (self.untold, self.untold_bytes) = (0, 0);
        } else {
            self.untold += 1;
            self.untold_bytes += ring_bytes;
        }
    }

    /// Whether a control message can be posted now.
    pub(super) fn has_control_slot(&mut self) -> Result<bool> {
        if self.controls >= CONTROL_SLOTS {
            self.reap()?;
        }
        Ok(self.controls < CONTROL_SLOTS)
    }

    /// Tells the peer of new room; there must be a control slot.
    pub(super) fn post_update(&mut self, update: &Update) -> Result<()> {
        match &update.entry {
            None => self.post_control(update.message, 0, None),
            Some(entry) => {
                let at = self.ring + self.next_control * Sge::LEN;
                self.next_control = (self.next_control + 1) % CONTROL_SLOTS;
                self.region.write_at(at, &entry.bytes)?;
                self.post_control(update.message, at, Some((entry.addr, entry.key)))
            }
        }
    }

    /// Says goodbye; there must be a control slot.
    pub(super) fn post_goodbye(&mut self, message: Message) -> Result<()> {
        self.post_control(message, 0, None)
    }

    fn post_control(&mut self, message: Message, at: usize, to: Option<(u64, u32)>) -> Result<()> {
        debug_assert!(self.controls < CONTROL_SLOTS, "the caller looked");
        let (addr, key) = to.unwrap_or_default();
        let range = at..at + if to.is_some() { Sge::LEN } else { 0 };
        let remote = RemoteRegion::new(addr, range.len() as u64, key);
        let half = self.half.raw();
        half.tell_each(true);
        let ticket = half.post_write(&self.region, range, &remote, 0, Some(message.word()))?;
        self.count(ticket, 0, true, true);
        Ok(())
    }

    /// Takes note of what is done.
    pub(super) fn reap(&mut self) -> Result<()> {
        let half = self.half.raw();
        half.try_progress()?;
        while let Some(first) = self.flying.front()
            && half.is_done(first.ticket)
        {
            self.tail = first.end;
            self.controls -= usize::from(first.control);
            self.flying.pop_front();
        }
        Ok(())
    }

    /// Whether everything that was posted is done.
    pub(super) fn is_idle(&mut self) -> Result<bool> {
        self.reap()?;
        Ok(self.flying.is_empty())
    }
}
