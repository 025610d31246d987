//! An established connection.

mod operations;

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use verbs::{Access, CloseReason, Control, Endpoint, MemoryRegion, ProtectionDomain, RecvBuf, RemoteRegion, SendBuf};

use crate::connector::Connector;
use crate::error::{Error, Result, TimedOutStep};
use crate::events::{ConnectionEvents, Subscriber};
use crate::handle::{self, Command, Notice};
use crate::id::Key;
use crate::manager::{Device, Manager};
use crate::private_data::PrivateData;
use crate::sys;
use crate::time;

/// How long dropping a connection waits for its id to be gone.
const RELEASE_DEADLINE: Duration = Duration::from_secs(1);

/// A connection: messages, and one-sided operations on memory that the peer has opened.
///
/// The methods block until they are done, until the [timeout](Connection::set_timeout) of their direction, or until the
/// connection ends; after its end every method returns the first cause. A sender and a receiver thread use the two
/// halves of [`Connection::split`].
///
/// Dropping it waits until the messages sent are acknowledged by the peer's device (at most
/// [`drain_timeout`](crate::ConnectionOptions::drain_timeout), 1 s), disconnects, which the peer sees at once, and gives
/// everything back.
///
/// ```no_run
/// use rdmacm::{Access, Connection, RemoteRegion};
///
/// # fn main() -> Result<(), rdmacm::Error> {
/// let mut connection = Connection::connect("10.1.2.3:7471")?;
/// // The listener's first message says where its memory is.
/// let mut region = [0; 24];
/// connection.recv(&mut region)?;
/// let remote = RemoteRegion::from_bytes(&region);
///
/// let local = connection.register(4096, Access::LOCAL_WRITE)?;
/// local.write_at(0, b"straight into the peer's memory")?;
/// connection.write(&local, 0..31, &remote, 0)?;
/// # Ok(())
/// # }
/// ```
pub struct Connection {
    send: SendHalf,
    recv: RecvHalf,
}

impl Connection {
    /// Connects with the defaults of [`Connector`].
    ///
    /// # Errors
    /// As [`Connector::connect`].
    pub fn connect(address: impl ToSocketAddrs) -> Result<Self> {
        Connector::new().connect(address)
    }

    pub(crate) fn new(endpoint: Endpoint, link: Link) -> Self {
        let (send, recv) = endpoint.split();
        let link = Arc::new(link);
        Self {
            send: SendHalf { half: send, drain_timeout: link.drain_timeout, link: Arc::clone(&link) },
            recv: RecvHalf { half: recv, link },
        }
    }

    /// This side's address.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.link().local
    }

    /// The peer's address.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.link().peer
    }

    /// What the peer sent along with its request or its accept. The peer chose every byte of it.
    #[must_use]
    pub fn private_data(&self) -> &PrivateData {
        &self.link().private_data
    }

    /// The device that the connection uses.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.link().device
    }

    /// The protection domain that the connection uses: memory registered on it can be used here.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        self.device().protection_domain()
    }

    /// Registers memory for the connection; see [`Device::register`].
    ///
    /// # Errors
    /// As [`Device::register`].
    pub fn register(&self, len: usize, access: Access) -> Result<MemoryRegion> {
        self.device().register(len, access)
    }

    /// Ends the connection in order: waits until everything sent is acknowledged by the peer's device, then disconnects
    /// and waits for the peer's answer ([`disconnect_timeout`](crate::ConnectionOptions::disconnect_timeout), 2 s, for
    /// each). A peer that disconnected at the same time, or before, is no error once everything sent is acknowledged.
    ///
    /// # Errors
    /// [`Error::Verbs`] if something sent was not acknowledged; [`Error::TimedOut`] if the peer did not answer. Either way
    /// the connection is over.
    pub fn disconnect(mut self) -> Result<()> {
        let limit = self.link().disconnect_timeout;
        let flushed = self.send.half.flush_timeout(limit).map_err(|error| self.recv.half.explain(error));
        let link = Arc::clone(&self.send.link);
        let answered = link.disconnect(limit);
        drop(self);
        match flushed {
            // The peer was first; nothing of ours was outstanding.
            Ok(()) | Err(verbs::Error::Closed(CloseReason::Peer)) => answered,
            Err(error) => Err(error.into()),
        }
    }

    /// Ends the connection at once: what was sent and is not yet acknowledged may be lost. The peer is told.
    pub fn abort(mut self) {
        self.send.drain_timeout = Duration::ZERO;
    }

    /// Tells what happens to the connection from now on, on whatever thread wants to know; the connection need not be
    /// used for that.
    #[must_use]
    pub fn events(&self) -> ConnectionEvents {
        let (subscriber, events) = Subscriber::new();
        self.link().manager.mailbox().send(Command::Subscribe { key: self.link().key, subscriber });
        events
    }

    /// Why the connection is over; `None` while it works. A peer that died silently is only noticed by an operation that
    /// needs its answer, or by the keepalive.
    #[must_use]
    pub fn cause(&self) -> Option<Error> {
        self.link().control.cause().map(Error::Verbs)
    }

    /// Divides the connection for two threads. It ends when both halves are dropped.
    #[must_use]
    pub fn split(self) -> (SendHalf, RecvHalf) {
        (self.send, self.recv)
    }

    fn link(&self) -> &Link {
        &self.send.link
    }
}

// The data path. Each method is one of a half's; with both halves at hand, an error that says no more than "flushed" can be
// explained by what the other half finds.
impl Connection {
    /// See [`SendHalf::send`].
    ///
    /// # Errors
    /// As [`SendHalf::send`].
    #[inline]
    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        self.send.half.send(message).map_err(|error| self.recv.explain(error))
    }

    /// See [`SendHalf::alloc`].
    ///
    /// # Errors
    /// As [`SendHalf::alloc`].
    #[inline]
    pub fn alloc(&mut self) -> Result<SendBuf> {
        self.send.half.alloc().map_err(|error| self.recv.explain(error))
    }

    /// See [`SendHalf::send_buf`].
    ///
    /// # Errors
    /// As [`SendHalf::send_buf`].
    #[inline]
    pub fn send_buf(&mut self, buffer: SendBuf) -> Result<(), (Error, SendBuf)> {
        self.send.half.send_buf(buffer).map_err(|(error, buffer)| (self.recv.explain(error), buffer))
    }

    /// See [`SendHalf::write`].
    ///
    /// # Errors
    /// As [`SendHalf::write`].
    #[inline]
    pub fn write(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        offset: u64,
    ) -> Result<()> {
        self.send.half.write(local, range, remote, offset).map_err(|error| self.recv.explain(error))
    }

    /// See [`SendHalf::read`].
    ///
    /// # Errors
    /// As [`SendHalf::read`].
    #[inline]
    pub fn read(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        offset: u64,
    ) -> Result<()> {
        self.send.half.read(local, range, remote, offset).map_err(|error| self.recv.explain(error))
    }

    /// See [`SendHalf::flush`].
    ///
    /// # Errors
    /// As [`SendHalf::flush`].
    #[inline]
    pub fn flush(&mut self) -> Result<()> {
        self.send.half.flush().map_err(|error| self.recv.explain(error))
    }

    /// See [`RecvHalf::recv`].
    ///
    /// # Errors
    /// As [`RecvHalf::recv`].
    #[inline]
    pub fn recv(&mut self, buffer: &mut [u8]) -> Result<usize> {
        self.recv.recv(buffer)
    }

    /// See [`RecvHalf::recv_timeout`].
    ///
    /// # Errors
    /// As [`RecvHalf::recv_timeout`].
    #[inline]
    pub fn recv_timeout(&mut self, buffer: &mut [u8], timeout: Duration) -> Result<usize> {
        self.recv.recv_timeout(buffer, timeout)
    }

    /// See [`RecvHalf::recv_buf`].
    ///
    /// # Errors
    /// As [`RecvHalf::recv_buf`].
    #[inline]
    pub fn recv_buf(&mut self) -> Result<RecvBuf> {
        self.recv.recv_buf()
    }

    /// See [`RecvHalf::recv_buf_timeout`].
    ///
    /// # Errors
    /// As [`RecvHalf::recv_buf_timeout`].
    #[inline]
    pub fn recv_buf_timeout(&mut self, timeout: Duration) -> Result<RecvBuf> {
        self.recv.recv_buf_timeout(timeout)
    }

    /// Sets the timeout of both directions; `None`, the default, waits as long as the connection lives.
    ///
    /// # Errors
    /// [`verbs::Error::Misuse`] for a timeout of zero, as in std.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> Result<()> {
        self.send.set_timeout(timeout)?;
        self.recv.set_timeout(timeout)
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("link", self.link()).field("send", &self.send.half).finish_non_exhaustive()
    }
}

/// The half of a [`Connection`] that sends, writes and reads.
///
/// Dropping it waits for what was sent to be acknowledged, like dropping a connection; the connection ends when both
/// halves are dropped.
pub struct SendHalf {
    half: verbs::SendHalf,
    drain_timeout: Duration,
    /// Dropped after `half`, so that the last one takes a whole endpoint apart.
    link: Arc<Link>,
}

impl SendHalf {
    /// The half of the data path.
    pub(crate) fn raw(&mut self) -> &mut verbs::SendHalf {
        &mut self.half
    }

    pub(crate) fn control(&self) -> &Control {
        &self.link.control
    }

    /// Sends a copy of a message, which may be empty. Returns when it is posted, waits while the send queue is full.
    /// Once it is posted, only the end of the connection can keep it from the peer.
    ///
    /// # Errors
    /// [`verbs::Error::TooLong`] above the option [`message_size`](crate::EndpointOptions::message_size);
    /// [`verbs::Error::TimedOut`] when a timeout is set, and nothing was sent; the cause once the connection is over.
    #[inline]
    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        Ok(self.half.send(message)?)
    }

    /// As [`send`](Self::send), waiting at most `timeout`.
    ///
    /// # Errors
    /// As [`send`](Self::send), and [`verbs::Error::Misuse`] for a timeout of zero.
    #[inline]
    pub fn send_timeout(&mut self, message: &[u8], timeout: Duration) -> Result<()> {
        Ok(self.half.send_timeout(message, timeout)?)
    }

    /// A registered buffer, to be filled and sent without a copy by [`send_buf`](Self::send_buf).
    ///
    /// # Errors
    /// [`verbs::Error::Misuse`] when the program itself holds all of them; [`verbs::Error::TimedOut`] when a timeout is
    /// set; [`verbs::Error::Os`] when they cannot be registered; the cause once the connection is over.
    #[inline]
    pub fn alloc(&mut self) -> Result<SendBuf> {
        Ok(self.half.alloc()?)
    }

    /// Sends the contents of a registered buffer without a copy. Returns when it is posted.
    ///
    /// # Errors
    /// As [`send`](Self::send); the buffer comes back with the error.
    #[inline]
    pub fn send_buf(&mut self, buffer: SendBuf) -> Result<(), (Error, SendBuf)> {
        self.half.send_buf(buffer).map_err(|(error, buffer)| (error.into(), buffer))
    }

    /// RDMA write: copies `range` of a local region into the peer's region, from `offset` on. Returns when the peer's
    /// device has acknowledged it. The peer's program is not told: send a message after it.
    ///
    /// # Errors
    /// [`verbs::Error::Misuse`] for ranges outside the regions or a region of another protection domain, and nothing is
    /// sent; [`verbs::Error::Work`] when the peer's device refuses (wrong key, no right, region gone), which ends the
    /// connection; [`verbs::Error::TimedOut`] when a timeout is set, and it may still be carried out.
    #[inline]
    pub fn write(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        offset: u64,
    ) -> Result<()> {
        Ok(self.half.write(local, range, remote, offset)?)
    }

    /// RDMA read: copies from the peer's region, from `offset` on, into `range` of a local region, which needs
    /// [`Access::LOCAL_WRITE`]. Returns when the bytes are there. The peer's program is not told.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    #[inline]
    pub fn read(
        &mut self,
        local: &MemoryRegion,
        range: Range<usize>,
        remote: &RemoteRegion,
        offset: u64,
    ) -> Result<()> {
        Ok(self.half.read(local, range, remote, offset)?)
    }

    /// Waits until everything posted is done: messages sent are in the peer's memory.
    ///
    /// # Errors
    /// The cause, if something posted was not done; [`verbs::Error::TimedOut`] when a timeout is set.
    #[inline]
    pub fn flush(&mut self) -> Result<()> {
        Ok(self.half.flush()?)
    }

    /// Sets how long the methods of this half wait; `None`, the default, as long as the connection lives.
    ///
    /// # Errors
    /// [`verbs::Error::Misuse`] for a timeout of zero, as in std.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> Result<()> {
        Ok(self.half.set_timeout(timeout)?)
    }
}

impl Drop for SendHalf {
    fn drop(&mut self) {
        if self.half.in_flight() != 0
            && !self.drain_timeout.is_zero()
            && let Err(error) = self.half.flush_timeout(self.drain_timeout)
        {
            log::debug!("id={} dropped with work outstanding: {error}", self.link.key.0);
        }
    }
}

impl fmt::Debug for SendHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendHalf").field("link", &self.link).field("half", &self.half).finish()
    }
}

/// The half of a [`Connection`] that receives. The connection ends when both halves are dropped.
pub struct RecvHalf {
    half: verbs::RecvHalf,
    /// Dropped after `half`, so that the last one takes a whole endpoint apart.
    link: Arc<Link>,
}

impl RecvHalf {
    /// The half of the data path.
    pub(crate) fn raw(&mut self) -> &mut verbs::RecvHalf {
        &mut self.half
    }

    fn explain(&mut self, error: verbs::Error) -> Error {
        self.half.explain(error).into()
    }

    /// Waits for a message and copies it into `buffer`. Returns its length, which may be 0.
    ///
    /// # Errors
    /// [`verbs::Error::Truncated`] when it is longer than `buffer`, and it is kept for the next call;
    /// [`verbs::Error::TimedOut`] when a timeout is set, and nothing is lost; the cause once the connection is over and
    /// all that arrived before is taken.
    #[inline]
    pub fn recv(&mut self, buffer: &mut [u8]) -> Result<usize> {
        Ok(self.half.recv(buffer)?)
    }

    /// As [`recv`](Self::recv), waiting at most `timeout`.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), and [`verbs::Error::Misuse`] for a timeout of zero.
    #[inline]
    pub fn recv_timeout(&mut self, buffer: &mut [u8], timeout: Duration) -> Result<usize> {
        Ok(self.half.recv_timeout(buffer, timeout)?)
    }

    /// Waits for a message and hands out the registered buffer it is in, without a copy. Dropping the buffer, on whatever
    /// thread, makes room for another message; a program that keeps all of them receives nothing more.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), but for [`verbs::Error::Truncated`].
    #[inline]
    pub fn recv_buf(&mut self) -> Result<RecvBuf> {
        Ok(self.half.recv_buf()?)
    }

    /// As [`recv_buf`](Self::recv_buf), waiting at most `timeout`.
    ///
    /// # Errors
    /// As [`recv_buf`](Self::recv_buf), and [`verbs::Error::Misuse`] for a timeout of zero.
    #[inline]
    pub fn recv_buf_timeout(&mut self, timeout: Duration) -> Result<RecvBuf> {
        Ok(self.half.recv_buf_timeout(timeout)?)
    }

    /// Sets how long the methods of this half wait; `None`, the default, as long as the connection lives.
    ///
    /// # Errors
    /// [`verbs::Error::Misuse`] for a timeout of zero, as in std.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> Result<()> {
        Ok(self.half.set_timeout(timeout)?)
    }
}

impl fmt::Debug for RecvHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvHalf").field("link", &self.link).field("half", &self.half).finish()
    }
}

/// What both halves share of the connection manager; the last one to go releases the id.
pub(crate) struct Link {
    pub(crate) control: Control,
    pub(crate) key: Key,
    pub(crate) notices: Receiver<Notice>,
    pub(crate) manager: Manager,
    pub(crate) device: Device,
    pub(crate) local: SocketAddr,
    pub(crate) peer: SocketAddr,
    pub(crate) private_data: PrivateData,
    pub(crate) disconnect_timeout: Duration,
    pub(crate) drain_timeout: Duration,
}

impl Link {
    /// Disconnects, and waits for the peer's answer.
    fn disconnect(&self, limit: Duration) -> Result<()> {
        let deadline = time::after(Instant::now(), limit);
        self.manager.mailbox().send(Command::Disconnect { key: self.key, deadline });
        match handle::wait(&self.notices, deadline)? {
            Some(Notice::Closed { answered: true }) => Ok(()),
            Some(Notice::Closed { answered: false }) | None => {
                Err(Error::TimedOut { step: TimedOutStep::Disconnect, after: limit })
            }
            Some(other) => unreachable!("an established connection ends with `Closed`, not {other:?}"),
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("id", &self.key.0)
            .field("local", &self.local)
            .field("peer", &self.peer)
            .field("device", &self.device.name())
            .finish_non_exhaustive()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if sys::in_child() {
            return;
        }
        self.manager.mailbox().send(Command::Release { key: self.key });
        let deadline = Instant::now() + RELEASE_DEADLINE;
        loop {
            match self.notices.recv_deadline(deadline) {
                // `control` is now the last hold on the endpoint: it is taken apart by this thread.
                Ok(Notice::Released) => return,
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => {
                    log::warn!("id={} not released after {RELEASE_DEADLINE:?}; it will be later", self.key.0);
                    return;
                }
                // The thread has ended, and everything with it.
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}
