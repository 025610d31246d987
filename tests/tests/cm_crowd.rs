//! Many clients at once.

use std::env;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rdmacm::{Acceptor, CancelToken, Connection, ConnectionOptions, Connector, Error, ListenerBuilder, Manager};
use rdmacm_tests::process::is_listening;
use rdmacm_tests::{Family, Holdings, Program, child, lab, rounds, wait_for};

const ADDRESS: &str = "RDMACM_CROWD_ADDRESS";
const CLIENTS: &str = "RDMACM_CROWD_CLIENTS";
const MESSAGE: usize = 4096;
/// All must be served or refused within this time.
const SET_UP: Duration = Duration::from_secs(30);
/// All must be closed within this time.
const TEAR_DOWN: Duration = Duration::from_secs(10);

/// Connects, gets its echo, and waits until the server says that all are served. `false` if it was refused.
fn visit(address: SocketAddr, number: usize, start: &Barrier) -> Result<Option<Connection>, Error> {
    // The end of each takes as long as that of all, who leave at once.
    let options = ConnectionOptions::new().disconnect_timeout(TEAR_DOWN);
    let connector = Connector::new().deadline(SET_UP).options(options);
    start.wait();
    let mut connection = match connector.connect(address) {
        Ok(connection) => connection,
        Err(Error::Rejected { .. } | Error::Refused { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    let message: Vec<u8> = (0..MESSAGE).map(|at| (at * 7 + number) as u8).collect();
    connection.send(&message)?;
    assert_eq!(*connection.recv_buf()?, message);
    assert_eq!(&*connection.recv_buf()?, b"all are here");
    Ok(Some(connection))
}

#[test]
#[ignore = "a process with some of the clients of `a_crowd_is_served_and_leaves`"]
fn clients() {
    let address: SocketAddr = env::var(ADDRESS).expect("the parent sets it").parse().expect("an address");
    let clients: usize = env::var(CLIENTS).expect("the parent sets it").parse().expect("a number");
    let start = Barrier::new(clients);
    let (served, refused) = (Mutex::new(0), Mutex::new(0));
    thread::scope(|scope| {
        for number in 0..clients {
            let (start, served, refused) = (&start, &served, &refused);
            scope.spawn(move || match visit(address, number, start).expect("served or refused") {
                // All disconnect at once.
                Some(connection) => {
                    connection.disconnect().expect("an orderly end");
                    *served.lock().expect("no panic") += 1;
                }
                None => *refused.lock().expect("no panic") += 1,
            });
        }
    });
    println!("served {} refused {}", served.into_inner().expect("no panic"), refused.into_inner().expect("no panic"));
}

/// Accepts and echoes until all came.
fn accept(acceptor: &Acceptor, all: usize, accepted: &Mutex<Vec<Connection>>) -> Result<(), Error> {
    loop {
        let mut connection = match acceptor.accept_timeout(Duration::from_millis(200)) {
            Ok(connection) => connection,
            Err(Error::TimedOut { .. }) if accepted.lock().expect("no panic").len() >= all => return Ok(()),
            Err(Error::TimedOut { .. }) => continue,
            Err(error) => return Err(error),
        };
        let message = connection.recv_buf()?;
        connection.send(&message)?;
        accepted.lock().expect("no panic").push(connection);
    }
}

#[test]
fn a_crowd_is_served_and_leaves() -> Result<(), Error> {
    let Some(lab) = lab(300) else { return Ok(()) };
    let (processes, clients) = (rounds(4, 8), rounds(16, 64));
    let all = processes * clients;
    let manager = Manager::new()?;
    let listener = ListenerBuilder::new().manager(&manager).backlog(all).bind(lab.server(Family::V4))?;
    // Opens the server's device.
    thread::scope(|scope| {
        let client = scope.spawn(|| Connection::connect(listener.local_addr()));
        listener.accept()?;
        client.join().expect("no panic").map(drop)
    })?;
    let before = Holdings::now();

    let environment =
        [format!("{ADDRESS}={}", listener.local_addr()), format!("{CLIENTS}={clients}"), "RUST_BACKTRACE=0".to_owned()];
    let prefix: Vec<&str> = ["env"].into_iter().chain(environment.iter().map(String::as_str)).collect();
    let start = Instant::now();
    let mut crowd: Vec<Program> = (0..processes).map(|_| child::start(&prefix, "clients")).collect();
    let accepted = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let acceptors: Vec<_> = (0..4).map(|_| scope.spawn(|| accept(&listener.acceptor(), all, &accepted))).collect();
        acceptors.into_iter().try_for_each(|acceptor| acceptor.join().expect("no panic"))
    })?;
    let set_up = start.elapsed();
    assert!(set_up < SET_UP, "{all} clients were served only after {set_up:?}");

    let mut accepted = accepted.into_inner().expect("no panic");
    let start = Instant::now();
    accepted.iter_mut().try_for_each(|connection| connection.send(b"all are here"))?;
    let mut ends: Vec<_> = accepted.iter().map(Connection::events).collect();
    for end in &mut ends {
        let cause = end.wait_closed(TEAR_DOWN)?;
        assert!(cause.is_closed_by_peer(), "{cause:?}");
    }
    let left = start.elapsed();
    drop(accepted);
    let tear_down = start.elapsed();
    assert!(tear_down < TEAR_DOWN, "{all} clients left only after {tear_down:?}");
    for process in &mut crowd {
        let finished = process.finish(TEAR_DOWN).expect_success();
        assert!(finished.stdout.contains(&format!("served {clients} refused 0")), "{finished}");
    }
    before.expect_unchanged();
    assert_eq!(manager.counters().requests_accepted, all as u64 + 1);
    println!(
        "{all} clients of {processes} processes, which started meanwhile: served after {set_up:?}, gone after {left:?}, released after {tear_down:?}"
    );
    compare_with_cmtime(&lab.server(Family::V4), all);
    Ok(())
}

/// Prints what the C program measures for as many connections.
fn compare_with_cmtime(address: &SocketAddr, connections: usize) {
    let (host, port) = (address.ip().to_string(), address.port().to_string());
    let mut server = Command::new("cmtime");
    server.args(["-b", &host, "-p", &port]);
    let mut server = Program::start("cmtime server", server);
    wait_for("cmtime to listen", Duration::from_secs(10), || is_listening(*address).then_some(()));
    let mut client = Command::new("cmtime");
    client.args(["-s", &host, "-p", &port, "-c", &connections.to_string()]);
    let client = Program::start("cmtime client", client).finish(Duration::from_secs(60)).expect_success();
    println!("C's cmtime, {connections} connections:\n{}", client.stdout);
    server.kill();
}

/// Not all need be served: above what the listener admits they are refused, and who is refused knows it at once.
#[test]
fn a_crowd_above_the_backlog_is_refused_in_time() -> Result<(), Error> {
    let Some(lab) = lab(120) else { return Ok(()) };
    let listener = ListenerBuilder::new().backlog(8).bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    let clients = rounds(32, 200);
    let start = Barrier::new(clients);
    let acceptor = listener.acceptor();
    let (accepted, end) = (Mutex::new(Vec::new()), CancelToken::new());
    let (served, refused) = thread::scope(|scope| {
        // Slow: every one takes 10 ms.
        let (accepted, end) = (&accepted, &end);
        let server = scope.spawn(move || {
            while let Ok(connection) = acceptor.accept_cancellable(end) {
                accepted.lock().expect("no panic").push(connection);
                thread::sleep(Duration::from_millis(10));
            }
        });
        let clients: Vec<_> = (0..clients)
            .map(|_| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    Connection::connect(address)
                })
            })
            .collect();
        let mut refused = 0;
        let mut connected = Vec::new();
        for client in clients {
            match client.join().expect("no panic") {
                Ok(connection) => connected.push(connection),
                Err(Error::Rejected { .. }) => refused += 1,
                Err(error) => {
                    end.cancel();
                    panic!("neither served nor rejected: {error:?}");
                }
            }
        }
        wait_for("both sides to agree who was served", Duration::from_secs(10), || {
            (accepted.lock().expect("no panic").len() == connected.len()).then_some(())
        });
        end.cancel();
        server.join().expect("no panic");
        (connected.len(), refused)
    });
    println!("{served} served, {refused} refused");
    assert_eq!(served + refused, clients);
    assert!(served >= 8, "only {served} of {clients} were served");
    Ok(())
}
