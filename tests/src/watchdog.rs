//! The end of a test that hangs.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

/// Aborts the process, with a message, unless it is dropped in time.
#[derive(Debug)]
pub struct Watchdog {
    // Dropping it wakes the thread.
    _alive: Sender<()>,
}

impl Watchdog {
    /// Starts one for the test that runs in this thread.
    ///
    /// # Panics
    ///
    /// If no thread can be started.
    #[must_use]
    pub fn start(limit: Duration) -> Self {
        let (alive, over) = mpsc::channel::<()>();
        let test = thread::current().name().unwrap_or("a test").to_owned();
        thread::Builder::new()
            .name("watchdog".to_owned())
            .spawn(move || {
                if over.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                    // To the real standard error output: the test's own is captured, and lost with the process.
                    let message =
                        format!("\nwatchdog: {test} did not end within {limit:?}; its threads wait in:\n{}", threads());
                    let _ = nix::unistd::write(std::io::stderr(), message.as_bytes());
                    std::process::abort();
                }
            })
            .expect("a thread for the watchdog");
        Self { _alive: alive }
    }
}

/// What each thread of this process waits for in the kernel.
fn threads() -> String {
    let mut text = String::new();
    for task in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let read = |file| std::fs::read_to_string(task.path().join(file)).unwrap_or_default().trim().to_owned();
        text += &format!("  {}: {}\n", read("comm"), read("wchan"));
    }
    text
}
