//! The event-channel thread: it alone reads the event channel, and it alone makes the librdmacm calls that start, answer
//! or end something for an id.
//!
//! It waits for the channel, for a command, or for the nearest deadline; turns what it finds into an input of the id's
//! machine (`proto`), and carries out the machine's outputs. It never holds a lock and makes only calls that return at once.

mod nodes;
mod removed;
mod slot;

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TrySendError};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use verbs::{AsyncEvent, AsyncEvents, CloseReason};

use crate::channel::{ConnectionDepths, Events, Received};
use crate::context::ContextAddress;
use crate::counters::{CounterCells, count};
use crate::error::Error;
use crate::handle::{Claim, Command, ConnectPlan, ListenNotice, Mailbox, Notice, Request};
use crate::id::{Id, Key};
use crate::manager::Domains;
use crate::options::ListenPlan;
use crate::private_data::PrivateData;
use crate::proto::{self, Call, Input, Output, Step};
use crate::sys::{CallError, IdOption};
use crate::time;
use nodes::Nodes;
use removed::Removed;
use slot::{ConnectionSlot, Details, ListenerSlot, Probed, Slot};

/// The thread's state.
#[derive(Debug)]
pub(crate) struct Driver {
    slots: HashMap<Key, Slot>,
    deadlines: BTreeSet<(Instant, Key)>,
    /// When to probe which connection next.
    probes: BTreeSet<(Instant, Key)>,
    events: Events,
    commands: Receiver<Command>,
    mailbox: Arc<Mailbox>,
    counters: Arc<CounterCells>,
    domains: Arc<Domains>,
    /// The devices in use.
    devices: HashMap<ContextAddress, AsyncEvents>,
    /// Tells when a device node vanishes; `None` where the system has no such news.
    nodes: Option<Nodes>,
    /// Devices that were removed and that librdmacm may still hold, with the time of the next look.
    removed: Removed,
}

impl Driver {
    pub(crate) fn new(
        events: Events,
        commands: Receiver<Command>,
        mailbox: Arc<Mailbox>,
        counters: Arc<CounterCells>,
        domains: Arc<Domains>,
    ) -> Self {
        Self {
            slots: HashMap::new(),
            deadlines: BTreeSet::new(),
            probes: BTreeSet::new(),
            events,
            commands,
            mailbox,
            counters,
            domains,
            devices: HashMap::new(),
            nodes: Nodes::watch(),
            removed: Removed::default(),
        }
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
            self.drain_async_events();
            self.look_for_vanished_nodes();
            let now = Instant::now();
            self.expire(now);
            self.probe(now);
            self.removed.look(now);
            self.counters.ids_live.store(self.slots.len() as u64, Ordering::Relaxed);
        }
    }

    /// Sleeps until there is an event, a command or a deadline.
    fn wait(&self) {
        let first = |set: &BTreeSet<(Instant, Key)>| set.first().map(|&(when, _)| when);
        let nearest = [first(&self.deadlines), first(&self.probes), self.removed.next_look()];
        let timeout = match nearest.into_iter().flatten().min() {
            None => PollTimeout::NONE,
            Some(deadline) => {
                // Rounded up, so that the deadline has passed when poll returns.
                let left = deadline.saturating_duration_since(Instant::now()).as_nanos().div_ceil(1_000_000);
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            }
        };
        let devices = self.devices.values().map(AsFd::as_fd).chain(self.nodes.as_ref().map(AsFd::as_fd));
        let mut fds: Vec<_> = [self.events.channel().as_fd(), self.mailbox.wake_fd()]
            .into_iter()
            .chain(devices)
            .map(|fd| PollFd::new(fd, PollFlags::POLLIN))
            .collect();
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

    fn drain_async_events(&mut self) {
        self.devices.retain(|&device, events| {
            loop {
                match events.try_next() {
                    Ok(Some(event)) => Mailbox::broadcast(device, event),
                    Ok(None) => return true,
                    Err(error) => {
                        // The device is gone; its ids hear of that by themselves.
                        log::debug!("{error}");
                        return false;
                    }
                }
            }
        });
    }

    /// Tells everybody whom a device's event may concern.
    fn async_event(&mut self, device: ContextAddress, event: AsyncEvent) {
        log::debug!("{:?} on {:?}", event.kind, event.subject);
        let mut concerned = Vec::new();
        for (&key, slot) in &mut self.slots {
            if slot.context() == device
                && let Slot::Connection(slot) = slot
                && let Some(input) = slot.on_async(event)
            {
                concerned.push((key, input));
            }
        }
        for (key, input) in concerned {
            self.feed(key, input, None);
        }
    }

    fn event(&mut self, received: Received) {
        let Received { key, event, status, errno, child, depths, private_data } = received;
        log::trace!("id={} event {event:?} status {status}", key.0);
        if event == proto::Event::DeviceRemoval {
            self.device_removed(key, status);
        }
        let details = Details { errno, depths, private_data, child };
        self.feed(key, Input::Event(event, status), Some(details));
    }

    /// The device of this id was removed. Everybody on it is told at once: the kernel's events for the others come one by
    /// one, and find them told.
    fn device_removed(&mut self, key: Key, status: i32) {
        if let Some(slot) = self.slots.get(&key) {
            self.forget_device(slot.context(), status);
        }
    }

    /// A device on which nothing of ours lives is removed without an event; but its node vanishes.
    fn look_for_vanished_nodes(&mut self) {
        let Some(nodes) = &self.nodes else { return };
        let vanished = nodes.vanished();
        if vanished.is_empty() {
            return;
        }
        let known = self.devices.iter();
        let gone: Vec<_> = known
            .filter(|(_, events)| vanished.contains(&events.context().node_name()))
            .map(|(&context, _)| context)
            .collect();
        for context in gone {
            self.forget_device(context, 0);
        }
    }

    fn forget_device(&mut self, context: ContextAddress, status: i32) {
        self.domains.forget(context);
        self.devices.remove(&context);
        self.removed.add(context, Instant::now());
        let concerned: Vec<Key> =
            self.slots.iter().filter(|(_, slot)| slot.context() == context).map(|(&key, _)| key).collect();
        for key in concerned {
            self.feed(key, Input::Event(proto::Event::DeviceRemoval, status), None);
        }
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

    /// Probes every connection whose time has come.
    fn probe(&mut self, now: Instant) {
        while let Some(&(due, key)) = self.probes.first() {
            if due > now {
                return;
            }
            self.probes.remove(&(due, key));
            let Some(Slot::Connection(slot)) = self.slots.get_mut(&key) else { continue };
            match slot.probe(key) {
                Probed::Again(interval) => {
                    self.probes.insert((time::after(now, interval), key));
                }
                Probed::Broken => self.feed(key, Input::Broken, None),
                Probed::Over => {}
            }
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Connect { plan, notices } => self.start_connect(plan, notices),
            Command::Listen { plan, notices, queue, end } => self.start_listen(plan, notices, queue, end),
            Command::Built { key, built, deadline } => {
                if let Some(Slot::Connection(slot)) = self.slots.get_mut(&key) {
                    slot.built(built, deadline);
                }
                self.feed(key, Input::Built, None);
            }
            Command::BuildFailed { key } => self.feed(key, Input::BuildFailed, None),
            Command::Refused { key, private_data } => {
                count(&self.counters.requests_refused);
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
            Command::Subscribe { key, subscriber } => {
                if let Some(Slot::Connection(slot)) = self.slots.get_mut(&key) {
                    slot.subscribe(subscriber);
                }
            }
            Command::Broken { key } => self.feed(key, Input::Broken, None),
            Command::Cancel { key } => self.feed(key, Input::Cancel, None),
            Command::Release { key } => self.feed(key, Input::Release, None),
            Command::Watch(events) => {
                self.devices.insert(ContextAddress::of(events.context().as_raw()), events);
            }
            Command::Async { device, event } => self.async_event(device, event),
            Command::Stop => unreachable!("`run` takes it"),
        }
    }

    fn start_connect(&mut self, plan: ConnectPlan, notices: Sender<Notice>) {
        let key = plan.key;
        count(&self.counters.connects_attempted);
        let id = match Id::create(self.events.channel(), key).and_then(|id| set_options(id, &plan)) {
            Ok(id) => id,
            Err(error) => {
                let _ = notices.send(Notice::Failed(error.into()));
                return;
            }
        };
        log::debug!("id={} connects to {}", key.0, plan.destination);
        self.slots.insert(key, Slot::Connection(Box::new(ConnectionSlot::active(id, plan, notices))));
        self.feed(key, Input::Resolve, None);
    }

    fn start_listen(
        &mut self,
        plan: ListenPlan,
        notices: Sender<ListenNotice>,
        queue: Sender<Request>,
        end: Arc<OnceLock<Error>>,
    ) {
        let key = Key::next();
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
        self.slots.insert(key, Slot::Listener(Box::new(ListenerSlot::new(id, plan, notices, queue, end))));
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
                let outputs = slot.advance(key, input);
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
            Some(Slot::Listener(slot)) => slot.call(call),
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
        match (self.slots.get_mut(&key), notice) {
            (None, _) => {}
            (Some(Slot::Connection(slot)), notice) => {
                let heard = slot.tell(key, notice, details, &self.counters);
                if notice == proto::Notice::Established
                    && let Some(interval) = slot.probe_interval()
                {
                    self.probes.insert((time::after(Instant::now(), interval), key));
                }
                if !heard && slot.is_lent() {
                    // The user thread no longer waits, and the loan that it was offered is dropped.
                    self.feed(key, Input::BuildFailed, None);
                }
            }
            (Some(Slot::Listener(_)), proto::Notice::Offer) => {
                if let Some(offered) = details.and_then(Offered::new) {
                    self.offer(key, offered);
                }
            }
            (Some(Slot::Listener(slot)), notice) => {
                if !slot.tell(key, notice) {
                    // The user thread no longer waits for its listener.
                    self.feed(key, Input::Release, None);
                }
            }
        }
    }

    /// Puts a request into its listener's queue, or refuses it when the queue is full.
    fn offer(&mut self, listener: Key, Offered { mut id, depths, private_data, peer, local }: Offered) {
        let Some(Slot::Listener(slot)) = self.slots.get(&listener) else { return };
        count(&self.counters.requests_received);
        let key = Key::next();
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
            count(&self.counters.requests_refused_queue_full);
            if let Err(CallError { call, errno }) = id.reject(&[]) {
                log::debug!("{call}: {errno}");
            }
            return;
        }
        log::debug!("id={} asks listener={} from {peer}", key.0, listener.0);
        let ttl = slot.plan.queue_ttl;
        self.slots.insert(key, Slot::Connection(Box::new(ConnectionSlot::passive(id, claim, peer, ttl, notices))));
        self.arm(key, Step::Queue);
    }

    /// Ends an id: destroys it, then says so.
    fn destroy(&mut self, key: Key) {
        self.disarm(key);
        match self.slots.remove(&key) {
            None => {}
            Some(Slot::Connection(slot)) => {
                log::trace!("id={} destroyed", key.0);
                slot.finish(key);
            }
            Some(Slot::Listener(slot)) => {
                log::debug!("listener={} closed", key.0);
                slot.finish();
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

/// A connect request's new id, with what came along.
struct Offered {
    id: Id,
    depths: ConnectionDepths,
    private_data: PrivateData,
    peer: SocketAddr,
    local: SocketAddr,
}

impl Offered {
    /// `None` for an event without a new id, or one without IP addresses, which cannot come from a listener of ours.
    fn new(details: Details) -> Option<Self> {
        let Details { child, depths, private_data, .. } = details;
        let id = child?;
        let (peer, local) = (id.peer_addr()?, id.local_addr()?);
        Some(Self { id, depths, private_data, peer, local })
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
