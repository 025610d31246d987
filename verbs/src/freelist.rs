//! A lock-free stack of free slot numbers.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Marks the end of the stack.
const NONE: u32 = u32::MAX;

/// Which of `count` slots are free. Slots can be taken and put back by any thread.
///
/// A stack linked by index. The head carries a counter in its upper half that grows with each change, so
/// that a head that was taken and put back meanwhile (ABA) is not taken for the same.
#[derive(Debug)]
pub(crate) struct FreeList {
    head: AtomicU64,
    next: Box<[AtomicU32]>,
}

impl FreeList {
    /// All slots free; the lowest is taken first.
    pub(crate) fn new(count: u32) -> FreeList {
        assert!(count < NONE, "slot numbers fit into 32 bits, with one to spare");
        let next = (1..=count).map(|n| AtomicU32::new(if n == count { NONE } else { n })).collect();
        FreeList { head: AtomicU64::new(if count == 0 { u64::from(NONE) } else { 0 }), next }
    }

    /// Takes a slot; `None` when all are taken.
    #[inline]
    pub(crate) fn take(&self) -> Option<u32> {
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            let slot = head as u32;
            if slot == NONE {
                return None;
            }
            let next = self.next[slot as usize].load(Ordering::Relaxed);
            match self.head.compare_exchange_weak(head, bump(head, next), Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(slot),
                Err(now) => head = now,
            }
        }
    }

    /// Puts a taken slot back. What was written to the slot before is visible to the one who takes it next.
    #[inline]
    pub(crate) fn put(&self, slot: u32) {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            self.next[slot as usize].store(head as u32, Ordering::Relaxed);
            match self.head.compare_exchange_weak(head, bump(head, slot), Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// How many slots are free, if nobody else changes it.
    #[cfg(test)]
    fn len(&self) -> usize {
        let mut n = 0;
        let mut slot = self.head.load(Ordering::Acquire) as u32;
        while slot != NONE {
            n += 1;
            assert!(n <= self.next.len(), "a slot is on the stack once");
            slot = self.next[slot as usize].load(Ordering::Relaxed);
        }
        n
    }
}

#[inline]
fn bump(head: u64, slot: u32) -> u64 {
    ((head >> 32).wrapping_add(1) << 32) | u64::from(slot)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn each_slot_is_given_once() {
        let free = FreeList::new(3);
        let mut taken: Vec<_> = (0..3).map(|_| free.take().expect("three slots")).collect();
        assert_eq!(free.take(), None);
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2]);
        free.put(1);
        assert_eq!(free.take(), Some(1));
        assert_eq!(FreeList::new(0).take(), None);
    }

    #[test]
    fn threads_never_share_a_slot() {
        let free = FreeList::new(7);
        let held: Vec<_> = (0..7).map(|_| AtomicBool::new(false)).collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..20_000 {
                        let slots: Vec<_> = (0..round % 4).filter_map(|_| free.take()).collect();
                        for &slot in &slots {
                            assert!(!held[slot as usize].swap(true, Ordering::AcqRel), "slot {slot} is given twice");
                        }
                        for &slot in slots.iter().rev() {
                            held[slot as usize].store(false, Ordering::Release);
                            free.put(slot);
                        }
                    }
                });
            }
        });
        assert_eq!(free.len(), 7);
    }
}
