//! What the device tests share.
