//! Queue pairs by hand: making one, and its way to ready-to-send without a connection manager.

use std::net::Ipv6Addr;
use std::time::Duration;

use super::{QueuePair, rnr_code};
use crate::cq::CompletionQueue;
use crate::error::{Error, OsError, Result};
use crate::mr::Access;
use crate::pd::ProtectionDomain;
use crate::sys::{self, ibv_qp_attr_mask as Mask};

/// Depths and sizes of a queue pair. The device may grant more than was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairCaps {
    /// Send-side requests outstanding.
    pub max_send_wr: u32,
    /// Receives posted.
    pub max_recv_wr: u32,
    /// Pieces of memory in a send-side request.
    pub max_send_sge: u32,
    /// Pieces of memory in a receive.
    pub max_recv_sge: u32,
    /// Bytes that a send may carry in its request. There is no query for the limit: too much is `EINVAL`.
    pub max_inline: u32,
}

impl QueuePairCaps {
    pub(crate) fn from_raw(raw: &sys::ibv_qp_cap) -> QueuePairCaps {
        QueuePairCaps {
            max_send_wr: raw.max_send_wr,
            max_recv_wr: raw.max_recv_wr,
            max_send_sge: raw.max_send_sge,
            max_recv_sge: raw.max_recv_sge,
            max_inline: raw.max_inline_data,
        }
    }

    pub(crate) fn to_raw(self) -> sys::ibv_qp_cap {
        sys::ibv_qp_cap {
            max_send_wr: self.max_send_wr,
            max_recv_wr: self.max_recv_wr,
            max_send_sge: self.max_send_sge,
            max_recv_sge: self.max_recv_sge,
            max_inline_data: self.max_inline,
        }
    }
}

/// What a peer must know of a queue pair to connect to it. Exchanged by any means.
///
/// Its fixed form of 32 bytes is big-endian: GID (16), queue pair number (4), packet sequence number (4),
/// LID (2), six zero bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairEnd {
    /// The GID of the port at the chosen index.
    pub gid: Ipv6Addr,
    /// The number of the queue pair.
    pub qp_num: u32,
    /// The first packet sequence number it sends (24 bits).
    pub psn: u32,
    /// The LID of the port (InfiniBand; 0 on Ethernet).
    pub lid: u16,
}

impl QueuePairEnd {
    /// The 32-byte form.
    pub fn to_bytes(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(&self.gid.octets());
        bytes[16..20].copy_from_slice(&self.qp_num.to_be_bytes());
        bytes[20..24].copy_from_slice(&self.psn.to_be_bytes());
        bytes[24..26].copy_from_slice(&self.lid.to_be_bytes());
        bytes
    }

    /// Reads the 32-byte form. The last six bytes are ignored.
    pub fn from_bytes(bytes: &[u8; 32]) -> QueuePairEnd {
        let gid: [u8; 16] = bytes[..16].try_into().expect("16 bytes");
        let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        QueuePairEnd {
            gid: gid.into(),
            qp_num: word(16),
            psn: word(20),
            lid: u16::from_be_bytes([bytes[24], bytes[25]]),
        }
    }
}

/// The way to the peer, and how patient to be on it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Path {
    /// Local port, from 1.
    pub port: u8,
    /// Index of the local GID in the port's table; see [`Context::gid_table`](crate::Context::gid_table).
    pub gid_index: u8,
    /// Bytes in a packet: 256, 512, 1024, 2048 or 4096, the same at both ends.
    pub mtu: usize,
    /// Acknowledge timeout: 4.096 us * 2^this, 0 for none. 14 (67 ms) by default.
    pub ack_timeout: u8,
    /// Retries after that timeout, 6 by default: Soft-RoCE takes 7 for endless.
    pub retry_count: u8,
    /// Retries when the peer has no receive posted; 7, the default, is endless.
    pub rnr_retry: u8,
    /// How long the peer is told to wait when no receive is posted here, 1 ms by default.
    pub rnr_timer: Duration,
    /// RDMA reads and atomics outstanding from here; at most the peer's `max_dest_rd_atomic`.
    pub max_rd_atomic: u8,
    /// RDMA reads and atomics of the peer that are served at a time.
    pub max_dest_rd_atomic: u8,
}

impl Path {
    /// From this port and GID index, with packets of `mtu` bytes.
    pub fn new(port: u8, gid_index: u8, mtu: usize) -> Path {
        Path {
            port,
            gid_index,
            mtu,
            ack_timeout: 14,
            retry_count: 6,
            rnr_retry: 7,
            rnr_timer: Duration::from_millis(1),
            max_rd_atomic: 1,
            max_dest_rd_atomic: 1,
        }
    }
}

impl QueuePair {
    /// Makes a reliable connected queue pair (`ibv_create_qp`), in the state reset. Returns what was granted.
    ///
    /// # Errors
    /// [`Error::Os`]: `EINVAL` for more than the device can do, `ENOMEM` also for RLIMIT_MEMLOCK.
    #[doc(alias = "ibv_create_qp")]
    pub fn create(
        pd: &ProtectionDomain,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        caps: QueuePairCaps,
    ) -> Result<(QueuePair, QueuePairCaps)> {
        let mut attr = sys::zeroed_qp_init_attr();
        attr.send_cq = send_cq.as_raw();
        attr.recv_cq = recv_cq.as_raw();
        attr.cap = caps.to_raw();
        attr.qp_type = sys::ibv_qp_type::IBV_QPT_RC;
        // SAFETY: the domain and the queues are alive.
        let raw =
            unsafe { sys::create_qp(pd.raw(), &mut attr) }.map_err(|errno| OsError::new("ibv_create_qp", errno))?;
        // SAFETY: just made on these objects, and ours.
        let qp = unsafe { QueuePair::from_raw(raw.as_ptr(), pd, send_cq, recv_cq) };
        Ok((qp, QueuePairCaps::from_raw(&attr.cap)))
    }

    /// Reset to init: bound to a port, with what peers may do. Receives can be posted from now on.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os): `EINVAL` in another state, or for a port that does not exist.
    pub fn to_init(&self, port: u8, access: Access) -> Result<()> {
        let mut attr = sys::zeroed_qp_attr();
        attr.qp_state = sys::ibv_qp_state::IBV_QPS_INIT;
        attr.port_num = port;
        attr.qp_access_flags = access.bits();
        self.modify(attr, Mask::IBV_QP_STATE | Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT | Mask::IBV_QP_ACCESS_FLAGS)
    }

    /// Init to ready-to-receive, from this peer.
    ///
    /// # Errors
    /// * [`Error::Misuse`] for an MTU that is none of verbs'.
    /// * [`Error::Os`](crate::Error::Os): `EINVAL` in another state, or for a GID index without an entry.
    pub fn to_ready_to_receive(&self, path: &Path, peer: &QueuePairEnd) -> Result<()> {
        let mtu = (1..=5)
            .find(|&code| crate::device::mtu_bytes(code) == path.mtu)
            .ok_or(Error::misuse("the path MTU must be 256, 512, 1024, 2048 or 4096 bytes"))?;
        let mut attr = sys::zeroed_qp_attr();
        attr.qp_state = sys::ibv_qp_state::IBV_QPS_RTR;
        attr.path_mtu = mtu;
        attr.dest_qp_num = peer.qp_num;
        attr.rq_psn = peer.psn & 0xff_ffff;
        attr.max_dest_rd_atomic = path.max_dest_rd_atomic;
        attr.min_rnr_timer = rnr_code(path.rnr_timer);
        attr.ah_attr.port_num = path.port;
        attr.ah_attr.dlid = peer.lid;
        attr.ah_attr.is_global = u8::from(!peer.gid.is_unspecified());
        attr.ah_attr.grh.dgid = sys::ibv_gid { raw: peer.gid.octets() };
        attr.ah_attr.grh.sgid_index = path.gid_index;
        attr.ah_attr.grh.hop_limit = 64;
        self.modify(
            attr,
            Mask::IBV_QP_STATE
                | Mask::IBV_QP_AV
                | Mask::IBV_QP_PATH_MTU
                | Mask::IBV_QP_DEST_QPN
                | Mask::IBV_QP_RQ_PSN
                | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
                | Mask::IBV_QP_MIN_RNR_TIMER,
        )
    }

    /// Ready-to-receive to ready-to-send. `psn` is the one that the peer was told.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os): `EINVAL` in another state.
    pub fn to_ready_to_send(&self, path: &Path, psn: u32) -> Result<()> {
        let mut attr = sys::zeroed_qp_attr();
        attr.qp_state = sys::ibv_qp_state::IBV_QPS_RTS;
        attr.sq_psn = psn & 0xff_ffff;
        attr.timeout = path.ack_timeout;
        attr.retry_cnt = path.retry_count;
        attr.rnr_retry = path.rnr_retry;
        attr.max_rd_atomic = path.max_rd_atomic;
        self.modify(
            attr,
            Mask::IBV_QP_STATE
                | Mask::IBV_QP_TIMEOUT
                | Mask::IBV_QP_RETRY_CNT
                | Mask::IBV_QP_RNR_RETRY
                | Mask::IBV_QP_SQ_PSN
                | Mask::IBV_QP_MAX_QP_RD_ATOMIC,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_survives_its_bytes() {
        let end = QueuePairEnd {
            gid: "fe80::1:2".parse().expect("an address"),
            qp_num: 0x12_3456,
            psn: 0xab_cdef,
            lid: 0x4711,
        };
        let bytes = end.to_bytes();
        assert_eq!(bytes[16..26], [0, 0x12, 0x34, 0x56, 0, 0xab, 0xcd, 0xef, 0x47, 0x11]);
        assert_eq!(QueuePairEnd::from_bytes(&bytes), end);
    }
}
