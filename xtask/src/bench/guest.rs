//! The part of the benchmark that runs in the test machine.
//!
//! The time of a run is taken by the kernel, and in the same way for any program: from the client's "ready to use" message
//! (tracepoint `cm_send_rtu`) to its disconnect (`cm_disconnect`). So it holds all pings and neither the start of the
//! processes nor the connection's setup, where an instruction-counting guest has large jumps of its clock. What is left of
//! the setup cancels in the difference of a long and a short run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::process;

const TRACING: &str = "/sys/kernel/tracing";
const ADDRESS: &str = "10.77.0.1";
const C_RPING: &str = "/usr/bin/rping";

/// A run that takes longer has hung.
const PATIENCE: Duration = Duration::from_secs(120);

/// What is to be measured.
#[derive(Args, Clone, Debug)]
pub(crate) struct Request {
    /// Our rping
    #[arg(long)]
    pub(crate) ours: PathBuf,
    /// Pings of a short run
    #[arg(long)]
    pub(crate) short: u32,
    /// Pings of a long run
    #[arg(long)]
    pub(crate) long: u32,
    /// Pairs of measurements for each size
    #[arg(long)]
    pub(crate) rounds: u32,
    /// Bytes of each ping
    #[arg(long, value_delimiter = ',')]
    pub(crate) sizes: Vec<u32>,
}

impl Request {
    /// As arguments for the program in the guest.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let sizes: Vec<_> = self.sizes.iter().map(u32::to_string).collect();
        vec![
            format!("--ours={}", self.ours.display()),
            format!("--short={}", self.short),
            format!("--long={}", self.long),
            format!("--rounds={}", self.rounds),
            format!("--sizes={}", sizes.join(",")),
        ]
    }
}

/// Measures, and prints a line `pair SIZE C OURS` for each pair, with microseconds for one ping.
///
/// # Errors
///
/// When a program fails or the kernel's trace is not as expected.
pub(crate) fn run(request: &Request) -> Result<()> {
    process::run(Command::new("mount").args(["-t", "tracefs", "tracefs", TRACING]).stderr(Stdio::null())).or_else(
        |error| {
            if Path::new(TRACING).join("trace").exists() { Ok(()) } else { Err(error) }
        },
    )?;
    trace_file("trace_clock", "mono")?;
    trace_file("events/rdma_cma/cm_send_rtu/enable", "1")?;
    trace_file("events/rdma_cma/cm_disconnect/enable", "1")?;
    let mut runs = Runs { port: 7200 };
    for &size in &request.sizes {
        for program in [Path::new(C_RPING), &request.ours] {
            runs.measure(program, size, request.short)?; // warms the caches up
        }
        for round in 0..request.rounds {
            // Who comes first alternates, so that a drift of the machine favours nobody.
            let (c, ours) = if round % 2 == 0 {
                let c = runs.per_ping(C_RPING.as_ref(), size, request)?;
                (c, runs.per_ping(&request.ours, size, request)?)
            } else {
                let ours = runs.per_ping(&request.ours, size, request)?;
                (runs.per_ping(C_RPING.as_ref(), size, request)?, ours)
            };
            println!("pair {size} {c:.3} {ours:.3}");
        }
    }
    Ok(())
}

struct Runs {
    /// Each run has a port of its own.
    port: u16,
}

impl Runs {
    /// Microseconds for one ping.
    fn per_ping(&mut self, program: &Path, size: u32, request: &Request) -> Result<f64> {
        let short = self.measure(program, size, request.short)?;
        let long = self.measure(program, size, request.long)?;
        Ok((long - short) / f64::from(request.long - request.short))
    }

    /// Microseconds for a connection with so many pings.
    fn measure(&mut self, program: &Path, size: u32, pings: u32) -> Result<f64> {
        self.port += 1;
        let port = self.port.to_string();
        let arguments = ["-a", ADDRESS, "-p", &port, "-S", &size.to_string(), "-C", &pings.to_string()];
        let start = |role: &str| {
            let mut command = Command::new(program);
            command.arg(role).args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            command.spawn().with_context(|| format!("cannot start {}", program.display()))
        };
        let mut server = start("-s")?;
        wait_for_listener(&port, &mut server)?;
        trace_file("trace", "")?; // empties it
        let mut client = start("-c")?;
        for (role, child) in [("client", &mut client), ("server", &mut server)] {
            let status = wait(child)?;
            ensure!(
                status == Some(0),
                "the {role} `{} {}` ended with {status:?}",
                program.display(),
                arguments.join(" ")
            );
        }
        let trace = fs::read_to_string(Path::new(TRACING).join("trace"))?;
        duration(&trace).with_context(|| format!("the kernel's trace is not as expected:\n{trace}"))
    }
}

fn trace_file(name: &str, value: &str) -> Result<()> {
    fs::write(Path::new(TRACING).join(name), value).with_context(|| format!("cannot write to {TRACING}/{name}"))
}

/// Waits until the kernel shows a listening id on the port.
fn wait_for_listener(port: &str, server: &mut Child) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let end = format!(":{port}");
    loop {
        let listing = process::output(Command::new("rdma").args(["resource", "show", "cm_id"]))?;
        let listing = String::from_utf8_lossy(&listing);
        let mut lines = listing.lines().filter(|line| line.contains("LISTEN"));
        if lines.any(|line| line.split_whitespace().any(|word| word.ends_with(&end))) {
            return Ok(());
        }
        if let Some(status) = server.try_wait()? {
            bail!("the server ended with {status} before it listened");
        }
        ensure!(Instant::now() < deadline, "the server does not listen");
        sleep(Duration::from_millis(20));
    }
}

/// The exit status, or `None` if the process had to be killed.
fn wait(child: &mut Child) -> Result<Option<i32>> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait()? {
            return Ok(status.code());
        }
        sleep(Duration::from_millis(50));
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}

/// Microseconds from the first `cm_send_rtu` to the next `cm_disconnect`: the client's, the server's follows.
fn duration(trace: &str) -> Option<f64> {
    let mut start = None;
    for line in trace.lines().filter(|line| !line.starts_with('#')) {
        // `rping-173 [000] ..... 8.169249: cm_send_rtu: cm.id=0 src=...`
        let words: Vec<_> = line.split_whitespace().collect();
        let event = words.iter().position(|word| matches!(*word, "cm_send_rtu:" | "cm_disconnect:"))?;
        let seconds: f64 = words.get(event.checked_sub(1)?)?.strip_suffix(':')?.parse().ok()?;
        match (words[event], start) {
            ("cm_send_rtu:", None) => start = Some(seconds),
            ("cm_disconnect:", Some(start)) => return Some((seconds - start) * 1e6),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_from_the_clients_rtu_to_its_disconnect() {
        let trace = "# tracer: nop\n#\n\
            rping-173   [000] .....     8.169249: cm_send_rtu: cm.id=0 src=10.77.0.2:55309 dst=10.77.0.1:7200 tos=0\n\
            rping-172   [000] .N...     8.191108: cm_disconnect: cm.id=0 src=10.77.0.2:55309 dst=10.77.0.1:7200 tos=0\n\
            rping-162   [000] .....     8.193076: cm_disconnect: cm.id=1 src=10.77.0.1:7200 dst=10.77.0.2:55309 tos=0\n";
        let microseconds = duration(trace).expect("both events are there");
        assert!((microseconds - 21_859.0).abs() < 0.5, "{microseconds}");
        assert_eq!(duration("# tracer: nop\n"), None);
    }
}
