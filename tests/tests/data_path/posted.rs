//! Operations that are posted and waited for later, notifications, immediate values, and sleeping in a poll loop.

use std::os::fd::{AsFd, BorrowedFd};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rdmacm::verbs::{
    Access, CloseReason, Endpoint, EndpointOptions, Error, MemoryRegion, Notification, Probe, RemoteRegion, Wait,
    WorkStatus,
};

use crate::bench::{Bench, options, watched};

const IMMEDIATES: [u32; 5] = [0, 1, 0x0102_0304, 0x89ab_cdef, 0xffff_ffff];

fn regions(bench: &Bench, len: usize) -> (MemoryRegion, MemoryRegion) {
    let local = MemoryRegion::new(&bench.a, len, Access::LOCAL_WRITE).expect("a region");
    let remote = MemoryRegion::new(&bench.b, len, Access::REMOTE_ALL).expect("a region");
    (local, remote)
}

fn contents(region: &MemoryRegion) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read_at(0, &mut bytes).expect("in range");
    bytes
}

#[test]
fn immediate_values_arrive_exactly_or_not_at_all() {
    watched(|bench| {
        let (mut a, mut b) = bench.pair(&options());
        let (local, remote) = regions(&bench, 4096);
        for imm in IMMEDIATES {
            for data in [&b""[..], b"seven b"] {
                a.send_imm(data, imm).expect("sent");
                let got = b.recv_buf().expect("received");
                assert_eq!((&got[..], got.imm(), got.written()), (data, Some(imm), None));
                a.send(data).expect("sent");
                let got = b.recv_buf().expect("received");
                assert_eq!((&got[..], got.imm(), got.written()), (data, None, None));
            }
            // Longer than a receive buffer, in one message; shorter; empty.
            for len in [4096, 8, 0] {
                local.fill(0..4096, imm as u8 ^ 0x33).expect("in range");
                remote.fill(0..4096, 0).expect("in range");
                a.write_imm(&local, 0..len, &remote.remote(), 0, imm).expect("written");
                let got = b.recv_buf().expect("told");
                assert_eq!((&got[..], got.imm(), got.written()), (&[][..], Some(imm), Some(len as u32)));
                let seen = contents(&remote);
                assert!(seen[..len].iter().all(|&x| x == imm as u8 ^ 0x33) && seen[len..].iter().all(|&x| x == 0));
            }
        }
        // An empty write that notifies needs no memory at the peer.
        a.write_imm(&local, 7..7, &RemoteRegion::new(0, 0, 0), 99, 5).expect("told");
        assert_eq!(b.recv_buf().expect("told").imm(), Some(5));
        a.write_imm(&local, 0..10, &remote.remote(), 0, 6).expect("written");
        assert_eq!(b.recv(&mut [0; 4]).expect("fits always"), 0);
    });
}

#[test]
fn notifications_need_no_buffers() {
    watched(|bench| {
        let receiver = options().notifications(true).recv_depth(8).message_size(1);
        let (mut a, mut b) = bench.pair_of(&options(), &receiver);
        let (local, remote) = regions(&bench, 1 << 20);
        assert!(matches!(b.receiver().try_recv_notification(), Err(Error::WouldBlock)));
        let wait = Duration::from_millis(20);
        assert!(matches!(b.receiver().recv_notification_timeout(wait), Err(Error::TimedOut(_))));
        assert!(matches!(b.recv_buf(), Err(Error::Misuse(_))));
        assert!(matches!(b.recv(&mut [0; 9]), Err(Error::Misuse(_))));
        assert!(matches!(a.receiver().try_recv_notification(), Err(Error::Misuse(_))));
        let sender = a.sender();
        for round in 0..100_u32 {
            for (len, imm) in [(1 << 20, round), (0, !round), (100, 7)] {
                let ticket = sender.post_write(&local, 0..len, &remote.remote(), 0, Some(imm)).expect("posted");
                let got = b.receiver().recv_notification().expect("told");
                assert_eq!(got, Notification { imm: Some(imm), len: len as u32 });
                sender.wait(ticket).expect("done");
            }
            sender.send(b"").expect("sent");
            assert_eq!(b.receiver().recv_notification().expect("told"), Notification { imm: None, len: 0 });
        }
        // A message that is not empty has no place.
        sender.send(b"x").expect("posted");
        let e = b.receiver().recv_notification().expect_err("too long");
        assert_eq!(e.kind(), std::io::ErrorKind::InvalidData, "{e}");
        assert!(sender.flush().is_err());
    });
}

#[test]
fn many_operations_in_flight_end_in_order_and_leave_exact_contents() {
    watched(|bench| {
        for (depth, every) in [(1, 0), (4, 0), (16, 0), (16, 5), (16, 100)] {
            let options = options().send_depth(depth).signal_every(every).wait(Wait::Sleep);
            let (mut a, _b) = bench.pair(&options);
            const PIECE: usize = 1025;
            const COUNT: usize = 100;
            let (local, remote) = regions(&bench, PIECE * COUNT);
            let pattern: Vec<u8> = (0..PIECE * COUNT).map(|i| (i ^ (i >> 8) ^ depth as usize) as u8).collect();
            local.write_at(0, &pattern).expect("in range");
            let target = remote.remote();
            let sender = a.sender();
            let mut tickets = Vec::new();
            for i in 0..COUNT {
                let at = i * PIECE;
                loop {
                    match sender.post_write(&local, at..at + PIECE, &target, at as u64, None) {
                        Ok(ticket) => break tickets.push(ticket),
                        Err(Error::WouldBlock) => {
                            assert!(sender.wait_any().expect("no failure") > 0);
                        }
                        Err(e) => panic!("{e}"),
                    }
                }
                assert!(sender.in_flight() <= depth as usize);
            }
            sender.wait(tickets[COUNT - 1]).expect("done");
            assert!(tickets.iter().all(|&t| sender.is_done(t)));
            assert!(contents(&remote) == pattern);
            // And back, one by one and all at once.
            local.fill(0..local.len(), 0).expect("in range");
            for i in (0..COUNT).rev() {
                let at = i * PIECE;
                match sender.post_read(&local, at..at + PIECE, &target, at as u64) {
                    Ok(ticket) if i % 7 == 0 => sender.wait_timeout(ticket, Duration::from_secs(10)).expect("done"),
                    Ok(_) => {}
                    Err(Error::WouldBlock) => {
                        sender.flush().expect("done");
                        let ticket = sender.post_read(&local, at..at + PIECE, &target, at as u64).expect("room");
                        let _ = ticket;
                    }
                    Err(e) => panic!("{e}"),
                }
            }
            sender.flush().expect("done");
            assert!(contents(&local) == pattern);
            assert_eq!((sender.try_progress().expect("no failure"), sender.in_flight()), (0, 0));
            assert_eq!(sender.wait_any().expect("nothing in flight"), 0);
        }
    });
}

#[test]
fn posting_refuses_what_cannot_be() {
    watched(|bench| {
        let (mut a, _b) = bench.pair(&options().send_depth(2));
        let (mut c, _d) = bench.pair(&options());
        let (local, remote) = regions(&bench, 20 << 20);
        let target = remote.remote();
        let misuse = |r: Result<_, Error>| assert!(matches!(r, Err(Error::Misuse(_))), "{r:?}");
        let sender = a.sender();
        misuse(sender.post_write(&local, 0..(20 << 20) + 1, &target, 0, None));
        misuse(sender.post_write(&local, 0..10, &target, (20 << 20) - 9, Some(1)));
        misuse(sender.post_write(&remote, 0..10, &target, 0, None));
        let unwritable = MemoryRegion::new(&bench.a, 100, Access::empty()).expect("a region");
        misuse(sender.post_read(&unwritable, 0..10, &target, 0));
        let max = bench.a.context().port(1).expect("port 1").max_message;
        if max < 10 << 20 {
            let e = sender.post_write(&local, 0..20 << 20, &target, 0, None).expect_err("more than two messages");
            assert!(matches!(e, Error::TooLong { limit, .. } if limit == 2 * max), "{e:?}");
        }
        // Nothing to do is over at once.
        let nothing = sender.post_write(&local, 5..5, &target, 0, None).expect("nothing");
        assert!(sender.is_done(nothing) && sender.in_flight() == 0);
        sender.wait(nothing).expect("done");
        let foreign = c.sender().post_write(&local, 0..8, &target, 0, None).expect("posted");
        misuse(sender.wait(foreign).map(|()| foreign));
        c.sender().wait(foreign).expect("done");
    });
}

#[test]
fn the_first_cause_is_kept_behind_eight_in_flight() {
    watched(|bench| {
        let (mut a, mut b) = bench.pair(&options());
        let (local, remote) = regions(&bench, 4096);
        let good = remote.remote();
        let bad = RemoteRegion::new(good.addr(), good.len(), good.rkey() ^ 1);
        let sender = a.sender();
        let before = sender.post_write(&local, 0..100, &good, 0, None).expect("posted");
        let first = sender.post_write(&local, 0..100, &bad, 0, None).expect("posted");
        let mut after = Vec::new();
        for i in 0..8 {
            // The failure may be known already, and then nothing more is posted.
            match i % 2 {
                0 => after.extend(sender.post_read(&local, 0..100, &good, 0)),
                _ => after.extend(sender.post_write(&local, 0..100, &good, 0, Some(i))),
            }
        }
        sender.wait(before).expect("what was before the failure was done");
        let refused = |e: &Error| matches!(e, Error::Work(w) if w.status == WorkStatus::REMOTE_ACCESS);
        let e = sender.wait(first).expect_err("refused");
        assert!(refused(&e), "{e:?}");
        for ticket in after {
            let e = sender.wait(ticket).expect_err("not carried out");
            assert!(refused(&e), "{e:?}");
        }
        sender.wait(before).expect("still done");
        for _ in 0..100 {
            assert!(refused(&sender.flush().expect_err("broken")));
            assert!(refused(&sender.post_write(&local, 0..8, &good, 0, None).expect_err("broken")));
            assert!(refused(&sender.wait_any().err().or(Some(e.clone())).expect("one of the two")));
            assert!(!sender.arm().expect("no new trouble"), "there is no sleeping any more");
        }
        assert_eq!(sender.in_flight(), 0);
        let e = b.recv_buf_timeout(Duration::from_secs(10)).expect_err("broken too");
        assert!(!matches!(e, Error::TimedOut(_)), "{e}");
    });
}

fn sleep_on(fds: &[BorrowedFd<'_>]) -> bool {
    let mut fds: Vec<_> = fds.iter().map(|&fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
    poll(&mut fds, PollTimeout::from(5_000_u16)).expect("poll") > 0
}

/// Echoes notifications in a poll loop of its own, until the connection is over.
fn echo_by_polling(endpoint: Endpoint, target: RemoteRegion, local: MemoryRegion) -> u32 {
    let (mut send, mut recv) = endpoint.split();
    let mut count = 0;
    loop {
        match recv.try_recv_notification() {
            Ok(Notification { imm, .. }) => {
                while let Err(e) = send.post_write(&local, 0..8, &target, 0, imm) {
                    assert!(matches!(e, Error::WouldBlock), "{e}");
                    while send.arm().expect("armed") {
                        assert!(sleep_on(&[send.as_fd(), send.closed_fd()]), "a completion without an event");
                    }
                }
                count += 1;
            }
            Err(Error::WouldBlock) => {
                if recv.arm().expect("armed") {
                    assert!(sleep_on(&[recv.as_fd(), recv.closed_fd()]), "a message without an event");
                }
            }
            Err(e) => {
                assert!(matches!(e, Error::Closed(CloseReason::Local)), "{e}");
                return count;
            }
        }
    }
}

#[test]
fn a_poll_loop_sleeps_and_misses_nothing() {
    watched(|bench| {
        let options = options().notifications(true).recv_depth(16).send_depth(3).message_size(1).wait(Wait::Sleep);
        let (mut a, b) = bench.pair(&options);
        let (local, remote) = regions(&bench, 4096);
        let (here, there) = (
            MemoryRegion::new(&bench.a, 64, Access::REMOTE_ALL).expect("a region"),
            MemoryRegion::new(&bench.b, 64, Access::LOCAL_WRITE).expect("a region"),
        );
        let control = b.control();
        let target = here.remote();
        let echo = thread::spawn(move || echo_by_polling(b, target, there));
        const ROUNDS: u32 = 2000;
        let mut sent = 0;
        for _ in 0..ROUNDS {
            let burst = sent % 3 + 1;
            for _ in 0..burst {
                a.sender().write_imm(&local, 0..64, &remote.remote(), 0, sent).expect("written");
                sent += 1;
            }
            for i in 0..burst {
                let start = Instant::now();
                let got = a.receiver().recv_notification_timeout(Duration::from_secs(5)).expect("echoed");
                assert_eq!(got.imm, Some(sent - burst + i));
                assert!(start.elapsed() < Duration::from_secs(2), "a stall of {:?}", start.elapsed());
            }
        }
        control.close(CloseReason::Local);
        assert_eq!(echo.join().expect("no panic"), sent);
    });
}

#[test]
fn probes_are_answered_while_the_halves_work_sleep_or_are_gone() {
    watched(|bench| {
        for round in 0..4 {
            let options = options().send_depth(1).wait(if round == 0 { Wait::Busy } else { Wait::Sleep });
            let (a, mut b) = bench.pair(&options);
            let control = a.control();
            let (mut send, recv) = a.split();
            let mut kept = Some(recv);
            let worker = match round {
                0 | 1 => Some(thread::spawn(move || {
                    for i in 0..500_u32 {
                        send.send(&i.to_ne_bytes()).expect("sent");
                        send.flush().expect("delivered");
                    }
                    send
                })),
                2 => {
                    // Nobody looks at the completions but the probes.
                    send.send(b"0000").expect("sent");
                    std::mem::forget(send);
                    None
                }
                _ => {
                    drop(send);
                    drop(kept.take());
                    None
                }
            };
            let reader = thread::spawn(move || {
                let count = match round {
                    0 | 1 => 500,
                    2 => 1,
                    _ => 0,
                };
                for _ in 0..count {
                    b.recv_buf().expect("received");
                }
                b
            });
            let (mut answered, start) = (0, Instant::now());
            while answered < 50 {
                assert!(start.elapsed() < Duration::from_secs(60), "{answered} probes answered");
                match control.probe() {
                    Probe::Sent => answered += 1,
                    Probe::Unanswered => thread::sleep(Duration::from_micros(200)),
                    Probe::Broken => panic!("{:?}", control.cause()),
                }
            }
            let b = reader.join().expect("no panic");
            drop(worker.map(|worker| worker.join().expect("no panic")));
            control.close(CloseReason::Unresponsive);
            assert_eq!(control.probe(), Probe::Broken);
            assert_eq!(control.cause().expect("closed").kind(), std::io::ErrorKind::TimedOut);
            drop(b);
        }
    });
}

#[test]
fn a_probe_finds_out_that_the_peer_is_gone() {
    watched(|mut bench| {
        (bench.path.ack_timeout, bench.path.retry_count) = (12, 3);
        for with_half in [false, true] {
            let (a, b) = bench.pair(&options());
            let control = a.control();
            let half = with_half.then_some(a);
            b.control().close(CloseReason::Local);
            drop(b);
            assert_eq!(control.probe(), Probe::Sent);
            let start = Instant::now();
            while control.probe() != Probe::Broken {
                assert!(start.elapsed() < Duration::from_secs(20), "the probe has no end");
                thread::sleep(Duration::from_millis(5));
            }
            let cause = control.cause().expect("broken");
            assert_eq!(cause.kind(), std::io::ErrorKind::TimedOut, "{cause}");
            if let Some(mut a) = half {
                assert_eq!(a.send(b"x").expect_err("broken").to_string(), cause.to_string());
                assert_eq!(a.recv_buf().expect_err("broken").to_string(), cause.to_string());
            }
        }
    });
}

#[test]
fn the_options_name_the_limit_that_they_exceed() {
    watched(|bench| {
        let device = bench.a.context().attributes().expect("attributes");
        type Set = fn(EndpointOptions, u32) -> EndpointOptions;
        let cases: [(&str, Set, u32); 2] = [
            ("send_depth", |o, n| o.send_depth(n), device.max_qp_wr),
            ("recv_depth", |o, n| o.recv_depth(n), device.max_qp_wr.saturating_add(1)),
        ];
        for (name, set, first_bad) in cases {
            for n in [first_bad, u32::MAX] {
                let small = options().message_size(1);
                let e = rdmacm::verbs::EndpointBuilder::new(&bench.a, &set(small, n)).expect_err("too deep");
                let text = e.to_string();
                assert!(text.contains(name) && text.contains("max_qp_wr"), "{text}");
                assert!(text.contains(&device.max_qp_wr.to_string()), "{text}");
            }
        }
        for inline in [0, 64, 512, 513, 4096, 1 << 20] {
            let (mut a, mut b) = bench.pair(&options().max_inline(inline));
            let granted = a.sender().inline_size();
            for len in [granted, granted + 1] {
                a.send(&vec![1; len]).expect("inline or not");
                assert_eq!(b.recv_buf().expect("received").len(), len);
            }
        }
    });
}
