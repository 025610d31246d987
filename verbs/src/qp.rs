//! Queue pairs.

mod setup;

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;
use std::time::Duration;

use crate::cq::CompletionQueue;
use crate::error::{Error, OsError, Result};
use crate::pd::ProtectionDomain;
use crate::sys;

pub use setup::{Path, QueuePairCaps, QueuePairEnd};

/// A queue pair, destroyed when dropped.
///
/// It keeps its domain and completion queues alive. Should its destruction fail, the device may still use them,
/// and they are leaked.
pub struct QueuePair {
    raw: NonNull<sys::ibv_qp>,
    destroyed: bool,
    // Dropped after the queue pair, which `Drop` destroys: the C library refuses to destroy a completion
    // queue or a domain that a queue pair uses.
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    pd: ProtectionDomain,
}

// SAFETY: verbs may be called on one queue pair from any thread; the fields read here are constant.
unsafe impl Send for QueuePair {}
// SAFETY: as above; posting takes the provider's own lock.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// Takes over a queue pair that someone else made, such as `rdma_create_qp`.
    ///
    /// # Safety
    /// `raw` is a live queue pair made on `pd` with these completion queues, and from now on only this
    /// value destroys it.
    ///
    /// # Panics
    /// When `raw` is null or was not made on these objects.
    pub unsafe fn from_raw(
        raw: *mut sys::ibv_qp,
        pd: &ProtectionDomain,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
    ) -> QueuePair {
        let raw = NonNull::new(raw).expect("a live queue pair is not null");
        // SAFETY: live, as the caller says; these fields are constant.
        unsafe {
            let qp = raw.as_ptr();
            assert_eq!((*qp).pd, pd.as_raw(), "the queue pair was made on this domain");
            assert_eq!((*qp).send_cq, send_cq.as_raw(), "the queue pair was made with this send queue");
            assert_eq!((*qp).recv_cq, recv_cq.as_raw(), "the queue pair was made with this receive queue");
        }
        QueuePair { raw, destroyed: false, send_cq: send_cq.clone(), recv_cq: recv_cq.clone(), pd: pd.clone() }
    }

    /// Its number, by which peers name it.
    pub fn qp_num(&self) -> u32 {
        // SAFETY: alive; the field is constant.
        unsafe { (*self.raw.as_ptr()).qp_num }
    }

    /// The domain it belongs to.
    #[inline]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Where its sends complete.
    #[inline]
    pub fn send_cq(&self) -> &CompletionQueue {
        &self.send_cq
    }

    /// Where its receives complete.
    #[inline]
    pub fn recv_cq(&self) -> &CompletionQueue {
        &self.recv_cq
    }

    /// The state, asked of the device (`ibv_query_qp`).
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os), for instance when the device is gone.
    #[doc(alias = "ibv_query_qp")]
    pub fn state(&self) -> Result<QueuePairState> {
        Ok(self.query()?.state)
    }

    /// The attributes in use, asked of the device (`ibv_query_qp`).
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os), for instance when the device is gone.
    #[doc(alias = "ibv_query_qp")]
    pub fn query(&self) -> Result<QueuePairAttributes> {
        // SAFETY: alive.
        let (attr, init) = unsafe { sys::query_qp(self.raw, sys::ibv_qp_attr_mask((1 << 21) - 1)) }
            .map_err(|errno| OsError::new("ibv_query_qp", errno))?;
        Ok(QueuePairAttributes {
            state: QueuePairState::from_raw(attr.qp_state),
            port: attr.port_num,
            path_mtu: crate::device::mtu_bytes(attr.path_mtu),
            peer_qp_num: attr.dest_qp_num,
            access: crate::mr::Access::from_bits_retain(attr.qp_access_flags),
            ack_timeout: attr.timeout,
            retry_count: attr.retry_cnt,
            rnr_retry: attr.rnr_retry,
            rnr_timer: rnr_duration(attr.min_rnr_timer),
            max_rd_atomic: attr.max_rd_atomic,
            max_dest_rd_atomic: attr.max_dest_rd_atomic,
            caps: QueuePairCaps::from_raw(&init.cap),
        })
    }

    /// Moves it to the error state: all that is posted is flushed. From any thread, any number of times.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os), for instance when the device is gone.
    pub fn set_error(&self) -> Result<()> {
        let mut attr = sys::zeroed_qp_attr();
        attr.qp_state = sys::ibv_qp_state::IBV_QPS_ERR;
        self.modify(attr, sys::ibv_qp_attr_mask::IBV_QP_STATE)
    }

    /// Sets how long a peer that finds no receive posted is told to wait, in the state ready-to-send.
    /// The next larger of verbs' 32 steps is taken (10 us to 491.52 ms, and 655.36 ms for all above).
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os): `EINVAL` when it is not in that state.
    pub fn set_rnr_timer(&self, wait: Duration) -> Result<()> {
        let mut attr = sys::zeroed_qp_attr();
        attr.qp_state = sys::ibv_qp_state::IBV_QPS_RTS;
        attr.min_rnr_timer = rnr_code(wait);
        self.modify(attr, sys::ibv_qp_attr_mask::IBV_QP_STATE | sys::ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER)
    }

    fn modify(&self, mut attr: sys::ibv_qp_attr, mask: sys::ibv_qp_attr_mask) -> Result<()> {
        // SAFETY: alive.
        unsafe { sys::modify_qp(self.raw, &mut attr, mask) }
            .map_err(|errno| Error::Os(OsError::new("ibv_modify_qp", errno)))
    }

    /// The C object, alive as long as this value.
    #[doc(hidden)]
    pub fn as_raw(&self) -> *mut sys::ibv_qp {
        self.raw.as_ptr()
    }

    /// Posts a send-side request, or a list of them; 0 or an errno value.
    ///
    /// # Safety
    /// The memory named by `wr` is registered in this domain and stays so, and is left alone as the rules of the
    /// operation say, until its completion or the destruction of the queue pair.
    #[inline]
    pub(crate) unsafe fn post_send(&self, wr: *mut sys::ibv_send_wr) -> c_int {
        // SAFETY: alive; the rest by the caller.
        unsafe { sys::post_send(self.raw, wr) }
    }

    /// Posts a receive; 0 or an errno value.
    ///
    /// # Safety
    /// As for [`post_send`](Self::post_send); nothing else accesses the memory meanwhile.
    #[inline]
    pub(crate) unsafe fn post_recv(&self, wr: &mut sys::ibv_recv_wr) -> c_int {
        // SAFETY: alive; the rest by the caller.
        unsafe { sys::post_recv(self.raw, wr) }
    }

    /// Destroys it ahead of `Drop`. On `false` the device may still use what was posted: the caller must
    /// leak it. Nothing may be called on it afterwards.
    pub(crate) fn destroy(&mut self) -> bool {
        if self.destroyed {
            return true;
        }
        self.destroyed = true;
        // SAFETY: owned, destroyed once.
        match unsafe { sys::destroy_qp(self.raw) } {
            Ok(()) => true,
            Err(errno) => {
                log::warn!("ibv_destroy_qp: {errno}; all that it may use is leaked");
                std::mem::forget((self.send_cq.clone(), self.recv_cq.clone(), self.pd.clone()));
                false
            }
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.destroy();
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair").field("qp_num", &self.qp_num()).finish_non_exhaustive()
    }
}

/// The state of a queue pair (`enum ibv_qp_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QueuePairState {
    /// Just made.
    Reset,
    /// Bound to a port; receives can be posted.
    Init,
    /// Ready to receive.
    ReadyToReceive,
    /// Ready to send: connected.
    ReadyToSend,
    /// The send queue is being drained.
    SendQueueDrained,
    /// The send queue had an error.
    SendQueueError,
    /// In error: everything is flushed.
    Error,
    /// Another one, as its number.
    Other(u32),
}

impl QueuePairState {
    fn from_raw(raw: sys::ibv_qp_state::Type) -> QueuePairState {
        match raw {
            sys::ibv_qp_state::IBV_QPS_RESET => QueuePairState::Reset,
            sys::ibv_qp_state::IBV_QPS_INIT => QueuePairState::Init,
            sys::ibv_qp_state::IBV_QPS_RTR => QueuePairState::ReadyToReceive,
            sys::ibv_qp_state::IBV_QPS_RTS => QueuePairState::ReadyToSend,
            sys::ibv_qp_state::IBV_QPS_SQD => QueuePairState::SendQueueDrained,
            sys::ibv_qp_state::IBV_QPS_SQE => QueuePairState::SendQueueError,
            sys::ibv_qp_state::IBV_QPS_ERR => QueuePairState::Error,
            other => QueuePairState::Other(other),
        }
    }
}

/// The attributes of a live queue pair.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct QueuePairAttributes {
    /// State.
    pub state: QueuePairState,
    /// Port of the device, from 1.
    pub port: u8,
    /// Bytes in a packet.
    pub path_mtu: usize,
    /// The peer's queue pair number.
    pub peer_qp_num: u32,
    /// What peers may do through it.
    pub access: crate::mr::Access,
    /// Acknowledge timeout: 4.096 us * 2^this, 0 for none.
    pub ack_timeout: u8,
    /// Retries after that timeout, at most 7 (which Soft-RoCE takes for endless).
    pub retry_count: u8,
    /// Retries when the peer has no receive posted; 7 is endless.
    pub rnr_retry: u8,
    /// How long peers that find no receive posted are told to wait.
    pub rnr_timer: Duration,
    /// RDMA reads and atomics that may be outstanding from here.
    pub max_rd_atomic: u8,
    /// RDMA reads and atomics of the peer that are served at a time.
    pub max_dest_rd_atomic: u8,
    /// Depths and sizes.
    pub caps: QueuePairCaps,
}

/// Verbs' 32 receiver-not-ready times, in units of 10 us, in order of time; code 0 is the longest.
const RNR_STEPS: [(u8, u32); 32] = [
    (1, 1),
    (2, 2),
    (3, 3),
    (4, 4),
    (5, 6),
    (6, 8),
    (7, 12),
    (8, 16),
    (9, 24),
    (10, 32),
    (11, 48),
    (12, 64),
    (13, 96),
    (14, 128),
    (15, 192),
    (16, 256),
    (17, 384),
    (18, 512),
    (19, 768),
    (20, 1024),
    (21, 1536),
    (22, 2048),
    (23, 3072),
    (24, 4096),
    (25, 6144),
    (26, 8192),
    (27, 12288),
    (28, 16384),
    (29, 24576),
    (30, 32768),
    (31, 49152),
    (0, 65536),
];

fn rnr_code(wait: Duration) -> u8 {
    RNR_STEPS.iter().find(|&&(_, steps)| rnr_steps(steps) >= wait).map_or(0, |&(code, _)| code)
}

fn rnr_duration(code: u8) -> Duration {
    RNR_STEPS.iter().find(|&&(c, _)| c == code & 31).map_or(Duration::ZERO, |&(_, steps)| rnr_steps(steps))
}

fn rnr_steps(steps: u32) -> Duration {
    Duration::from_micros(10) * steps
}

const _: () = {
    const fn assert_send_sync<T: Send + Sync>() {}
    assert_send_sync::<QueuePair>();
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_times_round_up() {
        assert_eq!(rnr_code(Duration::ZERO), 1);
        assert_eq!(rnr_code(Duration::from_micros(10)), 1);
        assert_eq!(rnr_code(Duration::from_micros(11)), 2);
        assert_eq!(rnr_code(Duration::from_millis(1)), 14);
        assert_eq!(rnr_duration(14), Duration::from_micros(1280));
        assert_eq!(rnr_code(Duration::from_millis(492)), 0);
        assert_eq!(rnr_code(Duration::from_secs(10)), 0);
        assert_eq!(rnr_duration(0), Duration::from_micros(655_360));
        assert!(RNR_STEPS.is_sorted_by_key(|&(_, steps)| steps));
    }
}
