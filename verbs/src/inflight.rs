//! The table of send-side work that is posted and not yet known to be done.
#![forbid(unsafe_code)]

use crate::error::Opcode;

/// Outstanding work in posting order, each with what must stay alive until it is done.
///
/// A send queue completes in order, so the table is a ring, and a completion stands for all work posted
/// before it. The work request id is the sequence number with the kind of operation in its lowest byte; since
/// sequence numbers never repeat, a completion that is late, doubled or made up matches nothing and frees
/// nothing.
#[derive(Debug)]
pub(crate) struct Table<R> {
    /// A power of two of entries; sequence number `n` lives at `n % ring.len()`.
    ring: Box<[Entry<R>]>,
    /// How many may be outstanding, at most `ring.len()`.
    limit: u64,
    /// The oldest outstanding sequence number.
    head: u64,
    /// The next one to be given.
    tail: u64,
    /// One more than the newest signalled sequence number, 0 for none.
    signalled_end: u64,
}

#[derive(Debug)]
struct Entry<R> {
    resource: R,
    kind: u8,
    signalled: bool,
}

/// What a completion said that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bogus {
    /// Not outstanding (any more).
    Unknown,
    /// Outstanding, but of another kind, or a success of work that was not signalled.
    Mismatch,
}

impl<R: Default> Table<R> {
    /// Room for `limit` outstanding operations.
    pub(crate) fn new(limit: u32) -> Table<R> {
        let len = (limit as usize).next_power_of_two();
        let ring = (0..len).map(|_| Entry { resource: R::default(), kind: 0, signalled: false }).collect();
        Table { ring, limit: u64::from(limit), head: 0, tail: 0, signalled_end: 0 }
    }

    /// The sequence number that the next [`push`](Self::push) gives.
    #[inline]
    pub(crate) fn next_seq(&self) -> u64 {
        self.tail
    }

    /// The place of the next entry in the ring: unique among the outstanding ones.
    #[inline]
    pub(crate) fn next_place(&self) -> u32 {
        self.place(self.tail) as u32
    }

    /// How many places there are.
    pub(crate) fn places(&self) -> u32 {
        self.ring.len() as u32
    }

    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.tail - self.head >= self.limit
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.tail == self.head
    }

    /// Outstanding operations.
    #[inline]
    pub(crate) fn len(&self) -> u64 {
        self.tail - self.head
    }

    /// Whether the completion of an outstanding operation will be told.
    #[inline]
    pub(crate) fn awaits_completion(&self) -> bool {
        self.signalled_end > self.head
    }

    /// Operations posted after the newest signalled one.
    #[inline]
    pub(crate) fn unsignalled_tail(&self) -> u64 {
        self.tail - self.signalled_end.max(self.head)
    }

    /// Whether this operation is done (or was never posted).
    #[inline]
    pub(crate) fn is_done(&self, seq: u64) -> bool {
        seq < self.head
    }

    /// Enters an operation, with what it uses.
    #[inline]
    pub(crate) fn push(&mut self, kind: Opcode, signalled: bool, resource: R) {
        debug_assert!(!self.is_full(), "room is made before posting");
        let place = self.place(self.tail);
        self.ring[place] = Entry { resource, kind: kind as u8, signalled };
        self.tail += 1;
        if signalled {
            self.signalled_end = self.tail;
        }
    }

    /// Takes note of a completion: this operation and all before it are over, and their resources are released.
    /// `failed` completions also come for work that was not signalled.
    #[inline]
    pub(crate) fn complete(&mut self, wr_id: u64, failed: bool) -> Result<u64, Bogus> {
        let seq = wr_id >> 8;
        if seq < self.head || seq >= self.tail {
            return Err(Bogus::Unknown);
        }
        let entry = &self.ring[self.place(seq)];
        if entry.kind != wr_id as u8 || !(entry.signalled || failed) {
            return Err(Bogus::Mismatch);
        }
        while self.head <= seq {
            let place = self.place(self.head);
            self.ring[place].resource = R::default();
            self.head += 1;
        }
        Ok(seq)
    }

    #[inline]
    fn place(&self, seq: u64) -> usize {
        seq as usize & (self.ring.len() - 1)
    }

    /// What must hold between any two calls.
    #[cfg(test)]
    fn invariants(&self)
    where
        R: PartialEq,
    {
        assert!(self.ring.len().is_power_of_two());
        assert!(self.head <= self.tail && self.len() <= self.limit && self.limit <= self.ring.len() as u64);
        assert!(self.signalled_end <= self.tail);
        let newest = (self.head..self.tail).rev().find(|&s| self.ring[self.place(s)].signalled);
        assert_eq!(self.awaits_completion(), newest.is_some());
        if let Some(newest) = newest {
            assert_eq!(self.signalled_end, newest + 1);
        }
        for offset in self.len()..self.ring.len() as u64 {
            let place = self.place(self.head + offset);
            assert!(self.ring[place].resource == R::default(), "a free place holds nothing");
        }
    }
}

/// The work request id of an operation.
#[inline]
pub(crate) fn wr_id(seq: u64, kind: Opcode) -> u64 {
    seq << 8 | u64::from(kind as u8)
}

/// The kind of operation in a work request id.
#[inline]
pub(crate) fn kind_of(wr_id: u64) -> Option<Opcode> {
    Opcode::from_code(wr_id as u8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::rc::Rc;

    const KIND: Opcode = Opcode::Send;

    fn table(limit: u32) -> Table<u32> {
        Table::new(limit)
    }

    #[test]
    fn a_completion_releases_everything_up_to_it() {
        let resource = Rc::new(());
        let mut t: Table<Option<Rc<()>>> = Table::new(4);
        for i in 0..4 {
            t.push(KIND, i == 2, Some(resource.clone()));
        }
        assert!(t.is_full());
        assert_eq!(Rc::strong_count(&resource), 5);
        assert_eq!(t.complete(wr_id(2, KIND), false), Ok(2));
        assert_eq!(Rc::strong_count(&resource), 2);
        assert_eq!((t.len(), t.unsignalled_tail(), t.awaits_completion()), (1, 1, false));
        assert!(t.is_done(2) && !t.is_done(3));
        t.invariants();
    }

    #[test]
    fn made_up_completions_free_nothing() {
        let mut t = table(4);
        t.push(KIND, true, 7);
        t.push(KIND, false, 8);
        for bogus in [wr_id(2, KIND), wr_id(4, KIND), u64::MAX, wr_id(u64::MAX >> 8, KIND)] {
            assert_eq!(t.complete(bogus, false), Err(Bogus::Unknown));
        }
        assert_eq!(t.complete(wr_id(0, Opcode::Read), false), Err(Bogus::Mismatch));
        assert_eq!(t.complete(0, true), Err(Bogus::Mismatch));
        assert_eq!(t.complete(wr_id(1, KIND), false), Err(Bogus::Mismatch), "success of unsignalled work");
        assert_eq!(t.len(), 2);
        assert_eq!(t.complete(wr_id(0, KIND), false), Ok(0));
        assert_eq!(t.complete(wr_id(0, KIND), false), Err(Bogus::Unknown), "doubled");
        assert_eq!(t.complete(wr_id(1, KIND), true), Ok(1), "failures are told unsignalled");
        assert!(t.is_empty());
    }

    #[test]
    fn a_place_is_never_shared_while_in_use() {
        let mut t = table(3);
        let mut used = Vec::new();
        for round in 0..50 {
            while !t.is_full() {
                let place = t.next_place();
                assert!(!used.contains(&place), "round {round}");
                used.push(place);
                t.push(KIND, true, 1);
            }
            let oldest = t.next_seq() - t.len();
            t.complete(wr_id(oldest, KIND), false).expect("outstanding");
            used.remove(0);
        }
    }

    #[test]
    fn all_short_histories_keep_the_invariants() {
        // Every sequence of 7 steps out of: push unsignalled, push signalled, complete oldest, newest, with
        // and without failure; on tables of depth 1, 2 and 3.
        for limit in 1..=3 {
            for mut code in 0..6_u32.pow(7) {
                let mut t = table(limit);
                for _ in 0..7 {
                    match code % 6 {
                        step @ (0 | 1) if !t.is_full() => t.push(KIND, step == 1, 9),
                        2 => drop(t.complete(wr_id(t.next_seq() - t.len(), KIND), false)),
                        3 => drop(t.complete(wr_id(t.next_seq() - t.len(), KIND), true)),
                        4 => drop(t.complete(wr_id(t.next_seq().saturating_sub(1), KIND), false)),
                        5 => drop(t.complete(wr_id(t.next_seq().saturating_sub(1), KIND), true)),
                        _ => {}
                    }
                    code /= 6;
                }
                t.invariants();
            }
        }
    }

    proptest! {
        #[test]
        fn any_history_keeps_the_invariants(
            limit in 1_u32..20,
            steps in prop::collection::vec((any::<bool>(), any::<bool>(), any::<u64>()), 0..200),
        ) {
            let mut t = table(limit);
            for (push, flag, id) in steps {
                if push && !t.is_full() {
                    t.push(KIND, flag, 5);
                } else {
                    let before = t.len();
                    let id = if id % 3 == 0 { id } else { wr_id(id % (t.next_seq() + 2), KIND) };
                    if t.complete(id, flag).is_err() {
                        prop_assert_eq!(t.len(), before);
                    }
                }
                t.invariants();
            }
        }
    }
}
