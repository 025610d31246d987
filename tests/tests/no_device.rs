//! A host without RDMA devices, and a user who may not use them. The checks run in processes of their own, because the
//! libraries keep what they have opened.

use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use rdmacm::{Connection, Error, Listener, Manager};
use rdmacm_tests::watchdog::Watchdog;
use rdmacm_tests::{Network, child, in_test_machine, timed, wait_for};

/// The test machine's devices, as `rdma link` knows them.
const LINKS: [(&str, &str); 2] = [("rxe0", "v0"), ("rxe1", "v1")];

const SECOND: Duration = Duration::from_secs(1);

/// The devices are gone while this lives.
struct WithoutDevices;

impl WithoutDevices {
    fn new() -> Self {
        let gone = Self;
        for (device, _) in LINKS {
            run("rdma", &["link", "delete", device]);
        }
        gone
    }
}

impl Drop for WithoutDevices {
    fn drop(&mut self) {
        for (device, interface) in LINKS {
            run("rdma", &["link", "add", device, "type", "rxe", "netdev", interface]);
        }
        wait_for("the devices to be back", Duration::from_secs(5), || {
            let active = |(device, _): &(&str, &str)| {
                fs::read_to_string(format!("/sys/class/infiniband/{device}/ports/1/state"))
                    .is_ok_and(|state| state.contains("ACTIVE"))
            };
            LINKS.iter().all(active).then_some(())
        });
    }
}

#[track_caller]
fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn no_device_at_all() {
    let _watchdog = Watchdog::start(Duration::from_secs(30));
    // Where there is none, the checks need no preparation; where there is one, only the test machine's may be removed.
    let _gone = match Network::find() {
        None => None,
        Some(_) if in_test_machine() => Some(WithoutDevices::new()),
        Some(_) => {
            println!("SKIP: there are RDMA devices, which only the test machine may remove");
            return;
        }
    };
    child::run(&[], "says_that_there_is_no_device", Duration::from_secs(20));
}

#[test]
#[ignore = "the part of `no_device_at_all` that runs without devices"]
fn says_that_there_is_no_device() {
    // Twice: the first failure must not be kept.
    for _ in 0..2 {
        for attempt in attempts() {
            assert_eq!(attempt.error.kind(), ErrorKind::NotFound, "{attempt:?}");
            assert_eq!(attempt.error.raw_os_error(), Some(nix::libc::ENODEV), "{attempt:?}");
            let text = attempt.error.to_string();
            assert!(text.contains("no RDMA device") && text.contains("rdma link add"), "{text}");
            assert!(attempt.took < SECOND, "{attempt:?}");
        }
    }
    leaves_no_files();
}

#[test]
fn no_permission() {
    let _watchdog = Watchdog::start(Duration::from_secs(30));
    if Network::find().is_none() {
        assert!(!in_test_machine(), "no RDMA device in the test machine");
        println!("SKIP: no RDMA device");
        return;
    }
    if !in_test_machine() {
        println!("SKIP: only the test machine's device nodes may be changed");
        return;
    }
    let nodes: Vec<PathBuf> = fs::read_dir("/dev/infiniband")
        .expect("there are devices")
        .map(|entry| entry.expect("there are devices").path())
        .collect();
    // All of them, and each of the two kinds alone.
    for kind in ["", "rdma_cm", "uverbs"] {
        let forbidden: Vec<_> = nodes.iter().filter(|node| node.to_string_lossy().contains(kind)).collect();
        assert!(!forbidden.is_empty());
        let before: Vec<_> = forbidden.iter().map(|node| fs::metadata(node).expect("it is there").mode()).collect();
        for node in &forbidden {
            fs::set_permissions(node, Permissions::from_mode(0o600)).expect("root may");
        }
        let nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"];
        let mut child = child::start(&nobody, "says_that_permission_is_missing");
        let finished = child.finish(Duration::from_secs(20));
        for (node, mode) in forbidden.iter().zip(before) {
            fs::set_permissions(node, Permissions::from_mode(mode & 0o7777)).expect("root may");
        }
        let finished = finished.expect_success();
        assert!(finished.stdout.contains("test result: ok. 1 passed"), "{kind}: {finished}");
    }
    // With the old permissions the same user may.
    let nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"];
    child::run(&nobody, "finds_devices", Duration::from_secs(20));
}

#[test]
#[ignore = "the part of `no_permission` that runs as another user"]
fn says_that_permission_is_missing() {
    for attempt in attempts() {
        assert_eq!(attempt.error.kind(), ErrorKind::PermissionDenied, "{attempt:?}");
        assert!(attempt.error.to_string().contains("permission"), "{attempt:?}");
        assert!(attempt.error.to_string().contains("/dev/infiniband/"), "{attempt:?}");
        assert!(attempt.took < SECOND, "{attempt:?}");
    }
    leaves_no_files();
}

#[test]
#[ignore = "the part of `no_permission` that runs as another user"]
fn finds_devices() {
    let manager = Manager::global().expect("there are devices");
    assert!(!manager.devices().expect("there are devices").is_empty());
}

#[derive(Debug)]
struct Attempt {
    #[expect(dead_code, reason = "shown when a check fails")]
    what: &'static str,
    error: Error,
    took: Duration,
}

/// All the ways of beginning, each of which must fail.
fn attempts() -> Vec<Attempt> {
    let attempt = |what, action: &dyn Fn() -> Result<(), Error>| {
        let (result, took) = timed(action);
        match result {
            Err(error) => Attempt { what, error, took },
            Ok(()) => panic!("{what} was successful"),
        }
    };
    vec![
        attempt("connect", &|| Connection::connect("10.77.0.2:7471").map(drop)),
        // A wildcard is not bound to a device: its nodes are opened when a client comes.
        attempt("bind", &|| Listener::bind("10.77.0.2:7471").map(drop)),
        attempt("devices", &|| Manager::global()?.devices().map(drop)),
    ]
}

fn leaves_no_files() {
    let open: Vec<_> = fs::read_dir("/proc/self/fd")
        .expect("/proc is mounted")
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .filter(|target| {
            target.to_string_lossy().contains("infiniband") || target.to_string_lossy().contains("eventfd")
        })
        .collect();
    assert!(open.is_empty(), "left open: {open:?}");
}
