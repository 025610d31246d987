//! The data path over a real RDMA device, with queue pairs connected by hand.
//!
//! Without a device each test says so and does nothing; in the test machine that is a failure.

mod basics;
mod bench;
mod memory;
mod posted;
mod together;
mod windows;
