//! RDMA write and read.

use std::ops::Range;

use super::SendHalf;
use super::state::{Request, Resource};
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
            return Err(Error::misuse("the local region of an RDMA read must have local write access"));
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
        let domain = self.shared.queue_pair().protection_domain();
        if !local.protection_domain().same_as(domain) {
            return Err(Error::misuse("the local region belongs to another protection domain than the connection"));
        }
        let range = local.check_range(range)?;
        let to = remote.locate(remote_offset, range.len() as u64)?;
        if range.is_empty() {
            return match self.shared.is_broken() {
                true => Err(self.shared.reason()),
                false => Ok(()),
            };
        }
        let op = match kind {
            Opcode::Read => Wr::IBV_WR_RDMA_READ,
            _ => Wr::IBV_WR_RDMA_WRITE,
        };
        let mut patience = Patience::from_timeout(self.timeout);
        let mut done = 0;
        // What is larger than a message of the port goes in several.
        while done < range.len() {
            if !self.has_room() {
                self.make_room(&mut patience)?;
            }
            let len = (range.len() - done).min(self.state.max_message);
            let request = Request {
                kind,
                op,
                addr: local.addr(range.start + done),
                len,
                lkey: local.lkey(),
                remote: to + done as u64,
                rkey: remote.rkey(),
                inline: false,
                signal: done + len == range.len(),
            };
            // SAFETY: the range lies in the region, a handle of which stays in the table; Rust code accesses
            // a region's memory by copies that tolerate races only.
            unsafe {
                let keep = || Some(Resource::Region(local.clone()));
                self.state.post(&self.shared, request, keep)?;
            }
            done += len;
        }
        let last = self.state.table.next_seq() - 1;
        self.wait_until(&mut patience, "the end of an RDMA operation", |table| table.is_done(last))?;
        self.state.outcome(&self.shared, last)
    }
}
