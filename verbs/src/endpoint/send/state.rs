//! What the sending half keeps: the table of outstanding work, and posting and reaping.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;

use nix::errno::Errno;

use super::super::options::EndpointOptions;
use super::super::shared::{Shared, send_error};
use crate::cq::{Completion, Completions, unusable};
use crate::error::{Error, Opcode, OsError, Result};
use crate::inflight::{self, Bogus, Table};
use crate::mr::MemoryRegion;
use crate::mw::Window;
use crate::pool::{Arena, BufferPool, SendBuf};
use crate::sys::{self, ibv_wr_opcode as Wr};

/// What only the sending half touches. What the device may use (`table`, `slots`, `buffers`) must
/// outlive the queue pair, so all of it is parked in [`Shared`] when the half is dropped.
pub(in super::super) struct SendState {
    pub(super) table: Table<Resource>,
    /// The slot of a copied message is its place in the table.
    pub(super) slots: Arena,
    /// The first operation that failed: it and all later ones were not done.
    failed_from: Option<u64>,
    batch: Box<Completions>,
    prepared: Box<Prepared>,
    /// The flag of solicited messages, if they are to have it.
    pub(super) solicit: u32,
    /// Whether the device has atomic operations.
    pub(super) atomics: bool,
    /// Whether the connection lets this side read the peer's memory at all.
    pub(super) reads: bool,
    /// Made with the first batch.
    pub(super) batch_room: Option<Box<super::batch::Room>>,
    /// The domain of the queue pair, to be compared only.
    pub(super) domain: NonNull<sys::ibv_pd>,
    pub(super) signal_interval: u64,
    /// Whether the end of each posted operation is told, though messages share completions.
    pub(super) tell_all: bool,
    /// Bytes that fit into a request, as granted.
    pub(super) inline: usize,
    /// Bytes that fit into a message of the port.
    pub(super) max_message: usize,
    pub(super) buffers: Option<BufferPool>,
    pub(super) buffer_count: u32,
}

/// What an operation uses until it is done.
#[derive(Debug, Default)]
pub(super) enum Resource {
    /// Nothing but perhaps the slot of its place in the table.
    #[default]
    None,
    /// Returned to its pool when done.
    Buffer(#[expect(dead_code, reason = "held, not read")] SendBuf),
    /// Kept allocated until done, with its region.
    Window(#[expect(dead_code, reason = "held, not read")] Arc<Window>),
    /// Kept registered until done.
    Region(#[expect(dead_code, reason = "held, not read")] MemoryRegion),
}

/// A request in C's form: each one posted changes only what differs.
pub(super) struct Prepared {
    pub(super) wr: sys::ibv_send_wr,
    pub(super) sge: sys::ibv_sge,
}

impl Prepared {
    pub(super) fn new() -> Prepared {
        Prepared { wr: sys::zeroed_send_wr(), sge: sys::ibv_sge { addr: 0, length: 0, lkey: 0 } }
    }

    /// Writes a request, all but its successor.
    #[inline(always)]
    pub(super) fn fill(&mut self, request: &Request, seq: u64, signalled: bool, solicit: u32) {
        let Prepared { wr, sge } = self;
        *sge = sys::ibv_sge { addr: request.addr, length: request.len as u32, lkey: request.lkey };
        wr.wr_id = inflight::wr_id(seq, request.kind);
        wr.sg_list = sge;
        // A length of 0 in an element means 2^31 to some devices.
        wr.num_sge = i32::from(request.len != 0);
        wr.opcode = request.op;
        wr.send_flags = u32::from(request.inline) * INLINE + u32::from(signalled) * SIGNALED;
        if !matches!(request.op, Wr::IBV_WR_RDMA_WRITE | Wr::IBV_WR_RDMA_READ) {
            wr.send_flags |= solicit;
        }
        wr.imm_data_invalidated_rkey_union.imm_data = request.imm.to_be();
        match request.kind {
            Opcode::Send => {}
            Opcode::CompareAndSwap | Opcode::FetchAndAdd => {
                let [compare_add, swap] = request.operands;
                wr.wr.atomic = sys::atomic_t { remote_addr: request.remote, compare_add, swap, rkey: request.rkey };
            }
            _ => wr.wr.rdma = sys::rdma_t { remote_addr: request.remote, rkey: request.rkey },
        }
    }
}

// SAFETY: its pointers are written anew for each call that reads them.
unsafe impl Send for Prepared {}

// SAFETY: `domain` is never followed; the rest is `Send`, and used by one thread at a time.
unsafe impl Send for SendState {}

/// One request to be posted.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) kind: Opcode,
    pub(super) op: Wr::Type,
    /// Local memory.
    pub(super) addr: u64,
    pub(super) len: usize,
    pub(super) lkey: u32,
    /// Remote memory of a one-sided operation.
    pub(super) remote: u64,
    pub(super) rkey: u32,
    /// For the kinds with an immediate value: the value, in host byte order.
    pub(super) imm: u32,
    /// Of an atomic operation: what is compared or added, and what is swapped in.
    pub(super) operands: [u64; 2],
    pub(super) inline: bool,
    /// Whether its completion must be told; others are told now and then.
    pub(super) signal: bool,
}

impl SendState {
    pub(in super::super) fn new(
        options: &EndpointOptions,
        slots: Arena,
        inline: u32,
        max_message: usize,
        atomics: bool,
    ) -> SendState {
        let table = Table::new(options.send_depth);
        assert!(slots.count() >= table.places(), "a slot for each place in the table");
        SendState {
            table,
            failed_from: None,
            batch: Box::default(),
            prepared: Box::new(Prepared::new()),
            solicit: 0,
            atomics,
            reads: true,
            batch_room: None,
            signal_interval: options.signal_interval(),
            tell_all: options.signal_every == 0,
            inline: inline as usize,
            max_message,
            domain: slots.pd().raw(),
            slots,
            buffers: None,
            buffer_count: options.send_buffers,
        }
    }

    /// How many slots it needs.
    pub(in super::super) fn places(send_depth: u32) -> u32 {
        send_depth.next_power_of_two()
    }

    /// Posts a request, for which there must be room. What `hold` returns stays in the table until it is done. A request
    /// that the driver refuses counts as posted and breaks the connection: rxe has queued it before it finds that it cannot
    /// ring the doorbell, and carries it out with the next one.
    ///
    /// # Safety
    /// The local memory is registered and within its region. Unless it is inline, it is kept by what `hold` returns, or is
    /// the slot of the next place in the table, and no Rust code breaks verbs' rules for it until the operation is
    /// done: no writing while it is sent, no reference while it is received into.
    #[inline(always)]
    pub(super) unsafe fn post(
        &mut self,
        shared: &Shared,
        request: Request,
        hold: impl FnOnce() -> Option<Resource>,
    ) -> Result<()> {
        let table = &mut self.table;
        let signalled = request.signal || table.unsignalled_tail() + 1 >= self.signal_interval;
        let prepared = &mut *self.prepared;
        prepared.fill(&request, table.next_seq(), signalled, self.solicit);
        // SAFETY: as the caller says; `prepared` lives through the call, and its `next` is null.
        let rc = unsafe { shared.queue_pair().post_send(&mut prepared.wr) };
        match hold() {
            None => table.push(request.kind, signalled),
            Some(resource) => table.push_holding(request.kind, signalled, resource),
        }
        if rc != 0 { Err(self.refused(shared, rc, 1)) } else { Ok(()) }
    }

    /// Takes note of all completions there are.
    #[inline]
    pub(super) fn reap(&mut self, shared: &Shared) -> Result<()> {
        loop {
            match self.reap_batch(shared) {
                Some(Completions::CAPACITY) => {}
                Some(1..) => return Ok(()),
                Some(0) if !shared.has_spilled() && !shared.is_broken() => return Ok(()),
                _ => return self.reap_rest(shared),
            }
        }
    }

    /// Takes note of the completions that one poll gives, if the connection works; how many there were. After `None`,
    /// [`reap_rest`](Self::reap_rest) must be called before anything else. It does not panic.
    #[inline(always)]
    pub(super) fn reap_batch(&mut self, shared: &Shared) -> Option<usize> {
        if shared.is_broken() {
            return None;
        }
        let table = &mut self.table;
        self.batch.poll_successes(shared.queue_pair().send_cq(), |wr_id| table.complete(wr_id, false).is_ok())
    }

    /// What [`reap`](Self::reap) does when not all is well, or when others took completions.
    #[cold]
    #[inline(never)]
    pub(super) fn reap_rest(&mut self, shared: &Shared) -> Result<()> {
        let mut seen: VecDeque<_> = self.batch.by_ref().collect();
        if seen.is_empty() && !shared.is_broken() {
            if shared.has_spilled() {
                self.reap_spilled(shared);
                return Ok(());
            }
            shared.fail_by(unusable());
            return Err(unusable());
        }
        while !shared.is_broken()
            && let Some(success) = seen.pop_front_if(|completion| completion.is_success())
        {
            if self.table.complete(success.wr_id, false).is_err() {
                unknown(shared, success.wr_id);
            }
        }
        if !seen.is_empty() || shared.is_broken() {
            self.reap_broken(shared, seen.into());
        }
        Ok(())
    }

    /// Takes note of completions that someone else took off the queue. Newer ones may have been seen already.
    #[cold]
    fn reap_spilled(&mut self, shared: &Shared) {
        let spilled = shared.take_spilled();
        if spilled.iter().any(|completion| !completion.is_success()) {
            return self.reap_broken(shared, spilled);
        }
        for completion in spilled {
            match self.table.complete(completion.wr_id, false) {
                Err(Bogus::Unknown) if completion.wr_id != inflight::PROBE => {}
                Err(_) => unknown(shared, completion.wr_id),
                Ok(_) => {}
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
                Err(Bogus::Unknown) if completion.wr_id == inflight::PROBE && failed => {
                    let cause = send_error(&completion);
                    if cause.is_flush() {
                        flush.get_or_insert(cause);
                    } else {
                        shared.fail_by(cause);
                    }
                }
                // Something newer was seen before, by the other half or by us.
                Err(Bogus::Unknown) => {}
                Err(Bogus::Mismatch) => {
                    shared.fail_by(Error::Provider("a send completed as something else than it was"));
                }
            }
        }
        if let Some(flush) = flush {
            shared.fail_by(flush);
        }
    }

    /// The driver refused the last `count` requests of the table, or the first of them: nothing more may reach the device.
    #[cold]
    #[inline(never)]
    pub(super) fn refused(&mut self, shared: &Shared, rc: i32, count: u64) -> Error {
        self.failed_from.get_or_insert(self.table.next_seq() - count);
        if shared.is_broken() {
            return shared.reason();
        }
        let error = Error::from(OsError::new("ibv_post_send", Errno::from_raw(rc.wrapping_abs())));
        shared.fail_by(error.clone());
        error
    }

    /// `Ok` when all operations below `end` were done; that they are over must be known.
    pub(super) fn outcome(&self, shared: &Shared, end: u64) -> Result<()> {
        match self.failed_from {
            Some(failed) if failed < end => Err(shared.reason()),
            _ => Ok(()),
        }
    }
}

pub(super) const SOLICITED: u32 = sys::ibv_send_flags::IBV_SEND_SOLICITED.0;
const INLINE: u32 = sys::ibv_send_flags::IBV_SEND_INLINE.0;
const SIGNALED: u32 = sys::ibv_send_flags::IBV_SEND_SIGNALED.0;

/// A success that is not of the table.
#[cold]
fn unknown(shared: &Shared, wr_id: u64) {
    if wr_id == inflight::PROBE {
        shared.probe_done();
    } else {
        shared.fail_by(Error::Provider("a send completed that was not outstanding"));
    }
}
