//! Completions that a probe takes off the queue reach the half that sends: none is lost, and nobody sleeps on it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use verbs::{Probe, Wait, WorkStatus};

use crate::{Rig, options, rig};

#[test]
fn a_half_that_sleeps_wakes_though_a_probe_took_its_completion() {
    for wait in [Wait::Sleep, Wait::Adaptive, Wait::Busy] {
        let Rig { endpoint, local, peer, device, .. } = rig(&options().send_depth(2).wait(wait));
        let control = endpoint.control();
        let (mut send, _recv) = endpoint.split();
        let over = AtomicBool::new(false);
        let mut probes = 0;
        thread::scope(|scope| {
            let over = &over;
            scope.spawn(move || {
                // At once, and with the completion delayed until the half sleeps.
                for round in 0..20_000_u32 {
                    let start = Instant::now();
                    send.write(&local, 0..8, &peer.remote(), 0).expect("written");
                    assert!(start.elapsed() < Duration::from_secs(5), "round {round}");
                }
                over.store(true, Ordering::SeqCst);
            });
            while !over.load(Ordering::SeqCst) {
                match control.probe() {
                    Probe::Sent => probes += 1,
                    Probe::Unanswered => {}
                    Probe::Broken => panic!("{:?}", control.cause()),
                }
            }
        });
        assert!(probes > 0);
        drop(device);
    }
}

#[test]
fn what_failed_is_accounted_for_though_a_probe_saw_it_first() {
    let Rig { endpoint, local, peer, device, .. } = rig(&options());
    let control = endpoint.control();
    let (mut send, _recv) = endpoint.split();
    device.hold.store(true, Ordering::SeqCst);
    let good = send.post_write(&local, 0..8, &peer.remote(), 0, None).expect("posted");
    let bad = send.post_read(&local, 0..8, &peer.remote(), 0).expect("posted");
    let late = send.post_read(&local, 0..8, &peer.remote(), 0).expect("posted");
    assert_eq!(control.probe(), Probe::Sent);
    assert_eq!(control.probe(), Probe::Unanswered);
    let mut count = 0;
    device.tamper(move |wc| {
        count += 1;
        wc.status = [0, 10, 5, 5, 5].get(count - 1).copied().unwrap_or(wc.status);
    });
    device.release(control.queue_pair());
    assert_eq!(control.probe(), Probe::Broken);
    let refused = |e: verbs::Error| matches!(e, verbs::Error::Work(w) if w.status == WorkStatus::REMOTE_ACCESS);
    send.wait(good).expect("done before the failure");
    assert!(refused(send.wait(bad).expect_err("failed")));
    assert!(refused(send.wait(late).expect_err("flushed")));
    assert_eq!(send.in_flight(), 0);
}

#[test]
fn a_probe_that_is_not_answered_stays_the_only_one() {
    let Rig { endpoint, device, .. } = rig(&options());
    let control = endpoint.control();
    device.hold.store(true, Ordering::SeqCst);
    assert_eq!(control.probe(), Probe::Sent);
    for _ in 0..1000 {
        assert_eq!(control.probe(), Probe::Unanswered);
    }
    device.release(control.queue_pair());
    assert_eq!(control.probe(), Probe::Sent, "the answer is seen, and the next one sent");
}
