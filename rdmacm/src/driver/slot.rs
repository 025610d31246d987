//! One id and what belongs to it: the calls that its machine asks for, and what its user is told.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use nix::errno::Errno;
use verbs::{AsyncEvent, AsyncEventKind, AsyncSubject, CloseReason, Control, Probe};

use crate::channel::ConnectionDepths;
use crate::context::ContextAddress;
use crate::counters::{CounterCells, count};
use crate::error::{Error, FailureContext};
use crate::events::{ConnectionEvent, Subscriber};
use crate::handle::{Built, Claim, ConnectPlan, ListenNotice, Notice, Request};
use crate::id::{Id, Key, Parameters};
use crate::options::{Keepalive, ListenPlan};
use crate::private_data::PrivateData;
use crate::proto::connection::{self, Connection};
use crate::proto::listener::Listener;
use crate::proto::{self, Call, Closed, Event, Failure, Input, Output, Step};
use crate::sys::CallError;
use crate::time;

/// What the kernel is given on top of our deadline, so that ours comes first.
const KERNEL_MARGIN: Duration = Duration::from_millis(200);

/// One id and what belongs to it.
#[derive(Debug)]
pub(super) enum Slot {
    Connection(Box<ConnectionSlot>),
    Listener(Box<ListenerSlot>),
}

impl Slot {
    /// The device context that the id is bound to.
    pub(super) fn context(&self) -> ContextAddress {
        match self {
            Self::Connection(slot) => slot.id.context(),
            Self::Listener(slot) => slot.id.context(),
        }
    }
}

/// Dropped in this order: the id first, so that no call can reach the queue pair that `control` keeps alive.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    pub(super) id: Id,
    pub(super) control: Option<Control>,
    pub(super) machine: Connection,
    pub(super) notices: Sender<Notice>,
    /// Sent when the id is gone.
    pub(super) farewell: Option<Notice>,
    role: Role,
    pub(super) peer: SocketAddr,
    pub(super) started: Instant,
    /// The end of the step that [`Output::Arm`] starts next.
    pub(super) deadline: Instant,
    subscribers: Vec<Subscriber>,
    keepalive: Option<Keepalive>,
    /// Gets the key when it is decided whether there will be a connection.
    decided: Option<Sender<Key>>,
    /// Probes in a row that were not answered when the next was due.
    missed: u32,
    /// The entry of this id in `deadlines`.
    pub(super) armed: Option<Instant>,
    pub(super) parameters: Parameters,
}

#[derive(Debug)]
enum Role {
    Active(ConnectPlan),
    /// With the claim on the request while it is in the queue.
    Passive(Claim),
}

#[derive(Debug)]
pub(super) struct ListenerSlot {
    pub(super) id: Id,
    pub(super) machine: Listener,
    pub(super) plan: ListenPlan,
    pub(super) notices: Sender<ListenNotice>,
    pub(super) queue: Sender<Request>,
    end: Arc<OnceLock<Error>>,
    pub(super) farewell: Option<ListenNotice>,
}

/// What a probe says about the next one.
pub(super) enum Probed {
    /// It is due after this time.
    Again(Duration),
    /// The endpoint is broken, and has recorded why.
    Broken,
    /// The connection is not watched any more.
    Over,
}

/// What an event brought with it, for the outputs that it causes.
pub(super) struct Details {
    pub(super) errno: Errno,
    pub(super) depths: ConnectionDepths,
    pub(super) private_data: PrivateData,
    pub(super) child: Option<Id>,
}

impl ConnectionSlot {
    /// An id that will connect.
    pub(super) fn active(id: Id, plan: ConnectPlan, notices: Sender<Notice>) -> Self {
        Self {
            id,
            control: None,
            machine: Connection::active(),
            notices,
            farewell: None,
            subscribers: Vec::new(),
            keepalive: None,
            missed: 0,
            decided: None,
            peer: plan.destination,
            started: plan.started,
            deadline: plan.deadline,
            armed: None,
            parameters: Parameters::default(),
            role: Role::Active(plan),
        }
    }

    /// The id of a request that waits in its listener's queue for at most `ttl`.
    pub(super) fn passive(id: Id, claim: Claim, peer: SocketAddr, ttl: Duration, notices: Sender<Notice>) -> Self {
        let started = Instant::now();
        Self {
            id,
            control: None,
            machine: Connection::passive(),
            notices,
            farewell: None,
            subscribers: Vec::new(),
            keepalive: None,
            missed: 0,
            decided: None,
            peer,
            started,
            deadline: time::after(started, ttl),
            armed: None,
            parameters: Parameters::default(),
            role: Role::Passive(claim),
        }
    }

    /// Destroys the id, lets the endpoint go (its user's thread, which usually has the last hold on it, takes it apart),
    /// then tells.
    pub(super) fn finish(self, key: Key) {
        let Self { id, control, notices, farewell, decided, .. } = self;
        drop(id);
        drop(control);
        // Nobody may listen any more.
        if let Some(farewell) = farewell {
            let _ = notices.send(farewell);
        }
        if let Some(decided) = decided {
            let _ = decided.send(key);
        }
        let _ = notices.send(Notice::Released);
    }

    /// How often the connection is probed, if it is.
    pub(super) fn probe_interval(&self) -> Option<Duration> {
        self.keepalive.map(|keepalive| keepalive.interval)
    }

    /// Asks the peer's device for a sign of life, and looks at the answer to the last question.
    pub(super) fn probe(&mut self, key: Key) -> Probed {
        let (Some(keepalive), Some(control)) = (self.keepalive, &self.control) else { return Probed::Over };
        if self.machine.state() != connection::State::Established {
            return Probed::Over;
        }
        match control.probe() {
            Probe::Sent => self.missed = 0,
            Probe::Unanswered => self.missed += 1,
            // The cause is recorded; nobody who uses the connection has found it yet.
            Probe::Broken => return Probed::Broken,
        }
        if self.missed >= keepalive.misses {
            log::debug!("id={} {} missed {} probes", key.0, self.peer, self.missed);
            control.close(CloseReason::Unresponsive);
            return Probed::Broken;
        }
        Probed::Again(keepalive.interval)
    }

    /// A device event that may concern the connection. Returns what its machine must hear of it.
    pub(super) fn on_async(&mut self, event: AsyncEvent) -> Option<Input> {
        match event.kind {
            AsyncEventKind::PORT_ERR => self.publish(&ConnectionEvent::PortDown),
            AsyncEventKind::PORT_ACTIVE => self.publish(&ConnectionEvent::PortUp),
            _ => {}
        }
        let control = self.control.as_ref()?;
        let qp = control.queue_pair();
        let fatal = match event.subject {
            AsyncSubject::Device => event.kind == AsyncEventKind::DEVICE_FATAL,
            AsyncSubject::QueuePair(number) if number == qp.qp_num() => match event.kind {
                AsyncEventKind::COMM_EST => return Some(Input::CommEstablished),
                AsyncEventKind::QP_FATAL | AsyncEventKind::QP_REQ_ERR | AsyncEventKind::QP_ACCESS_ERR => true,
                _ => false,
            },
            AsyncSubject::CompletionQueue(address) => {
                address == qp.send_cq().as_raw().addr() || address == qp.recv_cq().as_raw().addr()
            }
            _ => false,
        };
        if !fatal {
            return None;
        }
        // A completion that says more may be there already, or come: the first cause stays.
        control.close(CloseReason::failed(format!("the device reported {:?}", event.kind)));
        Some(Input::Broken)
    }

    /// Tells `subscriber` from now on what happens to the connection, or at once that it is over.
    pub(super) fn subscribe(&mut self, subscriber: Subscriber) {
        if self.machine.state() == connection::State::Disconnected {
            subscriber.tell(ConnectionEvent::Closed(self.cause()));
        } else {
            self.subscribers.push(subscriber);
        }
    }

    fn publish(&mut self, event: &ConnectionEvent) {
        self.subscribers.retain(|subscriber| subscriber.tell(event.clone()));
    }

    /// Why the connection ended.
    fn cause(&self) -> Error {
        let cause = self.control.as_ref().and_then(Control::cause);
        cause.map_or(Error::ManagerGone, Error::Verbs)
    }

    /// The loan ends with this.
    pub(super) fn built(&mut self, built: Built, deadline: Instant) {
        let Built { control, parameters, keepalive, decided } = built;
        self.control = Some(control);
        self.parameters = parameters;
        self.keepalive = keepalive;
        self.decided = decided;
        self.deadline = deadline;
    }

    /// The user thread has the id.
    pub(super) fn is_lent(&self) -> bool {
        self.machine.state().is_lent()
    }

    /// Whether a user thread took this queued request from under `input`, so that the id is lent to it. An input that
    /// would end the request takes it away from the user threads instead.
    pub(super) fn was_taken(&self, input: Input) -> bool {
        let Role::Passive(claim) = &self.role else { return false };
        let here = self.machine.state();
        if here != connection::State::Queued {
            return false;
        }
        let mut probe = self.machine.clone();
        probe.on(input);
        let ends = !matches!(probe.state(), connection::State::Queued);
        match input {
            // Only a user thread that took the request can end its loan.
            Input::Built | Input::BuildFailed | Input::Refused => true,
            _ => ends && claim.take().is_none(),
        }
    }

    pub(super) fn advance(&mut self, key: Key, input: Input) -> Vec<Output> {
        let before = self.machine.state();
        let outputs = self.machine.on(input);
        let after = self.machine.state();
        if before == after {
            log::trace!("id={} {before:?} on {input:?}", key.0);
        } else {
            log::trace!("id={} {before:?} -> {after:?} on {input:?}", key.0);
        }
        outputs
    }

    pub(super) fn call(&self, call: Call) -> Result<(), CallError> {
        debug_assert!(!self.is_lent(), "{call:?} while the id is lent");
        let left = || self.deadline.saturating_duration_since(Instant::now()) + KERNEL_MARGIN;
        match (call, &self.role) {
            (Call::ResolveAddr, Role::Active(plan)) => self.id.resolve_addr(plan.source, plan.destination, left()),
            (Call::ResolveRoute, _) => self.id.resolve_route(left()),
            (Call::Connect, _) => self.id.connect(&self.parameters),
            (Call::Accept, _) => self.id.accept(&self.parameters),
            (Call::Reject, _) => self.id.reject(&self.parameters.private_data),
            (Call::Notify, _) => self.id.notify_established(),
            (Call::Disconnect, _) => self.id.disconnect(),
            (other, role) => unreachable!("a connection's machine does not ask for {other:?} as {role:?}"),
        }
    }

    /// False if nobody listens any more.
    pub(super) fn tell(
        &mut self,
        key: Key,
        notice: proto::Notice,
        details: Option<Details>,
        counters: &CounterCells,
    ) -> bool {
        let notice = match notice {
            proto::Notice::Routed => {
                let local = self.id.local_addr().unwrap_or(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0));
                Notice::Routed { loan: self.id.lend(), local }
            }
            proto::Notice::Established => {
                let (depths, private_data) = details.map(|d| (d.depths, d.private_data)).unwrap_or_default();
                let depths = match self.role {
                    // As the peer's reply says.
                    Role::Active(_) => depths,
                    // As our own reply said.
                    Role::Passive(_) => ConnectionDepths {
                        responder_resources: self.parameters.responder_resources,
                        initiator_depth: self.parameters.initiator_depth,
                    },
                };
                log::debug!("id={} established with {} after {:?}", key.0, self.peer, self.started.elapsed());
                count(match self.role {
                    Role::Active(_) => &counters.connects_established,
                    Role::Passive(_) => &counters.requests_accepted,
                });
                Notice::Established { depths, private_data }
            }
            proto::Notice::Failed(failure) => {
                let error = self.error(failure, details);
                log::debug!("id={} to {}: {error}", key.0, self.peer);
                count(self.failure_counter(failure, &error, counters));
                self.farewell = Some(Notice::Failed(error));
                return true;
            }
            proto::Notice::Closed(closed) => {
                log::debug!("id={} with {} closed: {closed:?}", key.0, self.peer);
                let (reason, counter) = match closed {
                    Closed::Peer => (CloseReason::Peer, &counters.closed_by_peer),
                    Closed::Local | Closed::LocalUnanswered => (CloseReason::Local, &counters.closed_locally),
                    // A broken endpoint has recorded its cause, and the first cause stays.
                    Closed::Broken => (CloseReason::Local, &counters.closed_broken),
                    Closed::DeviceRemoved => (CloseReason::DeviceRemoved, &counters.closed_by_device_removal),
                };
                count(counter);
                if let Some(control) = &self.control {
                    control.close(reason);
                }
                self.publish(&ConnectionEvent::Closed(self.cause()));
                self.subscribers.clear();
                Notice::Closed { answered: closed != Closed::LocalUnanswered }
            }
            proto::Notice::PathChanged(event) => {
                // Advice: if the path is really gone, the next operation fails with the cause.
                log::debug!("id={} path to {} changed ({event:?})", key.0, self.peer);
                count(&counters.paths_changed);
                self.publish(&match event {
                    Event::AddrChange => ConnectionEvent::AddressChanged,
                    _ => ConnectionEvent::PathChanged,
                });
                return true;
            }
            other @ (proto::Notice::Offer | proto::Notice::Listening) => {
                unreachable!("a connection's machine does not tell {other:?}")
            }
        };
        let heard = self.notices.send(notice).is_ok();
        if self.machine.state() == connection::State::Established
            && let Some(decided) = self.decided.take()
        {
            // A listener that is gone has dropped what it had begun.
            let _ = decided.send(key);
        }
        heard
    }

    fn failure_counter<'a>(&self, failure: Failure, error: &Error, counters: &'a CounterCells) -> &'a AtomicU64 {
        match (&self.role, error, failure) {
            (Role::Active(_), Error::Refused { .. }, _) => &counters.connects_refused,
            (Role::Active(_), Error::Rejected { .. }, _) => &counters.connects_rejected,
            (Role::Active(_), Error::TransportRejected { .. }, _) => &counters.connects_rejected_by_transport,
            (Role::Active(_), Error::TimedOut { .. }, _) => &counters.connects_timed_out,
            (Role::Active(_), ..) => &counters.connects_failed,
            (Role::Passive(_), _, Failure::Deadline(Step::Queue)) => &counters.requests_expired,
            (Role::Passive(_), _, Failure::Released | Failure::Cancelled) => &counters.requests_refused,
            (Role::Passive(_), ..) => &counters.requests_aborted,
        }
    }

    fn error(&self, failure: Failure, details: Option<Details>) -> Error {
        let (errno, private_data) = details.map_or((Errno::EIO, PrivateData::default()), |d| (d.errno, d.private_data));
        Error::from_failure(
            failure,
            &FailureContext {
                peer: self.peer,
                passive: matches!(self.role, Role::Passive(_)),
                after: self.deadline.saturating_duration_since(self.started),
                errno,
                private_data: &private_data,
            },
        )
    }
}

impl ListenerSlot {
    pub(super) fn new(
        id: Id,
        plan: ListenPlan,
        notices: Sender<ListenNotice>,
        queue: Sender<Request>,
        end: Arc<OnceLock<Error>>,
    ) -> Self {
        Self { id, machine: Listener::new(), plan, notices, queue, end, farewell: None }
    }

    pub(super) fn advance(&mut self, key: Key, input: Input) -> Vec<Output> {
        let before = self.machine.state();
        let outputs = self.machine.on(input);
        log::trace!("listener={} {before:?} -> {:?} on {input:?}", key.0, self.machine.state());
        outputs
    }

    pub(super) fn call(&self, call: Call) -> Result<(), CallError> {
        match call {
            Call::Bind => self.id.bind(self.plan.address),
            Call::Listen => self.id.listen(),
            other => unreachable!("a listener's machine does not ask for {other:?}"),
        }
    }

    /// Destroys the id, then tells: the acceptors by the end of their queue.
    pub(super) fn finish(self) {
        let Self { id, notices, queue, farewell, .. } = self;
        drop(id);
        drop(queue);
        // Nobody may listen any more.
        let _ = notices.send(farewell.unwrap_or(ListenNotice::Released));
    }

    /// False if nobody listens any more.
    pub(super) fn tell(&mut self, key: Key, notice: proto::Notice) -> bool {
        match notice {
            proto::Notice::Listening => {
                let local = self.id.local_addr().unwrap_or(self.plan.address);
                log::debug!("listener={} on {local}", key.0);
                return self.notices.send(ListenNotice::Listening { key, local }).is_ok();
            }
            proto::Notice::Failed(Failure::Released) => self.farewell = Some(ListenNotice::Released),
            proto::Notice::Failed(failure) => {
                let error = self.error(failure);
                let _ = self.end.set(error.clone());
                self.farewell = Some(ListenNotice::Failed(error));
            }
            other => unreachable!("a listener's machine does not tell {other:?}"),
        }
        true
    }

    fn error(&self, failure: Failure) -> Error {
        match failure {
            Failure::Call(call, errno) => {
                let errno = Errno::from_raw(errno);
                Error::from_bind(call.c_name(), errno, self.plan.address)
            }
            Failure::Event(Event::DeviceRemoval, _) => Error::DeviceRemoved,
            Failure::Event(..) | Failure::Deadline(_) | Failure::Cancelled | Failure::Released => Error::ListenerClosed,
        }
    }
}
