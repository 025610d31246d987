//! Which directions of a stream are open.

use std::net::Shutdown;

use super::Message;

/// What each side closed. Small enough for an atomic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ends(u8);

/// We do not read any more.
const READ_SHUT: u8 = 1;
/// We do not write any more.
const WRITE_SHUT: u8 = 2;
/// The peer does not write any more.
const PEER_SHUT: u8 = 4;
/// The peer is gone, in order.
const PEER_GONE: u8 = 8;
/// We told the peer that we are gone.
const SAID_GOODBYE: u8 = 16;

impl Ends {
    pub(crate) fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    pub(crate) fn bits(self) -> u8 {
        self.0
    }

    /// Our program still wants to read.
    pub(crate) fn reads(self) -> bool {
        self.0 & READ_SHUT == 0
    }

    /// Our program may still write, as far as it itself is concerned.
    pub(crate) fn writes(self) -> bool {
        self.0 & WRITE_SHUT == 0
    }

    /// Nothing more comes from the peer than what arrived.
    pub(crate) fn peer_ended(self) -> bool {
        self.0 & (PEER_SHUT | PEER_GONE) != 0
    }

    /// The peer is gone, and takes nothing.
    pub(crate) fn peer_gone(self) -> bool {
        self.0 & PEER_GONE != 0
    }

    /// Both directions were closed in order, by whomever: the end of the connection is no surprise.
    pub(crate) fn is_over(self) -> bool {
        let ours = self.0 & SAID_GOODBYE != 0 || !self.writes();
        self.peer_gone() || (ours && self.peer_ended())
    }

    /// The peer said that it writes no more.
    pub(crate) fn on_shutdown(self) -> Self {
        Self(self.0 | PEER_SHUT)
    }

    /// The peer said that it is gone.
    pub(crate) fn on_disconnect(self) -> Self {
        Self(self.0 | PEER_SHUT | PEER_GONE)
    }

    /// We close a direction: the state afterwards, and what the peer must be told.
    pub(crate) fn shut(self, how: Shutdown) -> (Self, Option<Message>) {
        let mut ends = self.0;
        if how != Shutdown::Write {
            ends |= READ_SHUT;
        }
        if how != Shutdown::Read {
            ends |= WRITE_SHUT;
        }
        let after = Self(ends);
        let newly_written_shut = self.writes() && !after.writes();
        let listens = after.reads() && !after.peer_ended();
        if self.peer_gone() || self.0 & SAID_GOODBYE != 0 {
            (after, None)
        } else if !after.writes() && !listens {
            (Self(ends | SAID_GOODBYE), Some(Message::Disconnect))
        } else if newly_written_shut {
            (after, Some(Message::Shutdown))
        } else {
            (after, None)
        }
    }
}
