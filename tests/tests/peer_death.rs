//! The peer's process is killed while we wait.

use std::time::Duration;

use rdmacm::verbs::CloseReason;
use rdmacm::{Error, Listener, Result, verbs};
use rdmacm_tests::{Family, Holdings, Kind, lab, timed};

/// How soon a waiting call must know.
const SOON: Duration = Duration::from_secs(2);

#[test]
fn recv_ends_soon_after_the_peer_was_killed() -> Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    let mut before = None;
    for round in 0..3 {
        for kind in Kind::ALL {
            let mut client = kind.client(listener.local_addr(), [""; 0]);
            let mut connection = listener.accept()?;
            let mut message = [0; 64];
            // The client says where its memory is, and waits for our answer, which never comes.
            assert_eq!(connection.recv(&mut message)?, 16);

            let killer = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(100));
                client.kill();
            });
            let (result, took) = timed(|| connection.recv(&mut message));
            let error = result.expect_err("nothing was sent");
            assert!(took < SOON, "{kind:?}: recv took {took:?} to notice");
            assert!(
                matches!(error, Error::Verbs(verbs::Error::Closed(CloseReason::Peer))),
                "{kind:?}: a killed peer's kernel closes in its name, not {error:?}"
            );
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");

            // The cause stays, for every call, at once.
            let (again, took) = timed(|| (connection.recv(&mut message).map(drop), connection.send(b"anybody?")));
            assert!(matches!(again, (Err(Error::Verbs(verbs::Error::Closed(CloseReason::Peer))), Err(_))), "{again:?}");
            assert!(took < Duration::from_millis(100), "{took:?}");
            let (_, took) = timed(|| drop(connection));
            assert!(took < Duration::from_secs(1), "dropping took {took:?}");
            killer.join().expect("the killer does not panic");
        }
        // The first round opened the devices.
        match &before {
            None => before = Some(Holdings::now()),
            Some(before) => before.expect_unchanged(),
        }
        assert!(round < 3);
    }
    Ok(())
}

#[test]
fn a_client_in_recv_notices_that_its_server_was_killed() -> Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    for kind in Kind::ALL {
        let address = lab.server(Family::V4);
        let mut server = kind.server(address, [""; 0]);
        let mut connection = rdmacm::Connection::connect(address)?;
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            server.kill();
        });
        let (result, took) = timed(|| connection.recv(&mut [0; 64]));
        let error = result.expect_err("nothing was sent");
        assert!(took < SOON, "{kind:?}: recv took {took:?} to notice");
        assert!(error.is_closed_by_peer(), "{kind:?}: {error:?}");
        killer.join().expect("the killer does not panic");
    }
    Ok(())
}
