//! The machine of an id that listens.

use super::{Call, Event, Failure, Input, Notice, Output};

/// Where a listening id stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// Created; not bound yet.
    Idle,
    /// Bound, and `rdma_listen` was called.
    Listening,
    /// The id is destroyed.
    Released,
}

/// A listener's machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Listener {
    state: State,
}

impl Listener {
    pub(crate) fn new() -> Self {
        Self { state: State::Idle }
    }

    pub(crate) fn state(&self) -> State {
        self.state
    }

    /// Takes one input, changes the state, and returns what the driver must do, in order.
    pub(crate) fn on(&mut self, input: Input) -> Vec<Output> {
        let (next, outputs) = match self.state {
            State::Idle => idle(input),
            State::Listening => listening(input),
            State::Released => (State::Released, Vec::new()),
        };
        self.state = next;
        outputs
    }
}

fn end(failure: Failure) -> (State, Vec<Output>) {
    (State::Released, vec![Output::Tell(Notice::Failed(failure)), Output::Call(Call::Destroy)])
}

fn idle(input: Input) -> (State, Vec<Output>) {
    match input {
        // Both calls are immediate; `Listening` is told only if neither failed.
        Input::Listen => (
            State::Listening,
            vec![Output::Call(Call::Bind), Output::Call(Call::Listen), Output::Tell(Notice::Listening)],
        ),
        Input::Release => end(Failure::Released),
        Input::Cancel => end(Failure::Cancelled),
        Input::Resolve
        | Input::Taken
        | Input::Built
        | Input::BuildFailed
        | Input::Refused
        | Input::CommEstablished
        | Input::Disconnect
        | Input::Broken
        | Input::Failed(..)
        | Input::Deadline
        | Input::Event(..) => (State::Idle, Vec::new()),
    }
}

fn listening(input: Input) -> (State, Vec<Output>) {
    match input {
        // A client asks: its child id goes into the queue, or is refused when the queue is full.
        Input::Event(Event::ConnectRequest, _) => (State::Listening, vec![Output::Tell(Notice::Offer)]),
        // The address that the listener was bound to is gone. A wildcard listener never gets this event.
        Input::Event(Event::DeviceRemoval, status) => end(Failure::Event(Event::DeviceRemoval, status)),
        Input::Failed(call, errno) => end(Failure::Call(call, errno)),
        Input::Release => end(Failure::Released),
        Input::Cancel => end(Failure::Cancelled),
        Input::Listen
        | Input::Resolve
        | Input::Taken
        | Input::Built
        | Input::BuildFailed
        | Input::Refused
        | Input::CommEstablished
        | Input::Disconnect
        | Input::Broken
        | Input::Deadline => (State::Listening, Vec::new()),
        // A bonding fail-over moves the address with the listener; nothing else concerns one.
        Input::Event(
            Event::AddrChange
            | Event::AddrResolved
            | Event::AddrError
            | Event::RouteResolved
            | Event::RouteError
            | Event::ConnectResponse
            | Event::ConnectError
            | Event::Unreachable
            | Event::Rejected
            | Event::Established
            | Event::Disconnected
            | Event::MulticastJoin
            | Event::MulticastError
            | Event::TimewaitExit
            | Event::Other(_),
            _,
        ) => (State::Listening, Vec::new()),
    }
}
