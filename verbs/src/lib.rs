//! Owning wrappers over libibverbs.

mod cq;
mod device;
mod endpoint;
mod error;
mod freelist;
mod inflight;
mod mr;
mod pages;
mod pd;
mod pool;
mod qp;
#[doc(hidden)]
pub mod sys;
mod wait;

pub use cq::{Completion, CompletionChannel, CompletionQueue, Completions};
pub use device::{
    AtomicCap, Context, Device, DeviceAttributes, GidEntry, GidType, LinkLayer, PortAttributes, PortState, Transport,
    devices,
};
pub use endpoint::{Control, Endpoint, EndpointBuilder, EndpointOptions, RecvBuf, RecvHalf, SendHalf};
pub use error::{CloseReason, Error, LimitError, Opcode, OsError, Result, WorkError, WorkStatus};
pub use mr::{Access, MemoryRegion, RemoteRegion};
pub use pd::ProtectionDomain;
pub use pool::{BufferPool, SendBuf};
pub use qp::{Path, QueuePair, QueuePairAttributes, QueuePairCaps, QueuePairEnd, QueuePairState};
pub use wait::Wait;
