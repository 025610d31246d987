//! The life of a connection-manager id as data: pure functions from (state, input) to (state, outputs).
//!
//! Nothing here does I/O, reads a clock or knows of librdmacm's types. The driver turns CM events, results of C calls,
//! expired deadlines and the wishes of user threads into [`Input`]s, and carries out the [`Output`]s in order.
//!
//! * [`connection`]: an id that connects, or the child id of a listener.
//! * [`listener`]: an id that listens.
//!
//! Rules that the driver relies on, and that the tests in `tests.rs` walk through every reachable state to check:
//!
//! * set-up is settled exactly once: one `Established` or one `Failed`;
//! * `Closed` is told exactly once, and only after `Established`;
//! * `Destroy` is the last output of an id, and from every state `Release` leads to it;
//! * while an id is lent to a user thread, no call is made on it;
//! * a call that fails is fed back at once; if that releases the id, the rest of its list is dropped.
#![forbid(unsafe_code)]

pub(crate) mod connection;
pub(crate) mod listener;
#[cfg(test)]
mod tests;

/// The kinds of event that librdmacm reports (`rdma/rdma_cma.h`), with numbers of newer libraries kept as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Event {
    AddrResolved,
    AddrError,
    RouteResolved,
    RouteError,
    ConnectRequest,
    ConnectResponse,
    ConnectError,
    Unreachable,
    Rejected,
    Established,
    Disconnected,
    DeviceRemoval,
    MulticastJoin,
    MulticastError,
    AddrChange,
    TimewaitExit,
    Other(u32),
}

impl Event {
    /// The event with the number `raw` of `enum rdma_cm_event_type`.
    pub(crate) fn from_raw(raw: u32) -> Self {
        match raw {
            0 => Self::AddrResolved,
            1 => Self::AddrError,
            2 => Self::RouteResolved,
            3 => Self::RouteError,
            4 => Self::ConnectRequest,
            5 => Self::ConnectResponse,
            6 => Self::ConnectError,
            7 => Self::Unreachable,
            8 => Self::Rejected,
            9 => Self::Established,
            10 => Self::Disconnected,
            11 => Self::DeviceRemoval,
            12 => Self::MulticastJoin,
            13 => Self::MulticastError,
            14 => Self::AddrChange,
            15 => Self::TimewaitExit,
            other => Self::Other(other),
        }
    }
}

/// The librdmacm calls that the machines ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Call {
    Bind,
    Listen,
    ResolveAddr,
    ResolveRoute,
    Connect,
    Accept,
    Reject,
    /// `rdma_notify` with IBV_EVENT_COMM_EST.
    Notify,
    Disconnect,
    Destroy,
}

/// What a deadline is set for; named in the error when it expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Address,
    Route,
    Connect,
    Accept,
    Queue,
    Disconnect,
}

/// Why set-up ended without a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Failure {
    /// An event of the error family, with its status (a negative errno, or a transport's reject code).
    Event(Event, i32),
    /// A call of ours failed with this errno.
    Call(Call, i32),
    /// Our own deadline expired during this step.
    Deadline(Step),
    /// The user ended the attempt from another thread.
    Cancelled,
    /// The user let the handle go.
    Released,
}

/// Why an established connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Closed {
    /// The peer disconnected, or its end of the connection vanished.
    Peer,
    /// This side asked for it.
    Local,
    /// This side asked for it and the peer did not answer in time.
    LocalUnanswered,
    /// The device went away.
    DeviceRemoved,
    /// The data path broke; the endpoint knows the cause.
    Broken,
}

/// What happens to an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Input {
    /// User: bind to this address and listen.
    Listen,
    /// User: begin to connect.
    Resolve,
    /// User: the request was taken from the listener's queue; the id is lent with it.
    Taken,
    /// User: the loan ends, the queue pair is on the id and receives are posted.
    Built,
    /// User: the loan ends, the queue pair could not be made; the user knows why.
    BuildFailed,
    /// User: the loan of a request ends with a refusal.
    Refused,
    /// Data path: a message arrived before the connection manager knew of the connection.
    CommEstablished,
    /// User: end the connection in order.
    Disconnect,
    /// Data path: a completion failed, the queue pair is in the error state.
    Broken,
    /// User: the handle was let go.
    Release,
    /// User: end the attempt now.
    Cancel,
    /// The event channel: an event for this id, with its status.
    Event(Event, i32),
    /// The call that was asked for failed with this errno.
    Failed(Call, i32),
    /// The deadline that was set has come.
    Deadline,
}

/// What the driver must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Output {
    /// Make this call on the id; on failure feed [`Input::Failed`].
    Call(Call),
    /// Set the id's deadline for this step, in place of any other.
    Arm(Step),
    /// Clear the id's deadline.
    Disarm,
    /// Tell the waiting user.
    Tell(Notice),
}

/// What a user is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Notice {
    /// The listener is ready.
    Listening,
    /// A request waits for the listener's user: the driver puts the event's child id into the queue.
    Offer,
    /// The route is known; the id is lent to the user thread, which makes the queue pair.
    Routed,
    /// The connection is up on this side.
    Established,
    /// Set-up ended without a connection.
    Failed(Failure),
    /// The established connection ended.
    Closed(Closed),
    /// The network path of the live connection may have changed; data may or may not go on.
    PathChanged(Event),
}
