//! In steady state no operation allocates, nor frees.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use verbs::{Error, Probe, Wait};

use crate::{Rig, options, rig};

struct Counting;

thread_local! {
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    // A thread that is ending has no counter any more.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: the system's allocator does all the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller says.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: as the caller says.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `operation` often; after the first few times it must not touch the allocator.
#[track_caller]
fn steady(what: &str, mut operation: impl FnMut()) {
    for _ in 0..200 {
        operation();
    }
    let before = CALLS.get();
    for _ in 0..1000 {
        operation();
    }
    assert_eq!(CALLS.get() - before, 0, "allocator calls in 1000 times {what}");
}

#[test]
fn no_operation_allocates() {
    for wait in [Wait::Busy, Wait::Sleep, Wait::Adaptive] {
        let Rig { endpoint, local, peer, device: _device, pd: _pd } = rig(&options().wait(wait).max_inline(0));
        let control = endpoint.control();
        let (mut send, mut recv) = endpoint.split();
        let target = peer.remote();
        let mut buf = [0; 4096];
        // An empty message or write allocates nothing in the stand-in either: it copies inline data only.
        for len in [0, 1, 100, 4096] {
            let data = vec![1; len];
            steady("send and recv", || {
                send.send(&data).expect("sent");
                assert_eq!(recv.recv(&mut buf).expect("received"), len);
            });
            steady("send_imm and recv_buf", || {
                send.send_imm(&data, 7).expect("sent");
                assert_eq!(recv.recv_buf().expect("received").imm(), Some(7));
            });
            steady("send_buf", || {
                let mut filled = send.alloc().expect("a buffer");
                filled.set_len(len);
                send.send_buf(filled).expect("sent");
                recv.recv_buf().expect("received");
            });
            steady("write", || send.write(&local, 0..len, &target, 0).expect("written"));
            steady("read", || send.read(&local, 0..len, &target, 0).expect("read"));
            steady("write_imm", || {
                send.write_imm(&local, 0..len, &target, 0, 9).expect("written");
                assert_eq!(recv.recv_buf().expect("told").written(), Some(len as u32));
            });
            steady("posted writes and reads", || {
                let first = send.post_write(&local, 0..len, &target, 0, None).expect("posted");
                let second = send.post_read(&local, 0..len, &target, 0).expect("posted");
                send.wait(second).expect("done");
                assert!(send.is_done(first));
            });
        }
        steady("atomics", || {
            send.compare_and_swap(&target, 8, 0, 1).expect("done");
            send.fetch_and_add(&target, 16, 1).expect("done");
            let ticket = send.post_fetch_and_add(&local, 0, &target, 24, 1).expect("posted");
            send.wait(ticket).expect("done");
        });
        steady("batches", || {
            let mut batch = send.batch();
            for _ in 0..4 {
                batch.write(&local, 0..100, &target, 0, None).expect("added");
                batch.send(b"with them").expect("added");
            }
            let ticket = batch.post().expect("posted");
            send.wait(ticket).expect("done");
            for _ in 0..4 {
                recv.recv_buf().expect("received");
            }
        });
        steady("send_vectored", || {
            send.send_vectored(&[std::io::IoSlice::new(b"two"), std::io::IoSlice::new(b" parts")]).expect("sent");
            assert_eq!(recv.recv_buf().expect("received")[..], *b"two parts");
        });
        steady("flush", || {
            send.send(b"x").expect("sent");
            send.flush().expect("delivered");
            recv.recv_buf().expect("received");
        });
        steady("finding nothing", || {
            assert!(matches!(recv.try_recv(&mut buf), Err(Error::WouldBlock)));
            assert_eq!(send.try_progress().expect("no failure"), 0);
            assert!(recv.arm().expect("armed") && send.arm().expect("armed"));
        });
        if wait != Wait::Busy {
            steady("timing out", || {
                let limit = std::time::Duration::from_nanos(1);
                assert!(matches!(recv.recv_timeout(&mut buf, limit), Err(Error::TimedOut(_))));
            });
        }
        steady("probing", || assert_eq!(control.probe(), Probe::Sent));
    }
}

#[test]
fn notifications_allocate_nothing() {
    let Rig { endpoint, local, peer, device: _device, pd: _pd } = rig(&options().notifications(true).max_inline(0));
    let (mut send, mut recv) = endpoint.split();
    let target = peer.remote();
    steady("notifying", || {
        let ticket = send.post_write(&local, 0..64, &target, 0, Some(3)).expect("posted");
        assert_eq!(recv.recv_notification().expect("told").imm, Some(3));
        send.wait(ticket).expect("done");
    });
}
