//! Faults of the network and the devices, made with the test machine's own tools.
//!
//! They change the system, so they are only for the test machine: [`Faults::available`] is `None` elsewhere.

use std::env;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::in_test_machine;

/// The right to change the test machine's network. Dropping it makes the network whole again.
#[derive(Debug)]
pub struct Faults {
    library: String,
}

impl Faults {
    /// `None`, which is said aloud, outside the test machine.
    ///
    /// # Panics
    ///
    /// If the test machine does not say where its scripts are.
    #[must_use]
    pub fn available() -> Option<Self> {
        if !in_test_machine() {
            println!("SKIP: changes the network, and this is not the test machine");
            return None;
        }
        let library = env::var("RDMACM_GUEST_LIB").expect("the test machine sets it");
        Some(Self { library })
    }

    /// Changes the netem settings of what the interface sends, such as `loss 100%`.
    pub fn netem(&self, interface: &str, settings: &str) {
        self.run(&format!("pair_netem {interface} {settings}"));
    }

    /// Lets packets pass again in both directions.
    pub fn heal(&self) {
        self.run("pair_netem v0; pair_netem v1");
    }

    /// Removes an RDMA device, and returns how long that took.
    ///
    /// # Panics
    ///
    /// If it is not removed after `limit`.
    #[track_caller]
    #[must_use]
    pub fn remove_device(&self, device: &str, limit: Duration) -> Duration {
        let start = Instant::now();
        let mut child = Command::new("rdma").args(["link", "del", device]).spawn().expect("iproute2 is installed");
        while child.try_wait().expect("our child").is_none() {
            assert!(start.elapsed() < limit, "`rdma link del {device}` still waits after {limit:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        start.elapsed()
    }

    /// Makes an RDMA device on an interface, and waits until its port is up.
    pub fn add_device(&self, device: &str, interface: &str) {
        self.run(&format!("rdma link add {device} type rxe netdev {interface} && pair_wait"));
    }

    /// Runs a shell command with the functions of `pair.sh` at hand, and returns what it printed.
    ///
    /// # Panics
    ///
    /// If it fails.
    #[track_caller]
    pub fn run(&self, command: &str) -> String {
        let script = format!(". {}/pair.sh; {command}", self.library);
        let output = Command::new("bash").args(["-c", &script]).output().expect("bash is installed");
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{command}: {}\n{text}", output.status);
        text
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        self.heal();
    }
}
