//! Messages, one-sided operations, and how they end.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rdmacm::verbs::{self, Access, CloseReason, Endpoint, Error, MemoryRegion, RemoteRegion, Wait, WorkStatus};

use rdmacm_tests::rounds;

use crate::bench::{gid, options, watched};

#[test]
fn a_device_tells_its_limits() {
    watched(|bench| {
        let attributes = bench.a.context().attributes().expect("attributes");
        assert!(attributes.max_qp > 0 && attributes.max_cqe > 0 && attributes.ports > 0, "{attributes:?}");
        let port = bench.a.context().port(1).expect("port 1");
        assert!(port.active_mtu >= 256 && port.max_message >= 4096, "{port:?}");
        assert!(bench.a.context().port(200).is_err());
        assert!(gid(&bench.a).interface().is_some());
        println!("{attributes:?}\n{port:?}\n{:?}", bench.a.context().gid_table());
    });
}

#[test]
fn messages_of_all_sizes_arrive_whole_and_in_order() {
    watched(|bench| {
        for wait in [Wait::Adaptive, Wait::Sleep, Wait::Busy] {
            let (mut a, mut b) = bench.pair(&options().wait(wait));
            let mut buf = vec![0; 5000];
            for len in [0, 1, 7, 8, 63, 64, 65, 1023, 1024, 1025, 4095, 4096, 0] {
                let data: Vec<u8> = (0..len).map(|i| (i * 31 + len) as u8).collect();
                a.send(&data).expect("sent");
                assert_eq!(b.recv(&mut buf).expect("received"), len);
                assert_eq!(&buf[..len], &data[..]);
                b.send(&data).expect("sent");
                let back = a.recv_buf().expect("received");
                assert_eq!((&back[..], back.imm()), (&data[..], None));
            }
            a.flush().expect("all delivered");
            assert!(matches!(a.send(&[0; 4097]), Err(Error::TooLong { len: 4097, limit: 4096 })));
        }
    });
}

#[test]
fn a_receive_that_fails_loses_nothing() {
    watched(|bench| {
        let (mut a, mut b) = bench.pair(&options());
        let mut small = [0; 4];
        assert!(matches!(b.try_recv(&mut small), Err(Error::WouldBlock)));
        let start = Instant::now();
        let limit = Duration::from_millis(50);
        assert!(matches!(b.recv_timeout(&mut small, limit), Err(Error::TimedOut(_))));
        assert!(start.elapsed() >= limit && start.elapsed() < limit + Duration::from_millis(500));
        assert!(matches!(b.recv_timeout(&mut small, Duration::ZERO), Err(Error::Misuse(_))));
        a.send(b"hello").expect("sent");
        a.flush().expect("delivered");
        assert!(matches!(b.recv(&mut small), Err(Error::Truncated { len: 5, capacity: 4 })));
        let mut buf = [0; 16];
        assert_eq!(b.recv(&mut buf).expect("kept"), 5);
        assert_eq!(&buf[..5], b"hello");
    });
}

#[test]
fn buffers_are_sent_and_read_in_place() {
    watched(|bench| {
        let (mut a, mut b) = bench.pair(&options().send_buffers(2).recv_depth(4));
        for round in 0..200_u32 {
            let mut buf = a.alloc().expect("a buffer");
            buf.set_len(2000);
            buf.fill(round as u8);
            a.send_buf(buf).expect("sent");
            let got = b.recv_buf().expect("received");
            assert!(got.len() == 2000 && got.iter().all(|&x| x == round as u8));
            // Handed back by another thread.
            thread::spawn(move || drop(got)).join().expect("dropped");
        }
        let held = (a.alloc().expect("one"), a.alloc().expect("two"));
        assert!(matches!(a.alloc(), Err(Error::Misuse(_))));
        drop(held);
        let foreign = verbs::BufferPool::new(&bench.b, 1, 100).expect("a pool").alloc().expect("a buffer");
        let (e, back) = a.send_buf(foreign).expect_err("another domain");
        assert!(matches!(e, Error::Misuse(_)) && back.capacity() == 100);
    });
}

#[test]
fn reads_and_writes_move_exactly_the_bytes_asked_for() {
    watched(|bench| {
        let (mut a, _b) = bench.pair(&options());
        // More than a message of a Soft-RoCE port.
        const LEN: usize = 9 << 20;
        let local = MemoryRegion::new(&bench.a, LEN, Access::LOCAL_WRITE).expect("a region");
        let remote = MemoryRegion::new(&bench.b, LEN, Access::REMOTE_ALL).expect("a region");
        let pattern: Vec<u8> = (0..LEN).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect();
        local.write_at(0, &pattern).expect("in range");
        let mut seen = vec![0; LEN];
        for (len, offset) in [(0, 0), (1, 3), (7, 5), (1025, 4095), (65536, 1), (LEN - 2, 1)] {
            remote.fill(0..LEN, 0xee).expect("in range");
            a.write(&local, 100..100, &remote.remote(), 5).expect("nothing to do");
            let from = (LEN - len) / 2;
            a.write(&local, from..from + len, &remote.remote(), offset as u64).expect("written");
            remote.read_at(0, &mut seen).expect("in range");
            assert!(seen[..offset].iter().all(|&x| x == 0xee));
            assert!(seen[offset..offset + len] == pattern[from..from + len]);
            assert!(seen[offset + len..].iter().all(|&x| x == 0xee));
            // And back.
            local.fill(0..LEN, 0x11).expect("in range");
            a.read(&local, 1..1 + len, &remote.remote(), offset as u64).expect("read");
            local.read_at(0, &mut seen).expect("in range");
            assert!(seen[0] == 0x11 && seen[1 + len..].iter().all(|&x| x == 0x11));
            assert!(seen[1..1 + len] == pattern[from..from + len]);
            local.write_at(0, &pattern).expect("in range");
        }
        remote.store_u64(8, 0x0102_0304_0506_0708).expect("aligned");
        a.read(&local, 0..8, &remote.remote_range(8..16).expect("in range"), 0).expect("read");
        assert_eq!(local.load_u64(0).expect("aligned"), 0x0102_0304_0506_0708);
        let bytes = local.into_bytes().expect("the last handle");
        assert_eq!(bytes.len(), LEN);
    });
}

#[test]
fn local_misuse_is_refused_before_anything_is_sent() {
    watched(|bench| {
        let (mut a, mut b) = bench.pair(&options());
        let local = MemoryRegion::new(&bench.a, 100, Access::empty()).expect("a region");
        let foreign = MemoryRegion::new(&bench.b, 100, Access::REMOTE_ALL).expect("a region");
        let remote = foreign.remote();
        let misuse = |r: Result<(), Error>| assert!(matches!(r, Err(Error::Misuse(_))), "{r:?}");
        misuse(a.write(&local, 0..101, &remote, 0));
        misuse(a.write(&local, 0..100, &remote, 1));
        misuse(a.write(&local, 0..1, &remote, u64::MAX));
        misuse(a.read(&local, 0..1, &remote, 0));
        misuse(a.write(&foreign, 0..1, &remote, 0));
        a.send(b"still fine").expect("sent");
        assert_eq!(b.recv_buf().expect("received")[..], *b"still fine");
        let limit = options().send_depth(u32::MAX);
        let e = verbs::EndpointBuilder::new(&bench.a, &limit).expect_err("too deep");
        assert!(e.to_string().contains("send_depth") && e.to_string().contains("max_qp_wr"), "{e}");
    });
}

#[test]
fn a_refused_access_breaks_both_ends_for_one_stable_reason() {
    watched(|bench| {
        let region = MemoryRegion::new(&bench.b, 4096, Access::LOCAL_WRITE | Access::REMOTE_READ).expect("a region");
        let r = region.remote();
        let wrong_key = RemoteRegion::new(r.addr(), r.len(), r.rkey() ^ 1);
        let too_long = RemoteRegion::new(r.addr(), r.len() + 1, r.rkey());
        for target in [r, wrong_key, too_long] {
            region.fill(0..4096, 0x5a).expect("in range");
            let (mut a, mut b) = bench.pair(&options());
            let local = MemoryRegion::new(&bench.a, 5000, Access::LOCAL_WRITE).expect("a region");
            let e = a.write(&local, 0..target.len() as usize, &target, 0).expect_err("refused");
            assert_eq!(e.kind(), std::io::ErrorKind::PermissionDenied, "{e}");
            let texts = [
                a.send(b"x").expect_err("broken").to_string(),
                a.recv(&mut []).expect_err("broken").to_string(),
                a.flush().expect_err("broken").to_string(),
                a.control().cause().expect("broken").to_string(),
            ];
            assert!(texts.iter().all(|t| *t == e.to_string()), "{texts:?}");
            let at_peer = b.recv_buf_timeout(Duration::from_secs(5)).expect_err("broken too");
            assert!(!matches!(at_peer, Error::TimedOut(_)), "{at_peer}");
            let mut seen = [0; 4096];
            region.read_at(0, &mut seen).expect("in range");
            assert!(seen.iter().all(|&x| x == 0x5a), "the target is unchanged");
        }
    });
}

#[test]
fn a_message_larger_than_the_receive_buffer_is_told_to_both() {
    watched(|bench| {
        let (mut a, mut b) = bench.pair_of(&options(), &options().message_size(64));
        a.send(&[1; 64]).expect("sent");
        a.send(&[2; 65]).expect("posted");
        let mut buf = [0; 100];
        assert_eq!(b.recv(&mut buf).expect("the good one first"), 64);
        let e = b.recv(&mut buf).expect_err("too long");
        assert!(e.to_string().contains("message larger than the receive buffer (64 bytes)"), "{e} {e:?}");
        assert_eq!(e.kind(), std::io::ErrorKind::InvalidData);
        let e = a.flush().expect_err("refused");
        // Hardware says the one, Soft-RoCE the other.
        let told = [WorkStatus::REMOTE_INVALID_REQUEST, WorkStatus::REMOTE_OPERATION];
        assert!(matches!(&e, Error::Work(w) if told.contains(&w.status)), "{e:?}");
        assert!(e.to_string().contains("larger than its receive buffer"), "{e}");
        assert!(matches!(b.send(b"x"), Err(Error::Work(_))));
    });
}

#[test]
fn the_receiver_learns_what_broke_the_sender() {
    watched(|mut bench| {
        (bench.path.ack_timeout, bench.path.retry_count) = (12, 3);
        let (a, b) = bench.pair(&options());
        let (mut send, mut recv) = a.split();
        b.control().close(CloseReason::Local);
        drop(b);
        send.send(b"to nobody").expect("posted");
        // The sender does not look; only the receiver waits.
        let waiting = thread::spawn(move || {
            let e = recv.recv(&mut [0; 10]).expect_err("the peer is gone");
            (e, recv)
        });
        let (e, recv) = waiting.join().expect("no panic");
        assert!(matches!(&e, Error::Work(w) if w.status != WorkStatus::FLUSHED), "{e}");
        assert_eq!(send.send(b"x").expect_err("broken").to_string(), e.to_string());
        assert_eq!(send.flush().expect_err("broken").to_string(), e.to_string());
        assert_eq!(send.in_flight(), 0, "what was posted is accounted for");
        drop(recv);
    });
}

#[test]
fn closing_wakes_both_halves_even_with_nothing_posted() {
    watched(|bench| {
        for (reason, wait) in [
            (CloseReason::Peer, Wait::Adaptive),
            (CloseReason::Local, Wait::Sleep),
            (CloseReason::DeviceRemoved, Wait::Busy),
        ] {
            let (a, mut b) = bench.pair(&options().recv_depth(1).send_depth(1).wait(wait));
            let control = a.control();
            let (told, hook) = mpsc::channel();
            control.set_broken_hook(Box::new(move || told.send(()).expect("listened to")));
            let (mut send, mut recv) = a.split();
            b.send(b"before").expect("sent");
            b.flush().expect("delivered");
            let kept = recv.recv_buf().expect("the only buffer");
            // No receive is posted now: no completion will wake the receiver.
            let receiver = thread::spawn(move || recv.recv(&mut [0; 10]).expect_err("closed").to_string());
            thread::sleep(Duration::from_millis(50));
            let start = Instant::now();
            control.close(reason.clone());
            control.close(CloseReason::Unreachable);
            assert_eq!(receiver.join().expect("no panic"), reason.to_string());
            assert!(start.elapsed() < Duration::from_secs(1));
            assert_eq!(send.send(b"x").expect_err("closed").to_string(), reason.to_string());
            assert_eq!(&kept[..], b"before");
            assert!(hook.try_recv().is_err(), "who closed it needs no telling");
        }
    });
}

#[test]
fn data_before_the_end_is_read_first_and_the_hook_told() {
    watched(|bench| {
        let (mut a, mut b) = bench.pair(&options());
        let (told, hook) = mpsc::channel();
        b.control().set_broken_hook(Box::new(move || told.send(()).expect("listened to")));
        for i in 0..10_u8 {
            a.send(&[i]).expect("sent");
        }
        a.flush().expect("delivered");
        drop(a);
        b.control().queue_pair().set_error().expect("stopped");
        for i in 0..10_u8 {
            assert_eq!(b.recv_buf().expect("arrived before")[..], [i]);
        }
        let e = b.recv_buf().expect_err("over");
        assert!(e.is_flush() && e.kind() == std::io::ErrorKind::BrokenPipe, "{e}");
        assert_eq!(hook.try_iter().count(), 1);
        b.control().close(CloseReason::Peer);
        assert!(matches!(b.recv_buf(), Err(Error::Closed(CloseReason::Peer))), "a reason replaces a mere flush");
    });
}

#[test]
fn back_pressure_and_unsignalled_sends_for_long() {
    watched(|bench| {
        for (depth, wait) in [(1, Wait::Adaptive), (2, Wait::Sleep), (16, Wait::Adaptive), (3, Wait::Busy)] {
            let count = rounds(1000, 100_000) as u32;
            let options = options().send_depth(depth).recv_depth(8).wait(wait).message_size(256);
            let (a, b) = bench.pair(&options);
            let run = |endpoint: Endpoint| {
                let (mut send, mut recv) = endpoint.split();
                thread::spawn(move || {
                    let sender = thread::spawn(move || {
                        for i in 0..count {
                            let len = 4 + (i % 200) as usize;
                            let mut data = [0; 256];
                            data[..4].copy_from_slice(&i.to_ne_bytes());
                            data[len - 1] = data[len - 1].wrapping_add(1);
                            send.send(&data[..len]).expect("sent");
                        }
                        send.flush().expect("delivered");
                        send
                    });
                    let mut buf = [0; 256];
                    for i in 0..count {
                        let len = recv.recv(&mut buf).expect("received");
                        assert_eq!(len, 4 + (i % 200) as usize);
                        if len > 4 {
                            assert_eq!(buf[..4], i.to_ne_bytes());
                        }
                    }
                    (sender.join().expect("no panic"), recv)
                })
            };
            let (a, b) = (run(a), run(b));
            let (a, b) = (a.join().expect("no panic"), b.join().expect("no panic"));
            drop((a, b));
        }
    });
}

#[test]
fn halves_may_be_dropped_or_forgotten_in_flight() {
    watched(|bench| {
        let region = MemoryRegion::new(&bench.b, 1 << 20, Access::REMOTE_ALL).expect("a region");
        let remote = region.remote();
        for round in 0..8 {
            let (a, b) = bench.pair(&options());
            let local = MemoryRegion::new(&bench.a, 1 << 20, Access::LOCAL_WRITE).expect("a region");
            let control = a.control();
            let (mut send, recv) = a.split();
            send.set_timeout(Some(Duration::from_nanos(1))).expect("not zero");
            for _ in 0..4 {
                let _ = send.read(&local, 0..1 << 20, &remote, 0);
                let _ = send.send(&[7; 3000]);
            }
            let held = (round & 1 == 1).then(|| b.control());
            match round / 2 {
                0 => drop((send, local, recv, b, control)),
                1 => drop((b, recv, control, local, send)),
                2 => drop((local, control, send, b, recv)),
                _ => {
                    std::mem::forget(send);
                    drop((local, recv, control, b));
                }
            }
            drop(held);
        }
        // The second region is alone again: nothing but the leaked endpoint's peer side refers to it.
        assert!(region.into_bytes().is_ok());
    });
}

#[test]
fn the_rnr_timer_of_a_live_queue_pair_can_be_set() {
    watched(|bench| {
        let (mut a, mut b) = bench.pair(&options());
        let control = a.control();
        let qp = control.queue_pair();
        qp.set_rnr_timer(Duration::from_micros(100)).expect("ready to send");
        assert_eq!(qp.query().expect("attributes").rnr_timer, Duration::from_micros(120));
        a.send(b"1").expect("sent");
        assert_eq!(b.recv_buf().expect("received").len(), 1);
        let text = format!("{a:?} {control:?} {:?}", bench.a);
        assert!(text.contains("qp_num"), "{text}");
    });
}
