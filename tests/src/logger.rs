//! The libraries' log on standard error, with times, when `RDMACM_LOG` is set to a level: for finding out why a test fails.

use std::env;
use std::sync::OnceLock;
use std::time::Instant;

use log::{LevelFilter, Log, Metadata, Record};

struct Logger {
    start: Instant,
}

impl Log for Logger {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        eprintln!("{:9.6} {:5} {}", self.start.elapsed().as_secs_f64(), record.level(), record.args());
    }

    fn flush(&self) {}
}

/// Starts logging if it was asked for; once for the process.
pub(crate) fn start() {
    static LOGGER: OnceLock<Logger> = OnceLock::new();
    let Some(level) = env::var("RDMACM_LOG").ok().and_then(|level| level.parse::<LevelFilter>().ok()) else { return };
    let logger = LOGGER.get_or_init(|| Logger { start: Instant::now() });
    if log::set_logger(logger).is_ok() {
        log::set_max_level(level);
    }
}
