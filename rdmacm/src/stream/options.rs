//! Sizes and manners of a stream.

use std::net::SocketAddr;
use std::time::Duration;

use verbs::{DeviceAttributes, EndpointOptions};

use super::protocol::{CONTROL_RECEIVES, CONTROL_SLOTS};
use crate::manager::Manager;
use crate::options::ConnectionOptions;

/// Sizes and manners of streams, for [`RdmaStream::connect_with`](super::RdmaStream::connect_with) and
/// [`RdmaListener::bind_with`](super::RdmaListener::bind_with).
///
/// Both ends may differ in all of them.
///
/// ```no_run
/// use rdmacm::{RdmaStream, StreamOptions};
///
/// # fn main() -> std::io::Result<()> {
/// let options = StreamOptions::new().receive_buffer(1 << 20).send_buffer(1 << 20);
/// let stream = RdmaStream::connect_with("10.1.2.3:7471", &options)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct StreamOptions {
    pub(super) receive_buffer: usize,
    pub(super) send_buffer: usize,
    pub(super) receive_queue: u32,
    pub(super) send_queue: u32,
    pub(super) inline: u32,
    pub(super) spin: Duration,
    pub(super) linger: Duration,
    pub(super) connect_timeout: Duration,
    pub(super) source: Option<SocketAddr>,
    pub(super) manager: Option<Manager>,
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self {
            // As in rsocket: buffers of 128 KiB, queues of 384, 64 bytes inline, 10 µs of polling.
            receive_buffer: 128 * 1024,
            send_buffer: 128 * 1024,
            receive_queue: 384,
            send_queue: 384,
            inline: 64,
            spin: Duration::from_micros(10),
            linger: Duration::from_secs(3),
            connect_timeout: Duration::from_secs(10),
            source: None,
            manager: None,
        }
    }
}

impl StreamOptions {
    /// The defaults, each stated at its setter.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes that can arrive before the program reads them (default 128 KiB, at least 4 KiB, at most 1 GiB). They are
    /// registered, so they count against RLIMIT_MEMLOCK.
    #[must_use]
    #[doc(alias = "SO_RCVBUF")]
    pub fn receive_buffer(mut self, bytes: usize) -> Self {
        self.receive_buffer = bytes;
        self
    }

    /// Bytes that can be on their way (default 128 KiB, at least 4 KiB, at most 1 GiB); registered as well.
    #[must_use]
    #[doc(alias = "SO_SNDBUF")]
    pub fn send_buffer(mut self, bytes: usize) -> Self {
        self.send_buffer = bytes;
        self
    }

    /// Messages that can arrive before this side looks at them (default 384, 16 to 65534, at most what the device has).
    #[must_use]
    #[doc(alias = "RDMA_RQSIZE")]
    pub fn receive_queue(mut self, messages: u32) -> Self {
        self.receive_queue = messages;
        self
    }

    /// Messages that can be on their way (default 384, 16 to 65534, at most what the device has).
    #[must_use]
    #[doc(alias = "RDMA_SQSIZE")]
    pub fn send_queue(mut self, messages: u32) -> Self {
        self.send_queue = messages;
        self
    }

    /// Up to this many bytes travel in the request itself (default 64). The device may grant less.
    #[must_use]
    #[doc(alias = "RDMA_INLINE")]
    pub fn inline(mut self, bytes: u32) -> Self {
        self.inline = bytes;
        self
    }

    /// How long a blocked call polls before it sleeps (default 10 µs). Zero sleeps at once; a very long time polls for
    /// good and takes a processor for it. Where polling keeps failing, or there is one processor only, it sleeps at once.
    #[must_use]
    pub fn spin(mut self, time: Duration) -> Self {
        self.spin = time;
        self
    }

    /// How long dropping the last handle waits for what was written to reach the peer's device (default 3 s); see
    /// [`RdmaStream::set_linger`](super::RdmaStream::set_linger).
    #[must_use]
    pub fn linger(mut self, time: Duration) -> Self {
        self.linger = time;
        self
    }

    /// How long connecting may take, over all addresses of a name (default 10 s).
    #[must_use]
    pub fn connect_timeout(mut self, time: Duration) -> Self {
        self.connect_timeout = time;
        self
    }

    /// The local address to connect from, which chooses the device; port 0 for any.
    #[must_use]
    pub fn source(mut self, source: SocketAddr) -> Self {
        self.source = Some(source);
        self
    }

    /// Uses this manager instead of [`Manager::global`].
    #[must_use]
    pub fn manager(mut self, manager: &Manager) -> Self {
        self.manager = Some(manager.clone());
        self
    }

    /// What a device grants of them.
    pub(super) fn on(&self, device: &DeviceAttributes) -> Sizes {
        let queue = |asked: u32| {
            let most = device.max_qp_wr.min(device.max_cqe).saturating_sub(CONTROL_RECEIVES.into()).min(MAX_QUEUE);
            asked.clamp(MIN_QUEUE, most.max(MIN_QUEUE))
        };
        Sizes {
            // Two halves.
            half: u32::try_from(self.receive_buffer.clamp(MIN_BUFFER, MAX_BUFFER).div_ceil(2)).expect("at most 2^29"),
            send_buffer: self.send_buffer.clamp(MIN_BUFFER, MAX_BUFFER),
            credits: u16::try_from(queue(self.receive_queue)).expect("at most MAX_QUEUE"),
            send_queue: queue(self.send_queue),
            inline: self.inline,
        }
    }
}

/// The smallest queue that rsocket uses.
const MIN_QUEUE: u32 = 16;
/// The largest, whose numbers fit into 16 bits.
const MAX_QUEUE: u32 = 0xfffe;
/// Less makes no sense; registration works in pages.
const MIN_BUFFER: usize = 4096;
/// A message's length has 29 bits.
const MAX_BUFFER: usize = 1 << 30;

const _: () = assert!(CONTROL_SLOTS < MIN_QUEUE as usize);

/// Sizes that a device grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    /// Bytes of half of the receive ring.
    pub(super) half: u32,
    pub(super) send_buffer: usize,
    /// Receives for data; there are some more for control messages.
    pub(super) credits: u16,
    pub(super) send_queue: u32,
    pub(super) inline: u32,
}

impl Sizes {
    /// What the connection manager is asked for.
    pub(super) fn connection(&self) -> ConnectionOptions {
        let endpoint = EndpointOptions::default()
            .send_depth(self.send_queue)
            .recv_depth(u32::from(self.credits) + u32::from(CONTROL_RECEIVES))
            .max_inline(self.inline)
            .message_size(1)
            .notifications(true);
        // The protocol reads nothing; rsocket asks for none and refuses none. The stream itself waits for what it sent.
        ConnectionOptions::new()
            .endpoint(endpoint)
            .responder_resources(0)
            .initiator_depth(0)
            .drain_timeout(Duration::ZERO)
    }
}
