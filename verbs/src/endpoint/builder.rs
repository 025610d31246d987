//! Making an endpoint: everything but the queue pair first, then around a queue pair.

use std::fmt;
use std::sync::Arc;

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::Endpoint;
use super::options::{EndpointOptions, PROBES};
use super::recv::RecvHalf;
use super::send::{SendHalf, SendState};
use super::shared::Shared;
use crate::cq::{CompletionChannel, CompletionQueue};
use crate::device::AtomicCap;
use crate::error::{OsError, Result};
use crate::mr::Access;
use crate::pd::ProtectionDomain;
use crate::pool::Arena;
use crate::qp::{QueuePair, QueuePairCaps};
use crate::sys;

/// Everything that an [`Endpoint`] needs before its queue pair exists: completion queues, channels, slots.
///
/// Make the queue pair with [`init_attr`](Self::init_attr) (on `EINVAL` call
/// [`reduce_inline`](Self::reduce_inline) and try again), then [`build`](Self::build); or have both done by
/// [`create`](Self::create).
pub struct EndpointBuilder {
    options: EndpointOptions,
    inline: u32,
    max_message: usize,
    atomics: bool,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    send_slots: Arena,
    /// `None` when receives carry no buffer.
    recv_slots: Option<Arena>,
    closed: EventFd,
    pd: ProtectionDomain,
}

impl EndpointBuilder {
    /// Checks the options against the device and makes all but the queue pair.
    ///
    /// # Errors
    /// * [`Error::Limit`](crate::Error::Limit) names the option and the device's limit;
    ///   [`Error::Misuse`](crate::Error::Misuse) for options of 0.
    /// * [`Error::Os`](crate::Error::Os): RLIMIT_MEMLOCK too low, too many open files, the device gone.
    pub fn new(pd: &ProtectionDomain, options: &EndpointOptions) -> Result<EndpointBuilder> {
        let context = pd.context();
        let device = context.attributes()?;
        let max_message = context.max_message()?;
        options.check(&device, max_message)?;
        let cq =
            |depth| CompletionQueue::with_limit(context, depth, device.max_cqe, Some(CompletionChannel::new(context)?));
        Ok(EndpointBuilder {
            inline: options.max_inline,
            max_message,
            atomics: device.atomic_cap != AtomicCap::None,
            // Each outstanding request gives at most one completion, and none is forgotten before it came:
            // with these depths neither queue can overrun.
            send_cq: cq(options.send_depth + PROBES)?,
            recv_cq: cq(options.recv_depth)?,
            send_slots: Arena::new(pd, SendState::places(options.send_depth), options.message_size)?,
            recv_slots: match options.notifications {
                true => None,
                false => Some(Arena::new(pd, options.recv_depth, options.message_size)?),
            },
            closed: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
                .map_err(|errno| OsError::new("eventfd", errno))?,
            options: options.clone(),
            pd: pd.clone(),
        })
    }

    /// What to make the queue pair with, on this builder's domain: reliable connected, with its queues and depths.
    /// Valid as long as the builder.
    pub fn init_attr(&self) -> sys::ibv_qp_init_attr {
        let mut attr = sys::zeroed_qp_init_attr();
        attr.send_cq = self.send_cq.as_raw();
        attr.recv_cq = self.recv_cq.as_raw();
        attr.cap = self.caps().to_raw();
        attr.qp_type = sys::ibv_qp_type::IBV_QPT_RC;
        attr
    }

    /// The depths and sizes to ask for.
    pub fn caps(&self) -> QueuePairCaps {
        QueuePairCaps {
            max_send_wr: self.options.send_depth + PROBES,
            max_recv_wr: self.options.recv_depth,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: self.inline,
        }
    }

    /// After `EINVAL`: asks for less inline data, whose limit cannot be queried. `false` when none was asked for.
    pub fn reduce_inline(&mut self) -> bool {
        let before = self.inline;
        self.inline = match before {
            0 => return false,
            1..=16 => 0,
            // 64 is the least that hardware is known to grant where it grants any, siw's limit is 80.
            17..=64 => 16,
            65..=128 => 64,
            more => more / 2,
        };
        log::debug!("inline data: {before} bytes refused, trying {}", self.inline);
        true
    }

    /// The domain to make the queue pair on.
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Takes over the queue pair and posts all receives.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) when a receive cannot be posted; the queue pair is destroyed then.
    ///
    /// # Safety
    /// `qp` is a live queue pair, at least in the state init, that was made on this builder's domain with
    /// [`init_attr`](Self::init_attr); it is handed over, so nobody else destroys it or posts to it;
    /// `granted` is the structure as the creating call wrote it back.
    ///
    /// # Panics
    /// When `qp` is null or was not made on this builder's objects.
    pub unsafe fn build(self, qp: *mut sys::ibv_qp, granted: &sys::ibv_qp_init_attr) -> Result<Endpoint> {
        // SAFETY: as the caller says.
        let qp = unsafe { QueuePair::from_raw(qp, &self.pd, &self.send_cq, &self.recv_cq) };
        self.finish(qp, QueuePairCaps::from_raw(&granted.cap))
    }

    /// Makes the queue pair too, and takes it to the state init on this port, with what peers may do. To be
    /// connected by [`QueuePair::to_ready_to_receive`] and [`QueuePair::to_ready_to_send`].
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) when the device refuses the queue pair or the port.
    pub fn create(mut self, port: u8, access: Access) -> Result<Endpoint> {
        let (qp, granted) = loop {
            match QueuePair::create(&self.pd, &self.send_cq, &self.recv_cq, self.caps()) {
                Ok(made) => break made,
                Err(crate::Error::Os(e)) if e.errno == nix::errno::Errno::EINVAL && self.reduce_inline() => {}
                Err(e) => return Err(e),
            }
        };
        qp.to_init(port, access)?;
        self.finish(qp, granted)
    }

    fn finish(self, qp: QueuePair, granted: QueuePairCaps) -> Result<Endpoint> {
        let shared = Arc::new(Shared::new(qp, self.recv_slots, self.options.recv_depth, self.closed));
        // Errors from here on drop `shared`, which destroys the queue pair before the slots.
        for slot in 0..self.options.recv_depth {
            shared.post_recv(slot)?;
        }
        let state = SendState::new(&self.options, self.send_slots, granted.max_inline, self.max_message, self.atomics);
        let send = SendHalf::new(shared.clone(), state, &self.options);
        let recv = RecvHalf::new(shared, &self.options);
        Ok(Endpoint::new(send, recv))
    }
}

impl fmt::Debug for EndpointBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointBuilder").field("options", &self.options).finish_non_exhaustive()
    }
}
