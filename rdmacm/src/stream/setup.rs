//! Making streams: the memory first, since the peer is told of it when connecting.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use verbs::{Access, MemoryRegion, Transport};

use super::core::{Core, Parts};
use super::inbound::Inbound;
use super::options::{Sizes, StreamOptions};
use super::outbound::Outbound;
use super::protocol::{Hello, Incoming, Opening, Sender, Sge, Violation};
use crate::connection::Connection;
use crate::connector::Connector;
use crate::error::{Error, Result, TimedOutStep};
use crate::manager::Device;
use crate::options::AcceptOptions;
use crate::request::ConnectRequest;

/// The memory of a stream that is being made.
struct Memory {
    sizes: Sizes,
    /// Written by the peer.
    inbound: MemoryRegion,
    /// Read by the local device.
    outbound: MemoryRegion,
}

impl Memory {
    fn new(device: &Device, options: &StreamOptions) -> io::Result<Self> {
        if device.context().transport() == Transport::Iwarp {
            // It has no write with an immediate value.
            let text = format!("streams do not work over iWARP, the transport of {}", device.name());
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        Ok(Self::register(device, options)?)
    }

    fn register(device: &Device, options: &StreamOptions) -> Result<Self> {
        let sizes = options.on(&device.context().attributes()?);
        let peers = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let inbound = device.register(Inbound::region_size(2 * sizes.half as usize), peers)?;
        let size = Outbound::region_size(sizes.send_buffer, sizes.inline as usize);
        let outbound = device.register(size, Access::empty())?;
        Ok(Self { sizes, inbound, outbound })
    }

    fn hello(&self) -> Hello {
        let remote = self.inbound.remote();
        let entries = remote.addr() + Inbound::entries_at(2 * self.sizes.half as usize) as u64;
        let buffer = Sge { addr: remote.addr(), key: remote.rkey(), len: self.sizes.half };
        Hello::new(self.sizes.credits, (entries, remote.rkey()), buffer)
    }

    fn stream(
        self,
        connection: Connection,
        ours: Hello,
        peers: Hello,
        options: &StreamOptions,
    ) -> io::Result<Arc<Core>> {
        let opening = Opening { ours, peers };
        let (local, peer) = (connection.local_addr(), connection.peer_addr());
        let (send, recv) = connection.split();
        let control = send.control().clone();
        let Sizes { send_buffer, send_queue, .. } = self.sizes;
        let outbound = Outbound::new(send, Sender::new(&opening), self.outbound, send_buffer, send_queue);
        let inbound = Inbound::new(recv, Incoming::new(&opening), self.inbound);
        let parts = Parts { outbound, inbound, control, opening, local, peer };
        Ok(Arc::new(Core::new(parts, options.spin, options.linger)?))
    }
}

/// Connects to one address, within `deadline`.
pub(super) fn connect(address: SocketAddr, options: &StreamOptions, timeout: Duration) -> io::Result<Arc<Core>> {
    let mut connector = Connector::new().deadline(timeout);
    if let Some(source) = options.source {
        connector = connector.source(source);
    }
    if let Some(manager) = &options.manager {
        connector = connector.manager(manager);
    }
    let mut route = connector.resolve(address)?;
    let memory = Memory::new(route.device(), options)?;
    let ours = memory.hello();
    route.private_data_raw(&ours.to_bytes())?;
    route.set_options(memory.sizes.connection());
    let connection = route.connect()?;
    let peers =
        Hello::from_bytes(connection.private_data().raw()).map_err(|violation| no_stream(address, violation))?;
    memory.stream(connection, ours, peers, options)
}

/// Connects to the first of some addresses that answers.
pub(super) fn connect_any(
    addresses: impl Iterator<Item = SocketAddr>,
    options: &StreamOptions,
) -> io::Result<Arc<Core>> {
    let (started, timeout) = (Instant::now(), options.connect_timeout);
    let mut last = None;
    for address in addresses {
        let rest = timeout.saturating_sub(started.elapsed());
        if rest.is_zero() && last.is_some() {
            break;
        }
        match connect(address, options, rest) {
            Ok(core) => return Ok(core),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "could not resolve to any addresses")))
}

fn no_stream(peer: SocketAddr, violation: Violation) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{peer} does not speak the stream protocol: {violation}"))
}

/// What became of a client's wish for a stream.
pub(super) enum Accepted {
    Stream(Arc<Core>),
    /// The client is at fault, or gone: the next one may be better.
    PassedOver(String),
}

/// Accepts a client. An error is this side's; the client was refused.
pub(super) fn accept(request: ConnectRequest, options: &StreamOptions) -> io::Result<Accepted> {
    let peer = request.peer_addr();
    let peers = match Hello::from_bytes(request.private_data().raw()) {
        Ok(peers) => peers,
        Err(violation) => {
            request.reject(&[])?;
            return Ok(Accepted::PassedOver(no_stream(peer, violation).to_string()));
        }
    };
    let memory = Memory::new(request.device(), options)?;
    let ours = memory.hello();
    let accept = AcceptOptions::new().options(memory.sizes.connection()).private_data_raw(&ours.to_bytes());
    match request.accept_with(&accept) {
        Ok(connection) => Ok(Accepted::Stream(memory.stream(connection, ours, peers, options)?)),
        Err(
            error @ (Error::Aborted { .. }
            | Error::TimedOut { step: TimedOutStep::Accept, .. }
            | Error::Rejected { .. }
            | Error::Unreachable { .. }),
        ) => Ok(Accepted::PassedOver(error.to_string())),
        Err(error) => Err(error.into()),
    }
}
