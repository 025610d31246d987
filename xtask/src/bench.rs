//! `cargo xtask bench`: the time of one ping, and of many connections at once (`rate`), ours against C's, in the test machine.
//!
//! Two methods, because neither says all. An instruction-counting guest gives figures that repeat within 1 % on any host, and
//! so can decide whether we got slower (the gate); but it has one CPU and knows no caches. A guest with two CPUs in real time
//! has what it lacks and is noisy, so there the pairs are interleaved and many.

mod guest;
mod rate;
mod stats;

use std::fmt::Write;
use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

pub(crate) use guest::{Request, run as run_in_guest};

use self::stats::{Comparison, Pair};
use crate::process::{self, heading};
use crate::setup::{self, Need};
use crate::{demo, vm};

/// Bytes of a ping: a small one, and the largest that C's rping takes.
const SIZES: [u32; 2] = [64, 65_535];

/// The gate: one of our pings takes at most so much of C's time, in instructions.
const MOST: f64 = 1.0;

/// The table, for the README to quote.
const RESULT: &str = "docs/bench/rping.md";

struct Method {
    name: &'static str,
    instruction_count: bool,
    short: u32,
    long: u32,
    rounds: u32,
}

const METHODS: [Method; 2] = [
    Method { name: "instructions", instruction_count: true, short: 100, long: 1000, rounds: 3 },
    // With 11 pairs a difference of 5 % is real: measured with the same program on both sides.
    Method { name: "real time", instruction_count: false, short: 100, long: 600, rounds: 11 },
];

struct Row {
    method: &'static str,
    size: u32,
    is_gate: bool,
    comparison: Comparison,
}

/// `cargo xtask bench`.
///
/// # Errors
///
/// When a run fails, or our ping needs more instructions than C's.
pub(crate) fn run() -> Result<()> {
    setup::ensure(&[Need::Build, Need::Machine])?;
    heading("building rping");
    let rping = demo::build_rping()?;
    let driver = std::env::current_exe().context("cannot find this program's own file")?;
    let mut rows = Vec::new();
    let mut machine_text = String::new();
    for method in METHODS {
        heading(&format!("{}: microseconds for one ping, C and ours", method.name));
        let request = Request {
            ours: rping.clone(),
            short: method.short,
            long: method.long,
            rounds: method.rounds,
            sizes: SIZES.to_vec(),
        };
        let machine = vm::Machine {
            instruction_count: method.instruction_count,
            netem: false,
            timeout: Duration::from_secs(1800),
            ..vm::Machine::default()
        };
        let mut command = vec![driver.display().to_string(), "guest-bench".to_owned()];
        command.extend(request.arguments());
        let outcome = machine.run(&command)?;
        ensure!(outcome.status == 0, "the benchmark ended with status {} in the test machine", outcome.status);
        writeln!(machine_text, "* {}: {}, Linux {}", method.name, outcome.accelerator, outcome.kernel_release)?;
        for size in SIZES {
            let pairs = read_pairs(&outcome.output, size);
            ensure!(!pairs.is_empty(), "there are no results for {size} bytes");
            rows.push(Row {
                method: method.name,
                size,
                is_gate: method.instruction_count,
                comparison: Comparison::of(&pairs),
            });
        }
    }
    let table = table(&rows);
    heading("result");
    print!("{table}");
    write_report(&table, &machine_text)?;
    rate::run()?;
    for row in rows.iter().filter(|row| row.is_gate) {
        ensure!(
            row.comparison.ratio.median <= MOST,
            "a ping of {} bytes takes {:.3} of C's instructions, the limit is {MOST}",
            row.size,
            row.comparison.ratio.median
        );
    }
    println!("bench: a ping takes at most {MOST:.1} of C's instructions at all sizes");
    Ok(())
}

/// The lines `pair SIZE C OURS` of one size.
fn read_pairs(output: &str, size: u32) -> Vec<Pair> {
    let read = |line: &str| {
        let mut words = line.strip_prefix("pair ")?.split_whitespace();
        let of: u32 = words.next()?.parse().ok()?;
        let pair = Pair { c: words.next()?.parse().ok()?, ours: words.next()?.parse().ok()? };
        (of == size).then_some(pair)
    };
    output.lines().filter_map(read).collect()
}

fn table(rows: &[Row]) -> String {
    let mut table = String::from(
        "| bytes | method | pairs | C, us | ours, us | ours / C | spread of ours / C |\n\
         | ---: | --- | ---: | ---: | ---: | ---: | --- |\n",
    );
    for Row { method, size, comparison, .. } in rows {
        let Comparison { pairs, c, ours, ratio } = comparison;
        table.push_str(&format!(
            "| {size} | {method} | {pairs} | {:.1} | {:.1} | {:.3} | {:.3} to {:.3} |\n",
            c.median, ours.median, ratio.median, ratio.min, ratio.max
        ));
    }
    table
}

fn write_report(table: &str, machine: &str) -> Result<()> {
    let path = process::workspace_root().join(RESULT);
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut models = cpu.lines().filter_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = models.next().map_or("unknown", |(_, model)| model);
    let first_line = |program: &str, arguments: &[&str]| {
        let output = process::output(Command::new(program).args(arguments)).unwrap_or_default();
        String::from_utf8_lossy(&output).lines().next().unwrap_or("unknown").to_owned()
    };
    let text = format!(
        "# One ping, ours against C's\n\n\
         Written by `cargo xtask bench` on {}. Do not edit.\n\n\
         The time of one ping of `rping` (the server reads the client's buffer, then writes it back), our client and server \
         against the C client and server, in the test machine (docs/test-machine.md). Medians; the ratio is the median of the \
         pairs' ratios. \"instructions\": in a guest whose clock advances by 1 ns for each instruction, kernel included. \
         \"real time\": in a guest with two CPUs, interleaved pairs. The kernel takes the time, from the client's \"ready to \
         use\" message to its disconnect, and the difference of a long and a short run is divided by the difference of \
         their pings.\n\n{table}\n\
         * host: {model}, {} CPUs\n{machine}* {}\n* librdmacm {}\n",
        first_line("date", &["-u", "+%Y-%m-%d"]),
        1 + models.count(),
        first_line("qemu-system-x86_64", &["--version"]),
        first_line("dpkg-query", &["-W", "-f", "${Version}\n", "librdmacm1"]),
    );
    let folder = path.parent().expect("the path has a folder");
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    println!("\nwritten to {RESULT}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_read_by_size_and_other_lines_are_not() {
        let output = "server DISCONNECT EVENT...\npair 64 10.5 5.25\npair 65535 100 90\npair 64 x 1\npair 64 12 6\n";
        let pairs = [Pair { c: 10.5, ours: 5.25 }, Pair { c: 12.0, ours: 6.0 }];
        assert_eq!(read_pairs(output, 64), pairs);
        assert_eq!(read_pairs(output, 65_535).len(), 1);
    }
}
