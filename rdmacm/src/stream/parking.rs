//! Waiting, for any number of threads of one stream.
//!
//! One of the waiting threads, the *watcher*, sleeps on the stream's descriptors; the others sleep until the watcher tells
//! them to look again, or leaves them its place. Whatever happens to a stream wakes the watcher: it asks for an event of
//! the completion queues before it looks for the last time and sleeps. So nothing is missed, whichever thread took the
//! completion from the queue. No lock of the stream is held while a thread sleeps.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use verbs::{CompletionQueue, Control};

use crate::error::Error;
use crate::sys::CallError;

/// What an attempt gave.
#[derive(Debug)]
pub(super) enum Attempt<T> {
    /// It is done.
    Done(T),
    /// Something must arrive first; with `sends`, or something sent must be done.
    Wait { sends: bool },
}

#[derive(Debug)]
pub(super) struct Parking {
    state: Mutex<State>,
    /// For those that are not the watcher.
    told: Condvar,
    /// Counts what was told to them.
    generation: AtomicU64,
    /// How many sleep without being the watcher, or are about to.
    sleepers: AtomicU32,
    /// How many of them wait for sends to be done.
    want_sends: AtomicU32,
    /// Wakes the watcher.
    wake: EventFd,
    spin: Spin,
}

#[derive(Debug, Default)]
struct State {
    watched: bool,
}

impl Parking {
    pub(super) fn new(spin: Duration) -> io::Result<Self> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| Error::from(CallError { call: "eventfd", errno }))?;
        Ok(Self {
            state: Mutex::default(),
            told: Condvar::new(),
            generation: AtomicU64::new(0),
            sleepers: AtomicU32::new(0),
            want_sends: AtomicU32::new(0),
            wake,
            spin: Spin::new(spin),
        })
    }

    /// Calls `attempt` until it is done, sleeping in between; `None` when the deadline came first. An attempt on a stream
    /// that is broken must be done, with whatever result.
    pub(super) fn wait<T>(
        &self,
        control: &Control,
        deadline: Option<Instant>,
        mut attempt: impl FnMut() -> io::Result<Attempt<T>>,
    ) -> io::Result<Option<T>> {
        if let Some(budget) = self.spin.next() {
            let end = crate::time::after(Instant::now(), budget);
            let found = spin(deadline.map_or(end, |deadline| deadline.min(end)), &mut attempt)?;
            self.spin.learn(found.is_some());
            if found.is_some() {
                return Ok(found);
            }
        }
        loop {
            let seen = self.generation.load(Ordering::SeqCst);
            let sends = match attempt()? {
                Attempt::Done(value) => return Ok(Some(value)),
                Attempt::Wait { sends } => sends,
            };
            if is_over(deadline) {
                return Ok(None);
            }
            let mut state = self.lock();
            if !state.watched {
                state.watched = true;
                drop(state);
                return Watcher(self).watch(control, deadline, sends, attempt);
            }
            self.sleep(state, seen, deadline, sends);
        }
    }

    /// Sleeps until the watcher says something that was not `seen`, or the deadline.
    fn sleep(&self, state: MutexGuard<'_, State>, seen: u64, deadline: Option<Instant>, sends: bool) {
        // Entered before looking, as the teller changes the number before it looks who sleeps: one sees the other.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        if sends && self.want_sends.fetch_add(1, Ordering::SeqCst) == 0 {
            // The watcher may not have asked for events of the send queue.
            self.wake();
        }
        if self.generation.load(Ordering::SeqCst) == seen {
            let rest = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let woken = match rest {
                None => self.told.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(rest) => self.told.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0,
            };
            drop(woken);
        }
        if sends {
            self.want_sends.fetch_sub(1, Ordering::SeqCst);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Has every waiting thread look again: something changed that is no completion.
    pub(super) fn kick(&self) {
        self.wake();
        self.tell();
    }

    fn wake(&self) {
        // It fails only when the counter is full, and then the watcher wakes anyway.
        let _ = self.wake.write(1);
    }

    /// Tells the sleepers, and whoever is about to sleep, to look.
    fn tell(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            // A sleeper holds the lock from looking at the number until it sleeps.
            drop(self.lock());
            self.told.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // One flag, set and cleared by assignments: whole whatever a panicking thread did.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The watcher's place. Leaving it tells the others, one of which takes it.
struct Watcher<'a>(&'a Parking);

impl Watcher<'_> {
    fn watch<T>(
        self,
        control: &Control,
        deadline: Option<Instant>,
        mut sends: bool,
        mut attempt: impl FnMut() -> io::Result<Attempt<T>>,
    ) -> io::Result<Option<T>> {
        let parking = self.0;
        let (recv_cq, send_cq) = (control.queue_pair().recv_cq(), control.queue_pair().send_cq());
        loop {
            let with_sends = sends || parking.want_sends.load(Ordering::SeqCst) != 0;
            recv_cq.arm().map_err(Error::from)?;
            if with_sends {
                send_cq.arm().map_err(Error::from)?;
            }
            // What completed before gives no event. From here on everything does, for us and for the sleepers.
            match attempt()? {
                Attempt::Done(value) => return Ok(Some(value)),
                Attempt::Wait { sends: true } if !with_sends => {
                    sends = true;
                    continue;
                }
                Attempt::Wait { sends: now } => sends = now,
            }
            if is_over(deadline) {
                return Ok(None);
            }
            parking.tell();
            self.sleep([recv_cq, send_cq], control, deadline)?;
        }
    }

    /// Sleeps until there is an event, the connection is over, somebody kicks, or the deadline.
    fn sleep(&self, queues: [&CompletionQueue; 2], control: &Control, deadline: Option<Instant>) -> io::Result<()> {
        let mut fds = [
            PollFd::new(event_fd(queues[0])?, PollFlags::POLLIN),
            PollFd::new(event_fd(queues[1])?, PollFlags::POLLIN),
            PollFd::new(self.0.wake_fd(), PollFlags::POLLIN),
            PollFd::new(control.closed_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut fds, timeout(deadline)) {
            Ok(0) | Err(Errno::EINTR) => return Ok(()),
            Ok(_) => {}
            Err(errno) => return Err(Error::from(CallError { call: "poll", errno }).into()),
        }
        let ready = fds.map(|fd| fd.any().unwrap_or(true));
        for (queue, ready) in queues.into_iter().zip(ready) {
            if ready {
                queue.take_event().map_err(Error::from)?;
            }
        }
        if ready[2] {
            // EAGAIN means that there was nothing.
            let _ = self.0.wake.read();
        }
        Ok(())
    }
}

impl Drop for Watcher<'_> {
    fn drop(&mut self) {
        self.0.lock().watched = false;
        self.0.tell();
    }
}

impl Parking {
    fn wake_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.wake)
    }
}

fn event_fd(queue: &CompletionQueue) -> io::Result<std::os::fd::BorrowedFd<'_>> {
    queue.event_fd().ok_or_else(|| Error::Misuse("a stream needs completion queues with channels").into())
}

fn is_over(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}

/// The rest of the time, rounded up to whole milliseconds, so that it is never slept too little.
fn timeout(deadline: Option<Instant>) -> PollTimeout {
    let Some(deadline) = deadline else { return PollTimeout::NONE };
    let millis = deadline.saturating_duration_since(Instant::now()).as_nanos().div_ceil(1_000_000);
    i32::try_from(millis).ok().and_then(|millis| PollTimeout::try_from(millis).ok()).unwrap_or(PollTimeout::MAX)
}

/// Attempts until the time is over. The clock costs more than an attempt, so it is read now and then.
fn spin<T>(until: Instant, attempt: &mut impl FnMut() -> io::Result<Attempt<T>>) -> io::Result<Option<T>> {
    loop {
        for _ in 0..16 {
            if let Attempt::Done(value) = attempt()? {
                return Ok(Some(value));
            }
            std::hint::spin_loop();
        }
        if Instant::now() >= until {
            return Ok(None);
        }
    }
}

/// How long to spin before sleeping: as long as that finds something, and seldom otherwise.
#[derive(Debug)]
struct Spin {
    max: Duration,
    misses: AtomicU32,
    skipped: AtomicU32,
}

/// Misses in a row after which spinning stops.
const GIVE_UP: u32 = 8;
/// Waits without spinning after which it is tried again.
const PROBE: u32 = 64;

impl Spin {
    fn new(max: Duration) -> Self {
        // With one processor, what is waited for cannot happen meanwhile.
        let alone = std::thread::available_parallelism().is_ok_and(|count| count.get() == 1);
        let max = if alone { Duration::ZERO } else { max };
        Self { max, misses: AtomicU32::new(0), skipped: AtomicU32::new(0) }
    }

    /// How long the next wait spins, if at all. Threads that race here only spin once more or less.
    fn next(&self) -> Option<Duration> {
        if self.max.is_zero() {
            return None;
        }
        if self.misses.load(Ordering::Relaxed) >= GIVE_UP {
            let skipped = self.skipped.load(Ordering::Relaxed) + 1;
            self.skipped.store(skipped % PROBE, Ordering::Relaxed);
            if skipped < PROBE {
                return None;
            }
        }
        Some(self.max)
    }

    fn learn(&self, hit: bool) {
        let misses = self.misses.load(Ordering::Relaxed);
        self.misses.store(if hit { 0 } else { (misses + 1).min(GIVE_UP) }, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spinning_stops_when_it_keeps_failing_and_is_tried_again() {
        let spin = Spin { max: Duration::from_micros(10), misses: AtomicU32::new(0), skipped: AtomicU32::new(0) };
        for _ in 0..GIVE_UP {
            assert!(spin.next().is_some());
            spin.learn(false);
        }
        assert_eq!((1..).find(|_| spin.next().is_some()), Some(PROBE));
        spin.learn(true);
        assert!(spin.next().is_some());
        assert!(Spin::new(Duration::ZERO).next().is_none());
    }
}
