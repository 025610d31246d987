//! Accepting streams.

use std::fmt;
use std::io;
use std::iter::FusedIterator;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::options::StreamOptions;
use super::setup::{self, Accepted};
use super::stream::RdmaStream;
use crate::error::Error;
use crate::listener::{Listener, ListenerBuilder};

/// Listens for byte streams, like `std::net::TcpListener`.
///
/// Clients are [`RdmaStream`]s, or C programs that use rsockets of librdmacm.
///
/// ```no_run
/// use std::io::{Read, Write};
/// use rdmacm::RdmaListener;
///
/// # fn main() -> std::io::Result<()> {
/// let listener = RdmaListener::bind("0.0.0.0:7471")?;
/// for stream in listener.incoming() {
///     let mut stream = stream?;
///     std::thread::spawn(move || -> std::io::Result<()> {
///         let mut request = Vec::new();
///         stream.read_to_end(&mut request)?; // until the client shuts down its writing
///         stream.write_all(&request)
///     });
/// }
/// # Ok(())
/// # }
/// ```
///
/// # What differs from TCP
///
/// * The kernel knows nothing of backlogs for RDMA: this library queues 128 clients and refuses those above.
/// * Setting up a stream is done by [`accept`](Self::accept) and waits for the client's acknowledgement, at most 5 s; several
///   threads may accept at once. Clients that do not speak the protocol, or leave, are passed over.
/// * 127.0.0.1 cannot be bound: no RDMA device serves it.
/// * Dropping the last handle refuses the clients that wait.
pub struct RdmaListener {
    shared: Arc<Shared>,
}

struct Shared {
    listener: Listener,
    options: StreamOptions,
    nonblocking: AtomicBool,
}

impl RdmaListener {
    /// Binds to the first address of `address` that can be bound, and listens. Port 0 takes a free one.
    ///
    /// # Errors
    /// As [`bind_with`](Self::bind_with).
    pub fn bind(address: impl ToSocketAddrs) -> io::Result<Self> {
        Self::bind_with(address, &StreamOptions::default())
    }

    /// Binds and listens; the accepted streams have these options.
    ///
    /// # Errors
    /// Those of [`ListenerBuilder::bind`](crate::ListenerBuilder::bind) as [`io::Error`]s: `AddrInUse`, `AddrNotAvailable`
    /// (not an address of this host, one without an RDMA device, or loopback), `PermissionDenied`, `NotFound` when there is no
    /// RDMA device at all.
    pub fn bind_with(address: impl ToSocketAddrs, options: &StreamOptions) -> io::Result<Self> {
        let mut builder = ListenerBuilder::new();
        if let Some(manager) = &options.manager {
            builder = builder.manager(manager);
        }
        let addresses: Vec<_> = address.to_socket_addrs()?.collect();
        let listener = builder.bind(&addresses[..])?;
        let shared = Shared { listener, options: options.clone(), nonblocking: AtomicBool::new(false) };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The address listened on, with the real port. A wildcard stays a wildcard.
    ///
    /// # Errors
    /// None; std's signature.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.shared.listener.local_addr())
    }

    /// Another handle to the same listener.
    ///
    /// # Errors
    /// None; std's signature.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { shared: Arc::clone(&self.shared) })
    }

    /// Waits for a client, and sets up a stream with it. The stream is blocking, whatever the listener is.
    ///
    /// # Errors
    /// `WouldBlock` when not blocking and no client waits. `NotConnected` when the listener is closed or its device removed:
    /// nothing more comes. Others concern one client, which was refused: `OutOfMemory` (RLIMIT_MEMLOCK), a limit of the
    /// device, too many open files; the next call serves the next one.
    pub fn accept(&self) -> io::Result<(RdmaStream, SocketAddr)> {
        let Shared { listener, options, nonblocking } = &*self.shared;
        loop {
            let request = if nonblocking.load(Ordering::Relaxed) {
                match listener.request_timeout(Duration::ZERO) {
                    Err(Error::TimedOut { .. }) => return Err(io::ErrorKind::WouldBlock.into()),
                    request => request?,
                }
            } else {
                listener.request()?
            };
            let peer = request.peer_addr();
            match setup::accept(request, options)? {
                Accepted::Stream(core) => return Ok((RdmaStream::new(core), peer)),
                Accepted::PassedOver(why) => log::debug!("passed over {peer}: {why}"),
            }
        }
    }

    /// The streams of the clients, one after the other, without end: `accept` in a loop.
    #[must_use]
    pub fn incoming(&self) -> Incoming<'_> {
        Incoming { listener: self }
    }

    /// As [`incoming`](Self::incoming), taking the listener along.
    pub fn into_incoming(self) -> impl FusedIterator<Item = io::Result<RdmaStream>> {
        std::iter::repeat_with(move || self.accept().map(|(stream, _)| stream))
    }

    /// Whether [`accept`](Self::accept) gives `WouldBlock` instead of waiting for a client, for all handles. Setting up a
    /// stream with a client that is there waits nevertheless.
    ///
    /// # Errors
    /// None; std's signature.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.shared.nonblocking.store(nonblocking, Ordering::Relaxed);
        Ok(())
    }

    /// Always `None`: every error of a listener is one of [`accept`](Self::accept).
    ///
    /// # Errors
    /// None; std's signature.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        Ok(None)
    }
}

impl fmt::Debug for RdmaListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaListener").field("listener", &self.shared.listener).finish_non_exhaustive()
    }
}

/// The streams of the clients of an [`RdmaListener`]; see [`RdmaListener::incoming`].
#[derive(Debug)]
pub struct Incoming<'a> {
    listener: &'a RdmaListener,
}

impl Iterator for Incoming<'_> {
    type Item = io::Result<RdmaStream>;

    fn next(&mut self) -> Option<Self::Item> {
        Some(self.listener.accept().map(|(stream, _)| stream))
    }
}

impl FusedIterator for Incoming<'_> {}

impl<'a> IntoIterator for &'a RdmaListener {
    type Item = io::Result<RdmaStream>;
    type IntoIter = Incoming<'a>;

    fn into_iter(self) -> Incoming<'a> {
        self.incoming()
    }
}
