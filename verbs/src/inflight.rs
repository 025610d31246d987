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
    /// A power of two of entries; sequence number `n` lives at `n % marks.len()`. An entry is the kind of operation
    /// and the bits below.
    marks: Box<[u8]>,
    /// What the entries with the bit [`HOLDS`] hold.
    resources: Box<[R]>,
    /// How many may be outstanding, at most `marks.len()`.
    limit: u64,
    /// The oldest outstanding sequence number.
    head: u64,
    /// The next one to be given.
    tail: u64,
    /// One more than the newest signalled sequence number, 0 for none.
    signalled_end: u64,
    /// Outstanding entries with the bit [`HOLDS`].
    holding: u32,
}

/// Its success will be told.
const SIGNALLED: u8 = 0x80;
/// It holds a resource.
const HOLDS: u8 = 0x40;
/// Where the kind is.
const KIND: u8 = 0x3f;

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
        let places = (limit as usize).next_power_of_two();
        Table {
            marks: vec![0; places].into_boxed_slice(),
            resources: (0..places).map(|_| R::default()).collect(),
            limit: u64::from(limit),
            head: 0,
            tail: 0,
            signalled_end: 0,
            holding: 0,
        }
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

    /// The place of the entry after the next `skip` ones.
    pub(crate) fn place_after(&self, skip: u64) -> u32 {
        self.place(self.tail + skip) as u32
    }

    /// How many places there are.
    pub(crate) fn places(&self) -> u32 {
        self.marks.len() as u32
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

    /// Operations posted after the newest signalled one, whose end would not be told.
    #[inline]
    pub(crate) fn unsignalled_tail(&self) -> u64 {
        self.tail - self.signalled_end
    }

    /// Whether all operations with sequence numbers below `end` are over.
    #[inline]
    pub(crate) fn is_over(&self, end: u64) -> bool {
        end <= self.head
    }

    /// How many more operations can be entered.
    #[inline]
    pub(crate) fn room(&self) -> u64 {
        self.limit - (self.tail - self.head)
    }

    /// Whether the end of the operation before `end` will be told, or is known.
    #[inline]
    pub(crate) fn will_tell(&self, end: u64) -> bool {
        end <= self.signalled_end || end <= self.head
    }

    /// How many can be outstanding.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Enters an operation that holds nothing.
    #[inline(always)]
    pub(crate) fn push(&mut self, kind: Opcode, signalled: bool) {
        debug_assert!(!self.is_full(), "room is made before posting");
        let place = self.place(self.tail);
        self.marks[place] = kind as u8 | if signalled { SIGNALLED } else { 0 };
        self.tail += 1;
        if signalled {
            self.signalled_end = self.tail;
        }
    }

    /// Enters an operation that holds something until it is over.
    #[inline(always)]
    pub(crate) fn push_holding(&mut self, kind: Opcode, signalled: bool, resource: R) {
        let place = self.place(self.tail);
        self.push(kind, signalled);
        self.marks[place] |= HOLDS;
        self.put(place, resource);
    }

    /// Adds what an outstanding operation that holds nothing holds until it is over.
    pub(crate) fn hold(&mut self, seq: u64, resource: R) {
        debug_assert!(seq >= self.head && seq < self.tail, "an outstanding operation");
        let place = self.place(seq);
        debug_assert!(self.marks[place] & HOLDS == 0, "holds nothing yet");
        self.marks[place] |= HOLDS;
        self.put(place, resource);
    }

    #[inline(always)]
    fn put(&mut self, place: usize, resource: R) {
        // What was there is the default, which needs no dropping.
        std::mem::forget(std::mem::replace(&mut self.resources[place], resource));
        self.holding += 1;
    }

    /// Takes note of a completion: this operation and all before it are over, and their resources are released.
    /// `failed` completions also come for work that was not signalled.
    #[inline]
    pub(crate) fn complete(&mut self, wr_id: u64, failed: bool) -> Result<u64, Bogus> {
        let seq = wr_id >> 8;
        if seq < self.head || seq >= self.tail {
            return Err(Bogus::Unknown);
        }
        let mark = self.marks[self.place(seq)];
        if mark & KIND != wr_id as u8 || !(failed || mark & SIGNALLED != 0) {
            return Err(Bogus::Mismatch);
        }
        if self.holding > 0 {
            self.release(seq);
        }
        self.head = seq + 1;
        Ok(seq)
    }

    /// Releases what is held up to and with `seq`.
    fn release(&mut self, seq: u64) {
        let mut next = self.head;
        while next <= seq && self.holding > 0 {
            let place = self.place(next);
            if self.marks[place] & HOLDS != 0 {
                self.resources[place] = R::default();
                self.holding -= 1;
            }
            next += 1;
        }
    }

    #[inline]
    fn place(&self, seq: u64) -> usize {
        seq as usize & (self.marks.len() - 1)
    }

    /// What must hold between any two calls.
    #[cfg(test)]
    fn invariants(&self)
    where
        R: PartialEq,
    {
        let places = self.marks.len() as u64;
        assert!(places.is_power_of_two() && places == self.resources.len() as u64);
        assert!(self.head <= self.tail && self.len() <= self.limit && self.limit <= places);
        assert!(self.signalled_end <= self.tail);
        let has = |seq: u64, bit| self.marks[self.place(seq)] & bit != 0;
        let newest = (self.head..self.tail).rev().find(|&s| has(s, SIGNALLED));
        assert_eq!(self.awaits_completion(), newest.is_some());
        assert!(newest.is_none_or(|newest| self.signalled_end == newest + 1));
        let holding = (self.head..self.tail).filter(|&s| has(s, HOLDS)).count();
        assert_eq!(self.holding as usize, holding);
        let held = self.resources.iter().filter(|&r| *r != R::default()).count();
        assert_eq!(held, holding, "what is over holds nothing");
    }
}

/// The work request id of an operation.
#[inline]
pub(crate) fn wr_id(seq: u64, kind: Opcode) -> u64 {
    seq << 8 | u64::from(kind as u8)
}

/// The work request id of the probe, which is in no table: sequence numbers do not get that far.
pub(crate) const PROBE: u64 = u64::MAX << 8 | Opcode::Probe as u64;

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

    const SEND: Opcode = Opcode::Send;

    fn table(limit: u32) -> Table<u32> {
        Table::new(limit)
    }

    #[test]
    fn a_completion_releases_everything_up_to_it() {
        let resource = Rc::new(());
        let mut t: Table<Option<Rc<()>>> = Table::new(4);
        for i in 0..4 {
            t.push_holding(SEND, i == 2, Some(resource.clone()));
        }
        assert!(t.is_full());
        assert_eq!(Rc::strong_count(&resource), 5);
        assert_eq!(t.complete(wr_id(2, SEND), false), Ok(2));
        assert_eq!(Rc::strong_count(&resource), 2);
        assert_eq!((t.len(), t.unsignalled_tail(), t.awaits_completion()), (1, 1, false));
        assert!(t.is_over(3) && !t.is_over(4));
        assert!(t.will_tell(3) && !t.will_tell(4));
        assert_eq!(t.room(), 3);
        t.invariants();
    }

    #[test]
    fn made_up_completions_free_nothing() {
        let mut t = table(4);
        t.push_holding(SEND, true, 7);
        t.push(SEND, false);
        for bogus in [wr_id(2, SEND), wr_id(4, SEND), u64::MAX, wr_id(u64::MAX >> 8, SEND)] {
            assert_eq!(t.complete(bogus, false), Err(Bogus::Unknown));
        }
        assert_eq!(t.complete(wr_id(0, Opcode::Read), false), Err(Bogus::Mismatch));
        assert_eq!(t.complete(0, true), Err(Bogus::Mismatch));
        assert_eq!(t.complete(wr_id(1, SEND), false), Err(Bogus::Mismatch), "success of unsignalled work");
        assert_eq!(t.len(), 2);
        assert_eq!(t.complete(wr_id(0, SEND), false), Ok(0));
        assert_eq!(t.complete(wr_id(0, SEND), false), Err(Bogus::Unknown), "doubled");
        assert_eq!(t.complete(wr_id(1, SEND), true), Ok(1), "failures are told unsignalled");
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
                t.push(SEND, true);
            }
            let oldest = t.next_seq() - t.len();
            t.complete(wr_id(oldest, SEND), false).expect("outstanding");
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
                        0 if !t.is_full() => t.push(SEND, false),
                        1 if !t.is_full() => t.push_holding(SEND, true, 9),
                        2 => drop(t.complete(wr_id(t.next_seq() - t.len(), SEND), false)),
                        3 => drop(t.complete(wr_id(t.next_seq() - t.len(), SEND), true)),
                        4 => drop(t.complete(wr_id(t.next_seq().saturating_sub(1), SEND), false)),
                        5 => drop(t.complete(wr_id(t.next_seq().saturating_sub(1), SEND), true)),
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
                    match id % 2 {
                        0 => t.push(SEND, flag),
                        _ => t.push_holding(SEND, flag, 5),
                    }
                } else {
                    let before = t.len();
                    let id = if id % 3 == 0 { id } else { wr_id(id % (t.next_seq() + 2), SEND) };
                    if t.complete(id, flag).is_err() {
                        prop_assert_eq!(t.len(), before);
                    }
                }
                t.invariants();
            }
        }
    }
}
