//! How many bytes may be on their way to the other side: as many as it drains in 500 µs.
//!
//! A sender that has copied a frame into the ring is done with it, so without a limit its socket would think that the
//! whole ring is the wire. The limit follows the rate at which the other side takes bytes, measured while it always had
//! some to take.

use core::time::Duration;

/// Drain time that may be queued.
pub const TARGET: Duration = Duration::from_micros(500);
/// The limit is never below this. Bytes; some dozens of small frames, so that a limit is no lock step.
pub const LEAST: u64 = 8 * 1024;

/// How long one measurement of the rate lasts.
const PERIOD: Duration = Duration::from_micros(200);

/// A longer one says nothing about the rate under load.
const LONGEST_MEASUREMENT: Duration = Duration::from_millis(20);

/// The limit of bytes on their way. Time is whatever the caller says, from any fixed point.
#[derive(Clone, Copy, Debug)]
pub struct BackPressure {
    most: u64,
    limit: u64,
    /// Bytes per millisecond.
    rate: u64,
    start: Duration,
    taken_at_start: u64,
    always_busy: bool,
}

impl BackPressure {
    /// No limit is known yet; `most` is the ring's size in bytes.
    pub fn new(most: u64) -> Self {
        let limit = (most / 4).max(LEAST.min(most));
        Self { most, limit, rate: 0, start: Duration::ZERO, taken_at_start: 0, always_busy: false }
    }

    /// Bytes that may be on their way.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Takes note of how many bytes are on their way, and how many were ever taken.
    pub fn observe(&mut self, now: Duration, in_flight: u64, taken: u64) {
        let elapsed = now.saturating_sub(self.start);
        // Before the rate is judged: whoever has nothing left may have waited since.
        self.always_busy &= in_flight > 0;
        if elapsed >= PERIOD {
            let bytes = taken.wrapping_sub(self.taken_at_start);
            let measured = bytes.saturating_mul(1_000_000).checked_div(elapsed.as_nanos() as u64).unwrap_or(0);
            if self.always_busy && elapsed < LONGEST_MEASUREMENT {
                self.rate =
                    if self.rate == 0 { measured } else { self.rate.saturating_mul(3).saturating_add(measured) / 4 };
            } else {
                // Idle in between: the other side is at least this fast.
                self.rate = self.rate.max(measured);
            }
            if self.rate > 0 {
                let bytes = self.rate.saturating_mul(TARGET.as_micros() as u64) / 1000;
                self.limit = bytes.clamp(LEAST.min(self.most), self.most);
            }
            (self.start, self.taken_at_start, self.always_busy) = (now, taken, in_flight > 0);
        }
    }
}
