//! A child process learns that RDMA is its parent's, and its parent is not harmed.

use std::thread;
use std::time::{Duration, Instant};

use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use rdmacm::{Access, Connection, Connector, Error, Listener, Manager};
use rdmacm_tests::{Family, lab};

/// What the child checks; the number is its exit status.
fn child(listener: Listener, mut connection: Connection, manager: Manager) -> i32 {
    let started = Instant::now();
    if !matches!(Connector::new().connect(listener.local_addr()), Err(Error::Forked)) {
        return 1;
    }
    if !matches!(listener.accept(), Err(Error::Forked)) {
        return 2;
    }
    if !matches!(manager.devices(), Err(Error::Forked)) {
        return 3;
    }
    let says_why = |error: Error| error.to_string().contains("forked after RDMA was set up");
    if !connection.register(4096, Access::LOCAL_WRITE).is_err_and(says_why) {
        return 4;
    }
    if !connection.send(b"from the child").is_err_and(says_why) {
        return 5;
    }
    if !connection.recv_timeout(&mut [0; 64], Duration::from_millis(100)).is_err_and(says_why) {
        return 6;
    }
    drop((connection, listener, manager));
    if started.elapsed() > Duration::from_secs(2) { 7 } else { 0 }
}

#[test]
fn a_child_gets_clear_errors_and_the_parent_goes_on() -> Result<(), Error> {
    let Some(lab) = lab(60) else { return Ok(()) };
    let manager = Manager::global()?;
    let listener = Listener::bind(lab.server(Family::V4))?;
    let address = listener.local_addr();
    let (client, mut server) = thread::scope(|scope| {
        let client = scope.spawn(move || Connection::connect(address));
        let server = listener.accept();
        (client.join().expect("no panic"), server)
    });
    let (mut client, server_end) = (client?, server.as_mut().expect("accepted"));
    let region = client.register(4096, Access::LOCAL_WRITE)?;

    // SAFETY: the child only uses this library, whose functions make no call on behalf of a child, and ends by `_exit`.
    match unsafe { fork() }.expect("a process more") {
        ForkResult::Child => {
            let status = child(listener, client, manager);
            // SAFETY: ends the child without running the test harness's exit handlers.
            unsafe { nix::libc::_exit(status) }
        }
        ForkResult::Parent { child } => {
            let start = Instant::now();
            let status = loop {
                match waitpid(child, Some(WaitPidFlag::WNOHANG)).expect("our child") {
                    WaitStatus::StillAlive => {
                        assert!(start.elapsed() < Duration::from_secs(10), "the child hangs");
                        thread::sleep(Duration::from_millis(10));
                    }
                    ended => break ended,
                }
            };
            assert_eq!(status, WaitStatus::Exited(child, 0));
        }
    }

    // Everything of the parent's still works: the connection, the memory, the listener.
    client.send(b"from the parent")?;
    assert_eq!(&*server_end.recv_buf()?, b"from the parent");
    region.write_at(0, b"mine")?;
    assert_eq!(region.into_bytes().expect("the only handle")[..4], *b"mine");
    thread::scope(|scope| {
        let again = scope.spawn(move || Connection::connect(address));
        listener.accept().expect("the listener lives");
        again.join().expect("no panic").expect("it was accepted");
    });
    client.disconnect()
}
