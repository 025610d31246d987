//! The bytes that travel with connect, accept and reject.
//!
//! InfiniBand and RoCE pad them with zeros to the length of the message's field, so the length that was sent is lost.
//! Ours travel in a frame that carries it:
//!
//! | offset | bytes | content |
//! |---|---|---|
//! | 0 | 2 | `0x52 0x43` |
//! | 2 | 1 | version, 1 |
//! | 3 | 1 | length of the data |
//! | 4 | length | the data |
//!
//! Whatever a foreign peer sends stays reachable as raw bytes.

use std::fmt;

use crate::error::{Error, Result};

const MAGIC: [u8; 2] = *b"RC";
const VERSION: u8 = 1;
const HEADER: usize = 4;

/// The bytes of a connect request's field that a program may fill (`RDMA_PS_TCP` over IP: 92 less the 36 of the kernel).
const CONNECT_FIELD: usize = 56;
/// The bytes of a reply.
const ACCEPT_FIELD: usize = 196;
/// The bytes of a reject.
const REJECT_FIELD: usize = 148;

/// The most that [`Connector::private_data`](crate::Connector::private_data) takes, in bytes.
pub const MAX_CONNECT_DATA: usize = CONNECT_FIELD - HEADER;
/// The most that [`AcceptOptions::private_data`](crate::AcceptOptions::private_data) takes, in bytes.
pub const MAX_ACCEPT_DATA: usize = ACCEPT_FIELD - HEADER;
/// The most that [`ConnectRequest::reject`](crate::ConnectRequest::reject) takes, in bytes.
pub const MAX_REJECT_DATA: usize = REJECT_FIELD - HEADER;

/// The message that carries private data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    Connect,
    Accept,
    Reject,
}

impl Carrier {
    fn field(self) -> usize {
        match self {
            Self::Connect => CONNECT_FIELD,
            Self::Accept => ACCEPT_FIELD,
            Self::Reject => REJECT_FIELD,
        }
    }

    fn what(self) -> &'static str {
        match self {
            Self::Connect => "a connect request",
            Self::Accept => "an accept",
            Self::Reject => "a reject",
        }
    }

    /// `data` in our frame.
    pub(crate) fn frame(self, data: &[u8]) -> Result<Vec<u8>> {
        self.check(data.len(), self.field() - HEADER)?;
        let length = u8::try_from(data.len()).expect("the field is shorter than 256 bytes");
        let mut framed = Vec::with_capacity(HEADER + data.len());
        framed.extend_from_slice(&MAGIC);
        framed.extend_from_slice(&[VERSION, length]);
        framed.extend_from_slice(data);
        Ok(framed)
    }

    /// `data` as it is, for a foreign peer.
    pub(crate) fn raw(self, data: &[u8]) -> Result<Vec<u8>> {
        self.check(data.len(), self.field())?;
        Ok(data.to_vec())
    }

    fn check(self, asked: usize, allowed: usize) -> Result<()> {
        if asked > allowed {
            return Err(Error::PrivateDataTooLong { what: self.what(), asked, allowed });
        }
        Ok(())
    }
}

/// Private data as it arrived from the peer. The peer chose every byte of it: check before use.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct PrivateData {
    bytes: Vec<u8>,
}

impl PrivateData {
    pub(crate) fn received(bytes: &[u8]) -> Self {
        Self { bytes: bytes.to_vec() }
    }

    /// All bytes of the message's field. On InfiniBand and RoCE that is its full length with zeros at the end, whatever
    /// the peer sent; on iWARP exactly what it sent.
    #[must_use]
    pub fn raw(&self) -> &[u8] {
        &self.bytes
    }

    /// Exactly the bytes that a peer of this library gave; `None` when the peer gave none or does not use the frame
    /// (see [`PrivateData::raw`]).
    #[must_use]
    pub fn data(&self) -> Option<&[u8]> {
        let (header, rest) = self.bytes.split_at_checked(HEADER)?;
        if header[..2] != MAGIC || header[2] != VERSION {
            return None;
        }
        rest.get(..usize::from(header[3]))
    }
}

impl fmt::Debug for PrivateData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.data() {
            Some(data) => write!(f, "PrivateData({:?})", data.escape_ascii().to_string()),
            None => write!(f, "PrivateData(raw, {} bytes)", self.bytes.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_byte_too_long_is_refused_with_the_limit() {
        for (carrier, framed, raw) in
            [(Carrier::Connect, 52, 56), (Carrier::Accept, 192, 196), (Carrier::Reject, 144, 148)]
        {
            assert!(carrier.frame(&vec![7; framed]).is_ok());
            let error = carrier.frame(&vec![7; framed + 1]).expect_err("one too many");
            assert!(error.to_string().contains(&format!("at most {framed}")), "{error}");
            assert!(carrier.raw(&vec![7; raw]).is_ok());
            assert!(carrier.raw(&vec![7; raw + 1]).is_err());
        }
    }

    proptest! {
        #[test]
        fn what_is_framed_comes_back_whatever_the_padding(
            data in proptest::collection::vec(any::<u8>(), 0..=MAX_CONNECT_DATA), pads in any::<bool>(),
        ) {
            let mut wire = Carrier::Connect.frame(&data).expect("within the limit");
            if pads {
                wire.resize(CONNECT_FIELD, 0);
            }
            let received = PrivateData::received(&wire);
            prop_assert_eq!(received.data(), Some(&data[..]));
            prop_assert_eq!(received.raw(), &wire[..]);
        }

        #[test]
        fn no_bytes_of_a_peer_are_misread_as_longer_than_they_are(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            if let Some(data) = PrivateData::received(&bytes).data() {
                prop_assert!(data.len() + HEADER <= bytes.len());
            }
        }
    }
}
