//! A byte stream to a peer.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::core::Core;
use super::options::StreamOptions;
use super::setup;

/// A byte stream between this program and a peer, like `std::net::TcpStream`.
///
/// The peer is an [`RdmaListener`](super::RdmaListener), an `RdmaStream`, or a C program that uses rsockets of librdmacm.
///
/// Dropping the last handle closes the stream in order: the peer reads everything that was written, and then the end. Handles
/// made by [`try_clone`](Self::try_clone) are the same stream, and any of them, and any reference to one, may read and write
/// at the same time from other threads: a reader that waits does not hold up a writer.
///
/// ```no_run
/// use std::io::{Read, Write};
/// use rdmacm::RdmaStream;
///
/// # fn main() -> std::io::Result<()> {
/// let mut stream = RdmaStream::connect("10.1.2.3:7471")?;
/// stream.write_all(b"hello")?;
/// let mut answer = [0; 5];
/// stream.read_exact(&mut answer)?;
/// # Ok(())
/// # }
/// ```
///
/// # What differs from TCP
///
/// * The address must be one of an interface with an RDMA device. 127.0.0.1 is none.
/// * Nobody but the program looks at what arrives: the peer's room is renewed when this side reads, or waits in a write.
/// * [`flush`](Write::flush) does nothing: what was written is in the device's hands.
/// * Dropping the last handle waits for the peer's device to have everything, at most [`set_linger`](Self::set_linger)
///   (3 s). What cannot be delivered in that time is lost, and the peer then reads a reset and not an end. TCP does this in
///   the background.
/// * A process that ends without dropping its streams (`std::process::exit`, a signal) resets them.
/// * A peer whose process died gives `ConnectionReset` within milliseconds, since its kernel says so; a host that vanished,
///   when something is sent and not acknowledged for about 2 s.
/// * [`set_nodelay`](Self::set_nodelay) changes nothing: nothing is ever held back.
/// * A wait that a signal interrupts goes on; `Interrupted` is never returned.
/// * Writes of several threads are not mixed while there is room; a write that has to wait may be continued after another's.
pub struct RdmaStream {
    core: Arc<Core>,
}

impl RdmaStream {
    /// Connects to the first address of `address` that answers, within 10 s.
    ///
    /// # Errors
    /// As [`connect_with`](Self::connect_with).
    pub fn connect(address: impl ToSocketAddrs) -> io::Result<Self> {
        Self::connect_with(address, &StreamOptions::default())
    }

    /// Connects to an address within a time, which includes all steps.
    ///
    /// # Errors
    /// As [`connect_with`](Self::connect_with), and `InvalidInput` for a time of zero.
    pub fn connect_timeout(address: &SocketAddr, timeout: Duration) -> io::Result<Self> {
        if timeout.is_zero() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "cannot set a 0 duration timeout"));
        }
        Ok(Self { core: setup::connect(*address, &StreamOptions::default(), timeout)? })
    }

    /// Connects to the first address of `address` that answers, with choices.
    ///
    /// # Errors
    /// Those of [`Connector::connect`](crate::Connector::connect) as [`io::Error`]s with the kind that a socket would give
    /// and the cause inside: `ConnectionRefused`, `TimedOut`, `HostUnreachable`, `NetworkUnreachable`, `AddrNotAvailable` (the
    /// interface has no RDMA device), `NotFound` (there is none at all), `OutOfMemory` (RLIMIT_MEMLOCK). `InvalidData` when
    /// who listens there does not speak the stream protocol. `Unsupported` on iWARP, which cannot carry it.
    pub fn connect_with(address: impl ToSocketAddrs, options: &StreamOptions) -> io::Result<Self> {
        Ok(Self { core: setup::connect_any(address.to_socket_addrs()?, options)? })
    }

    pub(super) fn new(core: Arc<Core>) -> Self {
        Self { core }
    }

    /// The peer's address.
    ///
    /// # Errors
    /// None; std's signature.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.core.peer)
    }

    /// This side's address.
    ///
    /// # Errors
    /// None; std's signature.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.core.local)
    }

    /// Another handle to the same stream, with the same settings. The stream is closed when the last one is dropped.
    ///
    /// # Errors
    /// None; std's signature.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { core: Arc::clone(&self.core) })
    }

    /// Closes the stream for reading, writing or both, for all handles. Threads that wait in it wake.
    ///
    /// * After `Write` the peer reads what was written, and then the end; writing here gives `BrokenPipe`.
    /// * After `Read` reading here gives `Ok(0)`, at once. The peer is not told, and its writes wait when the buffers are full.
    /// * When both directions are closed, by whichever calls, the peer is told that this side is gone.
    ///
    /// Closing what is closed does nothing.
    ///
    /// # Errors
    /// `TimedOut` when the peer's device takes no message within the linger time, so that the peer does not know; a stream
    /// that is broken is closed without an error.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.core.shutdown(how)
    }

    /// Copies what arrived without taking it, waiting for the first byte: the next read gives it again.
    ///
    /// # Errors
    /// As [`Read::read`] of this type.
    pub fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.core.read(&mut [IoSliceMut::new(buffer)], true)
    }

    /// How long a read waits for the first byte; `None`, the default, for ever. When the time is over the read gives
    /// `WouldBlock`, as on Linux, and no byte is lost.
    ///
    /// # Errors
    /// `InvalidInput` for a timeout of zero.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        check(timeout)?;
        self.core.settings.read_timeout.set(timeout);
        Ok(())
    }

    /// How long a write waits for room in all; `None`, the default, for ever. When the time is over the write gives how
    /// much was written, or `WouldBlock` if nothing was.
    ///
    /// # Errors
    /// `InvalidInput` for a timeout of zero.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        check(timeout)?;
        self.core.settings.write_timeout.set(timeout);
        Ok(())
    }

    /// The read timeout.
    ///
    /// # Errors
    /// None; std's signature.
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(self.core.settings.read_timeout.get())
    }

    /// The write timeout.
    ///
    /// # Errors
    /// None; std's signature.
    pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(self.core.settings.write_timeout.get())
    }

    /// Whether reads and writes that would have to wait give `WouldBlock` instead, for all handles.
    ///
    /// # Errors
    /// None; std's signature.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.core.settings.nonblocking.store(nonblocking, Ordering::Relaxed);
        Ok(())
    }

    /// The error that ended the stream, at the first call after it; then `None`. An end that both sides wanted is no error.
    ///
    /// # Errors
    /// None; std's signature.
    #[doc(alias = "SO_ERROR")]
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        Ok(self.core.take_error())
    }

    /// Remembers the setting and does nothing else: small writes are never held back.
    ///
    /// # Errors
    /// None; std's signature.
    #[doc(alias = "TCP_NODELAY")]
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        self.core.settings.nodelay.store(nodelay, Ordering::Relaxed);
        Ok(())
    }

    /// What [`set_nodelay`](Self::set_nodelay) set; `false` by default.
    ///
    /// # Errors
    /// None; std's signature.
    pub fn nodelay(&self) -> io::Result<bool> {
        Ok(self.core.settings.nodelay.load(Ordering::Relaxed))
    }

    /// How long dropping the last handle, and [`shutdown`](Self::shutdown), wait for the peer's device (by default 3 s).
    ///
    /// `Some(0)` does not wait and says no goodbye: the peer reads a reset, and what is on its way may be lost. `None` goes
    /// back to the default. Unlike with TCP nothing is delivered after the time.
    ///
    /// # Errors
    /// None; std's signature.
    #[doc(alias = "SO_LINGER")]
    pub fn set_linger(&self, linger: Option<Duration>) -> io::Result<()> {
        self.core.settings.linger.set(linger);
        Ok(())
    }

    /// The linger time; `None` when [`set_linger`](Self::set_linger) went back to the default.
    ///
    /// # Errors
    /// None; std's signature.
    pub fn linger(&self) -> io::Result<Option<Duration>> {
        Ok(self.core.settings.linger.get())
    }
}

fn check(timeout: Option<Duration>) -> io::Result<()> {
    match timeout {
        Some(Duration::ZERO) => Err(io::Error::new(io::ErrorKind::InvalidInput, "cannot set a 0 duration timeout")),
        _ => Ok(()),
    }
}

/// Waits for the first byte, and reads what is there.
///
/// # Errors
/// `Ok(0)` is the end: the peer closed in order, and all that it wrote was read. `ConnectionReset` when it went without
/// closing; `WouldBlock` by the timeout or when not blocking; `InvalidData` when the peer broke the protocol; otherwise the
/// cause that ended the connection. What arrived before an end or an error is read first.
impl Read for &RdmaStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.core.read(&mut [IoSliceMut::new(buffer)], false)
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.core.read(buffers, false)
    }
}

/// Waits until all bytes are in the device's hands. Less are written only when a timeout or an error comes in between.
///
/// # Errors
/// `BrokenPipe` when the peer closed the stream, or this side did for writing; `ConnectionReset` when the peer went without
/// closing; `WouldBlock` by the timeout, or when not blocking; otherwise the cause that ended the connection.
impl Write for &RdmaStream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.core.write(&[IoSlice::new(buffer)])
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        self.core.write(buffers)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for RdmaStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buffer)
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        (&*self).read_vectored(buffers)
    }
}

impl Write for RdmaStream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        (&*self).write(buffer)
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        (&*self).write_vectored(buffers)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for RdmaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.core.fmt_as("RdmaStream", f)
    }
}

const _: () = {
    const fn assert_send_sync<T: Send + Sync>() {}
    assert_send_sync::<RdmaStream>();
};
