//! Atomics, batches, messages in pieces, solicited events, ways of waiting, and contents of all sizes.

use std::io::IoSlice;
use std::thread;
use std::time::{Duration, Instant};

use rdmacm::verbs::{Access, Error, MemoryRegion, Wait, WorkStatus};
use rdmacm_tests::rounds;

use crate::bench::{options, watched};

#[test]
fn atomics_give_the_old_value_in_host_order() {
    watched(|bench| {
        let (mut a, _b) = bench.pair(&options());
        let remote = MemoryRegion::new(&bench.b, 64, Access::REMOTE_ALL).expect("a region");
        let (half, target) = (a.sender(), remote.remote());
        const VALUE: u64 = 0x0102_0304_0506_0708;
        remote.store_u64(8, VALUE).expect("aligned");
        assert_eq!(half.compare_and_swap(&target, 8, 5, 6).expect("done"), VALUE, "not what was expected");
        assert_eq!(remote.load_u64(8).expect("aligned"), VALUE);
        assert_eq!(half.compare_and_swap(&target, 8, VALUE, !VALUE).expect("done"), VALUE);
        assert_eq!(remote.load_u64(8).expect("aligned"), !VALUE);
        assert_eq!(half.fetch_and_add(&target, 8, 0x10).expect("done"), !VALUE);
        assert_eq!(remote.load_u64(8).expect("aligned"), !VALUE + 0x10);
        assert_eq!(half.fetch_and_add(&target, 56, u64::MAX).expect("the last word"), 0);
        assert_eq!(half.fetch_and_add(&target, 56, 2).expect("wraps"), u64::MAX);
        assert_eq!(remote.load_u64(56).expect("aligned"), 1);
        let (before, after) = (remote.load_u64(0).expect("aligned"), remote.load_u64(16).expect("aligned"));
        assert_eq!((before, after), (0, 0), "the neighbours");
        // Posted, with the result in a region.
        let local = MemoryRegion::new(&bench.a, 16, Access::LOCAL_WRITE).expect("a region");
        let add = half.post_fetch_and_add(&local, 0, &target, 56, 5).expect("posted");
        let swap = half.post_compare_and_swap(&local, 8, &target, 56, 6, 9).expect("posted");
        half.wait(swap).expect("done");
        assert!(half.is_done(add));
        assert_eq!((local.load_u64(0).expect("aligned"), local.load_u64(8).expect("aligned")), (1, 6));
        assert_eq!(remote.load_u64(56).expect("aligned"), 9);
        // What cannot be is refused before anything is sent.
        let misuse = |r: Result<u64, Error>| assert!(matches!(r, Err(Error::Misuse(_))), "{r:?}");
        for offset in [1, 4, 60, 64, u64::MAX] {
            misuse(half.fetch_and_add(&target, offset, 1));
            misuse(half.compare_and_swap(&target, offset, 1, 2));
        }
        let read_only = MemoryRegion::new(&bench.a, 16, Access::empty()).expect("a region");
        for (region, offset) in [(&local, 4), (&local, 16), (&read_only, 0), (&remote, 0)] {
            assert!(matches!(half.post_fetch_and_add(region, offset, &target, 0, 1), Err(Error::Misuse(_))));
        }
        // Without the right at the peer.
        let closed = MemoryRegion::new(&bench.b, 64, Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ);
        let closed = closed.expect("a region");
        let e = half.fetch_and_add(&closed.remote(), 0, 1).expect_err("no right to it");
        assert!(matches!(&e, Error::Work(w) if w.status == WorkStatus::REMOTE_ACCESS), "{e}");
        assert_eq!(closed.load_u64(0).expect("aligned"), 0);
    });
}

#[test]
fn additions_of_many_threads_sum_up_and_a_lock_excludes() {
    watched(|bench| {
        let threads = 8;
        let count = rounds(500, 10_000) as u64;
        let remote = MemoryRegion::new(&bench.b, 64, Access::REMOTE_ALL).expect("a region");
        let pairs: Vec<_> = (0..threads).map(|_| bench.pair(&options().wait(Wait::Sleep))).collect();
        thread::scope(|scope| {
            for (number, (mut a, b)) in pairs.into_iter().enumerate() {
                let (target, pd) = (remote.remote(), bench.a.clone());
                scope.spawn(move || {
                    let half = a.sender();
                    for _ in 0..count {
                        half.fetch_and_add(&target, 0, 3).expect("added");
                    }
                    // A counter that is read and written in two steps, under a lock made of a word.
                    let local = MemoryRegion::new(&pd, 8, Access::LOCAL_WRITE).expect("a region");
                    for _ in 0..count / 10 {
                        while half.compare_and_swap(&target, 8, 0, number as u64 + 1).expect("done") != 0 {
                            thread::yield_now();
                        }
                        half.read(&local, 0..8, &target, 16).expect("read");
                        local.store_u64(0, local.load_u64(0).expect("aligned") + 1).expect("aligned");
                        half.write(&local, 0..8, &target, 16).expect("written");
                        assert_eq!(
                            half.compare_and_swap(&target, 8, number as u64 + 1, 0).expect("done"),
                            number as u64 + 1
                        );
                    }
                    drop(b);
                });
            }
        });
        assert_eq!(remote.load_u64(0).expect("aligned"), threads * count * 3);
        assert_eq!(remote.load_u64(16).expect("aligned"), threads * (count / 10));
    });
}

#[test]
fn batches_arrive_in_order_with_what_they_announce() {
    watched(|bench| {
        for (depth, every) in [(16, 0), (16, 1), (5, 0)] {
            let (mut a, mut b) = bench.pair(&options().send_depth(depth).signal_every(every).recv_depth(16));
            let local = MemoryRegion::new(&bench.a, 4096, Access::LOCAL_WRITE).expect("a region");
            let remote = MemoryRegion::new(&bench.b, 4096, Access::REMOTE_ALL).expect("a region");
            let half = a.sender();
            for round in 0..200_u32 {
                local.fill(0..4096, round as u8).expect("in range");
                let mut batch = half.batch();
                batch.write(&local, 0..4000, &remote.remote(), 48, None).expect("room");
                batch.write(&local, 4000..4048, &remote.remote(), 0, None).expect("room");
                batch.send(&round.to_ne_bytes()).expect("room");
                batch.send_imm(&[round as u8; 200], round).expect("room");
                let ticket = batch.post().expect("posted");
                assert_eq!(b.recv_buf().expect("received")[..], round.to_ne_bytes());
                let mut seen = [0; 4048];
                remote.read_at(0, &mut seen).expect("in range");
                assert!(seen.iter().all(|&x| x == round as u8), "writes are there before the message after them");
                let second = b.recv_buf().expect("received");
                assert_eq!((second.len(), second.imm()), (200, Some(round)));
                half.wait(ticket).expect("done");
            }
        }
    });
}

#[test]
fn messages_are_put_together_from_pieces() {
    watched(|bench| {
        let (mut a, mut b) = bench.pair(&options());
        for (count, len) in [(0, 1), (1, 0), (3, 5), (1024, 3), (1024, 4)] {
            let data: Vec<u8> = (0..count * len).map(|i| (i * 7) as u8).collect();
            let pieces: Vec<_> = match len {
                0 => vec![IoSlice::new(&[]); count],
                _ => data.chunks(len).map(IoSlice::new).collect(),
            };
            a.sender().send_vectored(&pieces).expect("sent");
            assert_eq!(b.recv_buf().expect("received")[..], data[..]);
        }
        let large = vec![0; 4000];
        let e = a.sender().send_vectored(&[IoSlice::new(&large), IoSlice::new(&large)]).expect_err("too long");
        assert!(matches!(e, Error::TooLong { len: 8000, limit: 4096 }), "{e}");
    });
}

#[test]
fn a_receiver_that_sleeps_for_solicited_messages_gets_all_of_them() {
    watched(|bench| {
        let (mut a, mut b) = bench.pair(&options().wait(Wait::Sleep));
        b.receiver().set_solicited_only(true);
        for round in 0..50_u8 {
            let receiver = thread::spawn(move || {
                let texts: Vec<_> = (0..4).map(|_| b.recv_buf().expect("received")[0]).collect();
                (b, texts)
            });
            for i in 0..4 {
                // Only the last one wakes.
                a.sender().set_solicited(i == 3);
                a.send(&[round.wrapping_mul(4).wrapping_add(i)]).expect("sent");
            }
            let (back, texts) = receiver.join().expect("no panic");
            assert_eq!(texts, [0, 1, 2, 3].map(|i| round.wrapping_mul(4).wrapping_add(i)));
            b = back;
        }
        // And the end of the connection wakes, too.
        let control = b.control();
        let receiver = thread::spawn(move || b.recv_buf().map(|_| ()).expect_err("closed"));
        thread::sleep(Duration::from_millis(20));
        control.close(rdmacm::verbs::CloseReason::Local);
        receiver.join().expect("no panic");
    });
}

#[test]
fn no_ping_pong_stalls_however_the_halves_wait() {
    watched(|bench| {
        let count = rounds(6_000, 1_000_000);
        let (mut a, mut b) = bench.pair(&options().wait(Wait::Sleep).recv_depth(64));
        let echo = thread::spawn(move || {
            let mut buf = [0; 8];
            for round in 0..count {
                if round % 500 == 0 {
                    let wait = if round % 1000 == 0 { Wait::Sleep } else { Wait::Adaptive };
                    b.sender().set_wait(wait);
                    b.receiver().set_wait(wait);
                }
                let len = b.recv(&mut buf).expect("received");
                b.send(&buf[..len]).expect("sent");
            }
            b.flush().expect("delivered");
            b
        });
        let mut slowest = Duration::ZERO;
        for round in 0..count as u64 {
            // A little while of a length that changes, so that arming meets the completion at all its points.
            for _ in 0..round * 37 % 2000 {
                std::hint::spin_loop();
            }
            let start = Instant::now();
            a.send(&round.to_ne_bytes()).expect("sent");
            assert_eq!(a.recv_buf_timeout(Duration::from_secs(5)).expect("no stall")[..], round.to_ne_bytes());
            slowest = slowest.max(start.elapsed());
        }
        echo.join().expect("no panic");
        assert!(slowest < Duration::from_secs(1), "a stall of {slowest:?}");
    });
}

/// FNV-1a.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[test]
fn every_operation_moves_every_size_and_not_a_byte_more() {
    watched(|bench| {
        const SIZES: [usize; 11] = [0, 1, 7, 8, 1023, 1024, 1025, 4096, 65536, 1 << 20, 16 << 20];
        const EDGE: usize = 64;
        let room = SIZES[10] + 2 * EDGE;
        let (mut a, mut b) = bench.pair(&options().message_size(65536).recv_depth(2).send_depth(4));
        let local = MemoryRegion::new(&bench.a, room, Access::LOCAL_WRITE).expect("a region");
        let remote = MemoryRegion::new(&bench.b, room, Access::REMOTE_ALL).expect("a region");
        let target = remote.remote();
        let mut seen = vec![0; room];
        for (n, len) in SIZES.into_iter().enumerate() {
            // An odd place for all but the smallest.
            let at = EDGE - n % 8;
            let data: Vec<u8> = (0..len).map(|i| ((i * 31) ^ (i >> 9) ^ n) as u8).collect();
            let sum = checksum(&data);
            let span = at + len + EDGE;
            let mut check = |region: &MemoryRegion, what: &str| {
                region.read_at(0, &mut seen[..span]).expect("in range");
                assert_eq!(checksum(&seen[at..at + len]), sum, "{what} of {len} bytes");
                let canaries = seen[..at].iter().chain(&seen[at + len..span]);
                assert!(canaries.copied().all(|byte| byte == 0x5a), "{what} of {len} bytes wrote beside its target");
                region.fill(0..span, 0x5a).expect("in range");
            };
            for region in [&local, &remote] {
                region.fill(0..span, 0x5a).expect("in range");
            }
            local.write_at(at, &data).expect("in range");
            a.write(&local, at..at + len, &target, at as u64).expect("written");
            check(&remote, "a write");
            a.write_imm(&local, at..at + len, &target, at as u64, 7).expect("written");
            assert!(b.recv_buf().expect("told").is_empty());
            check(&remote, "a write with an immediate value");
            let half = a.sender();
            let ticket = half.post_write(&local, at..at + len, &target, at as u64, None).expect("posted");
            half.wait(ticket).expect("done");
            local.fill(0..span, 0x5a).expect("in range");
            a.read(&local, at..at + len, &target, at as u64).expect("read");
            check(&local, "a read");
            let half = a.sender();
            let ticket = half.post_read(&local, at..at + len, &target, at as u64).expect("posted");
            half.wait(ticket).expect("done");
            check(&local, "a posted read");
            check(&remote, "a posted write");
            if len <= 65536 {
                a.send(&data).expect("sent");
                assert_eq!(checksum(&b.recv_buf().expect("received")), sum, "a message of {len} bytes");
                let mut buf = a.alloc().expect("a buffer");
                buf.copy_from(&data).expect("fits");
                a.send_buf(buf).map_err(|(e, _)| e).expect("sent");
                let mut into = vec![0x5a; len + 9];
                assert_eq!(b.recv(&mut into).expect("received"), len);
                assert_eq!(checksum(&into[..len]), sum, "a message of {len} bytes in place");
                assert!(into[len..].iter().all(|&byte| byte == 0x5a));
            }
        }
    });
}
