//! Owning wrappers over libibverbs, and a blocking data path that is sound in safe code.
//!
//! This crate knows devices, memory, queues and queue pairs, but nothing of connection management: queue pairs come
//! from whoever connects them, or are connected by hand ([`QueuePair::to_ready_to_receive`]). For connections by
//! address see the sister crate that builds on this one.
//!
//! ```no_run
//! use verbs::{Access, EndpointBuilder, EndpointOptions, MemoryRegion, ProtectionDomain};
//!
//! # fn main() -> Result<(), verbs::Error> {
//! let Some(device) = verbs::devices()?.into_iter().next() else { return Ok(()) };
//! let domain = ProtectionDomain::new(&device.open()?)?;
//! let region = MemoryRegion::new(&domain, 1 << 20, Access::REMOTE_ALL)?;
//! let mut endpoint = EndpointBuilder::new(&domain, &EndpointOptions::default())?.create(1, Access::REMOTE_ALL)?;
//! // Exchange queue pair numbers, connect (`endpoint.control().queue_pair()`), then:
//! endpoint.send(&region.remote().to_bytes())?;
//! endpoint.flush()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Objects, and who keeps whom
//!
//! ```text
//! SendHalf   RecvHalf   Control   RecvBuf          an Endpoint is the two halves
//!     \__________\________/________/
//!                   |
//!                 core: queue pair, receive slots, and what dropped halves left in flight
//!                   |
//!      +------------+-------------+
//! CompletionQueue   |    MemoryRegion, BufferPool (SendBuf)
//! and its channel   |             |
//!      |      ProtectionDomain ---+
//!      |            |
//!      +------------+--> Context
//! ```
//!
//! Each line is a counted reference, so objects can be dropped in any order; the C object goes with its last user.
//! The core is destroyed in this order: the queue pair, so that the device stops; the table, with the buffers and
//! regions in it; the slots; then, each with its last handle, completion queues and their channels, pools and regions
//! (deregistered before their pages are unmapped), the domain, the context.
//!
//! # Threads
//!
//! The crate starts none. Everything is `Send`; what many may use at once is `Sync`. The halves of an endpoint
//! own disjoint state: in steady state they take no lock, allocate nothing, and make no system call but the
//! provider's own and those of sleeping. A [`Control`] ends a connection from any thread without waiting: it keeps the
//! first cause, moves the queue pair to the error state, and makes an eventfd readable that sleeping halves watch,
//! since a completion may never come (a half with nothing posted, a receive posted too late).
//!
//! # Why it is sound
//!
//! * *Memory outlives its use.* Pages are unmapped only after deregistration succeeded, and are leaked if it fails.
//!   What a posted operation uses is owned by the table of operations in flight or by the core, and both outlive the
//!   queue pair. A blocking call borrows its region instead, and puts a handle into the table should it end, by a
//!   timeout, an error or a panic, before the operation. If the queue pair cannot be destroyed, all of that is leaked.
//! * *No reference covers what the device writes.* A receive slot is posted, or held by exactly one handle, which
//!   alone gives out a slice. A [`SendBuf`] gives out slices until it is posted, which takes it by value. A
//!   [`MemoryRegion`], which peers may change at any time, never gives out a slice, only copies made of byte-wise
//!   atomic accesses. The borrow checker keeps the rest out:
//!
//!   ```compile_fail,E0382
//!   fn after_sending(half: &mut verbs::SendHalf, mut buf: verbs::SendBuf) {
//!       let _ = half.send_buf(buf);
//!       buf[0] = 1; // the device may be reading it
//!   }
//!   ```
//!
//!   ```compile_fail,E0505
//!   fn after_dropping(buf: verbs::RecvBuf) -> u8 {
//!       let bytes: &[u8] = &buf;
//!       drop(buf); // the device may write it
//!       bytes[0]
//!   }
//!   ```
//!
//!   ```compile_fail,E0594
//!   fn received_bytes_are_not_written(mut buf: verbs::RecvBuf) {
//!       buf[0] = 1;
//!   }
//!   ```
//!
//!   ```compile_fail,E0608
//!   fn regions_give_no_slices(region: &verbs::MemoryRegion) -> u8 {
//!       region[0]
//!   }
//!   ```
//!
//!   ```compile_fail,E0499
//!   fn one_at_a_time(half: &mut verbs::SendHalf) {
//!       let batch = half.batch();
//!       half.send(b"between").unwrap();
//!       drop(batch);
//!   }
//!   ```
//! * *Nothing depends on destructors.* Forgetting any value leaks it and what it keeps, no more.
//! * *The device is checked where that is possible.* A completion must name an operation in flight of its kind (the
//!   numbers never repeat), and a length must fit its slot; else the connection breaks, without a panic.
//!
//! What remains trusted: the provider library and the device keep verbs' rules (they complete a send queue in
//! order, and touch only posted memory).
//!
//! # Where things are
//!
//! | file | what |
//! | --- | --- |
//! | `sys` | every C call, raw types, layout checks |
//! | `error`, `error/work` | errors by who is at fault |
//! | `device`, `device/attributes` | devices, contexts, attributes, ports, GIDs |
//! | `pd`, `mr`, `mr/builder`, `remote`, `pages` | domains, regions, peers' regions, pages and racing copies |
//! | `mw` | memory windows |
//! | `pool`, `freelist` | registered buffers |
//! | `cq` | completion queues and channels |
//! | `qp`, `qp/setup` | queue pairs, and connecting them by hand |
//! | `inflight` | the table of operations in flight (no unsafe code) |
//! | `wait` | spinning, sleeping, deadlines |
//! | `endpoint` | the data path: `builder`, `options`, `shared` (the core and the probe), `recv`, `send` |
//! | `endpoint/send` | messages, and `one_sided`, `atomic`, `batch`, `pending` (tickets, poll loops), `window`, `state` |
//!
//! `tests/stand_in` tests all of it over a stand-in for the C library and a device, `tests/instructions.rs` counts what
//! operations cost.

mod async_event;
mod cq;
mod device;
mod endpoint;
mod error;
mod freelist;
mod inflight;
mod mr;
mod mw;
mod pages;
mod pd;
mod pool;
mod qp;
mod remote;
#[doc(hidden)]
pub mod sys;
mod wait;

pub use async_event::{AsyncEvent, AsyncEventKind, AsyncEvents, AsyncSubject};
pub use cq::{Completion, CompletionChannel, CompletionQueue, Completions};
pub use device::{
    AtomicCap, Context, Device, DeviceAttributes, GidEntry, GidType, LinkLayer, PortAttributes, PortState, Transport,
    devices,
};
pub use endpoint::{
    Batch, Control, Endpoint, EndpointBuilder, EndpointOptions, Notification, Probe, RecvBuf, RecvHalf, SendHalf,
    Ticket,
};
pub use error::{CloseReason, Error, LimitError, Opcode, OsError, Result, WorkError, WorkStatus};
pub use mr::{Access, MemoryRegion, RegionBuilder};
pub use mw::MemoryWindow;
pub use pd::ProtectionDomain;
pub use pool::{BufferPool, SendBuf};
pub use qp::{Path, QueuePair, QueuePairAttributes, QueuePairCaps, QueuePairEnd, QueuePairState};
pub use remote::RemoteRegion;
pub use wait::Wait;
