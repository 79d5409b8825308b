//! What is counted, per queue and direction. Each counter has one writer, the pump; anybody may read.

use core::sync::atomic::{AtomicU64, Ordering};
use crossbeam_utils::CachePadded;
use serde::{Deserialize, Serialize};

/// Why a frame was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DropReason {
    /// Shorter than an Ethernet header.
    TooShort,
    /// Longer than MTU, Ethernet header and tag allow; or cut into segments that are.
    TooLong,
    /// More than one VLAN tag.
    DoubleTagged,
    /// The offload header does not describe the frame.
    BadOffload,
    /// The frame needs an offload that was not agreed on.
    OffloadNotNegotiated,
    /// The port refused the frame.
    PortRefused,
    /// The port is gone or down.
    PortDown,
    /// The frame waited in the port since before the link came up.
    Stale,
}

/// All drop reasons.
pub const DROP_REASONS: [DropReason; 8] = [
    DropReason::TooShort,
    DropReason::TooLong,
    DropReason::DoubleTagged,
    DropReason::BadOffload,
    DropReason::OffloadNotNegotiated,
    DropReason::PortRefused,
    DropReason::PortDown,
    DropReason::Stale,
];

/// A counter with one writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds. Only the one writer may call this.
    pub fn add(&self, count: u64) {
        // Relaxed: a statistic; nothing is ordered by it. Load and store suffice with one writer.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    /// The count.
    pub fn value(&self) -> u64 {
        // Relaxed: as above.
        self.0.load(Ordering::Relaxed)
    }
}

/// Counters of one direction.
#[derive(Debug, Default)]
pub struct Direction {
    /// Frames passed on; a super-frame counts as one.
    pub frames: Counter,
    /// Their bytes.
    pub bytes: Counter,
    /// Frames on a wire: a super-frame counts as many as it is to be cut into.
    pub segments: Counter,
    /// Bytes in frames that are longer than the MTU and its headers.
    pub super_frame_bytes: Counter,
    /// Notifications sent to the other side.
    pub notifications_sent: Counter,
    /// Times that something was published and no notification was needed.
    pub notifications_suppressed: Counter,
    /// Drain passes that ended because a budget was used up.
    pub budget_stops: Counter,
    drops: [Counter; DROP_REASONS.len()],
}

impl Direction {
    /// Counts a dropped frame.
    pub fn dropped(&self, reason: DropReason) {
        self.dropped_many(reason, 1);
    }

    /// Counts dropped frames.
    pub fn dropped_many(&self, reason: DropReason, count: u64) {
        if let Some(counter) = self.drops.get(reason as usize) {
            counter.add(count);
        }
    }

    /// Frames dropped for a reason.
    pub fn drops(&self, reason: DropReason) -> u64 {
        self.drops.get(reason as usize).map_or(0, Counter::value)
    }
}

/// Counters of one queue pair.
#[derive(Debug, Default)]
pub struct Counters {
    /// From the ring to the port.
    pub from_ring: CachePadded<Direction>,
    /// From the port to the ring.
    pub to_ring: CachePadded<Direction>,
    /// Notifications that woke the pump.
    pub notifications_received: Counter,
    /// Times that the pump slept and was woken.
    pub wake_ups: Counter,
    /// Times that the port took no more and the pump waited for it.
    pub port_full: Counter,
    /// Times that the other side's ring had no space and the pump waited for it.
    pub ring_full: Counter,
    /// Times that the limit of bytes on their way was reached.
    pub back_pressure: Counter,
    /// Times that the other side broke the ring protocol, which ends the pump.
    pub violations: Counter,
}

/// A copy of a [`Direction`], to be shown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectionValues {
    /// See [`Direction::frames`].
    pub frames: u64,
    /// See [`Direction::bytes`].
    pub bytes: u64,
    /// See [`Direction::segments`].
    pub segments: u64,
    /// See [`Direction::super_frame_bytes`].
    pub super_frame_bytes: u64,
    /// See [`Direction::notifications_sent`].
    pub notifications_sent: u64,
    /// See [`Direction::notifications_suppressed`].
    pub notifications_suppressed: u64,
    /// See [`Direction::budget_stops`].
    pub budget_stops: u64,
    /// Dropped frames by reason.
    pub drops: std::collections::BTreeMap<DropReason, u64>,
}

/// A copy of [`Counters`], to be shown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Values {
    /// From the ring to the port.
    pub from_ring: DirectionValues,
    /// From the port to the ring.
    pub to_ring: DirectionValues,
    /// See [`Counters::notifications_received`].
    pub notifications_received: u64,
    /// See [`Counters::wake_ups`].
    pub wake_ups: u64,
    /// See [`Counters::port_full`].
    pub port_full: u64,
    /// See [`Counters::ring_full`].
    pub ring_full: u64,
    /// See [`Counters::back_pressure`].
    pub back_pressure: u64,
    /// See [`Counters::violations`].
    pub violations: u64,
}

impl From<&Direction> for DirectionValues {
    fn from(from: &Direction) -> Self {
        Self {
            frames: from.frames.value(),
            bytes: from.bytes.value(),
            segments: from.segments.value(),
            super_frame_bytes: from.super_frame_bytes.value(),
            notifications_sent: from.notifications_sent.value(),
            notifications_suppressed: from.notifications_suppressed.value(),
            budget_stops: from.budget_stops.value(),
            drops: DROP_REASONS.iter().map(|&reason| (reason, from.drops(reason))).collect(),
        }
    }
}

impl From<&Counters> for Values {
    fn from(from: &Counters) -> Self {
        Self {
            from_ring: DirectionValues::from(&*from.from_ring),
            to_ring: DirectionValues::from(&*from.to_ring),
            notifications_received: from.notifications_received.value(),
            wake_ups: from.wake_ups.value(),
            port_full: from.port_full.value(),
            ring_full: from.ring_full.value(),
            back_pressure: from.back_pressure.value(),
            violations: from.violations.value(),
        }
    }
}
