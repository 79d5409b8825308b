//! The writing end of a ring.

use super::signal::{Armed, Tested};
use super::{FenceSite, Metadata, RingConfig, RingMemory, UnusableRing, Violation, Word, check_capacity};
use crate::abi::{CACHE_LINE, KIND_PAD, METADATA_LENGTH, NOT_ARMED, RECORD_HEADER_LENGTH, RecordHeader, record_length};
use core::sync::atomic::Ordering;
use zerocopy::IntoBytes;

/// Some bytes of a ring, as an offset from the start of its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Room for one record whose length is not known yet: the payload goes to `first`, and what does not fit to `rest`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Where the payload starts.
    pub first: Extent,
    /// Where it goes on, when the end of the ring is nearer than the largest record.
    pub rest: Option<Extent>,
}

/// The writing end of a ring. Reserve, fill, commit, as often as wanted; then publish, and test whether to notify.
#[derive(Debug)]
pub struct Producer<M> {
    memory: M,
    config: RingConfig,
    /// The next record goes here; private until published.
    next: u64,
    published: u64,
    /// The consumer's index as last read, checked.
    consumed: u64,
    space: Armed,
    data: Tested,
}

impl<M: RingMemory> Producer<M> {
    /// A producer over a ring whose indices both stand at `start` (0 after a reset).
    pub fn new(memory: M, config: RingConfig, start: u64) -> Result<Self, UnusableRing> {
        check_capacity(memory.capacity(), config.largest)?;
        Ok(Self {
            memory,
            config,
            next: start,
            published: start,
            consumed: start,
            space: Armed::new(Word::SpaceWantedAt, FenceSite::SpaceArmed),
            data: Tested::new(Word::WakeAt, FenceSite::DataPublished, start),
        })
    }

    /// The memory under the ring.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Bytes that were produced and that the consumer has not passed yet, as far as is known without a fresh look.
    pub fn in_flight(&self) -> u64 {
        self.next.wrapping_sub(self.consumed)
    }

    /// The index of the next record.
    pub fn position(&self) -> u64 {
        self.next
    }

    /// The consumer's index, freshly read.
    pub fn consumed(&mut self) -> Result<u64, Violation> {
        self.refresh()?;
        Ok(self.consumed)
    }

    /// Room for a record of up to `payload` bytes, or `None` if the ring has not that much space now.
    pub fn reserve(&mut self, payload: u64) -> Result<Option<Place>, Violation> {
        let need = record_length(payload);
        let tail = self.tail();
        let total = if tail >= need { need } else { tail.wrapping_add(need) };
        if payload > self.config.largest || !self.has_space(total)? {
            return Ok(None);
        }
        let start = self.offset().wrapping_add(RECORD_HEADER_LENGTH);
        if tail >= need {
            return Ok(Some(Place { first: Extent { offset: start, length: payload }, rest: None }));
        }
        // The rest goes where it will lie if the record has to move to the ring's start, so that only the first part
        // is ever copied.
        let first = tail.saturating_sub(RECORD_HEADER_LENGTH);
        let rest = Extent { offset: RECORD_HEADER_LENGTH.wrapping_add(first), length: payload.saturating_sub(first) };
        Ok(Some(Place { first: Extent { offset: start, length: first }, rest: Some(rest) }))
    }

    /// Makes the record in `place` final, `length` bytes long. It becomes visible with the next [`Self::publish`].
    pub fn commit(&mut self, place: Place, kind: u16, length: u64, metadata: &Metadata) {
        debug_assert!(length <= self.config.largest);
        if length > place.first.length {
            let tail = self.tail();
            if place.first.length > 0 {
                self.memory.copy_within(place.first.offset, RECORD_HEADER_LENGTH, place.first.length);
            }
            self.write_header(KIND_PAD, tail.saturating_sub(RECORD_HEADER_LENGTH), &[0; METADATA_LENGTH]);
            self.next = self.next.wrapping_add(tail);
        }
        self.write_header(kind, length, metadata);
        self.next = self.next.wrapping_add(record_length(length));
    }

    /// Writes a whole record, if there is space. Convenience for short records such as control messages.
    pub fn push(&mut self, kind: u16, payload: &[u8], metadata: &Metadata) -> Result<bool, Violation> {
        let length = payload.len() as u64;
        let Some(place) = self.reserve(length)? else { return Ok(false) };
        let (first, rest) = payload.split_at(payload.len().min(place.first.length as usize));
        self.memory.write(place.first.offset, first);
        if let Some(extent) = place.rest {
            self.memory.write(extent.offset, rest);
        }
        self.commit(place, kind, length, metadata);
        Ok(true)
    }

    /// Makes everything committed so far visible to the consumer. Returns whether there was anything.
    pub fn publish(&mut self) -> bool {
        if self.next == self.published {
            return false;
        }
        self.published = self.next;
        // Release: the consumer that reads this index must see the records in front of it.
        self.memory.store(Word::Produced, self.next, Ordering::Release);
        true
    }

    /// Whether the consumer wants to be notified of what was published since the last call. Once per drain pass.
    pub fn should_notify(&mut self) -> bool {
        self.data.test(&self.memory, self.published)
    }

    /// Asks for a notification once `payload` bytes more, and in any case half the ring, are free. Returns `true` if
    /// they are free already: then do not sleep.
    pub fn arm_space(&mut self, payload: u64) -> Result<bool, Violation> {
        let need = record_length(payload);
        let tail = self.tail();
        let total = if tail >= need { need } else { tail.wrapping_add(need) };
        let half = self.memory.capacity() >> 1;
        self.arm_space_until(self.memory.capacity().saturating_sub(total.max(half)))
    }

    /// Asks for a notification once at most `in_flight` bytes are on their way. Returns `true` if that is so already.
    pub fn arm_space_until(&mut self, in_flight: u64) -> Result<bool, Violation> {
        let in_flight = in_flight & !(CACHE_LINE.wrapping_sub(1));
        let target = self.next.wrapping_sub(in_flight);
        // "Passed `at`" means "reached `target`": indices are multiples of a cache line, and so is `at`, which
        // therefore never looks like NOT_ARMED.
        let at = target.wrapping_sub(CACHE_LINE);
        debug_assert!(at != NOT_ARMED);
        self.space.arm(&self.memory, at)?;
        self.refresh()?;
        Ok(self.in_flight() <= in_flight)
    }

    /// Asks for no notification about space.
    pub fn suppress_space(&mut self) {
        self.space.suppress(&self.memory, self.consumed);
    }

    fn has_space(&mut self, total: u64) -> Result<bool, Violation> {
        if self.memory.capacity().saturating_sub(self.in_flight()) >= total {
            return Ok(true);
        }
        self.refresh()?;
        Ok(self.memory.capacity().saturating_sub(self.in_flight()) >= total)
    }

    fn refresh(&mut self) -> Result<(), Violation> {
        // Acquire: the space must not be written to before the consumer's reads of it are done.
        let value = self.memory.load(Word::Consumed, Ordering::Acquire);
        let advance = value.wrapping_sub(self.consumed);
        if advance > self.published.wrapping_sub(self.consumed) || !value.is_multiple_of(CACHE_LINE) {
            return Err(Violation::ImpossibleIndex {
                word: Word::Consumed,
                value,
                low: self.consumed,
                high: self.published,
            });
        }
        self.consumed = value;
        Ok(())
    }

    fn write_header(&self, kind: u16, length: u64, metadata: &Metadata) {
        let header = RecordHeader {
            length: length as u32,
            kind,
            generation: self.config.generation,
            metadata: *metadata,
            ..RecordHeader::default()
        };
        self.memory.write(self.offset(), header.as_bytes());
    }

    fn offset(&self) -> u64 {
        self.next & self.memory.capacity().wrapping_sub(1)
    }

    fn tail(&self) -> u64 {
        self.memory.capacity().wrapping_sub(self.offset())
    }
}
