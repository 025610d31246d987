//! `cargo xtask test` and `cargo xtask soak`: everything that continuous integration runs.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use crate::process::{self, heading};
use crate::report::Report;
use crate::setup::{self, Need};
use crate::{artifacts, layering, vm};

/// The package with the tests that need an RDMA device.
const DEVICE_TESTS: &str = "rdmacm-tests";

/// What to test.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    /// Leave the test machine out.
    pub(crate) host_only: bool,
    /// Only tests with this in their name, without the checks of the sources.
    pub(crate) filter: Option<String>,
    /// The guest's time limit.
    pub(crate) timeout: Duration,
    pub(crate) kernel: vm::Series,
    /// Tests of one binary that run at once in the guest.
    pub(crate) threads: u32,
}

/// `cargo xtask test`.
///
/// # Errors
///
/// When a check fails, a test fails, a device test was skipped in the test machine, or none ran there.
pub(crate) fn run(options: &Options) -> Result<()> {
    let start = Instant::now();
    let needs: &[Need] = if options.host_only { &[Need::Build] } else { &[Need::Build, Need::Machine] };
    setup::ensure(needs)?;
    if options.filter.is_none() {
        check_sources()?;
    }
    let host = host_tests(options)?;
    let machine = if options.host_only { Report::default() } else { device_tests(options, &[])? };
    finish("test", &[("host", &host), ("test machine", &machine)], start)
}

/// `cargo xtask soak`: the device tests with RDMACM_SOAK=1, which makes them run much longer.
///
/// # Errors
///
/// As for [`run`].
pub(crate) fn soak(options: &Options) -> Result<()> {
    let start = Instant::now();
    setup::ensure(&[Need::Build, Need::Machine])?;
    let machine = device_tests(options, &[("RDMACM_SOAK", "1")])?;
    finish("soak", &[("test machine", &machine)], start)
}

fn check_sources() -> Result<()> {
    heading("formatting");
    process::run(setup::cargo()?.args(["fmt", "--all", "--check"]))?;
    heading("clippy");
    process::run(setup::cargo()?.args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    heading("documentation");
    process::run(setup::cargo()?.args(["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"))?;
    heading("layering");
    layering::check(&process::workspace_root())
}

/// Runs the tests that need no device.
fn host_tests(options: &Options) -> Result<Report> {
    heading("tests on this host");
    let mut cargo = setup::cargo()?;
    cargo.args(["test", "--workspace", "--exclude", DEVICE_TESTS, "--no-fail-fast"]);
    if let Some(filter) = &options.filter {
        cargo.args(["--", filter]);
    }
    let (status, output) = process::tee(&mut cargo)?;
    let mut report = Report::read(&output);
    if !status.success() && report.failed == 0 {
        report.trouble.push(format!("`{}` ended with {status}", process::display(&cargo)));
    }
    Ok(report)
}

/// Builds the device tests and the example programs here, and runs the tests in the test machine.
fn device_tests(options: &Options, environment: &[(&str, &str)]) -> Result<Report> {
    heading("building the tests and the example programs for the test machine");
    let tests = artifacts::build(setup::cargo()?.args(["test", "-p", DEVICE_TESTS, "--no-run"]))?;
    let programs = artifacts::build(setup::cargo()?.args(["build", "-p", "rdmacm-examples", "--bins"]))?;
    let mut report = Report::default();
    if tests.is_empty() {
        report.trouble.push(format!("the package {DEVICE_TESTS} has no test binaries"));
        return Ok(report);
    }

    let mut machine = vm::Machine {
        kernel: options.kernel,
        timeout: options.timeout,
        folder: process::workspace_root().join("tests"), // where cargo runs a package's tests
        ..vm::Machine::default()
    };
    if let Some(folder) = programs.first().and_then(|program| program.parent()) {
        machine.environment.push(("RDMACM_BIN_DIR".to_owned(), folder.display().to_string()));
    }
    for (name, value) in environment {
        machine.environment.push(((*name).to_owned(), (*value).to_owned()));
    }
    heading("tests in the test machine");
    let outcome = machine.run(&guest_command(&tests, options))?;
    report = Report::read(&outcome.output);
    if outcome.status != 0 && report.failed == 0 {
        report.trouble.push(format!("the run in the test machine ended with status {}", outcome.status));
    }
    if report.skipped > 0 {
        report.trouble.push(format!("{} device tests were skipped, though there is a device", report.skipped));
    }
    if report.passed + report.failed == 0 && options.filter.is_none() {
        report.trouble.push("no device test ran in the test machine".to_owned());
    }
    Ok(report)
}

/// The command for the guest: all test binaries, one after the other, whether or not one fails.
fn guest_command(tests: &[PathBuf], options: &Options) -> Vec<String> {
    let script = process::workspace_root().join("xtask/guest/run-tests.sh");
    let mut command = vec!["bash".to_owned(), script.display().to_string()];
    command.push(options.threads.to_string());
    command.push(options.filter.clone().unwrap_or_default());
    command.extend(tests.iter().map(|test| test.display().to_string()));
    command
}

/// Prints the sums and says whether all is well.
fn finish(name: &str, parts: &[(&str, &Report)], start: Instant) -> Result<()> {
    heading(&format!("result, after {} s", start.elapsed().as_secs()));
    let mut sum = Report::default();
    for (place, report) in parts {
        println!("{place}: {} passed, {} failed, {} ignored", report.passed, report.failed, report.ignored);
        for trouble in &report.trouble {
            println!("{place}: {trouble}");
        }
        sum.add(report);
    }
    println!("{} passed, {} failed", sum.passed, sum.failed);
    ensure!(sum.failed == 0, "{} tests failed", sum.failed);
    if !sum.trouble.is_empty() {
        bail!("{} failed: {}", name, sum.trouble.join("; "));
    }
    Ok(())
}
