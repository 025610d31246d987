//! A device or driver that does what it must not.

use std::sync::atomic::Ordering;

use nix::errno::Errno;
use verbs::{CloseReason, Error, WorkStatus};

use crate::{Rig, options, rig};

#[test]
fn a_queue_pair_that_cannot_be_destroyed_keeps_its_memory() {
    let Rig { mut endpoint, local, peer, pd, device } = rig(&options());
    device.destroy_qp.store(Errno::EBUSY as i32, Ordering::SeqCst);
    device.hold.store(true, Ordering::SeqCst);
    let mut buf = endpoint.alloc().expect("a buffer");
    buf.set_len(1000);
    endpoint.send_buf(buf).expect("posted");
    let _ = endpoint.sender().post_read(&local, 0..100, &peer.remote(), 0).expect("posted");
    let before = device.regions.load(Ordering::SeqCst);
    drop((endpoint, local, peer, pd));
    // Its slots, its send buffers and the region of the read are leaked; the other region is not.
    assert_eq!(device.regions.load(Ordering::SeqCst), before - 1);
    assert_eq!(device.pairs.load(Ordering::SeqCst), 1);
    assert_eq!((device.queues_alive.load(Ordering::SeqCst), device.domains.load(Ordering::SeqCst)), (2, 1));
}

#[test]
fn a_region_that_cannot_be_deregistered_keeps_its_pages() {
    let Rig { endpoint, local, peer, pd, device } = rig(&options());
    let at = local.remote().addr();
    device.dereg_mr.store(Errno::EBUSY as i32, Ordering::SeqCst);
    local.write_at(0, b"still here").expect("in range");
    drop(local);
    // SAFETY: the pages are mapped for good, which is what is tested; nobody writes to them.
    let bytes = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(at as usize), 10) };
    assert_eq!(bytes, b"still here");
    drop((endpoint, peer, pd));
}

#[test]
fn a_length_that_the_peer_cannot_have_sent_is_never_believed() {
    let Rig { mut endpoint, device, .. } = rig(&options());
    endpoint.send(b"good").expect("sent");
    assert_eq!(endpoint.recv_buf().expect("received")[..], *b"good");
    device.tamper(|wc| {
        if wc.byte_len == 5 {
            wc.byte_len = 4097;
        }
    });
    endpoint.send(b"wrong").expect("sent");
    let e = endpoint.recv_buf().expect_err("more bytes than a buffer has");
    assert!(matches!(e, Error::Provider(_)), "{e}");
    assert!(matches!(endpoint.send(b"x"), Err(Error::Provider(_))));
}

#[test]
fn made_up_and_doubled_completions_break_the_connection_and_free_nothing() {
    // Of sends: another number, one that was there before, another kind.
    for change in [|id: u64| id + (1 << 20), |_| 0, |id| id ^ 6] {
        let Rig { mut endpoint, local, peer, device, .. } = rig(&options().signal_every(1));
        for _ in 0..3 {
            endpoint.write(&local, 0..100, &peer.remote(), 0).expect("written");
        }
        let regions = device.regions.load(Ordering::SeqCst);
        device.tamper(move |wc| wc.wr_id = change(wc.wr_id));
        let e = endpoint.write(&local, 0..100, &peer.remote(), 0).expect_err("the end of something else");
        assert!(matches!(e, Error::Provider(_)), "{e}");
        assert_eq!(endpoint.sender().in_flight(), 1, "it is not known to be done");
        // The region may still be in use: the endpoint has it.
        drop(local);
        assert_eq!(device.regions.load(Ordering::SeqCst), regions);
        drop(endpoint);
        assert_eq!(device.regions.load(Ordering::SeqCst), regions - 3, "the region, and the slots of both halves");
    }
    // Of receives.
    for change in [|id: u64| id + 1000, |id| id ^ 1] {
        let Rig { mut endpoint, device, .. } = rig(&options().recv_depth(4));
        let mut doubled = false;
        device.tamper(move |wc| {
            if wc.opcode == verbs::sys::ibv_wc_opcode::IBV_WC_RECV {
                wc.wr_id = if doubled { change(wc.wr_id) } else { wc.wr_id };
                doubled = true;
            }
        });
        endpoint.send(b"first").expect("sent");
        let first = endpoint.recv_buf().expect("received");
        endpoint.send(b"second").expect("sent");
        let e = match endpoint.recv_buf() {
            // Slot 0 twice: it is held.
            Err(e) => e,
            Ok(_) => panic!("a slot was given out twice"),
        };
        assert!(matches!(e, Error::Provider(_)), "{e}");
        assert_eq!(first[..], *b"first");
    }
}

#[test]
fn a_refused_request_breaks_the_connection_and_keeps_what_it_names() {
    // A driver may have queued what it refuses, and may carry it out later.
    let Rig { mut endpoint, local, peer, device, .. } = rig(&options().max_inline(0));
    let mut buf = endpoint.alloc().expect("a free one");
    buf.copy_from(b"secret").expect("it fits");
    device.post_send.store(Errno::ENOMEM as i32, Ordering::SeqCst);
    let (e, back) = endpoint.send_buf(buf).expect_err("refused");
    assert!(matches!(&e, Error::Os(os) if os.errno == Errno::ENOMEM), "{e}");
    assert_eq!((back.len(), back.capacity()), (0, 0), "the buffer stays with the connection");
    drop(back);
    device.post_send.store(0, Ordering::SeqCst);
    for _ in 0..3 {
        let again = endpoint.send(b"x").expect_err("broken");
        assert_eq!(again.to_string(), e.to_string());
    }
    let read = endpoint.read(&local, 0..64, &peer.remote(), 0).expect_err("broken");
    assert_eq!(read.to_string(), e.to_string());
}

#[test]
fn a_refused_read_keeps_its_region() {
    let Rig { mut endpoint, local, peer, device, .. } = rig(&options());
    device.post_send.store(Errno::EINVAL as i32, Ordering::SeqCst);
    endpoint.read(&local, 0..64, &peer.remote(), 0).expect_err("refused");
    let local = local.into_bytes().expect_err("the connection holds it, too");
    drop(endpoint);
    drop(local);
}

#[test]
fn garbage_in_error_completions_is_not_looked_at() {
    let Rig { mut endpoint, device, .. } = rig(&options());
    endpoint.control().close(CloseReason::Local);
    let e = endpoint.recv_buf().expect_err("closed");
    assert!(matches!(e, Error::Closed(CloseReason::Local)));
    drop(endpoint);
    let Rig { mut endpoint, device: second, .. } = rig(&options());
    second.tamper(|wc| wc.status = 999);
    endpoint.send(b"x").expect("posted");
    let e = endpoint.recv_buf().expect_err("an unknown status");
    assert!(matches!(&e, Error::Work(w) if w.status == WorkStatus(999)), "{e}");
    drop(device);
}

#[test]
fn a_failed_completion_says_why_the_peer_disconnected() {
    let Rig { mut endpoint, device, .. } = rig(&options());
    device.tamper(|wc| wc.status = WorkStatus::LOCAL_LENGTH.0);
    endpoint.send(b"x").expect("posted");
    // The peer found out, too, and its disconnect is heard of before anybody looks at the queue.
    endpoint.control().close(CloseReason::Peer);
    let e = endpoint.recv_buf().expect_err("it did not fit");
    assert!(matches!(&e, Error::Work(w) if w.status == WorkStatus::LOCAL_LENGTH), "{e}");
    let again = endpoint.send(b"y").expect_err("over");
    assert_eq!(again.to_string(), e.to_string());
}
