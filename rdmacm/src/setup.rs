//! The user thread's part of setting up a connection: it makes the queue pair on a lent id, gives the id back, and waits
//! for the outcome.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::Receiver;
use verbs::EndpointBuilder;

use crate::cancel::CancelToken;
use crate::connection::{Connection, Link};
use crate::error::{Error, Result, TimedOutStep};
use crate::handle::{self, Command, LoanGuard, Notice};
use crate::id::Parameters;
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
        mut self,
        parameters: Parameters,
        request: Option<PrivateData>,
        options: &ConnectionOptions,
        limit: Limit,
        cancel: Option<&CancelToken>,
    ) -> Result<Connection> {
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
        self.guard.built(control.clone(), parameters, options.keepalive, limit.deadline);
        match handle::wait_for_setup(&self.notices, limit.deadline, cancel, key, &mailbox)? {
            Some(Notice::Established { private_data }) => {
                if let Err(error) = control.queue_pair().set_rnr_timer(options.rnr_timer) {
                    // The connection works without it, with 655 ms for each message that comes too early.
                    log::debug!("id={} rnr timer: {error}", key.0);
                }
                let link = Link {
                    control,
                    key,
                    notices: self.notices,
                    manager: self.manager,
                    device: self.device,
                    local: self.local,
                    peer: self.peer,
                    private_data: request.unwrap_or(private_data),
                    disconnect_timeout: options.disconnect_timeout,
                    drain_timeout: options.drain_timeout,
                };
                Ok(Connection::new(endpoint, link))
            }
            Some(Notice::Failed(error)) => Err(error),
            Some(other) => unreachable!("set-up ends with success or failure, not {other:?}"),
            // The event-channel thread is held up in a C call; it ends the attempt when it goes on.
            None => {
                mailbox.send(Command::Cancel { key });
                mailbox.send(Command::Release { key });
                Err(Error::TimedOut {
                    step: limit.step,
                    after: limit.deadline.saturating_duration_since(limit.started),
                })
            }
        }
    }
}
