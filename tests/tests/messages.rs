//! Connections of our own to our own: addresses, private data, messages, one-sided operations.

use std::thread;
use std::time::Duration;

use rdmacm::{
    AcceptOptions, Access, Connection, ConnectionOptions, Connector, EndpointOptions, Error, Listener, ListenerBuilder,
    MAX_ACCEPT_DATA, MAX_CONNECT_DATA, MAX_REJECT_DATA, Result,
};
use rdmacm_tests::{Family, Holdings, Lab, lab, timed};

/// A connected pair: client and server.
fn pair(lab: &Lab, family: Family, options: &ConnectionOptions) -> Result<(Connection, Connection)> {
    let listener = ListenerBuilder::new()
        .accept_options(AcceptOptions::new().options(options.clone()))
        .bind(lab.server(family))?;
    let address = lab.seen_by_client(listener.local_addr());
    thread::scope(|scope| {
        let server = scope.spawn(|| listener.accept());
        let client = Connector::new().options(options.clone()).connect(address)?;
        Ok((client, server.join().expect("the server does not panic")?))
    })
}

#[test]
fn both_ends_agree_on_the_addresses() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    for family in [Family::V4, Family::V6, Family::LinkLocal] {
        let (client, server) = pair(&lab, family, &ConnectionOptions::new())?;
        // A scope is each host's own number of the interface.
        let without_scope = |mut address| {
            if let std::net::SocketAddr::V6(address) = &mut address {
                address.set_scope_id(0);
            }
            address
        };
        assert_eq!(without_scope(client.local_addr()), without_scope(server.peer_addr()), "{family:?}");
        assert_eq!(without_scope(client.peer_addr()), without_scope(server.local_addr()), "{family:?}");
        assert_eq!(client.local_addr().ip(), lab.client(family).ip(), "{family:?}");
        assert_ne!(client.local_addr().port(), 0);
    }
    Ok(())
}

#[test]
fn port_zero_is_replaced_by_a_free_one() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    let mut any = lab.server(Family::V4);
    any.set_port(0);
    let listeners: Vec<_> = (0..20).map(|_| Listener::bind(any)).collect::<Result<_>>()?;
    let mut ports: Vec<_> = listeners.iter().map(|listener| listener.local_addr().port()).collect();
    assert!(listeners.iter().all(|listener| listener.local_addr().ip() == any.ip()));
    ports.sort_unstable();
    ports.dedup();
    assert_eq!(ports.len(), 20);
    assert!(!ports.contains(&0));

    any.set_ip("0.0.0.0".parse().expect("a literal"));
    let wildcard = Listener::bind(any)?.local_addr();
    assert!(wildcard.ip().is_unspecified() && wildcard.port() != 0, "{wildcard}");
    Ok(())
}

#[test]
fn private_data_arrives_exactly_in_all_three_messages() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    let bytes = |length: usize| -> Vec<u8> { (0..length).map(|byte| byte as u8 | 0x80).collect() };
    for length in [1, 7, MAX_CONNECT_DATA] {
        let client = thread::spawn(move || Connector::new().private_data(&bytes(length)).connect(address));
        let request = listener.request()?;
        assert_eq!(request.private_data().data(), Some(&bytes(length)[..]));
        let answer = bytes(if length == MAX_CONNECT_DATA { MAX_ACCEPT_DATA } else { length + 1 });
        let server = request.accept_with(&AcceptOptions::new().private_data(&answer))?;
        let client = client.join().expect("no panic")?;
        assert_eq!(client.private_data().data(), Some(&answer[..]));
        assert_eq!(server.private_data().data(), Some(&bytes(length)[..]));
    }
    for length in [0, 1, MAX_REJECT_DATA] {
        let client = thread::spawn(move || Connection::connect(address));
        listener.request()?.reject(&bytes(length))?;
        match client.join().expect("no panic") {
            Err(Error::Rejected { peer, private_data }) => {
                assert_eq!(peer, address);
                assert_eq!(private_data.data().unwrap_or_default(), bytes(length));
            }
            other => panic!("a rejected client gets {other:?}"),
        }
    }
    Ok(())
}

#[test]
fn a_zero_length_message_is_a_message() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    let (mut client, mut server) = pair(&lab, Family::V4, &ConnectionOptions::new())?;
    for (from, to) in [(0, 1), (1, 0)] {
        let ends = [&mut client, &mut server];
        let mut buffer = [7; 8];
        ends[from].send(b"")?;
        ends[from].send(b"next")?;
        assert_eq!(ends[to].recv(&mut buffer)?, 0);
        assert_eq!(buffer, [7; 8], "nothing is written");
        assert_eq!(ends[to].recv(&mut buffer)?, 4);
        // And without room for anything.
        ends[from].send(b"")?;
        assert_eq!(ends[to].recv(&mut [])?, 0);
    }
    Ok(())
}

#[test]
fn messages_of_all_sizes_arrive_in_order() -> Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let sizes = [1, 23, 63, 64, 65, 1023, 1024, 1025, 4095, 4096, 4097, 65_536];
    let options = ConnectionOptions::new().endpoint(EndpointOptions::default().message_size(65_536).recv_depth(8));
    let (mut client, mut server) = pair(&lab, Family::V4, &options)?;
    let message =
        |size: usize, round: usize| -> Vec<u8> { (0..size).map(|at| (at * 31 + size + round) as u8).collect() };
    thread::scope(|scope| {
        let echo = scope.spawn(|| {
            for _ in 0..3 * sizes.len() {
                let received = server.recv_buf()?;
                server.send(&received)?;
            }
            server.flush()
        });
        let mut buffer = vec![0; 65_536];
        for round in 0..3 {
            for size in sizes {
                client.send(&message(size, round))?;
                assert_eq!(client.recv(&mut buffer)?, size);
                assert!(buffer[..size] == message(size, round), "size {size}, round {round}");
            }
        }
        echo.join().expect("no panic")
    })
}

#[test]
fn a_message_longer_than_the_readers_slice_is_kept() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    let (mut client, mut server) = pair(&lab, Family::V4, &ConnectionOptions::new())?;
    client.send(b"eight by")?;
    client.send(b"next")?;
    let error = server.recv(&mut [0; 7]).expect_err("seven are too few");
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput, "{error}");
    assert!(error.to_string().contains('8') && error.to_string().contains('7'), "{error}");
    let mut buffer = [0; 8];
    assert_eq!(server.recv(&mut buffer)?, 8);
    assert_eq!(&buffer, b"eight by");
    assert_eq!(server.recv(&mut buffer)?, 4);
    Ok(())
}

#[test]
fn reads_and_writes_reach_exactly_their_range() -> Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let (mut client, server) = pair(&lab, Family::V4, &ConnectionOptions::new())?;
    let all = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    for size in [1, 23, 64, 1023, 1024, 1025, 4096, 4097, 65_535, 1 << 20] {
        let local = client.register(size, Access::LOCAL_WRITE)?;
        let target = server.register(size + 128, all)?;
        target.fill(0..size + 128, 0x5a)?;
        let data: Vec<u8> = (0..size).map(|at| (at * 7 + size) as u8).collect();
        local.write_at(0, &data)?;
        client.write(&local, 0..size, &target.remote(), 64)?;

        let mut seen = vec![0; size + 128];
        target.read_at(0, &mut seen)?;
        assert!(seen[..64].iter().chain(&seen[64 + size..]).all(|&byte| byte == 0x5a), "size {size}: outside");
        assert!(seen[64..64 + size] == data, "size {size}: what was written");

        local.fill(0..size, 0)?;
        client.read(&local, 0..size, &target.remote(), 64)?;
        let mut back = vec![0; size];
        local.read_at(0, &mut back)?;
        assert!(back == data, "size {size}: what was read");
    }
    Ok(())
}

#[test]
fn a_message_tells_of_the_write_before_it() -> Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let (mut client, mut server) = pair(&lab, Family::V4, &ConnectionOptions::new())?;
    let size = 8192;
    let local = client.register(size, Access::LOCAL_WRITE)?;
    let target = server.register(size, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    for round in 0..200_u8 {
        local.fill(0..size, round)?;
        client.write(&local, 0..size, &target.remote(), 0)?;
        client.send(&[round])?;
        assert_eq!(server.recv(&mut [0])?, 1);
        let mut seen = vec![0; size];
        target.read_at(0, &mut seen)?;
        assert!(seen.iter().all(|&byte| byte == round), "round {round}");
        server.send(&[round])?;
        client.recv(&mut [0])?;
    }
    Ok(())
}

#[test]
fn what_was_sent_before_the_close_is_read_before_its_error() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    for orderly in [true, false] {
        let (mut client, mut server) = pair(&lab, Family::V4, &ConnectionOptions::new())?;
        for number in 0..10_u8 {
            client.send(&[number])?;
        }
        if orderly {
            client.disconnect()?
        } else {
            drop(client)
        }
        thread::sleep(Duration::from_millis(100));
        let mut byte = [0];
        for number in 0..10 {
            assert_eq!((server.recv(&mut byte)?, byte[0]), (1, number));
        }
        let error = server.recv(&mut byte).expect_err("nothing more was sent");
        assert!(error.is_closed_by_peer(), "{error:?}");
    }
    Ok(())
}

#[test]
fn a_timeout_of_recv_loses_nothing() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    let (mut client, mut server) = pair(&lab, Family::V4, &ConnectionOptions::new())?;
    let limit = Duration::from_millis(200);
    server.set_timeout(Some(limit))?;
    let mut buffer = [0; 16];
    let (result, took) = timed(|| server.recv(&mut buffer));
    let error = result.expect_err("nothing was sent");
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{error}");
    assert!(took >= limit && took < limit + Duration::from_millis(150), "{took:?}");
    client.send(b"late")?;
    assert_eq!(server.recv(&mut buffer)?, 4);
    assert_eq!(
        server.set_timeout(Some(Duration::ZERO)).expect_err("as in std").kind(),
        std::io::ErrorKind::InvalidInput
    );
    Ok(())
}

#[test]
fn connect_keeps_its_deadline_when_nobody_answers() -> Result<()> {
    let Some(lab) = lab(30) else { return Ok(()) };
    // The listener's program does not take the request.
    let listener = Listener::bind(lab.server(Family::V4))?;
    // The first connection opens both devices, which the libraries keep.
    drop(pair(&lab, Family::V4, &ConnectionOptions::new())?);
    let before = Holdings::now();
    let limit = Duration::from_millis(300);
    let (result, took) = timed(|| Connector::new().deadline(limit).connect(listener.local_addr()));
    let error = result.expect_err("nobody accepts");
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{error}");
    assert!(took >= limit && took < limit + Duration::from_millis(500), "{took:?}");
    // The abandoned request does no harm: the next client is served.
    let client = thread::spawn({
        let address = listener.local_addr();
        move || Connection::connect(address)
    });
    let server = listener.accept_timeout(Duration::from_secs(5))?;
    drop((client.join().expect("no panic")?, server));
    before.expect_unchanged();
    Ok(())
}
