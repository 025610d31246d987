//! The sending half.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;

use super::options::EndpointOptions;
use super::shared::{Shared, send_error};
use crate::cq::{Completion, Completions};
use crate::error::{Error, Opcode, OsError, Result};
use crate::inflight::{self, Bogus, Table};
use crate::mr::{Access, MemoryRegion, RemoteRegion};
use crate::pool::{Arena, BufferPool, SendBuf};
use crate::sys::{self, ibv_wr_opcode as Wr};
use crate::wait::{Patience, Waiter, check_timeout};

/// The half of an [`Endpoint`](super::Endpoint) that sends, writes and reads.
pub struct SendHalf {
    /// Taken when the half is dropped: the device may still use it.
    state: ManuallyDrop<SendState>,
    shared: Arc<Shared>,
}

/// What only the sending half touches. What the device may use (`table`, `slots`) outlives the queue pair.
pub(super) struct SendState {
    table: Table<Resource>,
    /// The slot of a copied message is its place in the table.
    slots: Arena,
    /// The first operation that failed: it and all later ones were not done.
    failed_from: Option<u64>,
    batch: Box<Completions>,
    waiter: Waiter,
    timeout: Option<Duration>,
    signal_interval: u64,
    inline: usize,
    max_message: usize,
    buffers: Option<BufferPool>,
    buffer_count: u32,
}

/// What an operation uses until it is done.
#[derive(Debug, Default)]
enum Resource {
    /// Nothing, or the slot of its place in the table.
    #[default]
    None,
    /// Returned to its pool when done.
    Buffer(#[expect(dead_code, reason = "held, not read")] SendBuf),
    /// Kept registered until done.
    Region(#[expect(dead_code, reason = "held, not read")] MemoryRegion),
}

/// The memory of one request, with its flags.
struct Piece {
    addr: u64,
    len: usize,
    lkey: u32,
    flags: u32,
}

impl Piece {
    const EMPTY: Piece = Piece {
        addr: 0,
        len: 0,
        lkey: 0,
        flags: 0,
    };
}

const INLINE: u32 = sys::ibv_send_flags::IBV_SEND_INLINE.0;
const SIGNALED: u32 = sys::ibv_send_flags::IBV_SEND_SIGNALED.0;

impl SendState {
    pub(super) fn new(
        options: &EndpointOptions,
        slots: Arena,
        inline: u32,
        max_message: usize,
    ) -> SendState {
        let table = Table::new(options.send_depth);
        assert!(
            slots.count() >= table.places(),
            "a slot for each place in the table"
        );
        SendState {
            table,
            slots,
            failed_from: None,
            batch: Box::default(),
            waiter: Waiter::new(options.wait, options.spin),
            timeout: None,
            signal_interval: options.signal_interval(),
            inline: inline as usize,
            max_message,
            buffers: None,
            buffer_count: options.send_buffers,
        }
    }

    /// How many slots it needs.
    pub(super) fn places(send_depth: u32) -> u32 {
        send_depth.next_power_of_two()
    }

    /// Takes note of all completions there are.
    #[inline]
    fn reap(&mut self, shared: &Shared) -> Result<()> {
        if shared.is_broken() {
            self.reap_broken(shared, Vec::new());
            return Ok(());
        }
        loop {
            let n = shared
                .queue_pair()
                .send_cq()
                .poll(&mut self.batch)
                .inspect_err(|e| shared.fail_by(e.clone()))?;
            while let Some(completion) = self.batch.next() {
                if !completion.is_success() {
                    let mut seen = vec![completion];
                    seen.extend(&mut *self.batch);
                    self.reap_broken(shared, seen);
                    return Ok(());
                }
                if self.table.complete(completion.wr_id, false).is_err() {
                    shared.fail_by(Error::Provider("a send completed that was not outstanding"));
                }
            }
            if n == 0 {
                return Ok(());
            }
        }
    }

    /// [`reap`](Self::reap) when something failed: the receive half may have taken some of the completions.
    #[cold]
    fn reap_broken(&mut self, shared: &Shared, seen: Vec<Completion>) {
        let mut flush = None;
        for completion in shared.take_sends(seen) {
            let failed = !completion.is_success();
            match self.table.complete(completion.wr_id, failed) {
                Ok(seq) if failed => {
                    self.failed_from.get_or_insert(seq);
                    let cause = send_error(&completion);
                    if cause.is_flush() {
                        flush.get_or_insert(cause);
                    } else {
                        shared.fail_by(cause);
                    }
                }
                Ok(_) => {}
                // Something newer was seen before, by the other half or by us.
                Err(Bogus::Unknown) => {}
                Err(Bogus::Mismatch) => {
                    shared.fail_by(Error::Provider(
                        "a send completed as something else than it was",
                    ));
                }
            }
        }
        if let Some(flush) = flush {
            shared.fail_by(flush);
        }
    }
}

impl SendHalf {
    pub(super) fn new(shared: Arc<Shared>, state: SendState) -> SendHalf {
        SendHalf {
            state: ManuallyDrop::new(state),
            shared,
        }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Limits how long the calls without a timeout of their own wait; `None`, the default, does not.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a timeout of zero.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> Result<()> {
        check_timeout(timeout)?;
        self.state.timeout = timeout;
        Ok(())
    }

    /// The largest message that can be sent, in bytes.
    pub fn message_size(&self) -> usize {
        self.state.slots.size()
    }

    /// The largest message that travels in its request, as the device granted, in bytes.
    pub fn inline_size(&self) -> usize {
        self.state.inline
    }

    /// Sends a copy of `data`, which may be empty. Returns when it is posted; waits while the queue is full.
    ///
    /// # Errors
    /// * [`Error::TooLong`] when it is larger than the option `message_size`.
    /// * [`Error::TimedOut`] when a timeout is set; nothing was sent then.
    /// * The cause, once the connection is broken or closed.
    #[inline]
    pub fn send(&mut self, data: &[u8]) -> Result<()> {
        self.send_within(data, Patience::from_timeout(self.state.timeout))
    }

    /// [`send`](Self::send) with its own timeout.
    ///
    /// # Errors
    /// Those of [`send`](Self::send), and [`Error::Misuse`] for a timeout of zero.
    pub fn send_timeout(&mut self, data: &[u8], timeout: Duration) -> Result<()> {
        self.send_within(data, Patience::of(timeout)?)
    }

    /// [`send`](Self::send) without waiting.
    ///
    /// # Errors
    /// Those of [`send`](Self::send), and [`Error::WouldBlock`] when the queue is full.
    pub fn try_send(&mut self, data: &[u8]) -> Result<()> {
        self.send_within(data, Patience::NONE)
    }

    #[inline]
    fn send_within(&mut self, data: &[u8], mut patience: Patience) -> Result<()> {
        let len = data.len();
        if len > self.state.slots.size() {
            return Err(Error::TooLong {
                len,
                limit: self.state.slots.size(),
            });
        }
        self.make_room(&mut patience)?;
        let piece = if len <= self.state.inline {
            Piece {
                addr: data.as_ptr().expose_provenance() as u64,
                len,
                lkey: 0,
                flags: INLINE,
            }
        } else {
            let slot = self.state.slots.slot(self.state.table.next_place());
            // SAFETY: the slot holds `len` bytes; its place in the table is free, so no device reads it and
            // nobody else has it.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), slot.as_ptr(), len) };
            let addr = slot.as_ptr().expose_provenance() as u64;
            Piece {
                addr,
                len,
                lkey: self.state.slots.lkey(),
                flags: 0,
            }
        };
        // SAFETY: inline data is read before the call returns; a slot stays until its place is free again.
        let signalled = unsafe { self.post(Opcode::Send, Wr::IBV_WR_SEND, piece, (0, 0), false)? };
        self.state
            .table
            .push(Opcode::Send, signalled, Resource::None);
        Ok(())
    }

    /// A registered buffer to fill and [`send_buf`](Self::send_buf), of the size of a message. Waits for one that is
    /// being sent when all are in use. The first call registers them.
    ///
    /// # Errors
    /// * [`Error::Misuse`] when the program itself holds all of them.
    /// * [`Error::TimedOut`] when a timeout is set; [`Error::Os`] when they cannot be registered.
    /// * The cause, once the connection is broken or closed.
    pub fn alloc(&mut self) -> Result<SendBuf> {
        let pool = match &self.state.buffers {
            Some(pool) => pool,
            None => {
                let (count, size) = (self.state.buffer_count, self.state.slots.size());
                let pool =
                    BufferPool::new(self.shared.queue_pair().protection_domain(), count, size)?;
                self.state.buffers.insert(pool)
            }
        };
        if let Some(buf) = pool.alloc() {
            return Ok(buf);
        }
        let pool = pool.clone();
        let mut patience = Patience::from_timeout(self.state.timeout);
        loop {
            self.state.reap(&self.shared)?;
            if let Some(buf) = pool.alloc() {
                return Ok(buf);
            }
            if self.shared.is_broken() {
                return Err(self.shared.reason());
            }
            if !self.state.table.awaits_completion() {
                return Err(Error::misuse(format!(
                    "all {} send buffers are held by the program: send or drop one, or raise the option send_buffers",
                    pool.count()
                )));
            }
            let before = self.state.table.len();
            self.wait_until(&mut patience, "a free send buffer", |table| {
                table.len() < before
            })?;
        }
    }

    /// Sends the contents of `buf` without a copy. Returns when it is posted; the buffer returns to its pool
    /// when the device is done with it.
    ///
    /// # Errors
    /// Those of [`send`](Self::send), and [`Error::Misuse`] for a buffer of another protection domain; the buffer
    /// comes back with the error.
    #[inline]
    pub fn send_buf(&mut self, buf: SendBuf) -> Result<(), (Error, SendBuf)> {
        self.send_buf_within(buf, Patience::from_timeout(self.state.timeout))
    }

    /// [`send_buf`](Self::send_buf) without waiting.
    ///
    /// # Errors
    /// Those of [`send_buf`](Self::send_buf), and [`Error::WouldBlock`] when the queue is full.
    pub fn try_send_buf(&mut self, buf: SendBuf) -> Result<(), (Error, SendBuf)> {
        self.send_buf_within(buf, Patience::NONE)
    }

    #[inline]
    fn send_buf_within(
        &mut self,
        buf: SendBuf,
        mut patience: Patience,
    ) -> Result<(), (Error, SendBuf)> {
        let len = buf.len();
        if !buf
            .pd()
            .same_as(self.shared.queue_pair().protection_domain())
        {
            return Err((
                Error::misuse(
                    "the buffer belongs to another protection domain than the connection",
                ),
                buf,
            ));
        }
        if len > self.state.max_message {
            return Err((
                Error::TooLong {
                    len,
                    limit: self.state.max_message,
                },
                buf,
            ));
        }
        if let Err(e) = self.make_room(&mut patience) {
            return Err((e, buf));
        }
        let inline = len <= self.state.inline;
        let flags = if inline { INLINE } else { 0 };
        let piece = Piece {
            addr: buf.addr().as_ptr().expose_provenance() as u64,
            len,
            lkey: buf.lkey(),
            flags,
        };
        // SAFETY: inline data is read before the call returns; otherwise the buffer stays in the table, where nobody
        // can reach it, until the operation is done.
        match unsafe { self.post(Opcode::Send, Wr::IBV_WR_SEND, piece, (0, 0), !inline) } {
            Ok(signalled) => {
                let resource = if inline {
                    Resource::None
                } else {
                    Resource::Buffer(buf)
                };
                self.state.table.push(Opcode::Send, signalled, resource);
                Ok(())
            }
            Err(e) => Err((e, buf)),
        }
    }

    /// Writes bytes of a local region to the peer's memory (RDMA write). Returns when the peer's device
    /// acknowledged them; the peer's program is not told. An empty range does nothing.
    ///
    /// # Errors
    /// * [`Error::Misuse`] when a range does not lie in its region, or the local region belongs to another
    ///   protection domain; nothing is sent.
    /// * [`Error::TimedOut`] when a timeout is set: the operation goes on, the local region stays registered
    ///   until it ends, and its end is not told.
    /// * [`Error::Work`] when the peer refuses, and then the cause at every later call.
    pub fn write(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        remote_offset: u64,
    ) -> Result<()> {
        self.one_sided(Opcode::Write, local, range, remote, remote_offset)
    }

    /// Reads from the peer's memory into a local region (RDMA read), which must have
    /// [`Access::LOCAL_WRITE`]. Returns when the bytes are there. An empty range does nothing.
    ///
    /// # Errors
    /// * [`Error::Misuse`] when a range does not lie in its region, or the local region has not the right or
    ///   belongs to another protection domain; nothing is sent.
    /// * [`Error::TimedOut`] when a timeout is set: the operation goes on, and bytes may arrive until it ends.
    /// * [`Error::Work`] when the peer refuses, and then the cause at every later call.
    pub fn read(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        remote_offset: u64,
    ) -> Result<()> {
        if !local.access().contains(Access::LOCAL_WRITE) {
            return Err(Error::misuse(
                "the local region of an RDMA read must have local write access",
            ));
        }
        self.one_sided(Opcode::Read, local, range, remote, remote_offset)
    }

    fn one_sided(
        &mut self,
        kind: Opcode,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        remote_offset: u64,
    ) -> Result<()> {
        if !local
            .protection_domain()
            .same_as(self.shared.queue_pair().protection_domain())
        {
            return Err(Error::misuse(
                "the local region belongs to another protection domain than the connection",
            ));
        }
        let range = local.check_range(range)?;
        let to = remote.locate(remote_offset, range.len() as u64)?;
        let op = if kind == Opcode::Read {
            Wr::IBV_WR_RDMA_READ
        } else {
            Wr::IBV_WR_RDMA_WRITE
        };
        let mut patience = Patience::from_timeout(self.state.timeout);
        let mut done = 0;
        // What is larger than a message of the port goes in several.
        while done < range.len() {
            self.make_room(&mut patience)?;
            let len = (range.len() - done).min(self.state.max_message);
            let last = done + len == range.len();
            let piece = Piece {
                addr: local.addr(range.start + done),
                len,
                lkey: local.lkey(),
                flags: 0,
            };
            // SAFETY: the range lies in the region, a handle of which stays in the table until the operation
            // is done; Rust code accesses the region by racing copies only.
            let signalled =
                unsafe { self.post(kind, op, piece, (to + done as u64, remote.rkey()), last)? };
            self.state
                .table
                .push(kind, signalled, Resource::Region(local.clone()));
            done += len;
        }
        if range.is_empty() {
            return if self.shared.is_broken() {
                Err(self.shared.reason())
            } else {
                Ok(())
            };
        }
        let last = self.state.table.next_seq() - 1;
        self.wait_until(&mut patience, "the end of an RDMA operation", |table| {
            table.is_done(last)
        })?;
        self.outcome(last)
    }

    /// Waits until everything posted is done: messages are in the peer's receive buffers then.
    ///
    /// # Errors
    /// * [`Error::TimedOut`] when a timeout is set.
    /// * The cause, if something posted was not done.
    pub fn flush(&mut self) -> Result<()> {
        self.flush_within(Patience::from_timeout(self.state.timeout))
    }

    /// [`flush`](Self::flush) with its own timeout.
    ///
    /// # Errors
    /// Those of [`flush`](Self::flush), and [`Error::Misuse`] for a timeout of zero.
    pub fn flush_timeout(&mut self, timeout: Duration) -> Result<()> {
        self.flush_within(Patience::of(timeout)?)
    }

    fn flush_within(&mut self, mut patience: Patience) -> Result<()> {
        self.state.reap(&self.shared)?;
        if self.state.table.unsignalled_tail() > 0 {
            self.make_room(&mut patience)?;
            // SAFETY: it names no memory.
            unsafe {
                self.post(
                    Opcode::Flush,
                    Wr::IBV_WR_RDMA_WRITE,
                    Piece::EMPTY,
                    (0, 0),
                    true,
                )?
            };
            self.state.table.push(Opcode::Flush, true, Resource::None);
        }
        self.wait_until(&mut patience, "sends to be done", Table::is_empty)?;
        self.outcome(u64::MAX)
    }

    /// How many operations are posted and not known to be done.
    pub fn in_flight(&self) -> usize {
        self.state.table.len() as usize
    }

    /// `Ok` when this operation and all before it were done, which is known to be over.
    fn outcome(&self, seq: u64) -> Result<()> {
        match self.state.failed_from {
            Some(failed) if failed <= seq => Err(self.shared.reason()),
            _ => Ok(()),
        }
    }

    #[inline]
    fn make_room(&mut self, patience: &mut Patience) -> Result<()> {
        if self.shared.is_broken() || self.state.table.is_full() {
            self.make_room_slow(patience)
        } else {
            Ok(())
        }
    }

    #[inline(never)]
    fn make_room_slow(&mut self, patience: &mut Patience) -> Result<()> {
        if self.shared.is_broken() {
            // Takes note of flushed operations, so that their resources come back.
            self.state.reap(&self.shared)?;
            return Err(self.shared.reason());
        }
        self.wait_until(patience, "room in the send queue", |table| !table.is_full())
    }

    /// Reaps until `done`, waiting in between.
    fn wait_until(
        &mut self,
        patience: &mut Patience,
        what: &'static str,
        done: impl Fn(&Table<Resource>) -> bool,
    ) -> Result<()> {
        let shared = &*self.shared;
        let progress = |state: &mut SendState| {
            let broken = shared.is_broken();
            state.reap(shared)?;
            match (done(&state.table), broken) {
                (true, _) => Ok(Some(())),
                (false, true) => Err(shared.reason()),
                (false, false) => Ok(None),
            }
        };
        if progress(&mut self.state)?.is_some() {
            return Ok(());
        }
        // Its own place, since `progress` needs the rest.
        let idle = Waiter::new(crate::wait::Wait::Sleep, Duration::ZERO);
        let mut waiter = std::mem::replace(&mut self.state.waiter, idle);
        let state = &mut *self.state;
        let result = waiter.wait(
            shared.queue_pair().send_cq(),
            shared.closed_fd(),
            patience,
            what,
            || progress(state),
        );
        self.state.waiter = waiter;
        result
    }

    /// Posts a request; there must be room. Returns whether its completion will be told. The caller enters it
    /// into the table.
    ///
    /// # Safety
    /// The memory of `piece` is registered, and is kept and left alone until the operation is done.
    #[inline]
    unsafe fn post(
        &mut self,
        kind: Opcode,
        op: Wr::Type,
        piece: Piece,
        (remote_addr, rkey): (u64, u32),
        signal: bool,
    ) -> Result<bool> {
        let table = &self.state.table;
        let signalled = signal || table.unsignalled_tail() + 1 >= self.state.signal_interval;
        let mut sge = sys::ibv_sge {
            addr: piece.addr,
            length: piece.len as u32,
            lkey: piece.lkey,
        };
        let mut wr = sys::zeroed_send_wr();
        wr.wr_id = inflight::wr_id(table.next_seq(), kind);
        wr.sg_list = &raw mut sge;
        // A length of 0 in an element means 2^31 to some devices.
        wr.num_sge = i32::from(piece.len != 0);
        wr.opcode = op;
        wr.send_flags = piece.flags | if signalled { SIGNALED } else { 0 };
        wr.wr.rdma = sys::rdma_t { remote_addr, rkey };
        // SAFETY: as the caller says; `wr` and `sge` live through the call.
        let rc = unsafe { self.shared.queue_pair().post_send(&mut wr) };
        if rc == 0 {
            Ok(signalled)
        } else {
            Err(self.refused(rc))
        }
    }

    #[cold]
    fn refused(&self, rc: i32) -> Error {
        if self.shared.is_broken() {
            return self.shared.reason();
        }
        OsError::new("ibv_post_send", Errno::from_raw(rc.wrapping_abs())).into()
    }
}

impl Drop for SendHalf {
    fn drop(&mut self) {
        // SAFETY: taken once, here; not used afterwards.
        let state = unsafe { ManuallyDrop::take(&mut self.state) };
        self.shared.park(state);
    }
}

impl fmt::Debug for SendHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendHalf")
            .field("queue_pair", self.shared.queue_pair())
            .field("in_flight", &self.in_flight())
            .field("cause", &self.shared.cause())
            .finish_non_exhaustive()
    }
}
