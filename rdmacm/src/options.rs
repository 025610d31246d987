//! What a user may choose, and what it becomes for librdmacm.

use std::net::SocketAddr;
use std::time::Duration;

use verbs::{Context, EndpointOptions};

use crate::channel::ConnectionDepths;
use crate::error::{Error, Result};
use crate::id::Parameters;
use crate::private_data::Carrier;

/// More would keep the event-channel thread busy with one connection.
const MIN_KEEPALIVE: Duration = Duration::from_millis(10);

/// How an idle connection is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keepalive {
    pub(crate) interval: Duration,
    pub(crate) misses: u32,
}

/// Choices that both ends of a connection have.
///
/// ```
/// use std::time::Duration;
/// use rdmacm::{ConnectionOptions, EndpointOptions};
///
/// let options = ConnectionOptions::new()
///     .endpoint(EndpointOptions::default().message_size(64 * 1024))
///     .ack_timeout(Duration::from_millis(20));
/// ```
#[derive(Clone, Debug)]
pub struct ConnectionOptions {
    pub(crate) endpoint: EndpointOptions,
    pub(crate) ack_timeout: Option<u8>,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) rnr_timer: Duration,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) drain_timeout: Duration,
    pub(crate) disconnect_timeout: Duration,
    pub(crate) keepalive: Option<Keepalive>,
}

impl Default for ConnectionOptions {
    fn default() -> Self {
        Self {
            endpoint: EndpointOptions::default(),
            // 4.096 µs · 2^16 = 268 ms: with six retries a vanished peer is known after about 2 s. The kernel's own
            // choice (19 on Linux 6.1) makes that 15 s.
            ack_timeout: Some(16),
            // 7 means "for ever" on Soft-RoCE (rxe_comp.c).
            retry_count: 6,
            // 7 means "for ever" everywhere: a slow receiver is back-pressure, not an error.
            rnr_retry: 7,
            // The connection manager's choice, code 0, means 655 ms for each message that comes too early.
            rnr_timer: Duration::from_micros(640),
            responder_resources: 16,
            initiator_depth: 16,
            drain_timeout: Duration::from_secs(1),
            disconnect_timeout: Duration::from_secs(2),
            keepalive: None,
        }
    }
}

impl ConnectionOptions {
    /// The defaults, each stated at its setter.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Queue depths, message size, inline size and the way of waiting.
    #[must_use]
    pub fn endpoint(mut self, endpoint: EndpointOptions) -> Self {
        self.endpoint = endpoint;
        self
    }

    /// How long the device waits for the peer's acknowledgement before it sends again (default 268 ms), rounded up to
    /// 4.096 µs times a power of two, at most 2.4 h. Lower finds a dead peer sooner; too low repeats what was only slow.
    #[must_use]
    #[doc(alias = "RDMA_OPTION_ID_ACK_TIMEOUT")]
    pub fn ack_timeout(mut self, timeout: Duration) -> Self {
        self.ack_timeout = Some(ack_timeout_exponent(timeout));
        self
    }

    /// How often the device sends again before the connection breaks with "retry exceeded": 0 to 6, default 6. The 7 that
    /// verbs knows too means "for ever" on Soft-RoCE, so that a dead peer would never be noticed; it is refused when the
    /// connection is made. The connecting side's value holds for both ends.
    #[must_use]
    pub fn retry_count(mut self, retries: u8) -> Self {
        self.retry_count = retries;
        self
    }

    /// How often the *peer's* device tries again when this side has no receive posted: 0 to 6, or 7 for ever (default 7).
    #[must_use]
    pub fn rnr_retry(mut self, retries: u8) -> Self {
        self.rnr_retry = retries;
        self
    }

    /// How long the peer's device waits before it tries again when this side has no receive posted (default 0.64 ms),
    /// rounded up to the next value that verbs knows, 0.01 ms to 655 ms.
    #[must_use]
    #[doc(alias = "min_rnr_timer")]
    pub fn rnr_timer(mut self, timer: Duration) -> Self {
        self.rnr_timer = timer;
        self
    }

    /// How many RDMA reads and atomics of the peer this side serves at once (default 16); clamped to what the device can
    /// do and, when accepting, to what the client asks for. 0 forbids them.
    #[must_use]
    pub fn responder_resources(mut self, count: u8) -> Self {
        self.responder_resources = count;
        self
    }

    /// How many RDMA reads and atomics this side may have outstanding (default 16); clamped like
    /// [`responder_resources`](Self::responder_resources).
    #[must_use]
    pub fn initiator_depth(mut self, count: u8) -> Self {
        self.initiator_depth = count;
        self
    }

    /// How long dropping a connection waits for messages that were sent but are not yet acknowledged (default 1 s).
    #[must_use]
    pub fn drain_timeout(mut self, timeout: Duration) -> Self {
        self.drain_timeout = timeout;
        self
    }

    /// How long [`Connection::disconnect`](crate::Connection::disconnect) waits for the peer's answer (default 2 s).
    #[must_use]
    pub fn disconnect_timeout(mut self, timeout: Duration) -> Self {
        self.disconnect_timeout = timeout;
        self
    }

    /// Finds out whether the peer still answers while nothing else is sent (default: no keepalive): every `interval` the
    /// event-channel thread posts an empty RDMA write, which the peer's *device* answers, whatever its program does. When
    /// `misses` intervals pass without an answer, the connection ends with
    /// [`CloseReason::Unresponsive`](crate::CloseReason::Unresponsive). A peer that is connected and idle is otherwise only
    /// missed when its disconnect arrives, and nobody repeats that if it is lost.
    #[must_use]
    pub fn keepalive(mut self, interval: Duration, misses: u32) -> Self {
        self.keepalive = Some(Keepalive { interval, misses });
        self
    }

    /// Refuses what verbs has no encoding for, and what makes no sense.
    pub(crate) fn check(&self) -> Result<()> {
        if self.retry_count > 6 {
            return Err(Error::Misuse(
                "retry_count is 0 to 6: 7 would mean for ever on Soft-RoCE, and a dead peer would never be noticed",
            ));
        }
        if self.keepalive.is_some_and(|keepalive| keepalive.interval < MIN_KEEPALIVE || keepalive.misses == 0) {
            return Err(Error::Misuse("a keepalive needs an interval of at least 10 ms and at least one miss"));
        }
        if self.disconnect_timeout.is_zero() {
            return Err(Error::Misuse(
                "a disconnect_timeout of zero leaves no time to disconnect: use Connection::abort",
            ));
        }
        if self.rnr_retry > 7 {
            return Err(Error::Misuse("rnr_retry is 0 to 6, or 7 for ever"));
        }
        Ok(())
    }

    /// The parameters of a connect request.
    pub(crate) fn request(&self, context: &Context, private_data: Vec<u8>) -> Result<Parameters> {
        let device = device_depths(context)?;
        Ok(Parameters {
            private_data,
            responder_resources: self.responder_resources.min(device.responder_resources),
            initiator_depth: self.initiator_depth.min(device.initiator_depth),
            retry_count: self.retry_count,
            rnr_retry: self.rnr_retry,
        })
    }

    /// The parameters of a reply to a client that asks for `wanted`. The acceptor must clamp: the client's queue pair
    /// takes the reply's values as they are.
    pub(crate) fn reply(
        &self,
        context: &Context,
        private_data: Vec<u8>,
        wanted: ConnectionDepths,
    ) -> Result<Parameters> {
        let mut parameters = self.request(context, private_data)?;
        parameters.responder_resources = parameters.responder_resources.min(wanted.responder_resources);
        parameters.initiator_depth = parameters.initiator_depth.min(wanted.initiator_depth);
        Ok(parameters)
    }
}

fn device_depths(context: &Context) -> Result<ConnectionDepths> {
    let attributes = context.attributes()?;
    // librdmacm keeps these in a byte, where a device's 256 would become 0; 255 means "the device's most" to it.
    let clamp = |count: u32| u8::try_from(count.min(254)).expect("clamped");
    Ok(ConnectionDepths {
        responder_resources: clamp(attributes.max_qp_rd_atom),
        initiator_depth: clamp(attributes.max_qp_init_rd_atom),
    })
}

/// The smallest t with 4.096 µs · 2^t of at least `timeout`, from 1 (0 would mean for ever) to 31.
fn ack_timeout_exponent(timeout: Duration) -> u8 {
    (1..31u8).find(|&t| 4096 * (1u128 << t) >= timeout.as_nanos()).unwrap_or(31)
}

/// How an accepted connection is set up.
#[derive(Clone, Debug, Default)]
pub struct AcceptOptions {
    pub(crate) connection: ConnectionOptions,
    private_data: PrivateDataChoice,
}

impl AcceptOptions {
    /// The defaults of [`ConnectionOptions`], and no private data.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The choices that both ends have.
    #[must_use]
    pub fn options(mut self, options: ConnectionOptions) -> Self {
        self.connection = options;
        self
    }

    /// Bytes for the client, at most [`MAX_ACCEPT_DATA`](crate::MAX_ACCEPT_DATA), which a client of this library gets
    /// exactly ([`PrivateData::data`](crate::PrivateData::data)).
    #[must_use]
    pub fn private_data(mut self, data: &[u8]) -> Self {
        self.private_data = PrivateDataChoice::Framed(data.to_vec());
        self
    }

    /// Bytes for a foreign client, at most 196, sent as they are.
    #[must_use]
    pub fn private_data_raw(mut self, data: &[u8]) -> Self {
        self.private_data = PrivateDataChoice::Raw(data.to_vec());
        self
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        self.private_data.encode(Carrier::Accept)
    }
}

/// Private data as the user gave it.
#[derive(Clone, Debug, Default)]
pub(crate) enum PrivateDataChoice {
    /// Nothing is sent, so that a foreign peer sees nothing.
    #[default]
    None,
    Framed(Vec<u8>),
    Raw(Vec<u8>),
}

impl PrivateDataChoice {
    pub(crate) fn encode(&self, carrier: Carrier) -> Result<Vec<u8>> {
        match self {
            Self::None => Ok(Vec::new()),
            Self::Framed(data) => carrier.frame(data),
            Self::Raw(data) => carrier.raw(data),
        }
    }
}

/// How a listener is set up.
#[derive(Clone, Debug)]
pub(crate) struct ListenPlan {
    pub(crate) address: SocketAddr,
    pub(crate) reuse_address: bool,
    pub(crate) ipv6_only: Option<bool>,
    /// How long a request may wait in the queue before it is refused.
    pub(crate) queue_ttl: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ack_timeout_is_rounded_up_to_what_verbs_can_say() {
        assert_eq!(ack_timeout_exponent(Duration::ZERO), 1);
        assert_eq!(ack_timeout_exponent(Duration::from_nanos(4096 << 14)), 14);
        assert_eq!(ack_timeout_exponent(Duration::from_nanos((4096 << 14) + 1)), 15);
        assert_eq!(ack_timeout_exponent(Duration::from_millis(268)), 16);
        assert_eq!(ack_timeout_exponent(Duration::MAX), 31);
    }

    #[test]
    fn retry_for_ever_is_refused() {
        assert!(ConnectionOptions::new().check().is_ok());
        assert!(ConnectionOptions::new().retry_count(7).check().is_err());
        assert!(ConnectionOptions::new().rnr_retry(7).check().is_ok());
        assert!(ConnectionOptions::new().rnr_retry(8).check().is_err());
    }
}
