//! rping against rping: rdma-core's and ours, in every combination.

use std::time::Duration;

use rdmacm_tests::process::{Finished, is_connected};
use rdmacm_tests::{Family, Kind, lab, wait_for};

/// Server and client, of which at least one is ours.
const PAIRS: [(Kind, Kind); 3] = [(Kind::C, Kind::Ours), (Kind::Ours, Kind::C), (Kind::Ours, Kind::Ours)];

const PATIENCE: Duration = Duration::from_secs(60);

/// One client pings one server, both with `arguments`, and both end well. Returns what server and client left.
#[track_caller]
fn ping(lab: &rdmacm_tests::Lab, pair: (Kind, Kind), family: Family, arguments: &str) -> (Finished, Finished) {
    let address = lab.server(family);
    let arguments = || arguments.split(' ').filter(|word| !word.is_empty());
    let mut server = pair.0.server(address, arguments());
    let mut client = pair.1.client(lab.seen_by_client(address), arguments());
    let client = client.finish(PATIENCE).expect_success();
    (server.finish(PATIENCE).expect_success(), client)
}

/// The lines that `-v` prints for `count` pings.
fn lines<'a>(output: &'a Finished, prefix: &str) -> Vec<&'a str> {
    output.stdout.lines().filter(|line| line.starts_with(prefix)).collect()
}

#[test]
fn all_pairs_ping_over_all_families() {
    let Some(lab) = lab(120) else { return };
    for family in [Family::V4, Family::V6, Family::LinkLocal] {
        for pair in PAIRS {
            let (server, client) = ping(&lab, pair, family, "-C 3 -v -V");
            let got = lines(&client, "ping data: rdma-ping-");
            assert_eq!(got.len(), 3, "{family:?}: {client}");
            assert!(got[2].starts_with("ping data: rdma-ping-2: CDEF"), "{family:?}: {client}");
            assert_eq!(lines(&server, "server ping data: rdma-ping-").len(), 3, "{family:?}: {server}");
        }
    }
}

#[test]
fn all_pairs_verify_a_thousand_pings() {
    let Some(lab) = lab(180) else { return };
    for pair in PAIRS {
        ping(&lab, pair, Family::V4, "-C 1000 -V");
    }
}

#[test]
fn all_pairs_verify_all_sizes() {
    let Some(lab) = lab(120) else { return };
    for server in Kind::ALL {
        let address = lab.server(Family::V4);
        let _server = server.server(address, ["-P", "-S", "65535"]);
        for client in Kind::ALL.into_iter().filter(|&client| PAIRS.contains(&(server, client))) {
            for size in [23, 64, 1023, 1024, 1025, 4096, 65535] {
                let client = client.client(address, ["-C", "3", "-V", "-v", "-S", &size.to_string()]);
                let client = { client }.finish(PATIENCE).expect_success();
                let got = lines(&client, "ping data: ");
                assert_eq!(got.len(), 3, "size {size}: {client}");
                assert!(got.iter().all(|line| line.len() == "ping data: ".len() + size - 1), "size {size}: {client}");
            }
        }
    }
}

#[test]
fn the_standard_output_is_that_of_the_c_programs() {
    let Some(lab) = lab(60) else { return };
    // 60 pings go once through all starts of the text, and two-digit numbers move it.
    for arguments in ["-C 60 -v -S 100", "-C 2 -v -S 23", "-C 2"] {
        let (c_server, c_client) = ping(&lab, (Kind::C, Kind::C), Family::V4, arguments);
        let (server, client) = ping(&lab, (Kind::Ours, Kind::Ours), Family::V4, arguments);
        assert_eq!(server.stdout, c_server.stdout, "{arguments}");
        assert_eq!(client.stdout, c_client.stdout, "{arguments}");
    }
}

#[test]
fn a_persistent_server_serves_eight_clients_of_both_kinds_at_once() {
    let Some(lab) = lab(120) else { return };
    for kind in Kind::ALL {
        let address = lab.server(Family::V4);
        let mut server = kind.server(address, ["-P"]);
        let clients: Vec<_> =
            (0..8).map(|number| Kind::ALL[number % 2].client(address, ["-C", "30", "-V", "-v"])).collect();
        for mut client in clients {
            let client = client.finish(PATIENCE).expect_success();
            assert_eq!(lines(&client, "ping data: ").len(), 30, "{client}");
        }
        assert!(!server.has_ended(), "a persistent server goes on");
        // And a late one, after all others have left.
        Kind::Ours.client(address, ["-C", "1", "-V"]).finish(PATIENCE).expect_success();
        server.kill();
    }
}

#[test]
fn a_wildcard_server_serves_its_family() {
    let Some(lab) = lab(60) else { return };
    for (wildcard, family) in [("0.0.0.0", Family::V4), ("::", Family::V6), ("::", Family::LinkLocal)] {
        let mut address = lab.server(family);
        let client_sees = lab.seen_by_client(address);
        address.set_ip(wildcard.parse().expect("a literal"));
        if let std::net::SocketAddr::V6(address) = &mut address {
            address.set_scope_id(0);
        }
        let _server = Kind::Ours.server(address, ["-P"]);
        for client in Kind::ALL {
            client.client(client_sees, ["-C", "2", "-V"]).finish(PATIENCE).expect_success();
        }
    }
}

#[test]
fn a_client_with_a_source_address_uses_it() {
    let Some(lab) = lab(60) else { return };
    let address = lab.server(Family::V4);
    let source = lab.client(Family::V4).ip().to_string();
    let mut server = Kind::Ours.server(address, ["-d"]);
    Kind::Ours.client(address, ["-C", "1", "-I", &source]).finish(PATIENCE).expect_success();
    let server = server.finish(PATIENCE).expect_success();
    assert!(server.stdout.contains(&format!("connected with {source}:")), "{server}");
}

#[test]
fn a_server_refuses_pings_larger_than_its_buffer() {
    let Some(lab) = lab(60) else { return };
    for kind in Kind::ALL {
        let address = lab.server(Family::V4);
        let mut server = Kind::Ours.server(address, ["-S", "64"]);
        // Both clients take the server's leaving for the end of the pings.
        kind.client(address, ["-C", "1", "-S", "65"]).finish(PATIENCE).expect_success();
        let server = server.finish(PATIENCE).expect_status(255);
        assert!(server.stderr.contains("65 bytes") && server.stderr.contains("64"), "{server}");
    }
}

#[test]
fn exit_statuses_are_those_of_the_c_program() {
    let Some(lab) = lab(60) else { return };
    for kind in Kind::ALL {
        // Nobody listens.
        let address = lab.server(Family::V4);
        let refused = kind.client(address, ["-C", "1"]).finish(PATIENCE).expect_status(255);
        if kind == Kind::Ours {
            assert!(refused.stderr.contains(&format!("{address} refused")), "{refused}");
        }
        // Wrong options.
        for arguments in [["-S", "22"], ["-S", "65536"], ["-C", "-1"], ["-t", "3"]] {
            kind.client(address, arguments).finish(PATIENCE).expect_status(22);
        }
        // The port is taken.
        let _server = Kind::C.server(address, [""; 0]);
        let mut second = kind.rping();
        second.args(["-s", "-a", &address.ip().to_string(), "-p", &address.port().to_string()]);
        rdmacm_tests::Program::start("a second server", second).finish(PATIENCE).expect_status(255);
    }
}

#[test]
fn rping_ends_soon_after_the_other_end_was_killed() {
    let Some(lab) = lab(60) else { return };
    // The kernel takes a killed process's memory and connections apart in no certain order: what comes first is either the
    // end of the connection, or the failure of an operation on memory that is gone.
    let ends = |mut program: rdmacm_tests::Program| {
        let finished = program.finish(Duration::from_secs(2));
        assert!(matches!(finished.status.code(), Some(0 | 255)), "{finished}");
    };
    for kind in Kind::ALL {
        let address = lab.server(Family::V4);
        let connected = || wait_for("the two to be connected", PATIENCE, || is_connected(address).then_some(()));
        let mut server = kind.server(address, [""; 0]);
        let client = Kind::Ours.client(address, [""; 0]);
        connected();
        server.kill();
        ends(client);

        let address = lab.server(Family::V4);
        let connected = || wait_for("the two to be connected", PATIENCE, || is_connected(address).then_some(()));
        let server = Kind::Ours.server(address, [""; 0]);
        let mut client = kind.client(address, [""; 0]);
        connected();
        client.kill();
        ends(server);
    }
}
