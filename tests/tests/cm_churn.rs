//! Connections, listeners and memory that come and go, in every way: nothing stays, and nothing slows down.

use std::thread;
use std::time::{Duration, Instant};

use rdmacm::{Access, Connection, ConnectionOptions, Connector, Error, Listener, RemoteRegion};
use rdmacm_tests::{Family, Holdings, lab, leaks, rounds};

/// What memory may grow by after the warm-up, however many cycles there are.
const GROWTH: usize = 1024 * 1024;

/// Runs `cycle` many times after a warm-up, and checks that nothing stays behind and that the last cycles take no longer than
/// the first.
#[track_caller]
fn cycles(
    what: &str,
    warm_up: usize,
    count: usize,
    mut cycle: impl FnMut(usize) -> Result<(), Error>,
) -> Result<(), Error> {
    // One huge page below the stack of some thread would count as 2 MiB.
    nix::sys::prctl::set_thp_disable(true).expect("huge pages can be disabled");
    for number in 0..warm_up {
        cycle(number)?;
    }
    let before = Holdings::now();
    let (resident, pinned) = leaks::memory();
    let mut quarters = Vec::new();
    for quarter in 0..4 {
        let start = Instant::now();
        for number in 0..count.div_ceil(4) {
            cycle(quarter * count / 4 + number)?;
        }
        quarters.push(start.elapsed());
    }
    before.expect_unchanged();
    let (resident_now, pinned_now) = leaks::memory();
    let grown = resident_now.saturating_sub(resident);
    println!("{what}: {grown} bytes more after {count} cycles, which took {quarters:?}");
    assert!(pinned_now <= pinned, "{what}: pinned memory grew from {pinned} to {pinned_now} bytes");
    assert!(grown < GROWTH, "{what}: memory grew from {resident} to {resident_now} bytes in {count} cycles");
    // In the usual run, whatever else builds beside it makes the machine slow at times.
    let slower = quarters[2].min(quarters[3]).as_secs_f64() / quarters[0].min(quarters[1]).as_secs_f64();
    let allowed = rounds(8, 2) as f64;
    assert!(slower < allowed, "{what}: the later cycles took {slower:.1} times as long as the first: {quarters:?}");
    Ok(())
}

/// Both ends of a connection.
fn pair(listener: &Listener) -> Result<(Connection, Connection), Error> {
    thread::scope(|scope| {
        let client = scope.spawn(|| Connection::connect(listener.local_addr()));
        let server = listener.accept_timeout(Duration::from_secs(5))?;
        Ok((client.join().expect("no panic")?, server))
    })
}

#[test]
fn connect_echo_close_leaves_nothing_behind() -> Result<(), Error> {
    let Some(lab) = lab(900) else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    cycles("connect, echo, close", 50, rounds(200, 10_000), |number| {
        let (mut client, mut server) = pair(&listener)?;
        client.send(b"echo")?;
        let message = server.recv_buf()?;
        server.send(&message)?;
        drop(message);
        assert_eq!(&*client.recv_buf()?, b"echo");
        // Either side closes, in order or not.
        match number % 4 {
            0 => client.disconnect(),
            1 => server.disconnect(),
            2 => {
                drop(client);
                Ok(())
            }
            _ => {
                drop(server);
                Ok(())
            }
        }
    })
}

#[test]
fn what_ends_in_the_middle_leaves_nothing_behind() -> Result<(), Error> {
    let Some(lab) = lab(900) else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    let hasty = ConnectionOptions::new().drain_timeout(Duration::from_millis(5));
    cycles("dropped in the middle of transfers", 20, rounds(60, 5000), |number| {
        let (client, mut server) = thread::scope(|scope| {
            let client = scope.spawn(|| Connector::new().options(hasty.clone()).connect(listener.local_addr()));
            let server = listener.accept_timeout(Duration::from_secs(5))?;
            Ok::<_, Error>((client.join().expect("no panic")?, server))
        })?;
        let region = server.register(1 << 20, Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ)?;
        server.send(&region.remote().to_bytes())?;
        let local = client.register(1 << 20, Access::LOCAL_WRITE)?;
        let (mut send, mut recv) = client.split();
        let mut encoded = [0; 24];
        recv.recv(&mut encoded)?;
        let remote = RemoteRegion::from_bytes(&encoded);
        // Several are under way when the connection ends.
        for _ in 0..4 {
            let posted = match number % 2 {
                0 => send.post_write(&local, 0..1 << 20, &remote, 0, None),
                _ => send.post_read(&local, 0..1 << 20, &remote, 0),
            };
            if posted.is_err() {
                break;
            }
        }
        match number % 3 {
            0 => drop((send, recv)),
            1 => drop(server),
            // The memory goes first.
            _ => drop((region, recv, server, send)),
        }
        Ok(())
    })
}

#[test]
fn large_regions_that_come_and_go_leave_nothing_pinned() -> Result<(), Error> {
    let Some(lab) = lab(300) else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    let (client, _server) = pair(&listener)?;
    let size = rounds(4, 64) << 20;
    cycles("large regions", 2, rounds(8, 1000), |_| {
        let region = client.register(size, Access::LOCAL_WRITE)?;
        region.write_at(size - 4, b"last")?;
        Ok(())
    })
}

/// The port of a listener that went is free at once, whether or not its connections live on.
#[test]
fn a_port_can_be_bound_again_at_once() -> Result<(), Error> {
    let Some(lab) = lab(120) else { return Ok(()) };
    let address = lab.server(Family::V4);
    // Opens the devices.
    drop(pair(&Listener::bind(lab.server(Family::V4))?)?);
    let before = Holdings::now();
    let mut living = Vec::new();
    for round in 0..100 {
        let listener = Listener::bind(address).unwrap_or_else(|error| panic!("round {round}: {error:?}"));
        if round % 10 == 0 {
            living.push(pair(&listener)?);
        }
        drop(listener);
        // Nobody listens in between.
        if round % 10 == 1 {
            let error = Connection::connect(address).expect_err("the listener is gone");
            assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        }
    }
    for (client, server) in &mut living {
        client.send(b"without a listener")?;
        assert_eq!(&*server.recv_buf()?, b"without a listener");
    }
    drop(living);
    before.expect_unchanged();
    Ok(())
}
