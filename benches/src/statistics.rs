//! Medians, and how sure they are.

/// How often the pairs are drawn anew for an interval.
const RESAMPLES: usize = 2000;

/// With fewer pairs no interval between the smallest and the largest of them holds with 95 % confidence: five values leave
/// their median out in 2 of 32 cases.
pub const LEAST_PAIRS: usize = 6;

/// A ratio of two arms from pairs that were measured in the same round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairedRatio {
    /// The median of the pairs' ratios.
    pub ratio: f64,
    /// Where that median lies with 95 % confidence, by bootstrap.
    pub ci95: [f64; 2],
    /// How many pairs there were.
    pub pairs: usize,
}

/// The middle value; `None` of nothing.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = *sorted.get(sorted.len().saturating_sub(1) / 2)?;
    Some((lower + upper) / 2.0)
}

/// The ratio of `a` to `b`, which belong together one by one. A pair in which either is absent, or the second is 0, does
/// not count. `None` if no pair counts.
pub fn paired_ratio(a: &[Option<f64>], b: &[Option<f64>], random: &mut fastrand::Rng) -> Option<PairedRatio> {
    let ratios: Vec<f64> =
        a.iter().zip(b).filter_map(|(a, b)| Some((*a)? / (*b)?)).filter(|ratio| ratio.is_finite()).collect();
    let ratio = median(&ratios)?;
    let mut drawn = vec![0.0; ratios.len()];
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .filter_map(|_| {
            drawn.iter_mut().for_each(|slot| *slot = ratios[random.usize(..ratios.len())]);
            median(&drawn)
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    let at = |share: f64| medians[((medians.len() - 1) as f64 * share).round() as usize];
    Some(PairedRatio { ratio, ci95: [at(0.025), at(0.975)], pairs: ratios.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_two() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn pairs_cancel_what_both_arms_suffered() {
        // The machine is twice as slow in every other pair; the arms differ by 10 %.
        let b: Vec<Option<f64>> = (0..20).map(|round| Some(if round % 2 == 0 { 100.0 } else { 200.0 })).collect();
        let a: Vec<Option<f64>> = b.iter().map(|value| value.map(|value| value * 1.1)).collect();
        let found = paired_ratio(&a, &b, &mut fastrand::Rng::with_seed(1)).unwrap();
        assert!((found.ratio - 1.1).abs() < 1e-9 && (found.ci95[1] - found.ci95[0]).abs() < 1e-9);
        assert_eq!(found.pairs, 20);
    }

    #[test]
    fn the_interval_covers_the_truth_about_as_often_as_it_says() {
        let mut random = fastrand::Rng::with_seed(7);
        let covered = (0..300)
            .filter(|_| {
                // True ratio 1.0, noise of ±30 %.
                let mut draw = || Some(0.7 + 0.6 * random.f64());
                let a: Vec<_> = (0..15).map(|_| draw()).collect();
                let found = paired_ratio(&a, &vec![Some(1.0); 15], &mut fastrand::Rng::with_seed(3)).unwrap();
                found.ci95[0] <= 1.0 && 1.0 <= found.ci95[1]
            })
            .count();
        assert!((270..=300).contains(&covered), "{covered} of 300");
    }

    #[test]
    fn five_pairs_cannot_hold_what_six_can() {
        // All values on one side of the truth: 2 in 2^n cases, which no interval between them covers.
        let missed = |pairs: usize| 2.0 / 2f64.powi(pairs as i32);
        assert!(missed(LEAST_PAIRS) < 0.05 && missed(LEAST_PAIRS - 1) > 0.05);
    }

    #[test]
    fn a_pair_without_a_partner_does_not_count() {
        let mut random = fastrand::Rng::with_seed(1);
        let found = paired_ratio(&[Some(2.0), None, Some(4.0)], &[Some(1.0), Some(1.0), None], &mut random).unwrap();
        assert_eq!((found.ratio, found.pairs), (2.0, 1));
        assert_eq!(paired_ratio(&[Some(1.0)], &[Some(0.0)], &mut random), None);
        assert_eq!(paired_ratio(&[], &[], &mut random), None);
    }
}
