//! What passes between user threads and the event-channel thread.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, select};
use nix::sys::eventfd::{EfdFlags, EventFd};
use verbs::{AsyncEvent, AsyncEvents, Control};

use crate::cancel::CancelToken;
use crate::channel::ConnectionDepths;
use crate::context::ContextAddress;
use crate::error::{Error, Result};
use crate::events::Subscriber;
use crate::id::{Key, Loan, Parameters};
use crate::options::{Keepalive, ListenPlan};
use crate::private_data::PrivateData;
use crate::sys::{self, CallError};

/// How much longer than its deadline a user waits for the event-channel thread to keep that deadline.
const GRACE: Duration = Duration::from_secs(1);

/// The mailboxes of all managers of the process.
static MAILBOXES: Mutex<Vec<Weak<Mailbox>>> = Mutex::new(Vec::new());

/// The list stays whole whatever a panicking thread did.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where user threads leave commands for the event-channel thread.
#[derive(Debug)]
pub(crate) struct Mailbox {
    commands: Sender<Command>,
    wake: EventFd,
}

impl Mailbox {
    pub(crate) fn new() -> Result<(Arc<Self>, Receiver<Command>)> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| CallError { call: "eventfd", errno })?;
        let (commands, receiver) = crossbeam_channel::unbounded();
        let mailbox = Arc::new(Self { commands, wake });
        let mut all = lock(&MAILBOXES);
        all.retain(|known| known.strong_count() != 0);
        all.push(Arc::downgrade(&mailbox));
        drop(all);
        Ok((mailbox, receiver))
    }

    /// Passes an event of a device on to every manager: librdmacm has one context of each device for all of them, and
    /// each event of it is read once.
    pub(crate) fn broadcast(device: ContextAddress, event: AsyncEvent) {
        let all: Vec<_> = lock(&MAILBOXES).iter().filter_map(Weak::upgrade).collect();
        for mailbox in all {
            mailbox.send(Command::Async { device, event });
        }
    }

    /// Leaves a command; it is lost, with whatever it carries, if the thread has ended.
    pub(crate) fn send(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            // Fails only when the counter is full, and then the thread is awake anyway.
            let _ = self.wake.write(1);
        }
    }

    /// Takes the wake-up note away, before the commands are looked at.
    pub(crate) fn clear(&self) {
        // EAGAIN means that there was none.
        let _ = self.wake.read();
    }

    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// What a user asks of the event-channel thread.
#[derive(Debug)]
pub(crate) enum Command {
    /// Make an id and resolve the address and the route.
    Connect { plan: ConnectPlan, notices: Sender<Notice> },
    /// Make an id, bind it and listen.
    Listen { plan: ListenPlan, notices: Sender<ListenNotice>, queue: Sender<Request>, end: Arc<OnceLock<Error>> },
    /// The loan's end: the queue pair is on the id.
    Built { key: Key, built: Built, deadline: Instant },
    /// The loan's end: no queue pair.
    BuildFailed { key: Key },
    /// The loan's end: the request is refused, with this private data.
    Refused { key: Key, private_data: Vec<u8> },
    /// End the connection in order, within this deadline.
    Disconnect { key: Key, deadline: Instant },
    /// Tell this subscriber what happens to the connection.
    Subscribe { key: Key, subscriber: Subscriber },
    /// A completion failed.
    Broken { key: Key },
    /// The attempt is given up.
    Cancel { key: Key },
    /// The handle was let go.
    Release { key: Key },
    /// Read the asynchronous events of this device.
    Watch(AsyncEvents),
    /// A device that several managers may use reported something.
    Async { device: ContextAddress, event: AsyncEvent },
    /// End the thread.
    Stop,
}

/// What a user thread has made on a lent id, and what is to be done with it.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) control: Control,
    /// For `rdma_connect` or `rdma_accept`.
    pub(crate) parameters: Parameters,
    pub(crate) keepalive: Option<Keepalive>,
    /// Gets the key when it is decided whether there will be a connection.
    pub(crate) decided: Option<Sender<Key>>,
}

/// An attempt to connect to one address.
#[derive(Clone, Debug)]
pub(crate) struct ConnectPlan {
    pub(crate) key: Key,
    pub(crate) source: Option<SocketAddr>,
    pub(crate) destination: SocketAddr,
    pub(crate) tos: Option<u8>,
    /// The exponent of the queue pair's acknowledgement timeout, 4.096 µs · 2^t.
    pub(crate) ack_timeout: Option<u8>,
    pub(crate) started: Instant,
    pub(crate) deadline: Instant,
}

/// What the event-channel thread tells the user of a connection.
#[derive(Debug)]
pub(crate) enum Notice {
    /// The id is the user's until it sends `Built` or `BuildFailed`.
    Routed {
        loan: Loan,
        local: SocketAddr,
    },
    Established {
        depths: ConnectionDepths,
        private_data: PrivateData,
    },
    /// Set-up failed, and the id is gone.
    Failed(Error),
    /// The connection is over; the endpoint's cause says why. `answered` is false if the peer did not say so in time.
    Closed {
        answered: bool,
    },
    /// The id is gone, and so is the event-channel thread's hold on the endpoint.
    Released,
}

/// What the event-channel thread tells the user of a listener.
#[derive(Debug)]
pub(crate) enum ListenNotice {
    Listening { key: Key, local: SocketAddr },
    Failed(Error),
    Released,
}

/// A connect request in a listener's queue.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) key: Key,
    pub(crate) claim: Claim,
    pub(crate) notices: Receiver<Notice>,
    pub(crate) peer: SocketAddr,
    pub(crate) local: SocketAddr,
    pub(crate) depths: ConnectionDepths,
    pub(crate) private_data: PrivateData,
}

/// The loan of a queued request's id, for whoever is first: the user thread that takes the request, or the event-channel
/// thread that ends it.
#[derive(Clone, Debug)]
pub(crate) struct Claim(Arc<Mutex<Option<Loan>>>);

impl Claim {
    pub(crate) fn new(loan: Loan) -> Self {
        Self(Arc::new(Mutex::new(Some(loan))))
    }

    /// The loan, for the first caller only.
    pub(crate) fn take(&self) -> Option<Loan> {
        lock(&self.0).take()
    }
}

/// Waits for a notice until `deadline` and a grace period, in which the event-channel thread should have said that the
/// deadline has passed. `None` when it did not.
pub(crate) fn wait<T>(notices: &Receiver<T>, deadline: Instant) -> Result<Option<T>> {
    if sys::in_child() {
        return Err(Error::Forked);
    }
    match notices.recv_deadline(deadline + GRACE) {
        Ok(notice) => Ok(Some(notice)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err(Error::ManagerGone),
    }
}

/// As [`wait`], for the notice that decides the set-up of `key`: when `cancel` is cancelled, the event-channel thread is
/// asked to end the attempt, which it does at once.
pub(crate) fn wait_for_setup(
    notices: &Receiver<Notice>,
    deadline: Instant,
    cancel: Option<&CancelToken>,
    key: Key,
    mailbox: &Mailbox,
) -> Result<Option<Notice>> {
    if let Some(cancel) = cancel
        && !sys::in_child()
    {
        select! {
            recv(notices) -> notice => return notice.map(Some).map_err(|_| Error::ManagerGone),
            recv(cancel.receiver()) -> _ => mailbox.send(Command::Cancel { key }),
            default(deadline.saturating_duration_since(Instant::now()) + GRACE) => return Ok(None),
        }
    }
    wait(notices, deadline)
}

/// The end of a loan that nobody ended otherwise: the event-channel thread gets its id back without a queue pair.
#[derive(Debug)]
pub(crate) struct LoanGuard {
    key: Key,
    mailbox: Arc<Mailbox>,
    loan: Option<Loan>,
}

impl LoanGuard {
    pub(crate) fn new(key: Key, loan: Loan, mailbox: Arc<Mailbox>) -> Self {
        Self { key, mailbox, loan: Some(loan) }
    }

    pub(crate) fn key(&self) -> Key {
        self.key
    }

    pub(crate) fn mailbox(&self) -> &Arc<Mailbox> {
        &self.mailbox
    }

    pub(crate) fn loan(&mut self) -> &mut Loan {
        self.loan.as_mut().expect("the loan is there until the guard is used up")
    }

    pub(crate) fn context(&self) -> ContextAddress {
        self.loan.as_ref().expect("the loan is there until the guard is used up").context()
    }

    /// Gives the id back with its queue pair: `rdma_connect` or `rdma_accept` follow.
    pub(crate) fn built(mut self, built: Built, deadline: Instant) {
        self.loan = None;
        self.mailbox.send(Command::Built { key: self.key, built, deadline });
    }

    /// Gives a request's id back with a refusal.
    pub(crate) fn refuse(mut self, private_data: Vec<u8>) {
        self.loan = None;
        self.mailbox.send(Command::Refused { key: self.key, private_data });
    }
}

impl Drop for LoanGuard {
    fn drop(&mut self) {
        if let Some(mut loan) = self.loan.take() {
            loan.forget_qp();
            drop(loan);
            self.mailbox.send(Command::BuildFailed { key: self.key });
        }
    }
}
