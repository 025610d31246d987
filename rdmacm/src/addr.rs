//! Socket addresses, between std's types and C's.

use std::net::{SocketAddr, ToSocketAddrs};

use nix::libc::{sockaddr, sockaddr_storage, socklen_t};
use socket2::SockAddr;

use crate::error::{Error, Result};

/// An address in C's form, for calls that read one.
#[derive(Clone, Debug)]
pub(crate) struct CAddr(SockAddr);

impl From<SocketAddr> for CAddr {
    fn from(address: SocketAddr) -> Self {
        Self(SockAddr::from(address))
    }
}

impl CAddr {
    /// Points to a complete socket address of its family for as long as `self` lives.
    pub(crate) fn as_ptr(&self) -> *const sockaddr {
        self.0.as_ptr().cast()
    }
}

/// The address in `storage`; `None` when it is of neither IP family.
pub(crate) fn from_storage(storage: sockaddr_storage) -> Option<SocketAddr> {
    let length = socklen_t::try_from(size_of::<sockaddr_storage>()).expect("128 fits");
    // SAFETY: `sockaddr_storage` is plain data in which every bit pattern is valid; socket2's storage is the same C type
    // (asserted below), and `length` covers all of it, so whatever family is read lies within.
    let address = unsafe {
        let mut target = socket2::SockAddrStorage::zeroed();
        *target.view_as::<sockaddr_storage>() = storage;
        SockAddr::new(target, length)
    };
    address.as_socket()
}

const _: () = assert!(size_of::<socket2::SockAddrStorage>() == size_of::<sockaddr_storage>());

/// All addresses of a name, in the resolver's order.
pub(crate) fn look_up(address: impl ToSocketAddrs) -> Result<Vec<SocketAddr>> {
    let found: Vec<_> = address
        .to_socket_addrs()
        .map_err(|error| match error.kind() {
            std::io::ErrorKind::InvalidInput => {
                Error::Misuse("not a socket address: give host and port, as in 10.1.2.3:7471")
            }
            _ => Error::Lookup(format!("host name lookup: {error}")),
        })?
        .collect();
    if found.is_empty() {
        return Err(Error::Lookup("the name has no address".into()));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storage_of(address: SocketAddr) -> sockaddr_storage {
        // SAFETY: an address of either IP family fits into a zeroed storage; the lengths come from socket2.
        unsafe {
            let mut storage: sockaddr_storage = std::mem::zeroed();
            let c = SockAddr::from(address);
            std::ptr::copy_nonoverlapping(
                c.as_ptr().cast::<u8>(),
                (&raw mut storage).cast::<u8>(),
                usize::try_from(c.len()).expect("small"),
            );
            storage
        }
    }

    #[test]
    fn addresses_keep_octets_port_and_scope() {
        for text in ["10.1.2.3:7471", "[fd77::1:2]:9", "0.0.0.0:0"] {
            let address: SocketAddr = text.parse().expect("a literal address");
            assert_eq!(from_storage(storage_of(address)), Some(address));
        }
        let scoped = SocketAddr::V6(std::net::SocketAddrV6::new("fe80::5".parse().expect("literal"), 80, 0, 3));
        assert_eq!(from_storage(storage_of(scoped)), Some(scoped));
    }

    #[test]
    fn another_family_is_no_address() {
        // SAFETY: all zero is a valid storage of family AF_UNSPEC.
        assert_eq!(from_storage(unsafe { std::mem::zeroed() }), None);
    }
}
