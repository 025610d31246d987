//! What devices, ports and GID tables are asked for, as typed values.

use std::ffi::{CStr, c_int};
use std::net::{Ipv4Addr, Ipv6Addr};

use crate::sys;

/// The protocol family of a device (`enum ibv_transport_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transport {
    /// InfiniBand verbs: InfiniBand itself and RoCE.
    InfiniBand,
    /// iWARP: RDMA over TCP.
    Iwarp,
    /// Another one, as its number.
    Other(i32),
}

impl Transport {
    pub(super) fn from_raw(raw: sys::ibv_transport_type::Type) -> Transport {
        match raw {
            sys::ibv_transport_type::IBV_TRANSPORT_IB => Transport::InfiniBand,
            sys::ibv_transport_type::IBV_TRANSPORT_IWARP => Transport::Iwarp,
            other => Transport::Other(other),
        }
    }
}

/// Whether and for whom remote atomics are atomic (`enum ibv_atomic_cap`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AtomicCap {
    /// No atomics.
    None,
    /// Atomic among the operations of this device.
    Device,
    /// Atomic also with respect to the processor and other devices.
    Global,
    /// Another value, as its number.
    Other(u32),
}

/// The limits of a device (`struct ibv_device_attr`). Counts are objects, sizes bytes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceAttributes {
    /// Firmware version, as the vendor writes it.
    pub firmware: String,
    /// GUID of the node, host byte order.
    pub node_guid: u64,
    /// GUID of the system image, host byte order.
    pub system_image_guid: u64,
    /// Vendor id.
    pub vendor_id: u32,
    /// The vendor's part id.
    pub vendor_part_id: u32,
    /// Hardware version.
    pub hardware_version: u32,
    /// Largest region, in bytes.
    pub max_mr_size: u64,
    /// Page sizes that can be registered: one bit each.
    pub page_sizes: u64,
    /// `enum ibv_device_cap_flags`, as they are.
    pub cap_flags: u32,
    /// Queue pairs.
    pub max_qp: u32,
    /// Work requests in one queue of a queue pair.
    pub max_qp_wr: u32,
    /// Scatter/gather elements of a work request.
    pub max_sge: u32,
    /// Scatter/gather elements of an RDMA read.
    pub max_sge_rd: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries of a completion queue.
    pub max_cqe: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Protection domains.
    pub max_pd: u32,
    /// Memory windows.
    pub max_mw: u32,
    /// RDMA reads and atomics that a queue pair can serve at a time.
    pub max_qp_rd_atom: u32,
    /// RDMA reads and atomics that a queue pair can have outstanding.
    pub max_qp_init_rd_atom: u32,
    /// RDMA reads and atomics that the whole device can serve at a time.
    pub max_res_rd_atom: u32,
    /// Atomic operations.
    pub atomic_cap: AtomicCap,
    /// Address handles.
    pub max_ah: u32,
    /// Shared receive queues.
    pub max_srq: u32,
    /// Work requests of a shared receive queue.
    pub max_srq_wr: u32,
    /// Scatter/gather elements of a request of a shared receive queue.
    pub max_srq_sge: u32,
    /// Multicast groups.
    pub max_mcast_grp: u32,
    /// Queue pairs in one multicast group.
    pub max_mcast_qp_attach: u32,
    /// Partition keys.
    pub max_pkeys: u16,
    /// Local acknowledge delay: 4.096 us * 2^this.
    pub local_ack_delay: u8,
    /// Ports, counted from 1.
    pub ports: u8,
}

impl DeviceAttributes {
    pub(super) fn from_raw(raw: &sys::ibv_device_attr) -> DeviceAttributes {
        let count = |n: c_int| u32::try_from(n).unwrap_or(0);
        // SAFETY: the same bytes read as unsigned ones.
        let firmware = unsafe { &*(&raw const raw.fw_ver).cast::<[u8; 64]>() };
        DeviceAttributes {
            firmware: CStr::from_bytes_until_nul(firmware)
                .map(|s| s.to_string_lossy().into_owned())
                .unwrap_or_default(),
            node_guid: u64::from_be(raw.node_guid),
            system_image_guid: u64::from_be(raw.sys_image_guid),
            vendor_id: raw.vendor_id,
            vendor_part_id: raw.vendor_part_id,
            hardware_version: raw.hw_ver,
            max_mr_size: raw.max_mr_size,
            page_sizes: raw.page_size_cap,
            cap_flags: raw.device_cap_flags,
            max_qp: count(raw.max_qp),
            max_qp_wr: count(raw.max_qp_wr),
            max_sge: count(raw.max_sge),
            max_sge_rd: count(raw.max_sge_rd),
            max_cq: count(raw.max_cq),
            max_cqe: count(raw.max_cqe),
            max_mr: count(raw.max_mr),
            max_pd: count(raw.max_pd),
            max_mw: count(raw.max_mw),
            max_qp_rd_atom: count(raw.max_qp_rd_atom),
            max_qp_init_rd_atom: count(raw.max_qp_init_rd_atom),
            max_res_rd_atom: count(raw.max_res_rd_atom),
            atomic_cap: match raw.atomic_cap {
                sys::ibv_atomic_cap::IBV_ATOMIC_NONE => AtomicCap::None,
                sys::ibv_atomic_cap::IBV_ATOMIC_HCA => AtomicCap::Device,
                sys::ibv_atomic_cap::IBV_ATOMIC_GLOB => AtomicCap::Global,
                other => AtomicCap::Other(other),
            },
            max_ah: count(raw.max_ah),
            max_srq: count(raw.max_srq),
            max_srq_wr: count(raw.max_srq_wr),
            max_srq_sge: count(raw.max_srq_sge),
            max_mcast_grp: count(raw.max_mcast_grp),
            max_mcast_qp_attach: count(raw.max_mcast_qp_attach),
            max_pkeys: raw.max_pkeys,
            local_ack_delay: raw.local_ca_ack_delay,
            ports: raw.phys_port_cnt,
        }
    }
}

/// The state of a port (`enum ibv_port_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortState {
    /// No link.
    Down,
    /// Being initialised; on InfiniBand it waits for the subnet manager.
    Init,
    /// Configured, not yet active.
    Armed,
    /// In use.
    Active,
    /// Another state, as its number.
    Other(u32),
}

/// The link layer under a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE and iWARP.
    Ethernet,
    /// Another one or none given, as its number.
    Other(u8),
}

/// The state of a port (`struct ibv_port_attr`).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PortAttributes {
    /// Its number, from 1.
    pub number: u8,
    /// State.
    pub state: PortState,
    /// Link layer.
    pub link_layer: LinkLayer,
    /// Largest possible MTU, in bytes.
    pub max_mtu: usize,
    /// MTU in use, in bytes.
    pub active_mtu: usize,
    /// Largest message, in bytes.
    pub max_message: usize,
    /// Entries of the GID table, valid or not.
    pub gid_table_len: usize,
    /// Entries of the partition key table.
    pub pkey_table_len: u16,
    /// Local identifier (InfiniBand; 0 on Ethernet).
    pub lid: u16,
    /// Local identifier of the subnet manager.
    pub sm_lid: u16,
    /// Lanes: 1, 2, 4, 8, 12 as the code 1, 16, 2, 4, 8.
    pub active_width: u8,
    /// Speed of a lane, as the code of verbs (1 = 2.5 Gb/s, 2 = 5, 4 = 10, 8 = 10, 16 = 14, 32 = 25, 64 = 50, 128 = 100).
    pub active_speed: u8,
    /// Physical state, as the code of verbs (5 = link up).
    pub physical_state: u8,
    /// `enum ibv_port_cap_flags`, as they are.
    pub cap_flags: u32,
}

impl PortAttributes {
    pub(super) fn from_raw(number: u8, raw: &sys::ibv_port_attr) -> PortAttributes {
        PortAttributes {
            number,
            state: match raw.state {
                sys::ibv_port_state::IBV_PORT_DOWN => PortState::Down,
                sys::ibv_port_state::IBV_PORT_INIT => PortState::Init,
                sys::ibv_port_state::IBV_PORT_ARMED => PortState::Armed,
                sys::ibv_port_state::IBV_PORT_ACTIVE => PortState::Active,
                other => PortState::Other(other),
            },
            link_layer: match raw.link_layer {
                sys::IBV_LINK_LAYER_INFINIBAND => LinkLayer::InfiniBand,
                sys::IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                other => LinkLayer::Other(other),
            },
            max_mtu: mtu_bytes(raw.max_mtu),
            active_mtu: mtu_bytes(raw.active_mtu),
            max_message: raw.max_msg_sz as usize,
            gid_table_len: usize::try_from(raw.gid_tbl_len).unwrap_or(0),
            pkey_table_len: raw.pkey_tbl_len,
            lid: raw.lid,
            sm_lid: raw.sm_lid,
            active_width: raw.active_width,
            active_speed: raw.active_speed,
            physical_state: raw.phys_state,
            cap_flags: raw.port_cap_flags,
        }
    }
}

/// `enum ibv_mtu` in bytes; 0 for a number that is none.
pub(crate) fn mtu_bytes(code: sys::ibv_mtu::Type) -> usize {
    match code {
        1..=5 => 128 << code,
        _ => 0,
    }
}

/// What a GID is for (`enum ibv_gid_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GidType {
    /// InfiniBand, or iWARP's stand-in for one.
    InfiniBand,
    /// RoCE version 1: Ethernet frames of their own kind, within one segment.
    RoceV1,
    /// RoCE version 2: UDP over IPv4 or IPv6.
    RoceV2,
    /// Another one, as its number.
    Other(u32),
}

/// A valid entry of a GID table (`struct ibv_gid_entry`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GidEntry {
    /// The GID itself; in RoCE an IPv6 address, or an IPv4 address mapped into one.
    pub gid: Ipv6Addr,
    /// Its index in the table of the port.
    pub index: u32,
    /// The port, from 1.
    pub port: u8,
    /// What it is for.
    pub kind: GidType,
    /// Index of the network interface it belongs to, 0 for none.
    pub interface_index: u32,
}

impl GidEntry {
    pub(super) fn from_raw(raw: &sys::ibv_gid_entry) -> GidEntry {
        // SAFETY: both views of the union are 16 plain bytes.
        let gid = Ipv6Addr::from(unsafe { raw.gid.raw });
        GidEntry {
            gid,
            index: raw.gid_index,
            port: raw.port_num as u8,
            kind: match raw.gid_type {
                sys::IBV_GID_TYPE_IB => GidType::InfiniBand,
                sys::IBV_GID_TYPE_ROCE_V1 => GidType::RoceV1,
                sys::IBV_GID_TYPE_ROCE_V2 => GidType::RoceV2,
                other => GidType::Other(other),
            },
            interface_index: raw.ndev_ifindex,
        }
    }

    /// The IPv4 address in the GID, if it is a mapped one.
    pub fn ipv4(&self) -> Option<Ipv4Addr> {
        self.gid.to_ipv4_mapped()
    }

    /// The name of the network interface, if there is one.
    pub fn interface(&self) -> Option<String> {
        if self.interface_index == 0 { None } else { sys::interface_name(self.interface_index) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_codes() {
        assert_eq!([1, 2, 3, 4, 5].map(mtu_bytes), [256, 512, 1024, 2048, 4096]);
        assert_eq!(mtu_bytes(0), 0);
        assert_eq!(mtu_bytes(77), 0);
    }

    #[test]
    fn mapped_ipv4_gids_are_recognised() {
        let entry = |gid: Ipv6Addr| GidEntry { gid, index: 1, port: 1, kind: GidType::RoceV2, interface_index: 0 };
        let mapped = entry(Ipv4Addr::new(10, 1, 2, 3).to_ipv6_mapped());
        assert_eq!(mapped.ipv4(), Some(Ipv4Addr::new(10, 1, 2, 3)));
        assert_eq!(entry("fe80::1".parse().expect("an address")).ipv4(), None);
        assert_eq!(mapped.interface(), None);
    }
}
