//! The data path over a stand-in for the C library and the device: allocations counted, faults on request.

mod allocations;
mod batches;
mod device;
mod faults;
mod memory;
mod spilling;

use std::sync::Arc;

use device::StandIn;
use verbs::{Access, Endpoint, EndpointBuilder, EndpointOptions, MemoryRegion, ProtectionDomain};

/// An endpoint that is connected to itself, and memory that stands for both sides'.
struct Rig {
    endpoint: Endpoint,
    local: MemoryRegion,
    peer: MemoryRegion,
    pd: ProtectionDomain,
    device: Arc<StandIn>,
}

fn rig(options: &EndpointOptions) -> Rig {
    let (device, context) = StandIn::new();
    let pd = ProtectionDomain::new(&context).expect("a domain");
    let builder = EndpointBuilder::new(&pd, options).expect("resources");
    let endpoint = builder.create(1, Access::REMOTE_ALL).expect("a queue pair");
    let local = MemoryRegion::new(&pd, 8192, Access::REMOTE_ALL).expect("a region");
    let peer = MemoryRegion::new(&pd, 8192, Access::REMOTE_ALL).expect("a region");
    Rig { endpoint, local, peer, pd, device }
}

fn options() -> EndpointOptions {
    EndpointOptions::default()
}
