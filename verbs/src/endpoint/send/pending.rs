//! Operations that were posted and are waited for later, and sleeping elsewhere until there is news of them.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::SendHalf;
use crate::error::{Error, Result};
use crate::wait::Patience;

/// An operation that was posted by one of the `post_` functions of a [`SendHalf`], to ask that half about it.
///
/// Operations of one half end in the order in which they were posted. A ticket is a number; dropping it means
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket {
    /// One more than its sequence number.
    end: u64,
}

impl Ticket {
    /// Of an operation that had nothing to do.
    pub(super) const OVER: Ticket = Ticket { end: 0 };

    pub(super) fn at(end: u64) -> Ticket {
        Ticket { end }
    }
}

impl SendHalf {
    /// Looks, without waiting, which operations ended. Returns how many.
    ///
    /// # Errors
    /// [`Error::Provider`] when the device reports that the queue is broken. That an operation failed is told by
    /// [`wait`](Self::wait) and [`flush`](Self::flush).
    #[inline]
    pub fn try_progress(&mut self) -> Result<usize> {
        let before = self.state.table.len();
        self.state.reap(&self.shared)?;
        Ok((before - self.state.table.len()) as usize)
    }

    /// Whether an operation is known to be over, done or failed. It does not look for news: see
    /// [`try_progress`](Self::try_progress).
    ///
    /// With the option `signal_every` above 1, the end of an operation is known only with the next one that is
    /// told; [`wait`](Self::wait) and [`flush`](Self::flush) see to that.
    #[inline]
    pub fn is_done(&self, ticket: Ticket) -> bool {
        self.state.table.is_over(ticket.end)
    }

    /// Whether the end of each operation posted from now on is told, or that of one in some (a quarter of the depth, unless
    /// the option `signal_every` says otherwise). With `false`, who waits must have posted something with `true` after it,
    /// or use [`wait`](Self::wait) or [`flush`](Self::flush).
    #[inline]
    pub fn tell_each(&mut self, each: bool) {
        self.state.tell_all = each;
    }

    /// Waits until an operation, and so all before it, is over. `Ok` means that it was done.
    ///
    /// # Errors
    /// * [`Error::TimedOut`] when a timeout is set; the operation goes on, and can be waited for again.
    /// * [`Error::Work`] when it failed; the cause when it was not carried out because the connection broke.
    /// * [`Error::Misuse`] for a ticket of an operation that this half has not posted yet. A ticket of another half is not
    ///   always recognised: it then speaks of this half's operation of the same number.
    #[inline]
    pub fn wait(&mut self, ticket: Ticket) -> Result<()> {
        // The operation was posted and so is not late: one look is enough, mostly.
        if self.is_done(ticket) || ticket.end <= self.state.table.next_seq() && self.look_for(ticket)? {
            return self.state.outcome(&self.shared, ticket.end);
        }
        self.wait_within(ticket, Patience::from_timeout(self.timeout))
    }

    #[inline]
    fn look_for(&mut self, ticket: Ticket) -> Result<bool> {
        if self.state.reap_batch(&self.shared).is_none() {
            self.state.reap_rest(&self.shared)?;
        }
        Ok(self.is_done(ticket))
    }

    /// [`wait`](Self::wait) with its own timeout.
    ///
    /// # Errors
    /// Those of [`wait`](Self::wait), and [`Error::Misuse`] for a timeout of zero.
    pub fn wait_timeout(&mut self, ticket: Ticket, timeout: Duration) -> Result<()> {
        self.wait_within(ticket, Patience::of(timeout)?)
    }

    #[inline(never)]
    fn wait_within(&mut self, ticket: Ticket, mut patience: Patience) -> Result<()> {
        if ticket.end > self.state.table.next_seq() {
            return Err(Error::misuse("the ticket was given by another half"));
        }
        if !self.is_done(ticket) {
            self.state.reap(&self.shared)?;
            if !self.state.table.will_tell(ticket.end) {
                self.post_marker(&mut patience)?;
            }
            self.wait_until(&mut patience, "an operation to end", |table| table.is_over(ticket.end))?;
        }
        self.state.outcome(&self.shared, ticket.end)
    }

    /// Waits until at least one more operation is over. Returns how many ended; 0 only when none was in flight.
    ///
    /// # Errors
    /// * [`Error::TimedOut`] when a timeout is set.
    /// * The cause, if one of those that ended was not done, or the connection broke.
    pub fn wait_any(&mut self) -> Result<usize> {
        self.wait_any_within(Patience::from_timeout(self.timeout))
    }

    /// [`wait_any`](Self::wait_any) with its own timeout.
    ///
    /// # Errors
    /// Those of [`wait_any`](Self::wait_any), and [`Error::Misuse`] for a timeout of zero.
    pub fn wait_any_timeout(&mut self, timeout: Duration) -> Result<usize> {
        self.wait_any_within(Patience::of(timeout)?)
    }

    fn wait_any_within(&mut self, mut patience: Patience) -> Result<usize> {
        let oldest = self.state.table.next_seq() - self.state.table.len();
        if self.state.table.is_empty() {
            return Ok(0);
        }
        if !self.state.table.awaits_completion() {
            self.post_marker(&mut patience)?;
        }
        self.wait_until(&mut patience, "an operation to end", |table| table.is_over(oldest + 1))?;
        let end = self.state.table.next_seq() - self.state.table.len();
        self.state.outcome(&self.shared, end)?;
        Ok((end - oldest) as usize)
    }

    /// Prepares for sleeping in a poll loop of the program's own, on the descriptor of this half (`AsFd`) and on
    /// [`closed_fd`](Self::closed_fd): asks for an event with the next completion, and looks once more. `true` says
    /// that nothing ended: the descriptor becomes readable when something does. `false` says that there is news
    /// already, or that the connection is over: do not sleep.
    ///
    /// Call it before each sleep. It also takes the event that made the descriptor readable.
    ///
    /// # Errors
    /// [`Error::Os`] and [`Error::Provider`] when the device or its driver fails, which ends the connection.
    pub fn arm(&mut self) -> Result<bool> {
        let armed = self.shared.queue_pair().send_cq().rearm(false);
        self.shared.settle(armed)?;
        let ended = self.try_progress()?;
        Ok(ended == 0 && !self.shared.is_broken())
    }

    /// A descriptor that becomes readable, for good, when the connection ends: a poll loop watches it too, since
    /// nothing may be in flight whose end would tell.
    pub fn closed_fd(&self) -> BorrowedFd<'_> {
        self.shared.closed_fd()
    }
}

/// The completion channel of the send queue, for [`SendHalf::arm`].
impl AsFd for SendHalf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.queue_pair().send_cq().event_fd().expect("an endpoint's queues have channels")
    }
}
