//! Compile-time checks: the structures shared with C have the sizes and offsets of the C headers.
//!
//! The figures are those of rdma-core 44 and 65 on 64-bit machines (they agree); `tests/layout.rs` asks
//! the installed headers for the same figures.
#![cfg(target_pointer_width = "64")]

use std::mem::offset_of;

use super::*;

macro_rules! same_layout {
    ($($type:ident $size:literal { $($($field:ident).+ $offset:literal),* $(,)? })*) => {
        $(
            const _: () = assert!(size_of::<$type>() == $size, concat!("size of ", stringify!($type)));
            $(const _: () = assert!(
                offset_of!($type, $($field).+) == $offset,
                concat!("offset of ", stringify!($type), ".", stringify!($($field).+)),
            );)*
        )*
        /// (structure, field or "", bytes): what `tests/layout.rs` compares with the installed headers.
        pub const LAYOUT: &[(&str, &str, usize)] = &[
            $((stringify!($type), "", $size), $((stringify!($type), stringify!($($field).+), $offset),)*)*
        ];
    };
}

same_layout! {
    ibv_send_wr 128 {
        wr_id 0, next 8, sg_list 16, num_sge 24, opcode 28, send_flags 32, imm_data_invalidated_rkey_union 36, wr 40,
        qp_type 72, bind_mw_tso_union 80,
    }
    ibv_recv_wr 32 { wr_id 0, next 8, sg_list 16, num_sge 24 }
    ibv_sge 16 { addr 0, length 8, lkey 12 }
    ibv_wc 48 {
        wr_id 0, status 8, opcode 12, vendor_err 16, byte_len 20, imm_data_invalidated_rkey_union 24, qp_num 28,
        src_qp 32, wc_flags 36,
    }
    ibv_qp_init_attr 64 { send_cq 8, recv_cq 16, srq 24, cap 32, qp_type 52, sq_sig_all 56 }
    ibv_qp_cap 20 { max_send_wr 0, max_recv_wr 4, max_send_sge 8, max_recv_sge 12, max_inline_data 16 }
    ibv_qp_attr 144 {
        qp_state 0, path_mtu 8, rq_psn 20, sq_psn 24, dest_qp_num 28, qp_access_flags 32, cap 36, ah_attr 56,
        min_rnr_timer 128, port_num 129, timeout 130, retry_cnt 131, rnr_retry 132,
    }
    ibv_ah_attr 32 { grh 0, dlid 24, sl 26, is_global 29, port_num 30 }
    ibv_global_route 24 { dgid 0, flow_label 16, sgid_index 20, hop_limit 21, traffic_class 22 }
    ibv_device_attr 232 { node_guid 64, max_mr_size 80, max_qp 108, max_qp_wr 112, max_cqe 132, phys_port_cnt 227 }
    ibv_port_attr 52 { state 0, max_msg_sz 20, lid 34, link_layer 46, port_cap_flags2 48 }
    ibv_gid_entry 32 { gid 0, gid_index 16, port_num 20, gid_type 24, ndev_ifindex 28 }
    ibv_context 328 {
        device 0, ops 8, ops.poll_cq 96, ops.req_notify_cq 104, ops.post_send 208, ops.post_recv 216, cmd_fd 264,
        async_fd 268, abi_compat 320,
    }
    ibv_qp 160 { context 0, pd 16, send_cq 24, recv_cq 32, qp_num 52, state 56, qp_type 60 }
    ibv_cq 128 { context 0, channel 8, cqe 28 }
    ibv_mr 48 { pd 8, addr 16, length 24, lkey 36, rkey 40 }
    ibv_pd 16 { context 0 }
    ibv_comp_channel 16 { context 0, fd 8 }
    ibv_device 664 { node_type 16, transport_type 20, name 24 }
}
