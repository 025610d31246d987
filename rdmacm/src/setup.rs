//! The user thread's part of setting up a connection: it makes the queue pair on a lent id, gives the id back, and waits
//! for the outcome.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use verbs::{Endpoint, EndpointBuilder};

use crate::cancel::CancelToken;
use crate::connection::{Connection, Link};
use crate::error::{Error, Result, TimedOutStep};
use crate::handle::{self, Built, Command, LoanGuard, Notice};
use crate::id::{Key, Parameters};
use crate::manager::{Device, Manager};
use crate::options::ConnectionOptions;
use crate::private_data::PrivateData;

/// A lent id, with everything that is known about its connection. Dropping it gives the id back, unused.
#[derive(Debug)]
pub(crate) struct Lent {
    pub(crate) guard: LoanGuard,
    pub(crate) notices: Receiver<Notice>,
    pub(crate) device: Device,
    pub(crate) manager: Manager,
    pub(crate) local: SocketAddr,
    pub(crate) peer: SocketAddr,
}

/// When set-up must be over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    pub(crate) started: Instant,
    pub(crate) deadline: Instant,
    pub(crate) step: TimedOutStep,
}

impl Lent {
    /// Makes the queue pair and posts its receives, gives the id back with `parameters` for `rdma_connect` or
    /// `rdma_accept`, and waits until the connection is up. `request` is the private data that is known already; otherwise
    /// the peer's comes with the outcome.
    pub(crate) fn establish(
        self,
        parameters: Parameters,
        request: Option<PrivateData>,
        options: &ConnectionOptions,
        limit: Limit,
        cancel: Option<&CancelToken>,
    ) -> Result<Connection> {
        self.start(parameters, request, options, limit, None)?.wait(cancel)
    }

    /// The first part of [`Lent::establish`], which never waits for the peer. The key goes to `decided` when the outcome is
    /// known.
    pub(crate) fn start(
        mut self,
        parameters: Parameters,
        request: Option<PrivateData>,
        options: &ConnectionOptions,
        limit: Limit,
        decided: Option<Sender<Key>>,
    ) -> Result<Handshake> {
        let pd = self.device.protection_domain();
        let builder = EndpointBuilder::new(pd, &options.endpoint)?;
        let endpoint = self.guard.loan().build(builder, pd)?;
        let control = endpoint.control();
        let key = self.guard.key();
        let mailbox = Arc::clone(self.guard.mailbox());
        control.set_broken_hook({
            let mailbox = Arc::clone(&mailbox);
            Box::new(move || mailbox.send(Command::Broken { key }))
        });
        let built = Built { control: control.clone(), parameters, keepalive: options.keepalive, decided };
        self.guard.built(built, limit.deadline);
        let link = Link {
            control,
            key,
            notices: self.notices,
            manager: self.manager,
            device: self.device,
            local: self.local,
            peer: self.peer,
            private_data: request.unwrap_or_default(),
            disconnect_timeout: options.disconnect_timeout,
            drain_timeout: options.drain_timeout,
        };
        Ok(Handshake { endpoint, link, rnr_timer: options.rnr_timer, limit })
    }
}

/// A connection that is being set up. Dropping it gives it up: its [`Link`] releases the id.
#[derive(Debug)]
pub(crate) struct Handshake {
    /// Dropped before `link`, as in a [`Connection`].
    endpoint: Endpoint,
    link: Link,
    rnr_timer: Duration,
    limit: Limit,
}

impl Handshake {
    pub(crate) fn key(&self) -> Key {
        self.link.key
    }

    pub(crate) fn peer_addr(&self) -> SocketAddr {
        self.link.peer
    }

    /// Waits for the outcome.
    pub(crate) fn wait(self, cancel: Option<&CancelToken>) -> Result<Connection> {
        let Link { key, notices, manager, .. } = &self.link;
        let notice = handle::wait_for_setup(notices, self.limit.deadline, cancel, *key, manager.mailbox())?;
        self.finish(notice)
    }

    /// Whether the outcome is known.
    pub(crate) fn is_decided(&self) -> bool {
        !self.link.notices.is_empty()
    }

    /// The outcome, which is known: the key was sent to `decided`.
    pub(crate) fn decided(self) -> Result<Connection> {
        let notice = self.link.notices.try_recv().ok();
        self.finish(notice)
    }

    fn finish(mut self, notice: Option<Notice>) -> Result<Connection> {
        match notice {
            Some(Notice::Established { depths, private_data }) => {
                if depths.initiator_depth == 0 {
                    self.endpoint.sender().forbid_reads();
                }
                if let Err(error) = self.link.control.queue_pair().set_rnr_timer(self.rnr_timer) {
                    // The connection works without it, with 655 ms for each message that comes too early.
                    log::debug!("id={} rnr timer: {error}", self.link.key.0);
                }
                // An acceptor has the peer's private data from the request, and gets none with the acknowledgement.
                if !private_data.raw().is_empty() {
                    self.link.private_data = private_data;
                }
                Ok(Connection::new(self.endpoint, self.link))
            }
            Some(Notice::Failed(error)) => Err(error),
            Some(other) => unreachable!("set-up ends with success or failure, not {other:?}"),
            // The event-channel thread is held up in a C call; it ends the attempt when it goes on.
            None => Err(Error::TimedOut {
                step: self.limit.step,
                after: self.limit.deadline.saturating_duration_since(self.limit.started),
            }),
        }
    }
}
