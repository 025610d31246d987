//! Signals arrive all the time, and no caller sees any.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use rdmacm::{Access, CancelToken, Connection, Connector, Error, Listener, RemoteRegion, TimedOutStep, verbs};
use rdmacm_tests::{Family, Holdings, lab, rounds, timed};

static HANDLED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn handle(_: libc::c_int) {
    HANDLED.fetch_add(1, Ordering::Relaxed);
}

/// Sends SIGUSR1 to every thread of this process but the caller, 100 times a second, until told to stop.
fn signal_all(stop: &AtomicBool) {
    // SAFETY: the handler only adds to an atomic, which a signal handler may do.
    unsafe {
        let action = SigAction::new(SigHandler::Handler(handle), SaFlags::empty(), SigSet::empty());
        sigaction(Signal::SIGUSR1, &action).expect("a handler may be set");
    }
    let process = libc::pid_t::try_from(std::process::id()).expect("process ids are positive");
    // SAFETY: takes no arguments.
    let own = unsafe { libc::gettid() };
    while !stop.load(Ordering::Relaxed) {
        for task in std::fs::read_dir("/proc/self/task").expect("/proc is mounted").flatten() {
            let thread: libc::pid_t = task.file_name().to_string_lossy().parse().expect("threads are numbers");
            if thread != own {
                // SAFETY: sends a signal that has a handler; a thread that has ended meanwhile is an error, no more.
                unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGUSR1) };
            }
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Answers every message; the first one is answered with where this side's memory is.
fn serve(mut connection: Connection) -> Result<(), Error> {
    let region = connection.register(4096, Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE)?;
    connection.recv_buf()?;
    connection.send(&region.remote().to_bytes())?;
    loop {
        match connection.recv_buf() {
            Ok(message) => connection.send(&message)?,
            Err(error) if error.is_closed_by_peer() => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// One life of a connection, with every kind of call.
fn live(listener: &Listener, round: usize) -> Result<(), Error> {
    let mut connection = Connection::connect(listener.local_addr())?;
    connection.send(b"where?")?;
    let mut encoded = [0; 24];
    assert_eq!(connection.recv(&mut encoded)?, 24);
    let remote = RemoteRegion::from_bytes(&encoded);
    let local = connection.register(4096, Access::LOCAL_WRITE)?;
    for number in 0..10_u8 {
        let message = [number; 1000];
        connection.send(&message)?;
        assert_eq!(*connection.recv_buf()?, message);
        local.write_at(0, &message)?;
        connection.write(&local, 0..1000, &remote, 0)?;
        connection.read(&local, 2000..3000, &remote, 0)?;
        let mut read = [0; 1000];
        local.read_at(2000, &mut read)?;
        assert_eq!(read, message);
    }
    connection.flush()?;
    // A timeout is neither early nor an error of another kind.
    let patience = Duration::from_millis(30);
    let (outcome, took) = timed(|| connection.recv_timeout(&mut [0; 8], patience));
    assert!(matches!(outcome, Err(Error::Verbs(verbs::Error::TimedOut(_)))), "{outcome:?}");
    assert!(took >= patience, "the timeout came after {took:?}");
    match round % 3 {
        0 => connection.disconnect(),
        1 => {
            connection.abort();
            Ok(())
        }
        _ => Ok(()),
    }
}

#[test]
fn no_call_sees_a_signal() -> Result<(), Error> {
    let Some(lab) = lab(600) else { return Ok(()) };
    let rounds = rounds(12, 1000);
    let listener = Listener::bind(lab.server(Family::V4))?;
    let (idle, nobody) = (Listener::bind(lab.server(Family::V4))?, lab.server(Family::V4));
    let (stop, token) = (AtomicBool::new(false), CancelToken::new());
    let start = Instant::now();
    thread::scope(|scope| -> Result<(), Error> {
        let signaller = scope.spawn(|| signal_all(&stop));
        let server = scope.spawn(|| {
            thread::scope(|scope| {
                let mut served = Vec::new();
                loop {
                    match listener.accept_cancellable(&token) {
                        Ok(connection) => served.push(scope.spawn(|| serve(connection))),
                        Err(Error::Cancelled) => break,
                        Err(error) => return Err(error),
                    }
                }
                served.into_iter().try_for_each(|served| served.join().expect("no panic"))
            })
        });
        // A call that waits all the time.
        let blocked = scope.spawn(|| idle.accept_cancellable(&token));
        let mut before = None;
        let outcome: Result<(), Error> = (0..rounds).try_for_each(|round| {
            live(&listener, round)?;
            let refused = Connector::new().connect(nobody).expect_err("nobody listens there");
            assert!(matches!(refused, Error::Refused { .. }), "{refused:?}");
            let patience = Duration::from_millis(30);
            let (outcome, took) = timed(|| idle.request_timeout(patience));
            let error = outcome.expect_err("nobody comes");
            assert!(matches!(error, Error::TimedOut { step: TimedOutStep::Request, .. }), "{error:?}");
            assert!(took >= patience, "the timeout came after {took:?}");
            before.get_or_insert_with(Holdings::now);
            Ok(())
        });
        let returned = blocked.is_finished();
        token.cancel();
        let blocked = blocked.join().expect("no panic");
        let served = server.join().expect("no panic");
        stop.store(true, Ordering::Relaxed);
        signaller.join().expect("no panic");
        outcome?;
        served?;
        assert!(!returned && matches!(blocked, Err(Error::Cancelled)), "the blocked accept gave {blocked:?}");
        before.expect("at least one round").expect_unchanged();
        Ok(())
    })?;
    let (handled, seconds) = (HANDLED.load(Ordering::Relaxed), start.elapsed().as_secs_f64());
    println!("{handled} signals in {seconds:.1} s");
    assert!(handled > rounds, "only {handled} signals");
    Ok(())
}
