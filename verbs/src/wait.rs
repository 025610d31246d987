//! Waiting for completions: spin for a while, then sleep, until a deadline.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::cq::CompletionQueue;
use crate::error::{Error, OsError, Result};

/// How to wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wait {
    /// Poll without end: the lowest latency, and a whole processor for it.
    Busy,
    /// Sleep at once.
    Sleep,
    /// Poll for a short time, then sleep. Where polling keeps failing, or the process has only one processor, it
    /// sleeps at once.
    #[default]
    Adaptive,
}

/// How long a call may wait. The deadline is computed when the call first has to wait, so that calls that do
/// not wait never read the clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    limit: Limit,
    deadline: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
enum Limit {
    Never,
    Forever,
    For(Duration),
}

impl Patience {
    /// Not at all.
    pub(crate) const NONE: Patience = Patience { limit: Limit::Never, deadline: None };

    /// For ever, or for this long.
    #[inline]
    pub(crate) fn from_timeout(timeout: Option<Duration>) -> Patience {
        let limit = timeout.map_or(Limit::Forever, Limit::For);
        Patience { limit, deadline: None }
    }

    /// As the caller of a `_timeout` function says; zero is refused as std does.
    pub(crate) fn of(timeout: Duration) -> Result<Patience> {
        check_timeout(Some(timeout))?;
        Ok(Patience::from_timeout(Some(timeout)))
    }

    fn deadline(&mut self, what: &'static str) -> Result<Option<Instant>> {
        match (self.limit, self.deadline) {
            (Limit::Never, _) => Err(Error::WouldBlock),
            (Limit::Forever, _) => Ok(None),
            (Limit::For(_), Some(deadline)) if Instant::now() >= deadline => Err(Error::TimedOut(what)),
            (Limit::For(_), Some(deadline)) => Ok(Some(deadline)),
            (Limit::For(timeout), None) => {
                // A time too far for the clock is for ever.
                self.deadline = Instant::now().checked_add(timeout);
                if self.deadline.is_none() {
                    self.limit = Limit::Forever;
                }
                Ok(self.deadline)
            }
        }
    }
}

/// Refuses a timeout of zero, like std's sockets.
pub(crate) fn check_timeout(timeout: Option<Duration>) -> Result<()> {
    if timeout == Some(Duration::ZERO) {
        return Err(Error::misuse("a timeout of zero is not allowed; use the `try_` form to not wait at all"));
    }
    Ok(())
}

/// One half's way of waiting, with what it learnt.
#[derive(Debug)]
pub(crate) struct Waiter {
    mode: Wait,
    spin: SpinBudget,
    /// Only messages that their sender marked, and failures, end a sleep.
    pub(crate) solicited_only: bool,
}

impl Waiter {
    pub(crate) fn new(mode: Wait, spin: Duration) -> Waiter {
        let spin = if mode == Wait::Adaptive && processors() > 1 { spin } else { Duration::ZERO };
        Waiter { mode, spin: SpinBudget::new(spin), solicited_only: false }
    }

    /// Calls `progress` until it returns something, waiting between the calls as the mode says.
    ///
    /// `progress` must look at the queue first and then at whatever `closed` announces. `what` names the wait for
    /// the error.
    ///
    /// # Errors
    /// [`Error::TimedOut`] or [`Error::WouldBlock`] by `patience`; errors of `progress`.
    pub(crate) fn wait<T>(
        &mut self,
        cq: &CompletionQueue,
        closed: BorrowedFd<'_>,
        patience: &mut Patience,
        what: &'static str,
        mut progress: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let deadline = patience.deadline(what)?;
        if self.mode == Wait::Busy {
            return match spin(deadline, &mut progress)? {
                Some(done) => Ok(done),
                None => Err(Error::TimedOut(what)),
            };
        }
        if let Some(budget) = self.spin.next() {
            let end = Instant::now() + budget;
            let found = spin(Some(deadline.map_or(end, |d| d.min(end))), &mut progress)?;
            self.spin.learn(found.is_some());
            if let Some(done) = found {
                return Ok(done);
            }
        }
        loop {
            cq.arm_for(self.solicited_only)?;
            // What completed before it was armed gives no event.
            if let Some(done) = progress()? {
                return Ok(done);
            }
            let ready = sleep(cq, closed, deadline)?;
            if ready {
                cq.take_event()?;
            }
            if let Some(done) = progress()? {
                return Ok(done);
            }
            if deadline.is_some_and(|d| Instant::now() >= d) {
                return Err(Error::TimedOut(what));
            }
        }
    }
}

/// Polls until the time is over. The clock is read every few rounds, since it costs more than a poll.
fn spin<T>(until: Option<Instant>, progress: &mut impl FnMut() -> Result<Option<T>>) -> Result<Option<T>> {
    loop {
        for _ in 0..16 {
            if let Some(done) = progress()? {
                return Ok(Some(done));
            }
            std::hint::spin_loop();
        }
        if until.is_some_and(|until| Instant::now() >= until) {
            return Ok(None);
        }
    }
}

/// Sleeps until there is an event, the connection is closed, the deadline is over, or a signal came.
/// Returns whether there is an event.
fn sleep(cq: &CompletionQueue, closed: BorrowedFd<'_>, deadline: Option<Instant>) -> Result<bool> {
    let events =
        cq.event_fd().ok_or(Error::Misuse("a completion queue without a channel cannot be waited for".into()))?;
    let mut fds = [PollFd::new(events, PollFlags::POLLIN), PollFd::new(closed.as_fd(), PollFlags::POLLIN)];
    match poll(&mut fds, poll_timeout(deadline, Instant::now)) {
        Ok(_) => Ok(fds[0].any().unwrap_or(true)),
        Err(Errno::EINTR) => Ok(false),
        Err(errno) => Err(OsError::new("poll", errno).into()),
    }
}

/// The rest of the time, rounded up to whole milliseconds, so that it is never slept too little.
fn poll_timeout(deadline: Option<Instant>, now: impl FnOnce() -> Instant) -> PollTimeout {
    match deadline {
        None => PollTimeout::NONE,
        Some(deadline) => {
            let rest = deadline.saturating_duration_since(now());
            let millis = rest.as_nanos().div_ceil(1_000_000);
            i32::try_from(millis).ok().and_then(|ms| PollTimeout::try_from(ms).ok()).unwrap_or(PollTimeout::MAX)
        }
    }
}

/// Processors that this process may use, as it was at the first call.
fn processors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// How long to spin: all of the budget while that finds something, nothing after it failed a few times in a
/// row, and a probe from time to time to see whether that changed.
#[derive(Debug)]
struct SpinBudget {
    max: Duration,
    misses: u32,
    /// Waits since the last spin, while not spinning.
    skipped: u32,
}

/// Misses in a row after which spinning stops.
const GIVE_UP: u32 = 8;
/// Waits without spinning after which it is tried again.
const PROBE: u32 = 64;

impl SpinBudget {
    fn new(max: Duration) -> SpinBudget {
        SpinBudget { max, misses: 0, skipped: 0 }
    }

    /// How long the next wait spins, if at all.
    fn next(&mut self) -> Option<Duration> {
        if self.max.is_zero() {
            return None;
        }
        if self.misses >= GIVE_UP {
            self.skipped += 1;
            if self.skipped < PROBE {
                return None;
            }
            self.skipped = 0;
        }
        Some(self.max)
    }

    /// Whether spinning found something.
    fn learn(&mut self, hit: bool) {
        self.misses = if hit { 0 } else { (self.misses + 1).min(GIVE_UP) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spinning_stops_when_it_keeps_failing_and_is_tried_again() {
        let mut spin = SpinBudget::new(Duration::from_micros(20));
        for _ in 0..GIVE_UP {
            assert_eq!(spin.next(), Some(Duration::from_micros(20)));
            spin.learn(false);
        }
        let waits = (1..).find(|_| spin.next().is_some()).expect("a probe comes");
        assert_eq!(waits, PROBE);
        spin.learn(false);
        assert_eq!(spin.next(), None, "one failed probe changes nothing");
        while spin.next().is_none() {}
        spin.learn(true);
        assert!(spin.next().is_some(), "a probe that succeeds starts it again");
    }

    #[test]
    fn no_budget_no_spin() {
        assert_eq!(SpinBudget::new(Duration::ZERO).next(), None);
        assert!(Waiter::new(Wait::Sleep, Duration::from_micros(20)).spin.next().is_none());
    }

    #[test]
    fn the_deadline_is_set_at_the_first_wait_and_kept() {
        let mut patience = Patience::of(Duration::from_secs(60)).expect("not zero");
        let first = patience.deadline("x").expect("not over").expect("limited");
        assert_eq!(patience.deadline("x").expect("not over"), Some(first));
        assert!(matches!(Patience::NONE.clone().deadline("x"), Err(Error::WouldBlock)));
        assert!(matches!(Patience::from_timeout(None).deadline("x"), Ok(None)));
        assert!(matches!(Patience::of(Duration::MAX).expect("not zero").deadline("x"), Ok(None)));
        assert!(matches!(Patience::of(Duration::ZERO), Err(Error::Misuse(_))));
        let mut over = Patience { limit: Limit::For(Duration::from_secs(1)), deadline: Some(Instant::now()) };
        assert!(matches!(over.deadline("a message"), Err(Error::TimedOut("a message"))));
    }

    #[test]
    fn sleeping_time_is_rounded_up() {
        let now = Instant::now();
        let ms = |d: Duration| poll_timeout(Some(now + d), || now).as_millis();
        assert_eq!(ms(Duration::from_nanos(1)), Some(1));
        assert_eq!(ms(Duration::from_millis(5)), Some(5));
        assert_eq!(ms(Duration::from_micros(5001)), Some(6));
        assert_eq!(ms(Duration::ZERO), Some(0));
        assert_eq!(ms(Duration::from_secs(1 << 33)), Some(i32::MAX as u32));
        assert_eq!(poll_timeout(None, || now), PollTimeout::NONE);
    }
}
