//! The sending half.

mod atomic;
mod batch;
mod one_sided;
mod pending;
mod state;
mod window;

use std::fmt;
use std::io::IoSlice;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use super::options::EndpointOptions;
use super::shared::Shared;
use crate::error::{Error, Opcode, Result};
use crate::inflight::Table;
use crate::pool::{BufferPool, SendBuf};
use crate::sys::ibv_wr_opcode as Wr;
use crate::wait::{Patience, Wait, Waiter, check_timeout};
use state::{Request, Resource};

pub use batch::Batch;
pub use pending::Ticket;
pub(super) use state::SendState;

/// The half of an [`Endpoint`](super::Endpoint) that sends, writes and reads.
pub struct SendHalf {
    /// Taken when the half is dropped: the device may still use it.
    state: ManuallyDrop<SendState>,
    waiter: Waiter,
    spin: Duration,
    timeout: Option<Duration>,
    shared: Arc<Shared>,
}

impl SendHalf {
    pub(super) fn new(shared: Arc<Shared>, state: SendState, options: &EndpointOptions) -> SendHalf {
        SendHalf {
            state: ManuallyDrop::new(state),
            waiter: Waiter::new(options.wait, options.spin),
            spin: options.spin,
            timeout: None,
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
        self.timeout = timeout;
        Ok(())
    }

    /// Changes how this half waits; at first as the option `wait`.
    pub fn set_wait(&mut self, wait: Wait) {
        self.waiter = Waiter::new(wait, self.spin);
    }

    /// Has the messages and writes with an immediate value from now on marked as solicited, or not, which they are not
    /// at first: they wake a peer that sleeps for those only ([`RecvHalf::set_solicited_only`]).
    ///
    /// [`RecvHalf::set_solicited_only`]: super::RecvHalf::set_solicited_only
    pub fn set_solicited(&mut self, solicited: bool) {
        self.state.solicit = if solicited { state::SOLICITED } else { 0 };
    }

    /// The largest message that can be sent, in bytes.
    pub fn message_size(&self) -> usize {
        self.state.slots.size()
    }

    /// The largest message that travels in its request, as the device granted, in bytes.
    pub fn inline_size(&self) -> usize {
        self.state.inline
    }

    /// How many operations are posted and not known to be done.
    pub fn in_flight(&self) -> usize {
        self.state.table.len() as usize
    }

    /// Sends a copy of `data`, which may be empty. Returns when it is posted; waits while the queue is full.
    ///
    /// # Errors
    /// * [`Error::TooLong`] when it is larger than the option `message_size`.
    /// * [`Error::TimedOut`] when a timeout is set; nothing was sent then.
    /// * The cause, once the connection is broken or closed.
    #[inline]
    pub fn send(&mut self, data: &[u8]) -> Result<()> {
        self.send_within(data, None, Wish::Default)
    }

    /// [`send`](Self::send) with an immediate value, which the peer finds beside the message
    /// ([`RecvBuf::imm`](super::RecvBuf::imm)), exactly as given here.
    ///
    /// # Errors
    /// Those of [`send`](Self::send).
    #[inline]
    pub fn send_imm(&mut self, data: &[u8], imm: u32) -> Result<()> {
        self.send_within(data, Some(imm), Wish::Default)
    }

    /// [`send_imm`](Self::send_imm) without waiting.
    ///
    /// # Errors
    /// Those of [`send`](Self::send), and [`Error::WouldBlock`] when the queue is full.
    pub fn try_send_imm(&mut self, data: &[u8], imm: u32) -> Result<()> {
        self.send_within(data, Some(imm), Wish::Own(Patience::NONE))
    }

    /// [`send`](Self::send) with its own timeout.
    ///
    /// # Errors
    /// Those of [`send`](Self::send), and [`Error::Misuse`] for a timeout of zero.
    pub fn send_timeout(&mut self, data: &[u8], timeout: Duration) -> Result<()> {
        let patience = Patience::of(timeout)?;
        self.send_within(data, None, Wish::Own(patience))
    }

    /// [`send`](Self::send) without waiting.
    ///
    /// # Errors
    /// Those of [`send`](Self::send), and [`Error::WouldBlock`] when the queue is full.
    pub fn try_send(&mut self, data: &[u8]) -> Result<()> {
        self.send_within(data, None, Wish::Own(Patience::NONE))
    }

    #[inline]
    fn send_within(&mut self, data: &[u8], imm: Option<u32>, patience: Wish) -> Result<()> {
        let len = data.len();
        if len > self.state.slots.size() {
            return Err(Error::TooLong { len, limit: self.state.slots.size() });
        }
        if !self.has_room() {
            self.make_room_for(patience)?;
        }
        let inline = len <= self.state.inline;
        let from = if inline {
            data.as_ptr()
        } else {
            let slot = self.state.slots.slot(self.state.table.next_place()).as_ptr();
            // SAFETY: the slot holds `len` bytes; its place in the table is free, so no device reads it, and
            // nobody else has it.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), slot, len) };
            slot.cast_const()
        };
        let request = message(from, len, self.state.slots.lkey(), imm, inline, false);
        // SAFETY: inline data is read before the call returns; else it is the slot of the next place.
        unsafe { self.state.post(&self.shared, request, || None) }
    }

    /// Sends the pieces as one message, copied one after the other. Waits while the queue is full.
    ///
    /// # Errors
    /// Those of [`send`](Self::send).
    pub fn send_vectored(&mut self, pieces: &[IoSlice<'_>]) -> Result<()> {
        let limit = self.state.slots.size();
        let len = pieces.iter().fold(0, |sum: usize, piece| sum.saturating_add(piece.len()));
        if len > limit {
            return Err(Error::TooLong { len, limit });
        }
        if !self.has_room() {
            self.make_room_for(Wish::Default)?;
        }
        let slot = self.state.slots.slot(self.state.table.next_place()).as_ptr();
        let mut at = 0;
        for piece in pieces {
            // SAFETY: the slot holds `len` bytes, the sum of all pieces; nobody else has it, as in `send`.
            unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), slot.add(at), piece.len()) };
            at += piece.len();
        }
        let request = message(slot.cast_const(), len, self.state.slots.lkey(), None, len <= self.state.inline, false);
        // SAFETY: it is the slot of the next place.
        unsafe { self.state.post(&self.shared, request, || None) }
    }

    /// A registered buffer to fill and [`send_buf`](Self::send_buf), of the size of a message. Waits for one that is
    /// being sent when all are in use. The first call registers them.
    ///
    /// # Errors
    /// * [`Error::Misuse`] when the program itself holds all of them.
    /// * [`Error::TimedOut`] when a timeout is set; [`Error::Os`] when they cannot be registered.
    /// * The cause, once the connection is broken or closed.
    pub fn alloc(&mut self) -> Result<SendBuf> {
        if self.state.buffers.is_none() {
            let (count, size) = (self.state.buffer_count, self.state.slots.size());
            let pd = self.shared.queue_pair().protection_domain();
            self.state.buffers = Some(BufferPool::new(pd, count, size)?);
        }
        match self.state.buffers.as_ref().and_then(BufferPool::alloc) {
            Some(buf) => Ok(buf),
            None => self.alloc_slow(),
        }
    }

    #[inline(never)]
    fn alloc_slow(&mut self) -> Result<SendBuf> {
        let mut patience = Patience::from_timeout(self.timeout);
        loop {
            self.state.reap(&self.shared)?;
            if let Some(buf) = self.state.buffers.as_ref().and_then(BufferPool::alloc) {
                return Ok(buf);
            }
            if self.shared.is_broken() {
                return Err(self.shared.reason());
            }
            if self.state.table.is_empty() {
                return Err(Error::misuse(format!(
                    "all {} send buffers are held by the program: send or drop one, or raise the option send_buffers",
                    self.state.buffer_count
                )));
            }
            // Buffers share completions like all messages.
            if !self.state.table.awaits_completion() {
                self.post_marker(&mut patience)?;
            }
            let before = self.state.table.len();
            self.wait_until(&mut patience, "a free send buffer", |table| table.len() < before)?;
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
        self.send_buf_within(buf, Wish::Default)
    }

    /// [`send_buf`](Self::send_buf) without waiting.
    ///
    /// # Errors
    /// Those of [`send_buf`](Self::send_buf), and [`Error::WouldBlock`] when the queue is full.
    pub fn try_send_buf(&mut self, buf: SendBuf) -> Result<(), (Error, SendBuf)> {
        self.send_buf_within(buf, Wish::Own(Patience::NONE))
    }

    #[inline]
    fn send_buf_within(&mut self, buf: SendBuf, patience: Wish) -> Result<(), (Error, SendBuf)> {
        let len = buf.len();
        if buf.domain() != self.state.domain {
            let why = "the buffer belongs to another protection domain than the connection";
            return Err((Error::misuse(why), buf));
        }
        if len > self.state.max_message {
            let limit = self.state.max_message;
            return Err((Error::TooLong { len, limit }, buf));
        }
        if !self.has_room()
            && let Err(e) = self.make_room_for(patience)
        {
            return Err((e, buf));
        }
        let inline = len <= self.state.inline;
        let request = message(buf.addr().as_ptr(), len, buf.lkey(), None, inline, false);
        let mut buf = Some(buf);
        // SAFETY: inline data is read before the call returns; else the buffer moves into the table, where
        // nobody can reach it.
        let posted = unsafe {
            self.state.post(&self.shared, request, || if inline { None } else { buf.take().map(Resource::Buffer) })
        };
        // What the driver refused may be with the device all the same, so the buffer stays in the table.
        posted.map_err(|e| (e, buf.unwrap_or_else(SendBuf::empty)))
    }

    /// Refuses RDMA reads and atomics from now on: the connection was set up with an initiator depth of 0.
    #[doc(hidden)]
    pub fn forbid_reads(&mut self) {
        self.state.reads = false;
    }

    /// Waits until everything posted is done: messages are in the peer's receive buffers then.
    ///
    /// # Errors
    /// * [`Error::TimedOut`] when a timeout is set.
    /// * The cause, if something posted was not done.
    pub fn flush(&mut self) -> Result<()> {
        self.flush_within(Patience::from_timeout(self.timeout))
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
            self.post_marker(&mut patience)?;
        }
        self.wait_until(&mut patience, "sends to be done", Table::is_empty)?;
        self.state.outcome(&self.shared, u64::MAX)
    }

    /// Posts an empty RDMA write whose completion tells the end of all that was posted before it.
    fn post_marker(&mut self, patience: &mut Patience) -> Result<()> {
        self.make_room(patience)?;
        let nothing = Request {
            kind: Opcode::Flush,
            op: Wr::IBV_WR_RDMA_WRITE,
            ..message(std::ptr::null(), 0, 0, None, false, true)
        };
        // SAFETY: it names no memory.
        unsafe { self.state.post(&self.shared, nothing, || None) }
    }

    /// Whether a request can be posted without further ado.
    #[inline]
    fn has_room(&self) -> bool {
        !self.shared.is_broken() && !self.state.table.is_full()
    }

    #[cold]
    #[inline(never)]
    fn make_room_for(&mut self, wish: Wish) -> Result<()> {
        let mut patience = match wish {
            Wish::Default => Patience::from_timeout(self.timeout),
            Wish::Own(patience) => patience,
        };
        self.make_room(&mut patience)
    }

    #[inline(never)]
    fn make_room(&mut self, patience: &mut Patience) -> Result<()> {
        if self.shared.is_broken() {
            // Takes note of flushed operations, so that their resources come back.
            self.state.reap(&self.shared)?;
            return Err(self.shared.reason());
        }
        if !self.state.table.is_full() {
            return Ok(());
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
        let (shared, state) = (&*self.shared, &mut *self.state);
        let mut progress = || {
            let broken = shared.is_broken();
            state.reap(shared)?;
            match (done(&state.table), broken) {
                (true, _) => Ok(Some(())),
                (false, true) => Err(shared.reason()),
                (false, false) => Ok(None),
            }
        };
        if progress()?.is_some() {
            return Ok(());
        }
        let (cq, closed) = (shared.queue_pair().send_cq(), shared.closed_fd());
        shared.settle(self.waiter.wait(cq, closed, patience, what, progress))
    }
}

/// How long a call may wait.
enum Wish {
    /// As the half is set.
    Default,
    Own(Patience),
}

/// The request to send a message.
#[inline(always)]
fn message(from: *const u8, len: usize, lkey: u32, imm: Option<u32>, inline: bool, signal: bool) -> Request {
    Request {
        kind: Opcode::Send,
        op: if imm.is_some() { Wr::IBV_WR_SEND_WITH_IMM } else { Wr::IBV_WR_SEND },
        addr: from.expose_provenance() as u64,
        len,
        lkey,
        remote: 0,
        rkey: 0,
        imm: imm.unwrap_or(0),
        operands: [0; 2],
        inline,
        signal,
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
