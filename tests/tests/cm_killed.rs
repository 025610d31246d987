//! A process is killed under load: the other side gets an error at once, and keeps nothing.

use std::env;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use rdmacm::verbs::{self, WorkStatus};
use rdmacm::{
    Access, Connection, ConnectionOptions, Connector, EndpointOptions, Error, Listener, ListenerBuilder, Manager,
    RemoteRegion, RetryPolicy,
};
use rdmacm_tests::{Family, Holdings, Program, child, lab, rounds, timed, wait_for};

/// Where the child connects to, or listens.
const ADDRESS: &str = "RDMACM_KILLED_ADDRESS";

/// What the surviving side does when its peer is killed.
#[derive(Clone, Copy, Debug)]
enum Load {
    /// Messages back and forth.
    Echo,
    /// Writes into the peer's memory, one after the other.
    Write,
    /// Reads from it.
    Read,
    /// Sends, and nobody receives: the send queue is full.
    Flood,
    /// Waits for a message that never comes.
    Wait,
}

const LOADS: [Load; 5] = [Load::Echo, Load::Write, Load::Read, Load::Flood, Load::Wait];

impl Load {
    /// Keeps the connection busy until it ends, and says when that was and why.
    fn until_the_end(self, mut connection: Connection) -> (Instant, Error) {
        let outcome = self.run(&mut connection);
        let end = Instant::now();
        let error = outcome.expect_err("only an error ends the load");
        let (_, took) = timed(|| drop(connection));
        assert!(took < Duration::from_secs(2), "{self:?}: dropping took {took:?}");
        (end, error)
    }

    fn run(self, connection: &mut Connection) -> Result<(), Error> {
        let mut encoded = [0; 24];
        connection.recv(&mut encoded)?;
        let remote = RemoteRegion::from_bytes(&encoded);
        let local = connection.register(4096, Access::LOCAL_WRITE)?;
        loop {
            match self {
                Self::Echo => connection.send(b"again").and_then(|()| connection.recv_buf().map(drop))?,
                Self::Write => connection.write(&local, 0..4096, &remote, 0)?,
                Self::Read => connection.read(&local, 0..4096, &remote, 0)?,
                Self::Flood => connection.send(&[0; 1024])?,
                Self::Wait => drop(connection.recv_buf()?),
            }
        }
    }
}

/// What the process does that will be killed: opens its memory, and answers the first messages, which are all in the case
/// of a flood.
fn serve(mut connection: Connection) -> Result<(), Error> {
    let region = connection.register(4096, Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE)?;
    connection.send(&region.remote().to_bytes())?;
    loop {
        let message = connection.recv_buf()?;
        if message.len() == 1024 {
            thread::sleep(Duration::from_secs(60));
        }
        connection.send(&message)?;
    }
}

fn options() -> ConnectionOptions {
    ConnectionOptions::new().endpoint(EndpointOptions::default().send_depth(16).recv_depth(8))
}

fn start_child(name: &str, address: SocketAddr) -> Program {
    let assignment = format!("{ADDRESS}={address}");
    child::start(&["env", &assignment], name)
}

fn address() -> SocketAddr {
    env::var(ADDRESS).expect("the parent sets it").parse().expect("an address")
}

#[test]
#[ignore = "the process that `either_side_notices_that_the_other_was_killed` kills"]
fn client_until_killed() -> Result<(), Error> {
    serve(Connector::new().options(options()).connect(address())?)
}

#[test]
#[ignore = "the process that `either_side_notices_that_the_other_was_killed` kills"]
fn server_until_killed() -> Result<(), Error> {
    serve(Listener::bind(address())?.accept()?)
}

/// Kills the child at some moment of the load.
#[track_caller]
fn kill_under_load(who: &str, round: usize, mut victim: Program, connection: Connection) {
    let load = LOADS[round % LOADS.len()];
    let busy = thread::spawn(move || load.until_the_end(connection));
    thread::sleep(Duration::from_millis(round as u64 * 7 % 60));
    assert!(!busy.is_finished(), "{who}, {load:?}: {:?}", busy.join());
    let killed = Instant::now();
    victim.kill();
    wait_for("the end of the load", Duration::from_secs(10), || busy.is_finished().then_some(()));
    let (end, error) = busy.join().expect("no panic");
    let took = end.saturating_duration_since(killed);
    println!("{who} killed, {load:?}: {error} after {took:?}");
    // The short run shares its machine with whatever else builds.
    let soon = Duration::from_millis(rounds(2000, 1000) as u64);
    assert!(took < soon, "{who}, {load:?}: noticed after {took:?}: {error}");
    let expected = match &error {
        // The kernel takes the dead process's memory away before its queue pair.
        Error::Verbs(verbs::Error::Work(work)) => {
            matches!(load, Load::Read | Load::Write) && work.status == WorkStatus::REMOTE_ACCESS
        }
        error => error.is_closed_by_peer(),
    };
    assert!(expected, "{who}, {load:?}: {error:?}");
}

#[test]
fn either_side_notices_that_the_other_was_killed() -> Result<(), Error> {
    let Some(lab) = lab(1800) else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    let mut before = None;
    for round in 0..rounds(5, 250) {
        let victim = start_child("client_until_killed", listener.local_addr());
        let accepted = listener.accept_timeout(Duration::from_secs(20))?;
        kill_under_load("client", round, victim, accepted);

        let address = lab.server(Family::V4);
        let victim = start_child("server_until_killed", address);
        let patient = RetryPolicy::new().limit(Duration::from_secs(20)).attempts(1000);
        let connected = Connector::new().options(options()).connect_with_retry(address, &patient)?;
        kill_under_load("server", round, victim, connected);

        match &before {
            // The first round opened the devices.
            None => before = Some(Holdings::now()),
            Some(before) => before.expect_unchanged(),
        }
    }
    Ok(())
}

/// A connection within this process, which is over at once.
fn connect_here(listener: &Listener) -> Result<(), Error> {
    thread::scope(|scope| {
        let client = scope.spawn(|| Connection::connect(listener.local_addr()));
        listener.accept_timeout(Duration::from_secs(5))?;
        client.join().expect("no panic").map(drop)
    })
}

#[test]
fn a_listener_outlives_clients_that_are_killed_while_they_connect() -> Result<(), Error> {
    let Some(lab) = lab(900) else { return Ok(()) };
    let manager = Manager::new()?;
    let listener = ListenerBuilder::new().manager(&manager).bind(lab.server(Family::V4))?;
    // Opens the devices.
    connect_here(&listener)?;
    let before = Holdings::now();
    let mut connected = 0;
    let rounds = rounds(6, 250);
    for round in 0..rounds {
        let requests = manager.counters().requests_received;
        let mut victim = start_child("client_until_killed", listener.local_addr());
        // Half of them find an acceptor that waits for them, the others wait in the queue.
        let accepting = (round % 2 == 0).then(|| {
            let acceptor = listener.acceptor();
            thread::spawn(move || acceptor.accept_timeout(Duration::from_secs(20)))
        });
        wait_for("the request", Duration::from_secs(20), || {
            (manager.counters().requests_received > requests).then_some(())
        });
        thread::sleep(Duration::from_millis(round as u64 / 2 % 5));
        victim.kill();
        let accepted = match accepting {
            // Whoever is killed before it is connected is passed over; the acceptor is there for the next one.
            Some(accepting) => {
                thread::sleep(Duration::from_millis(100));
                let next = (!accepting.is_finished()).then(|| Connector::new().connect(listener.local_addr()));
                let mut accepted = accepting.join().expect("no panic")?;
                if let Some(next) = next {
                    next?.send(b"the next")?;
                    assert_eq!(&*accepted.recv_buf()?, b"the next");
                }
                Ok(accepted)
            }
            None => listener.accept_timeout(Duration::from_millis(200)),
        };
        // Whoever came through is there, and ends.
        if let Ok(mut accepted) = accepted {
            connected += 1;
            let (outcome, took) = timed(|| {
                loop {
                    if let Err(error) = accepted.recv_buf_timeout(Duration::from_secs(5)) {
                        break error;
                    }
                }
            });
            assert!(outcome.is_closed_by_peer(), "round {round}: {outcome:?}");
            assert!(took < Duration::from_secs(2), "round {round}: {took:?}");
        }
    }
    println!("{connected} of {rounds} rounds had a connection");
    // The next good client is served.
    connect_here(&listener)?;
    before.expect_unchanged();
    Ok(())
}
