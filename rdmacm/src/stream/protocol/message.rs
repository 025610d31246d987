//! The word that travels with each RDMA write: its kind in the upper 3 bits, a value in the lower 29.

use super::{Sge, Violation};

/// What a word says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// This many bytes were written at the current place of the ring.
    Data(u32),
    /// Data messages may be sent up to, and without, this sequence number.
    Credit {
        /// The limit.
        limit: u16,
        /// The next entry of our array was written too.
        entry: bool,
    },
    /// The peer says nothing more, but listens.
    Shutdown,
    /// The peer is gone.
    Disconnect,
    /// The peer lives.
    Keepalive,
}

const DATA: u32 = 0;
const SGL: u32 = 4;
const IOMAP: u32 = 6;
const CONTROL: u32 = 7;

const KIND_SHIFT: u32 = 29;
const VALUE_MASK: u32 = (1 << KIND_SHIFT) - 1;

const CONTROL_DISCONNECT: u32 = 0;
const CONTROL_KEEPALIVE: u32 = 1;
const CONTROL_SHUTDOWN: u32 = 2;

impl Message {
    /// The most bytes that one word can announce.
    pub(crate) const MAX_DATA: usize = VALUE_MASK as usize;

    pub(crate) fn word(self) -> u32 {
        let (kind, value) = match self {
            Self::Data(bytes) => {
                debug_assert!(bytes <= VALUE_MASK, "segments are cut to what a word can say");
                (DATA, bytes)
            }
            Self::Credit { limit, entry: _ } => (SGL, u32::from(limit)),
            Self::Shutdown => (CONTROL, CONTROL_SHUTDOWN),
            Self::Disconnect => (CONTROL, CONTROL_DISCONNECT),
            Self::Keepalive => (CONTROL, CONTROL_KEEPALIVE),
        };
        kind << KIND_SHIFT | value
    }

    /// Reads a word that came with a write of `written` bytes.
    pub(crate) fn read(word: Option<u32>, written: u32) -> Result<Self, Violation> {
        let word = word.ok_or(Violation::NoWord)?;
        let value = word & VALUE_MASK;
        let carries = |announced| match announced == written {
            true => Ok(()),
            false => Err(Violation::WrongLength { announced, written }),
        };
        match word >> KIND_SHIFT {
            DATA if value == 0 => Err(Violation::WrongLength { announced: 0, written }),
            DATA => carries(value).map(|()| Self::Data(value)),
            SGL => {
                let entry = written != 0;
                if entry {
                    carries(Sge::LEN as u32)?;
                }
                // The sender adds up without cutting to 16 bits.
                Ok(Self::Credit { limit: value as u16, entry })
            }
            IOMAP => Err(Violation::NoMappings),
            CONTROL => {
                carries(0)?;
                match value {
                    CONTROL_DISCONNECT => Ok(Self::Disconnect),
                    CONTROL_KEEPALIVE => Ok(Self::Keepalive),
                    CONTROL_SHUTDOWN => Ok(Self::Shutdown),
                    other => Err(Violation::UnknownControl(other)),
                }
            }
            kind => Err(Violation::ReservedKind(kind as u8)),
        }
    }
}
