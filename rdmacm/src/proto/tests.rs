//! The machines' rules, checked five ways: the reviewed table, a walk through everything reachable with every call
//! failing once, every world that two machines and the kernels between them can get into, random sequences, and single
//! rules by name.

use std::collections::{BTreeSet, HashSet};

use proptest::prelude::*;

use super::connection::{self, Connection};
use super::listener::{self, Listener};
use super::{Call, Closed, Event, Failure, Input, Notice, Output, Step};

mod table;
mod world;

const CALLS: [Call; 11] = [
    Call::Bind,
    Call::Listen,
    Call::ResolveAddr,
    Call::ResolveRoute,
    Call::Connect,
    Call::Accept,
    Call::Reject,
    Call::Notify,
    Call::Notify,
    Call::Disconnect,
    Call::Destroy,
];

const WISHES: [Input; 12] = [
    Input::Listen,
    Input::Resolve,
    Input::Taken,
    Input::Built,
    Input::BuildFailed,
    Input::Refused,
    Input::CommEstablished,
    Input::Disconnect,
    Input::Broken,
    Input::Release,
    Input::Cancel,
    Input::Deadline,
];

/// Does not compile when an input or a call is added: add it to the lists above, too.
#[allow(dead_code)]
fn listed(input: Input, call: Call) {
    match input {
        Input::Listen | Input::Resolve | Input::Taken | Input::Built | Input::BuildFailed | Input::Refused => {}
        Input::CommEstablished | Input::Disconnect | Input::Broken | Input::Release | Input::Cancel => {}
        Input::Deadline | Input::Event(..) | Input::Failed(..) => {}
    }
    match call {
        Call::Bind | Call::Listen | Call::ResolveAddr | Call::ResolveRoute | Call::Connect | Call::Accept => {}
        Call::Reject | Call::Notify | Call::Disconnect | Call::Destroy => {}
    }
}

/// Statuses as they arrive: none, a negative errno, a reject reason, the -1 of librdmacm itself, and nonsense.
const STATUSES: [i32; 5] = [0, -110, 8, -1, i32::MIN];

const EIO: i32 = 5;

/// Every event of `rdma/rdma_cma.h`, and one of a newer library.
fn events() -> impl Iterator<Item = Event> {
    (0..16).chain([u32::MAX]).map(Event::from_raw)
}

/// Every input, once.
fn inputs() -> Vec<Input> {
    let events = events().map(|event| Input::Event(event, -110));
    WISHES.into_iter().chain(events).chain(CALLS.map(|call| Input::Failed(call, EIO))).collect()
}

/// What the two machines have in common, so that one driver and one walk serve both.
trait Machine: Clone + Eq + std::hash::Hash + std::fmt::Debug {
    fn on(&mut self, input: Input) -> Vec<Output>;
    fn is_released(&self) -> bool;
    fn is_lent(&self) -> bool;
    /// Waits for somebody else, so it must have a deadline (`Some(true)`) or waits for nobody (`Some(false)`).
    fn needs_deadline(&self) -> Option<bool>;
}

impl Machine for Connection {
    fn on(&mut self, input: Input) -> Vec<Output> {
        Connection::on(self, input)
    }

    fn is_released(&self) -> bool {
        self.state() == connection::State::Released
    }

    fn is_lent(&self) -> bool {
        self.state().is_lent()
    }

    fn needs_deadline(&self) -> Option<bool> {
        use connection::State;
        match self.state() {
            State::ResolvingAddress
            | State::ResolvingRoute
            | State::Connecting
            | State::Queued
            | State::Accepting
            | State::Disconnecting => Some(true),
            State::Idle | State::Answering | State::Doomed(_) | State::Established | State::Disconnected => Some(false),
            // The connecting thread's own deadline may go on while it builds.
            State::Building => None,
            State::Released => None,
        }
    }
}

impl Machine for Listener {
    fn on(&mut self, input: Input) -> Vec<Output> {
        Listener::on(self, input)
    }

    fn is_released(&self) -> bool {
        self.state() == listener::State::Released
    }

    fn is_lent(&self) -> bool {
        false
    }

    fn needs_deadline(&self) -> Option<bool> {
        Some(false)
    }
}

/// What an observer of one id has seen; each output is checked against it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
struct Seen {
    listening: bool,
    settled: bool,
    established: bool,
    closed: bool,
    destroyed: bool,
    armed: Option<Step>,
}

impl Seen {
    #[track_caller]
    fn output<M: Machine>(&mut self, machine: &M, output: Output) {
        assert!(!self.destroyed, "{output:?} after the id was destroyed");
        match output {
            Output::Arm(step) => self.armed = Some(step),
            Output::Disarm => self.armed = None,
            Output::Call(call) => {
                assert!(!machine.is_lent(), "{call:?} on a lent id");
                if call == Call::Destroy {
                    assert!(machine.is_released());
                    assert!(self.settled, "destroyed before the set-up was settled");
                    assert!(!self.established || self.closed, "destroyed, and the end of the connection was not told");
                    self.destroyed = true;
                }
            }
            Output::Tell(Notice::Listening) => {
                assert!(!self.listening && !self.settled);
                self.listening = true;
            }
            Output::Tell(Notice::Offer) => assert!(self.listening && !self.settled),
            Output::Tell(Notice::Routed) => assert!(machine.is_lent() && !self.settled),
            Output::Tell(Notice::Established) => {
                assert!(!self.settled, "set-up settled twice");
                self.settled = true;
                self.established = true;
            }
            Output::Tell(Notice::Failed(_)) => {
                assert!(!self.settled, "set-up settled twice");
                self.settled = true;
            }
            Output::Tell(Notice::Closed(_)) => {
                assert!(self.established, "closed before it was established");
                assert!(!self.closed, "closed twice");
                self.closed = true;
            }
            Output::Tell(Notice::PathChanged(_)) => assert!(self.established && !self.closed),
        }
    }
}

/// An id as the driver keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Driven<M> {
    machine: M,
    seen: Seen,
}

impl<M: Machine> Driven<M> {
    /// Feeds one input and carries out the outputs as the driver does: a failed call is fed back at once, and if that
    /// releases the machine, the rest of the list is dropped. `fails` says for each call whether it fails.
    #[track_caller]
    fn feed(&mut self, input: Input, fails: &mut impl FnMut(Call) -> bool) {
        self.run(input, fails);
        assert_eq!(self.machine.is_released(), self.seen.destroyed, "released and destroyed are the same");
        if let Some(needed) = self.machine.needs_deadline() {
            assert_eq!(self.seen.armed.is_some(), needed, "deadline after {input:?}: {self:?}");
        }
    }

    fn run(&mut self, input: Input, fails: &mut impl FnMut(Call) -> bool) {
        let released_before = self.machine.is_released();
        let lent = self.machine.is_lent();
        let outputs = self.machine.on(input);
        assert!(!released_before || outputs.is_empty(), "a released id asks for {outputs:?}");
        // The user's own end of a loan settles the set-up, unless it had failed before and that is told now.
        let told = outputs.iter().any(|output| matches!(output, Output::Tell(Notice::Failed(_))));
        if lent && !told && matches!(input, Input::BuildFailed | Input::Refused) {
            self.seen.settled = true;
        }
        for output in outputs {
            self.seen.output(&self.machine, output);
            let Output::Call(call) = output else { continue };
            if call != Call::Destroy && fails(call) {
                let was_released = self.machine.is_released();
                self.run(Input::Failed(call, EIO), fails);
                match call {
                    // Nobody waits for these: the client learns of a refusal by its own deadline, and a connection
                    // that cannot be declared established becomes so by its client's acknowledgement.
                    Call::Reject | Call::Notify => {}
                    Call::Disconnect => assert_ne!(self.machine.needs_deadline(), Some(true), "waits in vain"),
                    _ => assert!(self.machine.is_released(), "lives on without its {call:?}"),
                }
                if self.machine.is_released() && !was_released {
                    break;
                }
            }
        }
    }

    /// Every way that feeding `input` can go: for each call on the way, it succeeds or it fails.
    fn feed_all_ways(&self, input: Input) -> Vec<Self> {
        let mut ways = Vec::new();
        let mut most_calls = 0;
        for mask in 0_u32.. {
            if mask >> most_calls > 0 {
                break;
            }
            let mut driven = self.clone();
            let mut calls = 0;
            driven.feed(input, &mut |_| {
                calls += 1;
                mask >> (calls - 1) & 1 == 1
            });
            most_calls = most_calls.max(calls);
            ways.push(driven);
        }
        ways
    }

    /// Lets the id go, in every way; each must end in `Released`.
    fn release(&self) {
        for released in self.feed_all_ways(Input::Release) {
            if !released.machine.is_lent() {
                assert!(released.machine.is_released(), "{self:?} was released, but is {released:?}");
                continue;
            }
            for end_of_loan in [Input::Built, Input::BuildFailed, Input::Refused] {
                for ended in released.feed_all_ways(end_of_loan) {
                    assert!(ended.machine.is_released(), "{self:?} was released, but is {ended:?}");
                }
            }
        }
    }
}

/// Goes from `start` through everything that any input and any failure can lead to; returns all that was reached.
fn walk<M: Machine>(start: Driven<M>) -> HashSet<Driven<M>> {
    let mut reached = HashSet::from([start.clone()]);
    let mut todo = vec![start];
    while let Some(here) = todo.pop() {
        here.release();
        for input in inputs() {
            for next in here.feed_all_ways(input) {
                if reached.insert(next.clone()) {
                    todo.push(next);
                }
            }
        }
    }
    reached
}

fn active() -> Driven<Connection> {
    Driven { machine: Connection::active(), seen: Seen::default() }
}

fn passive() -> Driven<Connection> {
    Driven { machine: Connection::passive(), seen: Seen { armed: Some(Step::Queue), ..Seen::default() } }
}

fn listener() -> Driven<Listener> {
    Driven { machine: Listener::new(), seen: Seen::default() }
}

/// A state's name without its payload.
fn name(state: connection::State) -> String {
    format!("{state:?}").split('(').next().expect("split yields at least one part").to_owned()
}

#[test]
fn every_input_with_every_failure_keeps_the_rules() {
    let reached: BTreeSet<_> =
        walk(active()).iter().chain(&walk(passive())).map(|driven| name(driven.machine.state())).collect();
    let all: BTreeSet<_> = STATES.iter().map(|&state| name(state)).collect();
    assert_eq!(reached, all, "the walk visits every state");
    assert_eq!(walk(listener()).iter().map(|driven| driven.machine.state()).collect::<HashSet<_>>().len(), 3);
}

proptest! {
    #[test]
    fn random_sequences_keep_the_rules(
        passively: bool,
        sequence in prop::collection::vec((0..inputs().len(), 0..STATUSES.len(), any::<u8>()), 0..40),
    ) {
        let mut driven = if passively { passive() } else { active() };
        for (input, status, failures) in sequence {
            let input = match inputs()[input] {
                Input::Event(event, _) => Input::Event(event, STATUSES[status]),
                other => other,
            };
            let mut calls = 0;
            // One call in four fails.
            driven.feed(input, &mut |_| { calls += 2; failures >> (calls - 2) & 3 == 3 });
        }
        driven.release();
    }
}

/// Every state, in the order of a life; `Doomed` with one cause, which it only carries along.
const STATES: [connection::State; 13] = {
    use connection::State;
    [
        State::Idle,
        State::ResolvingAddress,
        State::ResolvingRoute,
        State::Building,
        State::Connecting,
        State::Queued,
        State::Answering,
        State::Accepting,
        State::Doomed(Failure::Cancelled),
        State::Established,
        State::Disconnecting,
        State::Disconnected,
        State::Released,
    ]
};

// Single rules by name. One constructor for each state.

#[track_caller]
fn after(mut machine: Connection, inputs: &[Input], state: connection::State) -> Connection {
    for &input in inputs {
        machine.on(input);
    }
    assert_eq!(machine.state(), state);
    machine
}

fn ok(event: Event) -> Input {
    Input::Event(event, 0)
}

fn resolving_address() -> Connection {
    after(Connection::active(), &[Input::Resolve], connection::State::ResolvingAddress)
}

fn resolving_route() -> Connection {
    after(resolving_address(), &[ok(Event::AddrResolved)], connection::State::ResolvingRoute)
}

fn building() -> Connection {
    after(resolving_route(), &[ok(Event::RouteResolved)], connection::State::Building)
}

fn connecting() -> Connection {
    after(building(), &[Input::Built], connection::State::Connecting)
}

fn queued() -> Connection {
    Connection::passive()
}

fn answering() -> Connection {
    after(queued(), &[Input::Taken], connection::State::Answering)
}

fn accepting() -> Connection {
    after(answering(), &[Input::Built], connection::State::Accepting)
}

fn doomed(failure: Failure) -> Connection {
    let input = match failure {
        Failure::Event(event, status) => Input::Event(event, status),
        Failure::Cancelled => Input::Cancel,
        other => panic!("no test dooms with {other:?}"),
    };
    after(answering(), &[input], connection::State::Doomed(failure))
}

fn established() -> Connection {
    after(connecting(), &[ok(Event::Established)], connection::State::Established)
}

fn disconnecting() -> Connection {
    after(established(), &[Input::Disconnect], connection::State::Disconnecting)
}

fn disconnected() -> Connection {
    after(established(), &[ok(Event::Disconnected)], connection::State::Disconnected)
}

fn failed(failure: Failure) -> Vec<Output> {
    vec![Output::Tell(Notice::Failed(failure)), Output::Call(Call::Destroy)]
}

fn position(outputs: &[Output], wanted: Output) -> usize {
    outputs.iter().position(|&output| output == wanted).unwrap_or_else(|| panic!("no {wanted:?} in {outputs:?}"))
}

#[test]
fn an_active_id_calls_in_the_order_of_rdma_cm() {
    let mut id = Connection::active();
    assert_eq!(id.on(Input::Resolve), [Output::Arm(Step::Address), Output::Call(Call::ResolveAddr)]);
    assert_eq!(id.on(ok(Event::AddrResolved)), [Output::Arm(Step::Route), Output::Call(Call::ResolveRoute)]);
    assert!(id.on(ok(Event::RouteResolved)).contains(&Output::Tell(Notice::Routed)));
    assert_eq!(id.on(Input::Built), [Output::Arm(Step::Connect), Output::Call(Call::Connect)]);
    assert_eq!(id.on(ok(Event::Established)), [Output::Disarm, Output::Tell(Notice::Established)]);
}

#[test]
fn reject_while_connecting_reports_rejected() {
    assert_eq!(connecting().on(Input::Event(Event::Rejected, 8)), failed(Failure::Event(Event::Rejected, 8)));
}

#[test]
fn disconnect_that_overtakes_the_reply_ends_the_attempt() {
    assert_eq!(connecting().on(ok(Event::Disconnected)), failed(Failure::Event(Event::Disconnected, 0)));
}

#[test]
fn deadline_while_resolving_names_the_step() {
    assert_eq!(resolving_address().on(Input::Deadline), failed(Failure::Deadline(Step::Address)));
    assert_eq!(resolving_route().on(Input::Deadline), failed(Failure::Deadline(Step::Route)));
    assert_eq!(connecting().on(Input::Deadline), failed(Failure::Deadline(Step::Connect)));
    assert_eq!(accepting().on(Input::Deadline), failed(Failure::Deadline(Step::Accept)));
}

#[test]
fn cancel_while_building_waits_for_the_end_of_the_loan() {
    let mut id = building();
    let outputs = id.on(Input::Cancel);
    assert!(!outputs.iter().any(|output| matches!(output, Output::Call(_) | Output::Tell(_))), "{outputs:?}");
    assert_eq!(id.on(Input::Built), failed(Failure::Cancelled));
}

#[test]
fn neighbour_that_changed_before_connect_fails_the_attempt() {
    let changed = Input::Event(Event::Unreachable, -110);
    assert_eq!(resolving_route().on(changed), failed(Failure::Event(Event::Unreachable, -110)));
    let mut id = building();
    id.on(changed);
    assert_eq!(id.on(Input::Built), failed(Failure::Event(Event::Unreachable, -110)));
}

#[test]
fn the_first_cause_dooms_and_later_ones_change_nothing() {
    let mut id = doomed(Failure::Event(Event::Rejected, 28));
    assert!(id.on(Input::Cancel).is_empty());
    assert!(id.on(ok(Event::DeviceRemoval)).is_empty());
    assert!(id.on(Input::Release).is_empty());
    assert_eq!(id.on(Input::BuildFailed), failed(Failure::Event(Event::Rejected, 28)));
}

#[test]
fn dropped_request_is_rejected_before_its_id_goes() {
    let outputs = answering().on(Input::Refused);
    let reject = position(&outputs, Output::Call(Call::Reject));
    assert!(reject < position(&outputs, Output::Call(Call::Destroy)), "{outputs:?}");
}

#[test]
fn request_that_nobody_takes_is_rejected() {
    assert!(queued().on(Input::Deadline).contains(&Output::Call(Call::Reject)));
}

#[test]
fn client_that_left_the_queue_is_not_rejected() {
    assert!(!queued().on(Input::Event(Event::Rejected, 4)).contains(&Output::Call(Call::Reject)));
}

#[test]
fn client_that_gives_up_before_its_acknowledgement_fails_the_accept() {
    assert_eq!(accepting().on(Input::Event(Event::Rejected, 4)), failed(Failure::Event(Event::Rejected, 4)));
    assert_eq!(accepting().on(Input::Failed(Call::Accept, 22)), failed(Failure::Call(Call::Accept, 22)));
}

#[test]
fn message_before_the_acknowledgement_has_the_kernel_declare_the_connection_established() {
    let mut id = accepting();
    assert_eq!(id.on(Input::CommEstablished), [Output::Call(Call::Notify)]);
    // It was established meanwhile.
    assert!(id.on(Input::Failed(Call::Notify, 106)).is_empty());
    assert_eq!(id.on(ok(Event::Established)), [Output::Disarm, Output::Tell(Notice::Established)]);
}

#[test]
fn disconnect_of_the_peer_is_told_and_then_answered() {
    let outputs = established().on(ok(Event::Disconnected));
    let told = position(&outputs, Output::Tell(Notice::Closed(Closed::Peer)));
    assert!(told < position(&outputs, Output::Call(Call::Disconnect)), "{outputs:?}");
}

#[test]
fn reject_after_established_closes() {
    assert!(established().on(Input::Event(Event::Rejected, 28)).contains(&Output::Tell(Notice::Closed(Closed::Peer))));
}

#[test]
fn unreachable_on_a_live_connection_is_advice() {
    let mut id = established();
    let advice = Notice::PathChanged(Event::Unreachable);
    assert_eq!(id.on(Input::Event(Event::Unreachable, -110)), [Output::Tell(advice)]);
    assert_eq!(id.state(), connection::State::Established);
}

#[test]
fn unanswered_disconnect_ends_at_its_deadline() {
    assert!(disconnecting().on(Input::Deadline).contains(&Output::Tell(Notice::Closed(Closed::LocalUnanswered))));
}

#[test]
fn disconnect_of_a_connection_that_the_kernel_forgot_is_an_end_like_any_other() {
    let outputs = disconnecting().on(Input::Failed(Call::Disconnect, 22));
    assert!(outputs.contains(&Output::Tell(Notice::Closed(Closed::Local))), "{outputs:?}");
}

#[test]
fn events_after_the_end_are_ignored() {
    for event in events() {
        assert!(disconnected().on(ok(event)).is_empty(), "{event:?}");
    }
}

#[test]
fn release_of_a_live_connection_disconnects_before_it_destroys() {
    let outputs = established().on(Input::Release);
    let disconnect = position(&outputs, Output::Call(Call::Disconnect));
    assert!(disconnect < position(&outputs, Output::Call(Call::Destroy)), "{outputs:?}");
}

#[test]
fn bind_that_fails_ends_the_listener_before_it_is_ready() {
    let mut driven = listener();
    driven.feed(Input::Listen, &mut |call| call == Call::Bind);
    assert!(driven.machine.is_released() && !driven.seen.listening);
}

#[test]
fn device_removal_ends_a_bound_listener() {
    let mut id = Listener::new();
    id.on(Input::Listen);
    assert_eq!(id.on(ok(Event::DeviceRemoval)), failed(Failure::Event(Event::DeviceRemoval, 0)));
}

#[test]
fn event_numbers_are_those_of_the_header_and_new_ones_are_kept() {
    assert_eq!(Event::from_raw(0), Event::AddrResolved);
    assert_eq!(Event::from_raw(8), Event::Rejected);
    assert_eq!(Event::from_raw(15), Event::TimewaitExit);
    assert_eq!(Event::from_raw(16), Event::Other(16));
}
