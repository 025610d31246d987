//! Atomic operations on eight bytes of the peer's memory.

use super::one_sided::NO_READS;
use super::pending::Ticket;
use super::state::{Request, Resource};
use super::{SendHalf, Wish};
use crate::error::{Error, Opcode, Result};
use crate::mr::{Access, MemoryRegion};
use crate::pages;
use crate::remote::RemoteRegion;
use crate::sys::ibv_wr_opcode as Wr;
use crate::wait::Patience;

impl SendHalf {
    /// Replaces eight bytes of the peer's memory by `new` if they are `expected`, in one step. Returns what was there: the
    /// exchange was made if that is `expected`. The values are numbers in the peer's byte order, as its own program reads
    /// them with [`MemoryRegion::load_u64`] if both machines have the same; the device does not convert them.
    ///
    /// Among operations of one device they are always atomic; against the peer's processor only if its
    /// [`atomic_cap`](crate::DeviceAttributes::atomic_cap) says so.
    ///
    /// # Errors
    /// * [`Error::Unsupported`] when the device has no atomic operations (iWARP).
    /// * [`Error::Misuse`] when the place is not aligned to 8 bytes or not in the region; nothing is sent.
    /// * [`Error::Work`] when the peer refuses, for instance for want of [`Access::REMOTE_ATOMIC`].
    /// * [`Error::TimedOut`] when a timeout is set; it may still be carried out.
    pub fn compare_and_swap(&mut self, remote: &RemoteRegion, offset: u64, expected: u64, new: u64) -> Result<u64> {
        self.atomic(Opcode::CompareAndSwap, remote, offset, [expected, new])
    }

    /// Adds to eight bytes of the peer's memory, wrapping around, in one step. Returns what was there. As for the rest,
    /// [`compare_and_swap`](Self::compare_and_swap).
    ///
    /// # Errors
    /// Those of [`compare_and_swap`](Self::compare_and_swap).
    pub fn fetch_and_add(&mut self, remote: &RemoteRegion, offset: u64, add: u64) -> Result<u64> {
        self.atomic(Opcode::FetchAndAdd, remote, offset, [add, 0])
    }

    /// Posts a [`compare_and_swap`](Self::compare_and_swap) and returns at once. What was there arrives, as the device
    /// gives it, in the eight bytes at `local_offset` of the local region, which must have [`Access::LOCAL_WRITE`].
    ///
    /// # Errors
    /// Those of [`compare_and_swap`](Self::compare_and_swap) that come before it is sent; [`Error::WouldBlock`] when the
    /// queue has no room.
    pub fn post_compare_and_swap(
        &mut self,
        local: &MemoryRegion,
        local_offset: usize,
        remote: &RemoteRegion,
        offset: u64,
        expected: u64,
        new: u64,
    ) -> Result<Ticket> {
        self.post_atomic(Opcode::CompareAndSwap, local, local_offset, remote, offset, [expected, new])
    }

    /// Posts a [`fetch_and_add`](Self::fetch_and_add) and returns at once. As for the rest,
    /// [`post_compare_and_swap`](Self::post_compare_and_swap).
    ///
    /// # Errors
    /// Those of [`post_compare_and_swap`](Self::post_compare_and_swap).
    pub fn post_fetch_and_add(
        &mut self,
        local: &MemoryRegion,
        local_offset: usize,
        remote: &RemoteRegion,
        offset: u64,
        add: u64,
    ) -> Result<Ticket> {
        self.post_atomic(Opcode::FetchAndAdd, local, local_offset, remote, offset, [add, 0])
    }

    fn atomic(&mut self, kind: Opcode, remote: &RemoteRegion, offset: u64, operands: [u64; 2]) -> Result<u64> {
        let to = self.word(remote, offset)?;
        if !self.has_room() {
            self.make_room_for(Wish::Default)?;
        }
        let slot = self.state.slots.slot(self.state.table.next_place());
        let addr = slot.as_ptr().expose_provenance() as u64;
        let request = request(kind, addr, self.state.slots.lkey(), to, remote.rkey(), operands);
        // SAFETY: the slot of the next place, registered for local writes, at least a cache line long, and aligned to one:
        // nobody else has it until the operation is over.
        unsafe { self.state.post(&self.shared, request, || None)? };
        let end = self.state.table.next_seq();
        let mut patience = Patience::from_timeout(self.timeout);
        self.wait_until(&mut patience, "the end of an atomic operation", |table| table.is_over(end))?;
        self.state.outcome(&self.shared, end)?;
        // SAFETY: the operation is over and its place not given again, so the slot is this half's; aligned to 8.
        Ok(unsafe { pages::load_u64(slot) })
    }

    fn post_atomic(
        &mut self,
        kind: Opcode,
        local: &MemoryRegion,
        local_offset: usize,
        remote: &RemoteRegion,
        offset: u64,
        operands: [u64; 2],
    ) -> Result<Ticket> {
        let to = self.word(remote, offset)?;
        if !local.access().contains(Access::LOCAL_WRITE) {
            return Err(Error::misuse("the local region of an atomic operation must have local write access"));
        }
        if !local_offset.is_multiple_of(8) {
            return Err(Error::misuse("the result of an atomic operation must be aligned to 8 bytes"));
        }
        self.local_range(local, local_offset..local_offset.saturating_add(8))?;
        if !self.has_room() {
            self.want_room(8, 1)?;
        }
        let request = request(kind, local.addr(local_offset), local.lkey(), to, remote.rkey(), operands);
        // SAFETY: the eight bytes lie in the region, a handle of which stays in the table; Rust code accesses its memory
        // by copies that tolerate races only.
        unsafe { self.state.post(&self.shared, request, || Some(Resource::Region(local.clone())))? };
        Ok(Ticket::at(self.state.table.next_seq()))
    }

    /// The address of a word of the peer, if the device can reach it.
    fn word(&self, remote: &RemoteRegion, offset: u64) -> Result<u64> {
        if !self.state.atomics {
            return Err(Error::Unsupported("the device has no atomic operations"));
        }
        if !self.state.reads {
            return Err(NO_READS);
        }
        let to = remote.locate(offset, 8)?;
        if !to.is_multiple_of(8) {
            return Err(Error::misuse("an atomic operation needs an address that is a multiple of 8"));
        }
        Ok(to)
    }
}

fn request(kind: Opcode, addr: u64, lkey: u32, remote: u64, rkey: u32, operands: [u64; 2]) -> Request {
    let op = match kind {
        Opcode::CompareAndSwap => Wr::IBV_WR_ATOMIC_CMP_AND_SWP,
        _ => Wr::IBV_WR_ATOMIC_FETCH_AND_ADD,
    };
    Request { kind, op, addr, len: 8, lkey, remote, rkey, imm: 0, operands, inline: false, signal: true }
}
