//! An ordinary user's limits: the error names the limit and its value, what exists goes on, and raising the limit helps.
//! The checks run in processes of their own, as an ordinary user.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};
use rdmacm::{Access, Connection, ConnectionOptions, Connector, EndpointOptions, Error, Listener, Manager};
use rdmacm_tests::network::host_argument;
use rdmacm_tests::{Family, Holdings, Lab, Program, child, in_test_machine, lab};

/// Makes an ordinary user of root, with no limit but those that the process sets itself.
const ORDINARY: [&str; 7] =
    ["prlimit", "--memlock=unlimited", "--nofile=4096", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];

/// Runs a test of this file as an ordinary user.
#[track_caller]
fn as_ordinary_user(name: &str) {
    if lab(1).is_none() {
        return;
    }
    if !in_test_machine() {
        println!("SKIP: becomes another user, and this is not the test machine");
        return;
    }
    child::run(&ORDINARY, name, Duration::from_secs(60));
}

/// Lowers (or raises again) the soft limit.
fn limit(resource: Resource, to: rlim_t) {
    let (_, hard) = getrlimit(resource).expect("the limit can be read");
    setrlimit(resource, to.min(hard), hard).expect("the soft limit may be changed");
}

/// Both ends of a connection with small buffers.
fn pair(listener: &Listener) -> Result<(Connection, Connection), Error> {
    thread::scope(|scope| {
        let client = scope.spawn(|| connector().connect(listener.local_addr()));
        let server = listener.accept_timeout(Duration::from_secs(5))?;
        Ok((client.join().expect("no panic")?, server))
    })
}

fn connector() -> Connector {
    let endpoint = EndpointOptions::default().send_depth(4).recv_depth(4).message_size(1024);
    Connector::new().options(ConnectionOptions::new().endpoint(endpoint))
}

fn echo((client, server): &mut (Connection, Connection)) -> Result<(), Error> {
    client.send(b"still here")?;
    let message = server.recv_buf()?;
    server.send(&message)?;
    assert_eq!(&*client.recv_buf()?, b"still here");
    Ok(())
}

/// The error has this number and names all of this.
#[track_caller]
fn says(error: &Error, errno: Errno, parts: &[&str]) {
    println!("{error}");
    assert_eq!(error.raw_os_error(), Some(errno as i32), "{error:?}");
    let text = error.to_string();
    assert!(parts.iter().all(|part| text.contains(part)), "{text:?} does not contain all of {parts:?}");
}

/// A client without the limits of this process, which is refused by it once `lower` has lowered them.
fn a_client_is_refused(listener: &Listener, lab: &Lab, lower: impl FnOnce()) -> Error {
    let address = lab.seen_by_client(listener.local_addr());
    let mut rping = Command::new("rping");
    rping.args(["-c", "-C", "1", "-a", &host_argument(address), "-p", &address.port().to_string()]);
    let mut client = Program::start("C rping client", rping);
    // The request waits in the queue.
    let request = listener.request_timeout(Duration::from_secs(10)).expect("the client comes");
    lower();
    let error = request.accept().expect_err("there is no room");
    // Refused at once, not when its own patience ends.
    let finished = client.finish(Duration::from_secs(5));
    assert!(!finished.status.success(), "{finished}");
    error
}

#[test]
fn locked_memory() {
    as_ordinary_user("with_little_locked_memory");
}

#[test]
#[ignore = "the part of `locked_memory` that runs as an ordinary user"]
fn with_little_locked_memory() -> Result<(), Error> {
    const LITTLE: rlim_t = 64 << 10;
    let Some(lab) = lab(50) else { return Ok(()) };
    let (_, unlimited) = getrlimit(Resource::RLIMIT_MEMLOCK).expect("the limit can be read");
    let listener = Listener::bind(lab.server(Family::V4))?;
    let mut living = pair(&listener)?;
    echo(&mut living)?;
    let before = Holdings::now();

    // For this user, who is not root, the limit counts.
    limit(Resource::RLIMIT_MEMLOCK, LITTLE);
    let parts = ["RLIMIT_MEMLOCK", "65536 bytes"];
    let error = living.0.register(1 << 20, Access::LOCAL_WRITE).expect_err("more than the limit");
    says(&error, Errno::ENOMEM, &[&parts[..], &["1048576 bytes"]].concat());
    // Bit by bit, until nothing is left.
    let mut regions = Vec::new();
    let error = loop {
        match living.0.register(4096, Access::LOCAL_WRITE) {
            Ok(region) => regions.push(region),
            Err(error) => break error,
        }
        assert!(regions.len() < 100, "the limit does not bite");
    };
    says(&error, Errno::ENOMEM, &parts);
    // Neither a client nor a server gets its buffers.
    let error = Connection::connect(listener.local_addr()).expect_err("no room for its buffers");
    says(&error, Errno::ENOMEM, &parts);
    limit(Resource::RLIMIT_MEMLOCK, unlimited);
    let error = a_client_is_refused(&listener, &lab, || limit(Resource::RLIMIT_MEMLOCK, LITTLE));
    says(&error, Errno::ENOMEM, &parts);
    // What exists goes on, and what is dropped can be had again.
    echo(&mut living)?;
    let held = regions.len();
    drop(regions);
    before.expect_unchanged();
    let again = (0..held).map(|_| living.0.register(4096, Access::LOCAL_WRITE)).collect::<Result<Vec<_>, _>>()?;
    drop(again);

    limit(Resource::RLIMIT_MEMLOCK, unlimited);
    living.0.register(1 << 20, Access::LOCAL_WRITE)?;
    echo(&mut pair(&listener)?)?;
    echo(&mut living)?;
    before.expect_unchanged();
    Ok(())
}

#[test]
fn open_files() {
    as_ordinary_user("with_few_open_files");
}

/// Allows this many files more than there are.
fn allow_files(more: usize) -> String {
    limit(Resource::RLIMIT_NOFILE, 4096);
    let highest = fs::read_dir("/proc/self/fd")
        .expect("/proc is mounted")
        .flatten()
        .filter_map(|entry| entry.file_name().to_string_lossy().parse::<usize>().ok())
        // The descriptor of this very folder is closed again.
        .filter(|number| fs::read_link(format!("/proc/self/fd/{number}")).is_ok_and(|to| !to.ends_with("fd")))
        .max()
        .expect("standard output at least");
    let allowed = highest + 1 + more;
    limit(Resource::RLIMIT_NOFILE, allowed as rlim_t);
    allowed.to_string()
}

#[test]
#[ignore = "the part of `open_files` that runs as an ordinary user"]
fn with_few_open_files() -> Result<(), Error> {
    let Some(lab) = lab(50) else { return Ok(()) };
    let listener = Listener::bind(lab.server(Family::V4))?;
    let mut living = pair(&listener)?;
    echo(&mut living)?;
    let before = Holdings::now();

    // A connection needs some; with each number below that it fails somewhere else.
    let mut failed = 0;
    for more in 0..20 {
        let allowed = allow_files(more);
        let outcome = thread::scope(|scope| {
            // Accepts what comes through; only the client's error is looked at here.
            let accepting = scope.spawn(|| listener.accept_timeout(Duration::from_millis(500)));
            let client = connector().connect(listener.local_addr());
            (client, accepting.join().expect("no panic"))
        });
        let parts = ["RLIMIT_NOFILE", allowed.as_str()];
        match outcome {
            (Ok(_), Ok(_)) => break,
            (Err(error @ (Error::Rejected { .. } | Error::TransportRejected { .. })), Err(refused)) => {
                println!("{more} more files: {error}");
                says(&refused, Errno::EMFILE, &parts);
            }
            (Err(error), _) => says(&error, Errno::EMFILE, &parts),
            (Ok(_), Err(error)) => panic!("connected, but not accepted: {error:?}"),
        }
        failed += 1;
        echo(&mut living)?;
        assert!(more < 19, "a connection needs more than 20 files");
    }
    println!("a connection within the process needs {failed} files");
    assert!(failed > 0, "the limit does not bite");
    limit(Resource::RLIMIT_NOFILE, 4096);
    before.expect_unchanged();

    // Not even a client of another process is accepted; the next one is.
    let mut allowed = String::new();
    let error = a_client_is_refused(&listener, &lab, || allowed = allow_files(0));
    says(&error, Errno::EMFILE, &["RLIMIT_NOFILE", &allowed]);
    // Whatever else has been closed meanwhile: nothing more can be opened.
    let allowed = allow_files(0);
    let fill: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
    let error = Manager::new().expect_err("an event channel is a file");
    drop(fill);
    says(&error, Errno::EMFILE, &["RLIMIT_NOFILE", &allowed]);
    echo(&mut living)?;

    limit(Resource::RLIMIT_NOFILE, 4096);
    drop(Manager::new()?);
    echo(&mut pair(&listener)?)?;
    echo(&mut living)?;
    before.expect_unchanged();
    Ok(())
}
