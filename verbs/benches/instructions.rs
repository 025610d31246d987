//! What `tests/instructions.rs` counts under callgrind: operations against a device that does nothing, each beside a bare
//! loop over the raw bindings.
//!
//! `instructions NAME ROUNDS` runs the function `counted_NAME`.

#![allow(missing_docs)]

#[path = "../tests/stand_in/device.rs"]
#[allow(dead_code)]
mod device;

use std::hint::black_box;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use device::StandIn;
use verbs::sys::{self, ibv_send_flags as Flags, ibv_wr_opcode as Wr};
use verbs::{Access, Endpoint, EndpointBuilder, EndpointOptions, MemoryRegion, ProtectionDomain, RemoteRegion, Wait};

struct Bench {
    endpoint: Endpoint,
    region: MemoryRegion,
    remote: RemoteRegion,
    qp: *mut sys::ibv_qp,
    rounds: usize,
    _device: Arc<StandIn>,
}

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let (Some(name), Some(rounds)) = (arguments.next(), arguments.next()) else {
        println!("usage: instructions NAME ROUNDS (see tests/instructions.rs)");
        return;
    };
    let (device, context) = StandIn::new();
    device.idle.store(true, Ordering::Relaxed);
    let pd = ProtectionDomain::new(&context).expect("a domain");
    // Receives are received as soon as they are posted: with one there is always one message, no more.
    let options = EndpointOptions::default().wait(Wait::Busy).recv_depth(1).signal_every(match &*name {
        "posted_write_shared" => 16,
        _ => 0,
    });
    let endpoint = EndpointBuilder::new(&pd, &options).expect("resources").create(1, Access::REMOTE_ALL);
    let endpoint = endpoint.expect("a queue pair");
    let region = MemoryRegion::new(&pd, 4096, Access::REMOTE_ALL).expect("a region");
    let remote = region.remote();
    let qp = endpoint.control().queue_pair().as_raw();
    let rounds = rounds.parse().expect("a number");
    let mut bench = Bench { endpoint, region, remote, qp, rounds, _device: device };
    match &*name {
        "bare_write" => counted_bare_write(&mut bench),
        "bare_recv" => counted_bare_recv(&mut bench),
        "bare_unsignalled" => counted_bare_unsignalled(&mut bench),
        "write" => counted_write(&mut bench),
        "read" => counted_read(&mut bench),
        "posted_write" => counted_posted_write(&mut bench),
        "posted_write_shared" => counted_posted_write_shared(&mut bench),
        "send" => counted_send(&mut bench),
        "send_copied" => counted_send_copied(&mut bench),
        "send_buf" => counted_send_buf(&mut bench),
        "recv" => counted_recv(&mut bench),
        "recv_buf" => counted_recv_buf(&mut bench),
        other => panic!("no loop {other}"),
    }
}

/// Post one signalled write and poll its completion: what a C program does at least.
#[unsafe(no_mangle)]
#[inline(never)]
fn counted_bare_write(bench: &mut Bench) {
    let cq = bench.endpoint.control().queue_pair().send_cq().as_raw();
    let mut sge = sys::ibv_sge { addr: bench.remote.addr(), length: 1000, lkey: bench.region.lkey() };
    let mut wr = sys::zeroed_send_wr();
    wr.sg_list = &raw mut sge;
    wr.num_sge = 1;
    wr.opcode = Wr::IBV_WR_RDMA_WRITE;
    wr.send_flags = Flags::IBV_SEND_SIGNALED.0;
    let mut wcs = [const { MaybeUninit::<sys::ibv_wc>::uninit() }; 16];
    let mut bad = std::ptr::null_mut();
    for round in 0..bench.rounds {
        wr.wr_id = round as u64;
        wr.wr.rdma = sys::rdma_t { remote_addr: bench.remote.addr(), rkey: bench.remote.rkey() };
        // SAFETY: the queue pair is alive, the request valid.
        unsafe {
            let post = (*(*bench.qp).context).ops.post_send.expect("set");
            assert_eq!(post(bench.qp, &raw mut wr, &raw mut bad), 0);
            let poll = (*(*cq).context).ops.poll_cq.expect("set");
            while poll(cq, 16, wcs.as_mut_ptr().cast()) == 0 {}
            assert_eq!(wcs[0].assume_init_ref().status, 0);
            black_box(wcs[0].assume_init_ref().wr_id);
        }
    }
}

/// Post one unsignalled request; every 16th is signalled, and then its completion is polled.
#[unsafe(no_mangle)]
#[inline(never)]
fn counted_bare_unsignalled(bench: &mut Bench) {
    let cq = bench.endpoint.control().queue_pair().send_cq().as_raw();
    let mut sge = sys::ibv_sge { addr: bench.remote.addr(), length: 8, lkey: bench.region.lkey() };
    let mut wr = sys::zeroed_send_wr();
    wr.sg_list = &raw mut sge;
    wr.num_sge = 1;
    wr.opcode = Wr::IBV_WR_SEND;
    let mut wcs = [const { MaybeUninit::<sys::ibv_wc>::uninit() }; 16];
    let mut bad = std::ptr::null_mut();
    for round in 0..bench.rounds {
        let signalled = round % 16 == 15;
        wr.wr_id = round as u64;
        wr.send_flags = Flags::IBV_SEND_INLINE.0 | (u32::from(signalled) * Flags::IBV_SEND_SIGNALED.0);
        // SAFETY: the queue pair is alive, the request valid.
        unsafe {
            let post = (*(*bench.qp).context).ops.post_send.expect("set");
            assert_eq!(post(bench.qp, &raw mut wr, &raw mut bad), 0);
            if signalled {
                let poll = (*(*cq).context).ops.poll_cq.expect("set");
                while poll(cq, 16, wcs.as_mut_ptr().cast()) == 0 {}
                assert_eq!(wcs[0].assume_init_ref().status, 0);
                black_box(wcs[0].assume_init_ref().wr_id);
            }
        }
    }
}

/// Poll one receive, copy eight bytes, post it again.
#[unsafe(no_mangle)]
#[inline(never)]
fn counted_bare_recv(bench: &mut Bench) {
    let cq = bench.endpoint.control().queue_pair().recv_cq().as_raw();
    let mut sge = sys::ibv_sge { addr: bench.remote.addr(), length: 4096, lkey: bench.region.lkey() };
    let mut wr = sys::ibv_recv_wr { wr_id: 0, next: std::ptr::null_mut(), sg_list: &raw mut sge, num_sge: 1 };
    let mut wcs = [const { MaybeUninit::<sys::ibv_wc>::uninit() }; 16];
    let mut bad = std::ptr::null_mut();
    let from = std::ptr::with_exposed_provenance::<u8>(bench.remote.addr() as usize);
    let mut to = [0_u8; 8];
    for _ in 0..bench.rounds {
        // SAFETY: the queue pair is alive, the request valid.
        unsafe {
            let poll = (*(*cq).context).ops.poll_cq.expect("set");
            while poll(cq, 16, wcs.as_mut_ptr().cast()) == 0 {}
            assert_eq!(wcs[0].assume_init_ref().status, 0);
            let len = wcs[0].assume_init_ref().byte_len as usize;
            std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), len);
            black_box(&mut to);
            let post = (*(*bench.qp).context).ops.post_recv.expect("set");
            assert_eq!(post(bench.qp, &raw mut wr, &raw mut bad), 0);
        }
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn counted_write(bench: &mut Bench) {
    let half = bench.endpoint.sender();
    for _ in 0..bench.rounds {
        half.write(&bench.region, 0..1000, &bench.remote, 0).expect("written");
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn counted_read(bench: &mut Bench) {
    let half = bench.endpoint.sender();
    for _ in 0..bench.rounds {
        half.read(&bench.region, 0..1000, &bench.remote, 0).expect("read");
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn counted_posted_write(bench: &mut Bench) {
    let half = bench.endpoint.sender();
    for _ in 0..bench.rounds {
        let ticket = half.post_write(&bench.region, 0..1000, &bench.remote, 0, None).expect("posted");
        half.wait(ticket).expect("done");
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn counted_posted_write_shared(bench: &mut Bench) {
    let half = bench.endpoint.sender();
    for _ in 0..bench.rounds {
        black_box(half.post_write(&bench.region, 0..8, &bench.remote, 0, None).expect("posted"));
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn counted_send(bench: &mut Bench) {
    let half = bench.endpoint.sender();
    for _ in 0..bench.rounds {
        half.send(black_box(&[1; 8])).expect("sent");
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn counted_send_copied(bench: &mut Bench) {
    let half = bench.endpoint.sender();
    for _ in 0..bench.rounds {
        half.send(black_box(&[1; 128])).expect("sent");
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn counted_send_buf(bench: &mut Bench) {
    let half = bench.endpoint.sender();
    for _ in 0..bench.rounds {
        let mut buf = half.alloc().expect("a buffer");
        buf.set_len(1000);
        half.send_buf(buf).expect("sent");
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn counted_recv(bench: &mut Bench) {
    let half = bench.endpoint.receiver();
    let mut buf = [0; 8];
    for _ in 0..bench.rounds {
        black_box(half.recv(&mut buf).expect("received"));
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn counted_recv_buf(bench: &mut Bench) {
    let half = bench.endpoint.receiver();
    for _ in 0..bench.rounds {
        black_box(half.recv_buf().expect("received"));
    }
}
