//! Medians and ratios of pairs.

/// The median, minimum and maximum of some values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Spread {
    pub(super) min: f64,
    pub(super) median: f64,
    pub(super) max: f64,
}

impl Spread {
    /// # Panics
    ///
    /// When there are no values, or one is not a number.
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        assert!(!values.is_empty(), "a median needs values");
        values.sort_by(|a, b| a.partial_cmp(b).expect("times are numbers"));
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 };
        Self { min: values[0], median, max: values[values.len() - 1] }
    }
}

/// Times of two programs that were measured right after each other, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pair {
    pub(super) c: f64,
    pub(super) ours: f64,
}

/// What pairs say together. The ratio is the median of the pairs' ratios, and not the ratio of the medians: what disturbs a
/// machine for a while disturbs both halves of a pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Comparison {
    pub(super) pairs: usize,
    pub(super) c: Spread,
    pub(super) ours: Spread,
    /// Ours by C: below 1 we are faster.
    pub(super) ratio: Spread,
}

impl Comparison {
    /// # Panics
    ///
    /// When there are no pairs.
    pub(super) fn of(pairs: &[Pair]) -> Self {
        Self {
            pairs: pairs.len(),
            c: Spread::of(pairs.iter().map(|pair| pair.c)),
            ours: Spread::of(pairs.iter().map(|pair| pair.ours)),
            ratio: Spread::of(pairs.iter().map(|pair| pair.ours / pair.c)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_value_or_the_mean_of_two() {
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Spread { min: 1.0, median: 2.0, max: 3.0 });
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0]), Spread { min: 1.0, median: 2.5, max: 4.0 });
        assert_eq!(Spread::of([7.0]).median, 7.0);
    }

    #[test]
    fn a_disturbed_pair_does_not_change_the_ratio() {
        let pairs = [(10.0, 5.0), (100.0, 50.0), (12.0, 6.0)].map(|(c, ours)| Pair { c, ours });
        let comparison = Comparison::of(&pairs);
        assert_eq!(comparison.ratio, Spread { min: 0.5, median: 0.5, max: 0.5 });
        assert_eq!(comparison.c.median, 12.0);
        assert_eq!(comparison.ours.median, 6.0);
    }
}
