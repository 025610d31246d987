//! RDMA write and read: blocking, and posted.

use std::ops::Range;

use super::pending::Ticket;
use super::state::{Request, Resource};
use super::{SendHalf, SendState};
use crate::error::{Error, Opcode, Result};
use crate::mr::{Access, MemoryRegion};
use crate::remote::RemoteRegion;
use crate::sys::ibv_wr_opcode as Wr;
use crate::wait::Patience;

impl SendHalf {
    /// Writes bytes of a local region to the peer's memory (RDMA write). Returns when the peer's device
    /// acknowledged them; the peer's program is not told. An empty range does nothing.
    ///
    /// # Errors
    /// * [`Error::Misuse`] when a range does not lie in its region, or the local region belongs to another
    ///   protection domain; nothing is sent.
    /// * [`Error::TimedOut`] when a timeout is set: the operation goes on, the local region stays registered
    ///   until it ends, and its end is not told.
    /// * [`Error::Work`] when the peer refuses, and then the cause at every later call.
    #[inline]
    pub fn write(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        remote_offset: u64,
    ) -> Result<()> {
        self.one_sided(Transfer::write(self, local, range, remote, remote_offset, None)?)
    }

    /// [`write`](Self::write) that tells the peer: it uses up a receive there and gives it `imm` and the length (see
    /// [`RecvBuf::written`](super::super::RecvBuf::written)). The bytes are in place by then. With an empty range
    /// nothing is written and the remote region is not looked at.
    ///
    /// # Errors
    /// Those of [`write`](Self::write); also [`Error::Work`] on iWARP, which has no such operation.
    #[inline]
    pub fn write_imm(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        remote_offset: u64,
        imm: u32,
    ) -> Result<()> {
        self.one_sided(Transfer::write(self, local, range, remote, remote_offset, Some(imm))?)
    }

    /// Reads from the peer's memory into a local region (RDMA read), which must have
    /// [`Access::LOCAL_WRITE`]. Returns when the bytes are there. An empty range does nothing.
    ///
    /// # Errors
    /// * [`Error::Misuse`] when a range does not lie in its region, or the local region has not the right or
    ///   belongs to another protection domain; nothing is sent.
    /// * [`Error::TimedOut`] when a timeout is set: the operation goes on, and bytes may arrive until it ends.
    /// * [`Error::Work`] when the peer refuses, and then the cause at every later call.
    #[inline]
    pub fn read(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        remote_offset: u64,
    ) -> Result<()> {
        self.one_sided(Transfer::read(self, local, range, remote, remote_offset)?)
    }

    /// Posts an RDMA write and returns at once, so that many can be in flight; with `imm`, as
    /// [`write_imm`](Self::write_imm). The region stays registered until the operation is over. An empty range
    /// without an immediate value is over at once.
    ///
    /// What is at most [`inline_size`](Self::inline_size) long is copied into the request: it may be overwritten
    /// when this returns. Of longer ranges it is the contents at some time before the end that are sent.
    ///
    /// # Errors
    /// * [`Error::WouldBlock`] when the queue has no room, and nothing was posted: see
    ///   [`wait_any`](Self::wait_any).
    /// * [`Error::TooLong`] when it would not even fit into an empty queue (`send_depth` messages of the port).
    /// * [`Error::Misuse`] as [`write`](Self::write); the cause, once the connection is broken or closed.
    #[inline]
    pub fn post_write(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        remote_offset: u64,
        imm: Option<u32>,
    ) -> Result<Ticket> {
        self.post_transfer(Transfer::write(self, local, range, remote, remote_offset, imm)?)
    }

    /// Posts an RDMA read and returns at once, so that many can be in flight. Bytes may arrive in any order until the
    /// operation is over; the region stays registered until then.
    ///
    /// # Errors
    /// * [`Error::WouldBlock`] and [`Error::TooLong`] as [`post_write`](Self::post_write).
    /// * [`Error::Misuse`] as [`read`](Self::read); the cause, once the connection is broken or closed.
    #[inline]
    pub fn post_read(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        remote_offset: u64,
    ) -> Result<Ticket> {
        self.post_transfer(Transfer::read(self, local, range, remote, remote_offset)?)
    }

    #[inline(always)]
    fn one_sided(&mut self, transfer: Transfer<'_>) -> Result<()> {
        // Almost always it is one message, there is room, and nothing to be done before it can be posted.
        if transfer.len.wrapping_sub(1) < self.state.max_message && self.has_room() {
            let request = transfer.request(&self.state, 0, transfer.len, true);
            // SAFETY: as in `one_sided_slow`, with `owed`.
            if let Err(refused) = unsafe { self.state.post(&self.shared, request, || None) } {
                self.owe(transfer.local);
                return Err(refused);
            }
            let end = self.state.table.next_seq();
            // Nothing here panics.
            let looked = self.state.reap_batch(&self.shared);
            if looked.is_some() && self.state.table.is_over(end) {
                return Ok(());
            }
            return Owed { half: self, region: transfer.local, end }.wait_for(looked.is_none());
        }
        let Transfer { kind, op, local, start, len, remote, rkey, imm } = transfer;
        self.one_sided_slow(kind, op, local, start, len, remote, rkey, imm)
    }

    /// Keeps the region of the last request, which the driver refused.
    #[cold]
    #[inline(never)]
    fn owe(&mut self, region: &MemoryRegion) {
        let end = self.state.table.next_seq();
        drop(Owed { half: self, region, end });
    }

    #[inline(never)]
    #[expect(clippy::too_many_arguments, reason = "a structure would be written for the fast path, too")]
    fn one_sided_slow(
        &mut self,
        kind: Opcode,
        op: Wr::Type,
        local: &MemoryRegion,
        start: usize,
        len: usize,
        remote: u64,
        rkey: u32,
        imm: Option<u32>,
    ) -> Result<()> {
        let transfer = Transfer { kind, op, local, start, len, remote, rkey, imm };
        if transfer.is_nothing() {
            return self.alive();
        }
        let mut patience = Patience::from_timeout(self.timeout);
        let mut owed = Owed { half: self, region: transfer.local, end: 0 };
        let mut done = 0;
        // What is larger than a message of the port goes in several.
        loop {
            owed.half.make_room(&mut patience)?;
            let len = (transfer.len - done).min(owed.half.state.max_message);
            let request = transfer.request(&owed.half.state, done, len, true);
            // SAFETY: the range lies in the region, which is borrowed here, and which `owed` puts into the table
            // should this end before the operation; Rust code accesses its memory by copies that tolerate races.
            let posted = unsafe { owed.half.state.post(&owed.half.shared, request, || None) };
            owed.end = owed.half.state.table.next_seq();
            posted?;
            done += len;
            if done == transfer.len {
                return owed.wait(patience);
            }
        }
    }

    #[inline(always)]
    fn post_transfer(&mut self, transfer: Transfer<'_>) -> Result<Ticket> {
        if transfer.len.wrapping_sub(1) < self.state.max_message && self.has_room() {
            let request = transfer.request(&self.state, 0, transfer.len, self.state.tell_all);
            let inline = request.inline;
            let keep = || if inline { None } else { Some(Resource::Region(transfer.local.clone())) };
            // SAFETY: as in `post_transfer_slow`.
            unsafe { self.state.post(&self.shared, request, keep)? };
            return Ok(Ticket::at(self.state.table.next_seq()));
        }
        let Transfer { kind, op, local, start, len, remote, rkey, imm } = transfer;
        self.post_transfer_slow(kind, op, local, start, len, remote, rkey, imm)
    }

    #[inline(never)]
    #[expect(clippy::too_many_arguments, reason = "a structure would be written for the fast path, too")]
    fn post_transfer_slow(
        &mut self,
        kind: Opcode,
        op: Wr::Type,
        local: &MemoryRegion,
        start: usize,
        len: usize,
        remote: u64,
        rkey: u32,
        imm: Option<u32>,
    ) -> Result<Ticket> {
        let transfer = Transfer { kind, op, local, start, len, remote, rkey, imm };
        if transfer.is_nothing() {
            return self.alive().map(|()| Ticket::OVER);
        }
        self.want_room(transfer.len, transfer.len.div_ceil(self.state.max_message).max(1) as u64)?;
        let mut done = 0;
        loop {
            let len = (transfer.len - done).min(self.state.max_message);
            let request = transfer.request(&self.state, done, len, self.state.tell_all);
            let inline = request.inline;
            let keep = || if inline { None } else { Some(Resource::Region(transfer.local.clone())) };
            // SAFETY: the range lies in the region. Inline data is read before the call returns; else a handle of the
            // region stays in the table. Rust code accesses its memory by copies that tolerate races only.
            unsafe { self.state.post(&self.shared, request, keep)? };
            done += len;
            if done == transfer.len {
                return Ok(Ticket::at(self.state.table.next_seq()));
            }
        }
    }

    pub(super) fn want_room(&mut self, len: usize, count: u64) -> Result<()> {
        self.state.reap(&self.shared)?;
        self.alive()?;
        let limit = self.state.table.limit();
        if count > limit {
            return Err(Error::TooLong { len, limit: self.state.max_message.saturating_mul(limit as usize) });
        }
        if self.state.table.room() < count { Err(Error::WouldBlock) } else { Ok(()) }
    }

    pub(super) fn alive(&self) -> Result<()> {
        if self.shared.is_broken() { Err(self.shared.reason()) } else { Ok(()) }
    }
}

/// A checked one-sided operation.
#[derive(Clone, Copy)]
pub(super) struct Transfer<'a> {
    kind: Opcode,
    op: Wr::Type,
    pub(super) local: &'a MemoryRegion,
    start: usize,
    pub(super) len: usize,
    remote: u64,
    rkey: u32,
    imm: Option<u32>,
}

impl<'a> Transfer<'a> {
    #[inline(always)]
    pub(super) fn write(
        half: &SendHalf,
        local: &'a MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        remote_offset: u64,
        imm: Option<u32>,
    ) -> Result<Transfer<'a>> {
        let (start, len) = half.local_range(local, range)?;
        // What notifies and writes nothing needs no memory at the peer.
        let to = match (len, imm) {
            (0, Some(_)) => 0,
            _ => remote.locate(remote_offset, len as u64)?,
        };
        Ok(Transfer {
            kind: Opcode::Write,
            op: Wr::IBV_WR_RDMA_WRITE,
            local,
            start,
            len,
            remote: to,
            rkey: remote.rkey(),
            imm,
        })
    }

    #[inline(always)]
    pub(super) fn read(
        half: &SendHalf,
        local: &'a MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        remote_offset: u64,
    ) -> Result<Transfer<'a>> {
        if !local.access().contains(Access::LOCAL_WRITE) {
            return Err(unwritable());
        }
        if !half.state.reads {
            return Err(NO_READS);
        }
        let (start, len) = half.local_range(local, range)?;
        Ok(Transfer {
            kind: Opcode::Read,
            op: Wr::IBV_WR_RDMA_READ,
            local,
            start,
            len,
            remote: remote.locate(remote_offset, len as u64)?,
            rkey: remote.rkey(),
            imm: None,
        })
    }

    #[inline]
    pub(super) fn is_nothing(&self) -> bool {
        self.len == 0 && self.imm.is_none()
    }

    /// The request for `len` bytes after the first `done`. If these are the last ones, its end is told if `signal`, and the
    /// peer is told the immediate value.
    #[inline(always)]
    pub(super) fn request(&self, state: &SendState, done: usize, len: usize, signal: bool) -> Request {
        let last = done + len == self.len;
        let (op, imm) = match self.imm {
            Some(imm) if last => (Wr::IBV_WR_RDMA_WRITE_WITH_IMM, imm),
            _ => (self.op, 0),
        };
        Request {
            kind: self.kind,
            op,
            addr: self.local.addr(self.start + done),
            len,
            lkey: self.local.lkey(),
            remote: self.remote + done as u64,
            rkey: self.rkey,
            imm,
            operands: [0; 2],
            inline: len <= state.inline.min(self.local.inline_cap()) && self.kind == Opcode::Write,
            signal: signal && last,
        }
    }
}

impl SendHalf {
    #[inline(always)]
    pub(super) fn local_range(&self, local: &MemoryRegion, range: Range<usize>) -> Result<(usize, usize)> {
        if local.domain() != self.state.domain {
            return Err(foreign());
        }
        local.check_range(range).map(|range| (range.start, range.end - range.start))
    }
}

#[cold]
fn foreign() -> Error {
    Error::misuse("the local region belongs to another protection domain than the connection")
}

#[cold]
fn unwritable() -> Error {
    Error::misuse("the local region of an RDMA read must have local write access")
}

/// A queue pair without room for reads never ends one.
pub(super) const NO_READS: Error =
    Error::Unsupported("the connection was set up without RDMA reads and atomics (its initiator depth is 0)");

/// A blocking operation in flight on a borrowed region. However the call ends, by a timeout, an error or a panic, the
/// region goes into the table if the device may still use it.
struct Owed<'a> {
    half: &'a mut SendHalf,
    region: &'a MemoryRegion,
    /// One more than the sequence number of the last request posted, 0 for none.
    end: u64,
}

impl Owed<'_> {
    /// Waits for the end of the operation, after the first look, which may have left something to be done.
    #[inline(never)]
    fn wait_for(self, left: bool) -> Result<()> {
        if left {
            self.half.state.reap_rest(&self.half.shared)?;
        }
        let patience = Patience::from_timeout(self.half.timeout);
        self.wait(patience)
    }

    fn wait(self, mut patience: Patience) -> Result<()> {
        let half = &mut *self.half;
        let end = self.end;
        half.wait_until(&mut patience, "the end of an RDMA operation", |table| table.is_over(end))?;
        half.state.outcome(&half.shared, end)
    }
}

impl Drop for Owed<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.half.state.table.is_over(self.end) {
            self.half.state.table.hold(self.end - 1, Resource::Region(self.region.clone()));
        }
    }
}
