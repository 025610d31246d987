//! `std::net` for RDMA: connections, messages and shared memory over librdmacm, blocking and safe.
//!
//! ```no_run
//! // The server echoes one message.
//! # fn server() -> Result<(), rdmacm::Error> {
//! let listener = rdmacm::Listener::bind("0.0.0.0:7471")?;
//! let mut connection = listener.accept()?;
//! let message = connection.recv_buf()?;
//! connection.send(&message)?;
//! # Ok(())
//! # }
//!
//! // The client connects to the address of an interface that has an RDMA device.
//! # fn client() -> Result<(), rdmacm::Error> {
//! let mut connection = rdmacm::Connection::connect("10.1.2.3:7471")?;
//! connection.send(b"hello")?;
//! let mut buffer = [0; 4096];
//! let length = connection.recv(&mut buffer)?;
//! assert_eq!(&buffer[..length], b"hello");
//! connection.disconnect()?;
//! # Ok(())
//! # }
//! ```
//!
//! # The objects
//!
//! ```text
//! Manager ── the event-channel thread, one protection domain for each Device
//!   ├── Listener ── ConnectRequest ──┐
//!   ├── Connector ── Route ──────────┴── Connection ── SendHalf, RecvHalf
//!   └── Device ── MemoryRegion ── RemoteRegion (its address, length and key, for peers)
//! ```
//!
//! [`Connector`] and [`Listener`] make [`Connection`]s; both use [`Manager::global`] unless told otherwise. All
//! connections of a manager on one device share a protection domain, so that a [`MemoryRegion`] registered through any of
//! them, or through the [`Device`], can be used by all. The data path itself (queue pairs, completion queues, buffers,
//! memory) is the crate [`verbs`], which knows nothing of connecting.
//!
//! # Threads
//!
//! A manager has one thread. It alone reads librdmacm's event channel, and it alone makes the calls that start, answer or
//! end something for an id; each of them returns at once. What takes time (queue pairs, completion queues, registration) is
//! done by the user's own thread, on an id that is lent to it meanwhile. The thread is never needed to send, receive, read
//! or write.
//!
//! User threads and the event thread exchange commands and notices through channels. If the event thread should panic,
//! every waiter wakes with [`Error::ManagerGone`].
//!
//! # Deadlines
//!
//! The kernel's connection manager waits up to 17 minutes for a peer that is stopped, and 100 seconds for one that is gone.
//! Here every blocking call that sets up or ends a connection has a deadline of its own: connecting (10 s by default), the
//! acknowledgement of an accept (5 s), requests in a listener's queue (10 s), draining (1 s) and disconnecting (2 s). When
//! it comes the id is destroyed, which takes milliseconds. Sending and receiving wait as long as the connection lives,
//! unless given a timeout; the end of the connection wakes them.
//!
//! # What happens on drop
//!
//! * A [`Connection`] (or its last half) waits for its sends to be acknowledged, at most the drain timeout; then the queue
//!   pair goes to the error state, the peer is told, and everything is given back, at the latest after another second. A
//!   [`RecvBuf`] that the program still holds keeps the queue pair and its buffers until it is dropped.
//! * A [`Listener`] refuses the clients that wait in its queue. Connections that it accepted live on.
//! * A [`ConnectRequest`] refuses its client; a [`Route`] gives its id back.
//! * A [`MemoryRegion`] is deregistered with its last clone; operations that still use it hold one.
//! * A [`Manager`]'s thread ends with the last of all these.
//!
//! # When the device goes away, and after a fork
//!
//! A removed device ends every connection on it with [`CloseReason::DeviceRemoved`]. When the program has dropped what it had
//! on the device, librdmacm is made to close it, so that the kernel's removal (`rdma link delete`) can finish; Soft-RoCE and
//! Soft-iWARP wait for that. Not if it was the last device: librdmacm then keeps it open until the process
//! ends. A listener
//! on `0.0.0.0` or `[::]` outlives its devices and serves again when one comes back; one on a device's own address ends
//! with it.
//!
//! A child that was forked after RDMA was set up gets [`Error::Forked`]; nothing that it does or drops touches what is its
//! parent's. Fork before the first use, or exec.
//!
//! # Why safe code cannot corrupt memory
//!
//! The argument has one half in [`verbs`] (buffers and memory; see its documentation) and one here:
//!
//! * An id is destroyed when its last holder lets go, by ownership: the event thread, and the loan while there is one.
//! * The queue pair of an id, and all memory that the device may touch through it, is kept by the event thread until the id
//!   is destroyed, whatever the user drops or forgets, so that no call of librdmacm meets a queue pair that is gone.
//! * An event is copied out and acknowledged before anything is done about it; nothing points into it afterwards.
//! * Nothing a peer sends is trusted: private data is bytes of a known length, event and status numbers are data, never
//!   enums of C, and the depths of reads are clamped.
//!
//! `std::mem::forget` on any handle leaks it and what it holds, no more.
//!
//! # Where is the code
//!
//! | file | what it holds |
//! |---|---|
//! | `connector`, `retry`, `listener`, `request`, `connection`, `events`, `cancel` | the public types |
//! | `manager`, `counters` | the thread's owner, devices and protection domains, what is counted |
//! | `setup` | the user thread's part of setting up a connection |
//! | `driver` | the event-channel thread |
//! | `proto` | the state machines that it follows: pure, no I/O |
//! | `handle` | commands, notices, loans: what passes between the two |
//! | `channel`, `id`, `context` | the owners of `rdma_event_channel` and `rdma_cm_id`, and librdmacm's devices |
//! | `options`, `private_data`, `addr`, `error` | what their names say |
//! | `stream` | byte streams with the surface of `std::net`, over the rsocket protocol |
//! | `sys` | the calls into librdmacm, and nothing else |

mod addr;
mod cancel;
mod channel;
mod connection;
mod connector;
mod context;
mod counters;
mod driver;
mod error;
mod events;
mod handle;
mod id;
mod listener;
mod manager;
mod options;
mod private_data;
mod proto;
mod request;
mod retry;
mod setup;
mod stream;
mod sys;
mod time;

pub use cancel::CancelToken;
pub use connection::{Connection, RecvHalf, SendHalf};
pub use connector::{Connector, Route};
pub use counters::Counters;
pub use error::{Error, RejectReason, Result, TimedOutStep};
pub use events::{ConnectionEvent, ConnectionEvents};
pub use listener::{Acceptor, Listener, ListenerBuilder};
pub use manager::{Device, Manager};
pub use options::{AcceptOptions, ConnectionOptions};
pub use private_data::{MAX_ACCEPT_DATA, MAX_CONNECT_DATA, MAX_REJECT_DATA, PrivateData};
pub use request::ConnectRequest;
pub use retry::RetryPolicy;
pub use stream::{Incoming, RdmaListener, RdmaStream, StreamOptions};
pub use verbs;
pub use verbs::{Access, CloseReason, EndpointOptions, MemoryRegion, RecvBuf, RemoteRegion, SendBuf, Wait};
