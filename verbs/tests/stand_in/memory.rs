//! Memory outlives its use by the device, whatever the program drops or forgets.

use std::sync::atomic::Ordering;
use std::time::Duration;

use verbs::{Access, Error, MemoryRegion};

use crate::{Rig, options, rig};

#[test]
fn a_blocking_call_that_gives_up_leaves_its_region_to_the_endpoint() {
    let Rig { endpoint, local, peer, device, .. } = rig(&options());
    let control = endpoint.control();
    let (mut send, _recv) = endpoint.split();
    peer.fill(0..8192, 0x77).expect("in range");
    device.hold.store(true, Ordering::SeqCst);
    send.set_timeout(Some(Duration::from_millis(5))).expect("not zero");
    assert!(matches!(send.read(&local, 0..8192, &peer.remote(), 0), Err(Error::TimedOut(_))));
    let before = device.regions.load(Ordering::SeqCst);
    drop(local);
    assert_eq!(device.regions.load(Ordering::SeqCst), before, "the device still writes there");
    // The late bytes go to pages that are still mapped; then they are released.
    device.release(control.queue_pair());
    assert_eq!(send.try_progress().expect("no failure"), 1);
    assert_eq!(device.regions.load(Ordering::SeqCst), before - 1);
}

#[test]
fn a_panic_in_the_hook_leaves_the_region_to_the_endpoint() {
    let Rig { mut endpoint, local, peer, device, .. } = rig(&options());
    endpoint.control().set_broken_hook(Box::new(|| panic!("a bad hook")));
    device.tamper(|wc| wc.wr_id = 0xdead << 8);
    let before = device.regions.load(Ordering::SeqCst);
    let target = peer.remote();
    let call = std::panic::AssertUnwindSafe(|| endpoint.write(&local, 0..100, &target, 0));
    assert!(std::panic::catch_unwind(call).is_err());
    drop(local);
    assert_eq!(device.regions.load(Ordering::SeqCst), before);
    drop(endpoint);
    assert_eq!(device.regions.load(Ordering::SeqCst), before - 3);
}

#[test]
fn whatever_is_forgotten_or_dropped_in_flight_nothing_is_freed_too_early() {
    for round in 0..32_u32 {
        let Rig { endpoint, local, peer, pd, device } = rig(&options());
        let control = endpoint.control();
        let (mut send, mut recv) = endpoint.split();
        send.send(b"received").expect("sent");
        let got = recv.recv_buf().expect("received");
        device.hold.store(true, Ordering::SeqCst);
        let mut buf = send.alloc().expect("a buffer");
        buf.set_len(2000);
        send.send_buf(buf).expect("posted");
        let held = send.alloc().expect("a buffer");
        let _ = send.post_read(&local, 0..8192, &peer.remote(), 0).expect("posted");
        let forget = |bit: u32| round >> bit & 1 == 1;
        macro_rules! end {
            ($bit:literal, $value:expr) => {
                if forget($bit) { std::mem::forget($value) } else { drop($value) }
            };
        }
        end!(0, local);
        end!(1, send);
        end!(2, recv);
        end!(3, got);
        end!(4, held);
        drop(pd);
        // If the queue pair is alive, what is late must find its memory.
        device.release(control.queue_pair());
        drop(control);
        let leaked = round != 0 && round != 1 && round != 16 && round != 17;
        assert_eq!(device.pairs.load(Ordering::SeqCst), usize::from(leaked), "round {round}");
        drop(peer);
    }
}

#[test]
fn objects_may_be_dropped_in_any_order_and_elsewhere() {
    let mut orders = vec![vec![]];
    for item in 0..5 {
        orders = orders
            .into_iter()
            .flat_map(|order: Vec<u32>| (0..=order.len()).map(move |at| [&order[..at], &[item], &order[at..]].concat()))
            .collect();
    }
    assert_eq!(orders.len(), 120);
    for order in orders {
        let Rig { endpoint, local, peer, pd, device } = rig(&options());
        device.hold.store(true, Ordering::SeqCst);
        let control = endpoint.control();
        let (mut send, recv) = endpoint.split();
        let _ = send.post_write(&local, 0..8192, &peer.remote(), 0, None).expect("posted");
        let (mut send, mut recv, mut local, mut control, mut pd) =
            (Some(send), Some(recv), Some(local), Some(control), Some(pd));
        for item in order {
            std::thread::scope(|scope| {
                scope.spawn(|| match item {
                    0 => drop(send.take()),
                    1 => drop(recv.take()),
                    2 => drop(local.take()),
                    3 => drop(control.take()),
                    _ => drop(pd.take()),
                });
            });
        }
        drop(peer);
        for count in [&device.pairs, &device.queues_alive, &device.regions, &device.domains] {
            assert_eq!(count.load(Ordering::SeqCst), 0);
        }
    }
}

#[test]
fn contents_come_back_from_the_last_handle_only() {
    let Rig { endpoint, local, pd, .. } = rig(&options());
    local.write_at(8000, b"kept").expect("in range");
    let second = local.clone();
    let local = local.into_bytes().expect_err("there is another handle");
    drop(second);
    let bytes = local.into_bytes().expect("the last handle");
    assert_eq!((bytes.len(), &bytes[8000..8004]), (8192, &b"kept"[..]));
    assert!(MemoryRegion::new(&pd, 0, Access::empty()).is_err());
    drop(endpoint);
}

#[test]
fn a_vector_comes_back_itself_from_success_and_failure() {
    let Rig { endpoint, pd, device, .. } = rig(&options());
    let bytes: Vec<u8> = (0..100).collect();
    let at = bytes.as_ptr();
    let region = MemoryRegion::builder(&pd, Access::REMOTE_ALL).own(bytes).map_err(|(e, _)| e).expect("a region");
    region.write_at(50, b"changed").expect("in range");
    assert_eq!(region.remote().addr(), at.addr() as u64);
    let bytes = region.into_bytes().expect("the last handle");
    assert_eq!((bytes.as_ptr(), bytes.len(), &bytes[49..58]), (at, 100, &b"1changed9"[..]));
    let (e, bytes) = MemoryRegion::builder(&pd, Access::ON_DEMAND).own(bytes).expect_err("not here");
    assert!(matches!(e, Error::Unsupported(_)) && bytes.as_ptr() == at, "{e}");
    let (e, empty) = MemoryRegion::builder(&pd, Access::empty()).own(Vec::new()).expect_err("no bytes");
    assert!(matches!(e, Error::Misuse(_)) && empty.is_empty());
    // While the device may use it, dropping it frees nothing; nor does a failed deregistration.
    let region = MemoryRegion::builder(&pd, Access::LOCAL_WRITE).own(bytes).map_err(|(e, _)| e).expect("a region");
    let count = device.regions.load(Ordering::SeqCst);
    device.dereg_mr.store(16, Ordering::SeqCst);
    let copy = region.into_bytes().expect("the last handle");
    assert_eq!((copy.len(), copy.as_ptr() == at), (100, false), "the device may still have the vector");
    assert_eq!(device.regions.load(Ordering::SeqCst), count);
    drop(endpoint);
}

#[test]
fn what_cannot_be_written_or_seen_is_not() {
    let Rig { mut endpoint, peer, pd, .. } = rig(&options());
    static TEXT: [u8; 64] = *b"constant bytes, which nobody can write, neither we nor the peer.";
    let region = MemoryRegion::builder(&pd, Access::REMOTE_READ).constant(&TEXT).expect("a region");
    let misuse = |r: Result<(), Error>| assert!(matches!(r, Err(Error::Misuse(_))), "{r:?}");
    misuse(region.write_at(0, b"x"));
    misuse(region.fill(0..1, 0));
    misuse(region.store_u64(0, 0));
    misuse(endpoint.read(&region, 0..8, &peer.remote(), 0));
    misuse(MemoryRegion::builder(&pd, Access::REMOTE_ALL).constant(&TEXT).map(drop));
    endpoint.write(&region, 0..64, &peer.remote(), 0).expect("written");
    let mut seen = [0; 64];
    peer.read_at(0, &mut seen).expect("in range");
    assert_eq!(seen, TEXT);
    let null = std::fs::File::open("/dev/null").expect("it is everywhere");
    let e = MemoryRegion::builder(&pd, Access::REMOTE_READ).dmabuf(&null, 0, 4096).expect_err("not here");
    assert!(matches!(e, Error::Unsupported(_)), "{e}");
}

#[test]
fn values_of_plain_data_are_copied() {
    let Rig { local, .. } = rig(&options());
    local.write_value(3, &0x0102_0304_u32).expect("in range");
    assert_eq!(local.read_value::<u32>(3).expect("in range"), 0x0102_0304);
    local.write_value(8, &[1_u16, 2, 3]).expect("in range");
    assert_eq!(local.read_value::<[u16; 3]>(8).expect("in range"), [1, 2, 3]);
    assert!(matches!(local.read_value::<u64>(8192 - 7), Err(Error::Misuse(_))));
}

#[test]
fn short_writes_from_memory_at_another_device_address_take_the_right_bytes() {
    let Rig { mut endpoint, peer, pd, device, .. } = rig(&options());
    let region =
        MemoryRegion::builder(&pd, Access::LOCAL_WRITE).device_address(1 << 40).zeroed(4096).expect("a region");
    assert_eq!(region.remote_range(8..16).expect("in range").addr(), (1 << 40) + 8);
    // The stand-in would copy inline data from the address that it is told: the request must not be inline.
    device.hold.store(true, Ordering::SeqCst);
    let _ = endpoint.sender().post_write(&region, 0..8, &peer.remote(), 0, None).expect("posted");
    let e = MemoryRegion::builder(&pd, Access::LOCAL_WRITE).device_address(u64::MAX).zeroed(4096).expect_err("wraps");
    assert!(matches!(e, Error::Misuse(_)));
    std::mem::forget(endpoint);
}
