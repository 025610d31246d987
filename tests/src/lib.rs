//! What the device tests share.
//!
//! Every device test begins with [`lab`], which finds the RDMA devices, starts a watchdog, and hands out ports:
//!
//! ```no_run
//! # fn one_of_the_tests() {
//! let Some(lab) = rdmacm_tests::lab(20) else { return };
//! let address = lab.server(rdmacm_tests::Family::V4);
//! # }
//! ```
//!
//! * [`network`]: the devices and their addresses.
//! * [`process`]: other programs (rping of C and ours), with captured output and a time limit.
//! * [`leaks`]: what a process holds, before and after.
//! * [`watchdog`]: the end of a test that hangs.
//!
//! The tests of one binary run one at a time (`--test-threads=1`): they count what the whole process holds.

pub mod child;
pub mod faults;
pub mod leaks;
mod logger;
pub mod network;
pub mod process;
pub mod watchdog;

use std::env;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

pub use faults::Faults;
pub use leaks::Holdings;
pub use network::{Family, Network};
pub use process::{Kind, Program};

use watchdog::Watchdog;

/// What a device test works with.
#[derive(Debug)]
pub struct Lab {
    network: Network,
    _watchdog: Watchdog,
}

/// The devices, and a watchdog that ends the test after `seconds`.
///
/// `None` if there is no RDMA device, which is said aloud; the test then returns.
///
/// # Panics
///
/// If there is none in the test machine.
#[must_use]
pub fn lab(seconds: u64) -> Option<Lab> {
    logger::start();
    let Some(network) = Network::find() else {
        assert!(!in_test_machine(), "no RDMA device in the test machine");
        println!("SKIP: no RDMA device");
        return None;
    };
    Some(Lab { network, _watchdog: Watchdog::start(Duration::from_secs(seconds)) })
}

/// Whether this is the test machine, where tests may change the system and must not skip.
#[must_use]
pub fn in_test_machine() -> bool {
    env::var("RDMACM_TEST_MACHINE").is_ok_and(|value| value == "1")
}

/// `usual`, or `soaked` when the long runs are asked for (`RDMACM_SOAK=1`).
#[must_use]
pub fn rounds(usual: usize, soaked: usize) -> usize {
    if env::var("RDMACM_SOAK").is_ok_and(|value| value == "1") { soaked } else { usual }
}

impl Lab {
    /// An address to listen on, with a port that no other test uses.
    ///
    /// # Panics
    ///
    /// If the device has no address of the family.
    #[must_use]
    pub fn server(&self, family: Family) -> SocketAddr {
        self.network.server(family, port())
    }

    /// The address under which a client reaches a server that listens on `server`: for link-local addresses the scope
    /// is the client's own interface.
    ///
    /// # Panics
    ///
    /// If the client's device has no address of the family.
    #[must_use]
    pub fn seen_by_client(&self, server: SocketAddr) -> SocketAddr {
        self.network.seen_by_client(server)
    }

    /// The client's own address.
    ///
    /// # Panics
    ///
    /// If the device has no address of the family.
    #[must_use]
    pub fn client(&self, family: Family) -> SocketAddr {
        self.network.client(family, 0)
    }
}

/// A port that no other test uses: below the ephemeral ones, another range for each test process.
#[must_use]
pub fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let range = u16::try_from(std::process::id() % 60).expect("less than 60");
    10_000 + range * 300 + NEXT.fetch_add(1, Ordering::Relaxed) % 300
}

/// Calls `ready` until it gives something, for at most `limit`.
///
/// # Panics
///
/// If that takes longer than `limit`, with `what`.
#[track_caller]
pub fn wait_for<T>(what: &str, limit: Duration, mut ready: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(start.elapsed() < limit, "waited {limit:?} in vain for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What `action` gives, and how long it took.
pub fn timed<T>(action: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let value = action();
    (value, start.elapsed())
}
