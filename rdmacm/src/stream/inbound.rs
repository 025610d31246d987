//! The receiving side: the ring that the peer writes into.

use verbs::{Error, MemoryRegion, Notification, Result};

use super::protocol::{ENTRIES, Event, Incoming, Sge, Violation};
use crate::connection::RecvHalf;

/// Everything that receiving needs. The lock around it is held while messages are looked at and bytes are copied out, never
/// while waiting.
#[derive(Debug)]
pub(super) struct Inbound {
    half: RecvHalf,
    pub(super) incoming: Incoming,
    /// The ring, then the array of entries. The peer may write into it at any time.
    region: MemoryRegion,
}

/// What was found.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Found {
    pub(super) shutdown: bool,
    pub(super) disconnect: bool,
    pub(super) violation: Option<Violation>,
}

impl Inbound {
    /// Bytes of memory that the peer may write, for a ring of `ring` bytes.
    pub(super) fn region_size(ring: usize) -> usize {
        Self::entries_at(ring) + ENTRIES * Sge::LEN
    }

    /// Where the entries are, aligned as the peer expects of an array.
    pub(super) fn entries_at(ring: usize) -> usize {
        ring.next_multiple_of(Sge::LEN)
    }

    pub(super) fn new(half: RecvHalf, incoming: Incoming, region: MemoryRegion) -> Self {
        Self { half, incoming, region }
    }

    /// Takes note of all messages there are. An error is the end of the connection, and comes after all that arrived.
    #[inline]
    pub(super) fn poll(&mut self) -> Result<Found> {
        let mut found = Found::default();
        loop {
            match self.half.raw().try_recv_notification() {
                Ok(notification) => self.take(notification, &mut found),
                Err(Error::WouldBlock) => return Ok(found),
                // What was found first must be told first.
                Err(_) if found.shutdown || found.disconnect || found.violation.is_some() => return Ok(found),
                Err(error) => return Err(error),
            }
            if found.violation.is_some() {
                return Ok(found);
            }
        }
    }

    #[inline]
    fn take(&mut self, notification: Notification, found: &mut Found) {
        let (region, ring) = (&self.region, self.incoming.receiver.size());
        let entry = |index: usize| {
            let mut bytes = [0; Sge::LEN];
            let at = Self::entries_at(ring) + index * Sge::LEN;
            region.read_at(at, &mut bytes).expect("the array of entries lies in the region");
            bytes
        };
        match self.incoming.message(notification.imm, notification.len, entry) {
            Ok(Event::Data | Event::Credit | Event::Nothing) => {}
            Ok(Event::Shutdown) => found.shutdown = true,
            Ok(Event::Disconnect) => found.disconnect = true,
            Err(violation) => found.violation = Some(violation),
        }
    }

    /// Copies what can be read, from `skip` bytes after the next one, and leaves it there.
    pub(super) fn peek(&self, skip: usize, buffer: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            // At most twice: to the ring's end, and from its start.
            let range = self.incoming.receiver.readable(skip + done, buffer.len() - done);
            if range.is_empty() {
                break;
            }
            self.region.read_at(range.start, &mut buffer[done..done + range.len()])?;
            done += range.len();
        }
        Ok(done)
    }

    /// Copies what can be read.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let done = self.peek(0, buffer)?;
        self.incoming.receiver.consume(done);
        Ok(done)
    }
}
