//! Batches: order, tickets, what is kept, and what is left when the driver refuses one in the middle.

use std::sync::atomic::Ordering;

use nix::errno::Errno;
use verbs::Error;

use crate::{Rig, options, rig};

#[test]
fn a_batch_is_carried_out_in_order_and_its_memory_kept() {
    for every in [0, 1, 3] {
        let Rig { endpoint, local, peer, device, .. } = rig(&options().send_depth(8).signal_every(every));
        let control = endpoint.control();
        let (mut send, mut recv) = endpoint.split();
        local.write_at(0, b"abcdefgh").expect("in range");
        device.hold.store(true, Ordering::SeqCst);
        let mut batch = send.batch();
        batch.write(&local, 0..8, &peer.remote(), 100, None).expect("added");
        batch.write(&local, 0..0, &peer.remote(), 0, None).expect("nothing to add");
        batch.read(&local, 2000..2008, &peer.remote(), 100).expect("added");
        for text in ["one", "two"] {
            batch.send(text.as_bytes()).expect("added");
        }
        batch.send_imm(&[7; 1000], 42).expect("added");
        let mut buf = buffer(&local);
        buf.copy_from(b"in place").expect("fits");
        batch.send_buf(buf).map_err(|(e, _)| e).expect("added");
        batch.write(&local, 0..3000, &peer.remote(), 4000, Some(9)).expect("added");
        batch.send(b"the last place").expect("added");
        assert!(matches!(batch.send(b"no place"), Err(Error::WouldBlock)));
        assert_eq!(batch.len(), 8);
        let ticket = batch.post().expect("posted");
        assert_eq!(send.in_flight(), 8);
        let regions = device.regions.load(Ordering::SeqCst);
        drop(local);
        assert_eq!(device.regions.load(Ordering::SeqCst), regions, "in flight");
        device.release(control.queue_pair());
        send.wait(ticket).expect("done");
        assert_eq!(device.regions.load(Ordering::SeqCst), regions - 1, "inline data was kept no longer than the call");
        let mut seen = [0; 8];
        peer.read_at(100, &mut seen).expect("in range");
        assert_eq!(&seen, b"abcdefgh");
        let got: Vec<_> = (0..6).map(|_| recv.recv_buf().expect("received")).collect();
        assert_eq!((&got[0][..], &got[1][..], &got[3][..]), (&b"one"[..], &b"two"[..], &b"in place"[..]));
        assert_eq!((got[2].len(), got[2].imm(), got[4].imm(), got[4].written()), (1000, Some(42), Some(9), Some(3000)));
        assert_eq!(got[5][..], *b"the last place");
    }
}

fn buffer(region: &verbs::MemoryRegion) -> verbs::SendBuf {
    let pool = verbs::BufferPool::new(region.protection_domain(), 1, 100).expect("a pool");
    pool.alloc().expect("a buffer")
}

#[test]
fn a_batch_that_is_dropped_or_forgotten_leaves_no_trace_and_a_refused_one_stays() {
    let Rig { mut endpoint, local, peer, device, .. } = rig(&options());
    let half = endpoint.sender();
    let mut batch = half.batch();
    batch.write(&local, 0..3000, &peer.remote(), 0, None).expect("added");
    batch.send(b"x").expect("added");
    drop(batch);
    assert_eq!(half.in_flight(), 0);
    let mut batch = half.batch();
    batch.send(b"x").expect("added");
    std::mem::forget(batch);
    assert_eq!(half.batch().len(), 0);
    device.post_send.store(Errno::ENOMEM as i32, Ordering::SeqCst);
    let empty = half.batch().post().expect("nothing");
    assert!(half.is_done(empty));
    let mut batch = half.batch();
    batch.send(b"x").expect("added");
    batch.write(&local, 0..3000, &peer.remote(), 0, None).expect("added");
    assert!(matches!(batch.post(), Err(Error::Os(_))));
    device.post_send.store(0, Ordering::SeqCst);
    assert!(matches!(half.send(b"x"), Err(Error::Os(_))), "it broke the connection");
    drop(local.into_bytes().expect_err("what the driver refused is kept"));
}
