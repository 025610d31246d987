//! Connecting again, with patience.

use std::net::ToSocketAddrs;
use std::time::{Duration, Instant};

use crate::cancel::CancelToken;
use crate::connection::Connection;
use crate::connector::Connector;
use crate::error::{Error, Result};

/// How often, and how patiently, [`Connector::connect_with_retry`] tries.
///
/// The pause before the n-th new attempt is `base · 2^(n-1)`, at most `max`, times a random factor between one half and
/// one, so that many clients of a server that comes back do not all arrive at once.
#[derive(Clone, Debug)]
pub struct RetryPolicy {
    base: Duration,
    max: Duration,
    attempts: u32,
    limit: Option<Duration>,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { base: Duration::from_millis(100), max: Duration::from_secs(10), attempts: 10, limit: None }
    }
}

impl RetryPolicy {
    /// The defaults: 10 attempts, pauses from 100 ms to 10 s, no limit in all.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The first pause and the longest one.
    #[must_use]
    pub fn pauses(mut self, first: Duration, longest: Duration) -> Self {
        self.base = first;
        self.max = longest;
        self
    }

    /// How many attempts in all, at least one.
    #[must_use]
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts.max(1);
        self
    }

    /// No attempt begins later than this after the first.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = Some(limit);
        self
    }

    /// The pause before the n-th new attempt, from 1, for `random` in 0..=255.
    fn pause(&self, attempt: u32, random: u8) -> Duration {
        let doubled = self.base.saturating_mul(1u32.checked_shl(attempt - 1).unwrap_or(u32::MAX));
        let longest = doubled.min(self.max);
        longest / 2 + longest / 510 * u32::from(random)
    }
}

impl Connector {
    /// Connects, and tries again as `policy` says when the cause can pass by itself ([`Error::can_pass`]): refused, timed
    /// out, unreachable, a stale connection, no device. Never for what would fail in the same way again. The connector's
    /// deadline holds for each attempt.
    ///
    /// # Errors
    /// As [`Connector::connect`]: the last attempt's error.
    pub fn connect_with_retry(&self, address: impl ToSocketAddrs, policy: &RetryPolicy) -> Result<Connection> {
        let started = Instant::now();
        let mut attempt = 1;
        loop {
            let error = match self.connect(&address) {
                Ok(connection) => return Ok(connection),
                Err(error) => error,
            };
            let pause = policy.pause(attempt, random_byte());
            let too_late = policy.limit.is_some_and(|limit| started.elapsed().saturating_add(pause) > limit);
            if !error.can_pass() || attempt >= policy.attempts || too_late {
                return Err(error);
            }
            log::debug!("attempt {attempt} of {}: {error}; next in {pause:?}", policy.attempts);
            sleep(pause, self.cancel_token())?;
            attempt += 1;
        }
    }
}

/// Sleeps, unless the token is cancelled.
fn sleep(pause: Duration, cancel: Option<&CancelToken>) -> Result<()> {
    match cancel {
        None => std::thread::sleep(pause),
        Some(token) => {
            if token.receiver().recv_timeout(pause) == Err(crossbeam_channel::RecvTimeoutError::Disconnected) {
                return Err(Error::Cancelled);
            }
        }
    }
    Ok(())
}

/// A byte that differs between processes and calls: std seeds each `RandomState` anew.
fn random_byte() -> u8 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0u8).to_le_bytes()[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_vary_by_half() {
        let policy = RetryPolicy::new().pauses(Duration::from_millis(100), Duration::from_secs(1));
        let about =
            |pause: Duration, millis: u64| pause.abs_diff(Duration::from_millis(millis)) < Duration::from_micros(1);
        assert!(about(policy.pause(1, 255), 100));
        assert!(about(policy.pause(1, 0), 50));
        assert!(about(policy.pause(3, 255), 400));
        assert!(about(policy.pause(9, 255), 1000));
        assert!(about(policy.pause(u32::MAX, 0), 500));
        let endless = RetryPolicy::new().pauses(Duration::MAX, Duration::MAX);
        assert!(endless.pause(7, 255) > Duration::from_secs(1 << 40));
    }
}
