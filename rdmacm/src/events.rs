//! What happens to a connection, for a program that wants to know without using it.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError};

use crate::error::{Error, Result, TimedOutStep};
use crate::time;

/// Events that nobody took are kept up to this many; the end is never lost.
const CAPACITY: usize = 32;

/// Something that happened to a connection.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ConnectionEvent {
    /// The peer's neighbour entry changed (another MAC address). Data may or may not go on: if the peer is gone, the next
    /// operation or the keepalive says so.
    PathChanged,
    /// Bonding moved the local address to another port.
    AddressChanged,
    /// A port of the device went down. Operations wait for it until their retries are exhausted.
    PortDown,
    /// A port of the device came up.
    PortUp,
    /// The connection is over, for this first cause. No event follows.
    Closed(Error),
}

/// Receives the events of one connection, from the call of [`Connection::events`](crate::Connection::events) on. It does
/// not keep the connection alive. As an iterator it waits for each event, and ends after [`ConnectionEvent::Closed`].
#[derive(Debug)]
pub struct ConnectionEvents {
    events: Receiver<ConnectionEvent>,
    end: Arc<OnceLock<Error>>,
    ended: bool,
}

impl ConnectionEvents {
    /// Waits for the next event, for at most `timeout`; `None` after [`ConnectionEvent::Closed`].
    ///
    /// # Errors
    /// [`Error::TimedOut`] when nothing happened.
    pub fn next_timeout(&mut self, timeout: Duration) -> Result<Option<ConnectionEvent>> {
        match self.events.recv_timeout(timeout) {
            Ok(event) => Ok(self.note(Some(event))),
            Err(RecvTimeoutError::Disconnected) => Ok(self.note(None)),
            Err(RecvTimeoutError::Timeout) => Err(Error::TimedOut { step: TimedOutStep::Event, after: timeout }),
        }
    }

    /// Waits until the connection is over, passing over other events, and returns the cause.
    ///
    /// # Errors
    /// [`Error::TimedOut`] when it is not over after `timeout`.
    pub fn wait_closed(&mut self, timeout: Duration) -> Result<Error> {
        let deadline = time::after(Instant::now(), timeout);
        loop {
            match self.next_timeout(deadline.saturating_duration_since(Instant::now()))? {
                Some(ConnectionEvent::Closed(cause)) => return Ok(cause),
                Some(_) => {}
                None => return Ok(self.cause()),
            }
        }
    }

    fn note(&mut self, event: Option<ConnectionEvent>) -> Option<ConnectionEvent> {
        match event {
            Some(ConnectionEvent::Closed(cause)) => {
                self.ended = true;
                Some(ConnectionEvent::Closed(cause))
            }
            Some(event) => Some(event),
            // The channel ended; its last event did not fit, or the event-channel thread is gone.
            None if !self.ended => {
                self.ended = true;
                Some(ConnectionEvent::Closed(self.cause()))
            }
            None => None,
        }
    }

    fn cause(&self) -> Error {
        self.end.get().cloned().unwrap_or(Error::ManagerGone)
    }
}

impl Iterator for ConnectionEvents {
    type Item = ConnectionEvent;

    fn next(&mut self) -> Option<ConnectionEvent> {
        let event = self.events.recv().ok();
        self.note(event)
    }
}

/// The event-channel thread's end.
#[derive(Debug)]
pub(crate) struct Subscriber {
    events: Sender<ConnectionEvent>,
    end: Arc<OnceLock<Error>>,
}

impl Subscriber {
    pub(crate) fn new() -> (Self, ConnectionEvents) {
        let (sender, events) = crossbeam_channel::bounded(CAPACITY);
        let end = Arc::new(OnceLock::new());
        (Self { events: sender, end: Arc::clone(&end) }, ConnectionEvents { events, end, ended: false })
    }

    /// False if nobody listens any more.
    pub(crate) fn tell(&self, event: ConnectionEvent) -> bool {
        if let ConnectionEvent::Closed(cause) = &event {
            // Only told once; were it not, the first would stay.
            let _ = self.end.set(cause.clone());
        }
        !matches!(self.events.try_send(event), Err(TrySendError::Disconnected(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_told_even_to_who_takes_no_events() {
        let (subscriber, mut events) = Subscriber::new();
        for _ in 0..2 * CAPACITY {
            assert!(subscriber.tell(ConnectionEvent::PathChanged));
        }
        assert!(subscriber.tell(ConnectionEvent::Closed(Error::DeviceRemoved)));
        drop(subscriber);
        assert!(matches!(events.wait_closed(Duration::from_secs(1)), Ok(Error::DeviceRemoved)));
        assert!(events.next().is_none());
    }

    #[test]
    fn nothing_happening_is_a_timeout() {
        let (_subscriber, mut events) = Subscriber::new();
        let result = events.next_timeout(Duration::from_millis(1));
        assert!(matches!(result, Err(Error::TimedOut { step: TimedOutStep::Event, .. })));
    }
}
