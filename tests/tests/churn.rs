//! Connections that come and go leave nothing behind.

use std::thread;
use std::time::Duration;

use rdmacm::{Access, Connection, Connector, Error, Listener, Result};
use rdmacm_tests::{Family, Holdings, lab, leaks, rounds};

/// Answers one message of each client, until a client says so.
fn echo_until_told(listener: &Listener) -> Result<()> {
    loop {
        let mut connection = listener.accept()?;
        let mut message = [0; 64];
        let length = connection.recv(&mut message)?;
        connection.send(&message[..length])?;
        if &message[..length] == b"enough" {
            return Ok(());
        }
        // The client closes first; what it says last is that it has gone.
        match connection.recv(&mut message) {
            Err(error) if error.is_closed_by_peer() => {}
            other => panic!("a client that closes is not {other:?}"),
        }
    }
}

fn ping(connection: &mut Connection, message: &[u8]) -> Result<()> {
    let mut answer = [0; 64];
    connection.send(message)?;
    let length = connection.recv(&mut answer)?;
    assert_eq!(&answer[..length], message);
    Ok(())
}

#[test]
fn a_thousand_connections_leave_nothing_behind() -> Result<()> {
    let Some(lab) = lab(240) else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    let cycles = rounds(1000, 10_000);

    thread::scope(|scope| {
        let server = scope.spawn(|| echo_until_told(&listener));
        let cycle = |number: usize| {
            let mut connection = Connection::connect(address)?;
            ping(&mut connection, format!("ping {number}").as_bytes())?;
            // Both ways of closing.
            if number.is_multiple_of(2) { connection.disconnect() } else { Ok(()) }
        };
        // The first ones open the devices and fill the allocator's pools.
        for number in 0..100 {
            cycle(number)?;
        }
        let before = Holdings::now();
        let (resident, pinned) = leaks::memory();
        for number in 0..cycles {
            cycle(number)?;
        }
        before.expect_unchanged();
        let (resident_now, pinned_now) = leaks::memory();
        assert!(pinned_now <= pinned, "pinned memory grew from {pinned} to {pinned_now} bytes");
        // 64 bytes a cycle would be a leak; the allocator may keep some pages more.
        let allowed = 512 * 1024 + cycles * 32;
        assert!(
            resident_now < resident + allowed,
            "memory grew from {resident} to {resident_now} bytes in {cycles} cycles"
        );

        ping(&mut Connection::connect(address)?, b"enough")?;
        server.join().expect("the server does not panic")
    })
}

#[test]
fn connections_that_fail_leave_nothing_behind() -> Result<()> {
    let Some(lab) = lab(120) else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    let nobody = lab.server(Family::V4);

    let cycle = || {
        // Nobody listens.
        assert!(matches!(Connection::connect(nobody), Err(Error::Refused { .. })));
        // Resolved, memory registered, and not connected.
        Connector::new().resolve(address)?.register(4096, Access::LOCAL_WRITE)?;
        // Rejected.
        thread::scope(|scope| {
            let client = scope.spawn(|| Connection::connect(address));
            listener.request()?.reject(b"no")?;
            assert!(matches!(client.join().expect("no panic"), Err(Error::Rejected { .. })));
            Ok::<_, Error>(())
        })?;
        // The request is dropped.
        thread::scope(|scope| {
            let client = scope.spawn(|| Connection::connect(address));
            drop(listener.request()?);
            assert!(matches!(client.join().expect("no panic"), Err(Error::Rejected { .. })));
            Ok::<_, Error>(())
        })?;
        // The client gives up before it is answered.
        let impatient = Connector::new().deadline(Duration::from_millis(60));
        assert!(matches!(impatient.connect(address), Err(Error::TimedOut { .. })));
        match listener.request_timeout(Duration::from_secs(1)) {
            // Accepting it shows that it is gone.
            Ok(request) => drop(request.accept()),
            Err(error) => assert!(matches!(error, Error::TimedOut { .. }), "{error}"),
        }
        Ok::<_, Error>(())
    };
    for _ in 0..5 {
        cycle()?;
    }
    let before = Holdings::now();
    for _ in 0..rounds(50, 2000) {
        cycle()?;
    }
    before.expect_unchanged();
    Ok(())
}
