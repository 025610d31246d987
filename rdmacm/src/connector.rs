//! Connecting to a listener.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use verbs::{Access, MemoryRegion, ProtectionDomain};

use crate::addr;
use crate::cancel::CancelToken;
use crate::connection::Connection;
use crate::error::{Error, Result, TimedOutStep};
use crate::handle::{self, Command, ConnectPlan, LoanGuard, Notice};
use crate::id::Key;
use crate::manager::{Device, Manager};
use crate::options::{ConnectionOptions, PrivateDataChoice};
use crate::private_data::Carrier;
use crate::setup::{Lent, Limit};
use crate::time;

/// The deadline of a connect that names none.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(10);

/// Connects to listeners, with choices.
///
/// ```no_run
/// use std::time::Duration;
/// use rdmacm::Connector;
///
/// # fn main() -> Result<(), rdmacm::Error> {
/// let mut connection = Connector::new()
///     .deadline(Duration::from_secs(2))
///     .private_data(b"hello")
///     .connect("10.1.2.3:7471")?;
/// connection.send(b"first message")?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Connector {
    manager: Option<Manager>,
    deadline: Duration,
    source: Option<SocketAddr>,
    tos: Option<u8>,
    private_data: PrivateDataChoice,
    options: ConnectionOptions,
    cancel: Option<CancelToken>,
}

impl Default for Connector {
    fn default() -> Self {
        Self {
            manager: None,
            deadline: DEFAULT_DEADLINE,
            source: None,
            tos: None,
            private_data: PrivateDataChoice::None,
            options: ConnectionOptions::default(),
            cancel: None,
        }
    }
}

impl Connector {
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

    /// How long the whole of connecting may take, over all addresses of a name (default 10 s). Looking up the name itself
    /// is the system resolver's work and not counted.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The local address to connect from, which chooses the device; port 0 for any. Addresses of a name that are of the
    /// other family are passed over.
    #[must_use]
    pub fn source(mut self, source: SocketAddr) -> Self {
        self.source = Some(source);
        self
    }

    /// The type of service of the connection's packets; on RoCE their traffic class.
    #[must_use]
    #[doc(alias = "RDMA_OPTION_ID_TOS")]
    pub fn tos(mut self, tos: u8) -> Self {
        self.tos = Some(tos);
        self
    }

    /// Bytes for the listener's program, at most [`MAX_CONNECT_DATA`](crate::MAX_CONNECT_DATA), which a listener of this
    /// library gets exactly ([`PrivateData::data`](crate::PrivateData::data)).
    #[must_use]
    pub fn private_data(mut self, data: &[u8]) -> Self {
        self.private_data = PrivateDataChoice::Framed(data.to_vec());
        self
    }

    /// Bytes for a foreign listener, at most 56, sent as they are.
    #[must_use]
    pub fn private_data_raw(mut self, data: &[u8]) -> Self {
        self.private_data = PrivateDataChoice::Raw(data.to_vec());
        self
    }

    /// The choices that both ends of a connection have.
    #[must_use]
    pub fn options(mut self, options: ConnectionOptions) -> Self {
        self.options = options;
        self
    }

    /// Lets another thread end the attempts of this connector, with a clone of `token`.
    #[must_use]
    pub fn cancel(mut self, token: &CancelToken) -> Self {
        self.cancel = Some(token.clone());
        self
    }

    pub(crate) fn cancel_token(&self) -> Option<&CancelToken> {
        self.cancel.as_ref()
    }

    /// Connects to the first address that answers, like `TcpStream::connect`. Receives are posted before the listener
    /// hears of us, so that it may send at once.
    ///
    /// # Errors
    /// By the peer: [`Error::Refused`], [`Error::Rejected`] (with its private data), [`Error::TransportRejected`],
    /// [`Error::Aborted`]. By the network: [`Error::Unreachable`]. By the clock: [`Error::TimedOut`]. By this host:
    /// [`Error::Os`] (no device, no permission), [`Error::DeviceRemoved`], [`Error::Lookup`], or a limit of the device in
    /// [`Error::Verbs`]. By the caller: [`Error::PrivateDataTooLong`], [`Error::Misuse`], [`Error::Cancelled`]. With several addresses it is the
    /// error of the last one tried.
    pub fn connect(&self, address: impl ToSocketAddrs) -> Result<Connection> {
        self.each(address, |route| route?.connect())
    }

    /// Finds the device and the route to the first address that has one, without connecting yet. Memory can then be
    /// registered on the device, and its [`RemoteRegion`](crate::RemoteRegion) sent along as private data.
    ///
    /// # Errors
    /// As [`Connector::connect`], but for what only the peer can say.
    pub fn resolve(&self, address: impl ToSocketAddrs) -> Result<Route> {
        self.each(address, |route| route)
    }

    /// Tries the addresses in order, under one deadline, until `attempt` succeeds.
    fn each<T>(&self, address: impl ToSocketAddrs, attempt: impl Fn(Result<Route>) -> Result<T>) -> Result<T> {
        self.options.check()?;
        // Nothing is sent if the data does not fit.
        let private_data = self.private_data.encode(Carrier::Connect)?;
        let addresses = addr::look_up(address)?;
        let manager = match &self.manager {
            Some(manager) => manager.clone(),
            None => Manager::global()?,
        };
        let started = Instant::now();
        let deadline = time::after(started, self.deadline);
        let mut last = Error::Misuse("the source address is of another family than every address of the peer");
        for destination in addresses {
            if self.source.is_some_and(|source| source.is_ipv4() != destination.is_ipv4()) {
                continue;
            }
            let plan = ConnectPlan {
                key: Key::next(),
                source: self.source,
                destination,
                tos: self.tos,
                ack_timeout: self.options.ack_timeout,
                started,
                deadline,
            };
            match attempt(Route::resolve(&manager, plan, &private_data, &self.options, self.cancel.clone())) {
                Ok(value) => return Ok(value),
                Err(Error::Cancelled) => return Err(Error::Cancelled),
                Err(error) => last = error,
            }
            if Instant::now() >= deadline {
                break;
            }
        }
        Err(last)
    }
}

/// A resolved route: the device is known, the peer has not been asked yet. Dropping it gives everything back.
#[derive(Debug)]
pub struct Route {
    lent: Lent,
    limit: Limit,
    private_data: Vec<u8>,
    options: ConnectionOptions,
    cancel: Option<CancelToken>,
}

impl Route {
    fn resolve(
        manager: &Manager,
        plan: ConnectPlan,
        private_data: &[u8],
        options: &ConnectionOptions,
        cancel: Option<CancelToken>,
    ) -> Result<Self> {
        let limit = Limit { started: plan.started, deadline: plan.deadline, step: TimedOutStep::Connect };
        let (key, peer) = (plan.key, plan.destination);
        let (sender, notices) = crossbeam_channel::unbounded();
        manager.mailbox().send(Command::Connect { plan, notices: sender });
        match handle::wait_for_setup(&notices, limit.deadline, cancel.as_ref(), key, manager.mailbox())? {
            Some(Notice::Routed { loan, local }) => {
                let guard = LoanGuard::new(key, loan, manager.mailbox().clone());
                let device = manager.device(guard.context())?;
                Ok(Self {
                    lent: Lent { guard, notices, device, manager: manager.clone(), local, peer },
                    limit,
                    private_data: private_data.to_vec(),
                    options: options.clone(),
                    cancel,
                })
            }
            Some(Notice::Failed(error)) => Err(error),
            Some(other) => unreachable!("before the route is known only its end can be told, not {other:?}"),
            // The event-channel thread is held up in a C call. When it goes on it finds nobody to lend the id to, and the
            // deadline ends the attempt.
            None => Err(Error::TimedOut { step: TimedOutStep::Route, after: limit.deadline - limit.started }),
        }
    }

    /// The local address that the connection will have.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.lent.local
    }

    /// The listener's address.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.lent.peer
    }

    /// The device that leads to the peer.
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

    /// Replaces the private data of the connector: bytes for the listener's program, at most
    /// [`MAX_CONNECT_DATA`](crate::MAX_CONNECT_DATA).
    ///
    /// # Errors
    /// [`Error::PrivateDataTooLong`]; the route stays as it was.
    pub fn private_data(&mut self, data: &[u8]) -> Result<()> {
        self.private_data = Carrier::Connect.frame(data)?;
        Ok(())
    }

    /// Replaces the private data of the connector: bytes for a foreign listener, at most 56, sent as they are.
    ///
    /// # Errors
    /// [`Error::PrivateDataTooLong`]; the route stays as it was.
    pub fn private_data_raw(&mut self, data: &[u8]) -> Result<()> {
        self.private_data = Carrier::Connect.raw(data)?;
        Ok(())
    }

    /// Replaces the options of the connector, now that the device is known.
    pub(crate) fn set_options(&mut self, options: ConnectionOptions) {
        self.options = options;
    }

    /// Makes the queue pair and connects, under the deadline that began with [`Connector::resolve`].
    ///
    /// # Errors
    /// As [`Connector::connect`].
    pub fn connect(self) -> Result<Connection> {
        let parameters = self.options.request(self.lent.device.context(), self.private_data)?;
        self.lent.establish(parameters, None, &self.options, self.limit, self.cancel.as_ref())
    }
}
