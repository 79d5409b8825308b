//! Where things lie in a window: the host hands out space front to back, and takes none of it back. A ring keeps its place
//! for as long as the window lives, also over a reset.

use crate::abi::{CACHE_LINE, RING_WORDS_LENGTH, RingLocation, WindowHeader};
use core::mem::size_of;

/// Bytes of each control ring.
pub const CONTROL_RING_LENGTH: u64 = 16 * 1024;

/// The host's record of what is given away. Lives in private memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    size: u64,
    used: u64,
    verbs: RingLocation,
    events: RingLocation,
}

impl Layout {
    /// A layout with both control rings, in a window of `size` bytes. `None` if they do not fit.
    pub fn new(size: u64) -> Option<Self> {
        let unplaced = RingLocation::default();
        let mut layout = Self { size, used: size_of::<WindowHeader>() as u64, verbs: unplaced, events: unplaced };
        layout.verbs = layout.ring(CONTROL_RING_LENGTH)?;
        layout.events = layout.ring(CONTROL_RING_LENGTH)?;
        Some(layout)
    }

    /// The window that holds the control rings and rings of the given lengths. Bytes, a power of two.
    pub fn window_size(rings: &[u64]) -> u64 {
        let control = [CONTROL_RING_LENGTH; 2];
        let each = |length: &u64| length.saturating_add(RING_WORDS_LENGTH);
        let total = rings.iter().chain(&control).map(each).fold(0u64, u64::saturating_add);
        total.saturating_add(size_of::<WindowHeader>() as u64).saturating_add(4095).next_power_of_two()
    }

    /// The ring that carries verbs.
    pub fn verbs(&self) -> RingLocation {
        self.verbs
    }

    /// The ring that carries replies and events.
    pub fn events(&self) -> RingLocation {
        self.events
    }

    /// Space for a ring of `length` bytes, or `None` if the window is full.
    pub fn ring(&mut self, length: u64) -> Option<RingLocation> {
        let words = self.used.checked_next_multiple_of(CACHE_LINE)?;
        let data = words.checked_add(RING_WORDS_LENGTH)?;
        let end = data.checked_add(length)?;
        if end > self.size {
            return None;
        }
        self.used = end;
        Some(RingLocation { words, data, length })
    }
}
