//! The rule by which one side decides whether the other wants to be woken.

use super::{FenceSite, RingMemory, Violation, Word};
use crate::abi::NOT_ARMED;
use core::sync::atomic::Ordering;

/// The waiting side: owns an arm word.
#[derive(Debug)]
pub(super) struct Armed {
    word: Word,
    fence: FenceSite,
    left: u64,
}

impl Armed {
    pub(super) fn new(word: Word, fence: FenceSite) -> Self {
        Self { word, fence, left: NOT_ARMED }
    }

    /// Asks to be notified once the peer's index passes `at`. The caller must look at the peer's index again, and may
    /// sleep only if that has not passed `at` by then.
    pub(super) fn arm(&mut self, memory: &impl RingMemory, at: u64) -> Result<(), Violation> {
        self.check(memory)?;
        self.left = at;
        // Relaxed: the fence below orders it before the caller's second look at the index.
        memory.store(self.word, at, Ordering::Relaxed);
        // Closes Dekker's race: the peer publishes, fences, reads this word; we write this word, fence, read its index.
        // Without the fence both could read the old value, and nobody would notify.
        memory.full_fence(self.fence);
        Ok(())
    }

    /// Asks for no notification. Writes nothing if the index has passed the word anyway, so that a busy ring costs no
    /// transfer of the cache line. A word that is not as it was left stays, so that the next [`Self::arm`] reports it.
    pub(super) fn suppress(&mut self, memory: &impl RingMemory, index: u64) {
        let pending = self.left != NOT_ARMED && !passed(index, self.left);
        if pending && self.check(memory).is_ok() {
            self.left = NOT_ARMED;
            // Relaxed: a peer that still sees the old value sends one notification too many, which is harmless.
            memory.store(self.word, NOT_ARMED, Ordering::Relaxed);
        }
    }

    fn check(&self, memory: &impl RingMemory) -> Result<(), Violation> {
        // Relaxed: only this side writes the word; another value is corruption.
        let found = memory.load(self.word, Ordering::Relaxed);
        if found == self.left {
            Ok(())
        } else {
            Err(Violation::OwnWordChanged { word: self.word, left: self.left, found })
        }
    }
}

/// The publishing side: reads the peer's arm word.
#[derive(Debug)]
pub(super) struct Tested {
    word: Word,
    fence: FenceSite,
    at: u64,
    unconditional: bool,
}

impl Tested {
    /// Starts at `at`; the first test says "notify", since nobody knows what the peer saw before a reset.
    pub(super) fn new(word: Word, fence: FenceSite, at: u64) -> Self {
        Self { word, fence, at, unconditional: true }
    }

    /// Whether the peer's arm word lies within what was published since the last test. The caller has stored `index`.
    pub(super) fn test(&mut self, memory: &impl RingMemory, index: u64) -> bool {
        if index == self.at && !self.unconditional {
            return false;
        }
        // Closes Dekker's race from the other side, see `Armed::arm`.
        memory.full_fence(self.fence);
        // Relaxed: ordered by the fence above.
        let armed_at = memory.load(self.word, Ordering::Relaxed);
        let crossed =
            armed_at != NOT_ARMED && index.wrapping_sub(armed_at).wrapping_sub(1) < index.wrapping_sub(self.at);
        self.at = index;
        core::mem::take(&mut self.unconditional) || crossed
    }
}

/// Whether `index` is beyond `at`, on a circle of 64 bits.
fn passed(index: u64, at: u64) -> bool {
    let ahead = index.wrapping_sub(at);
    ahead != 0 && ahead < 1 << 63
}
