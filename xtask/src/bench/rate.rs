//! How long it takes to set up and take down many connections at once, ours against C's `cmtime`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::stats::{Comparison, Pair};
use crate::process::heading;
use crate::{artifacts, setup, vm};

/// How many connections at once.
const CONNECTIONS: u32 = 500;

/// Interleaved pairs of runs.
const ROUNDS: u32 = 5;

/// What is compared: its name, the steps of C's program that are its parts, and the step of ours.
const STEPS: [(&str, &[&str], &str); 2] = [
    ("set up", &["create id", "resolve addr", "resolve route", "create qp", "connect"], "set up"),
    ("tear down", &["disconnect", "destroy"], "tear down"),
];

/// Measures in the test machine, in real time, and prints a table.
///
/// # Errors
///
/// When a run fails.
pub(super) fn run() -> Result<()> {
    heading(&format!("{CONNECTIONS} connections at once, C's cmtime and ours"));
    let ours = build()?;
    let machine = vm::Machine { netem: false, timeout: Duration::from_secs(900), ..vm::Machine::default() };
    let outcome = machine.run(&["bash".to_owned(), "-c".to_owned(), script(&ours)])?;
    ensure!(outcome.status == 0, "the benchmark ended with status {} in the test machine", outcome.status);
    println!("\n| {CONNECTIONS} connections | pairs | C, ms | ours, ms | C's time / ours | spread |");
    println!("| --- | ---: | ---: | ---: | ---: | --- |");
    for (name, c, ours) in STEPS {
        let pairs = read_pairs(&outcome.output, c, ours)?;
        let Comparison { pairs, c, ours, ratio } = Comparison::of(&pairs);
        println!(
            "| {name} | {pairs} | {:.0} | {:.0} | {:.2} | {:.2} to {:.2} |",
            c.median,
            ours.median,
            1.0 / ratio.median,
            1.0 / ratio.max,
            1.0 / ratio.min
        );
    }
    Ok(())
}

fn build() -> Result<PathBuf> {
    artifacts::build(setup::cargo()?.args(["build", "--release", "-p", "rdmacm-examples", "--bin", "cmtime"]))?
        .into_iter()
        .find(|program| program.ends_with("cmtime"))
        .context("the package rdmacm-examples has no program cmtime")
}

/// Runs both programs in turn, each with a server of its own kind; a line `C` or `ours` is before what each prints.
fn script(ours: &Path) -> String {
    format!(
        "set -e
         measure() {{
             \"$2\" -b 10.77.0.1 -p $port >/dev/null & server=$!
             until rdma resource show cm_id | grep -q \"LISTEN.*:$port\"; do sleep 0.1; done
             echo $1
             timeout 120 \"$2\" -s 10.77.0.1 -p $port -c {CONNECTIONS}
             kill $server
             port=$((port + 1))
         }}
         port=7300
         for round in $(seq {ROUNDS}); do
             measure C cmtime
             measure ours '{}'
         done",
        ours.display()
    )
}

/// The milliseconds of each round, from the lines `STEP : TOTAL ...`.
fn read_pairs(output: &str, c: &[&str], ours: &str) -> Result<Vec<Pair>> {
    let (mut of_c, mut of_ours) = (Vec::new(), Vec::new());
    let mut is_c = false;
    for line in output.lines().map(str::trim) {
        match line {
            "C" => {
                is_c = true;
                of_c.push(0.0);
            }
            "ours" => is_c = false,
            _ => {}
        }
        let Some((step, figures)) = line.split_once(':') else { continue };
        let Some(Ok(total)) = figures.split_whitespace().next().map(str::parse::<f64>) else { continue };
        if is_c && c.contains(&step.trim()) {
            *of_c.last_mut().context("a figure before the name of its program")? += total;
        } else if !is_c && step.trim() == ours {
            of_ours.push(total);
        }
    }
    ensure!(!of_c.is_empty() && of_c.len() == of_ours.len(), "not as many runs of C's program as of ours");
    Ok(of_c.into_iter().zip(of_ours).map(|(c, ours)| Pair { c, ours }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_steps_of_c_are_added_up() {
        let output = "C\ncreating id\nstep  total ms  max ms\ncreate id    :  1.50  0.09\nconnect      :  2.50  1\n\
                      disconnect   :  7.00  1\nours\nset up       :  3.00  1\ntear down    :  5.00  1\n";
        let set_up = read_pairs(output, STEPS[0].1, STEPS[0].2).expect("one pair");
        assert_eq!(set_up, [Pair { c: 4.0, ours: 3.0 }]);
        let tear_down = read_pairs(output, STEPS[1].1, STEPS[1].2).expect("one pair");
        assert_eq!(tear_down, [Pair { c: 7.0, ours: 5.0 }]);
        assert!(read_pairs("C\n", STEPS[0].1, STEPS[0].2).is_err());
    }
}
