//! Refusals, and ends of every kind, at every moment.

use std::env;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rdmacm::{CancelToken, Connection, Connector, Error, Listener, ListenerBuilder, Manager};
use rdmacm_tests::{Family, Holdings, child, lab, rounds, timed, wait_for};

const ADDRESS: &str = "RDMACM_CLOSING_ADDRESS";

/// How long a call may take that waits for nothing but the other end's program; the short run shares its machine with
/// whatever else builds.
fn soon() -> Duration {
    Duration::from_millis(rounds(2000, 1000) as u64)
}

/// Both ends of a connection.
fn pair(listener: &Listener) -> Result<(Connection, Connection), Error> {
    thread::scope(|scope| {
        let client = scope.spawn(|| Connection::connect(listener.local_addr()));
        let server = listener.accept_timeout(Duration::from_secs(10))?;
        Ok((client.join().expect("no panic")?, server))
    })
}

#[test]
fn a_refusal_carries_its_reason_and_a_dropped_request_is_one() -> Result<(), Error> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    for reason in [Some(&b"no more room, try 10.77.0.3"[..]), Some(&[0; 100][..]), Some(b""), None] {
        let (outcome, took) = thread::scope(|scope| {
            let client = scope.spawn(|| timed(|| Connection::connect(address)));
            let request = listener.request_timeout(Duration::from_secs(5))?;
            match reason {
                Some(reason) => request.reject(reason)?,
                None => drop(request),
            }
            Ok::<_, Error>(client.join().expect("no panic"))
        })?;
        let error = outcome.expect_err("refused");
        assert!(took < soon(), "{error} after {took:?}");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error:?}");
        let Error::Rejected { peer, private_data } = error else { panic!("{error:?}") };
        assert_eq!(peer, address);
        match reason {
            Some(reason) if !reason.is_empty() => assert_eq!(private_data.data(), Some(reason)),
            _ => assert_eq!(private_data.data(), None, "no reason was given"),
        }
    }
    Ok(())
}

#[test]
#[ignore = "the server of `a_server_that_ends_between_request_and_accept_refuses`"]
fn takes_a_request_and_ends() -> Result<(), Error> {
    let address: SocketAddr = env::var(ADDRESS).expect("the parent sets it").parse().expect("an address");
    let request = Listener::bind(address)?.request_timeout(Duration::from_secs(20))?;
    // Without a destructor, without a word.
    std::mem::forget(request);
    std::process::exit(0);
}

#[test]
fn a_server_that_ends_between_request_and_accept_refuses() -> Result<(), Error> {
    let Some(lab) = lab(120) else { return Ok(()) };
    for round in 0..rounds(2, 20) {
        let address = lab.server(Family::V4);
        let assignment = format!("{ADDRESS}={address}");
        let mut server = child::start(&["env", &assignment], "takes_a_request_and_ends");
        wait_for("the server to listen", Duration::from_secs(20), || {
            rdmacm_tests::process::is_listening(address).then_some(())
        });
        let (outcome, took) = timed(|| Connection::connect(address));
        let error = outcome.expect_err("the server ended");
        println!("round {round}: {error} after {took:?}");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error:?}");
        assert!(took < soon() * 2, "{error} after {took:?}");
        server.finish(Duration::from_secs(10));
    }
    Ok(())
}

#[test]
fn clients_that_give_up_at_any_moment_leave_the_listener_whole() -> Result<(), Error> {
    let Some(lab) = lab(300) else { return Ok(()) };
    let manager = Manager::new()?;
    let listener = ListenerBuilder::new().manager(&manager).bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    let (_, whole) = timed(|| pair(&listener).map(drop));
    let before = Holdings::now();
    let (rounds, established, end) = (rounds(60, 1000), AtomicUsize::new(0), CancelToken::new());
    thread::scope(|scope| -> Result<(), Error> {
        // The acceptor sees nothing of those who gave up, and whom it got it sees leave.
        let acceptor = scope.spawn(|| {
            loop {
                match listener.accept_cancellable(&end) {
                    Ok(mut accepted) => match accepted.recv_buf_timeout(Duration::from_secs(5)) {
                        Err(error) if error.is_closed_by_peer() => {}
                        Ok(message) => assert_eq!(&*message, b"here"),
                        Err(error) => panic!("a client that leaves is not {error:?}"),
                    },
                    Err(Error::Cancelled) => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
        });
        for round in 0..rounds {
            let token = CancelToken::new();
            let connector = Connector::new().cancel(&token);
            let connecting = scope.spawn(move || connector.connect(address));
            thread::sleep(whole.mul_f64(round as f64 / rounds as f64));
            let (outcome, took) = timed(|| {
                token.cancel();
                connecting.join().expect("no panic")
            });
            assert!(took < soon(), "round {round}: giving up took {took:?}");
            match outcome {
                Ok(connection) => {
                    established.fetch_add(1, Ordering::Relaxed);
                    connection.abort();
                }
                Err(Error::Cancelled) => {}
                Err(error) => panic!("round {round}: {error:?}"),
            }
        }
        let mut last = Connection::connect(address)?;
        last.send(b"here")?;
        last.disconnect()?;
        end.cancel();
        acceptor.join().expect("no panic")
    })?;
    println!("{} of {rounds} were connected before they gave up", established.into_inner());
    before.expect_unchanged();
    Ok(())
}

/// A close is seen by the other end of the same connection, and by nobody else.
#[test]
fn of_many_connections_each_sees_its_own_end() -> Result<(), Error> {
    let Some(lab) = lab(600) else { return Ok(()) };
    let (clients, lives) = (32, rounds(3, 200));
    let listener = Listener::bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    drop(pair(&listener)?);
    let before = Holdings::now();
    let served = AtomicUsize::new(0);
    thread::scope(|scope| -> Result<(), Error> {
        let acceptors: Vec<_> = (0..4)
            .map(|_| {
                let (acceptor, served) = (listener.acceptor(), &served);
                scope.spawn(move || -> Result<(), Error> {
                    loop {
                        let mut connection = match acceptor.accept_timeout(Duration::from_millis(300)) {
                            Ok(connection) => connection,
                            Err(Error::TimedOut { .. }) if served.load(Ordering::Relaxed) >= clients * lives => {
                                return Ok(());
                            }
                            Err(Error::TimedOut { .. }) => continue,
                            Err(error) => return Err(error),
                        };
                        served.fetch_add(1, Ordering::Relaxed);
                        // A thread for each: echoes until its client says that it leaves, and then expects its end.
                        scope.spawn(move || {
                            let message = connection.recv_buf().expect("the first message");
                            connection.send(&message).expect("the echo");
                            assert_eq!(&*connection.recv_buf().expect("who leaves says so before"), b"leaving");
                            let end = connection.recv_buf_timeout(Duration::from_secs(10));
                            let error = end.expect_err("nothing comes after that");
                            assert!(error.is_closed_by_peer(), "{error:?}");
                        });
                    }
                })
            })
            .collect();
        let clients: Vec<_> = (0..clients)
            .map(|client: usize| {
                scope.spawn(move || -> Result<(), Error> {
                    for life in 0..lives {
                        let mut connection = Connection::connect(address)?;
                        let message = vec![(client * 7 + life) as u8; 1024];
                        connection.send(&message)?;
                        assert_eq!(*connection.recv_buf()?, message);
                        // Whoever else closes meanwhile, this one lives.
                        thread::sleep(Duration::from_millis((client * 31 + life * 17) as u64 % 40));
                        assert!(connection.cause().is_none(), "{:?}", connection.cause());
                        connection.send(b"leaving")?;
                        if (client + life).is_multiple_of(2) {
                            connection.disconnect()?;
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        clients.into_iter().try_for_each(|client| client.join().expect("no panic"))?;
        acceptors.into_iter().try_for_each(|acceptor| acceptor.join().expect("no panic"))
    })?;
    assert_eq!(served.into_inner(), clients * lives);
    before.expect_unchanged();
    Ok(())
}

/// Who closes.
#[derive(Clone, Copy, Debug)]
enum Close {
    Client,
    Server,
    BothAtOnce,
    OneDropsWhileTheOtherDisconnects,
    TheOtherAfterwards,
}

#[test]
fn whoever_closes_both_are_content_at_once() -> Result<(), Error> {
    let Some(lab) = lab(300) else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    drop(pair(&listener)?);
    let before = Holdings::now();
    let mut slowest = Duration::ZERO;
    for round in 0..rounds(20, 1000) {
        for close in [
            Close::Client,
            Close::Server,
            Close::BothAtOnce,
            Close::OneDropsWhileTheOtherDisconnects,
            Close::TheOtherAfterwards,
        ] {
            let (client, server) = pair(&listener)?;
            let start = Instant::now();
            let barrier = Barrier::new(2);
            let outcomes = match close {
                Close::Client => {
                    let outcome = client.disconnect();
                    drop(server);
                    [outcome, Ok(())]
                }
                Close::Server => {
                    let outcome = server.disconnect();
                    drop(client);
                    [outcome, Ok(())]
                }
                Close::BothAtOnce | Close::OneDropsWhileTheOtherDisconnects => thread::scope(|scope| {
                    let other = scope.spawn(|| {
                        barrier.wait();
                        if matches!(close, Close::BothAtOnce) {
                            return server.disconnect();
                        }
                        drop(server);
                        Ok(())
                    });
                    barrier.wait();
                    [client.disconnect(), other.join().expect("no panic")]
                }),
                // The second one finds the connection closed already.
                Close::TheOtherAfterwards => [client.disconnect(), server.disconnect()],
            };
            let took = start.elapsed();
            slowest = slowest.max(took);
            for outcome in outcomes {
                outcome.unwrap_or_else(|error| panic!("round {round}, {close:?}: {error:?}"));
            }
            assert!(took < soon() * 2, "round {round}, {close:?}: {took:?}");
        }
    }
    println!("the slowest end took {slowest:?}");
    before.expect_unchanged();
    Ok(())
}

/// Whatever a handle has just learned, dropping it is quick, also while an error or a message of it is kept.
#[test]
fn dropping_right_after_any_event_is_quick() -> Result<(), Error> {
    let Some(lab) = lab(120) else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    drop(pair(&listener)?);
    let before = Holdings::now();
    let quick = |what: &str, took: Duration| assert!(took < soon(), "dropping after {what} took {took:?}");
    for _ in 0..rounds(3, 100) {
        // Established a moment ago, on either side.
        let (client, server) = pair(&listener)?;
        quick("established (client)", timed(|| drop(client)).1);
        quick("established, and its peer gone (server)", timed(|| drop(server)).1);
        // The peer left, and that is known; its last message, the event and the cause are kept.
        let (mut client, mut server) = pair(&listener)?;
        let mut events = server.events();
        client.send(b"kept")?;
        client.disconnect()?;
        let cause = events.wait_closed(Duration::from_secs(5))?;
        let message = server.recv_buf()?;
        quick("disconnected", timed(|| drop(server)).1);
        assert_eq!(&*message, b"kept");
        assert!(cause.is_closed_by_peer(), "{cause:?}");
        drop((message, events));
        // A request, while its client waits; and one whose client has gone.
        thread::scope(|scope| -> Result<(), Error> {
            let token = CancelToken::new();
            let connector = Connector::new().cancel(&token);
            let waiting = scope.spawn(move || connector.connect(address));
            let request = listener.request_timeout(Duration::from_secs(5))?;
            token.cancel();
            assert!(matches!(waiting.join().expect("no panic"), Err(Error::Cancelled)));
            quick("the client's end", timed(|| drop(request)).1);
            Ok(())
        })?;
        // A listener with a request in its queue.
        let short = Listener::bind(lab.server(Family::V4))?;
        let (nobody, impatient) = (short.local_addr(), Connector::new().deadline(Duration::from_secs(5)));
        thread::scope(|scope| {
            let waiting = scope.spawn(|| impatient.connect(nobody));
            thread::sleep(Duration::from_millis(30));
            quick("a request in the queue", timed(|| drop(short)).1);
            let error = waiting.join().expect("no panic").expect_err("the listener is gone");
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error:?}");
        });
        // A route that nobody uses, an attempt that times out, one that is refused.
        let (route, _) = timed(|| Connector::new().resolve(listener.local_addr()));
        quick("resolved", timed(|| drop(route)).1);
        let (outcome, took) =
            timed(|| Connector::new().deadline(Duration::from_millis(30)).connect(listener.local_addr()));
        assert!(matches!(outcome, Err(Error::TimedOut { .. })), "{outcome:?}");
        quick("a deadline", took);
        drop(listener.request_timeout(Duration::from_millis(200)));
        quick("a refusal", timed(|| Connector::new().connect(nobody)).1);
    }
    // A panic while connections are open lets them go, like any other end of their scope.
    let (client, mut server) = pair(&listener)?;
    let panicked = thread::spawn(move || {
        let _client = client;
        panic!("as the test wants it");
    })
    .join();
    assert!(panicked.is_err());
    let (outcome, took) = timed(|| server.recv_buf().map(drop));
    assert!(outcome.as_ref().is_err_and(Error::is_closed_by_peer), "{outcome:?}");
    quick("a panic of the peer's", took);
    drop(server);
    before.expect_unchanged();
    Ok(())
}
