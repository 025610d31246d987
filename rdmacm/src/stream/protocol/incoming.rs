//! What becomes of the messages that arrive.

use super::{ENTRIES, Message, Opening, Receiver, Sge, Violation};

/// New credits for the [`Sender`](super::Sender), with the half that came with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Credit {
    pub(crate) limit: u16,
    pub(crate) entry: Option<Sge>,
}

/// What a message told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Bytes can be read.
    Data,
    /// There is something for the sender.
    Credit,
    /// The peer says nothing more.
    Shutdown,
    /// The peer is gone, in order.
    Disconnect,
    /// Nothing.
    Nothing,
}

/// Takes the messages of the peer: data goes to the [`Receiver`], credits wait here for the sender, which has another lock.
#[derive(Clone, Debug)]
pub(crate) struct Incoming {
    pub(crate) receiver: Receiver,
    /// In the order they came; those without an entry are joined with the one before.
    credits: [Option<Credit>; ENTRIES + 1],
    /// The entry of our array that the peer writes next.
    expected: usize,
    /// The peer said that nothing more comes.
    ended: bool,
}

impl Incoming {
    pub(crate) fn new(opening: &Opening) -> Self {
        Self { receiver: Receiver::new(opening), credits: [None; ENTRIES + 1], expected: 1, ended: false }
    }

    /// A write of `written` bytes with this word arrived. `entry` reads our array.
    pub(crate) fn message(
        &mut self,
        word: Option<u32>,
        written: u32,
        entry: impl FnOnce(usize) -> [u8; Sge::LEN],
    ) -> Result<Event, Violation> {
        match Message::read(word, written)? {
            Message::Data(_) if self.ended => Err(Violation::DataAfterEnd),
            Message::Data(bytes) => self.receiver.data(bytes).map(|()| Event::Data),
            Message::Credit { limit, entry: written } => {
                let sge = written.then(|| Sge::from_bytes(&entry(self.expected), super::Order::NATIVE));
                if written {
                    self.expected = (self.expected + 1) % ENTRIES;
                }
                self.keep(Credit { limit, entry: sge })?;
                Ok(Event::Credit)
            }
            Message::Shutdown => {
                self.ended = true;
                Ok(Event::Shutdown)
            }
            Message::Disconnect => {
                self.ended = true;
                Ok(Event::Disconnect)
            }
            Message::Keepalive => Ok(Event::Nothing),
        }
    }

    fn keep(&mut self, credit: Credit) -> Result<(), Violation> {
        if credit.entry.is_none()
            && let Some(last) = self.credits.iter_mut().rev().flatten().next()
        {
            last.limit = credit.limit;
            return Ok(());
        }
        // An honest peer has no more halves than entries, so that more cannot wait, one of them perhaps without an entry.
        let free = self.credits.iter_mut().find(|place| place.is_none()).ok_or(Violation::EntryInUse)?;
        *free = Some(credit);
        Ok(())
    }

    /// The credits that came since the last call, in order.
    pub(crate) fn take_credits(&mut self) -> impl Iterator<Item = Credit> + use<> {
        std::mem::take(&mut self.credits).into_iter().flatten()
    }
}
