//! The device goes away, and comes back.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rdmacm::{Connection, Connector, Error, ListenerBuilder, Manager, verbs};
use rdmacm_tests::{Family, Faults, lab, rounds, timed};

/// Echoes until the connection ends, and says when it did and why.
fn echo(mut connection: Connection) -> (Instant, Error) {
    loop {
        let outcome = connection.recv_buf().and_then(|message| connection.send(&message));
        if let Err(error) = outcome {
            return (Instant::now(), error);
        }
    }
}

/// Asks for echoes until the connection ends.
fn ask(mut connection: Connection) -> (Instant, Error) {
    loop {
        let outcome = connection.send(b"again").and_then(|()| connection.recv_buf());
        if let Err(error) = outcome {
            return (Instant::now(), error);
        }
    }
}

#[test]
fn a_removed_device_ends_every_call_and_a_listener_serves_when_it_is_back() -> Result<(), Error> {
    let Some(lab) = lab(600) else { return Ok(()) };
    let Some(faults) = Faults::available() else { return Ok(()) };
    let connections = rounds(8, 64);
    // The long run has its machine to itself.
    let soon = Duration::from_secs(if connections == 64 { 1 } else { 3 });
    let server = lab.server(Family::V4);
    let manager = Manager::new()?;
    // A wildcard listener is bound to no device.
    let listener = ListenerBuilder::new().manager(&manager).bind(("0.0.0.0", server.port()))?;
    for round in 0..rounds(3, 20) {
        let established = AtomicUsize::new(0);
        thread::scope(|scope| {
            let mut ends = Vec::new();
            for _ in 0..connections {
                let client = {
                    let manager = &manager;
                    scope.spawn(move || Connector::new().manager(manager).connect(server))
                };
                let accepted = listener.accept().expect("the listener lives");
                let asking = client.join().expect("no panic").expect("the device is there");
                established.fetch_add(1, Ordering::Relaxed);
                ends.push(("server", scope.spawn(move || echo(accepted))));
                ends.push(("client", scope.spawn(move || ask(asking))));
            }
            // Both ends are busy; the server's device goes.
            thread::sleep(Duration::from_millis(200));
            let start = Instant::now();
            let took = faults.remove_device("rxe1", Duration::from_secs(10));
            assert!(took < Duration::from_secs(5), "round {round}: the removal took {took:?}");
            let mut latest = Duration::ZERO;
            for (who, end) in ends {
                let (when, error) = end.join().expect("no panic");
                let late = when.duration_since(start);
                assert!(late < soon, "round {round}: the {who} noticed after {late:?}: {error}");
                latest = latest.max(late);
                if who == "server" {
                    assert!(
                        matches!(error, Error::Verbs(verbs::Error::Closed(verbs::CloseReason::DeviceRemoved))),
                        "round {round}: the {who} got {error:?}"
                    );
                }
            }
            println!("round {round}: removed in {took:?}, noticed after at most {latest:?}");
        });
        assert_eq!(established.into_inner(), connections);

        // No device for the address: refused, not a hang.
        let (outcome, took) =
            timed(|| Connector::new().manager(&manager).deadline(Duration::from_secs(1)).connect(server));
        let error = outcome.expect_err("the server's device is gone");
        assert!(took < Duration::from_secs(2), "{error} after {took:?}");

        // The device comes back, and the same listener serves.
        faults.add_device("rxe1", "v1");
        let start = Instant::now();
        loop {
            let client = thread::scope(|scope| {
                let client =
                    scope.spawn(|| Connector::new().manager(&manager).deadline(Duration::from_secs(1)).connect(server));
                let accepted = listener.accept_timeout(Duration::from_secs(2));
                client.join().expect("no panic").and_then(|client| accepted.map(|accepted| (client, accepted)))
            });
            match client {
                Ok((mut client, mut accepted)) => {
                    client.send(b"back")?;
                    assert_eq!(&*accepted.recv_buf()?, b"back");
                    break;
                }
                Err(error) => {
                    let waited = start.elapsed();
                    assert!(waited < Duration::from_secs(5), "round {round}: not served after {waited:?}: {error}");
                }
            }
        }
        println!("round {round}: serving again after {:?}", start.elapsed());
    }
    let counters = manager.counters();
    assert!(counters.closed_by_device_removal > 0, "{counters:?}");
    Ok(())
}

#[test]
fn a_device_that_is_only_remembered_can_be_removed() -> Result<(), Error> {
    let Some(lab) = lab(120) else { return Ok(()) };
    let Some(faults) = Faults::available() else { return Ok(()) };
    let manager = Manager::new()?;
    {
        let listener = ListenerBuilder::new().manager(&manager).bind(lab.server(Family::V4))?;
        let address = listener.local_addr();
        thread::scope(|scope| {
            let client = scope.spawn(|| Connector::new().manager(&manager).connect(address));
            drop(listener.accept());
            drop(client.join().expect("no panic"));
        });
    }
    // The manager lives, and nothing of it is on the device: the kernel tells nobody of its removal.
    let took = faults.remove_device("rxe1", Duration::from_secs(10));
    faults.add_device("rxe1", "v1");
    assert!(took < Duration::from_secs(5), "the removal took {took:?}");
    println!("removed in {took:?}");
    Ok(())
}
