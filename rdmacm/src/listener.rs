//! Accepting connections.

use std::collections::HashMap;
use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, select};

use crate::addr;
use crate::cancel::CancelToken;
use crate::connection::Connection;
use crate::error::{Error, Result, TimedOutStep};
use crate::handle::{self, Command, ListenNotice, Request};
use crate::id::Key;
use crate::manager::Manager;
use crate::options::{AcceptOptions, ListenPlan};
use crate::request::{self, ConnectRequest};
use crate::setup::Handshake;
use crate::sys;
use crate::time;

/// The queue is allocated when the listener is made.
const MAX_BACKLOG: usize = 65_536;
/// How long binding may take: the calls are immediate, the event-channel thread may be busy.
const BIND_DEADLINE: Duration = Duration::from_secs(5);
/// How often an acceptor looks for room while as many handshakes are under way as may be.
const RECHECK: Duration = Duration::from_millis(20);
/// How long dropping a listener waits for its id to be gone.
const CLOSE_DEADLINE: Duration = Duration::from_secs(1);

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

    /// How many requests may wait to be taken (default 128, at least 1, at most 65,536); those above are refused at once. As
    /// many accepted clients may be slow to acknowledge before they delay others.
    #[must_use]
    pub fn backlog(mut self, requests: usize) -> Self {
        self.backlog = requests.clamp(1, MAX_BACKLOG);
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

    /// How [`Acceptor::accept`] sets up connections.
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
        let end = Arc::new(OnceLock::new());
        let plan = ListenPlan {
            address,
            reuse_address: self.reuse_address,
            ipv6_only: self.ipv6_only,
            queue_ttl: self.queue_ttl,
        };
        manager.mailbox().send(Command::Listen { plan, notices, queue, end: Arc::clone(&end) });
        match handle::wait(&receiver, Instant::now() + BIND_DEADLINE)? {
            Some(ListenNotice::Listening { key, local }) => {
                let handshakes = Arc::new(Handshakes::new());
                let (backlog, accept) = (self.backlog, self.accept.clone());
                let acceptor = Acceptor { key, requests, end, handshakes, backlog, local, accept, manager };
                Ok(Listener { key, notices: receiver, acceptor })
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
/// threads may take them. Dropping the listener refuses those that wait. A waiting request holds no memory of this process; an
/// accepted one holds what its endpoint registers ([`EndpointOptions`](crate::EndpointOptions): 512 KiB by default).
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
    acceptor: Acceptor,
}

impl Listener {
    /// Binds and listens with the defaults of [`ListenerBuilder`].
    ///
    /// # Errors
    /// As [`ListenerBuilder::bind`].
    pub fn bind(address: impl ToSocketAddrs) -> Result<Self> {
        ListenerBuilder::new().bind(address)
    }

    /// A handle that accepts, for another thread. It wakes with [`Error::ListenerClosed`] when the listener is dropped.
    #[must_use]
    pub fn acceptor(&self) -> Acceptor {
        self.acceptor.clone()
    }
}

impl Deref for Listener {
    type Target = Acceptor;

    fn deref(&self) -> &Acceptor {
        &self.acceptor
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener")
            .field("local", &self.local_addr())
            .field("waiting", &self.acceptor.requests.len())
            .finish_non_exhaustive()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if sys::in_child() {
            return;
        }
        self.acceptor.manager.mailbox().send(Command::Release { key: self.key });
        let deadline = Instant::now() + CLOSE_DEADLINE;
        while let Ok(notice) = self.notices.recv_deadline(deadline) {
            if matches!(notice, ListenNotice::Released | ListenNotice::Failed(_)) {
                break;
            }
        }
        // What was begun for clients that nobody will take any more.
        self.acceptor.handshakes.give_up();
        // The waiting clients are refused now, not when their time in the queue is over.
        while let Ok(request) = self.acceptor.requests.try_recv() {
            drop(request::guard(&request, self.acceptor.manager.mailbox()));
        }
    }
}

/// Accepts the connections of a [`Listener`]. Clones accept from the same queue; a listener is one, too.
#[derive(Clone)]
pub struct Acceptor {
    key: Key,
    requests: Receiver<Request>,
    /// Set before the queue ends.
    end: Arc<OnceLock<Error>>,
    handshakes: Arc<Handshakes>,
    backlog: usize,
    local: SocketAddr,
    accept: AcceptOptions,
    manager: Manager,
}

impl Acceptor {
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
        self.accept_within(Patience::Endless)
    }

    /// As [`accept`](Self::accept), for at most `timeout`.
    ///
    /// # Errors
    /// As [`accept`](Self::accept), and [`Error::TimedOut`].
    pub fn accept_timeout(&self, timeout: Duration) -> Result<Connection> {
        self.accept_within(Patience::For(timeout, time::after(Instant::now(), timeout)))
    }

    /// As [`accept`](Self::accept), until `token` is cancelled.
    ///
    /// # Errors
    /// As [`accept`](Self::accept), and [`Error::Cancelled`].
    pub fn accept_cancellable(&self, token: &CancelToken) -> Result<Connection> {
        self.accept_within(Patience::Until(token))
    }

    /// Takes requests and begins to accept them, and returns the first connection that is established, whoever began it: a
    /// client that is slow to acknowledge delays nobody.
    fn accept_within(&self, patience: Patience<'_>) -> Result<Connection> {
        loop {
            match self.next(patience, true)? {
                Next::Request(request) => {
                    let peer = request.peer_addr();
                    let begun = request.begin(&self.accept, Some(self.handshakes.decided.clone()));
                    match begun {
                        Ok(handshake) => self.handshakes.add(handshake),
                        Err(error) => self.pass_over(peer, error)?,
                    }
                }
                Next::Decided(key) => {
                    let Some(handshake) = self.handshakes.remove(key) else { continue };
                    let peer = handshake.peer_addr();
                    match handshake.decided() {
                        Ok(connection) => return Ok(connection),
                        Err(error) => self.pass_over(peer, error)?,
                    }
                }
            }
        }
    }

    /// Goes on if the client is to blame, or this side's program cannot do anything about it.
    fn pass_over(&self, peer: SocketAddr, error: Error) -> Result<()> {
        match error {
            Error::Aborted { .. }
            | Error::TimedOut { .. }
            | Error::Rejected { .. }
            | Error::Unreachable { .. }
            | Error::DeviceRemoved => {
                log::debug!("listener={} passes over {peer}: {error}", self.key.0);
                Ok(())
            }
            error => Err(error),
        }
    }

    /// Waits for a client's request, to be accepted or rejected.
    ///
    /// # Errors
    /// [`Error::ListenerClosed`] or [`Error::DeviceRemoved`] when there is nothing more to come.
    pub fn request(&self) -> Result<ConnectRequest> {
        self.request_within(Patience::Endless)
    }

    /// As [`request`](Self::request), for at most `timeout`.
    ///
    /// # Errors
    /// As [`request`](Self::request), and [`Error::TimedOut`].
    pub fn request_timeout(&self, timeout: Duration) -> Result<ConnectRequest> {
        self.request_within(Patience::For(timeout, time::after(Instant::now(), timeout)))
    }

    /// As [`request`](Self::request), until `token` is cancelled.
    ///
    /// # Errors
    /// As [`request`](Self::request), and [`Error::Cancelled`].
    pub fn request_cancellable(&self, token: &CancelToken) -> Result<ConnectRequest> {
        self.request_within(Patience::Until(token))
    }

    fn request_within(&self, patience: Patience<'_>) -> Result<ConnectRequest> {
        loop {
            if let Next::Request(request) = self.next(patience, false)? {
                return Ok(request);
            }
        }
    }

    /// Waits for a request, or (when `accepting`) for the outcome of a handshake. While as many handshakes are under way as
    /// requests may wait, no more are taken.
    fn next(&self, patience: Patience<'_>, accepting: bool) -> Result<Next> {
        if sys::in_child() {
            return Err(Error::Forked);
        }
        let never = crossbeam_channel::never();
        let nothing = crossbeam_channel::never();
        let endless = crossbeam_channel::never();
        loop {
            let full = accepting && self.handshakes.len() >= self.backlog;
            let requests = if full { &nothing } else { &self.requests };
            let decided = if accepting { &self.handshakes.outcomes } else { &never };
            // A handshake that ends makes room, which this thread may not be told of.
            let recheck = if full { crossbeam_channel::after(RECHECK) } else { crossbeam_channel::never() };
            let (timer, cancelled, after) = match patience {
                Patience::Endless => (crossbeam_channel::never(), &endless, Duration::ZERO),
                Patience::For(after, deadline) => (crossbeam_channel::at(deadline), &endless, after),
                Patience::Until(token) => (crossbeam_channel::never(), token.receiver(), Duration::ZERO),
            };
            let received = select! {
                recv(requests) -> request => request.ok(),
                recv(decided) -> key => match key {
                    Ok(key) => return Ok(Next::Decided(key)),
                    Err(_) => unreachable!("the acceptor itself holds a sender"),
                },
                recv(recheck) -> _ => continue,
                recv(timer) -> _ => return Err(Error::TimedOut { step: TimedOutStep::Request, after }),
                recv(cancelled) -> _ => return Err(Error::Cancelled),
            };
            let Some(request) = received else {
                return Err(self.end.get().cloned().unwrap_or(Error::ListenerClosed));
            };
            if let Some(request) = ConnectRequest::claim(request, &self.manager)? {
                return Ok(Next::Request(request));
            }
        }
    }

    /// The connections, one after the other, until the listener is closed. Errors as those of [`accept`](Self::accept).
    pub fn incoming(&self) -> impl Iterator<Item = Result<Connection>> + '_ {
        std::iter::from_fn(|| match self.accept() {
            // Nothing more will come.
            Err(Error::ListenerClosed | Error::DeviceRemoved | Error::ManagerGone | Error::Forked) => None,
            result => Some(result),
        })
    }
}

impl fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acceptor")
            .field("local", &self.local)
            .field("waiting", &self.requests.len())
            .finish_non_exhaustive()
    }
}

/// What [`Acceptor::next`] found.
enum Next {
    Request(ConnectRequest),
    Decided(Key),
}

/// The handshakes that the acceptors of a listener have begun; whichever of them waits when one is decided finishes it.
struct Handshakes {
    /// `None` once the listener is gone.
    pending: Mutex<Option<HashMap<Key, Handshake>>>,
    decided: Sender<Key>,
    outcomes: Receiver<Key>,
}

impl Handshakes {
    fn new() -> Self {
        let (decided, outcomes) = crossbeam_channel::unbounded();
        Self { pending: Mutex::new(Some(HashMap::new())), decided, outcomes }
    }

    fn add(&self, handshake: Handshake) {
        let key = handshake.key();
        let mut pending = self.lock();
        let Some(begun) = &mut *pending else {
            // The listener went meanwhile: so does the client, without the lock.
            drop(pending);
            return drop(handshake);
        };
        let decided = begun.entry(key).insert_entry(handshake).get().is_decided();
        drop(pending);
        if decided {
            // Another thread may have looked for it before it was here.
            let _ = self.decided.send(key);
        }
    }

    fn remove(&self, key: Key) -> Option<Handshake> {
        self.lock().as_mut()?.remove(&key)
    }

    fn len(&self) -> usize {
        self.lock().as_ref().map_or(0, HashMap::len)
    }

    fn give_up(&self) {
        let pending = self.lock().take();
        drop(pending);
    }

    /// Each change is one insertion or removal, so the map is whole whatever a panicking thread did.
    fn lock(&self) -> MutexGuard<'_, Option<HashMap<Key, Handshake>>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long to wait for a client.
#[derive(Clone, Copy)]
enum Patience<'a> {
    Endless,
    For(Duration, Instant),
    Until(&'a CancelToken),
}
