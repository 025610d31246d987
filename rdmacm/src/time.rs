//! Points in time that cannot overflow.

use std::time::{Duration, Instant};

/// As good as for ever: 30 years.
const FOREVER: Duration = Duration::from_secs(30 * 365 * 24 * 3600);

/// `wait` after `start`; for waits that no clock can hold, a time that nobody lives to see.
pub(crate) fn after(start: Instant, wait: Duration) -> Instant {
    start + wait.min(FOREVER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_wait_does_not_overflow() {
        let now = Instant::now();
        assert!(after(now, Duration::MAX) > after(now, Duration::from_secs(1_000_000)));
        assert_eq!(after(now, Duration::from_secs(1)), now + Duration::from_secs(1));
    }
}
