//! The connection manager.
