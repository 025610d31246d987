//! Clients that stop in the middle of the handshake delay nobody but themselves.

use std::process::Command;
use std::thread;
use std::time::Duration;

use rdmacm::{Connection, Error, ListenerBuilder, Manager};
use rdmacm_tests::{Family, Holdings, Kind, Program, lab, rounds, timed, wait_for};

fn signal(program: &Program, name: &str) {
    let status = Command::new("kill").args([name, &program.id().to_string()]).status().expect("kill is there");
    assert!(status.success());
}

#[test]
fn a_client_that_stalls_in_its_handshake_delays_nobody() -> Result<(), Error> {
    let Some(lab) = lab(120) else { return Ok(()) };
    let manager = Manager::new()?;
    let listener = ListenerBuilder::new().manager(&manager).bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    let serve_one = || {
        thread::scope(|scope| {
            let client = scope.spawn(move || {
                let mut client = Connection::connect(address)?;
                client.send(b"served")?;
                client.disconnect()
            });
            let mut accepted = listener.accept_timeout(Duration::from_secs(20))?;
            assert_eq!(&*accepted.recv_buf()?, b"served");
            client.join().expect("no panic")
        })
    };
    // Opens the devices.
    serve_one()?;
    let before = Holdings::now();

    // These send their request, and are stopped before anybody answers it: no acknowledgement will come from them.
    let received = manager.counters().requests_received;
    let stalled: Vec<_> = (0..4).map(|_| Kind::C.client(lab.seen_by_client(address), ["-C", "1"])).collect();
    wait_for("all requests", Duration::from_secs(20), || {
        (manager.counters().requests_received == received + 4).then_some(())
    });
    for program in &stalled {
        signal(program, "-STOP");
    }
    // Whoever comes now is served at once, though those are before it in the queue: each of them takes 5 s.
    for _ in 0..3 {
        let (outcome, took) = timed(serve_one);
        outcome?;
        println!("served beside {} who stall, in {took:?}", stalled.len());
        let soon = Duration::from_millis(rounds(2000, 1000) as u64);
        assert!(took < soon, "somebody who stalls delayed the next client by {took:?}");
    }
    // Their end comes: they gave no answer in time, and are passed over.
    let outcome = listener.accept_timeout(Duration::from_secs(7));
    assert!(matches!(outcome, Err(Error::TimedOut { .. })), "{outcome:?}");
    let counters = manager.counters();
    assert_eq!(counters.ids_live, 1, "only the listener lives: {counters:?}");
    for mut program in stalled {
        // Who wakes learns that it is too late.
        signal(&program, "-CONT");
        let finished = program.finish(Duration::from_secs(10));
        assert!(!finished.status.success(), "{finished}");
    }
    serve_one()?;
    before.expect_unchanged();
    Ok(())
}
