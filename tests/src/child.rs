//! Tests that run in a process of their own: the test binary, started again for one `#[ignore]`d test.

use std::env;
use std::process::Command;
use std::time::Duration;

use crate::process::{Finished, Program};

/// The command line that runs the ignored test `name` of this binary.
///
/// # Panics
///
/// If this program has no path.
#[must_use]
pub fn arguments(name: &str) -> Vec<String> {
    let this = env::current_exe().expect("this program has a path");
    let this = this.to_str().expect("the path is text").to_owned();
    [this.as_str(), name, "--exact", "--ignored", "--nocapture", "--test-threads=1"].map(str::to_owned).to_vec()
}

/// Runs the ignored test `name` of this binary, behind `prefix` (`setpriv` and the like), and expects that it passes.
///
/// # Panics
///
/// If the test fails, does not exist, or takes longer than `limit`; with its output.
#[track_caller]
pub fn run(prefix: &[&str], name: &str, limit: Duration) -> Finished {
    let finished = start(prefix, name).finish(limit).expect_success();
    assert!(finished.stdout.contains("test result: ok. 1 passed"), "{finished}");
    finished
}

/// Starts the ignored test `name` of this binary, behind `prefix`.
///
/// # Panics
///
/// If it cannot be started.
#[must_use]
pub fn start(prefix: &[&str], name: &str) -> Program {
    let mut words: Vec<String> = prefix.iter().map(|&word| word.to_owned()).collect();
    words.extend(arguments(name));
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    Program::start(name, command)
}
