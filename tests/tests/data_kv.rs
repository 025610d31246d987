//! The key-value example: many clients on one table, by one-sided operations only.

use std::process::Command;
use std::time::Duration;

use rdmacm_tests::process::{is_listening, our_program};
use rdmacm_tests::{Family, Program, lab, rounds, wait_for};

const PATIENCE: Duration = Duration::from_secs(120);

#[test]
fn eight_clients_lose_and_tear_nothing() {
    let Some(lab) = lab(300) else { return };
    let address = lab.server(Family::V4);
    let place = ["-a".to_owned(), address.ip().to_string(), "-p".to_owned(), address.port().to_string()];
    let kv = |name: &str, more: &[&str]| {
        let mut command = Command::new(our_program("kv"));
        command.arg(name).args(&place).args(more);
        Program::start(format!("kv {name}"), command)
    };
    // Few buckets, so that keys meet.
    let server = kv("server", &["--buckets", "40"]);
    wait_for("the server to listen", Duration::from_secs(10), || is_listening(address).then_some(()));

    kv("put", &["colour", "blue"]).finish(PATIENCE).expect_success();
    let got = kv("get", &["colour"]).finish(PATIENCE).expect_success();
    assert_eq!(got.stdout, "blue\n");
    assert_eq!(kv("add", &["n", "-5"]).finish(PATIENCE).expect_success().stdout, "-5\n");
    assert_eq!(kv("add", &["n", "7"]).finish(PATIENCE).expect_success().stdout, "2\n");

    let count = rounds(40, 5_000).to_string();
    let checked = kv("check", &["--clients", "8", "--rounds", &count]).finish(PATIENCE).expect_success();
    assert!(checked.stdout.contains("none lost; no value torn"), "{checked}");
    let got = kv("get", &["colour"]).finish(PATIENCE).expect_success();
    assert_eq!(got.stdout, "blue\n", "the others' keys are as they were");
    drop(server);
}
