//! Bad input: the right kind of error and a text that helps, within a second, and nothing is left behind.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use rdmacm::verbs::{self, Opcode, WorkStatus};
use rdmacm::{
    AcceptOptions, Access, Connection, ConnectionOptions, Connector, EndpointOptions, Error, Listener, MAX_ACCEPT_DATA,
    MAX_CONNECT_DATA, MAX_REJECT_DATA, MemoryRegion, RemoteRegion, Result,
};
use rdmacm_tests::{Family, Holdings, Kind, Lab, lab, timed};

/// Runs `action` twice: first to open the devices, then with its time taken and its holdings compared. Returns the error of
/// the second.
#[track_caller]
fn fails<T: std::fmt::Debug>(limit: Duration, mut action: impl FnMut() -> Result<T>) -> Error {
    let _ = action();
    let before = Holdings::now();
    let (result, took) = timed(action);
    let error = result.expect_err("bad input is refused");
    assert!(took < limit, "it took {took:?}: {error}");
    before.expect_unchanged();
    error
}

const SECOND: Duration = Duration::from_secs(1);

/// The text has all of these words.
#[track_caller]
fn says(error: &Error, kind: ErrorKind, words: &[&str]) {
    assert_eq!(error.kind(), kind, "{error} ({error:?})");
    for word in words {
        assert!(error.to_string().contains(word), "no {word:?} in: {error}");
    }
    // A socket program gets the same, with ours inside.
    let error = std::io::Error::from(error.clone());
    assert_eq!(error.kind(), kind);
    assert!(error.get_ref().is_some_and(|inner| inner.is::<Error>()), "{error:?}");
}

/// Keeps the process's devices open, so that what is counted is only what the tested call holds.
fn open_devices(lab: &Lab) -> Result<Listener> {
    Listener::bind(lab.server(Family::V4))
}

#[test]
fn nobody_listens() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    let _devices = open_devices(&lab)?;
    for family in [Family::V4, Family::V6, Family::LinkLocal] {
        let address = lab.seen_by_client(lab.server(family));
        let error = fails(SECOND, || Connection::connect(address));
        assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        says(&error, ErrorKind::ConnectionRefused, &["nobody listens", &address.to_string()]);
    }
    // A listener that is gone is nobody.
    let listener = Listener::bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    drop(listener);
    says(&fails(SECOND, || Connection::connect(address)), ErrorKind::ConnectionRefused, &["nobody listens"]);
    Ok(())
}

#[test]
fn port_in_use() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    let taken = listener.local_addr();
    let wildcard = SocketAddr::new("0.0.0.0".parse().expect("a literal"), taken.port());
    for address in [taken, wildcard] {
        let error = fails(SECOND, || Listener::bind(address));
        assert!(matches!(error, Error::AddrInUse { .. }), "{error:?}");
        says(&error, ErrorKind::AddrInUse, &["in use", &address.to_string()]);
    }
    drop(listener);
    // Free again at once, and the other way round: a wildcard takes the port for all addresses.
    let listener = Listener::bind(wildcard)?;
    says(&fails(SECOND, || Listener::bind(taken)), ErrorKind::AddrInUse, &["in use"]);
    drop(listener);

    // Another process.
    for kind in Kind::ALL {
        let address = lab.server(Family::V4);
        let mut server = kind.server(address, ["-P"]);
        says(&fails(SECOND, || Listener::bind(address)), ErrorKind::AddrInUse, &["in use"]);
        server.kill();
        drop(Listener::bind(address)?);
    }
    Ok(())
}

#[test]
fn an_address_of_another_host() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    let _devices = open_devices(&lab)?;
    let error = fails(SECOND, || Listener::bind("192.0.2.1:7471"));
    says(&error, ErrorKind::AddrNotAvailable, &["none of this host's interfaces"]);
    Ok(())
}

#[test]
fn loopback() -> Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let _devices = open_devices(&lab)?;
    for address in ["127.0.0.1:7471", "127.0.0.1:0", "[::1]:7471", "localhost:7471"] {
        let error = fails(SECOND, || Listener::bind(address));
        assert!(matches!(error, Error::Loopback(_)), "{address}: {error:?}");
        says(&error, ErrorKind::AddrNotAvailable, &["loopback", "rdma link", "0.0.0.0"]);
    }
    for address in ["127.0.0.1:7471", "[::1]:7471", "localhost:7471"] {
        let error = fails(SECOND, || Connection::connect(address));
        says(&error, ErrorKind::AddrNotAvailable, &["loopback", "rdma link"]);
    }
    Ok(())
}

#[test]
fn unknown_host() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    let _devices = open_devices(&lab)?;
    for address in ["no-such-host.invalid:7471", "no such host:7471"] {
        says(&fails(SECOND, || Connection::connect(address)), ErrorKind::NotFound, &["lookup"]);
        says(&fails(SECOND, || Listener::bind(address)), ErrorKind::NotFound, &["lookup"]);
    }
    says(&fails(SECOND, || Connection::connect("10.1.2.3")), ErrorKind::InvalidInput, &["host and port"]);
    Ok(())
}

#[test]
fn link_local_without_its_interface() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    let _devices = open_devices(&lab)?;
    let mut address = lab.server(Family::LinkLocal);
    let SocketAddr::V6(unscoped) = &mut address else { panic!("{address} is of IPv6") };
    unscoped.set_scope_id(0);
    // Connecting without one is left to the kernel, which may find the only link there is.
    let error = fails(SECOND, || Listener::bind(address));
    says(&error, ErrorKind::InvalidInput, &["fe80::1%"]);
    Ok(())
}

#[test]
fn private_data_one_byte_too_long() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    let long = |limit: usize| vec![1; limit + 1];
    let check = |error: &Error, limit: usize| {
        assert!(matches!(error, Error::PrivateDataTooLong { .. }), "{error:?}");
        says(error, ErrorKind::InvalidInput, &[&limit.to_string(), &(limit + 1).to_string()]);
    };

    let error = fails(SECOND, || Connector::new().private_data(&long(MAX_CONNECT_DATA)).connect(address));
    check(&error, MAX_CONNECT_DATA);
    let error = fails(SECOND, || Connector::new().private_data_raw(&long(56)).connect(address));
    check(&error, 56);
    assert!(
        matches!(listener.request_timeout(Duration::from_millis(100)), Err(Error::TimedOut { .. })),
        "nothing was sent"
    );
    // A route survives the refusal.
    let mut route = Connector::new().resolve(address)?;
    check(&route.private_data(&long(MAX_CONNECT_DATA)).expect_err("too long"), MAX_CONNECT_DATA);
    route.private_data(&[1; MAX_CONNECT_DATA])?;
    thread::scope(|scope| {
        let client = scope.spawn(|| route.connect());
        listener.accept()?;
        client.join().expect("no panic")
    })?;

    // Accept and reject: the client is not left waiting.
    for (limit, data) in [(MAX_ACCEPT_DATA, long(MAX_ACCEPT_DATA)), (MAX_REJECT_DATA, long(MAX_REJECT_DATA))] {
        thread::scope(|scope| {
            let client = scope.spawn(|| timed(|| Connection::connect(address)));
            let request = listener.request()?;
            let error = if limit == MAX_ACCEPT_DATA {
                request.accept_with(&AcceptOptions::new().private_data(&data)).map(drop)
            } else {
                request.reject(&data)
            };
            check(&error.expect_err("too long"), limit);
            let (result, took) = client.join().expect("no panic");
            says(&result.expect_err("it was refused"), ErrorKind::ConnectionRefused, &["rejected"]);
            assert!(took < SECOND, "{took:?}");
            Ok::<_, Error>(())
        })?;
    }
    Ok(())
}

/// A connected pair, client and server, whose ends may differ.
fn pair(lab: &Lab, client: EndpointOptions, server: EndpointOptions) -> Result<(Connection, Connection)> {
    let listener = Listener::bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    let options = |endpoint| ConnectionOptions::new().endpoint(endpoint);
    thread::scope(|scope| {
        let accepted = scope.spawn(|| listener.request()?.accept_with(&AcceptOptions::new().options(options(server))));
        let client = Connector::new().options(options(client)).connect(address)?;
        Ok((client, accepted.join().expect("no panic")?))
    })
}

fn default_pair(lab: &Lab) -> Result<(Connection, Connection)> {
    pair(lab, EndpointOptions::default(), EndpointOptions::default())
}

/// The failed operation behind an error.
#[track_caller]
fn work(error: &Error) -> &verbs::WorkError {
    match error {
        Error::Verbs(verbs::Error::Work(work)) => work,
        other => panic!("a failed operation was expected, not {other:?}"),
    }
}

#[test]
fn a_message_larger_than_the_receive_buffer() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    let _devices = open_devices(&lab)?;
    let round = || {
        let small = EndpointOptions::default().message_size(1000);
        let (mut client, mut server) = pair(&lab, EndpointOptions::default(), small)?;

        // More than this end's own buffers: refused here, and nothing has happened.
        let error = server.send(&[0; 1001]).expect_err("too long");
        says(&error, ErrorKind::InvalidInput, &["1001", "1000"]);
        server.send(b"still alive")?;
        assert_eq!(client.recv(&mut [0; 16])?, 11);

        // More than the peer's buffers: both ends learn it, and the connection is over.
        let (result, took) = timed(|| client.send(&[0; 1001]).and_then(|()| client.flush()));
        let error = result.expect_err("the peer has no room");
        // Hardware tells the first, Soft-RoCE the second.
        let told = [WorkStatus::REMOTE_INVALID_REQUEST, WorkStatus::REMOTE_OPERATION];
        assert!(told.contains(&work(&error).status), "{error:?}");
        assert!(error.to_string().contains("larger than its receive buffer"), "{error}");
        assert!(took < SECOND, "{took:?}");

        let (result, took) = timed(|| server.recv(&mut [0; 2000]));
        let error = result.expect_err("it did not fit");
        let told = [WorkStatus::LOCAL_LENGTH, WorkStatus::LOCAL_OPERATION];
        assert!(told.contains(&work(&error).status), "{error:?}");
        says(&error, ErrorKind::InvalidData, &["larger than the receive buffer", "1000"]);
        assert!(took < SECOND, "{took:?}");
        Ok::<_, Error>(())
    };
    round()?;
    let before = Holdings::now();
    round()?;
    before.expect_unchanged();
    Ok(())
}

/// What a client does with the server's region, and must not be allowed to.
type Attack = fn(&mut Connection, &MemoryRegion, &RemoteRegion) -> Result<()>;

/// The server opens a region with `access` between guards; the attack must fail at the peer, in time, and change nothing.
#[track_caller]
fn peer_refuses(lab: &Lab, access: Access, opcode: Opcode, attack: Attack) -> Result<()> {
    let _devices = open_devices(lab)?;
    let round = || {
        let (mut client, mut server) = default_pair(lab)?;
        let target = server.register(4096, access | Access::LOCAL_WRITE)?;
        target.fill(0..4096, 0x5a)?;
        let local = client.register(8192, Access::LOCAL_WRITE)?;
        local.fill(0..8192, 0xa5)?;

        let (result, took) = timed(|| attack(&mut client, &local, &target.remote()));
        let error = result.expect_err("the peer's memory is protected");
        assert!(took < SECOND, "{took:?}");
        assert_eq!((work(&error).status, work(&error).opcode), (WorkStatus::REMOTE_ACCESS, opcode), "{error}");
        says(&error, ErrorKind::PermissionDenied, &["refused the access"]);
        // The cause stays.
        let again = client.send(b"anybody?").expect_err("the connection is over");
        assert_eq!(work(&again).status, WorkStatus::REMOTE_ACCESS, "{again}");

        let mut seen = vec![0; 4096];
        target.read_at(0, &mut seen)?;
        assert!(seen.iter().all(|&byte| byte == 0x5a), "the target has changed");
        let mut seen = vec![0; 8192];
        local.read_at(0, &mut seen)?;
        assert!(seen.iter().all(|&byte| byte == 0xa5), "the local memory has changed");

        // The server learns that it is over, too.
        drop(client);
        let (result, took) = timed(|| server.recv(&mut [0; 16]));
        result.expect_err("the connection is over");
        assert!(took < SECOND, "{took:?}");
        Ok::<_, Error>(())
    };
    round()?;
    let before = Holdings::now();
    round()?;
    before.expect_unchanged();
    Ok(())
}

const OPEN: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// The peer's region, but with a length, address and key of our choice.
fn forged(region: &RemoteRegion, before: u64, longer: u64, key: u32) -> RemoteRegion {
    RemoteRegion::new(region.addr() - before, region.len() + before + longer, region.rkey().wrapping_add(key))
}

#[test]
fn a_write_past_the_regions_end_is_refused_here() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    let (mut client, mut server) = default_pair(&lab)?;
    let target = server.register(4096, OPEN | Access::LOCAL_WRITE)?;
    let local = client.register(4096, Access::LOCAL_WRITE)?;
    let remote = target.remote();
    for (range, offset) in [(0..4096, 1), (0..1, 4096), (0..2, 4095), (0..4096, u64::MAX), (0..0, 4097)] {
        for error in
            [client.write(&local, range.clone(), &remote, offset), client.read(&local, range.clone(), &remote, offset)]
        {
            let error = error.expect_err("outside");
            assert!(matches!(error, Error::Verbs(verbs::Error::Misuse(_))), "{error:?}");
            says(&error, ErrorKind::InvalidInput, &["4096"]);
        }
    }
    // So is what lies outside the local region.
    for range in [0..4097, 4096..4097, usize::MAX - 1..usize::MAX] {
        says(&client.write(&local, range, &remote, 0).expect_err("outside"), ErrorKind::InvalidInput, &["4096"]);
    }
    // Nothing was sent, and the connection is as good as before.
    client.write(&local, 0..4096, &remote, 0)?;
    client.send(b"fine")?;
    assert_eq!(server.recv(&mut [0; 16])?, 4);
    Ok(())
}

#[test]
fn a_write_past_the_regions_end_is_refused_by_the_peer() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    peer_refuses(&lab, OPEN, Opcode::Write, |client, local, region| {
        client.write(local, 0..4097, &forged(region, 0, 1, 0), 0)
    })?;
    peer_refuses(&lab, OPEN, Opcode::Write, |client, local, region| {
        client.write(local, 0..8, &forged(region, 8, 0, 0), 0)
    })?;
    peer_refuses(&lab, OPEN, Opcode::Read, |client, local, region| {
        client.read(local, 0..4097, &forged(region, 0, 1, 0), 0)
    })
}

#[test]
fn a_wrong_key() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    peer_refuses(&lab, OPEN, Opcode::Write, |client, local, region| {
        client.write(local, 0..8, &forged(region, 0, 0, 1), 0)
    })?;
    peer_refuses(&lab, OPEN, Opcode::Read, |client, local, region| {
        client.read(local, 0..8, &forged(region, 0, 0, 1), 0)
    })
}

#[test]
fn a_region_without_remote_rights() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    peer_refuses(&lab, Access::empty(), Opcode::Write, |client, local, region| client.write(local, 0..8, region, 0))?;
    peer_refuses(&lab, Access::empty(), Opcode::Read, |client, local, region| client.read(local, 0..8, region, 0))?;
    peer_refuses(&lab, Access::REMOTE_READ, Opcode::Write, |client, local, region| {
        client.write(local, 0..8, region, 0)
    })?;
    peer_refuses(&lab, Access::REMOTE_WRITE, Opcode::Read, |client, local, region| client.read(local, 0..8, region, 0))
}

#[test]
fn a_region_that_is_gone() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    let (mut client, server) = default_pair(&lab)?;
    let local = client.register(64, Access::LOCAL_WRITE)?;
    let target = server.register(64, OPEN | Access::LOCAL_WRITE)?;
    let remote = target.remote();
    client.write(&local, 0..64, &remote, 0)?;
    drop(target);
    let error = client.write(&local, 0..64, &remote, 0).expect_err("it was deregistered");
    assert_eq!(work(&error).status, WorkStatus::REMOTE_ACCESS, "{error}");
    Ok(())
}

#[test]
fn rights_that_contradict_each_other() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    let (client, _server) = default_pair(&lab)?;
    for access in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
        let error = fails(SECOND, || client.register(64, access));
        says(&error, ErrorKind::InvalidInput, &["must have local write access"]);
    }
    says(&fails(SECOND, || client.register(0, Access::LOCAL_WRITE)), ErrorKind::InvalidInput, &["at least one byte"]);
    // A read needs a place that may be written.
    let mut client = client;
    let read_only = client.register(64, Access::empty())?;
    let error = client.read(&read_only, 0..8, &read_only.remote(), 0).expect_err("not writable");
    says(&error, ErrorKind::InvalidInput, &["local write access"]);
    Ok(())
}

#[test]
fn more_than_the_device_can_do() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    let listener = open_devices(&lab)?;
    let address = listener.local_addr();
    for (endpoint, name) in [
        (EndpointOptions::default().send_depth(u32::MAX), "send_depth"),
        (EndpointOptions::default().recv_depth(u32::MAX), "recv_depth"),
        (EndpointOptions::default().send_depth(0), "send_depth"),
    ] {
        let options = ConnectionOptions::new().endpoint(endpoint);
        let error = fails(SECOND, || Connector::new().options(options.clone()).connect(address));
        says(&error, ErrorKind::InvalidInput, &[name]);
    }
    let error = fails(SECOND, || Connector::new().options(ConnectionOptions::new().retry_count(7)).connect(address));
    says(&error, ErrorKind::InvalidInput, &["retry_count"]);
    Ok(())
}
