//! The event-channel thread: it alone reads the event channel, and it alone makes the librdmacm calls that start, answer
//! or end something for an id.
//!
//! It waits for the channel, for a command, or for the nearest deadline; turns what it finds into an input of the id's
//! machine (`proto`), and carries out the machine's outputs. It never holds a lock and makes only calls that return at once.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TrySendError};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use verbs::{CloseReason, Control};

use crate::channel::{ConnectionDepths, Events, Received};
use crate::error::{Error, FailureContext};
use crate::handle::{Claim, Command, ConnectPlan, ListenNotice, Mailbox, Notice, Request};
use crate::id::{Id, Key, Parameters};
use crate::options::ListenPlan;
use crate::private_data::PrivateData;
use crate::proto::connection::{self, Connection};
use crate::proto::listener::Listener;
use crate::proto::{self, Call, Closed, Event, Failure, Input, Output, Step};
use crate::sys::{CallError, IdOption};

/// What the kernel is given on top of our deadline, so that ours comes first.
const KERNEL_MARGIN: Duration = Duration::from_millis(200);

/// The thread's state.
#[derive(Debug)]
pub(crate) struct Driver {
    slots: HashMap<Key, Slot>,
    deadlines: BTreeSet<(Instant, Key)>,
    events: Events,
    commands: Receiver<Command>,
    mailbox: Arc<Mailbox>,
}

/// One id and what belongs to it.
#[derive(Debug)]
enum Slot {
    Connection(Box<ConnectionSlot>),
    Listener(Box<ListenerSlot>),
}

/// Dropped in this order: the id first, so that no call can reach the queue pair that `control` keeps alive.
#[derive(Debug)]
struct ConnectionSlot {
    id: Id,
    control: Option<Control>,
    machine: Connection,
    notices: Sender<Notice>,
    /// Sent when the id is gone.
    farewell: Option<Notice>,
    role: Role,
    peer: SocketAddr,
    started: Instant,
    /// The end of the step that [`Output::Arm`] starts next.
    deadline: Instant,
    /// The entry of this id in `deadlines`.
    armed: Option<Instant>,
    parameters: Parameters,
}

#[derive(Debug)]
enum Role {
    Active(ConnectPlan),
    /// With the claim on the request while it is in the queue.
    Passive(Claim),
}

#[derive(Debug)]
struct ListenerSlot {
    id: Id,
    machine: Listener,
    plan: ListenPlan,
    notices: Sender<ListenNotice>,
    queue: Sender<Request>,
    farewell: Option<ListenNotice>,
}

/// What an event brought with it, for the outputs that it causes.
struct Details {
    errno: Errno,
    depths: ConnectionDepths,
    private_data: PrivateData,
    child: Option<Id>,
}

impl Driver {
    pub(crate) fn new(events: Events, commands: Receiver<Command>, mailbox: Arc<Mailbox>) -> Self {
        Self { slots: HashMap::new(), deadlines: BTreeSet::new(), events, commands, mailbox }
    }

    /// Runs until [`Command::Stop`].
    pub(crate) fn run(mut self) {
        log::debug!("event-channel thread started");
        loop {
            self.wait();
            self.mailbox.clear();
            loop {
                match self.commands.try_recv() {
                    Ok(Command::Stop) => {
                        log::debug!("event-channel thread ends with {} ids", self.slots.len());
                        return;
                    }
                    Ok(command) => self.command(command),
                    Err(_) => break,
                }
            }
            self.drain_events();
            self.expire(Instant::now());
        }
    }

    /// Sleeps until there is an event, a command or a deadline.
    fn wait(&self) {
        let timeout = match self.deadlines.first() {
            None => PollTimeout::NONE,
            Some(&(deadline, _)) => {
                // Rounded up, so that the deadline has passed when poll returns.
                let left = deadline.saturating_duration_since(Instant::now()).as_nanos().div_ceil(1_000_000);
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            }
        };
        let mut fds = [
            PollFd::new(self.events.channel().as_fd(), PollFlags::POLLIN),
            PollFd::new(self.mailbox.wake_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            // Only ENOMEM is left; the loop goes on, at a pace that leaves the machine some air.
            Err(errno) => {
                log::warn!("poll: {errno}");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }

    fn drain_events(&mut self) {
        loop {
            match self.events.next() {
                Ok(Some(received)) => self.event(received),
                Ok(None) => return,
                Err(CallError { errno: Errno::EINTR, .. }) => {}
                Err(CallError { call, errno }) => {
                    log::warn!("{call}: {errno}");
                    return;
                }
            }
        }
    }

    fn event(&mut self, received: Received) {
        let Received { key, event, status, errno, child, depths, private_data } = received;
        log::trace!("id={} event {event:?} status {status}", key.0);
        let details = Details { errno, depths, private_data, child };
        self.feed(key, Input::Event(event, status), Some(details));
    }

    /// Feeds every deadline that has passed.
    fn expire(&mut self, now: Instant) {
        while let Some(&(deadline, key)) = self.deadlines.first() {
            if deadline > now {
                return;
            }
            self.deadlines.remove(&(deadline, key));
            if let Some(Slot::Connection(slot)) = self.slots.get_mut(&key) {
                slot.armed = None;
            }
            self.feed(key, Input::Deadline, None);
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Connect { plan, notices } => self.start_connect(plan, notices),
            Command::Listen { plan, notices, queue } => self.start_listen(plan, notices, queue),
            Command::Built { key, control, parameters, deadline } => {
                if let Some(Slot::Connection(slot)) = self.slots.get_mut(&key) {
                    slot.control = Some(control);
                    slot.parameters = parameters;
                    slot.deadline = deadline;
                }
                self.feed(key, Input::Built, None);
            }
            Command::BuildFailed { key } => self.feed(key, Input::BuildFailed, None),
            Command::Refused { key, private_data } => {
                if let Some(Slot::Connection(slot)) = self.slots.get_mut(&key) {
                    slot.parameters.private_data = private_data;
                }
                self.feed(key, Input::Refused, None);
            }
            Command::Disconnect { key, deadline } => {
                if let Some(Slot::Connection(slot)) = self.slots.get_mut(&key) {
                    slot.deadline = deadline;
                }
                self.feed(key, Input::Disconnect, None);
            }
            Command::Broken { key } => self.feed(key, Input::Broken, None),
            Command::Cancel { key } => self.feed(key, Input::Cancel, None),
            Command::Release { key } => self.feed(key, Input::Release, None),
            Command::Stop => unreachable!("`run` takes it"),
        }
    }

    fn start_connect(&mut self, plan: ConnectPlan, notices: Sender<Notice>) {
        let key = next_key();
        let id = match Id::create(self.events.channel(), key).and_then(|id| set_options(id, &plan)) {
            Ok(id) => id,
            Err(error) => {
                let _ = notices.send(Notice::Failed(error.into()));
                return;
            }
        };
        log::debug!("id={} connects to {}", key.0, plan.destination);
        let slot = ConnectionSlot {
            id,
            control: None,
            machine: Connection::active(),
            notices,
            farewell: None,
            peer: plan.destination,
            started: plan.started,
            deadline: plan.deadline,
            armed: None,
            parameters: Parameters::default(),
            role: Role::Active(plan),
        };
        self.slots.insert(key, Slot::Connection(Box::new(slot)));
        self.feed(key, Input::Resolve, None);
    }

    fn start_listen(&mut self, plan: ListenPlan, notices: Sender<ListenNotice>, queue: Sender<Request>) {
        let key = next_key();
        let id = match Id::create(self.events.channel(), key).and_then(|id| {
            if plan.reuse_address {
                id.set_option(IdOption::ReuseAddr, 1)?;
            }
            if let Some(only) = plan.ipv6_only {
                id.set_option(IdOption::AfOnly, u8::from(only))?;
            }
            Ok(id)
        }) {
            Ok(id) => id,
            Err(error) => {
                let _ = notices.send(ListenNotice::Failed(error.into()));
                return;
            }
        };
        let slot = ListenerSlot { id, machine: Listener::new(), plan, notices, queue, farewell: None };
        self.slots.insert(key, Slot::Listener(Box::new(slot)));
        self.feed(key, Input::Listen, None);
    }

    /// Gives an input to the id's machine and carries out what it says. An unknown key is an id that is already gone.
    fn feed(&mut self, key: Key, input: Input, details: Option<Details>) {
        match self.slots.get_mut(&key) {
            None => log::trace!("id={} is gone; {input:?} ignored", key.0),
            Some(Slot::Connection(slot)) => {
                if slot.was_taken(input) {
                    let outputs = slot.advance(key, Input::Taken);
                    self.carry_out(key, outputs, None);
                    return self.feed(key, input, details);
                }
                let outputs = slot.advance(key, input);
                self.carry_out(key, outputs, details);
            }
            Some(Slot::Listener(slot)) => {
                let before = slot.machine.state();
                let outputs = slot.machine.on(input);
                if slot.machine.state() != before {
                    log::trace!("listener={} {before:?} -> {:?} on {input:?}", key.0, slot.machine.state());
                }
                self.carry_out(key, outputs, details);
            }
        }
    }

    fn carry_out(&mut self, key: Key, outputs: Vec<Output>, mut details: Option<Details>) {
        for output in outputs {
            if !self.slots.contains_key(&key) {
                // A call failed, and its failure ended the id.
                return;
            }
            match output {
                Output::Call(Call::Destroy) => self.destroy(key),
                Output::Call(call) => {
                    if let Err(CallError { call: name, errno }) = self.call(key, call) {
                        log::debug!("id={} {name}: {errno}", key.0);
                        self.feed(key, Input::Failed(call, errno as i32), None);
                    }
                }
                Output::Arm(step) => self.arm(key, step),
                Output::Disarm => self.disarm(key),
                Output::Tell(notice) => self.tell(key, notice, details.take()),
            }
        }
    }

    fn call(&mut self, key: Key, call: Call) -> Result<(), CallError> {
        match self.slots.get(&key) {
            None => Ok(()),
            Some(Slot::Listener(slot)) => match call {
                Call::Bind => slot.id.bind(slot.plan.address),
                Call::Listen => slot.id.listen(),
                other => unreachable!("a listener's machine does not ask for {other:?}"),
            },
            Some(Slot::Connection(slot)) => slot.call(call),
        }
    }

    fn arm(&mut self, key: Key, step: Step) {
        self.disarm(key);
        if let Some(Slot::Connection(slot)) = self.slots.get_mut(&key) {
            log::trace!("id={} has {:?} for {step:?}", key.0, slot.deadline.saturating_duration_since(Instant::now()));
            slot.armed = Some(slot.deadline);
            self.deadlines.insert((slot.deadline, key));
        }
    }

    fn disarm(&mut self, key: Key) {
        if let Some(Slot::Connection(slot)) = self.slots.get_mut(&key)
            && let Some(armed) = slot.armed.take()
        {
            self.deadlines.remove(&(armed, key));
        }
    }

    fn tell(&mut self, key: Key, notice: proto::Notice, details: Option<Details>) {
        match self.slots.get_mut(&key) {
            None => {}
            Some(Slot::Connection(slot)) => {
                if !slot.tell(key, notice, details) && slot.machine.state().is_lent() {
                    // The user thread no longer waits, and the loan that it was offered is dropped.
                    self.feed(key, Input::BuildFailed, None);
                }
            }
            Some(Slot::Listener(slot)) => match notice {
                proto::Notice::Offer => {
                    if let Some(child) = details.and_then(|mut details| {
                        let child = details.child.take()?;
                        Offered::new(child, details)
                    }) {
                        self.offer(key, child);
                    }
                }
                proto::Notice::Listening => {
                    let local = slot.id.local_addr().unwrap_or(slot.plan.address);
                    log::debug!("listener={} on {local}", key.0);
                    let _ = slot.notices.send(ListenNotice::Listening { key, local });
                }
                proto::Notice::Failed(Failure::Released) => slot.farewell = Some(ListenNotice::Released),
                proto::Notice::Failed(failure) => slot.farewell = Some(ListenNotice::Failed(slot.error(failure))),
                other => unreachable!("a listener's machine does not tell {other:?}"),
            },
        }
    }

    /// Puts a request into its listener's queue, or refuses it when the queue is full.
    fn offer(&mut self, listener: Key, Offered { mut id, depths, private_data, peer, local }: Offered) {
        let Some(Slot::Listener(slot)) = self.slots.get(&listener) else { return };
        let key = next_key();
        id.set_key(key);
        let claim = Claim::new(id.lend());
        let (notices, receiver) = crossbeam_channel::unbounded();
        let request = Request { key, claim: claim.clone(), notices: receiver, peer, local, depths, private_data };
        if let Err(error) = slot.queue.try_send(request) {
            let full = matches!(error, TrySendError::Full(_));
            drop(claim.take());
            log::debug!(
                "listener={} refuses {peer}: {}",
                listener.0,
                if full { "queue full" } else { "nobody accepts" }
            );
            if let Err(CallError { call, errno }) = id.reject(&[]) {
                log::debug!("{call}: {errno}");
            }
            return;
        }
        log::debug!("id={} asks listener={} from {peer}", key.0, listener.0);
        let now = Instant::now();
        let deadline = now + slot.plan.queue_ttl;
        let slot = ConnectionSlot {
            id,
            control: None,
            machine: Connection::passive(),
            notices,
            farewell: None,
            role: Role::Passive(claim),
            peer,
            started: now,
            deadline,
            armed: None,
            parameters: Parameters::default(),
        };
        self.slots.insert(key, Slot::Connection(Box::new(slot)));
        self.arm(key, Step::Queue);
    }

    /// Ends an id: destroys it, then says so.
    fn destroy(&mut self, key: Key) {
        self.disarm(key);
        match self.slots.remove(&key) {
            None => {}
            Some(Slot::Connection(slot)) => {
                let ConnectionSlot { id, control, notices, farewell, .. } = *slot;
                drop(id);
                log::trace!("id={} destroyed", key.0);
                if let Some(farewell) = farewell {
                    let _ = notices.send(farewell);
                }
                // The endpoint's memory is large: the user's thread takes it apart, if it still listens.
                let _ = notices.send(Notice::Released(control));
            }
            Some(Slot::Listener(slot)) => {
                let ListenerSlot { id, notices, farewell, queue, .. } = *slot;
                drop(id);
                drop(queue);
                log::debug!("listener={} closed", key.0);
                let _ = notices.send(farewell.unwrap_or(ListenNotice::Released));
            }
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        for slot in self.slots.values() {
            if let Slot::Connection(slot) = slot
                && let Some(control) = &slot.control
            {
                control.close(CloseReason::Local);
            }
        }
    }
}

impl ConnectionSlot {
    /// Whether a user thread took this queued request from under `input`, so that the id is lent to it. An input that
    /// would end the request takes it away from the user threads instead.
    fn was_taken(&self, input: Input) -> bool {
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

    fn advance(&mut self, key: Key, input: Input) -> Vec<Output> {
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

    fn call(&self, call: Call) -> Result<(), CallError> {
        debug_assert!(!self.machine.state().is_lent(), "{call:?} while the id is lent");
        let left = || self.deadline.saturating_duration_since(Instant::now()) + KERNEL_MARGIN;
        match (call, &self.role) {
            (Call::ResolveAddr, Role::Active(plan)) => self.id.resolve_addr(plan.source, plan.destination, left()),
            (Call::ResolveRoute, _) => self.id.resolve_route(left()),
            (Call::Connect, _) => self.id.connect(&self.parameters),
            (Call::Accept, _) => self.id.accept(&self.parameters),
            (Call::Reject, _) => self.id.reject(&self.parameters.private_data),
            (Call::Disconnect, _) => self.id.disconnect(),
            (other, role) => unreachable!("a connection's machine does not ask for {other:?} as {role:?}"),
        }
    }

    /// False if nobody listens any more.
    fn tell(&mut self, key: Key, notice: proto::Notice, details: Option<Details>) -> bool {
        let notice = match notice {
            proto::Notice::Routed => {
                let local = self.id.local_addr().unwrap_or(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0));
                Notice::Routed { key, loan: self.id.lend(), local }
            }
            proto::Notice::Established => {
                let private_data = details.map(|details| details.private_data).unwrap_or_default();
                log::debug!("id={} established with {} after {:?}", key.0, self.peer, self.started.elapsed());
                Notice::Established { private_data }
            }
            proto::Notice::Failed(failure) => {
                let error = self.error(failure, details);
                log::debug!("id={} to {}: {error}", key.0, self.peer);
                self.farewell = Some(Notice::Failed(error));
                return true;
            }
            proto::Notice::Closed(closed) => {
                log::debug!("id={} with {} closed: {closed:?}", key.0, self.peer);
                if let Some(control) = &self.control {
                    control.close(match closed {
                        Closed::Peer => CloseReason::Peer,
                        // A broken endpoint has recorded its cause, and the first cause stays.
                        Closed::Local | Closed::LocalUnanswered | Closed::Broken => CloseReason::Local,
                        Closed::DeviceRemoved => CloseReason::DeviceRemoved,
                    });
                }
                Notice::Closed { answered: closed != Closed::LocalUnanswered }
            }
            proto::Notice::PathChanged(event) => {
                // Advice: if the path is really gone, the next operation fails with the cause.
                log::debug!("id={} path to {} changed ({event:?})", key.0, self.peer);
                return true;
            }
            other @ (proto::Notice::Offer | proto::Notice::Listening) => {
                unreachable!("a connection's machine does not tell {other:?}")
            }
        };
        self.notices.send(notice).is_ok()
    }

    fn error(&self, failure: Failure, details: Option<Details>) -> Error {
        let (errno, private_data) = details.map_or((Errno::EIO, PrivateData::default()), |d| (d.errno, d.private_data));
        Error::from_failure(
            failure,
            &FailureContext {
                peer: self.peer,
                after: self.deadline.saturating_duration_since(self.started),
                errno,
                private_data: &private_data,
            },
        )
    }
}

impl ListenerSlot {
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

/// A connect request's new id, with what came along.
struct Offered {
    id: Id,
    depths: ConnectionDepths,
    private_data: PrivateData,
    peer: SocketAddr,
    local: SocketAddr,
}

impl Offered {
    /// `None` for an id without IP addresses, which cannot come from a listener of ours.
    fn new(id: Id, details: Details) -> Option<Self> {
        let (peer, local) = (id.peer_addr()?, id.local_addr()?);
        Some(Self { id, depths: details.depths, private_data: details.private_data, peer, local })
    }
}

fn set_options(id: Id, plan: &ConnectPlan) -> Result<Id, CallError> {
    if let Some(tos) = plan.tos {
        id.set_option(IdOption::Tos, tos)?;
    }
    if let Some(exponent) = plan.ack_timeout {
        id.set_option(IdOption::AckTimeout, exponent)?;
    }
    Ok(id)
}

/// Keys are never used twice, so that a late command or event cannot meet a stranger.
fn next_key() -> Key {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    Key(NEXT.fetch_add(1, Ordering::Relaxed))
}
