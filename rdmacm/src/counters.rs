//! What a manager counts.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// What happened on a [`Manager`](crate::Manager) since it was made, as [`Manager::counters`](crate::Manager::counters)
        /// found it. The counts are taken one after the other while things go on.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The running counts.
        #[derive(Debug, Default)]
        pub(crate) struct CounterCells {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl CounterCells {
            pub(crate) fn snapshot(&self) -> Counters {
                Counters { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Attempts to connect, one for each address tried.
    connects_attempted,
    /// Connections established by connecting.
    connects_established,
    /// Attempts that found nobody listening.
    connects_refused,
    /// Attempts that the peer's program rejected.
    connects_rejected,
    /// Attempts that the peer's transport rejected, for whatever reason.
    connects_rejected_by_transport,
    /// Attempts that ended at their deadline.
    connects_timed_out,
    /// Attempts that ended otherwise: unreachable, cancelled, device removed, a local error.
    connects_failed,
    /// Requests that arrived at listeners.
    requests_received,
    /// Connections established by accepting.
    requests_accepted,
    /// Requests refused because a listener's queue was full.
    requests_refused_queue_full,
    /// Requests refused because nobody took them in time.
    requests_expired,
    /// Requests that the program refused, dropped, or could not set up.
    requests_refused,
    /// Accepted requests whose client gave up before the connection was established.
    requests_aborted,
    /// Connections that the peer closed.
    closed_by_peer,
    /// Connections that this side closed.
    closed_locally,
    /// Connections that a failed operation, or a peer that no longer answers, ended.
    closed_broken,
    /// Connections that ended because their device was removed.
    closed_by_device_removal,
    /// Times that the network path of a live connection may have changed.
    paths_changed,
    /// Ids that exist now: connections, attempts, requests and listeners.
    ids_live,
}

/// Adds one.
pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
