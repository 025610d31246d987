//! Granting and revoking memory windows.

use std::ops::Range;
use std::sync::Arc;

use super::state::Resource;
use super::{SendHalf, Wish, message};
use crate::error::{Error, Opcode, Result};
use crate::inflight;
use crate::mr::{Access, MemoryRegion};
use crate::mw::{MemoryWindow, Window};
use crate::remote::RemoteRegion;
use crate::sys::{self, ibv_wr_opcode as Wr};
use crate::wait::Patience;

impl SendHalf {
    /// Grants the peer of this connection a range of a region that has the right [`Access::MW_BIND`], by a memory window of
    /// type 2. Returns when it is bound: send the peer [`MemoryWindow::remote`].
    ///
    /// # Errors
    /// * [`Error::Unsupported`] when the device has no windows of type 2.
    /// * [`Error::Misuse`] for a range outside the region, an empty one, rights other than remote ones, rights to write on a
    ///   region without [`Access::LOCAL_WRITE`], or a region without [`Access::MW_BIND`] or of another domain.
    /// * [`Error::TimedOut`] when a timeout is set, and the window is not granted; [`Error::Work`] when the device refuses,
    ///   which ends the connection.
    #[doc(alias = "ibv_bind_mw")]
    pub fn grant(&mut self, region: &MemoryRegion, range: Range<usize>, access: Access) -> Result<MemoryWindow> {
        let (start, len) = self.local_range(region, range)?;
        let remote_rights = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        if len == 0 || access.is_empty() || !remote_rights.contains(access) {
            return Err(Error::misuse("a window grants one or more of the remote rights on at least one byte"));
        }
        (access | (region.access() & Access::LOCAL_WRITE)).check()?;
        let window = Window::new(region)?;
        let (addr, key) = (region.addr(start), window.next_key());
        let bind_info =
            sys::ibv_mw_bind_info { mr: region.as_raw(), addr, length: len as u64, mw_access_flags: access.bits() };
        let mut wr = sys::zeroed_send_wr();
        wr.opcode = Wr::IBV_WR_BIND_MW;
        wr.bind_mw_tso_union.bind_mw = sys::bind_mw_t { mw: window.raw().as_ptr(), rkey: key, bind_info };
        self.post_and_wait(wr, Opcode::Bind, &window)?;
        Ok(MemoryWindow::new(window, RemoteRegion::new(addr, len as u64, key)))
    }

    /// Takes a grant back. When it returns, the peer can reach nothing by it any more; if it tries, the connection breaks.
    /// Dropping the window does the same.
    ///
    /// # Errors
    /// [`Error::TimedOut`] when a timeout is set; the cause, once the connection is over. Either way the window is dropped.
    /// A window that the peer gave back already cannot be revoked, which would break the connection: drop it.
    pub fn revoke(&mut self, window: MemoryWindow) -> Result<()> {
        let mut wr = sys::zeroed_send_wr();
        wr.opcode = Wr::IBV_WR_LOCAL_INV;
        wr.imm_data_invalidated_rkey_union.invalidated_rkey = window.remote().rkey();
        self.post_and_wait(wr, Opcode::Invalidate, &window.inner)
    }

    /// Sends a message and gives a grant of the peer back with it: when the peer receives the message, nobody can use the
    /// window any more. Returns when it is posted.
    ///
    /// # Errors
    /// Those of [`send`](Self::send). If the key is none of a window that the peer bound for this connection, the connection
    /// breaks.
    pub fn send_invalidate(&mut self, data: &[u8], window: &RemoteRegion) -> Result<()> {
        let (len, limit) = (data.len(), self.state.slots.size());
        if len > limit {
            return Err(Error::TooLong { len, limit });
        }
        if !self.has_room() {
            self.make_room_for(Wish::Default)?;
        }
        let slot = self.state.slots.slot(self.state.table.next_place()).as_ptr();
        // SAFETY: the slot holds `len` bytes; its place is free, as in `send`.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), slot, len) };
        let mut request = message(slot.cast_const(), len, self.state.slots.lkey(), None, false, false);
        request.op = Wr::IBV_WR_SEND_WITH_INV;
        // In the place of the immediate value, but in host byte order.
        request.imm = u32::from_be(window.rkey());
        // SAFETY: it is the slot of the next place.
        unsafe { self.state.post(&self.shared, request, || None) }
    }

    /// Posts a request about a window, which the table keeps until it is over, and waits for that.
    fn post_and_wait(&mut self, mut wr: sys::ibv_send_wr, kind: Opcode, window: &Arc<Window>) -> Result<()> {
        let mut patience = Patience::from_timeout(self.timeout);
        self.make_room(&mut patience)?;
        wr.wr_id = inflight::wr_id(self.state.table.next_seq(), kind);
        wr.send_flags = sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
        // SAFETY: it names no memory but the window and its region, which go into the table.
        let rc = unsafe { self.shared.queue_pair().post_send(&mut wr) };
        self.state.table.push_holding(kind, true, Resource::Window(window.clone()));
        if rc != 0 {
            return Err(self.state.refused(&self.shared, rc, 1));
        }
        let end = self.state.table.next_seq();
        self.wait_until(&mut patience, "a memory window", |table| table.is_over(end))?;
        self.state.outcome(&self.shared, end)
    }
}
