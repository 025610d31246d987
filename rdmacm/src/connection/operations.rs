//! What the halves of a connection do beside plain messages, writes and reads: each method is the one of verbs.

use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use verbs::{
    Access, Batch, MemoryRegion, MemoryWindow, Notification, QueuePairAttributes, RecvBuf, RemoteRegion, Ticket, Wait,
};

use super::{Connection, RecvHalf, SendHalf};
use crate::error::Result;

impl Connection {
    /// The state and attributes of the queue pair, as the device has them now (`ibv_query_qp`).
    ///
    /// # Errors
    /// [`verbs::Error::Os`], for instance when the device is gone.
    #[doc(alias = "ibv_query_qp")]
    pub fn queue_pair_attributes(&self) -> Result<QueuePairAttributes> {
        Ok(self.link().control.queue_pair().query()?)
    }

    /// The half that sends, for what is not offered here.
    pub fn sender(&mut self) -> &mut SendHalf {
        &mut self.send
    }

    /// The half that receives, for what is not offered here.
    pub fn receiver(&mut self) -> &mut RecvHalf {
        &mut self.recv
    }

    /// See [`SendHalf::send_imm`].
    ///
    /// # Errors
    /// As [`SendHalf::send_imm`].
    pub fn send_imm(&mut self, message: &[u8], imm: u32) -> Result<()> {
        self.send.half.send_imm(message, imm).map_err(|error| self.recv.explain(error))
    }

    /// See [`SendHalf::write_imm`].
    ///
    /// # Errors
    /// As [`SendHalf::write_imm`].
    pub fn write_imm(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        offset: u64,
        imm: u32,
    ) -> Result<()> {
        self.send.half.write_imm(local, range, remote, offset, imm).map_err(|error| self.recv.explain(error))
    }

    /// See [`SendHalf::compare_and_swap`].
    ///
    /// # Errors
    /// As [`SendHalf::compare_and_swap`].
    pub fn compare_and_swap(&mut self, remote: &RemoteRegion, offset: u64, expected: u64, new: u64) -> Result<u64> {
        self.send.half.compare_and_swap(remote, offset, expected, new).map_err(|error| self.recv.explain(error))
    }

    /// See [`SendHalf::fetch_and_add`].
    ///
    /// # Errors
    /// As [`SendHalf::fetch_and_add`].
    pub fn fetch_and_add(&mut self, remote: &RemoteRegion, offset: u64, add: u64) -> Result<u64> {
        self.send.half.fetch_and_add(remote, offset, add).map_err(|error| self.recv.explain(error))
    }
}

impl SendHalf {
    /// Sends a message with an immediate value, which the peer finds beside it ([`RecvBuf::imm`](crate::RecvBuf::imm)).
    ///
    /// # Errors
    /// As [`verbs::SendHalf::send_imm`].
    #[inline]
    pub fn send_imm(&mut self, message: &[u8], imm: u32) -> Result<()> {
        Ok(self.half.send_imm(message, imm)?)
    }

    /// As [`send`](Self::send), without waiting: [`verbs::Error::WouldBlock`] when the send queue is full.
    ///
    /// # Errors
    /// As [`verbs::SendHalf::try_send`].
    #[inline]
    pub fn try_send(&mut self, message: &[u8]) -> Result<()> {
        Ok(self.half.try_send(message)?)
    }

    /// Sends the pieces as one message, copied one after the other.
    ///
    /// # Errors
    /// As [`verbs::SendHalf::send_vectored`].
    #[inline]
    pub fn send_vectored(&mut self, pieces: &[IoSlice<'_>]) -> Result<()> {
        Ok(self.half.send_vectored(pieces)?)
    }

    /// As [`write`](Self::write), and tells the peer, which receives `imm` and the length.
    ///
    /// # Errors
    /// As [`verbs::SendHalf::write_imm`].
    #[inline]
    pub fn write_imm(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        offset: u64,
        imm: u32,
    ) -> Result<()> {
        Ok(self.half.write_imm(local, range, remote, offset, imm)?)
    }

    /// Replaces eight bytes of the peer's memory by `new` if they are `expected`, in one step. Returns what was there.
    ///
    /// # Errors
    /// As [`verbs::SendHalf::compare_and_swap`].
    #[inline]
    pub fn compare_and_swap(&mut self, remote: &RemoteRegion, offset: u64, expected: u64, new: u64) -> Result<u64> {
        Ok(self.half.compare_and_swap(remote, offset, expected, new)?)
    }

    /// Adds to eight bytes of the peer's memory in one step. Returns what was there.
    ///
    /// # Errors
    /// As [`verbs::SendHalf::fetch_and_add`].
    #[inline]
    pub fn fetch_and_add(&mut self, remote: &RemoteRegion, offset: u64, add: u64) -> Result<u64> {
        Ok(self.half.fetch_and_add(remote, offset, add)?)
    }

    /// Posts a write and returns at once, so that many can be in flight.
    ///
    /// # Errors
    /// As [`verbs::SendHalf::post_write`].
    #[inline]
    pub fn post_write(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        offset: u64,
        imm: Option<u32>,
    ) -> Result<Ticket> {
        Ok(self.half.post_write(local, range, remote, offset, imm)?)
    }

    /// Posts a read and returns at once, so that many can be in flight.
    ///
    /// # Errors
    /// As [`verbs::SendHalf::post_read`].
    #[inline]
    pub fn post_read(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        offset: u64,
    ) -> Result<Ticket> {
        Ok(self.half.post_read(local, range, remote, offset)?)
    }

    /// Posts a [`compare_and_swap`](Self::compare_and_swap), whose result arrives in the local region.
    ///
    /// # Errors
    /// As [`verbs::SendHalf::post_compare_and_swap`].
    #[inline]
    pub fn post_compare_and_swap(
        &mut self,
        local: &MemoryRegion,
        local_offset: usize,
        remote: &RemoteRegion,
        offset: u64,
        expected: u64,
        new: u64,
    ) -> Result<Ticket> {
        Ok(self.half.post_compare_and_swap(local, local_offset, remote, offset, expected, new)?)
    }

    /// Posts a [`fetch_and_add`](Self::fetch_and_add), whose result arrives in the local region.
    ///
    /// # Errors
    /// As [`verbs::SendHalf::post_fetch_and_add`].
    #[inline]
    pub fn post_fetch_and_add(
        &mut self,
        local: &MemoryRegion,
        local_offset: usize,
        remote: &RemoteRegion,
        offset: u64,
        add: u64,
    ) -> Result<Ticket> {
        Ok(self.half.post_fetch_and_add(local, local_offset, remote, offset, add)?)
    }

    /// Looks, without waiting, which posted operations ended. Returns how many.
    ///
    /// # Errors
    /// As [`verbs::SendHalf::try_progress`].
    #[inline]
    pub fn try_progress(&mut self) -> Result<usize> {
        Ok(self.half.try_progress()?)
    }

    /// Waits until a posted operation, and so all before it, is done.
    ///
    /// # Errors
    /// As [`verbs::SendHalf::wait`].
    #[inline]
    pub fn wait(&mut self, ticket: Ticket) -> Result<()> {
        Ok(self.half.wait(ticket)?)
    }

    /// As [`wait`](Self::wait), waiting at most `timeout`.
    ///
    /// # Errors
    /// As [`verbs::SendHalf::wait_timeout`].
    #[inline]
    pub fn wait_timeout(&mut self, ticket: Ticket, timeout: Duration) -> Result<()> {
        Ok(self.half.wait_timeout(ticket, timeout)?)
    }

    /// Waits until at least one more posted operation is over. Returns how many ended; 0 if none was in flight.
    ///
    /// # Errors
    /// As [`verbs::SendHalf::wait_any`].
    #[inline]
    pub fn wait_any(&mut self) -> Result<usize> {
        Ok(self.half.wait_any()?)
    }

    /// Prepares for sleeping in a poll loop of the program's own: `true` says to sleep until the half's descriptor (`AsFd`) or [`closed_fd`](Self::closed_fd) is readable, `false` that there is news already.
    ///
    /// # Errors
    /// As [`verbs::SendHalf::arm`].
    #[inline]
    pub fn arm(&mut self) -> Result<bool> {
        Ok(self.half.arm()?)
    }

    /// Grants the peer a range of a region with the right [`MW_BIND`](verbs::Access::MW_BIND), by a memory window that can be
    /// taken back: send the peer [`MemoryWindow::remote`].
    ///
    /// # Errors
    /// As [`verbs::SendHalf::grant`].
    pub fn grant(&mut self, region: &MemoryRegion, range: Range<usize>, access: Access) -> Result<MemoryWindow> {
        Ok(self.half.grant(region, range, access)?)
    }

    /// Takes a grant back: when it returns, the peer can reach nothing by it any more.
    ///
    /// # Errors
    /// As [`verbs::SendHalf::revoke`].
    pub fn revoke(&mut self, window: MemoryWindow) -> Result<()> {
        Ok(self.half.revoke(window)?)
    }

    /// Sends a message and gives a grant of the peer back with it.
    ///
    /// # Errors
    /// As [`verbs::SendHalf::send_invalidate`].
    pub fn send_invalidate(&mut self, message: &[u8], window: &RemoteRegion) -> Result<()> {
        Ok(self.half.send_invalidate(message, window)?)
    }

    /// Whether a posted operation is known to be over, done or failed; see [`try_progress`](Self::try_progress).
    #[must_use]
    pub fn is_done(&self, ticket: Ticket) -> bool {
        self.half.is_done(ticket)
    }

    /// Begins a batch: several operations posted with one call of the driver.
    pub fn batch(&mut self) -> Batch<'_> {
        self.half.batch()
    }

    /// How many operations are posted and not known to be done.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.half.in_flight()
    }

    /// A descriptor that becomes readable, for good, when the connection ends.
    #[must_use]
    pub fn closed_fd(&self) -> BorrowedFd<'_> {
        self.half.closed_fd()
    }

    /// Changes how this half waits.
    pub fn set_wait(&mut self, wait: Wait) {
        self.half.set_wait(wait);
    }

    /// Has the messages from now on marked as solicited, or not: see
    /// [`RecvHalf::set_solicited_only`].
    pub fn set_solicited(&mut self, solicited: bool) {
        self.half.set_solicited(solicited);
    }
}

impl AsFd for SendHalf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.half.as_fd()
    }
}

impl RecvHalf {
    /// As [`recv`](Self::recv), without waiting: [`verbs::Error::WouldBlock`] when there is no message.
    ///
    /// # Errors
    /// As [`verbs::RecvHalf::try_recv`].
    #[inline]
    pub fn try_recv(&mut self, buffer: &mut [u8]) -> Result<usize> {
        Ok(self.half.try_recv(buffer)?)
    }

    /// As [`recv_buf`](Self::recv_buf), without waiting: [`verbs::Error::WouldBlock`] when there is no message.
    ///
    /// # Errors
    /// As [`verbs::RecvHalf::try_recv_buf`].
    #[inline]
    pub fn try_recv_buf(&mut self) -> Result<RecvBuf> {
        Ok(self.half.try_recv_buf()?)
    }

    /// Waits for a write with an immediate value, or an empty message: with the option [`notifications`](verbs::EndpointOptions::notifications).
    ///
    /// # Errors
    /// As [`verbs::RecvHalf::recv_notification`].
    #[inline]
    pub fn recv_notification(&mut self) -> Result<Notification> {
        Ok(self.half.recv_notification()?)
    }

    /// As [`recv_notification`](Self::recv_notification), waiting at most `timeout`.
    ///
    /// # Errors
    /// As [`verbs::RecvHalf::recv_notification_timeout`].
    #[inline]
    pub fn recv_notification_timeout(&mut self, timeout: Duration) -> Result<Notification> {
        Ok(self.half.recv_notification_timeout(timeout)?)
    }

    /// As [`recv_notification`](Self::recv_notification), without waiting.
    ///
    /// # Errors
    /// As [`verbs::RecvHalf::try_recv_notification`].
    #[inline]
    pub fn try_recv_notification(&mut self) -> Result<Notification> {
        Ok(self.half.try_recv_notification()?)
    }

    /// Prepares for sleeping in a poll loop of the program's own: `true` says to sleep until the half's descriptor (`AsFd`) or [`closed_fd`](Self::closed_fd) is readable, `false` that there is a message already.
    ///
    /// # Errors
    /// As [`verbs::RecvHalf::arm`].
    #[inline]
    pub fn arm(&mut self) -> Result<bool> {
        Ok(self.half.arm()?)
    }

    /// A descriptor that becomes readable, for good, when the connection ends.
    #[must_use]
    pub fn closed_fd(&self) -> BorrowedFd<'_> {
        self.half.closed_fd()
    }

    /// Changes how this half waits.
    pub fn set_wait(&mut self, wait: Wait) {
        self.half.set_wait(wait);
    }

    /// Has only messages that the peer marked ([`SendHalf::set_solicited`]) end a sleep, or all of them.
    pub fn set_solicited_only(&mut self, solicited_only: bool) {
        self.half.set_solicited_only(solicited_only);
    }
}

impl AsFd for RecvHalf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.half.as_fd()
    }
}
