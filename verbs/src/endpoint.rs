//! The blocking data path of a reliable connection: messages and one-sided operations.

mod builder;
mod options;
mod recv;
mod send;
mod shared;

use std::fmt;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{CloseReason, Error, Result};
use crate::mr::MemoryRegion;
use crate::pool::SendBuf;
use crate::qp::QueuePair;
use crate::remote::RemoteRegion;
use shared::Shared;

pub use builder::EndpointBuilder;
pub use options::EndpointOptions;
pub use recv::{Notification, RecvBuf, RecvHalf};
pub use send::{Batch, SendHalf, Ticket};
pub use shared::Probe;

/// One end of a reliable connection.
///
/// It has two halves that share no lock: [`split`](Self::split) gives them to two threads.
///
/// * [`send`](Self::send) returns once the message is posted, and blocks only while the send queue is full; it is
///   delivered when [`flush`](Self::flush) returns. [`write`](Self::write) and [`read`](Self::read) return when the
///   operation is done. The peer's program is not told of writes: send a message after them.
/// * [`recv`](Self::recv) takes messages in the order they were sent. The peer can send `recv_depth` messages
///   that nobody took; after that its sends wait.
/// * The first thing that goes wrong breaks the connection for good, and every later call returns that first cause.
///   Messages that arrived before stay readable first. If at first it is only known that operations were
///   flushed, a cause found later replaces that.
///
/// # Dropping
/// What is in flight stays alive until the queue pair is destroyed, which happens when both halves, all
/// [`Control`]s and all [`RecvBuf`]s are gone. Sends that were not flushed may be lost.
#[derive(Debug)]
pub struct Endpoint {
    send: SendHalf,
    recv: RecvHalf,
}

impl Endpoint {
    fn new(send: SendHalf, recv: RecvHalf) -> Endpoint {
        Endpoint { send, recv }
    }

    /// A handle to close the connection from elsewhere, and to learn why it ended.
    pub fn control(&self) -> Control {
        Control { shared: self.send.shared().clone() }
    }

    /// The halves, for two threads.
    pub fn split(self) -> (SendHalf, RecvHalf) {
        (self.send, self.recv)
    }

    /// The half that sends.
    pub fn sender(&mut self) -> &mut SendHalf {
        &mut self.send
    }

    /// The half that receives.
    pub fn receiver(&mut self) -> &mut RecvHalf {
        &mut self.recv
    }

    /// See [`SendHalf::send`].
    ///
    /// # Errors
    /// Those of [`SendHalf::send`].
    #[inline]
    pub fn send(&mut self, data: &[u8]) -> Result<()> {
        self.send.send(data).map_err(|e| self.recv.explain(e))
    }

    /// See [`SendHalf::send_timeout`].
    ///
    /// # Errors
    /// Those of [`SendHalf::send_timeout`].
    pub fn send_timeout(&mut self, data: &[u8], timeout: Duration) -> Result<()> {
        self.send.send_timeout(data, timeout).map_err(|e| self.recv.explain(e))
    }

    /// See [`SendHalf::try_send`].
    ///
    /// # Errors
    /// Those of [`SendHalf::try_send`].
    pub fn try_send(&mut self, data: &[u8]) -> Result<()> {
        self.send.try_send(data).map_err(|e| self.recv.explain(e))
    }

    /// See [`SendHalf::send_imm`].
    ///
    /// # Errors
    /// Those of [`SendHalf::send_imm`].
    pub fn send_imm(&mut self, data: &[u8], imm: u32) -> Result<()> {
        self.send.send_imm(data, imm).map_err(|e| self.recv.explain(e))
    }

    /// See [`SendHalf::alloc`].
    ///
    /// # Errors
    /// Those of [`SendHalf::alloc`].
    pub fn alloc(&mut self) -> Result<SendBuf> {
        self.send.alloc().map_err(|e| self.recv.explain(e))
    }

    /// See [`SendHalf::send_buf`].
    ///
    /// # Errors
    /// Those of [`SendHalf::send_buf`].
    #[inline]
    pub fn send_buf(&mut self, buf: SendBuf) -> Result<(), (Error, SendBuf)> {
        self.send.send_buf(buf).map_err(|(e, buf)| (self.recv.explain(e), buf))
    }

    /// See [`SendHalf::write`].
    ///
    /// # Errors
    /// Those of [`SendHalf::write`].
    pub fn write(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        remote_offset: u64,
    ) -> Result<()> {
        self.send.write(local, range, remote, remote_offset).map_err(|e| self.recv.explain(e))
    }

    /// See [`SendHalf::write_imm`].
    ///
    /// # Errors
    /// Those of [`SendHalf::write_imm`].
    pub fn write_imm(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        remote_offset: u64,
        imm: u32,
    ) -> Result<()> {
        self.send.write_imm(local, range, remote, remote_offset, imm).map_err(|e| self.recv.explain(e))
    }

    /// See [`SendHalf::read`].
    ///
    /// # Errors
    /// Those of [`SendHalf::read`].
    pub fn read(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        remote_offset: u64,
    ) -> Result<()> {
        self.send.read(local, range, remote, remote_offset).map_err(|e| self.recv.explain(e))
    }

    /// See [`SendHalf::flush`].
    ///
    /// # Errors
    /// Those of [`SendHalf::flush`].
    pub fn flush(&mut self) -> Result<()> {
        self.send.flush().map_err(|e| self.recv.explain(e))
    }

    /// See [`RecvHalf::recv`].
    ///
    /// # Errors
    /// Those of [`RecvHalf::recv`].
    #[inline]
    pub fn recv(&mut self, buf: &mut [u8]) -> Result<usize> {
        self.recv.recv(buf)
    }

    /// See [`RecvHalf::recv_timeout`].
    ///
    /// # Errors
    /// Those of [`RecvHalf::recv_timeout`].
    pub fn recv_timeout(&mut self, buf: &mut [u8], timeout: Duration) -> Result<usize> {
        self.recv.recv_timeout(buf, timeout)
    }

    /// See [`RecvHalf::try_recv`].
    ///
    /// # Errors
    /// Those of [`RecvHalf::try_recv`].
    pub fn try_recv(&mut self, buf: &mut [u8]) -> Result<usize> {
        self.recv.try_recv(buf)
    }

    /// See [`RecvHalf::recv_buf`].
    ///
    /// # Errors
    /// Those of [`RecvHalf::recv_buf`].
    #[inline]
    pub fn recv_buf(&mut self) -> Result<RecvBuf> {
        self.recv.recv_buf()
    }

    /// See [`RecvHalf::recv_buf_timeout`].
    ///
    /// # Errors
    /// Those of [`RecvHalf::recv_buf_timeout`].
    pub fn recv_buf_timeout(&mut self, timeout: Duration) -> Result<RecvBuf> {
        self.recv.recv_buf_timeout(timeout)
    }

    /// See [`SendHalf::set_timeout`].
    ///
    /// # Errors
    /// [`Error::Misuse`] for a timeout of zero.
    pub fn set_send_timeout(&mut self, timeout: Option<Duration>) -> Result<()> {
        self.send.set_timeout(timeout)
    }

    /// See [`RecvHalf::set_timeout`].
    ///
    /// # Errors
    /// [`Error::Misuse`] for a timeout of zero.
    pub fn set_recv_timeout(&mut self, timeout: Option<Duration>) -> Result<()> {
        self.recv.set_timeout(timeout)
    }
}

/// A handle to a connection for whoever manages it. None of its functions waits.
#[derive(Clone)]
pub struct Control {
    shared: Arc<Shared>,
}

impl Control {
    /// Ends the connection: keeps the reason, unless another was first, moves the queue pair to the error
    /// state, and wakes both halves.
    pub fn close(&self, reason: CloseReason) {
        self.shared.fail(Error::Closed(reason));
    }

    /// Like [`close`](Self::close), but leaves the queue pair to the caller, who moves it to the error state
    /// right after.
    pub fn note(&self, reason: CloseReason) {
        self.shared.note(Error::Closed(reason));
    }

    /// Why the connection ended; `None` while it works.
    pub fn cause(&self) -> Option<Error> {
        self.shared.cause()
    }

    /// Has `hook` called once when a half finds the connection broken before a control said so, by the thread of
    /// that half; at once if that happened already. It must not wait for anything, nor hold a `Control` of the
    /// same endpoint, which would then never be freed. The first hook set is the one that counts.
    pub fn set_broken_hook(&self, hook: Box<dyn Fn() + Send + Sync>) {
        self.shared.set_hook(hook);
    }

    /// Asks whether the peer still answers: posts an empty RDMA write, which the peer's device acknowledges without its
    /// program, and without the right to any of its memory. A later call tells whether it was answered. With
    /// a peer that is dead the probe fails when the retries of the queue pair are used up, and the connection is
    /// broken for that reason; where they never are (see `retry_count`), or take too long for the caller, the caller
    /// counts the calls that return [`Probe::Unanswered`] and [closes](Self::close) it as
    /// [`CloseReason::Unresponsive`].
    ///
    /// At most one probe is under way; the send queue has a place for it beside `send_depth`. The peer's queue pair must
    /// allow RDMA writes, as it does when a connection manager set it up.
    pub fn probe(&self) -> Probe {
        self.shared.probe()
    }

    /// The queue pair, for queries and its timers.
    pub fn queue_pair(&self) -> &QueuePair {
        self.shared.queue_pair()
    }

    /// A descriptor that becomes readable, for good, when the connection ends.
    pub fn closed_fd(&self) -> BorrowedFd<'_> {
        self.shared.closed_fd()
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control")
            .field("queue_pair", self.queue_pair())
            .field("cause", &self.cause())
            .finish_non_exhaustive()
    }
}

const _: () = {
    const fn assert_send_sync<T: Send + Sync>() {}
    const fn assert_send<T: Send>() {}
    assert_send_sync::<Control>();
    assert_send_sync::<RecvBuf>();
    assert_send::<SendHalf>();
    assert_send::<RecvHalf>();
    assert_send::<Endpoint>();
};
