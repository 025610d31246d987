//! What all handles of a stream share.
//!
//! Two locks, each held for as long as bytes are copied and requests posted: `inbound` and `outbound`. Whoever holds
//! `outbound` may take `inbound`, never the other way round. A reader holds only `inbound`, and takes `outbound` after it
//! let go of that, when the peer must be told of room. Threads that wait hold neither.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use verbs::{CloseReason, Control};

use super::gather::Gather;
use super::inbound::Inbound;
use super::outbound::{Outbound, Stop};
use super::parking::{Attempt, Parking};
use super::protocol::{Ends, Message, Opening, Violation};
use crate::error::Error;

pub(super) struct Core {
    // Dropped first: the last half takes the queue pair apart, before the memory that the device uses.
    outbound: Mutex<Outbound>,
    inbound: Mutex<Inbound>,
    /// An [`Ends`].
    ends: AtomicU8,
    /// What the peer did wrong.
    fault: OnceLock<Violation>,
    /// The peer should be told of room, and there is no control slot: somebody must wait for sends to be done.
    update_waits: AtomicBool,
    /// The error was given to `take_error`.
    error_taken: AtomicBool,
    parking: Parking,
    control: Control,
    opening: Opening,
    pub(super) local: SocketAddr,
    pub(super) peer: SocketAddr,
    pub(super) settings: Settings,
}

/// What a program may change at any time, for all handles.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) read_timeout: Time,
    pub(super) write_timeout: Time,
    pub(super) nonblocking: AtomicBool,
    pub(super) linger: Time,
    pub(super) nodelay: AtomicBool,
}

/// An optional duration of at most 500 years.
#[derive(Debug)]
pub(super) struct Time(AtomicU64);

impl Time {
    const NONE: u64 = u64::MAX;

    pub(super) fn new(time: Option<Duration>) -> Self {
        Self(AtomicU64::new(Self::encode(time)))
    }

    fn encode(time: Option<Duration>) -> u64 {
        time.map_or(Self::NONE, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).min(Self::NONE - 1))
    }

    pub(super) fn set(&self, time: Option<Duration>) {
        self.0.store(Self::encode(time), Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> Option<Duration> {
        let nanos = self.0.load(Ordering::Relaxed);
        (nanos != Self::NONE).then(|| Duration::from_nanos(nanos))
    }

    /// The deadline of a call that begins to wait now.
    fn deadline(&self) -> Option<Instant> {
        self.get().and_then(|time| Instant::now().checked_add(time))
    }
}

/// Both sides of a connection that was just established.
pub(super) struct Parts {
    pub(super) outbound: Outbound,
    pub(super) inbound: Inbound,
    pub(super) control: Control,
    pub(super) opening: Opening,
    pub(super) local: SocketAddr,
    pub(super) peer: SocketAddr,
}

impl Core {
    pub(super) fn new(parts: Parts, spin: Duration, linger: Duration) -> io::Result<Self> {
        let core = Self {
            outbound: Mutex::new(parts.outbound),
            inbound: Mutex::new(parts.inbound),
            ends: AtomicU8::new(Ends::default().bits()),
            fault: OnceLock::new(),
            update_waits: AtomicBool::new(false),
            error_taken: AtomicBool::new(false),
            parking: Parking::new(spin)?,
            control: parts.control,
            opening: parts.opening,
            local: parts.local,
            peer: parts.peer,
            settings: Settings {
                read_timeout: Time::new(None),
                write_timeout: Time::new(None),
                nonblocking: AtomicBool::new(false),
                linger: Time::new(Some(linger)),
                nodelay: AtomicBool::new(false),
            },
        };
        // The peer knows one half of our ring; here is the other.
        core.tell_peer();
        Ok(core)
    }

    fn ends(&self) -> Ends {
        Ends::from_bits(self.ends.load(Ordering::Acquire))
    }

    /// Changes the ends, and returns what `change` gives beside them.
    fn change_ends<T>(&self, change: impl Fn(Ends) -> (Ends, T)) -> T {
        let mut now = self.ends.load(Ordering::Acquire);
        loop {
            let (after, value) = change(Ends::from_bits(now));
            match self.ends.compare_exchange_weak(now, after.bits(), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return value,
                Err(other) => now = other,
            }
        }
    }

    /// The peer broke the protocol: the stream is over.
    #[cold]
    fn violate(&self, violation: Violation) -> io::Error {
        let text = format!("the peer broke the stream protocol: {violation}");
        let error = io::Error::new(io::ErrorKind::InvalidData, text.clone());
        if self.fault.set(violation).is_ok() {
            log::debug!("stream with {}: {text}", self.peer);
            self.control.close(CloseReason::failed(text));
        }
        error
    }

    #[cold]
    fn explain(&self, error: verbs::Error) -> io::Error {
        match self.fault.get() {
            Some(violation) => self.violate(*violation),
            None => Error::from(error).into(),
        }
    }

    /// Takes note of what arrived. An error is the end of the connection; what arrived before it can still be read.
    #[inline]
    fn look(&self, inbound: &mut Inbound) -> Result<(), verbs::Error> {
        let found = inbound.poll()?;
        if found.shutdown {
            self.change_ends(|ends| (ends.on_shutdown(), ()));
        }
        if found.disconnect {
            self.change_ends(|ends| (ends.on_disconnect(), ()));
        }
        match found.violation {
            None => Ok(()),
            Some(violation) => {
                let text = self.violate(violation).to_string();
                Err(verbs::Error::Closed(CloseReason::failed(text)))
            }
        }
    }

    /// Tells the peer of room, if it must be told. What fails here fails again for whoever reads or writes next.
    fn tell_peer(&self) {
        if let Err(error) = self.update(&mut self.lock_outbound()) {
            log::debug!("stream with {}: {error}", self.peer);
        }
    }

    fn update(&self, outbound: &mut Outbound) -> Result<(), verbs::Error> {
        if self.ends().peer_ended() {
            self.update_waits.store(false, Ordering::Release);
            return Ok(());
        }
        let slot = outbound.has_control_slot()?;
        self.update_waits.store(!slot, Ordering::Release);
        if slot && let Some(update) = self.lock_inbound().incoming.receiver.update(&self.opening) {
            outbound.post_update(&update)?;
        }
        Ok(())
    }

    fn lock_outbound(&self) -> MutexGuard<'_, Outbound> {
        // What can panic under these locks are asserts; a stream in doubt is better used than silently stuck.
        self.outbound.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_inbound(&self) -> MutexGuard<'_, Inbound> {
        self.inbound.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // Reading.

    /// Reads, or looks, into the buffers in order, waiting for the first byte.
    pub(super) fn read(&self, buffers: &mut [IoSliceMut<'_>], peek: bool) -> io::Result<usize> {
        let want = buffers.iter().map(|buffer| buffer.len()).sum();
        if want == 0 {
            return Ok(0);
        }
        if let Some(length) = self.try_read(buffers, want, peek)? {
            return Ok(length);
        }
        if self.settings.nonblocking.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let deadline = self.settings.read_timeout.deadline();
        let read = self.parking.wait(&self.control, deadline, || {
            Ok(match self.try_read(buffers, want, peek)? {
                Some(length) => Attempt::Done(length),
                None => Attempt::Wait { sends: self.update_waits.load(Ordering::Acquire) },
            })
        })?;
        read.ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    /// `None` when nothing is there and more may come.
    fn try_read(&self, buffers: &mut [IoSliceMut<'_>], want: usize, peek: bool) -> io::Result<Option<usize>> {
        if !self.ends().reads() {
            return Ok(Some(0));
        }
        let mut inbound = self.lock_inbound();
        let looked = if inbound.incoming.receiver.available() < want { self.look(&mut inbound) } else { Ok(()) };
        let mut done = 0;
        for buffer in buffers {
            let copied = match peek {
                true => inbound.peek(done, buffer),
                false => inbound.read(buffer),
            };
            let copied = copied.map_err(Error::from)?;
            done += copied;
            if copied < buffer.len() {
                break;
            }
        }
        let owes = inbound.incoming.receiver.owes_update();
        drop(inbound);
        if owes && looked.is_ok() {
            self.tell_peer();
        }
        match looked {
            _ if done != 0 => Ok(Some(done)),
            _ if self.ends().peer_ended() && self.fault.get().is_none() => Ok(Some(0)),
            Ok(()) => Ok(None),
            Err(error) => Err(self.explain(error)),
        }
    }

    // Writing.

    /// Writes all of the buffers, waiting for room; less only when a timeout or an error comes after the first byte.
    pub(super) fn write(&self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut data = Gather::new(buffers);
        let total = data.left();
        if total == 0 {
            return Ok(0);
        }
        if self.try_write(&mut data)? == Stop::Nothing {
            return Ok(total);
        }
        let written = |data: &Gather<'_, '_>| match total - data.left() {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            written => Ok(written),
        };
        if self.settings.nonblocking.load(Ordering::Relaxed) {
            return written(&data);
        }
        let deadline = self.settings.write_timeout.deadline();
        let waited = self.parking.wait(&self.control, deadline, || {
            Ok(match self.try_write(&mut data)? {
                Stop::Nothing => Attempt::Done(()),
                Stop::Peer => Attempt::Wait { sends: self.update_waits.load(Ordering::Acquire) },
                Stop::Queue => Attempt::Wait { sends: true },
            })
        });
        match waited {
            Ok(_) => written(&data),
            // The caller learns of the error at the next call.
            Err(error) => written(&data).map_err(|_| error),
        }
    }

    fn try_write(&self, data: &mut Gather<'_, '_>) -> io::Result<Stop> {
        let mut outbound = self.lock_outbound();
        // Under the lock, so that nothing follows a goodbye.
        self.may_write()?;
        loop {
            let stop = outbound.push(data).map_err(|error| self.refuse_write(error))?;
            match stop {
                Stop::Nothing => return Ok(stop),
                Stop::Queue => {
                    return match self.control.cause() {
                        Some(error) => Err(self.refuse_write(error)),
                        None => Ok(stop),
                    };
                }
                Stop::Peer => {}
            }
            let mut inbound = self.lock_inbound();
            let looked = self.look(&mut inbound);
            let credits = inbound.incoming.take_credits();
            let owes = inbound.incoming.receiver.owes_update();
            drop(inbound);
            let mut more = false;
            for credit in credits {
                outbound.sender.credit(credit.limit, credit.entry).map_err(|violation| self.violate(violation))?;
                more = true;
            }
            looked.map_err(|error| self.refuse_write(error))?;
            self.may_write()?;
            if owes {
                self.update(&mut outbound).map_err(|error| self.refuse_write(error))?;
            }
            if !more {
                return Ok(stop);
            }
        }
    }

    fn may_write(&self) -> io::Result<()> {
        let ends = self.ends();
        if !ends.writes() {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the stream was shut down for writing"));
        }
        if ends.peer_gone() {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the peer has closed the stream"));
        }
        Ok(())
    }

    #[cold]
    fn refuse_write(&self, error: verbs::Error) -> io::Error {
        // Why it ended may be among what arrived and nobody has looked at.
        let _ = self.look(&mut self.lock_inbound());
        self.may_write().err().unwrap_or_else(|| self.explain(error))
    }

    // Closing.

    /// Closes one or both directions, for all handles. Waits at most the linger time, for a place for the goodbye.
    pub(super) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.shutdown_until(how, self.goodbye_deadline())
    }

    fn goodbye_deadline(&self) -> Option<Instant> {
        Instant::now().checked_add(self.settings.linger.get().unwrap_or(DEFAULT_LINGER))
    }

    fn shutdown_until(&self, how: Shutdown, deadline: Option<Instant>) -> io::Result<()> {
        let goodbye = {
            let _no_writer = self.lock_outbound();
            self.change_ends(|ends| ends.shut(how))
        };
        self.parking.kick();
        let Some(goodbye) = goodbye else { return Ok(()) };
        let said = self.parking.wait(&self.control, deadline, || self.try_goodbye(goodbye))?;
        said.ok_or_else(|| io::Error::new(io::ErrorKind::TimedOut, "the peer takes no messages: it was not told"))
    }

    fn try_goodbye(&self, goodbye: Message) -> io::Result<Attempt<()>> {
        let mut outbound = self.lock_outbound();
        if self.control.cause().is_some() {
            return Ok(Attempt::Done(()));
        }
        let slot = outbound.has_control_slot();
        match slot.and_then(|slot| if slot { outbound.post_goodbye(goodbye).map(|()| true) } else { Ok(false) }) {
            Ok(true) => Ok(Attempt::Done(())),
            Ok(false) => Ok(Attempt::Wait { sends: true }),
            // It broke meanwhile: the peer needs no goodbye.
            Err(_) => Ok(Attempt::Done(())),
        }
    }

    /// Waits until the peer's device has everything.
    fn drain(&self, deadline: Option<Instant>) -> io::Result<Option<()>> {
        self.parking.wait(&self.control, deadline, || {
            let idle = self.lock_outbound().is_idle().map_err(Error::from)?;
            Ok(match idle || self.control.cause().is_some() {
                true => Attempt::Done(()),
                false => Attempt::Wait { sends: true },
            })
        })
    }

    /// The error that ended the stream, once.
    pub(super) fn take_error(&self) -> Option<io::Error> {
        let error = self.control.cause()?;
        let expected = self.ends().is_over() && self.fault.get().is_none();
        (!expected && !self.error_taken.swap(true, Ordering::Relaxed)).then(|| self.explain(error))
    }
}

/// How long the calls that have no linger time of their own wait.
const DEFAULT_LINGER: Duration = Duration::from_secs(3);

impl Drop for Core {
    fn drop(&mut self) {
        if self.settings.linger.get() == Some(Duration::ZERO) {
            // Without a goodbye the peer's reader sees a reset.
            self.control.close(CloseReason::Local);
            return;
        }
        let deadline = self.goodbye_deadline();
        let drained = self.shutdown_until(Shutdown::Both, deadline).and_then(|()| self.drain(deadline));
        match drained {
            Ok(Some(())) => {}
            Ok(None) => log::debug!("stream with {} closed before all of it arrived", self.peer),
            Err(error) => log::debug!("stream with {}: {error}", self.peer),
        }
    }
}

impl Core {
    pub(super) fn fmt_as(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name)
            .field("addr", &self.local)
            .field("peer", &self.peer)
            .field("ends", &self.ends())
            .field("cause", &self.control.cause())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_as("Core", f)
    }
}
