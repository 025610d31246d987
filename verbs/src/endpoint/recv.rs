//! The receiving half.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use super::options::EndpointOptions;
use super::shared::Shared;
use crate::cq::{Completion, Completions};
use crate::error::{CloseReason, Error, Opcode, Result, WorkError};
use crate::pool::Arena;
use crate::sys;
use crate::wait::{Patience, Wait, Waiter, check_timeout};

/// The half of an [`Endpoint`](super::Endpoint) that receives.
pub struct RecvHalf {
    /// Messages that were looked at and not taken.
    ready: VecDeque<Message>,
    batch: Box<Completions>,
    waiter: Waiter,
    spin: Duration,
    timeout: Option<Duration>,
    shared: Arc<Shared>,
}

/// A message in a slot that belongs to the half.
#[derive(Clone, Copy, Debug)]
struct Message {
    slot: u32,
    /// Bytes in the slot, or bytes that were written elsewhere.
    len: u32,
    /// The bits below and, if it has one, the immediate value in the upper half; in two registers with the rest.
    more: u64,
}

/// It has an immediate value.
const HAS_IMM: u64 = 1;
/// It is no message but tells of a write: the length is how much, and nothing is in the slot.
const WRITTEN: u64 = 2;

impl Message {
    #[inline]
    fn imm(self) -> Option<u32> {
        (self.more & HAS_IMM != 0).then_some((self.more >> 32) as u32)
    }

    /// Bytes in the slot.
    #[inline]
    fn in_slot(self) -> u32 {
        if self.more & WRITTEN != 0 { 0 } else { self.len }
    }

    /// Bytes that were written elsewhere.
    #[inline]
    fn written(self) -> Option<u32> {
        (self.more & WRITTEN != 0).then_some(self.len)
    }
}

/// That the peer sent an empty message, or wrote with an immediate value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notification {
    /// The immediate value, exactly as the peer gave it, if it gave one.
    pub imm: Option<u32>,
    /// How many bytes the peer wrote, as its device says. Of a write in several parts, this is the last one.
    pub len: u32,
}

const WHAT: &str = "a message";

impl RecvHalf {
    pub(super) fn new(shared: Arc<Shared>, options: &EndpointOptions) -> RecvHalf {
        RecvHalf {
            ready: VecDeque::with_capacity(options.recv_depth as usize),
            batch: Box::default(),
            waiter: Waiter::new(options.wait, options.spin),
            spin: options.spin,
            timeout: None,
            shared,
        }
    }

    /// Limits how long [`recv`](Self::recv) and [`recv_buf`](Self::recv_buf) wait; `None`, the default, does
    /// not.
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
        let solicited_only = self.waiter.solicited_only;
        self.waiter = Waiter::new(wait, self.spin);
        self.waiter.solicited_only = solicited_only;
    }

    /// Has only messages that the peer marked ([`SendHalf::set_solicited`](super::SendHalf::set_solicited)) end a sleep, or
    /// all of them, as at first. Others are received with the next look, so a receiver that waits for many messages
    /// sleeps once.
    pub fn set_solicited_only(&mut self, solicited_only: bool) {
        self.waiter.solicited_only = solicited_only;
    }

    /// Waits for a message and copies it into `buf`. Returns its length, which may be 0.
    ///
    /// # Errors
    /// * [`Error::Truncated`] when it is longer than `buf`; it is kept for the next call.
    /// * [`Error::TimedOut`] when a timeout is set; nothing is lost.
    /// * The cause, once the connection is broken or closed and all that arrived before is taken.
    #[inline]
    pub fn recv(&mut self, buf: &mut [u8]) -> Result<usize> {
        self.recv_within(buf, |half| Patience::from_timeout(half.timeout))
    }

    /// [`recv`](Self::recv) with its own timeout.
    ///
    /// # Errors
    /// Those of [`recv`](Self::recv), and [`Error::Misuse`] for a timeout of zero.
    pub fn recv_timeout(&mut self, buf: &mut [u8], timeout: Duration) -> Result<usize> {
        let patience = Patience::of(timeout)?;
        self.recv_within(buf, |_| patience)
    }

    /// [`recv`](Self::recv) without waiting.
    ///
    /// # Errors
    /// Those of [`recv`](Self::recv), and [`Error::WouldBlock`] when there is no message.
    pub fn try_recv(&mut self, buf: &mut [u8]) -> Result<usize> {
        self.recv_within(buf, |_| Patience::NONE)
    }

    /// Waits for a message and hands out the buffer it is in, without a copy. Dropping the buffer lets the next
    /// message into it: a program that keeps all `recv_depth` of them receives nothing more.
    ///
    /// # Errors
    /// Those of [`recv`](Self::recv), but for [`Error::Truncated`].
    #[inline]
    pub fn recv_buf(&mut self) -> Result<RecvBuf> {
        self.recv_buf_within(|half| Patience::from_timeout(half.timeout))
    }

    /// [`recv_buf`](Self::recv_buf) with its own timeout.
    ///
    /// # Errors
    /// Those of [`recv_buf`](Self::recv_buf), and [`Error::Misuse`] for a timeout of zero.
    pub fn recv_buf_timeout(&mut self, timeout: Duration) -> Result<RecvBuf> {
        let patience = Patience::of(timeout)?;
        self.recv_buf_within(|_| patience)
    }

    /// [`recv_buf`](Self::recv_buf) without waiting.
    ///
    /// # Errors
    /// Those of [`recv_buf`](Self::recv_buf), and [`Error::WouldBlock`] when there is no message.
    pub fn try_recv_buf(&mut self) -> Result<RecvBuf> {
        self.recv_buf_within(|_| Patience::NONE)
    }

    /// Waits for a notification: an empty message, or a write with an immediate value. For endpoints with the option
    /// [`notifications`](EndpointOptions::notifications), whose receives carry no buffer; the receive is posted again
    /// at once, so the peer can always have `recv_depth` notifications on the way that nobody took.
    ///
    /// # Errors
    /// * [`Error::Misuse`] without that option. (With it, that is what the other functions that receive return.)
    /// * [`Error::TimedOut`] when a timeout is set; nothing is lost.
    /// * The cause, once the connection is broken or closed and all that arrived before is taken. A message that is not
    ///   empty breaks it.
    #[inline]
    pub fn recv_notification(&mut self) -> Result<Notification> {
        self.notification_within(|half| Patience::from_timeout(half.timeout))
    }

    /// [`recv_notification`](Self::recv_notification) with its own timeout.
    ///
    /// # Errors
    /// Those of [`recv_notification`](Self::recv_notification), and [`Error::Misuse`] for a timeout of zero.
    pub fn recv_notification_timeout(&mut self, timeout: Duration) -> Result<Notification> {
        let patience = Patience::of(timeout)?;
        self.notification_within(|_| patience)
    }

    /// [`recv_notification`](Self::recv_notification) without waiting.
    ///
    /// # Errors
    /// Those of [`recv_notification`](Self::recv_notification), and [`Error::WouldBlock`] when there is none.
    pub fn try_recv_notification(&mut self) -> Result<Notification> {
        self.notification_within(|_| Patience::NONE)
    }

    #[inline]
    fn notification_within(&mut self, patience: impl FnOnce(&Self) -> Patience) -> Result<Notification> {
        if self.shared.slots().is_some() {
            return Err(Error::misuse("notifications are received with the option `notifications` only"));
        }
        let message = self.next(patience)?;
        self.shared.repost(message.slot);
        Ok(Notification { imm: message.imm(), len: message.len })
    }

    /// Prepares for sleeping in a poll loop of the program's own, on the descriptor of this half (`AsFd`) and on
    /// [`closed_fd`](Self::closed_fd): asks for an event with the next message, and looks once more. `true` says that
    /// there is no message: the descriptor becomes readable when one arrives. `false` says that there is one to be
    /// taken, or that the connection is over: do not sleep.
    ///
    /// Call it before each sleep. It also takes the event that made the descriptor readable.
    ///
    /// # Errors
    /// [`Error::Os`] and [`Error::Provider`] when the device or its driver fails, which ends the connection.
    pub fn arm(&mut self) -> Result<bool> {
        let armed = self.shared.queue_pair().recv_cq().rearm(self.waiter.solicited_only);
        self.shared.settle(armed)?;
        if !self.ready.is_empty() {
            return Ok(false);
        }
        match advance(&self.shared, &mut self.batch) {
            Ok(Some(message)) => self.ready.push_back(message),
            Ok(None) => return Ok(true),
            Err(e @ Error::Provider(_)) => return Err(e),
            // Told by the next call that receives.
            Err(_) => {}
        }
        Ok(false)
    }

    /// A descriptor that becomes readable, for good, when the connection ends: a poll loop watches it too, since the
    /// queue may have no receive posted that would tell.
    pub fn closed_fd(&self) -> BorrowedFd<'_> {
        self.shared.closed_fd()
    }

    /// The receive buffers.
    #[inline]
    fn slots(&self) -> Result<&Arena> {
        self.shared.slots().ok_or_else(without_buffers)
    }

    #[inline]
    fn recv_within(&mut self, buf: &mut [u8], patience: impl FnOnce(&Self) -> Patience) -> Result<usize> {
        self.slots()?;
        let message = self.next(patience)?;
        let len = message.in_slot() as usize;
        if len > buf.len() {
            self.ready.push_front(message);
            return Err(Error::Truncated { len, capacity: buf.len() });
        }
        let from = self.slots()?.slot(message.slot);
        // SAFETY: the slot is not posted and its index is in `message` alone; `len` is within it (checked in
        // `accept`); `buf` is exclusive and no part of the arena.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), buf.as_mut_ptr(), len) };
        self.shared.repost(message.slot);
        Ok(len)
    }

    #[inline]
    fn recv_buf_within(&mut self, patience: impl FnOnce(&Self) -> Patience) -> Result<RecvBuf> {
        self.slots()?;
        let message = self.next(patience)?;
        let (len, imm, written) = (message.in_slot(), message.imm(), message.written());
        Ok(RecvBuf { slot: message.slot, len, imm, written, shared: self.shared.clone() })
    }

    /// The next message, which is the caller's from then on.
    #[inline(always)]
    fn next(&mut self, patience: impl FnOnce(&Self) -> Patience) -> Result<Message> {
        if !self.ready.is_empty()
            && let Some(message) = self.ready.pop_front()
        {
            return Ok(message);
        }
        if let Some(message) = look(&self.shared, &mut self.batch) {
            return Ok(message);
        }
        match advance(&self.shared, &mut self.batch)? {
            Some(message) => Ok(message),
            None => self.wait(patience(self)),
        }
    }

    #[inline(never)]
    fn wait(&mut self, mut patience: Patience) -> Result<Message> {
        let (shared, batch) = (&*self.shared, &mut *self.batch);
        let (cq, closed) = (shared.queue_pair().recv_cq(), shared.closed_fd());
        let progress = || advance(shared, batch);
        shared.settle(self.waiter.wait(cq, closed, &mut patience, WHAT, progress))
    }

    /// Looks through all receive completions for a better cause than a flush, or than the peer's disconnect, which the
    /// sending half met.
    /// Messages found on the way are kept.
    #[cold]
    pub fn explain(&mut self, e: Error) -> Error {
        if !e.is_flush() && !matches!(e, Error::Closed(CloseReason::Peer)) {
            return e;
        }
        while let Ok(Some(message)) = advance(&self.shared, &mut self.batch) {
            self.ready.push_back(message);
        }
        self.shared.cause().unwrap_or(e)
    }
}

/// The next message, if the next completion is a good one; anything else is left to [`advance`].
#[inline(always)]
fn look(shared: &Shared, batch: &mut Completions) -> Option<Message> {
    if batch.is_empty() {
        shared.queue_pair().recv_cq().poll_fast(batch)?;
    }
    batch.next_if(|completion| if completion.is_success() { accept(shared, completion) } else { None })
}

/// The next message among the completions there are. Errors break the connection; what arrived before one comes
/// first, since completions come in order.
#[inline]
fn advance(shared: &Shared, batch: &mut Completions) -> Result<Option<Message>> {
    loop {
        for completion in &mut *batch {
            if completion.is_success() {
                match accept(shared, &completion) {
                    Some(message) => return Ok(Some(message)),
                    None => shared
                        .fail_by(Error::Provider("a receive completed that was not posted, or with a wrong length")),
                }
            } else {
                broke(shared, &completion);
            }
        }
        // In this order: what is set after the queue was empty cannot hide a message.
        let broken = shared.is_broken();
        if shared.queue_pair().recv_cq().poll(batch).inspect_err(|e| shared.fail_by(e.clone()))? == 0 {
            return if broken { Err(shared.reason()) } else { Ok(None) };
        }
    }
}

/// Checks what the device says of a message; its length was chosen by the peer.
#[inline]
fn accept(shared: &Shared, completion: &Completion) -> Option<Message> {
    let slot = shared.take_posted(completion.wr_id)?;
    let len = completion.byte_len;
    let written = completion.opcode == sys::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
    let imm = completion.imm.map_or(0, |imm| u64::from(imm) << 32 | HAS_IMM);
    let more = imm | if written { WRITTEN } else { 0 };
    (written || len as usize <= slot_size(shared)).then_some(Message { slot, len, more })
}

/// Bytes that fit into a receive.
#[inline]
fn slot_size(shared: &Shared) -> usize {
    shared.slots().map_or(0, Arena::size)
}

#[cold]
fn without_buffers() -> Error {
    Error::misuse("with the option `notifications` there are no buffers to receive into: use `recv_notification`")
}

#[cold]
fn broke(shared: &Shared, completion: &Completion) {
    shared.take_posted(completion.wr_id);
    let cause = Error::Work(WorkError {
        status: completion.status,
        opcode: Opcode::Recv,
        vendor: completion.vendor,
        buffer: Some(slot_size(shared)),
    });
    if cause.is_flush() && shared.cause().is_none() {
        // The operation that failed is a send, whose completion is in the other queue.
        shared.look_for_cause();
    }
    shared.fail_by(cause);
}

impl fmt::Debug for RecvHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvHalf")
            .field("queue_pair", self.shared.queue_pair())
            .field("ready", &self.ready.len())
            .field("cause", &self.shared.cause())
            .finish_non_exhaustive()
    }
}

/// The completion channel of the receive queue, for [`RecvHalf::arm`].
impl AsFd for RecvHalf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.queue_pair().recv_cq().event_fd().expect("an endpoint's queues have channels")
    }
}

/// A received message in the buffer it arrived in. When it is dropped, on whatever thread, the buffer goes
/// back to the device for another message. It keeps the queue pair alive.
pub struct RecvBuf {
    slot: u32,
    len: u32,
    imm: Option<u32>,
    written: Option<u32>,
    shared: Arc<Shared>,
}

impl RecvBuf {
    /// The immediate value that came with it, if one did, exactly as the peer gave it.
    pub fn imm(&self) -> Option<u32> {
        self.imm
    }

    /// How many bytes the peer wrote into its remote region, if this is no message but tells of a write with an
    /// immediate value ([`write_imm`](super::SendHalf::write_imm)). The buffer is empty then.
    pub fn written(&self) -> Option<u32> {
        self.written
    }
}

impl Deref for RecvBuf {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        let at = self.shared.slots().expect("a buffer was received, so there are buffers").slot(self.slot);
        // SAFETY: the slot is not posted and its index is in this handle alone, so nobody writes it; `len`
        // was checked against its size; the pages are initialised and live as long as `shared`.
        unsafe { std::slice::from_raw_parts(at.as_ptr(), self.len as usize) }
    }
}

impl Drop for RecvBuf {
    #[inline]
    fn drop(&mut self) {
        self.shared.repost(self.slot);
    }
}

impl fmt::Debug for RecvBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvBuf").field("len", &self.len).field("imm", &self.imm).finish_non_exhaustive()
    }
}
