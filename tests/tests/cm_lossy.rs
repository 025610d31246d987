//! A network that loses, delays, repeats and reorders packets: connections come up all the same, and every byte is right.

use std::thread;
use std::time::{Duration, Instant};

use rdmacm::{Access, Connection, ConnectionOptions, Connector, Error, ListenerBuilder, Manager, RemoteRegion};
use rdmacm_tests::{Family, Faults, Holdings, lab, rounds, timed};

const FAULTS: &str = "delay 5ms 2ms loss 5% duplicate 1% reorder 1%";
/// A lost message of the connection manager is sent again after 4 s.
const PATIENCE: Duration = Duration::from_secs(60);
const SIZE: usize = 8192;

/// A device that waits 17 ms before it sends again: the round trip takes at most 14 ms. A disconnect that is lost is sent again
/// by the kernel, as long as its id lives; a peer whose disconnect was lost for good is found by the keepalive.
fn options() -> ConnectionOptions {
    ConnectionOptions::new()
        .ack_timeout(Duration::from_millis(17))
        .disconnect_timeout(PATIENCE)
        .keepalive(Duration::from_secs(1), 5)
}

/// What is at `at` in the message with this number.
fn pattern(number: u64) -> impl Iterator<Item = u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[0]
    })
}

fn message(number: u64) -> Vec<u8> {
    pattern(number).take(1 + number as usize * 97 % 4000).collect()
}

/// Checks and answers every message, until the client leaves.
fn serve(mut connection: Connection) -> Result<u64, Error> {
    let region = connection.register(SIZE, Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE)?;
    connection.send(&region.remote().to_bytes())?;
    let mut number = 0;
    loop {
        match connection.recv_buf() {
            Ok(received) => assert_eq!(*received, message(number), "message {number} at the server"),
            Err(error) if error.is_closed_by_peer() => return Ok(number),
            Err(error) => return Err(error),
        }
        connection.send(&message(number))?;
        number += 1;
    }
}

/// Sends, writes and reads until `end`, several messages in flight, and checks everything.
fn exercise(mut connection: Connection, end: Instant) -> Result<u64, Error> {
    let mut encoded = [0; 24];
    connection.recv(&mut encoded)?;
    let remote = RemoteRegion::from_bytes(&encoded);
    let local = connection.register(2 * SIZE, Access::LOCAL_WRITE)?;
    let (mut number, mut read) = (0, vec![0; SIZE]);
    while Instant::now() < end {
        for ahead in 0..4 {
            connection.send(&message(number + ahead))?;
        }
        for ahead in 0..4 {
            assert_eq!(*connection.recv_buf()?, message(number + ahead), "message {} at the client", number + ahead);
        }
        number += 4;
        let written: Vec<u8> = pattern(!number).take(SIZE).collect();
        local.write_at(0, &written)?;
        connection.write(&local, 0..SIZE, &remote, 0)?;
        connection.read(&local, SIZE..2 * SIZE, &remote, 0)?;
        local.read_at(SIZE, &mut read)?;
        assert!(read == written, "what was read after message {number} is not what was written");
    }
    connection.disconnect()?;
    Ok(number)
}

#[test]
fn a_lossy_network_delays_and_corrupts_nothing() -> Result<(), Error> {
    let Some(lab) = lab(900) else { return Ok(()) };
    let Some(faults) = Faults::available() else { return Ok(()) };
    let manager = Manager::new()?;
    let accept = rdmacm::AcceptOptions::new().options(options());
    let listener =
        ListenerBuilder::new().manager(&manager).backlog(128).accept_options(accept).bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    let connector = Connector::new().manager(&manager).options(options()).deadline(PATIENCE);
    // Opens the devices.
    let connect = || {
        thread::scope(|scope| {
            let client = scope.spawn(|| connector.connect(address));
            let server = listener.accept_timeout(PATIENCE)?;
            Ok::<_, Error>((client.join().expect("no panic")?, server))
        })
    };
    drop(connect()?);
    let before = Holdings::now();
    faults.netem("v0", FAULTS);
    faults.netem("v1", FAULTS);

    // All at once: each handshake in which a message is lost takes 4 s more.
    let (all, start) = (rounds(12, 100), Instant::now());
    let traffic = Duration::from_secs(rounds(3, 60) as u64);
    let (connected, accepted) = thread::scope(|scope| -> Result<_, Error> {
        let clients: Vec<_> = (0..all)
            .map(|_| {
                let connector = &connector;
                scope.spawn(move || connector.connect(address))
            })
            .collect();
        // A server whose client's acknowledgement is late, and gives up before, is passed over.
        let accepting = scope.spawn(|| {
            let mut accepted = Vec::new();
            while accepted.len() < all {
                match listener.accept_timeout(PATIENCE) {
                    Ok(connection) => accepted.push(connection),
                    Err(error) => return Err((accepted.len(), error)),
                }
            }
            Ok(accepted)
        });
        let connected: Result<Vec<_>, _> = clients.into_iter().map(|client| client.join().expect("no panic")).collect();
        let connected = connected?;
        println!("{all} connects succeeded within {:?}", start.elapsed());
        let accepted = accepting.join().expect("no panic").expect("all clients are accepted");
        Ok((connected, accepted))
    })?;
    println!("{all} connections after {:?}", start.elapsed());

    // Four of them carry traffic, the others are idle, and stay.
    let (mut busy, mut idle) = (Vec::new(), Vec::new());
    for server in accepted {
        let client = connected.iter().position(|client| client.local_addr() == server.peer_addr());
        assert!(client.is_some(), "somebody's peer");
        if busy.len() < 4 { busy.push(server) } else { idle.push(server) }
    }
    let (mut clients, mut idle_clients) = (Vec::new(), Vec::new());
    for client in connected {
        let is_busy = busy.iter().any(|server| server.peer_addr() == client.local_addr());
        if is_busy { clients.push(client) } else { idle_clients.push(client) }
    }
    let end = Instant::now() + traffic;
    thread::scope(|scope| -> Result<(), Error> {
        let servers: Vec<_> = busy.into_iter().map(|server| scope.spawn(|| serve(server))).collect();
        let clients: Vec<_> = clients.into_iter().map(|client| scope.spawn(move || exercise(client, end))).collect();
        for client in clients {
            let messages = client.join().expect("no panic")?;
            println!("{messages} messages verified");
            assert!(messages > 0);
        }
        servers.into_iter().try_for_each(|server| server.join().expect("no panic").map(drop))
    })?;
    for connection in idle.iter().chain(&idle_clients) {
        assert!(connection.cause().is_none(), "a false disconnect: {:?}", connection.cause());
    }
    let counted = faults
        .run("tc -s qdisc show dev v0 | grep -o 'dropped [0-9]*'; tc -s qdisc show dev v1 | grep -o 'dropped [0-9]*'");
    println!("{counted}");
    assert!(!counted.contains("dropped 0\n"), "nothing was lost: {counted}");
    faults.heal();
    let (_, took) = timed(|| drop((idle, idle_clients)));
    println!("the others were dropped in {took:?}");
    before.expect_unchanged();
    Ok(())
}
