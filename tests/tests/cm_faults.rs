//! Networks that lose packets, peers that stop or vanish, listeners that nobody serves: every call ends in time, with the
//! cause, and nothing is left behind.

use std::net::SocketAddr;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rdmacm::{
    Access, CancelToken, CloseReason, Connection, ConnectionEvent, ConnectionOptions, Connector, Error, Listener,
    ListenerBuilder, Manager, RemoteRegion, RetryPolicy, TimedOutStep, verbs,
};
use rdmacm_tests::{Family, Faults, Holdings, Kind, Lab, lab, rounds, timed, wait_for};

const DEADLINE: Duration = Duration::from_secs(1);

/// Connects in vain with a deadline, many times; all that was held is given back.
#[track_caller]
fn times_out(address: SocketAddr, expected: TimedOutStep) -> Result<(), Error> {
    let rounds = rounds(3, 200);
    // How much later than its deadline a call may return; the short run shares its machine with whatever else builds.
    let late = Duration::from_millis(if rounds == 200 { 100 } else { 400 });
    let manager = Manager::new()?;
    let connector = Connector::new().manager(&manager).deadline(DEADLINE);
    let mut before = None;
    for round in 0..rounds {
        let (outcome, took) = timed(|| connector.connect(address));
        let error = outcome.expect_err("nobody answers");
        assert!(
            matches!(&error, Error::TimedOut { step, .. } if *step == expected),
            "round {round}: {error:?} instead of a timeout at {expected:?}"
        );
        assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
        assert!(took >= DEADLINE && took < DEADLINE + late, "round {round}: {error} after {took:?}");
        match &before {
            // The first round opened the device.
            None => before = Some(Holdings::now()),
            Some(before) => before.expect_own_unchanged(),
        }
    }
    assert_eq!(manager.counters().ids_live, 0);
    assert_eq!(manager.counters().connects_timed_out, rounds as u64);
    Ok(())
}

#[test]
fn connect_times_out_when_every_packet_is_lost() -> Result<(), Error> {
    let Some(lab) = lab(600) else { return Ok(()) };
    let Some(faults) = Faults::available() else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    faults.netem("v0", "loss 100%");
    // The C program suffers, too: it has no deadline of its own.
    let mut bitten = Kind::C.client(address, ["-C", "1"]);
    times_out(address, TimedOutStep::Connect)?;
    assert!(!bitten.has_ended(), "the fault does not bite: C's rping got through");
    bitten.kill();
    faults.heal();
    // The address is as good as before; of the requests that got through, those given up are passed over.
    thread::scope(|scope| {
        let client = scope.spawn(move || Connector::new().connect(address));
        listener.accept()?;
        client.join().expect("no panic").map(drop)
    })
}

#[test]
fn connect_times_out_when_the_listener_is_stopped() -> Result<(), Error> {
    let Some(lab) = lab(600) else { return Ok(()) };
    let address = lab.server(Family::V4);
    let mut server = Kind::C.server(address, [""; 0]);
    let signal = |name: &str| {
        let status = Command::new("kill").args([name, &server.id().to_string()]).status().expect("kill is there");
        assert!(status.success());
    };
    signal("-STOP");
    times_out(address, TimedOutStep::Connect)?;
    signal("-CONT");
    server.kill();
    Ok(())
}

#[test]
fn connect_times_out_when_nobody_has_the_address() -> Result<(), Error> {
    let Some(lab) = lab(600) else { return Ok(()) };
    let SocketAddr::V4(mut nobody) = lab.server(Family::V4) else { unreachable!("asked for IPv4") };
    let [a, b, c, _] = nobody.ip().octets();
    nobody.set_ip([a, b, c, 250].into());
    times_out(nobody.into(), TimedOutStep::Address)
}

/// A connection within this process.
fn pair(lab: &Lab, options: &ConnectionOptions) -> Result<(Connection, Connection), Error> {
    let listener = Listener::bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    thread::scope(|scope| {
        let client = scope.spawn(move || Connector::new().options(options.clone()).connect(address));
        let accepted = listener.accept()?;
        Ok((client.join().expect("no panic")?, accepted))
    })
}

#[test]
fn every_pending_call_fails_soon_when_the_peer_vanishes() -> Result<(), Error> {
    let Some(lab) = lab(120) else { return Ok(()) };
    let Some(faults) = Faults::available() else { return Ok(()) };
    let soon = Duration::from_secs(5);
    for what in ["flush", "write", "recv"] {
        let (mut client, mut server) = pair(&lab, &ConnectionOptions::new())?;
        let region = server.register(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        server.send(&region.remote().to_bytes())?;
        let mut encoded = [0; 24];
        client.recv(&mut encoded)?;
        let remote = RemoteRegion::from_bytes(&encoded);
        let local = client.register(4096, Access::LOCAL_WRITE)?;
        faults.run("pair_netem v0 loss 100%; pair_netem v1 loss 100%");
        let (outcome, took) = timed(|| match what {
            "flush" => client.send(b"lost").and_then(|()| client.flush()),
            "write" => client.write(&local, 0..4096, &remote, 0),
            // Something must be outstanding for the loss to be noticed.
            _ => client.send(b"lost").and_then(|()| client.recv_buf().map(drop)),
        });
        let error = outcome.expect_err("nothing arrives");
        assert!(took < soon, "{what}: {error} only after {took:?}");
        assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{what}: {error}");
        println!("{what}: {error} after {took:?}");
        let (_, took) = timed(|| drop(client));
        assert!(took < Duration::from_secs(2), "dropping took {took:?}");
        let (_, took) = timed(|| drop(server));
        assert!(took < Duration::from_secs(2), "dropping took {took:?}");
        faults.heal();
    }
    Ok(())
}

#[test]
fn keepalive_finds_a_peer_that_vanished_while_idle() -> Result<(), Error> {
    let Some(lab) = lab(120) else { return Ok(()) };
    let Some(faults) = Faults::available() else { return Ok(()) };
    let interval = Duration::from_millis(200);
    let options = ConnectionOptions::new().keepalive(interval, 3);
    let (mut client, mut server) = pair(&lab, &options)?;
    let mut events = client.events();
    // While the peer is there, nothing happens, and the connection can be used beside the probes.
    for _ in 0..20 {
        thread::sleep(interval / 4);
        client.send(b"alive")?;
        assert_eq!(&*server.recv_buf()?, b"alive");
    }
    thread::sleep(interval * 5);
    assert!(client.cause().is_none(), "{:?}", client.cause());
    assert!(matches!(events.next_timeout(Duration::from_millis(1)), Err(Error::TimedOut { .. })));

    faults.run("pair_netem v0 loss 100%; pair_netem v1 loss 100%");
    // The peer's disconnect is lost, too.
    server.abort();
    let (cause, took) = timed(|| events.wait_closed(Duration::from_secs(10)));
    let cause = cause?;
    assert!(
        matches!(cause, Error::Verbs(verbs::Error::Closed(CloseReason::Unresponsive))),
        "the keepalive found {cause:?}"
    );
    assert!(took < interval * 5, "found after {took:?}");
    println!("found after {took:?}");
    // Every call says the same.
    let error = client.recv_buf().expect_err("it is over");
    assert!(matches!(error, Error::Verbs(verbs::Error::Closed(CloseReason::Unresponsive))), "{error:?}");
    Ok(())
}

#[test]
fn a_changed_neighbour_is_advice_not_an_end() -> Result<(), Error> {
    let Some(lab) = lab(120) else { return Ok(()) };
    let Some(faults) = Faults::available() else { return Ok(()) };
    let (mut client, mut server) = pair(&lab, &ConnectionOptions::new())?;
    let mut events = client.events();
    let (mut changes, rounds) = (0, rounds(5, 50));
    for _ in 0..rounds {
        faults.run("ip neigh replace 10.77.0.2 lladdr 02:00:00:00:00:99 dev v0 nud permanent");
        if let Ok(Some(event)) = events.next_timeout(Duration::from_millis(500)) {
            assert!(matches!(event, ConnectionEvent::PathChanged), "{event:?}");
            changes += 1;
        }
        faults.run("pair_routes");
        client.send(b"still here")?;
        assert_eq!(&*server.recv_buf()?, b"still here");
        while let Ok(Some(event)) = events.next_timeout(Duration::from_millis(20)) {
            assert!(matches!(event, ConnectionEvent::PathChanged), "{event:?}");
        }
    }
    assert!(changes > 0, "the kernel never told");
    println!("{changes} of {rounds} changes were told");
    client.disconnect()
}

#[test]
fn a_full_queue_refuses_at_once_and_the_dead_are_not_handed_out() -> Result<(), Error> {
    let Some(lab) = lab(120) else { return Ok(()) };
    let manager = Manager::new()?;
    let listener = ListenerBuilder::new().manager(&manager).backlog(16).bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    let token = CancelToken::new();
    let connector = Connector::new().cancel(&token).deadline(Duration::from_secs(20));
    thread::scope(|scope| {
        let waiting: Vec<_> = (0..16)
            .map(|_| {
                let connector = &connector;
                scope.spawn(move || connector.connect(address))
            })
            .collect();
        wait_for("16 requests", Duration::from_secs(5), || (manager.counters().requests_received == 16).then_some(()));
        for _ in 0..8 {
            let (outcome, took) = timed(|| Connector::new().connect(address));
            let error = outcome.expect_err("the queue is full");
            assert!(matches!(error, Error::Rejected { .. }), "{error:?}");
            assert!(took < Duration::from_millis(500), "refused after {took:?}");
        }
        assert_eq!(manager.counters().requests_refused_queue_full, 8);

        // All who wait leave; they return at once.
        let (outcomes, took) = timed(|| {
            token.cancel();
            waiting.into_iter().map(|waiting| waiting.join().expect("no panic")).collect::<Vec<_>>()
        });
        assert!(took < Duration::from_secs(1), "cancelling took {took:?}");
        assert!(outcomes.iter().all(|outcome| matches!(outcome, Err(Error::Cancelled))), "{outcomes:?}");

        // Nobody of them is handed out: the one who comes now is served.
        let late = scope.spawn(move || -> Result<(), Error> {
            let mut client = Connector::new().connect_with_retry(address, &RetryPolicy::new().attempts(20))?;
            client.send(b"the living")?;
            client.disconnect()
        });
        let mut accepted = listener.accept_timeout(Duration::from_secs(10)).expect("one client lives");
        assert_eq!(&*accepted.recv_buf().expect("its message"), b"the living");
        late.join().expect("no panic").expect("it was served");
    });
    Ok(())
}

#[test]
fn a_blocked_accept_is_ended_by_its_token_and_by_the_end_of_its_listener() -> Result<(), Error> {
    let Some(lab) = lab(60) else { return Ok(()) };
    for round in 0..rounds(20, 1000) {
        let listener = Listener::bind(lab.server(Family::V4))?;
        let acceptors: Vec<_> = (0..2).map(|_| listener.acceptor()).collect();
        let token = CancelToken::new();
        thread::scope(|scope| {
            let blocked: Vec<_> = acceptors
                .iter()
                .map(|acceptor| scope.spawn(move || acceptor.accept().expect_err("nobody comes")))
                .collect();
            let cancelled = {
                let (acceptor, token) = (listener.acceptor(), token.clone());
                scope.spawn(move || acceptor.accept_cancellable(&token).expect_err("nobody comes"))
            };
            thread::sleep(Duration::from_millis(round as u64 % 3));
            let start = Instant::now();
            token.cancel();
            assert!(matches!(cancelled.join().expect("no panic"), Error::Cancelled));
            drop(listener);
            for blocked in blocked {
                let error = blocked.join().expect("no panic");
                assert!(matches!(error, Error::ListenerClosed), "{error:?}");
            }
            let took = start.elapsed();
            assert!(took < Duration::from_secs(1), "round {round}: {took:?}");
        });
    }
    Ok(())
}
