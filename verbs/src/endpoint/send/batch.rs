//! Several operations posted with one call: one doorbell, and on Soft-RoCE one system call.

use std::fmt;
use std::ops::Range;
use std::ptr;

use super::one_sided::Transfer;
use super::pending::Ticket;
use super::state::{Prepared, Request, Resource};
use super::{SendHalf, message};
use crate::error::{Error, Result};
use crate::mr::MemoryRegion;
use crate::pool::SendBuf;
use crate::remote::RemoteRegion;

/// Operations to be posted together; see [`SendHalf::batch`]. Dropping it posts nothing.
pub struct Batch<'a> {
    half: &'a mut SendHalf,
    /// Given back to the half at the end.
    room: Option<Box<Room>>,
}

/// What a batch is written into, kept by the half from one to the next.
pub(super) struct Room {
    staged: Vec<(Request, Resource)>,
    chain: Box<[Prepared]>,
}

impl SendHalf {
    /// Begins a batch: operations that are added to it are posted by [`Batch::post`], with one call of the driver.
    ///
    /// ```no_run
    /// # fn example(half: &mut verbs::SendHalf, local: &verbs::MemoryRegion, remote: &verbs::RemoteRegion) -> Result<(), verbs::Error> {
    /// let mut batch = half.batch();
    /// for piece in 0..8 {
    ///     batch.write(local, piece * 64..(piece + 1) * 64, remote, piece as u64 * 64, None)?;
    /// }
    /// batch.send(b"eight pieces")?;
    /// let ticket = batch.post()?;
    /// half.wait(ticket)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn batch(&mut self) -> Batch<'_> {
        let limit = self.state.table.limit() as usize;
        let room = self.state.batch_room.take().unwrap_or_else(|| {
            Box::new(Room { staged: Vec::with_capacity(limit), chain: (0..limit).map(|_| Prepared::new()).collect() })
        });
        Batch { half: self, room: Some(room) }
    }
}

impl Batch<'_> {
    /// Adds an RDMA write of at most one message of the port, with an immediate value or without.
    ///
    /// # Errors
    /// * [`Error::WouldBlock`] when the queue has no room for more operations: post what was added.
    /// * [`Error::TooLong`] when it is larger than a message of the port.
    /// * [`Error::Misuse`] as [`SendHalf::write`]; the cause, once the connection is broken or closed.
    pub fn write(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        remote_offset: u64,
        imm: Option<u32>,
    ) -> Result<()> {
        let transfer = Transfer::write(self.half, local, range, remote, remote_offset, imm)?;
        self.add_transfer(&transfer)
    }

    /// Adds an RDMA read of at most one message of the port.
    ///
    /// # Errors
    /// As [`write`](Self::write) and [`SendHalf::read`].
    pub fn read(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        remote_offset: u64,
    ) -> Result<()> {
        let transfer = Transfer::read(self.half, local, range, remote, remote_offset)?;
        self.add_transfer(&transfer)
    }

    /// Adds a message, which is copied now.
    ///
    /// # Errors
    /// * [`Error::WouldBlock`] when the queue has no room for more operations: post what was added.
    /// * [`Error::TooLong`] when it is larger than the option `message_size`; the cause, once the connection is over.
    pub fn send(&mut self, data: &[u8]) -> Result<()> {
        self.send_with(data, None)
    }

    /// Adds a message with an immediate value.
    ///
    /// # Errors
    /// Those of [`send`](Self::send).
    pub fn send_imm(&mut self, data: &[u8], imm: u32) -> Result<()> {
        self.send_with(data, Some(imm))
    }

    fn send_with(&mut self, data: &[u8], imm: Option<u32>) -> Result<()> {
        self.want_room()?;
        let state = &self.half.state;
        let (len, limit) = (data.len(), state.slots.size());
        if len > limit {
            return Err(Error::TooLong { len, limit });
        }
        let slot = state.slots.slot(state.table.place_after(self.len() as u64)).as_ptr();
        // SAFETY: the slot holds `len` bytes; its place will be this message's, so nobody else has it.
        unsafe { ptr::copy_nonoverlapping(data.as_ptr(), slot, len) };
        let request = message(slot.cast_const(), len, state.slots.lkey(), imm, len <= state.inline, false);
        self.room().staged.push((request, Resource::None));
        Ok(())
    }

    /// Adds the contents of a registered buffer as a message.
    ///
    /// # Errors
    /// Those of [`send`](Self::send) and [`SendHalf::send_buf`]; the buffer comes back with the error.
    pub fn send_buf(&mut self, buf: SendBuf) -> Result<(), (Error, SendBuf)> {
        let (len, limit) = (buf.len(), self.half.state.max_message);
        if let Err(e) = self.want_room() {
            return Err((e, buf));
        }
        if buf.domain() != self.half.state.domain {
            return Err((Error::misuse("the buffer belongs to another protection domain than the connection"), buf));
        }
        if len > limit {
            return Err((Error::TooLong { len, limit }, buf));
        }
        let request = message(buf.addr().as_ptr(), len, buf.lkey(), None, len <= self.half.state.inline, false);
        self.room().staged.push((request, Resource::Buffer(buf)));
        Ok(())
    }

    /// How many operations were added.
    pub fn len(&self) -> usize {
        self.room.as_ref().map_or(0, |room| room.staged.len())
    }

    /// Whether none was added.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn add_transfer(&mut self, transfer: &Transfer<'_>) -> Result<()> {
        let state = &self.half.state;
        if transfer.len > state.max_message {
            return Err(Error::TooLong { len: transfer.len, limit: state.max_message });
        }
        if transfer.is_nothing() {
            return Ok(());
        }
        let request = transfer.request(state, 0, transfer.len, false);
        self.want_room()?;
        self.room().staged.push((request, Resource::Region(transfer.local.clone())));
        Ok(())
    }

    fn room(&mut self) -> &mut Room {
        self.room.as_mut().expect(THERE)
    }

    fn want_room(&mut self) -> Result<()> {
        let wanted = self.len() as u64 + 1;
        if self.half.shared.is_broken() || self.half.state.table.room() < wanted {
            self.half.want_room(0, wanted).map_err(|e| match e {
                // More than an empty queue holds; what was added can be posted.
                Error::TooLong { .. } => Error::WouldBlock,
                other => other,
            })?;
        }
        Ok(())
    }

    /// Posts what was added, in that order. The ticket is that of the last one. Unless each tells its own (the option
    /// `signal_every`), the end of the last one is told, and only some of the others.
    ///
    /// # Errors
    /// The cause, once the connection is broken or closed; [`Error::Os`] when the driver refuses, which breaks it.
    pub fn post(mut self) -> Result<Ticket> {
        let Batch { half, room } = &mut self;
        let (state, shared) = (&mut *half.state, &half.shared);
        let Room { staged, chain } = &mut **room.as_mut().expect(THERE);
        if shared.is_broken() {
            return half.alive().map(|()| Ticket::OVER);
        }
        let count = staged.len();
        if count == 0 {
            return Ok(Ticket::OVER);
        }
        let first_seq = state.table.next_seq();
        let mut untold = state.table.unsignalled_tail();
        for (i, (request, _)) in staged.iter_mut().enumerate() {
            untold += 1;
            request.signal = i + 1 == count || untold >= state.signal_interval;
            if request.signal {
                untold = 0;
            }
            chain[i].fill(request, first_seq + i as u64, request.signal, state.solicit);
        }
        for i in 0..count - 1 {
            chain[i].wr.next = &raw mut chain[i + 1].wr;
        }
        chain[count - 1].wr.next = ptr::null_mut();
        let first = chain.as_mut_ptr();
        // SAFETY: the list lies in `chain`. Each request names the slot of the place that it gets, or memory that its
        // resource keeps, which moves into the table below or lives through the call if the data is inline.
        let rc = unsafe { shared.queue_pair().post_send(&raw mut (*first).wr) };
        // All of them count as posted whatever the driver says, as in `SendState::post`.
        for (request, resource) in staged.drain(..) {
            match resource {
                Resource::Region(_) | Resource::Buffer(_) if !request.inline => {
                    state.table.push_holding(request.kind, request.signal, resource);
                }
                _ => state.table.push(request.kind, request.signal),
            }
        }
        if rc != 0 {
            return Err(state.refused(shared, rc, count as u64));
        }
        Ok(Ticket::at(state.table.next_seq()))
    }
}

const THERE: &str = "the room is there until the batch is dropped";

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        self.room().staged.clear();
        self.half.state.batch_room = self.room.take();
    }
}

impl fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").field("len", &self.len()).finish_non_exhaustive()
    }
}
