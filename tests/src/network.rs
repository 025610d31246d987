//! The RDMA devices and their addresses, as the kernel's files show them.
//!
//! In the test machine two devices sit on the ends of one cable: the client's side is the first, the server's the last. With
//! a single device both sides are on it.

use std::fs;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::path::Path;

/// The kinds of address that a test can ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6, valid everywhere.
    V6,
    /// IPv6, valid on one link: needs the interface as scope.
    LinkLocal,
}

/// One device's interface.
#[derive(Clone, Debug)]
struct Interface {
    name: String,
    index: u32,
    addresses: Vec<IpAddr>,
}

/// The two sides of the tests.
#[derive(Clone, Debug)]
pub struct Network {
    client: Interface,
    server: Interface,
}

const DEVICES: &str = "/sys/class/infiniband";

impl Network {
    /// The sides on the devices that there are; `None` without a device that has an address.
    #[must_use]
    pub fn find() -> Option<Self> {
        let mut devices: Vec<_> = fs::read_dir(DEVICES).ok()?.flatten().map(|entry| entry.path()).collect();
        devices.sort();
        let mut interfaces = devices.iter().filter_map(|device| Interface::of(device));
        let client = interfaces.next()?;
        let server = interfaces.next_back().unwrap_or_else(|| client.clone());
        Some(Self { client, server })
    }

    pub(crate) fn server(&self, family: Family, port: u16) -> SocketAddr {
        self.server.address(family, self.server.index, port)
    }

    pub(crate) fn client(&self, family: Family, port: u16) -> SocketAddr {
        self.client.address(family, self.client.index, port)
    }

    pub(crate) fn seen_by_client(&self, server: SocketAddr) -> SocketAddr {
        match server {
            SocketAddr::V6(address) if address.scope_id() != 0 => {
                SocketAddr::V6(SocketAddrV6::new(*address.ip(), address.port(), 0, self.client.index))
            }
            other => other,
        }
    }
}

impl Interface {
    fn of(device: &Path) -> Option<Self> {
        let port = device.join("ports/1");
        let mut found: Option<Self> = None;
        for entry in fs::read_dir(port.join("gids")).ok()?.flatten() {
            let Ok(gid) = fs::read_to_string(entry.path()) else { continue };
            let Ok(gid) = gid.trim().parse::<Ipv6Addr>() else { continue };
            // Entries without an interface cannot be read.
            let Ok(name) = fs::read_to_string(port.join("gid_attrs/ndevs").join(entry.file_name())) else { continue };
            let name = name.trim();
            let interface = match &mut found {
                Some(interface) if interface.name == name => interface,
                Some(_) => continue,
                None => found.insert(Self { name: name.to_owned(), index: index_of(name)?, addresses: Vec::new() }),
            };
            let address = gid.to_ipv4_mapped().map_or(IpAddr::V6(gid), IpAddr::V4);
            if !interface.addresses.contains(&address) {
                interface.addresses.push(address);
            }
        }
        found
    }

    fn address(&self, family: Family, scope: u32, port: u16) -> SocketAddr {
        let wanted = |address: &&IpAddr| match (family, address) {
            (Family::V4, IpAddr::V4(_)) => true,
            (Family::V6, IpAddr::V6(address)) => !address.is_unicast_link_local(),
            (Family::LinkLocal, IpAddr::V6(address)) => address.is_unicast_link_local(),
            _ => false,
        };
        match self.addresses.iter().find(wanted) {
            Some(&IpAddr::V6(address)) if family == Family::LinkLocal => {
                SocketAddr::V6(SocketAddrV6::new(address, port, 0, scope))
            }
            Some(&address) => SocketAddr::new(address, port),
            None => panic!("{} has no address of the kind {family:?}: {:?}", self.name, self.addresses),
        }
    }
}

fn index_of(name: &str) -> Option<u32> {
    fs::read_to_string(Path::new("/sys/class/net").join(name).join("ifindex")).ok()?.trim().parse().ok()
}

/// An address without its port as the programs take it after `-a`.
#[must_use]
pub fn host_argument(address: SocketAddr) -> String {
    match address {
        SocketAddr::V6(address) if address.scope_id() != 0 => {
            format!("{}%{}", address.ip(), name_of(address.scope_id()))
        }
        other => other.ip().to_string(),
    }
}

/// The interface with this index.
fn name_of(index: u32) -> String {
    fs::read_dir("/sys/class/net")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .find(|name| index_of(name) == Some(index))
        .unwrap_or_else(|| panic!("there is no interface {index}"))
}
