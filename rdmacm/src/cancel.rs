//! Ending blocked calls from another thread.

use std::convert::Infallible;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_channel::{Receiver, Sender};

/// Ends blocked calls from another thread: give one to [`Connector::cancel`](crate::Connector::cancel),
/// [`Acceptor::accept_cancellable`](crate::Acceptor::accept_cancellable) or
/// [`Acceptor::request_cancellable`](crate::Acceptor::request_cancellable), keep a clone, and [`cancel`](Self::cancel) it.
///
/// The calls return [`Error::Cancelled`](crate::Error::Cancelled) at once, and so does every later call with the same
/// token. Connections that exist are not touched.
#[derive(Clone)]
pub struct CancelToken {
    inner: Arc<Inner>,
}

struct Inner {
    /// Dropped to cancel: every receiver then sees the end of the channel.
    open: Mutex<Option<Sender<Infallible>>>,
    cancelled: Receiver<Infallible>,
}

impl CancelToken {
    /// A token that is not cancelled.
    #[must_use]
    pub fn new() -> Self {
        let (open, cancelled) = crossbeam_channel::bounded(0);
        Self { inner: Arc::new(Inner { open: Mutex::new(Some(open)), cancelled }) }
    }

    /// Ends the calls that wait with this token, and those to come. From any thread, any number of times.
    pub fn cancel(&self) {
        // The option is whole whatever a panicking thread did: the only change is this one.
        drop(self.inner.open.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Whether [`cancel`](Self::cancel) was called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.inner.open.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Becomes disconnected when the token is cancelled.
    pub(crate) fn receiver(&self) -> &Receiver<Infallible> {
        &self.inner.cancelled
    }
}

impl Default for CancelToken {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for CancelToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelToken").field("cancelled", &self.is_cancelled()).finish()
    }
}
