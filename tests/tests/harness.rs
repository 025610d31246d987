//! The harness itself: what it promises to find, it finds.

use std::time::Duration;

use rdmacm::{Access, Connection, Listener, Result};
use rdmacm_tests::{Family, Holdings, Kind, lab};

/// A connected pair, client and server.
fn pair(listener: &Listener) -> Result<(Connection, Connection)> {
    std::thread::scope(|scope| {
        let client = scope.spawn(|| Connection::connect(listener.local_addr()));
        let server = listener.accept()?;
        Ok((client.join().expect("no panic")?, server))
    })
}

#[test]
fn every_kind_of_leak_is_found() -> Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    // The first connection opens both devices, which the libraries keep.
    drop(pair(&listener)?);
    let before = Holdings::now();

    let counts = |kind: &str, holdings: &Holdings| -> usize {
        let text = holdings.to_string();
        let part = text.split(", ").find_map(|part| part.strip_suffix(&format!(" {kind}")));
        part.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("no {kind} in {text}"))
    };
    let connection = pair(&listener)?;
    let region = connection.0.register(4096, Access::empty())?;
    let now = Holdings::now();
    for (kind, more) in [("files", 1), ("cm_id", 2), ("qp", 2), ("cq", 2), ("mr", 3)] {
        assert!(counts(kind, &now) >= counts(kind, &before) + more, "{kind}: before {before}, now {now}");
    }
    let soon = Duration::from_millis(300);
    assert!(before.unchanged_within(soon).is_err_and(|left| left.contains("left behind")), "a connection is open");
    drop(connection);
    assert!(before.unchanged_within(soon).is_err_and(|left| left.contains("left behind")), "a region is registered");
    drop(region);
    before.expect_unchanged();
    Ok(())
}

#[test]
fn a_killed_program_is_seen_to_have_ended() {
    let Some(lab) = lab(30) else { return };
    for kind in Kind::ALL {
        let mut server = kind.server(lab.server(Family::V6), [""; 0]);
        assert!(!server.has_ended());
        server.kill();
        assert!(server.has_ended());
    }
}
