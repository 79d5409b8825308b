//! The limit of bytes on their way, with scripted time.

use core::time::Duration;
use proptest::prelude::*;
use venet::pump::back_pressure::{BackPressure, LEAST, TARGET};

/// A ring so large that its size does not matter.
const LARGE: u64 = 1 << 30;

/// The other side, and the clock.
struct Script {
    state: BackPressure,
    now: Duration,
    taken: u64,
}

impl Script {
    fn new(most: u64) -> Self {
        Self { state: BackPressure::new(most), now: Duration::from_secs(5), taken: 0 }
    }

    /// The other side takes `rate` bytes per microsecond and always has more; it is looked at every `step`.
    fn busy(&mut self, rate: u64, duration: Duration, step: Duration) {
        let end = self.now + duration;
        while self.now < end {
            self.now += step;
            self.taken = self.taken.wrapping_add(rate * step.as_micros() as u64);
            self.state.observe(self.now, 100_000, self.taken);
        }
    }

    /// The other side has taken everything; now and then a small frame comes along.
    fn idle(&mut self, duration: Duration, step: Duration) {
        let end = self.now + duration;
        while self.now < end {
            self.now += step;
            self.taken = self.taken.wrapping_add(64);
            self.state.observe(self.now, 0, self.taken);
        }
    }
}

const STEP: Duration = Duration::from_micros(50);

/// Within two per cent.
fn near(found: u64, expected: u64) -> bool {
    found.abs_diff(expected) <= expected / 50
}

#[test]
fn the_limit_is_what_is_drained_in_500_microseconds() {
    assert_eq!(TARGET, Duration::from_micros(500));
    for rate in [20, 100, 1250, 12_500] {
        let mut script = Script::new(LARGE);
        script.busy(rate, Duration::from_millis(20), STEP);
        assert!(near(script.state.limit(), rate * 500), "{} at {rate} bytes a microsecond", script.state.limit());
    }
}

#[test]
fn the_limit_follows_a_rate_that_changes() {
    let mut script = Script::new(LARGE);
    for rate in [1000, 100, 4000, 50, 1000] {
        script.busy(rate, Duration::from_millis(20), STEP);
        assert!(near(script.state.limit(), rate * 500), "{} at {rate} bytes a microsecond", script.state.limit());
    }
}

#[test]
fn one_odd_measurement_does_not_decide() {
    let mut script = Script::new(LARGE);
    script.busy(1000, Duration::from_millis(20), STEP);
    // Nothing is taken for one period, as when the other side was scheduled away.
    script.busy(0, Duration::from_micros(250), STEP);
    assert!(script.state.limit() >= 250_000, "{}", script.state.limit());
}

#[test]
fn how_often_it_is_looked_at_does_not_matter() {
    for step in [1, 7, 50, 199, 200, 201, 1000, 5000] {
        let mut script = Script::new(LARGE);
        script.busy(1000, Duration::from_millis(200), Duration::from_micros(step));
        assert!(near(script.state.limit(), 500_000), "{} with a look every {step} us", script.state.limit());
    }
}

#[test]
fn idle_periods_do_not_lower_the_limit() {
    let mut script = Script::new(LARGE);
    script.busy(1000, Duration::from_millis(20), STEP);
    let loaded = script.state.limit();
    for step in [STEP, Duration::from_millis(1), Duration::from_millis(30), Duration::from_secs(2)] {
        script.idle(step * 100, step);
        assert!(script.state.limit() >= loaded, "{} after a look every {step:?}", script.state.limit());
    }
    // Nor does the one busy moment after a long rest, whose rate is that of the rest.
    script.now += Duration::from_secs(10);
    script.state.observe(script.now, 64, script.taken + 64);
    assert!(script.state.limit() >= loaded);
}

#[test]
fn traffic_that_never_fills_the_ring_raises_the_limit_at_most() {
    let mut script = Script::new(LARGE);
    script.busy(100, Duration::from_millis(20), STEP);
    let loaded = script.state.limit();
    // The other side is faster now, and done with everything each time that anybody looks.
    for _ in 0..1000 {
        script.now += STEP;
        script.taken += 1000 * 50;
        script.state.observe(script.now, 0, script.taken);
    }
    assert!(script.state.limit() > loaded);
    assert!(near(script.state.limit(), 500_000), "{}", script.state.limit());
}

#[test]
fn a_slow_reader_keeps_a_few_frames_on_their_way() {
    let mut script = Script::new(LARGE);
    script.busy(1, Duration::from_millis(50), STEP);
    assert_eq!(script.state.limit(), LEAST);
    script.busy(0, Duration::from_secs(1), STEP);
    assert_eq!(script.state.limit(), LEAST);
    // And is trusted again as soon as it reads.
    script.busy(1000, Duration::from_millis(20), STEP);
    assert!(near(script.state.limit(), 500_000), "{}", script.state.limit());
}

#[test]
fn a_fast_reader_gets_no_more_than_the_ring() {
    let mut script = Script::new(1 << 18);
    script.busy(100_000, Duration::from_millis(50), STEP);
    assert_eq!(script.state.limit(), 1 << 18);
}

#[test]
fn before_anything_was_measured_there_is_room_but_not_for_a_whole_ring() {
    for most in [1 << 18, 1 << 20, LARGE] {
        let limit = BackPressure::new(most).limit();
        assert!((LEAST..most).contains(&limit), "{limit} of {most}");
    }
}

#[test]
fn a_counter_that_wraps_is_none_that_fell() {
    let mut script = Script::new(LARGE);
    script.taken = u64::MAX - 5_000_000;
    script.state.observe(script.now, 100_000, script.taken);
    script.busy(1000, Duration::from_millis(20), STEP);
    assert!(near(script.state.limit(), 500_000), "{}", script.state.limit());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(2000), ..ProptestConfig::default() })]

    /// Whatever the other side and the clock do.
    #[test]
    fn the_limit_has_two_ends(
        most in prop_oneof![6u32..40].prop_map(|shift| 1u64 << shift),
        steps in proptest::collection::vec((any::<u32>(), any::<u32>(), 0u32..40, any::<bool>()), 0..60),
    ) {
        let mut script = Script::new(most);
        let least = LEAST.min(most);
        prop_assert!((least..=most).contains(&script.state.limit()));
        for (nanoseconds, bytes, shift, busy) in steps {
            script.now += Duration::from_nanos(u64::from(nanoseconds) << 4 >> (shift / 2));
            script.taken = script.taken.wrapping_add(u64::from(bytes) << shift);
            script.state.observe(script.now, if busy { 64 } else { 0 }, script.taken);
            prop_assert!((least..=most).contains(&script.state.limit()));
        }
        // Time that stands still or runs backwards is no reason to panic either.
        script.state.observe(script.now, 64, script.taken);
        script.state.observe(Duration::ZERO, 64, script.taken);
        script.state.observe(Duration::MAX, 64, 0);
        prop_assert!((least..=most).contains(&script.state.limit()));
    }
}
