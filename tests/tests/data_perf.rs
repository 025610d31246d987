//! The measuring tool: every test runs, and gives figures that can be.

use std::process::Command;
use std::time::Duration;

use rdmacm_tests::process::{is_listening, our_program};
use rdmacm_tests::{Family, Program, lab, wait_for};

const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn every_measurement_gives_figures() {
    let Some(lab) = lab(300) else { return };
    let address = lab.server(Family::V4);
    let place = ["-a".to_owned(), address.ip().to_string(), "-p".to_owned(), address.port().to_string()];
    let perf = |name: &str, more: &[&str]| {
        let mut command = Command::new(our_program("rdma-perf"));
        command.arg(name).args(&place).args(more);
        Program::start(format!("rdma-perf {name}"), command)
    };
    let server = perf("server", &[]);
    wait_for("the server to listen", Duration::from_secs(10), || is_listening(address).then_some(()));

    for name in ["send-lat", "write-lat", "read-lat", "cas-lat", "add-lat"] {
        for wait in ["sleep", "adaptive"] {
            let done = perf(name, &["-n", "20", "--wait", wait, "--json", "-"]).finish(PATIENCE).expect_success();
            let line = done.stdout.lines().nth(2).unwrap_or_default();
            let figures: Vec<f64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            assert_eq!(figures.len(), 9, "{done}");
            let [_, count, min, max, typical, ..] = figures[..] else { panic!("{done}") };
            assert!(count == 20.0 && 0.0 < min && min <= typical && typical <= max, "{done}");
            assert!(done.stdout.contains("\"p99_usec\": "), "{done}");
        }
    }
    for name in ["send-bw", "write-bw", "read-bw"] {
        for size in ["1", "200", "5000", "65536"] {
            let arguments = ["-n", "40", "-t", "16", "-s", size];
            let done = perf(name, &arguments).finish(PATIENCE).expect_success();
            let line = done.stdout.lines().nth(2).unwrap_or_default();
            let figures: Vec<f64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            assert!(figures.len() == 5 && figures[1] == 40.0 && figures[4] > 0.0, "{done}");
        }
    }
    drop(server);
}
