//! Byte streams: what is written arrives, in order, and then the end; who waits wakes.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::{Duration, Instant};

use rdmacm::{AcceptOptions, Connector, Listener, RdmaListener, RdmaStream, StreamOptions};
use rdmacm_tests::{Family, Holdings, Lab, child, lab, rounds, timed};

/// A client and a server that are connected.
fn pair(listener: &RdmaListener) -> io::Result<(RdmaStream, RdmaStream)> {
    let address = listener.local_addr()?;
    thread::scope(|scope| {
        let client = scope.spawn(move || RdmaStream::connect(address));
        let (server, _) = listener.accept()?;
        Ok((client.join().expect("the client does not panic")?, server))
    })
}

fn listen(lab: &Lab) -> io::Result<RdmaListener> {
    RdmaListener::bind(lab.server(Family::V4))
}

/// The byte of a stream at a position.
fn pattern(position: usize) -> u8 {
    (position.wrapping_mul(0x9e37_79b1) >> 13) as u8
}

fn patterned(range: std::ops::Range<usize>) -> Vec<u8> {
    range.map(pattern).collect()
}

/// Writes this many bytes of the pattern.
fn write_pattern(mut stream: impl Write, total: usize) -> io::Result<()> {
    let mut done = 0;
    while done < total {
        let chunk = patterned(done..total.min(done + 100_000));
        stream.write_all(&chunk)?;
        done += chunk.len();
    }
    Ok(())
}

/// Reads to the end, which must come after this many bytes of the pattern.
#[track_caller]
fn read_pattern(mut stream: impl Read, total: usize) {
    let mut buffer = vec![0; 100_000];
    let mut done = 0;
    loop {
        match stream.read(&mut buffer).unwrap_or_else(|error| panic!("after {done} of {total}: {error}")) {
            0 => break,
            read => {
                assert!(buffer[..read] == patterned(done..done + read), "wrong bytes after {done} of {total}");
                done += read;
            }
        }
    }
    assert_eq!(done, total, "the end came too early");
    for _ in 0..3 {
        assert_eq!(stream.read(&mut buffer).expect("the end stays"), 0);
    }
}

const MIB: usize = 1 << 20;

#[test]
fn all_that_was_written_before_a_drop_arrives_and_then_the_end() -> io::Result<()> {
    let Some(lab) = lab(600) else { return Ok(()) };
    let listener = listen(&lab)?;
    drop(pair(&listener)?);
    let before = Holdings::now();
    for (count, total) in [(rounds(20, 200), 1), (rounds(20, 200), 4096), (rounds(3, 1000), 10 * MIB)] {
        for _ in 0..count {
            let (client, server) = pair(&listener)?;
            let writer = thread::spawn(move || write_pattern(client, total));
            read_pattern(server, total);
            writer.join().expect("no panic")?;
        }
    }
    // What fits into the buffers arrives though nobody reads until the writer has gone.
    for total in [1, 4096, 128 * 1024] {
        let (client, server) = pair(&listener)?;
        write_pattern(client, total)?;
        thread::sleep(Duration::from_millis(100));
        read_pattern(server, total);
    }
    before.expect_unchanged();
    Ok(())
}

#[test]
fn half_closed_streams_carry_the_reply() -> io::Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let listener = listen(&lab)?;
    for swapped in [false, true] {
        let (mut a, mut b) = pair(&listener)?;
        if swapped {
            std::mem::swap(&mut a, &mut b);
        }
        let server = thread::spawn(move || {
            read_pattern(&b, 100_000);
            write_pattern(b, MIB)
        });
        write_pattern(&a, 100_000)?;
        a.shutdown(Shutdown::Write)?;
        let error = a.write(&[1]).expect_err("shut down");
        assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");
        read_pattern(&a, MIB);
        a.shutdown(Shutdown::Write)?;
        a.shutdown(Shutdown::Both)?;
        assert!(a.take_error()?.is_none(), "an end in order is no error");
        server.join().expect("no panic")?;
    }
    Ok(())
}

#[test]
fn small_reads_get_all_of_a_large_write_without_further_traffic() -> io::Result<()> {
    let Some(lab) = lab(120) else { return Ok(()) };
    let listener = listen(&lab)?;
    let (client, server) = pair(&listener)?;
    let mut sent = 0;
    for total in [1, 100, 16_384, 65_537] {
        (&client).write_all(&patterned(sent..sent + total))?;
        for size in [1, 7, 16_383, 16_384, 16_385] {
            let mut left = if size == 1 { total.min(65_537) / 5 } else { total / 5 };
            if size == 16_385 {
                left = total - 4 * (total / 5);
            }
            let mut buffer = vec![0; size];
            while left > 0 {
                let most = size.min(left);
                let peeked = server.peek(&mut buffer[..1])?;
                assert_eq!((peeked, buffer[0]), (1, pattern(sent)));
                let read = (&server).read(&mut buffer[..most])?;
                assert!(read > 0 && buffer[..read] == patterned(sent..sent + read), "after {sent}");
                sent += read;
                left -= read;
            }
        }
    }
    server.set_nonblocking(true)?;
    assert_eq!((&server).read(&mut [0]).expect_err("all was read").kind(), ErrorKind::WouldBlock);
    Ok(())
}

#[test]
fn a_writer_waits_for_a_slow_reader_and_counts_exactly() -> io::Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let listener = listen(&lab)?;
    let (client, server) = pair(&listener)?;
    client.set_nonblocking(true)?;
    // Both halves of the reader's buffer, which it published when the stream was made.
    let mut sent = 0;
    let start = Instant::now();
    while sent < 128 * 1024 {
        match (&client).write(&patterned(sent..sent + 1000)) {
            Ok(written) => sent += written,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
                assert!(start.elapsed() < Duration::from_secs(5), "stuck after {sent}");
            }
        }
    }
    assert_eq!(sent, 128 * 1024, "no more than there is room for");
    thread::sleep(Duration::from_millis(50));
    assert_eq!((&client).write(&[0]).expect_err("full").kind(), ErrorKind::WouldBlock);

    // A blocked writer sleeps; each half that is read lets it go on.
    client.set_nonblocking(false)?;
    let data = patterned(sent..sent + MIB);
    let start = Instant::now();
    let writer = thread::spawn(move || {
        let before = cpu_time();
        (&client).write_all(&data)?;
        Ok::<_, io::Error>((client, cpu_time() - before))
    });
    thread::sleep(Duration::from_secs(1));
    assert!(!writer.is_finished());
    let mut buffer = vec![0; 4096];
    let mut read = 0;
    while read < sent + MIB {
        let count = (&server).read(&mut buffer)?;
        assert!(count > 0 && buffer[..count] == patterned(read..read + count), "after {read}");
        read += count;
        thread::sleep(Duration::from_millis(1));
    }
    let (client, busy) = writer.join().expect("no panic")?;
    println!("the writer worked {busy:?} of {:?}", start.elapsed());
    assert!(busy < start.elapsed() / 4, "a blocked writer sleeps: it worked {busy:?} of {:?}", start.elapsed());
    drop(client);
    assert_eq!((&server).read(&mut buffer)?, 0);
    Ok(())
}

#[test]
fn a_reader_that_looks_at_nothing_for_long_breaks_nothing() -> io::Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let listener = listen(&lab)?;
    // Small messages use up all credits long before the bytes; and both sides have told each other of room meanwhile.
    let (client, server) = pair(&listener)?;
    let (count, size) = (1000, 100);
    let writers = [client.try_clone()?, server.try_clone()?].map(|stream| {
        thread::spawn(move || {
            for number in 0..count {
                (&stream).write_all(&[number as u8; 100])?;
            }
            stream.shutdown(Shutdown::Write)
        })
    });
    // Longer than a device that gets no answer keeps trying.
    thread::sleep(Duration::from_secs(5));
    for stream in [client, server] {
        let mut all = Vec::new();
        (&stream).read_to_end(&mut all)?;
        assert_eq!(all.len(), count * size);
        assert!(all.chunks(size).enumerate().all(|(number, record)| record.iter().all(|byte| *byte == number as u8)));
    }
    for writer in writers {
        writer.join().expect("no panic")?;
    }
    Ok(())
}

/// What this thread used of a processor.
fn cpu_time() -> Duration {
    use nix::sys::resource::{UsageWho, getrusage};
    let usage = getrusage(UsageWho::RUSAGE_THREAD).expect("every thread has one");
    let micros = |time: nix::sys::time::TimeVal| (time.tv_sec() * 1_000_000 + time.tv_usec()) as u64;
    Duration::from_micros(micros(usage.user_time()) + micros(usage.system_time()))
}

#[test]
fn both_sides_write_at_once_with_readers_on_clones() -> io::Result<()> {
    let Some(lab) = lab(300) else { return Ok(()) };
    let total = rounds(8, 64) * MIB;
    let listener = listen(&lab)?;
    let (client, server) = pair(&listener)?;
    let mut threads = Vec::new();
    for stream in [client, server] {
        let reader = stream.try_clone()?;
        threads.push(thread::spawn(move || {
            write_pattern(&stream, total)?;
            stream.shutdown(Shutdown::Write)
        }));
        threads.push(thread::spawn(move || {
            read_pattern(reader, total);
            Ok(())
        }));
    }
    for thread in threads {
        thread.join().expect("no panic")?;
    }
    Ok(())
}

#[test]
fn a_blocked_reader_holds_up_no_writer_and_clones_may_go_in_any_order() -> io::Result<()> {
    let Some(lab) = lab(120) else { return Ok(()) };
    let listener = listen(&lab)?;
    let (client, server) = pair(&listener)?;
    let count = rounds(20_000, 1_000_000);
    let reader = client.try_clone()?;
    let blocked = thread::spawn(move || {
        let mut one = [0];
        (&reader).read_exact(&mut one).map(|()| one[0])
    });
    let sink = thread::spawn(move || {
        let mut record = [0; 64];
        for number in 0..count {
            (&server).read_exact(&mut record)?;
            assert_eq!(record, [number as u8; 64]);
        }
        Ok::<_, io::Error>(server)
    });
    let mut worst = Duration::ZERO;
    for number in 0..count {
        let (written, took) = timed(|| (&client).write_all(&[number as u8; 64]));
        written?;
        worst = worst.max(took);
    }
    let server = sink.join().expect("no panic")?;
    println!("the longest of {count} writes beside a blocked reader took {worst:?}");
    assert!(!blocked.is_finished(), "nothing was sent to the reader");
    (&server).write_all(&[42])?;
    assert_eq!(blocked.join().expect("no panic")?, 42);
    // The reader's handle is gone; the stream lives until the last one is.
    (&client).write_all(&[7])?;
    let last = client.try_clone()?;
    drop(client);
    (&last).write_all(&[8])?;
    drop(last);
    let mut rest = Vec::new();
    (&server).read_to_end(&mut rest)?;
    assert_eq!(rest, [7, 8]);
    Ok(())
}

#[test]
fn records_of_several_threads_stay_whole_while_there_is_room() -> io::Result<()> {
    let Some(lab) = lab(120) else { return Ok(()) };
    let listener = listen(&lab)?;
    let (client, server) = pair(&listener)?;
    let (threads, records) = (4, 80);
    thread::scope(|scope| {
        for tag in 0..threads {
            let client = &client;
            // All of them fit into the reader's queue.
            scope.spawn(move || {
                for _ in 0..records {
                    let mut client = client;
                    client.write_all(&[tag as u8; 100]).expect("room");
                }
            });
        }
    });
    drop(client);
    let mut all = Vec::new();
    (&server).read_to_end(&mut all)?;
    let mut counts = vec![0; threads];
    // A record that met the end of a half is in two messages, and others may be in between.
    let torn = all.chunks(100).filter(|record| record.iter().any(|byte| *byte != record[0])).count();
    assert!(torn <= 4, "{torn} records are mixed");
    all.iter().for_each(|byte| counts[usize::from(*byte)] += 1);
    assert_eq!(counts, vec![records * 100; threads]);
    Ok(())
}

#[test]
fn timeouts_come_in_time_and_lose_nothing() -> io::Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let listener = listen(&lab)?;
    let (client, server) = pair(&listener)?;
    for stream in [&client, &server] {
        assert_eq!(stream.read_timeout()?, None);
        let zero = Some(Duration::ZERO);
        assert_eq!(stream.set_read_timeout(zero).expect_err("zero").kind(), ErrorKind::InvalidInput);
        assert_eq!(stream.set_write_timeout(zero).expect_err("zero").kind(), ErrorKind::InvalidInput);
    }
    // Set on one handle, valid for all.
    let clone = server.try_clone()?;
    for limit in [1, 30, 500].map(Duration::from_millis) {
        clone.set_read_timeout(Some(limit))?;
        let (result, took) = timed(|| (&server).read(&mut [0; 10]));
        assert_eq!(result.expect_err("nothing was sent").kind(), ErrorKind::WouldBlock);
        assert!(took >= limit && took < limit + Duration::from_millis(150), "{limit:?}: {took:?}");
    }
    // One that comes while a large message is under way.
    server.set_read_timeout(Some(Duration::from_millis(3)))?;
    let total = 2 * MIB;
    let writer = thread::spawn(move || write_pattern(client, total));
    let (mut done, mut timeouts) = (0, 0);
    let mut buffer = vec![0; 70_000];
    loop {
        match (&server).read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => {
                assert!(buffer[..read] == patterned(done..done + read), "after {done}");
                done += read;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => timeouts += 1,
            Err(error) => return Err(error),
        }
    }
    assert_eq!(done, total);
    println!("{timeouts} timeouts during {total} bytes");
    writer.join().expect("no panic")?;

    // Writing: what was written is told, then that nothing could be.
    let (client, server) = pair(&listener)?;
    let limit = Duration::from_millis(200);
    client.set_write_timeout(Some(limit))?;
    let data = patterned(0..MIB);
    let (written, took) = timed(|| (&client).write(&data));
    let written = written?;
    assert_eq!(written, 128 * 1024, "both halves");
    assert!(took >= limit && took < limit + Duration::from_millis(250), "{took:?}");
    let (result, took) = timed(|| (&client).write(&[0]));
    assert_eq!(result.expect_err("full").kind(), ErrorKind::WouldBlock);
    assert!(took >= limit && took < limit + Duration::from_millis(150), "{took:?}");
    drop(client);
    read_pattern(server, written);
    Ok(())
}

#[test]
fn shutting_down_or_leaving_wakes_those_who_wait() -> io::Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let listener = listen(&lab)?;
    let soon = Duration::from_secs(1);
    for how in [Shutdown::Read, Shutdown::Both] {
        // Several wait, of which only one can watch.
        let (client, _server) = pair(&listener)?;
        let readers: Vec<_> = (0..3)
            .map(|_| client.try_clone().map(|clone| thread::spawn(move || (&clone).read(&mut [0]))))
            .collect::<io::Result<_>>()?;
        thread::sleep(Duration::from_millis(100));
        let (_, took) = timed(|| {
            client.shutdown(how).expect("a shutdown in order");
            for reader in readers {
                assert_eq!(reader.join().expect("no panic").expect("no error"), 0);
            }
        });
        assert!(took < soon, "{how:?}: {took:?}");
    }
    // A writer that waits for room.
    let (client, server) = pair(&listener)?;
    let clone = client.try_clone()?;
    let writer = thread::spawn(move || write_pattern(&clone, MIB));
    thread::sleep(Duration::from_millis(200));
    let (_, took) = timed(|| {
        client.shutdown(Shutdown::Write).expect("in order");
        let error = writer.join().expect("no panic").expect_err("cut short");
        assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");
    });
    assert!(took < soon, "{took:?}");
    drop(server);

    // The peer goes: readers see the end, writers an error.
    let (client, server) = pair(&listener)?;
    let clone = client.try_clone()?;
    let reader = thread::spawn(move || (&clone).read(&mut [0]));
    let clone = client.try_clone()?;
    let writer = thread::spawn(move || write_pattern(&clone, MIB));
    thread::sleep(Duration::from_millis(200));
    let (_, took) = timed(|| {
        drop(server);
        assert_eq!(reader.join().expect("no panic").expect("an end in order"), 0);
        let error = writer.join().expect("no panic").expect_err("nobody reads");
        assert!(matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{error:?}");
    });
    assert!(took < soon, "{took:?}");
    Ok(())
}

#[test]
fn both_leave_at_once_in_silence() -> io::Result<()> {
    let Some(lab) = lab(200) else { return Ok(()) };
    let listener = listen(&lab)?;
    drop(pair(&listener)?);
    let before = Holdings::now();
    for round in 0..rounds(30, 1000) {
        let (client, server) = pair(&listener)?;
        if round % 3 == 1 {
            (&client).write_all(b"unread")?;
        }
        let other = thread::spawn(move || timed(|| drop(server)).1);
        let (_, took) = timed(|| drop(client));
        let other = other.join().expect("no panic");
        assert!(took.max(other) < Duration::from_secs(1), "round {round}: {took:?} and {other:?}");
    }
    before.expect_unchanged();
    Ok(())
}

#[test]
fn vectored_calls_fill_and_send_all_slices() -> io::Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let listener = listen(&lab)?;
    let (client, server) = pair(&listener)?;
    let parts = [patterned(0..10), Vec::new(), patterned(10..11), patterned(11..5000)];
    let slices: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
    assert_eq!((&client).write_vectored(&slices)?, 5000);
    let mut buffers = [vec![0; 1], vec![0; 0], vec![0; 4000], vec![0; 2000]];
    // One write is one message, of which a part may be there only if it met the end of a half.
    let mut slices: Vec<_> = buffers.iter_mut().map(|buffer| IoSliceMut::new(buffer)).collect();
    assert_eq!((&server).read_vectored(&mut slices)?, 5000);
    assert_eq!(buffers.concat()[..5000], patterned(0..5000));
    assert_eq!((&server).read(&mut [])?, 0);
    assert_eq!((&client).write(&[])?, 0);
    assert_eq!((&client).write_vectored(&[])?, 0);
    Ok(())
}

#[test]
fn addresses_agree_and_accepted_streams_block() -> io::Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    for family in [Family::V4, Family::V6, Family::LinkLocal] {
        let mut any_port = lab.server(family);
        any_port.set_port(0);
        let listener = RdmaListener::bind(any_port)?;
        let address = listener.local_addr()?;
        assert_ne!(address.port(), 0);
        assert_eq!(address.ip(), any_port.ip());
        listener.set_nonblocking(true)?;
        assert_eq!(listener.accept().expect_err("nobody is there").kind(), ErrorKind::WouldBlock);
        let sees = lab.seen_by_client(address);
        let client = thread::spawn(move || RdmaStream::connect(sees));
        let (server, peer) = loop {
            match listener.accept() {
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(5)),
                accepted => break accepted?,
            }
        };
        let client = client.join().expect("no panic")?;
        assert_eq!(client.peer_addr()?, sees);
        assert_eq!(server.peer_addr()?, peer);
        assert_eq!(client.local_addr()?.ip(), peer.ip());
        assert_eq!(client.local_addr()?.port(), peer.port());
        assert_eq!(server.local_addr()?.port(), address.port());
        // Blocking, whatever the listener is.
        server.set_read_timeout(Some(Duration::from_millis(50)))?;
        let (result, took) = timed(|| (&server).read(&mut [0]));
        assert_eq!(result.expect_err("nothing was sent").kind(), ErrorKind::WouldBlock);
        assert!(took >= Duration::from_millis(50));
        assert!(!server.nodelay()?);
        client.set_nodelay(true)?;
        assert!(client.try_clone()?.nodelay()?);
        assert!(client.take_error()?.is_none());
    }
    Ok(())
}

#[test]
fn who_speaks_no_stream_is_refused_and_the_next_is_served() -> io::Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let listener = listen(&lab)?;
    let address = listener.local_addr()?;
    let served = thread::spawn(move || listener.accept());
    for data in [&b""[..], b"hello", &[2; 40], &[1; 20]] {
        let error = Connector::new().private_data_raw(data).connect(address).expect_err("no stream");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
    }
    let client = RdmaStream::connect(address)?;
    let (server, _) = served.join().expect("no panic")?;
    (&client).write_all(b"x")?;
    (&server).read_exact(&mut [0])?;

    // And a listener that is none.
    let listener = Listener::bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    for data in [&b""[..], b"hello"] {
        let client = thread::spawn(move || RdmaStream::connect(address));
        let options = AcceptOptions::new().private_data_raw(data);
        // It may leave before the listener knows that it was there.
        let accepted = listener.request()?.accept_with(&options);
        let error = client.join().expect("no panic").expect_err("no stream");
        assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
        drop(accepted);
    }
    Ok(())
}

#[test]
fn sizes_of_buffers_and_queues_do_not_matter() -> io::Result<()> {
    let Some(lab) = lab(300) else { return Ok(()) };
    let total = 500_000;
    let options = [
        StreamOptions::new(),
        StreamOptions::new().receive_buffer(1).send_buffer(1).receive_queue(1).send_queue(1),
        StreamOptions::new().receive_buffer(8191).send_buffer(10_001).inline(0).send_queue(17),
        StreamOptions::new().receive_buffer(1 << 21).send_buffer(1 << 20).inline(256).spin(Duration::ZERO),
    ];
    for server_options in &options {
        let listener = RdmaListener::bind_with(lab.server(Family::V4), server_options)?;
        let address = listener.local_addr()?;
        for client_options in &options {
            let server = thread::spawn({
                let listener = listener.try_clone()?;
                move || {
                    let (stream, _) = listener.accept()?;
                    read_pattern(&stream, total);
                    write_pattern(stream, total)
                }
            });
            let client = RdmaStream::connect_with(address, client_options)?;
            let mut done = 0;
            let mut size = 1;
            while done < total {
                let end = total.min(done + size);
                (&client).write_all(&patterned(done..end))?;
                done = end;
                size = size * 7 % 40_009;
            }
            client.shutdown(Shutdown::Write)?;
            read_pattern(client, total);
            server.join().expect("no panic")?;
        }
    }
    Ok(())
}

// The peer is another process.

/// The server of the tests below: accepts one stream, writes a word, and does what the environment says.
#[test]
#[ignore = "run by other tests"]
fn peer() -> io::Result<()> {
    let address = std::env::var("STREAM_PEER").expect("set by the test that runs this");
    let (address, what) = address.split_once(' ').expect("an address and a manner");
    let stream = RdmaStream::connect(address)?;
    (&stream).write_all(b"here")?;
    match what {
        "exit" => std::process::exit(0),
        "abort" => std::process::abort(),
        _ => loop {
            thread::sleep(Duration::from_secs(1));
        },
    }
}

/// The other process's stream, which has said that it is there.
fn start_peer(listener: &RdmaListener, what: &str) -> io::Result<(rdmacm_tests::Program, RdmaStream)> {
    let variable = format!("STREAM_PEER={} {what}", listener.local_addr()?);
    let program = child::start(&["env", &variable], "peer");
    let (stream, _) = listener.accept()?;
    Ok((program, stream))
}

#[test]
fn a_peer_that_is_killed_resets_the_stream_at_once() -> io::Result<()> {
    let Some(lab) = lab(120) else { return Ok(()) };
    let listener = listen(&lab)?;
    drop(pair(&listener)?);
    let before = Holdings::now();
    for round in 0..rounds(3, 100) {
        let (mut program, stream) = start_peer(&listener, "stay")?;
        let mut word = [0; 4];
        if round % 2 == 0 {
            (&stream).read_exact(&mut word)?;
        } else {
            thread::sleep(Duration::from_millis(300));
        }
        let reader = stream.try_clone()?;
        let reader = thread::spawn(move || {
            let mut all = Vec::new();
            ((&reader).read_to_end(&mut all), all)
        });
        let writer = stream.try_clone()?;
        let writer = thread::spawn(move || write_pattern(&writer, MIB));
        thread::sleep(Duration::from_millis(300));
        let (_, took) = timed(|| {
            program.kill();
            let (result, all) = reader.join().expect("no panic");
            assert_eq!(result.expect_err("no goodbye").kind(), ErrorKind::ConnectionReset);
            assert_eq!(all, if round % 2 == 0 { &b""[..] } else { b"here" }, "what arrived before is read first");
            let error = writer.join().expect("no panic").expect_err("nobody reads");
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
        });
        assert!(took < Duration::from_secs(1), "{took:?}");
        let error = stream.take_error()?.expect("the end was no wish");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        assert!(stream.take_error()?.is_none(), "once");
        let (_, took) = timed(|| drop(stream));
        assert!(took < Duration::from_secs(1), "dropping took {took:?}");
    }
    before.expect_unchanged();
    Ok(())
}

#[test]
fn a_process_that_ends_without_closing_is_no_orderly_end() -> io::Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let listener = listen(&lab)?;
    for what in ["exit", "abort"] {
        let (_program, stream) = start_peer(&listener, what)?;
        let mut all = Vec::new();
        let (result, took) = timed(|| (&stream).read_to_end(&mut all));
        assert_eq!(result.expect_err(what).kind(), ErrorKind::ConnectionReset);
        assert_eq!(all, b"here", "{what}");
        assert!(took < Duration::from_secs(5), "{took:?}");
    }
    Ok(())
}

#[test]
fn dropping_a_full_stream_to_a_stopped_peer_is_bounded() -> io::Result<()> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let listener = listen(&lab)?;
    let (program, stream) = start_peer(&listener, "stay")?;
    (&stream).read_exact(&mut [0; 4])?;
    let signal = |signal: &str| {
        let status = std::process::Command::new("kill").args([signal, &program.id().to_string()]).status();
        assert!(status.expect("kill is everywhere").success());
    };
    signal("-STOP");
    stream.set_nonblocking(true)?;
    while (&stream).write(&[0; 1000]).is_ok() {}
    stream.set_nonblocking(false)?;
    let clone = stream.try_clone()?;
    let writer = thread::spawn(move || write_pattern(&clone, MIB));
    thread::sleep(Duration::from_millis(100));
    let (result, took) = timed(|| stream.shutdown(Shutdown::Both));
    println!("shutting down to a stopped peer: {result:?} after {took:?}");
    assert!(took < Duration::from_secs(4), "{took:?}");
    assert!(writer.join().expect("no panic").is_err());
    let (_, took) = timed(|| drop(stream));
    println!("dropping took {took:?}");
    assert!(took < Duration::from_secs(5), "{took:?}");
    signal("-CONT");
    Ok(())
}
