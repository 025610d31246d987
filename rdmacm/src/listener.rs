//! Accepting connections.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use verbs::{Access, MemoryRegion, ProtectionDomain};

use crate::addr;
use crate::channel::ConnectionDepths;
use crate::connection::Connection;
use crate::error::{Error, Result, TimedOutStep};
use crate::handle::{self, Command, ListenNotice, LoanGuard, Mailbox, Request};
use crate::id::Key;
use crate::manager::{Device, Manager};
use crate::options::{AcceptOptions, ListenPlan};
use crate::private_data::{Carrier, PrivateData};
use crate::setup::{Lent, Limit};

/// How long binding may take: the calls are immediate, the event-channel thread may be busy.
const BIND_DEADLINE: Duration = Duration::from_secs(5);
/// How long dropping a listener waits for its id to be gone.
const CLOSE_DEADLINE: Duration = Duration::from_secs(1);
/// How long a client's acknowledgement of an accept may take.
const ACCEPT_DEADLINE: Duration = Duration::from_secs(5);

/// How a [`Listener`] is set up.
///
/// ```no_run
/// use rdmacm::ListenerBuilder;
///
/// # fn main() -> Result<(), rdmacm::Error> {
/// let listener = ListenerBuilder::new().backlog(16).bind("0.0.0.0:7471")?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ListenerBuilder {
    manager: Option<Manager>,
    backlog: usize,
    queue_ttl: Duration,
    reuse_address: bool,
    ipv6_only: Option<bool>,
    accept: AcceptOptions,
}

impl Default for ListenerBuilder {
    fn default() -> Self {
        Self {
            manager: None,
            backlog: 128,
            queue_ttl: Duration::from_secs(10),
            reuse_address: false,
            ipv6_only: None,
            accept: AcceptOptions::default(),
        }
    }
}

impl ListenerBuilder {
    /// The defaults, each stated at its setter.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Uses this manager instead of [`Manager::global`].
    #[must_use]
    pub fn manager(mut self, manager: &Manager) -> Self {
        self.manager = Some(manager.clone());
        self
    }

    /// How many requests may wait to be taken (default 128, at least 1); those above are refused at once.
    #[must_use]
    pub fn backlog(mut self, requests: usize) -> Self {
        self.backlog = requests.max(1);
        self
    }

    /// How long a request may wait to be taken before it is refused (default 10 s, the default deadline of a connect).
    #[must_use]
    pub fn queue_ttl(mut self, ttl: Duration) -> Self {
        self.queue_ttl = ttl;
        self
    }

    /// Lets several ids be bound to one port, of which one may listen (default off).
    #[must_use]
    #[doc(alias = "RDMA_OPTION_ID_REUSEADDR")]
    pub fn reuse_address(mut self, reuse: bool) -> Self {
        self.reuse_address = reuse;
        self
    }

    /// Whether a listener on `[::]` leaves IPv4 alone (default: as the system's `net.ipv6.bindv6only` says).
    #[must_use]
    #[doc(alias = "RDMA_OPTION_ID_AFONLY")]
    pub fn ipv6_only(mut self, only: bool) -> Self {
        self.ipv6_only = Some(only);
        self
    }

    /// How [`Listener::accept`] sets up connections.
    #[must_use]
    pub fn accept_options(mut self, options: AcceptOptions) -> Self {
        self.accept = options;
        self
    }

    /// Binds to the first address that can be bound, and listens. Calls `rdma_bind_addr` and `rdma_listen`.
    ///
    /// # Errors
    /// [`Error::AddrInUse`]; [`Error::Loopback`] for 127.0.0.1 and ::1; [`Error::Os`] with EADDRNOTAVAIL for an address
    /// that is not ours, ENODEV for one whose interface has no RDMA device (or when there is none at all), EACCES for a
    /// port below 1024 or forbidden device nodes; [`Error::Lookup`]; [`Error::Misuse`]. With several addresses it is the
    /// error of the last one tried.
    pub fn bind(&self, address: impl ToSocketAddrs) -> Result<Listener> {
        self.accept.connection.check()?;
        self.accept.encode()?;
        let addresses = addr::look_up(address)?;
        let mut last = Error::Lookup("the name has no address".into());
        for address in addresses {
            match self.bind_one(address) {
                Ok(listener) => return Ok(listener),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn bind_one(&self, address: SocketAddr) -> Result<Listener> {
        if address.ip().to_canonical().is_loopback() {
            return Err(Error::Loopback(address));
        }
        let manager = match &self.manager {
            Some(manager) => manager.clone(),
            None => Manager::global()?,
        };
        let (notices, receiver) = crossbeam_channel::unbounded();
        let (queue, requests) = crossbeam_channel::bounded(self.backlog);
        let plan = ListenPlan {
            address,
            reuse_address: self.reuse_address,
            ipv6_only: self.ipv6_only,
            queue_ttl: self.queue_ttl,
        };
        manager.mailbox().send(Command::Listen { plan, notices, queue });
        match handle::wait(&receiver, Instant::now() + BIND_DEADLINE)? {
            Some(ListenNotice::Listening { key, local }) => {
                let accept = self.accept.clone();
                Ok(Listener { key, notices: receiver, requests, local, accept, manager })
            }
            Some(ListenNotice::Failed(error)) => Err(error),
            Some(ListenNotice::Released) => Err(Error::ListenerClosed),
            // Held up: the listener that may still come up is closed when it finds nobody to offer requests to.
            None => Err(Error::ManagerGone),
        }
    }
}

/// Listens for connections, like `std::net::TcpListener`.
///
/// Requests are fetched as they arrive and wait in a queue of this library ([`ListenerBuilder::backlog`]); any number of
/// threads may take them. Dropping the listener refuses those that wait.
///
/// ```no_run
/// use rdmacm::Listener;
///
/// # fn main() -> Result<(), rdmacm::Error> {
/// let listener = Listener::bind("10.1.2.3:7471")?;
/// loop {
///     let mut connection = listener.accept()?;
///     let mut buffer = [0; 4096];
///     let length = connection.recv(&mut buffer)?;
///     connection.send(&buffer[..length])?;
/// }
/// # }
/// ```
pub struct Listener {
    key: Key,
    notices: Receiver<ListenNotice>,
    requests: Receiver<Request>,
    local: SocketAddr,
    accept: AcceptOptions,
    manager: Manager,
}

impl Listener {
    /// Binds and listens with the defaults of [`ListenerBuilder`].
    ///
    /// # Errors
    /// As [`ListenerBuilder::bind`].
    pub fn bind(address: impl ToSocketAddrs) -> Result<Self> {
        ListenerBuilder::new().bind(address)
    }

    /// The address listened on, with the real port where 0 was asked for. A wildcard stays a wildcard.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Waits for a client and connects with it. Clients that give up meanwhile are passed over.
    ///
    /// # Errors
    /// [`Error::ListenerClosed`] or [`Error::DeviceRemoved`] when there is nothing more to come. Others concern one
    /// client, which was refused; the next call serves the next one: [`Error::Os`], or [`Error::Verbs`] with a limit of
    /// the device or the process.
    pub fn accept(&self) -> Result<Connection> {
        self.accept_until(None)
    }

    /// As [`Listener::accept`], for at most `timeout`.
    ///
    /// # Errors
    /// As [`Listener::accept`], and [`Error::TimedOut`].
    pub fn accept_timeout(&self, timeout: Duration) -> Result<Connection> {
        self.accept_until(Some(timeout))
    }

    fn accept_until(&self, timeout: Option<Duration>) -> Result<Connection> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let request = self.request_until(deadline, timeout.unwrap_or_default())?;
            let peer = request.peer_addr();
            match request.accept_with(&self.accept) {
                Err(
                    error @ (Error::Aborted { .. }
                    | Error::TimedOut { .. }
                    | Error::Rejected { .. }
                    | Error::Unreachable { .. }),
                ) => {
                    log::debug!("listener={} passes over {peer}: {error}", self.key.0);
                }
                result => return result,
            }
        }
    }

    /// Waits for a client's request, to be accepted or rejected.
    ///
    /// # Errors
    /// [`Error::ListenerClosed`] or [`Error::DeviceRemoved`] when there is nothing more to come.
    pub fn request(&self) -> Result<ConnectRequest> {
        self.request_until(None, Duration::ZERO)
    }

    /// As [`Listener::request`], for at most `timeout`.
    ///
    /// # Errors
    /// As [`Listener::request`], and [`Error::TimedOut`].
    pub fn request_timeout(&self, timeout: Duration) -> Result<ConnectRequest> {
        self.request_until(Some(Instant::now() + timeout), timeout)
    }

    fn request_until(&self, deadline: Option<Instant>, after: Duration) -> Result<ConnectRequest> {
        loop {
            let received = match deadline {
                Some(deadline) => self.requests.recv_deadline(deadline),
                None => self.requests.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match received {
                Ok(request) => {
                    if let Some(request) = ConnectRequest::claim(request, &self.manager)? {
                        return Ok(request);
                    }
                }
                Err(RecvTimeoutError::Timeout) => return Err(Error::TimedOut { step: TimedOutStep::Request, after }),
                Err(RecvTimeoutError::Disconnected) => return Err(self.end()),
            }
        }
    }

    /// Why no more requests come.
    fn end(&self) -> Error {
        match self.notices.try_recv() {
            Ok(ListenNotice::Failed(error)) => error,
            Ok(ListenNotice::Released | ListenNotice::Listening { .. }) => Error::ListenerClosed,
            Err(crossbeam_channel::TryRecvError::Empty) => Error::ListenerClosed,
            Err(crossbeam_channel::TryRecvError::Disconnected) => Error::ListenerClosed,
        }
    }

    /// The connections, one after the other, without end: `accept` in a loop.
    pub fn incoming(&self) -> impl Iterator<Item = Result<Connection>> + '_ {
        std::iter::repeat_with(|| self.accept())
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener")
            .field("local", &self.local)
            .field("waiting", &self.requests.len())
            .finish_non_exhaustive()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.manager.mailbox().send(Command::Release { key: self.key });
        let deadline = Instant::now() + CLOSE_DEADLINE;
        while let Ok(notice) = self.notices.recv_deadline(deadline) {
            if matches!(notice, ListenNotice::Released | ListenNotice::Failed(_)) {
                break;
            }
        }
        // The waiting clients are refused now, not when their time in the queue is over.
        while let Ok(request) = self.requests.try_recv() {
            drop(guard(&request, self.manager.mailbox()));
        }
    }
}

/// The loan of a request that is still in the queue's hands.
fn guard(request: &Request, mailbox: &Arc<Mailbox>) -> Option<LoanGuard> {
    Some(LoanGuard::new(request.key, request.claim.take()?, mailbox.clone()))
}

/// A client's wish to connect. Dropping it refuses the client.
pub struct ConnectRequest {
    lent: Lent,
    wanted: ConnectionDepths,
    private_data: PrivateData,
}

impl ConnectRequest {
    /// `None` if the request ended while it was in the queue.
    fn claim(request: Request, manager: &Manager) -> Result<Option<Self>> {
        let Some(guard) = guard(&request, manager.mailbox()) else { return Ok(None) };
        let device = manager.device(guard.context())?;
        let Request { notices, peer, local, depths, private_data, .. } = request;
        let lent = Lent { guard, notices, device, manager: manager.clone(), local, peer };
        Ok(Some(Self { lent, wanted: depths, private_data }))
    }

    /// The client's address.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.lent.peer
    }

    /// The address that the client asked for.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.lent.local
    }

    /// What the client sent along. The client chose every byte of it.
    #[must_use]
    pub fn private_data(&self) -> &PrivateData {
        &self.private_data
    }

    /// How many RDMA reads and atomics the client wants to have outstanding, which this side would serve.
    #[must_use]
    pub fn wanted_responder_resources(&self) -> u8 {
        self.wanted.responder_resources
    }

    /// How many RDMA reads and atomics of this side the client is ready to serve.
    #[must_use]
    pub fn wanted_initiator_depth(&self) -> u8 {
        self.wanted.initiator_depth
    }

    /// The device that the client came in by.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.lent.device
    }

    /// The protection domain that the connection will use.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        self.lent.device.protection_domain()
    }

    /// Registers memory for the connection; see [`Device::register`].
    ///
    /// # Errors
    /// As [`Device::register`].
    pub fn register(&self, len: usize, access: Access) -> Result<MemoryRegion> {
        self.lent.device.register(len, access)
    }

    /// Accepts with the defaults of [`AcceptOptions`].
    ///
    /// # Errors
    /// As [`ConnectRequest::accept_with`].
    pub fn accept(self) -> Result<Connection> {
        self.accept_with(&AcceptOptions::default())
    }

    /// Makes the queue pair, posts its receives, accepts, and waits for the client's acknowledgement (at most 5 s).
    ///
    /// # Errors
    /// The client is refused if this side is at fault: a limit of the device or the process ([`Error::Verbs`],
    /// [`Error::Os`]), [`Error::PrivateDataTooLong`], [`Error::Misuse`]. [`Error::Aborted`] or [`Error::TimedOut`] if the
    /// client gave up.
    pub fn accept_with(mut self, options: &AcceptOptions) -> Result<Connection> {
        options.connection.check()?;
        let private_data = options.encode()?;
        let parameters = options.connection.reply(self.lent.device.context(), private_data, self.wanted)?;
        if let Some(exponent) = options.connection.ack_timeout {
            self.lent.guard.loan().set_ack_timeout(exponent)?;
        }
        let started = Instant::now();
        let limit = Limit { started, deadline: started + ACCEPT_DEADLINE, step: TimedOutStep::Accept };
        // The client's private data came with its request; its acknowledgement carries none.
        self.lent.establish(parameters, Some(self.private_data), &options.connection, limit)
    }

    /// Refuses the client, whose error carries `data`: at most [`MAX_REJECT_DATA`](crate::MAX_REJECT_DATA) bytes.
    ///
    /// # Errors
    /// [`Error::PrivateDataTooLong`]; the client is then refused without data.
    pub fn reject(self, data: &[u8]) -> Result<()> {
        let data = if data.is_empty() { Vec::new() } else { Carrier::Reject.frame(data)? };
        self.lent.guard.refuse(data);
        Ok(())
    }
}

impl fmt::Debug for ConnectRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectRequest")
            .field("peer", &self.lent.peer)
            .field("local", &self.lent.local)
            .field("private_data", &self.private_data)
            .finish_non_exhaustive()
    }
}
