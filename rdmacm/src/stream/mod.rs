//! Byte streams.

#[allow(dead_code, unused_imports, reason = "used by the stream type")]
mod protocol;
