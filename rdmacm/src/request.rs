//! A client's wish to connect.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use nix::errno::Errno;
use verbs::{Access, MemoryRegion, ProtectionDomain};

use crate::channel::ConnectionDepths;
use crate::connection::Connection;
use crate::error::{Error, Result, TimedOutStep};
use crate::handle::{LoanGuard, Mailbox, Request};
use crate::id::Key;
use crate::manager::{Device, Manager};
use crate::options::AcceptOptions;
use crate::private_data::{Carrier, PrivateData};
use crate::setup::{Handshake, Lent, Limit};

/// How long a client's acknowledgement of an accept may take.
const ACCEPT_DEADLINE: Duration = Duration::from_secs(5);

/// The loan of a request that is still in the queue's hands.
pub(crate) fn guard(request: &Request, mailbox: &Arc<Mailbox>) -> Option<LoanGuard> {
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
    pub(crate) fn claim(request: Request, manager: &Manager) -> Result<Option<Self>> {
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
    pub fn accept_with(self, options: &AcceptOptions) -> Result<Connection> {
        self.begin(options, None)?.wait(None)
    }

    /// The part of accepting that never waits for the client.
    pub(crate) fn begin(mut self, options: &AcceptOptions, decided: Option<Sender<Key>>) -> Result<Handshake> {
        options.connection.check()?;
        let private_data = options.encode()?;
        let parameters = options.connection.reply(self.lent.device.context(), private_data, self.wanted)?;
        if let Some(exponent) = options.connection.ack_timeout {
            self.lent.guard.loan().set_ack_timeout(exponent)?;
        }
        let started = Instant::now();
        let limit = Limit { started, deadline: started + ACCEPT_DEADLINE, step: TimedOutStep::Accept };
        let peer = self.lent.peer;
        let begun = self.lent.start(parameters, Some(self.private_data), &options.connection, limit, decided);
        begun.map_err(|error| taken_back(error, peer))
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

/// What the endpoint was asked for is within the device's limits; when the kernel refuses the queue pair with EINVAL all the
/// same, what it no longer has is the request, which the client took back.
fn taken_back(error: Error, peer: SocketAddr) -> Error {
    match error {
        Error::Os { call: "rdma_create_qp", errno: Errno::EINVAL, .. } => Error::Aborted { peer },
        error => error,
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
