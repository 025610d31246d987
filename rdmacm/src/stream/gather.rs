//! Bytes to be written, from several slices.

use std::io::IoSlice;

/// What is left to be written of some slices.
#[derive(Debug)]
pub(super) struct Gather<'a, 'b> {
    slices: &'a [IoSlice<'b>],
    /// Bytes of the first slice that were taken.
    skip: usize,
    left: usize,
}

impl<'a, 'b> Gather<'a, 'b> {
    pub(super) fn new(slices: &'a [IoSlice<'b>]) -> Self {
        let left = slices.iter().fold(0_usize, |sum, slice| sum.saturating_add(slice.len()));
        Self { slices, skip: 0, left }
    }

    /// Bytes that were not taken.
    #[inline]
    pub(super) fn left(&self) -> usize {
        self.left
    }

    /// Takes the next `len` bytes, at most what is left, and hands them to `sink` in pieces, with the place of each from 0.
    pub(super) fn take<E>(&mut self, len: usize, mut sink: impl FnMut(usize, &[u8]) -> Result<(), E>) -> Result<(), E> {
        let mut done = 0;
        while done < len
            && let Some((first, rest)) = self.slices.split_first()
        {
            let piece = &first[self.skip..];
            let piece = &piece[..piece.len().min(len - done)];
            if !piece.is_empty() {
                sink(done, piece)?;
            }
            done += piece.len();
            self.skip += piece.len();
            self.left -= piece.len();
            if self.skip == first.len() {
                (self.slices, self.skip) = (rest, 0);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn all_bytes_come_once_and_in_order(
            slices in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..8), sizes in prop::collection::vec(0..30_usize, 0..20),
        ) {
            let whole = slices.concat();
            let io: Vec<_> = slices.iter().map(|slice| IoSlice::new(slice)).collect();
            let mut gather = Gather::new(&io);
            let mut out = Vec::new();
            for size in sizes.into_iter().chain([usize::MAX]) {
                let start = out.len();
                let expected = size.min(gather.left());
                gather.take(size, |at, piece| {
                    assert_eq!(start + at, out.len());
                    out.extend_from_slice(piece);
                    Ok::<_, ()>(())
                }).expect("the sink takes all");
                prop_assert_eq!(out.len() - start, expected);
            }
            prop_assert_eq!(out, whole);
            prop_assert_eq!(gather.left(), 0);
        }
    }
}
