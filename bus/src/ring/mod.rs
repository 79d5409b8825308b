//! The ioq: a ring of variable-length records with one producer, one consumer, and a signal for each of them.
//!
//! Both indices count bytes, run freely over 64 bits and never wrap to the ring's size. A record is contiguous, starts
//! on a cache line and carries its header in front; a PAD record fills the end of the ring where a record does not fit.
//! Space is free as soon as the consumer's index has passed it. `docs/wire.md` has the whole format.
//!
//! **Who arms when.** Data: the consumer calls [`Consumer::arm`] when it found nothing and is about to sleep, and
//! sleeps only if that returned `false`; it calls [`Consumer::suppress`] when it wakes. The producer calls
//! [`Producer::publish`] and then [`Producer::should_notify`], once per drain pass. Space: the same with the roles
//! exchanged ([`Producer::arm_space`], [`Producer::suppress_space`], [`Consumer::commit`],
//! [`Consumer::should_notify`]). There is no rescue timer: a lost wake-up would be a stall, and the model in
//! `tests/ring_model.rs` shows that there is none.
//!
//! Nothing in here does I/O or reads a clock, and no word that the peer writes is used before it was checked.

mod consumer;
mod producer;
mod signal;

pub use consumer::{Consumer, Record};
pub use producer::{Extent, Place, Producer};

use crate::abi::{CACHE_LINE, METADATA_LENGTH};
use core::sync::atomic::Ordering;
use thiserror::Error;

/// The four shared words of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// The producer's index. Only the producer writes it.
    Produced,
    /// The consumer's index. Only the consumer writes it.
    Consumed,
    /// The consumer wants a notification once `produced` passes this. Only the consumer writes it.
    WakeAt,
    /// The producer wants a notification once `consumed` passes this. Only the producer writes it.
    SpaceWantedAt,
}

impl Word {
    /// Offset of the word from the start of the ring's control words.
    pub const fn offset(self) -> u64 {
        match self {
            Word::Produced => 0,
            Word::Consumed => CACHE_LINE,
            Word::WakeAt => 2 * CACHE_LINE,
            Word::SpaceWantedAt => 3 * CACHE_LINE,
        }
    }
}

/// The places of the four full fences, so that a model can leave each of them out and show what breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceSite {
    /// Producer, between publishing `produced` and reading `wake-at`.
    DataPublished,
    /// Consumer, between writing `wake-at` and reading `produced` again.
    DataArmed,
    /// Consumer, between publishing `consumed` and reading `space-wanted-at`.
    SpacePublished,
    /// Producer, between writing `space-wanted-at` and reading `consumed` again.
    SpaceArmed,
}

/// The memory that a ring lies in. The production type is [`crate::window::WindowRing`]; tests have others.
pub trait RingMemory {
    /// Bytes of records, a power of two.
    fn capacity(&self) -> u64;
    /// Loads one of the shared words.
    fn load(&self, word: Word, order: Ordering) -> u64;
    /// Stores one of the shared words.
    fn store(&self, word: Word, value: u64, order: Ordering);
    /// A sequentially consistent fence.
    fn full_fence(&self, site: FenceSite);
    /// Copies out of the records. The caller guarantees `offset + into.len() <= capacity`; what lies beyond is not read.
    fn read(&self, offset: u64, into: &mut [u8]);
    /// Copies into the records. The caller guarantees `offset + from.len() <= capacity`; what lies beyond is not written.
    fn write(&self, offset: u64, from: &[u8]);
    /// Moves bytes within the records (never overlapping).
    fn copy_within(&self, from: u64, to: u64, length: u64);
}

/// What the peer did to a ring that the protocol does not allow. The consequence is always the same: the connection is
/// quarantined, and a reset brings it back.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Violation {
    /// The peer's index went backwards, lies beyond what the ring holds, or is not on a cache line.
    #[error("the peer's {word:?} index {value:#x} is impossible (expected {low:#x} to {high:#x}, a multiple of 64)")]
    ImpossibleIndex {
        /// Which index.
        word: Word,
        /// What the peer wrote.
        value: u64,
        /// Lowest value that would have been legal.
        low: u64,
        /// Highest value that would have been legal.
        high: u64,
    },
    /// A record is longer than the largest that was agreed on, or reaches past the producer's index or the ring's end.
    #[error("a record of {length} bytes at index {index:#x} is longer than {limit}")]
    RecordTooLong {
        /// Where the record starts.
        index: u64,
        /// Its payload in bytes, as the peer wrote it.
        length: u64,
        /// What would have been legal.
        limit: u64,
    },
    /// A PAD record that does not end exactly where the ring ends.
    #[error("the padding at index {index:#x} is {length} bytes long and does not end at the ring's end")]
    CrookedPad {
        /// Where the record starts.
        index: u64,
        /// Its payload in bytes, as the peer wrote it.
        length: u64,
    },
    /// A kind of record that this ring does not carry.
    #[error("a record of unknown kind {kind} at index {index:#x}")]
    UnknownKind {
        /// Where the record starts.
        index: u64,
        /// The kind, as the peer wrote it.
        kind: u16,
    },
    /// A word that only this side writes is not as it was left.
    #[error("our own {word:?} word was changed from {left:#x} to {found:#x}")]
    OwnWordChanged {
        /// Which word.
        word: Word,
        /// What this side wrote last.
        left: u64,
        /// What is there now.
        found: u64,
    },
}

/// How a ring was set up: what both ends must agree on besides the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingConfig {
    /// Largest legal payload in bytes.
    pub largest: u64,
    /// Records of another generation are skipped.
    pub generation: u32,
}

/// A ring that cannot work.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error(
    "a ring of {capacity} bytes cannot carry records of {largest} bytes: it must be a power of two of at least {needed} bytes"
)]
pub struct UnusableRing {
    /// Bytes of records.
    pub capacity: u64,
    /// Largest payload.
    pub largest: u64,
    /// The least that would do.
    pub needed: u64,
}

/// Checks that an empty ring of `capacity` bytes can take every legal record from every offset: padding and record
/// together are less than two of the largest records.
pub fn check_capacity(capacity: u64, largest: u64) -> Result<(), UnusableRing> {
    let needed = crate::abi::record_length(largest).saturating_mul(2);
    if capacity.is_power_of_two() && capacity >= needed.max(2 * CACHE_LINE) {
        Ok(())
    } else {
        Err(UnusableRing { capacity, largest, needed })
    }
}

/// Opaque metadata of a record.
pub type Metadata = [u8; METADATA_LENGTH];
