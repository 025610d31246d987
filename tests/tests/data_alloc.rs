//! On a real device, too, no operation allocates in steady state.

use std::thread;

use rdmacm::{AcceptOptions, Access, Connection, ConnectionOptions, Connector, EndpointOptions, ListenerBuilder, Wait};
use rdmacm_tests::{Family, lab};

/// Runs `operation` often; after the first few times it must not touch the allocator.
#[track_caller]
fn steady(what: &str, mut operation: impl FnMut() -> rdmacm::Result<()>) -> rdmacm::Result<()> {
    for _ in 0..100 {
        operation()?;
    }
    let mut ended = Ok(());
    let counted = allocation_counter::measure(|| ended = (0..200).try_for_each(|_| operation()));
    assert_eq!(counted.count_total, 0, "allocations in 200 times {what}");
    ended
}

fn echo(mut connection: Connection) {
    while let Ok(message) = connection.recv_buf() {
        if connection.send(&message).is_err() {
            return;
        }
    }
}

#[test]
fn no_operation_allocates_on_the_device() -> rdmacm::Result<()> {
    let Some(lab) = lab(120) else { return Ok(()) };
    let options = ConnectionOptions::new().endpoint(EndpointOptions::default().wait(Wait::Sleep));
    let listener = ListenerBuilder::new()
        .accept_options(AcceptOptions::new().options(options.clone()))
        .bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    let server = thread::spawn(move || -> rdmacm::Result<()> {
        let mut connection = listener.accept()?;
        let region = connection.register(4096, Access::REMOTE_ALL)?;
        connection.send(&region.remote().to_bytes())?;
        echo(connection);
        Ok(())
    });
    let mut connection = Connector::new().options(options).connect(address)?;
    let mut remote = [0; 24];
    connection.recv(&mut remote)?;
    let remote = rdmacm::RemoteRegion::from_bytes(&remote);
    let local = connection.register(4096, Access::LOCAL_WRITE)?;
    let mut buffer = [0; 4096];
    for len in [0, 8, 4096] {
        let data = vec![1; len];
        steady("send and recv", || {
            connection.send(&data)?;
            connection.recv(&mut buffer).map(|_| ())
        })?;
        steady("send_buf and recv_buf", || {
            let mut message = connection.alloc()?;
            message.set_len(len);
            connection.send_buf(message).map_err(|(error, _)| error)?;
            connection.recv_buf().map(|_| ())
        })?;
        steady("write", || connection.write(&local, 0..len, &remote, 0))?;
        steady("read", || connection.read(&local, 0..len, &remote, 0))?;
    }
    steady("atomics", || connection.fetch_and_add(&remote, 0, 1).map(|_| ()))?;
    steady("batches", || {
        let sender = connection.sender();
        let mut batch = sender.batch();
        for piece in 0..8 {
            batch.write(&local, piece * 100..piece * 100 + 100, &remote, 0, None)?;
        }
        let ticket = batch.post()?;
        sender.wait(ticket)
    })?;
    connection.disconnect()?;
    server.join().expect("no panic")
}
