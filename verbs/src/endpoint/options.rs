//! What an endpoint is made with.

use std::time::Duration;

use crate::device::DeviceAttributes;
use crate::error::{Error, LimitError, Result};
use crate::wait::Wait;

/// Sizes and manners of an [`Endpoint`](super::Endpoint).
///
/// ```
/// use verbs::EndpointOptions;
///
/// let options = EndpointOptions::default().message_size(65536).recv_depth(16);
/// # let _ = options;
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EndpointOptions {
    /// Send-side operations that can be outstanding, 64 by default. The queue has one place more, for keepalive probes.
    pub send_depth: u32,
    /// Messages that can arrive before anybody takes them, 64 by default.
    pub recv_depth: u32,
    /// The largest message, in bytes, sent or received; 4096 by default. Agree on it with the peer: a larger
    /// message than its receive buffers breaks the connection. The endpoint registers this much for each
    /// outstanding operation of either side.
    pub message_size: usize,
    /// Messages up to this many bytes travel in the request itself, 64 by default. The device may grant less.
    pub max_inline: u32,
    /// Buffers that [`alloc`](super::SendHalf::alloc) hands out, registered when the first is asked for; 64 by
    /// default.
    pub send_buffers: u32,
    /// How to wait; [`Wait::Adaptive`] by default.
    pub wait: Wait,
    /// How long to poll before sleeping in [`Wait::Adaptive`], 20 us by default.
    pub spin: Duration,
    /// How many sends share one completion; 0, the default, is a quarter of the depth for messages, while operations
    /// that were posted ([`post_write`](super::SendHalf::post_write)) each tell their own; 1 has all tell their own.
    /// With 0 or more than 1, [`flush`](super::SendHalf::flush) posts an empty RDMA write after sends whose end would not
    /// be told, which the peer's queue pair must allow (it does when a connection manager set it up).
    pub signal_every: u32,
    /// Receives carry no buffer, `false` by default: for a peer that sends nothing but notifications, which are writes
    /// with an immediate value ([`post_write`](super::SendHalf::post_write)) and empty messages. They are taken with
    /// [`recv_notification`](super::RecvHalf::recv_notification).
    pub notifications: bool,
}

impl Default for EndpointOptions {
    fn default() -> EndpointOptions {
        EndpointOptions {
            send_depth: 64,
            recv_depth: 64,
            message_size: 4096,
            max_inline: 64,
            send_buffers: 64,
            wait: Wait::default(),
            spin: Duration::from_micros(20),
            signal_every: 0,
            notifications: false,
        }
    }
}

macro_rules! setters {
    ($($field:ident: $type:ty),* $(,)?) => {
        impl EndpointOptions {
            $(
                #[doc = concat!("Sets [`", stringify!($field), "`](Self#structfield.", stringify!($field), ").")]
                #[must_use]
                pub fn $field(mut self, $field: $type) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
}

setters! {
    send_depth: u32,
    recv_depth: u32,
    message_size: usize,
    max_inline: u32,
    send_buffers: u32,
    wait: Wait,
    spin: Duration,
    signal_every: u32,
    notifications: bool,
}

impl EndpointOptions {
    /// Refuses what the device cannot do, by name, where the kernel would only say `EINVAL` or `ENOMEM`.
    pub(super) fn check(&self, device: &DeviceAttributes, max_message: usize) -> Result<()> {
        let fits = |what, asked: u64, allowed: u32| LimitError::check(what, asked, allowed.into(), "lower the option");
        if self.send_depth == 0 || self.recv_depth == 0 {
            return Err(Error::misuse("the options send_depth and recv_depth must be at least 1"));
        }
        if self.message_size == 0 {
            return Err(Error::misuse("the option message_size must be at least 1"));
        }
        let with_probe = u64::from(self.send_depth) + u64::from(PROBES);
        fits("option send_depth, and one for the probe (device limit max_qp_wr)", with_probe, device.max_qp_wr)?;
        fits("option recv_depth (device limit max_qp_wr)", self.recv_depth.into(), device.max_qp_wr)?;
        fits("option send_depth, and one for the probe (device limit max_cqe)", with_probe, device.max_cqe)?;
        fits("option recv_depth (device limit max_cqe)", self.recv_depth.into(), device.max_cqe)?;
        LimitError::check(
            "option message_size (limit of the port, max_msg_sz)",
            self.message_size as u64,
            max_message.min(i32::MAX as usize) as u64,
            "lower the option",
        )
    }

    /// How many sends share one completion.
    pub(super) fn signal_interval(&self) -> u64 {
        match self.signal_every {
            0 => u64::from(self.send_depth / 4).max(1),
            n => u64::from(n.min(self.send_depth)),
        }
    }
}

/// Places kept free in the send queue and its completion queue: for [`Control::probe`](super::Control::probe).
pub(super) const PROBES: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signalling_never_lets_the_queue_fill_up_untold() {
        for depth in 1..200 {
            for every in [0, 1, 2, 100, u32::MAX] {
                let n = EndpointOptions::default().send_depth(depth).signal_every(every).signal_interval();
                assert!(n >= 1 && n <= u64::from(depth), "depth {depth}, every {every}: {n}");
            }
        }
    }
}
