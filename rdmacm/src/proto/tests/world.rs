//! Two machines, joined by a small model of the kernel's connection manager, and everything that can happen to them.
//!
//! The model is that of InfiniBand's `cm.c` and `cma.c`, as far as a machine can see it: six messages between two ids, what
//! each does in each state of the kernel's id, what the calls of librdmacm do, and which event is reported when. Messages
//! may be lost, repeated and overtake each other; the kernel may give up; devices are removed, processes die, calls fail.
//! Every world that can be reached is looked at, and every way that leads from it.

use std::collections::HashMap;

use super::super::connection::{Connection, State};
use super::super::{Call, Event, Input};
use super::{Driven, Machine, active, passive};

/// What the kernels send to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Message {
    Req,
    Rep,
    Rtu,
    Rej,
    Dreq,
    Drep,
}

/// The kernel's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Id {
    /// Not there: not yet, or no more.
    None,
    Idle,
    AddressResolved,
    RouteResolved,
    ReqSent,
    RepReceived,
    ReqReceived,
    RepSent,
    Established,
    DreqSent,
    DreqReceived,
    /// Rejected, given up, disconnected.
    Over,
}

/// One of the two: its process with our machine, its kernel with the id.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Side {
    /// There is none before the request came, and none after the process died.
    driven: Option<Driven<Connection>>,
    id: Id,
    /// Reported by the kernel, not fetched yet.
    events: Vec<Event>,
    /// The kernel reports DISCONNECTED once (`cma_comp_exch`).
    disconnected: bool,
    removed: bool,
    dead: bool,
}

/// What may happen.
#[derive(Clone, Copy, Debug)]
struct Rules {
    /// Messages are lost, repeated, and overtake each other; the kernel sends again, and gives up.
    lossy: bool,
    /// Our deadlines come.
    deadlines: bool,
    /// Users cancel, disconnect, and let go; queue pairs cannot be made or break; processes die.
    wishes: bool,
    /// How many devices are removed and calls fail for want of something.
    faults: u8,
}

/// Both sides, and what is under way to each of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    sides: [Side; 2],
    under_way: [Vec<Message>; 2],
    faults: u8,
}

const CLIENT: usize = 0;
const SERVER: usize = 1;

/// Whether somebody's wish, or a misfortune, is needed for a step; the others happen by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    ByItself,
    Wish,
}

impl World {
    /// The client is about to connect; the server listens.
    fn new(rules: Rules) -> Self {
        let side =
            |driven, id| Side { driven, id, events: Vec::new(), disconnected: false, removed: false, dead: false };
        let mut world = Self {
            sides: [side(Some(active()), Id::Idle), side(None, Id::None)],
            under_way: [Vec::new(), Vec::new()],
            faults: rules.faults,
        };
        world.feed(rules, CLIENT, Input::Resolve, 0);
        world
    }

    fn send(&mut self, rules: Rules, from: usize, message: Message) {
        if self.sides[from].removed {
            return;
        }
        let queue = &mut self.under_way[1 - from];
        if !rules.lossy {
            queue.push(message);
        } else if let Err(at) = queue.binary_search(&message) {
            // Where messages are repeated and overtake each other, neither number nor order matters.
            queue.insert(at, message);
        }
    }

    /// A call of librdmacm. `false` if it fails.
    fn call(&mut self, rules: Rules, side: usize, call: Call) -> bool {
        if self.sides[side].removed {
            return false;
        }
        let (next, message, event) = match (call, self.sides[side].id) {
            (Call::ResolveAddr, Id::Idle) => (Id::AddressResolved, None, Some(Event::AddrResolved)),
            (Call::ResolveRoute, Id::AddressResolved) => (Id::RouteResolved, None, Some(Event::RouteResolved)),
            (Call::Connect, Id::RouteResolved) => (Id::ReqSent, Some(Message::Req), None),
            (Call::Accept, Id::ReqReceived) => (Id::RepSent, Some(Message::Rep), None),
            (Call::Reject, Id::ReqReceived) => (Id::Over, Some(Message::Rej), None),
            (Call::Notify, Id::RepSent) => (Id::Established, None, Some(Event::Established)),
            (Call::Disconnect, Id::Established) => (Id::DreqSent, Some(Message::Dreq), None),
            (Call::Disconnect, Id::DreqReceived) => (Id::Over, Some(Message::Drep), None),
            (Call::Accept | Call::Reject | Call::Notify | Call::Disconnect, _) => return false,
            (
                Call::Bind | Call::Listen | Call::ResolveAddr | Call::ResolveRoute | Call::Connect | Call::Destroy,
                id,
            ) => {
                panic!("{call:?} on an id that is {id:?}")
            }
        };
        self.sides[side].id = next;
        self.sides[side].events.extend(event);
        if let Some(message) = message {
            self.send(rules, side, message);
        }
        true
    }

    /// `rdma_destroy_id`, or the end of the process: the kernel tells the peer, once (`cm_destroy_id`).
    fn destroy(&mut self, rules: Rules, side: usize) {
        let message = match self.sides[side].id {
            Id::ReqSent | Id::ReqReceived | Id::RepReceived | Id::RepSent => Some(Message::Rej),
            Id::Established => Some(Message::Dreq),
            Id::DreqReceived => Some(Message::Drep),
            Id::None | Id::Idle | Id::AddressResolved | Id::RouteResolved | Id::DreqSent | Id::Over => None,
        };
        self.sides[side].id = Id::None;
        self.sides[side].events.clear();
        if let Some(message) = message {
            self.send(rules, side, message);
        }
    }

    /// Gives the machine an input; the calls whose bit in `fail` is set fail for want of something. Returns how many were
    /// made.
    #[track_caller]
    fn feed(&mut self, rules: Rules, side: usize, input: Input, fail: u32) -> u32 {
        let mut driven = self.sides[side].driven.take().expect("the machine is there");
        let mut calls = 0;
        driven.feed(input, &mut |call| {
            calls += 1;
            fail >> (calls - 1) & 1 == 1 || !self.call(rules, side, call)
        });
        if driven.machine.is_released() && self.sides[side].id != Id::None {
            self.destroy(rules, side);
        }
        self.sides[side].driven = Some(driven);
        calls
    }

    /// A message arrives at this side's kernel.
    fn arrive(&mut self, rules: Rules, side: usize, message: Message) {
        if self.sides[side].removed {
            return;
        }
        let is_first = side == SERVER && self.sides[side].driven.is_none() && !self.sides[side].dead;
        let (next, event, answer) = match (message, self.sides[side].id) {
            // The request becomes a child id of the listener's, which goes into our queue.
            (Message::Req, Id::None) if is_first => {
                self.sides[side].driven = Some(passive());
                (Id::ReqReceived, None, None)
            }
            (Message::Req, Id::None) => (Id::None, None, Some(Message::Rej)),
            (Message::Rep, Id::ReqSent) => (Id::RepReceived, Some(Event::ConnectResponse), None),
            (Message::Rep, Id::Established) => (Id::Established, None, Some(Message::Rtu)),
            (Message::Rtu, Id::RepSent) => (Id::Established, Some(Event::Established), None),
            (
                Message::Rej,
                Id::ReqSent | Id::ReqReceived | Id::RepReceived | Id::RepSent | Id::Established | Id::DreqSent,
            ) => (Id::Over, Some(Event::Rejected), None),
            (Message::Dreq, Id::RepSent | Id::Established | Id::DreqSent) => {
                (Id::DreqReceived, Some(Event::Disconnected), None)
            }
            (Message::Dreq, id @ (Id::None | Id::Over)) => (id, None, Some(Message::Drep)),
            (Message::Drep, Id::DreqSent | Id::DreqReceived) => (Id::Over, Some(Event::Disconnected), None),
            (Message::Req | Message::Rep | Message::Rtu | Message::Rej | Message::Dreq | Message::Drep, id) => {
                (id, None, None)
            }
        };
        self.sides[side].id = next;
        self.report(side, event);
        if let Some(answer) = answer {
            self.send(rules, side, answer);
        }
    }

    fn report(&mut self, side: usize, event: Option<Event>) {
        let Side { events, disconnected, .. } = &mut self.sides[side];
        match event {
            Some(Event::Disconnected) if *disconnected => {}
            Some(event) => {
                *disconnected |= event == Event::Disconnected;
                events.push(event);
            }
            None => {}
        }
    }

    /// Our event thread fetches the oldest event.
    fn fetch(&mut self, rules: Rules, side: usize) {
        let mut event = self.sides[side].events.remove(0);
        // librdmacm moves the queue pair to RTS and sends the acknowledgement itself (`ucma_process_conn_resp`).
        if event == Event::ConnectResponse {
            if self.sides[side].id == Id::RepReceived && !self.sides[side].removed {
                self.sides[side].id = Id::Established;
                self.send(rules, side, Message::Rtu);
                event = Event::Established;
            } else {
                event = Event::ConnectError;
            }
        }
        self.feed(rules, side, Input::Event(event, 0), 0);
    }

    /// The kernel does not wait any longer.
    fn give_up(&mut self, side: usize) -> bool {
        let event = match self.sides[side].id {
            Id::ReqSent | Id::RepSent => Event::Unreachable,
            Id::DreqSent => Event::Disconnected,
            _ => return false,
        };
        self.sides[side].id = Id::Over;
        self.report(side, Some(event));
        true
    }

    /// Every world that one step leads to.
    fn steps(&self, rules: Rules) -> Vec<(Kind, World)> {
        let mut steps = Vec::new();
        for side in [CLIENT, SERVER] {
            self.network_steps(rules, side, &mut steps);
            let Some(driven) = &self.sides[side].driven else { continue };
            if driven.machine.is_released() {
                continue;
            }
            if !self.sides[side].events.is_empty() {
                let mut next = self.clone();
                next.fetch(rules, side);
                steps.push((Kind::ByItself, next));
            }
            self.user_steps(rules, side, driven, &mut steps);
            if rules.wishes {
                let mut next = self.clone();
                next.sides[side].driven = None;
                next.sides[side].dead = true;
                next.destroy(rules, side);
                steps.push((Kind::Wish, next));
            }
            if self.faults > 0 && !self.sides[side].removed {
                let mut next = self.clone();
                next.faults -= 1;
                next.sides[side].removed = true;
                next.sides[side].events.push(Event::DeviceRemoval);
                steps.push((Kind::Wish, next));
            }
        }
        steps
    }

    fn network_steps(&self, rules: Rules, side: usize, steps: &mut Vec<(Kind, World)>) {
        let queue = &self.under_way[side];
        // In order, the oldest arrives; else any may.
        for at in 0..queue.len().min(if rules.lossy { usize::MAX } else { 1 }) {
            let mut arrives = self.clone();
            let message = arrives.under_way[side].remove(at);
            let lost = arrives.clone();
            arrives.arrive(rules, side, message);
            steps.push((Kind::ByItself, arrives));
            if rules.lossy {
                steps.push((Kind::ByItself, lost));
            }
        }
        if rules.lossy && !self.sides[side].removed {
            let again = match self.sides[side].id {
                Id::ReqSent => Some(Message::Req),
                Id::RepSent => Some(Message::Rep),
                Id::DreqSent => Some(Message::Dreq),
                _ => None,
            };
            if let Some(message) = again {
                let mut next = self.clone();
                next.send(rules, side, message);
                steps.push((Kind::ByItself, next));
            }
            let mut next = self.clone();
            if next.give_up(side) {
                steps.push((Kind::ByItself, next));
            }
        }
    }

    fn user_steps(&self, rules: Rules, side: usize, driven: &Driven<Connection>, steps: &mut Vec<(Kind, World)>) {
        let mut inputs = Vec::new();
        match driven.machine.state() {
            State::Queued => inputs.push((Kind::ByItself, Input::Taken)),
            State::Building | State::Answering | State::Doomed(_) => {
                inputs.push((Kind::ByItself, Input::Built));
                if rules.wishes {
                    inputs.push((Kind::Wish, Input::BuildFailed));
                    inputs.push((Kind::Wish, Input::Refused));
                }
            }
            // The client may send as soon as it is connected, and its acknowledgement may come later.
            State::Accepting if self.sides[CLIENT].id == Id::Established => {
                inputs.push((Kind::ByItself, Input::CommEstablished));
            }
            State::Established | State::Disconnecting if rules.wishes => inputs.push((Kind::Wish, Input::Broken)),
            State::Idle
            | State::ResolvingAddress
            | State::ResolvingRoute
            | State::Connecting
            | State::Accepting
            | State::Established
            | State::Disconnecting
            | State::Disconnected
            | State::Released => {}
        }
        if rules.deadlines && driven.seen.armed.is_some() {
            inputs.push((Kind::ByItself, Input::Deadline));
        }
        if rules.wishes {
            inputs.extend([Input::Cancel, Input::Disconnect, Input::Release].map(|wish| (Kind::Wish, wish)));
        }
        for (kind, input) in inputs {
            let mut next = self.clone();
            let calls = next.feed(rules, side, input, 0);
            steps.push((kind, next));
            for fail in 1..1 << calls.min(8) {
                if self.faults > 0 {
                    let mut next = self.clone();
                    next.faults -= 1;
                    next.feed(rules, side, input, fail);
                    steps.push((Kind::Wish, next));
                }
            }
        }
    }

    /// Nothing is held any more, by us or by the kernel.
    fn is_released(&self) -> bool {
        self.sides
            .iter()
            .all(|side| side.id == Id::None && side.driven.as_ref().is_none_or(|driven| driven.machine.is_released()))
    }

    /// Nobody waits for anybody.
    fn is_settled(&self) -> bool {
        self.sides.iter().all(|side| {
            side.driven
                .as_ref()
                .is_none_or(|driven| !driven.machine.is_lent() && driven.machine.needs_deadline() != Some(true))
        })
    }

    /// Everything that was said has been heard.
    fn is_quiet(&self) -> bool {
        self.under_way.iter().all(Vec::is_empty)
            && self.sides.iter().all(|side| side.events.is_empty() || side.id == Id::None)
    }

    fn state(&self, side: usize) -> Option<State> {
        self.sides[side].driven.as_ref().map(|driven| driven.machine.state())
    }
}

/// All worlds, and the steps between them.
struct Worlds {
    worlds: Vec<World>,
    /// For each world, those that lead to it.
    sources: Vec<Vec<(Kind, usize)>>,
}

impl Worlds {
    fn explore(rules: Rules) -> Self {
        let first = World::new(rules);
        let mut known = HashMap::from([(first.clone(), 0)]);
        let mut all = Self { worlds: vec![first], sources: vec![Vec::new()] };
        let mut at = 0;
        while at < all.worlds.len() {
            for (kind, next) in all.worlds[at].steps(rules) {
                let number = *known.entry(next).or_insert_with_key(|next| {
                    all.worlds.push(next.clone());
                    all.sources.push(Vec::new());
                    all.worlds.len() - 1
                });
                all.sources[number].push((kind, at));
            }
            at += 1;
        }
        println!("{} worlds with {rules:?}", all.worlds.len());
        all
    }

    /// From every world one of the `goal` can be reached, by steps of a kind that `usable` allows.
    #[track_caller]
    fn all_reach(&self, what: &str, goal: impl Fn(&World) -> bool, usable: impl Fn(Kind) -> bool) {
        let mut reaches: Vec<bool> = self.worlds.iter().map(goal).collect();
        let mut todo: Vec<usize> = (0..reaches.len()).filter(|&number| reaches[number]).collect();
        while let Some(number) = todo.pop() {
            for &(kind, source) in &self.sources[number] {
                if usable(kind) && !reaches[source] {
                    reaches[source] = true;
                    todo.push(source);
                }
            }
        }
        if let Some(stuck) = reaches.iter().position(|reaches| !reaches) {
            panic!("{what}: not from here: {:#?}", self.worlds[stuck]);
        }
    }
}

#[test]
fn whatever_happens_nobody_waits_for_ever_and_everything_can_be_released() {
    let worlds = Worlds::explore(Rules { lossy: true, deadlines: true, wishes: true, faults: 1 });
    worlds.all_reach("all settled", World::is_settled, |kind| kind == Kind::ByItself);
    worlds.all_reach("all released", World::is_released, |_| true);
}

#[test]
fn while_nothing_is_lost_nobody_needs_a_deadline() {
    let rules = Rules { lossy: false, deadlines: false, wishes: true, faults: 0 };
    let worlds = Worlds::explore(rules);
    worlds.all_reach("settled without deadlines", World::is_settled, |kind| kind == Kind::ByItself);
    // When all is said and heard, the end of one side is known to the other.
    for world in worlds.worlds.iter().filter(|world| world.is_quiet()) {
        for side in [CLIENT, SERVER] {
            let over = world.sides[1 - side].id == Id::None;
            assert!(!over || world.state(side) != Some(State::Established), "an end that was not told: {world:#?}");
        }
    }
}

#[test]
fn who_is_left_alone_is_connected() {
    let rules = Rules { lossy: false, deadlines: false, wishes: false, faults: 0 };
    let connected = |world: &World| [CLIENT, SERVER].map(|side| world.state(side)) == [Some(State::Established); 2];
    Worlds::explore(rules).all_reach("connected", connected, |_| true);
    // Where messages are lost, too, unless the kernel has given up.
    let rules = Rules { lossy: true, ..rules };
    let given_up =
        |world: &World| world.sides.iter().any(|side| side.driven.is_some() && matches!(side.id, Id::Over | Id::None));
    Worlds::explore(rules).all_reach("connected", |world| connected(world) || given_up(world), |_| true);
}
