//! The machine of an id that connects, or of the child id that a listener got with a request.
//!
//! ```text
//! active:  Idle -> ResolvingAddress -> ResolvingRoute -> Building(lent) -> Connecting -> Established
//! passive: Queued -> Answering(lent) -> Accepting -> Established
//! end:     Established -> [Disconnecting ->] Disconnected -> Released
//! ```

use super::{Call, Closed, Event, Failure, Input, Notice, Output, Step};

/// Where an id stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// Created; nothing was asked of it yet.
    Idle,
    /// `rdma_resolve_addr` runs.
    ResolvingAddress,
    /// `rdma_resolve_route` runs.
    ResolvingRoute,
    /// Lent to the connecting thread, which makes the queue pair.
    Building,
    /// `rdma_connect` was called.
    Connecting,
    /// A request waits in the listener's queue.
    Queued,
    /// Lent to the thread that took the request.
    Answering,
    /// `rdma_accept` was called.
    Accepting,
    /// Lent, but set-up has already failed: it is told when the loan ends.
    Doomed(Failure),
    /// The connection is up.
    Established,
    /// `rdma_disconnect` was called; the peer's answer is awaited.
    Disconnecting,
    /// The connection is over and the user knows; the id waits to be released.
    Disconnected,
    /// The id is destroyed.
    Released,
}

impl State {
    /// The user thread has the id; no call may be made on it.
    pub(crate) fn is_lent(self) -> bool {
        matches!(self, Self::Building | Self::Answering | Self::Doomed(_))
    }
}

/// A connection's machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Connection {
    state: State,
}

impl Connection {
    /// An id that will connect.
    pub(crate) fn active() -> Self {
        Self { state: State::Idle }
    }

    /// The child id of a request that goes into the listener's queue, with the deadline [`Step::Queue`] set.
    pub(crate) fn passive() -> Self {
        Self { state: State::Queued }
    }

    pub(crate) fn state(&self) -> State {
        self.state
    }

    /// Takes one input, changes the state, and returns what the driver must do, in order.
    pub(crate) fn on(&mut self, input: Input) -> Vec<Output> {
        let (next, outputs) = step(self.state, input);
        self.state = next;
        outputs
    }
}

type Transition = (State, Vec<Output>);

/// The transition function. Each state has its own, so that no arm over inputs can catch another state's event.
pub(super) fn step(state: State, input: Input) -> Transition {
    match state {
        State::Idle => idle(input),
        State::ResolvingAddress => resolving_address(input),
        State::ResolvingRoute => resolving_route(input),
        State::Building => building(input),
        State::Connecting => connecting(input),
        State::Queued => queued(input),
        State::Answering => answering(input),
        State::Accepting => accepting(input),
        State::Doomed(failure) => doomed(failure, input),
        State::Established => established(input),
        State::Disconnecting => disconnecting(input),
        State::Disconnected => disconnected(input),
        State::Released => (State::Released, Vec::new()),
    }
}

/// Stays, doing nothing: the input has no meaning in this state, or its effect is already there.
fn ignore(state: State) -> Transition {
    (state, Vec::new())
}

/// Set-up ends here: the id is destroyed (the kernel tells the peer, if it knows of us), then the user is told.
fn fail(failure: Failure) -> Transition {
    (State::Released, vec![Output::Tell(Notice::Failed(failure)), Output::Call(Call::Destroy)])
}

/// Set-up has failed while the id is lent; nothing can be done before the loan ends.
fn doom(failure: Failure) -> Transition {
    (State::Doomed(failure), vec![Output::Disarm])
}

/// The established connection is over: the user is told first, so that the cause is known before the queue pair's work
/// is flushed; then `rdma_disconnect` answers (or tells) the peer.
fn close(closed: Closed) -> Transition {
    (State::Disconnected, vec![Output::Disarm, Output::Tell(Notice::Closed(closed)), Output::Call(Call::Disconnect)])
}

fn idle(input: Input) -> Transition {
    match input {
        // A user wants to connect: find the device and the neighbour first.
        Input::Resolve => (State::ResolvingAddress, vec![Output::Arm(Step::Address), Output::Call(Call::ResolveAddr)]),
        Input::Cancel => fail(Failure::Cancelled),
        Input::Release => fail(Failure::Released),
        Input::Event(Event::DeviceRemoval, status) => fail(Failure::Event(Event::DeviceRemoval, status)),
        // Nothing was asked yet, so nothing can answer.
        Input::Listen
        | Input::Taken
        | Input::Built
        | Input::BuildFailed
        | Input::Refused
        | Input::CommEstablished
        | Input::Disconnect
        | Input::Broken
        | Input::Failed(..)
        | Input::Deadline => ignore(State::Idle),
        Input::Event(event, _) => ignore_event(State::Idle, event),
    }
}

fn resolving_address(input: Input) -> Transition {
    let here = State::ResolvingAddress;
    match input {
        // The neighbour answered and the id is bound to a device: ask for the route.
        Input::Event(Event::AddrResolved, _) => {
            (State::ResolvingRoute, vec![Output::Arm(Step::Route), Output::Call(Call::ResolveRoute)])
        }
        // No neighbour, no device for the address, or the device went.
        Input::Event(event @ (Event::AddrError | Event::DeviceRemoval), status) => fail(Failure::Event(event, status)),
        Input::Failed(call, errno) => fail(Failure::Call(call, errno)),
        Input::Deadline => fail(Failure::Deadline(Step::Address)),
        Input::Cancel => fail(Failure::Cancelled),
        Input::Release => fail(Failure::Released),
        Input::Listen
        | Input::Resolve
        | Input::Taken
        | Input::Built
        | Input::BuildFailed
        | Input::Refused
        | Input::CommEstablished
        | Input::Disconnect
        | Input::Broken => ignore(here),
        Input::Event(event, _) => ignore_event(here, event),
    }
}

fn resolving_route(input: Input) -> Transition {
    let here = State::ResolvingRoute;
    match input {
        // The path is known: the connecting thread now makes its queue pair on the id.
        Input::Event(Event::RouteResolved, _) => (State::Building, vec![Output::Tell(Notice::Routed)]),
        // No path, or the neighbour's hardware address changed (`Unreachable`): the route that was found leads nowhere,
        // and a request sent along it would only end at our deadline.
        Input::Event(
            event @ (Event::RouteError | Event::AddrError | Event::Unreachable | Event::DeviceRemoval),
            status,
        ) => fail(Failure::Event(event, status)),
        Input::Failed(call, errno) => fail(Failure::Call(call, errno)),
        Input::Deadline => fail(Failure::Deadline(Step::Route)),
        Input::Cancel => fail(Failure::Cancelled),
        Input::Release => fail(Failure::Released),
        Input::Listen
        | Input::Resolve
        | Input::Taken
        | Input::Built
        | Input::BuildFailed
        | Input::Refused
        | Input::CommEstablished
        | Input::Disconnect
        | Input::Broken => ignore(here),
        Input::Event(event, _) => ignore_event(here, event),
    }
}

fn building(input: Input) -> Transition {
    let here = State::Building;
    match input {
        // The queue pair is on the id and its receives are posted: send the request.
        Input::Built => (State::Connecting, vec![Output::Arm(Step::Connect), Output::Call(Call::Connect)]),
        // The user's thread could not make the queue pair and reports that error itself.
        Input::BuildFailed | Input::Refused => (State::Released, vec![Output::Disarm, Output::Call(Call::Destroy)]),
        // The device went, or the neighbour's hardware address changed and the route no longer leads to the peer.
        Input::Event(event @ (Event::DeviceRemoval | Event::Unreachable), status) => {
            doom(Failure::Event(event, status))
        }
        Input::Deadline => doom(Failure::Deadline(Step::Connect)),
        Input::Cancel => doom(Failure::Cancelled),
        Input::Release => doom(Failure::Released),
        Input::Listen
        | Input::Resolve
        | Input::Taken
        | Input::CommEstablished
        | Input::Disconnect
        | Input::Broken
        | Input::Failed(..) => ignore(here),
        Input::Event(event, _) => ignore_event(here, event),
    }
}

fn connecting(input: Input) -> Transition {
    let here = State::Connecting;
    match input {
        // The reply came, librdmacm moved the queue pair to RTS and acknowledged.
        Input::Event(Event::Established, _) => {
            (State::Established, vec![Output::Disarm, Output::Tell(Notice::Established)])
        }
        // The request was refused, not answered, or the reply could not be used; a disconnect may overtake the reply.
        // A response without a queue pair on the id is impossible here, and is treated as an error all the same.
        Input::Event(
            event @ (Event::Rejected
            | Event::Unreachable
            | Event::ConnectError
            | Event::ConnectResponse
            | Event::Disconnected
            | Event::DeviceRemoval),
            status,
        ) => fail(Failure::Event(event, status)),
        Input::Failed(call, errno) => fail(Failure::Call(call, errno)),
        Input::Deadline => fail(Failure::Deadline(Step::Connect)),
        Input::Cancel => fail(Failure::Cancelled),
        Input::Release => fail(Failure::Released),
        Input::Listen
        | Input::Resolve
        | Input::Taken
        | Input::Built
        | Input::BuildFailed
        | Input::Refused
        | Input::CommEstablished
        | Input::Disconnect
        | Input::Broken => ignore(here),
        Input::Event(event, _) => ignore_event(here, event),
    }
}

fn queued(input: Input) -> Transition {
    let here = State::Queued;
    match input {
        // A thread took the request; from here on the id is lent to it.
        Input::Taken => (State::Answering, vec![Output::Disarm]),
        // Nobody took it in time, or the listener went: refuse, so that the client need not wait for its own deadline.
        Input::Deadline => refuse(Failure::Deadline(Step::Queue)),
        Input::Release => refuse(Failure::Released),
        Input::Cancel => refuse(Failure::Cancelled),
        // The client gave up, or the device went: there is nobody left to refuse.
        Input::Event(
            event @ (Event::Rejected
            | Event::Unreachable
            | Event::ConnectError
            | Event::Disconnected
            | Event::DeviceRemoval),
            status,
        ) => fail(Failure::Event(event, status)),
        Input::Listen
        | Input::Resolve
        | Input::Built
        | Input::BuildFailed
        | Input::Refused
        | Input::CommEstablished
        | Input::Disconnect
        | Input::Broken
        | Input::Failed(..) => ignore(here),
        Input::Event(event, _) => ignore_event(here, event),
    }
}

/// A request ends without a connection: `rdma_reject`, whose failure changes nothing, then the end.
fn refuse(failure: Failure) -> Transition {
    (
        State::Released,
        vec![
            Output::Disarm,
            Output::Call(Call::Reject),
            Output::Tell(Notice::Failed(failure)),
            Output::Call(Call::Destroy),
        ],
    )
}

fn answering(input: Input) -> Transition {
    let here = State::Answering;
    match input {
        // The queue pair is on the id and its receives are posted: accept.
        Input::Built => (State::Accepting, vec![Output::Arm(Step::Accept), Output::Call(Call::Accept)]),
        // The user refuses, or could not make the queue pair: either way the client is told at once.
        Input::Refused | Input::BuildFailed => {
            (State::Released, vec![Output::Disarm, Output::Call(Call::Reject), Output::Call(Call::Destroy)])
        }
        Input::Event(
            event @ (Event::Rejected
            | Event::Unreachable
            | Event::ConnectError
            | Event::Disconnected
            | Event::DeviceRemoval),
            status,
        ) => doom(Failure::Event(event, status)),
        Input::Cancel => doom(Failure::Cancelled),
        Input::Release => doom(Failure::Released),
        Input::Listen
        | Input::Resolve
        | Input::Taken
        | Input::CommEstablished
        | Input::Disconnect
        | Input::Broken
        | Input::Failed(..)
        | Input::Deadline => ignore(here),
        Input::Event(event, _) => ignore_event(here, event),
    }
}

fn accepting(input: Input) -> Transition {
    let here = State::Accepting;
    match input {
        // The client's acknowledgement arrived.
        Input::Event(Event::Established, _) => {
            (State::Established, vec![Output::Disarm, Output::Tell(Notice::Established)])
        }
        // The client's acknowledgement is late or lost, but its first message is here: it does not send before it is
        // connected. The kernel then reports the connection as established.
        Input::CommEstablished => (here, vec![Output::Call(Call::Notify)]),
        // Fails when the acknowledgement has just arrived after all.
        Input::Failed(Call::Notify, _) => ignore(here),
        // The client gave up between its request and our reply, or could not use the reply.
        Input::Event(
            event @ (Event::Rejected
            | Event::Unreachable
            | Event::ConnectError
            | Event::Disconnected
            | Event::DeviceRemoval),
            status,
        ) => fail(Failure::Event(event, status)),
        // `rdma_accept` fails when the client is already gone; librdmacm has then told the peer, if there is one.
        Input::Failed(call, errno) => fail(Failure::Call(call, errno)),
        Input::Deadline => fail(Failure::Deadline(Step::Accept)),
        Input::Cancel => fail(Failure::Cancelled),
        Input::Release => fail(Failure::Released),
        Input::Listen
        | Input::Resolve
        | Input::Taken
        | Input::Built
        | Input::BuildFailed
        | Input::Refused
        | Input::Disconnect
        | Input::Broken => ignore(here),
        Input::Event(event, _) => ignore_event(here, event),
    }
}

fn doomed(failure: Failure, input: Input) -> Transition {
    match input {
        // The loan ends: tell what happened meanwhile. Destroying a child id refuses its client.
        Input::Built | Input::BuildFailed | Input::Refused => fail(failure),
        // The first cause stays; nothing else may be done while the id is lent.
        Input::Listen
        | Input::Resolve
        | Input::Taken
        | Input::CommEstablished
        | Input::Disconnect
        | Input::Broken
        | Input::Release
        | Input::Cancel
        | Input::Failed(..)
        | Input::Deadline => ignore(State::Doomed(failure)),
        Input::Event(event, _) => ignore_event(State::Doomed(failure), event),
    }
}

fn established(input: Input) -> Transition {
    let here = State::Established;
    match input {
        // The peer disconnected (or its process ended and its kernel did): answer at once, else it waits 100 s.
        // A rejection after ESTABLISHED means that the peer dropped its half-open end.
        Input::Event(Event::Disconnected | Event::Rejected | Event::ConnectError, _) => close(Closed::Peer),
        Input::Event(Event::DeviceRemoval, _) => close(Closed::DeviceRemoved),
        // The neighbour's address changed, or bonding moved the address: advice, not an end.
        Input::Event(event @ (Event::Unreachable | Event::AddrChange), _) => {
            (here, vec![Output::Tell(Notice::PathChanged(event))])
        }
        // A completion failed: the endpoint has recorded the cause; the peer must learn that it is over.
        Input::Broken => close(Closed::Broken),
        Input::Disconnect => {
            (State::Disconnecting, vec![Output::Arm(Step::Disconnect), Output::Call(Call::Disconnect)])
        }
        // The handle was let go: the kernel finishes the disconnect after the id is destroyed.
        Input::Release => (
            State::Released,
            vec![
                Output::Disarm,
                Output::Tell(Notice::Closed(Closed::Local)),
                Output::Call(Call::Disconnect),
                Output::Call(Call::Destroy),
            ],
        ),
        // The attempt that `Cancel` and `Deadline` were for has succeeded.
        Input::Listen
        | Input::Resolve
        | Input::Taken
        | Input::Built
        | Input::BuildFailed
        | Input::Refused
        | Input::CommEstablished
        | Input::Cancel
        | Input::Failed(..)
        | Input::Deadline => ignore(here),
        Input::Event(event, _) => ignore_event(here, event),
    }
}

fn disconnecting(input: Input) -> Transition {
    let here = State::Disconnecting;
    let told = |closed| (State::Disconnected, vec![Output::Disarm, Output::Tell(Notice::Closed(closed))]);
    match input {
        // The peer answered, or asked for the same at the same time.
        Input::Event(Event::Disconnected | Event::Rejected | Event::ConnectError, _) => told(Closed::Local),
        Input::Event(Event::DeviceRemoval, _) => told(Closed::DeviceRemoved),
        // The kernel no longer knows the connection: it is over already.
        Input::Failed(..) => told(Closed::Local),
        Input::Deadline => told(Closed::LocalUnanswered),
        Input::Release => (
            State::Released,
            vec![Output::Disarm, Output::Tell(Notice::Closed(Closed::Local)), Output::Call(Call::Destroy)],
        ),
        Input::Event(event @ (Event::Unreachable | Event::AddrChange), _) => ignore_event(here, event),
        Input::Listen
        | Input::Resolve
        | Input::Taken
        | Input::Built
        | Input::BuildFailed
        | Input::Refused
        | Input::CommEstablished
        | Input::Disconnect
        | Input::Broken
        | Input::Cancel => ignore(here),
        Input::Event(event, _) => ignore_event(here, event),
    }
}

fn disconnected(input: Input) -> Transition {
    let here = State::Disconnected;
    match input {
        Input::Release => (State::Released, vec![Output::Call(Call::Destroy)]),
        // TIMEWAIT_EXIT, a second DISCONNECTED, a failed answer to the peer: it is over, and the user knows.
        Input::Listen
        | Input::Resolve
        | Input::Taken
        | Input::Built
        | Input::BuildFailed
        | Input::Refused
        | Input::CommEstablished
        | Input::Disconnect
        | Input::Broken
        | Input::Cancel
        | Input::Failed(..)
        | Input::Deadline => ignore(here),
        Input::Event(event, _) => ignore_event(here, event),
    }
}

/// The events that have no arm of their own in a state. The match is complete, so that an event that is added to
/// [`Event`] must be looked at here; every state's own arms come first.
fn ignore_event(state: State, event: Event) -> Transition {
    match event {
        // Answers to calls that this state has not made, or made and already got an answer to.
        Event::AddrResolved
        | Event::AddrError
        | Event::RouteResolved
        | Event::RouteError
        | Event::ConnectResponse
        | Event::ConnectError
        | Event::Established
        | Event::Rejected
        | Event::Disconnected
        | Event::DeviceRemoval
        // Advice about a path that is not in use.
        | Event::Unreachable
        | Event::AddrChange
        // The queue pair number may be used again; it is ours to ignore, each attempt has a new queue pair.
        | Event::TimewaitExit
        // Only listeners get requests, only datagram ids join groups.
        | Event::ConnectRequest
        | Event::MulticastJoin
        | Event::MulticastError
        // A newer library's news.
        | Event::Other(_) => ignore(state),
    }
}
