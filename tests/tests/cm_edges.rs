//! The longest, the largest and the least that a program can ask for.

use std::thread;
use std::time::Duration;

use rdmacm::{
    AcceptOptions, Access, Connection, ConnectionOptions, Connector, Error, Listener, ListenerBuilder, Manager,
    RetryPolicy, verbs,
};
use rdmacm_tests::{Family, Faults, lab, timed};

/// A connection within this process.
fn pair(listener: &Listener, connector: &Connector) -> Result<(Connection, Connection), Error> {
    let address = listener.local_addr();
    thread::scope(|scope| {
        let client = scope.spawn(move || connector.connect(address));
        let accepted = listener.accept_timeout(Duration::MAX)?;
        Ok((client.join().expect("no panic")?, accepted))
    })
}

#[test]
fn no_duration_and_no_backlog_is_too_large() -> Result<(), Error> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let manager = Manager::new()?;
    let endless = ConnectionOptions::new()
        .ack_timeout(Duration::from_millis(268))
        .rnr_timer(Duration::MAX)
        .drain_timeout(Duration::MAX)
        .disconnect_timeout(Duration::MAX)
        .keepalive(Duration::MAX, u32::MAX);
    let listener = ListenerBuilder::new()
        .manager(&manager)
        .backlog(usize::MAX)
        .queue_ttl(Duration::MAX)
        .accept_options(AcceptOptions::new().options(endless.clone()))
        .bind(lab.server(Family::V4))?;
    let connector = Connector::new().manager(&manager).deadline(Duration::MAX).options(endless);
    for _ in 0..2 {
        let (mut client, mut server) = pair(&listener, &connector)?;
        let mut events = client.events();
        client.send(b"still here")?;
        assert_eq!(&*server.recv_buf()?, b"still here");
        drop(server);
        let cause = events.wait_closed(Duration::MAX)?;
        assert!(cause.is_closed_by_peer(), "{cause:?}");
        drop(client);
    }
    let nobody = lab.server(Family::V4);
    let policy = RetryPolicy::new().attempts(1).pauses(Duration::MAX, Duration::MAX).limit(Duration::MAX);
    let outcome = connector.connect_with_retry(nobody, &policy);
    assert!(matches!(outcome, Err(Error::Refused { .. })), "{outcome:?}");
    assert_eq!(manager.counters().connects_established, 2);
    Ok(())
}

#[test]
fn a_connection_without_reads_refuses_them_at_once() -> Result<(), Error> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let none = ConnectionOptions::new().initiator_depth(0).responder_resources(0);
    let open = ConnectionOptions::new();
    // Whichever side forbids them.
    for (connecting, accepting) in [(&none, &open), (&open, &none)] {
        let accept = AcceptOptions::new().options(accepting.clone());
        let listener = ListenerBuilder::new().accept_options(accept).bind(lab.server(Family::V4))?;
        let (mut client, mut server) = pair(&listener, &Connector::new().options(connecting.clone()))?;
        let region = server.register(64, Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE)?;
        let local = client.register(64, Access::LOCAL_WRITE)?;
        let (outcome, took) = timed(|| client.read(&local, 0..64, &region.remote(), 0));
        assert!(matches!(outcome, Err(Error::Verbs(verbs::Error::Unsupported(_)))), "{outcome:?}");
        assert!(took < Duration::from_millis(500), "{took:?}");
        // Nothing else suffers.
        client.send(b"writes go on")?;
        assert_eq!(&*server.recv_buf()?, b"writes go on");
        client.write(&local, 0..64, &region.remote(), 0)?;
    }
    Ok(())
}

#[test]
fn an_acceptor_that_found_no_room_looks_again() -> Result<(), Error> {
    let Some(lab) = lab(120) else { return Ok(()) };
    let Some(faults) = Faults::available() else { return Ok(()) };
    let listener = ListenerBuilder::new().backlog(1).bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    // Handshakes take their time, so that the second acceptor finds the only place taken.
    faults.run("pair_netem v0 delay 100ms; pair_netem v1 delay 100ms");
    thread::scope(|scope| {
        let acceptors: Vec<_> = (0..2)
            .map(|_| {
                let acceptor = listener.acceptor();
                scope.spawn(move || {
                    let mut served = 0;
                    loop {
                        match acceptor.accept() {
                            Ok(_) => served += 1,
                            Err(error) => return (served, error),
                        }
                    }
                })
            })
            .collect();
        for _ in 0..4 {
            Connector::new().connect(address).expect("an acceptor waits");
        }
        faults.heal();
        let (_, took) = timed(|| drop(listener));
        assert!(took < Duration::from_secs(1), "{took:?}");
        let mut served = 0;
        for acceptor in acceptors {
            let (count, error) = acceptor.join().expect("no panic");
            assert!(matches!(error, Error::ListenerClosed), "{error:?}");
            served += count;
        }
        assert!(served >= 3, "{served} of 4 were served");
    });
    Ok(())
}

#[test]
fn the_clients_of_a_removed_device_end() -> Result<(), Error> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let Some(faults) = Faults::available() else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    let acceptor = listener.acceptor();
    let ended = thread::spawn(move || acceptor.incoming().count());
    thread::sleep(Duration::from_millis(100));
    let took = faults.remove_device("rxe1", Duration::from_secs(10));
    // The iteration ends, and does not tell the same error for ever.
    let clients = ended.join().expect("no panic");
    assert_eq!(clients, 0);
    drop(listener);
    faults.add_device("rxe1", "v1");
    println!("removed in {took:?}");
    Ok(())
}
