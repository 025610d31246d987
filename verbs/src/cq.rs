//! Completion queues and their channels.

use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::device::Context;
use crate::error::{Error, LimitError, OsError, Result, WorkStatus};
use crate::sys;

/// A file descriptor that becomes readable when an armed completion queue gets a completion. Not blocking.
pub struct CompletionChannel {
    raw: NonNull<sys::ibv_comp_channel>,
    // After the channel.
    context: Context,
}

// SAFETY: the C object may be used from any thread; its fields are constant for us.
unsafe impl Send for CompletionChannel {}
// SAFETY: as above.
unsafe impl Sync for CompletionChannel {}

impl CompletionChannel {
    /// Opens a channel (`ibv_create_comp_channel`) and makes it non-blocking.
    ///
    /// # Errors
    /// [`Error::Os`]: `EMFILE` when the process has too many files open.
    #[doc(alias = "ibv_create_comp_channel")]
    pub fn new(context: &Context) -> Result<CompletionChannel> {
        // SAFETY: the context is alive.
        let raw = unsafe { sys::create_comp_channel(context.raw()) }
            .map_err(|errno| OsError::new("ibv_create_comp_channel", errno))?;
        let channel = CompletionChannel { raw, context: context.clone() };
        let set = fcntl(&channel, FcntlArg::F_GETFL)
            .and_then(|flags| fcntl(&channel, FcntlArg::F_SETFL(OFlag::from_bits_retain(flags) | OFlag::O_NONBLOCK)));
        set.map_err(|errno| OsError::new("fcntl(O_NONBLOCK)", errno))?;
        Ok(channel)
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel owns the descriptor and lives as long as the borrow.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).fd) }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: made by us, destroyed once; the queue that used it was destroyed before.
        if let Err(errno) = unsafe { sys::destroy_comp_channel(self.raw) } {
            log::warn!("ibv_destroy_comp_channel: {errno}");
            std::mem::forget(self.context.clone());
        }
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionChannel").field("fd", &self.as_fd()).finish_non_exhaustive()
    }
}

/// A completion queue. Clones share it; queue pairs that complete into it keep it alive.
#[derive(Clone)]
pub struct CompletionQueue {
    inner: Arc<CqInner>,
}

struct CqInner {
    raw: NonNull<sys::ibv_cq>,
    /// Asked for an event that was not read yet.
    armed: AtomicBool,
    /// Events read and not acknowledged. Destruction waits for all of them, so `Drop` acknowledges the rest.
    unacked: AtomicU32,
    // Dropped after the queue, which `Drop` destroys: a channel with a queue on it cannot be destroyed.
    channel: Option<CompletionChannel>,
    context: Context,
}

/// Acknowledge in batches: the call takes a lock. Any number works; this one is reached once in a while.
const ACK_BATCH: u32 = 4096;

// SAFETY: verbs may be called on one queue from any thread; the fields read are constant or atomic.
unsafe impl Send for CqInner {}
// SAFETY: as above.
unsafe impl Sync for CqInner {}

impl CompletionQueue {
    /// Makes a queue (`ibv_create_cq`) for `depth` completions, with a channel of its own if it is to be
    /// waited for. The device may grant more than `depth`.
    ///
    /// # Errors
    /// * [`Error::Limit`] when the device's `max_cqe` is smaller than `depth`, [`Error::Misuse`] for 0.
    /// * [`Error::Os`]: with some devices `ENOMEM` means that RLIMIT_MEMLOCK is too low.
    #[doc(alias = "ibv_create_cq")]
    pub fn new(context: &Context, depth: u32, channel: Option<CompletionChannel>) -> Result<CompletionQueue> {
        let max = context.attributes()?.max_cqe;
        CompletionQueue::with_limit(context, depth, max, channel)
    }

    pub(crate) fn with_limit(
        context: &Context,
        depth: u32,
        max: u32,
        channel: Option<CompletionChannel>,
    ) -> Result<CompletionQueue> {
        if depth == 0 {
            return Err(Error::misuse("a completion queue must have at least one entry"));
        }
        LimitError::check(
            "entries of the completion queue (device limit max_cqe)",
            depth.into(),
            max.min(i32::MAX as u32).into(),
            "use less depth",
        )?;
        // SAFETY: the context is alive; the channel moves into the queue and lives longer than it.
        let raw = unsafe { sys::create_cq(context.raw(), depth as i32, channel.as_ref().map(|c| c.raw), 0) }
            .map_err(|errno| OsError::pinning("ibv_create_cq", errno, depth as usize * size_of::<sys::ibv_wc>()))?;
        let (armed, unacked) = (AtomicBool::new(false), AtomicU32::new(0));
        Ok(CompletionQueue { inner: Arc::new(CqInner { raw, armed, unacked, channel, context: context.clone() }) })
    }

    /// How many completions it can hold, as granted.
    pub fn depth(&self) -> u32 {
        // SAFETY: the queue is alive; the field is written at creation only (nothing here resizes it).
        u32::try_from(unsafe { (*self.inner.raw.as_ptr()).cqe }).unwrap_or(0)
    }

    /// Takes what is there, up to the room in `out`, whose old contents are dropped. Returns how many.
    ///
    /// # Errors
    /// [`Error::Provider`] when the device reports that the queue is broken.
    #[inline]
    #[doc(alias = "ibv_poll_cq")]
    pub fn poll(&self, out: &mut Completions) -> Result<usize> {
        self.poll_fast(out).ok_or_else(unusable)
    }

    /// [`poll`](Self::poll); `None` is its error, [`unusable`].
    #[inline(always)]
    pub(crate) fn poll_fast(&self, out: &mut Completions) -> Option<usize> {
        // SAFETY: the queue is alive; the buffer has room for `BATCH` completions.
        let n = unsafe { sys::poll_cq(self.inner.raw, BATCH as i32, out.wcs.as_mut_ptr().cast()) };
        out.next = 0;
        // Negative numbers are too large, too.
        if n as usize > BATCH {
            out.len = 0;
            return None;
        }
        out.len = n as usize;
        Some(out.len)
    }

    /// Asks for an event with the next completion (`ibv_req_notify_cq`). What completed before it gives no event:
    /// poll once more before waiting. Does nothing while an event that was asked for was not taken.
    ///
    /// # Errors
    /// [`Error::Os`], for instance when the device is gone.
    #[doc(alias = "ibv_req_notify_cq")]
    pub fn arm(&self) -> Result<()> {
        self.arm_for(false)
    }

    /// [`arm`](Self::arm) for the next message that its sender marked as solicited, or a failure.
    ///
    /// # Errors
    /// Those of [`arm`](Self::arm).
    pub fn arm_solicited(&self) -> Result<()> {
        self.arm_for(true)
    }

    pub(crate) fn arm_for(&self, solicited_only: bool) -> Result<()> {
        if !self.inner.armed.load(Ordering::Relaxed) {
            // SAFETY: the queue is alive.
            unsafe { sys::req_notify_cq(self.inner.raw, solicited_only) }
                .map_err(|errno| OsError::new("ibv_req_notify_cq", errno))?;
            self.inner.armed.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Takes the event of the last [`arm`](Self::arm), if there is one, and arms again.
    pub(crate) fn rearm(&self, solicited_only: bool) -> Result<()> {
        if self.inner.armed.load(Ordering::Relaxed) {
            self.take_event()?;
        }
        self.arm_for(solicited_only)
    }

    /// The descriptor to wait on after [`arm`](Self::arm), readable when there is an event.
    pub fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.channel.as_ref().map(AsFd::as_fd)
    }

    /// Takes the event that made the descriptor readable. Returns whether there was one.
    ///
    /// # Errors
    /// [`Error::Os`], for instance when the device is gone.
    #[doc(alias = "ibv_get_cq_event")]
    pub fn take_event(&self) -> Result<bool> {
        let Some(channel) = &self.inner.channel else {
            return Ok(false);
        };
        // SAFETY: the channel is alive.
        match unsafe { sys::get_cq_event(channel.raw) } {
            Ok(cq) => {
                if cq != self.inner.raw.as_ptr() {
                    return Err(Error::Provider("a completion event for another queue"));
                }
                self.inner.armed.store(false, Ordering::Relaxed);
                if self.inner.unacked.fetch_add(1, Ordering::Relaxed) + 1 >= ACK_BATCH {
                    self.inner.acknowledge();
                }
                Ok(true)
            }
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(false),
            Err(errno) => Err(OsError::new("ibv_get_cq_event", errno).into()),
        }
    }

    /// The device it is on.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The C object, alive as long as this handle or a clone.
    #[doc(hidden)]
    pub fn as_raw(&self) -> *mut sys::ibv_cq {
        self.inner.raw.as_ptr()
    }
}

impl CqInner {
    fn acknowledge(&self) {
        let events = self.unacked.swap(0, Ordering::Relaxed);
        if events > 0 {
            // SAFETY: the queue is alive, and that many of its events were read since the last time.
            unsafe { sys::ack_cq_events(self.raw, events) }
        }
    }
}

impl Drop for CqInner {
    fn drop(&mut self) {
        self.acknowledge();
        // SAFETY: made by us, destroyed once; queue pairs on it held a clone and are gone; no event is left
        // unacknowledged, so the call does not wait.
        if let Err(errno) = unsafe { sys::destroy_cq(self.raw) } {
            log::warn!("ibv_destroy_cq: {errno}");
            std::mem::forget(self.channel.take());
            std::mem::forget(self.context.clone());
        }
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue").field("depth", &self.depth()).finish_non_exhaustive()
    }
}

/// What a failure of [`CompletionQueue::poll_fast`] means.
#[cold]
pub(crate) fn unusable() -> Error {
    if sys::in_child() {
        return OsError::new("ibv_poll_cq", Errno::EPERM).into();
    }
    Error::Provider("ibv_poll_cq failed: the completion queue is unusable")
}

/// Completions taken at a time. More is not faster: the cost of a call is spread by then.
const BATCH: usize = 16;

/// Room for what [`CompletionQueue::poll`] takes; iterate over it to see them.
pub struct Completions {
    wcs: [MaybeUninit<sys::ibv_wc>; BATCH],
    next: usize,
    len: usize,
}

impl Completions {
    /// How many it holds at most.
    pub const CAPACITY: usize = BATCH;

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.next == self.len
    }

    /// What `take` makes of the next one; if that is nothing, it is left for the iterator.
    #[inline(always)]
    pub(crate) fn next_if<T>(&mut self, take: impl FnOnce(&Completion) -> Option<T>) -> Option<T> {
        if self.next == self.len {
            return None;
        }
        // SAFETY: the entries below `len` were written by the last poll; `len` is at most `BATCH`.
        let wc = unsafe { self.wcs.get_unchecked(self.next).assume_init_ref() };
        let taken = take(&Completion::from_raw(wc));
        self.next += usize::from(taken.is_some());
        taken
    }

    /// Polls, and hands the numbers of the successes to `done`, in order. The count of all of them; `None` when it came to an
    /// error, or to a success that `done` refuses, or if the queue is unusable: what is left is for the iterator.
    ///
    /// It must be empty.
    #[inline(always)]
    pub(crate) fn poll_successes(&mut self, cq: &CompletionQueue, mut done: impl FnMut(u64) -> bool) -> Option<usize> {
        debug_assert!(self.is_empty(), "what was polled before is lost");
        // SAFETY: the queue is alive; the buffer has room for `BATCH` completions.
        let n = unsafe { sys::poll_cq(cq.inner.raw, BATCH as i32, self.wcs.as_mut_ptr().cast()) } as usize;
        // Negative numbers are too large, too.
        if n > BATCH {
            return None;
        }
        for next in 0..n {
            // SAFETY: the poll wrote `n` entries.
            let wc = unsafe { self.wcs.get_unchecked(next).assume_init_ref() };
            if wc.status != WorkStatus::SUCCESS.0 || !done(wc.wr_id) {
                (self.next, self.len) = (next, n);
                return None;
            }
        }
        Some(n)
    }

    /// Empty.
    pub fn new() -> Completions {
        Completions { wcs: [const { MaybeUninit::uninit() }; BATCH], next: 0, len: 0 }
    }
}

impl Default for Completions {
    fn default() -> Completions {
        Completions::new()
    }
}

impl Iterator for Completions {
    type Item = Completion;

    #[inline]
    fn next(&mut self) -> Option<Completion> {
        if self.next == self.len {
            return None;
        }
        // SAFETY: the entries below `len` were written by the last poll; `len` is at most `BATCH`.
        let wc = unsafe { self.wcs.get_unchecked(self.next).assume_init_ref() };
        self.next += 1;
        Some(Completion::from_raw(wc))
    }
}

impl fmt::Debug for Completions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completions").field("left", &(self.len - self.next)).finish_non_exhaustive()
    }
}

/// What became of one work request. With an error status only `wr_id`, `status` and `vendor` mean anything.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Completion {
    /// The number the request was posted with.
    pub wr_id: u64,
    /// How it ended.
    pub status: WorkStatus,
    /// Bytes received or read; chosen by the peer.
    pub byte_len: u32,
    /// The immediate value that came with a message, in host byte order.
    pub imm: Option<u32>,
    /// The vendor's error code.
    pub vendor: u32,
    /// `enum ibv_wc_opcode`.
    pub opcode: u32,
}

impl Completion {
    #[inline]
    fn from_raw(wc: &sys::ibv_wc) -> Completion {
        let imm = if wc.wc_flags & sys::ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0 {
            // SAFETY: both views of the union are plain 32-bit words; the flag says which was meant.
            Some(u32::from_be(unsafe { wc.imm_data_invalidated_rkey_union.imm_data }))
        } else {
            None
        };
        Completion {
            wr_id: wc.wr_id,
            status: WorkStatus(wc.status),
            byte_len: wc.byte_len,
            imm,
            vendor: wc.vendor_err,
            opcode: wc.opcode,
        }
    }

    /// Whether the operation was done.
    #[inline]
    pub fn is_success(&self) -> bool {
        self.status == WorkStatus::SUCCESS
    }
}

const _: () = {
    const fn assert_send_sync<T: Send + Sync>() {}
    assert_send_sync::<CompletionQueue>();
    assert_send_sync::<CompletionChannel>();
};
