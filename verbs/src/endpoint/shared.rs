//! What both halves of an endpoint, its controls and its receive buffers share.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::eventfd::EventFd;

use super::send::SendState;
use crate::cq::{Completion, Completions};
use crate::error::{CloseReason, Error, Opcode, OsError, Result, WorkError, WorkStatus};
use crate::inflight;
use crate::pool::Arena;
use crate::qp::QueuePair;
use crate::sys;

/// How long the one who finds only flushed operations waits for somebody to tell why: the connection manager hears
/// of a killed peer some 20 ms after the device does.
const CAUSE_WAIT: Duration = Duration::from_millis(50);

/// The core of an endpoint.
///
/// The queue pair goes first, so that the device stops before any memory is released: then the table of the send
/// half, the receive slots, and with the last handles the completion queues, the regions, the domain and the
/// context. If the queue pair cannot be destroyed, everything it may touch is leaked.
pub(super) struct Shared {
    qp: QueuePair,
    /// The state of the send half once that was dropped: its memory may be in use until `qp` is gone.
    parked: Mutex<ManuallyDrop<Vec<SendState>>>,
    /// Receive slots, if receives carry a buffer. A slot is either posted, or its index is in one place: a completion that was not looked at, the
    /// receive half's list, or a `RecvBuf`.
    slots: ManuallyDrop<Option<Arena>>,
    posted: Box<[AtomicBool]>,

    /// Set after a cause was; tells the halves to look.
    broken: AtomicBool,
    /// Whether the queue pair was moved to the error state.
    stopped: AtomicBool,
    /// Readable for good once the connection is broken: wakes halves for which no completion may come.
    closed: EventFd,
    /// Why it broke.
    cause: OnceLock<Error>,
    /// The peer's disconnect. A failed completion that is there, but was not looked at yet, says why it disconnected.
    ended: OnceLock<Error>,
    /// What is known while neither is: that something was flushed.
    flushed: OnceLock<Error>,
    /// Somebody waited for `cause` to be told already.
    waited: AtomicBool,
    hook: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// It was a half that found it broken.
    found: AtomicBool,
    told: AtomicBool,
    /// Send completions that others than the send half took: the receive half while it looked for the cause, a control
    /// while it looked for the answer to its probe.
    spill: Mutex<Vec<Completion>>,
    /// Set under that lock before completions are taken, cleared when none are left there. So whoever finds the queue
    /// empty and this unset knows that nothing was taken away before.
    spilled: AtomicBool,
    /// A probe was posted whose end was not seen.
    probing: AtomicBool,
}

impl Shared {
    pub(super) fn new(qp: QueuePair, slots: Option<Arena>, recv_depth: u32, closed: EventFd) -> Shared {
        debug_assert!(slots.as_ref().is_none_or(|slots| slots.count() == recv_depth), "a slot for each receive");
        let posted = (0..recv_depth).map(|_| AtomicBool::new(false)).collect();
        Shared {
            qp,
            parked: Mutex::new(ManuallyDrop::new(Vec::new())),
            slots: ManuallyDrop::new(slots),
            posted,
            broken: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            closed,
            cause: OnceLock::new(),
            ended: OnceLock::new(),
            flushed: OnceLock::new(),
            waited: AtomicBool::new(false),
            hook: OnceLock::new(),
            found: AtomicBool::new(false),
            told: AtomicBool::new(false),
            spill: Mutex::new(Vec::new()),
            spilled: AtomicBool::new(false),
            probing: AtomicBool::new(false),
        }
    }

    #[inline]
    pub(super) fn queue_pair(&self) -> &QueuePair {
        &self.qp
    }

    #[inline]
    pub(super) fn slots(&self) -> Option<&Arena> {
        self.slots.as_ref()
    }

    #[inline]
    pub(super) fn closed_fd(&self) -> BorrowedFd<'_> {
        self.closed.as_fd()
    }

    /// Keeps what the device may still use until the queue pair is gone.
    pub(super) fn park(&self, state: SendState) {
        lock(&self.parked).push(state);
    }

    // Breaking.

    #[inline]
    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// The cause, or what is known of it.
    pub(super) fn cause(&self) -> Option<Error> {
        self.cause.get().or(self.ended.get()).or(self.flushed.get()).cloned()
    }

    /// The cause of a broken connection. If only a flush is known, it is waited a moment for more, once.
    #[cold]
    pub(super) fn reason(&self) -> Error {
        let unknown = || self.cause.get().is_none() && self.ended.get().is_none();
        if unknown() && !self.waited.load(Ordering::Relaxed) {
            let end = Instant::now() + CAUSE_WAIT;
            while unknown() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.waited.store(true, Ordering::Relaxed);
        }
        self.cause().unwrap_or(Error::Provider("a broken connection without a cause"))
    }

    /// Breaks the connection for this cause, unless it is broken: stops the queue pair, wakes the halves.
    /// Returns whether it was not broken before.
    #[cold]
    pub(super) fn fail(&self, cause: Error) -> bool {
        let first = self.note(cause);
        if !self.stopped.swap(true, Ordering::AcqRel)
            && let Err(e) = self.qp.set_error()
        {
            // Usual when the device is gone, or the queue pair never got to a state it can leave.
            log::debug!("qp {:#x}: {e}", self.qp.qp_num());
        }
        first
    }

    /// Breaks the connection, but leaves the queue pair as it is. Returns whether it was not broken before.
    #[cold]
    pub(super) fn note(&self, cause: Error) -> bool {
        let place = match &cause {
            flush if flush.is_flush() => &self.flushed,
            Error::Closed(CloseReason::Peer) => &self.ended,
            // Only what a completion says is a better cause than the peer's disconnect.
            Error::Closed(_) if self.ended.get().is_some() => &self.ended,
            _ => &self.cause,
        };
        if let Ok(()) = place.set(cause) {
            log::debug!("qp {:#x}: broken: {:?}", self.qp.qp_num(), place.get());
        }
        let first = !self.broken.swap(true, Ordering::AcqRel);
        if first && let Err(errno) = self.closed.write(1) {
            log::warn!("eventfd: {errno}");
        }
        first
    }

    /// [`fail`](Self::fail) for what a half found; tells the hook if nothing was known before.
    #[cold]
    pub(super) fn fail_by(&self, cause: Error) {
        if self.fail(cause) {
            self.found.store(true, Ordering::SeqCst);
            self.tell();
        }
    }

    /// A wait that failed by itself, not by its time or by the connection's end, breaks the connection.
    #[inline]
    pub(super) fn settle<T>(&self, waited: Result<T>) -> Result<T> {
        if let Err(e @ (Error::Os(_) | Error::Provider(_))) = &waited {
            self.fail_by(e.clone());
        }
        waited
    }

    pub(super) fn set_hook(&self, hook: Box<dyn Fn() + Send + Sync>) {
        // The first one stays.
        drop(self.hook.set(hook));
        self.tell();
    }

    fn tell(&self) {
        if self.found.load(Ordering::SeqCst)
            && let Some(hook) = self.hook.get()
            && !self.told.swap(true, Ordering::SeqCst)
        {
            hook();
        }
    }

    /// Called by the receive half when it finds its operations flushed and nobody said why: takes the send
    /// completions, of which the first that is no flush is the cause. The send half gets them through
    /// [`take_sends`](Self::take_sends).
    #[cold]
    pub(super) fn look_for_cause(&self) {
        let mut spill = lock(&self.spill);
        self.spill_sends(&mut spill);
        let cause = first_cause(&spill);
        drop(spill);
        if let Some(cause) = cause {
            self.fail_by(cause);
        }
    }

    /// Takes the send completions from the queue, for the send half to find.
    fn spill_sends(&self, spill: &mut Vec<Completion>) {
        // Before the queue is emptied: the send half must not find it empty and sleep.
        self.spilled.store(true, Ordering::SeqCst);
        self.drain_sends(spill);
        if spill.is_empty() {
            self.spilled.store(false, Ordering::SeqCst);
        }
    }

    /// Whether someone else took send completions; to be asked after the queue was found empty.
    #[inline]
    pub(super) fn has_spilled(&self) -> bool {
        self.spilled.load(Ordering::SeqCst)
    }

    /// The send completions that others took.
    #[cold]
    pub(super) fn take_spilled(&self) -> Vec<Completion> {
        let mut spill = lock(&self.spill);
        self.spilled.store(false, Ordering::SeqCst);
        std::mem::take(&mut *spill)
    }

    // Probing.

    /// See [`Control::probe`](super::Control::probe).
    pub(super) fn probe(&self) -> Probe {
        if self.is_broken() {
            return Probe::Broken;
        }
        let mut spill = lock(&self.spill);
        if self.probing.load(Ordering::SeqCst) {
            self.spill_sends(&mut spill);
            // Failures stay for the send half, which accounts for everything that failed.
            spill.retain(|c| match c.wr_id == inflight::PROBE && c.is_success() {
                true => {
                    self.probe_done();
                    false
                }
                false => true,
            });
            if let Some(cause) = first_cause(&spill) {
                drop(spill);
                self.fail_by(cause);
                return Probe::Broken;
            }
        }
        if self.probing.swap(true, Ordering::SeqCst) {
            return Probe::Unanswered;
        }
        let mut wr = sys::zeroed_send_wr();
        wr.wr_id = inflight::PROBE;
        wr.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        wr.send_flags = sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
        // SAFETY: it names no memory. Both queues have a place for one probe, and there is no other.
        let rc = unsafe { self.qp.post_send(&mut wr) };
        drop(spill);
        if rc != 0 {
            self.probe_done();
            self.fail_by(OsError::new("ibv_post_send", Errno::from_raw(rc.wrapping_abs())).into());
            return Probe::Broken;
        }
        Probe::Sent
    }

    /// The probe was answered.
    #[cold]
    pub(super) fn probe_done(&self) {
        self.probing.store(false, Ordering::SeqCst);
    }

    /// All send completions there are, in posting order, whoever took them from the queue.
    #[cold]
    pub(super) fn take_sends(&self, mut mine: Vec<Completion>) -> Vec<Completion> {
        let mut spill = lock(&self.spill);
        self.spilled.store(false, Ordering::SeqCst);
        mine.append(&mut spill);
        self.drain_sends(&mut mine);
        drop(spill);
        mine.sort_by_key(|c| c.wr_id >> 8);
        mine
    }

    fn drain_sends(&self, out: &mut Vec<Completion>) {
        let mut batch = Completions::new();
        while matches!(self.qp.send_cq().poll(&mut batch), Ok(n) if n > 0) {
            out.extend(&mut batch);
        }
    }

    // Receiving.

    /// Posts a receive into a slot that belongs to the caller.
    #[inline]
    pub(super) fn post_recv(&self, slot: u32) -> Result<()> {
        let mut sge = match self.slots() {
            Some(slots) => sys::ibv_sge {
                addr: slots.slot(slot).as_ptr().expose_provenance() as u64,
                length: slots.size() as u32,
                lkey: slots.lkey(),
            },
            None => sys::ibv_sge { addr: 0, length: 0, lkey: 0 },
        };
        let mut wr = sys::ibv_recv_wr {
            wr_id: u64::from(slot),
            next: ptr::null_mut(),
            sg_list: &raw mut sge,
            num_sge: i32::from(sge.length != 0),
        };
        self.posted[slot as usize].store(true, Ordering::Relaxed);
        // SAFETY: the slot lies in the arena, which is registered for local writes and outlives the queue
        // pair; it is not posted and nobody else has its index, so nobody touches it until its completion.
        let rc = unsafe { self.qp.post_recv(&mut wr) };
        if rc != 0 {
            self.posted[slot as usize].store(false, Ordering::Relaxed);
            return Err(OsError::new("ibv_post_recv", Errno::from_raw(rc.wrapping_abs())).into());
        }
        Ok(())
    }

    /// Gives a slot that was read back to the device. On a broken connection it stays where it is, since
    /// a receive posted then may never be flushed.
    #[inline]
    pub(super) fn repost(&self, slot: u32) {
        if !self.is_broken()
            && let Err(e) = self.post_recv(slot)
        {
            self.fail_by(e);
        }
    }

    /// Takes a slot out of the device's hands, when a completion says so. `None` if it was not there.
    #[inline]
    pub(super) fn take_posted(&self, wr_id: u64) -> Option<u32> {
        let posted = self.posted.get(usize::try_from(wr_id).ok()?)?;
        // Only the receive half clears the mark, so a load and a store will do.
        if !posted.load(Ordering::Acquire) {
            return None;
        }
        posted.store(false, Ordering::Relaxed);
        Some(wr_id as u32)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.qp.destroy() {
            let parked = self.parked.get_mut().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: dropped once, here; the device is done with them.
            unsafe {
                ManuallyDrop::drop(parked);
                ManuallyDrop::drop(&mut self.slots);
            }
        }
    }
}

/// What [`Control::probe`](super::Control::probe) found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// A probe was sent; the one before it, if there was one, was answered.
    Sent,
    /// The last probe is not answered yet.
    Unanswered,
    /// The connection is broken or closed; [`Control::cause`](super::Control::cause) says why.
    Broken,
}

/// The first failure that is no flush.
#[cold]
fn first_cause(completions: &[Completion]) -> Option<Error> {
    completions.iter().find(|c| !c.is_success() && c.status != WorkStatus::FLUSHED).map(send_error)
}

/// The error of a failed send-side completion, whose kind is in its number.
#[cold]
pub(super) fn send_error(completion: &Completion) -> Error {
    let opcode = inflight::kind_of(completion.wr_id).unwrap_or(Opcode::Send);
    Error::Work(WorkError { status: completion.status, opcode, vendor: completion.vendor, buffer: None })
}

/// Nothing that is done under these locks can panic half-way, so a poisoned one is as good.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
