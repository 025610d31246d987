//! Byte streams: the surface of `std::net` over the rsocket protocol.
//!
//! | file | what it holds |
//! |---|---|
//! | `stream`, `listener`, `options` | the public types |
//! | `setup` | memory and private data: how a stream is made |
//! | `core` | what the handles of a stream share: reading, writing, closing |
//! | `inbound`, `outbound`, `gather` | the two directions: rings of registered memory, and copying |
//! | `parking` | how threads wait |
//! | `protocol` | what is sent and what is refused: pure, no I/O |

mod core;
mod gather;
mod inbound;
mod listener;
mod options;
mod outbound;
mod parking;
mod protocol;
mod setup;
#[expect(clippy::module_inception, reason = "the type after which the module is named")]
mod stream;

pub use listener::{Incoming, RdmaListener};
pub use options::StreamOptions;
pub use stream::RdmaStream;
