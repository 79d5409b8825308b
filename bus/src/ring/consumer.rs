//! The reading end of a ring.

use super::producer::Extent;
use super::signal::{Armed, Tested};
use super::{FenceSite, Metadata, RingConfig, RingMemory, UnusableRing, Violation, Word, check_capacity};
use crate::abi::{
    CACHE_LINE, KIND_INTERFACE_FIRST, KIND_MESSAGE, KIND_PAD, RECORD_HEADER_LENGTH, RecordHeader, record_length,
};
use core::sync::atomic::Ordering;
use zerocopy::{FromZeros, IntoBytes};

/// A record whose header was copied and checked. The payload is still in the ring, and the peer can still change it:
/// copy what must be judged before judging it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// What kind of record it is; never PAD.
    pub kind: u16,
    /// Where the payload lies: inside the ring, contiguous.
    pub payload: Extent,
    /// The metadata, as the peer wrote it: an allegation.
    pub metadata: Metadata,
    end: u64,
}

/// The reading end of a ring. Peek and advance, as often as wanted; then commit, and test whether to notify.
///
/// The position is private until [`Self::commit`]: [`Self::rewind`] puts everything back that was taken since.
#[derive(Debug)]
pub struct Consumer<M> {
    memory: M,
    config: RingConfig,
    next: u64,
    committed: u64,
    /// The producer's index as last read, checked.
    produced: u64,
    data: Armed,
    space: Tested,
}

impl<M: RingMemory> Consumer<M> {
    /// A consumer over a ring whose indices both stand at `start` (0 after a reset).
    pub fn new(memory: M, config: RingConfig, start: u64) -> Result<Self, UnusableRing> {
        check_capacity(memory.capacity(), config.largest)?;
        Ok(Self {
            memory,
            config,
            next: start,
            committed: start,
            produced: start,
            data: Armed::new(Word::WakeAt, FenceSite::DataArmed),
            space: Tested::new(Word::SpaceWantedAt, FenceSite::SpacePublished, start),
        })
    }

    /// The memory under the ring.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The index of the next record to take.
    pub fn position(&self) -> u64 {
        self.next
    }

    /// The next record, or `None` if there is none now. Steps over padding and over records of another generation.
    pub fn peek(&mut self) -> Result<Option<Record>, Violation> {
        loop {
            if self.next == self.produced && !self.refresh()? {
                return Ok(None);
            }
            let (header, available) = self.read_header();
            let length = u64::from(header.length);
            let total = record_length(length);
            if header.kind == KIND_PAD {
                let tail = self.tail();
                if length.wrapping_add(RECORD_HEADER_LENGTH) != tail || tail > available {
                    return Err(Violation::CrookedPad { index: self.next, length });
                }
                self.next = self.next.wrapping_add(tail);
                continue;
            }
            if header.kind != KIND_MESSAGE && header.kind < KIND_INTERFACE_FIRST {
                return Err(Violation::UnknownKind { index: self.next, kind: header.kind });
            }
            let limit = self.config.largest.min(self.tail().min(available).saturating_sub(RECORD_HEADER_LENGTH));
            if length > limit || total > self.tail().min(available) {
                return Err(Violation::RecordTooLong { index: self.next, length, limit });
            }
            let end = self.next.wrapping_add(total);
            if header.generation != self.config.generation {
                self.next = end;
                continue;
            }
            let offset = self.offset().wrapping_add(RECORD_HEADER_LENGTH);
            let payload = Extent { offset, length };
            return Ok(Some(Record { kind: header.kind, payload, metadata: header.metadata, end }));
        }
    }

    /// Takes the record that the last [`Self::peek`] returned.
    pub fn advance(&mut self, record: &Record) {
        self.next = record.end;
    }

    /// Puts back everything that was taken since the last [`Self::commit`].
    pub fn rewind(&mut self) {
        self.next = self.committed;
    }

    /// Copies a record's payload, or as much of it as fits; returns how many bytes.
    pub fn copy_payload(&self, record: &Record, into: &mut [u8]) -> usize {
        let length = into.len().min(record.payload.length as usize);
        if let Some(target) = into.get_mut(..length) {
            self.memory.read(record.payload.offset, target);
        }
        length
    }

    /// Gives the space of everything taken so far back to the producer. Returns whether there was any.
    pub fn commit(&mut self) -> bool {
        if self.next == self.committed {
            return false;
        }
        self.committed = self.next;
        // Release: the producer that reads this index may overwrite the records; our reads of them come first.
        self.memory.store(Word::Consumed, self.next, Ordering::Release);
        true
    }

    /// Whether the producer wants to be notified of the space freed since the last call. Once per drain pass.
    pub fn should_notify(&mut self) -> bool {
        self.space.test(&self.memory, self.committed)
    }

    /// Whether a record waits, by a fresh look.
    pub fn has_work(&mut self) -> Result<bool, Violation> {
        Ok(self.next != self.produced || self.refresh()?)
    }

    /// Asks for a notification of the next record. Returns `true` if one is there already: then do not sleep.
    pub fn arm(&mut self) -> Result<bool, Violation> {
        self.data.arm(&self.memory, self.next)?;
        self.has_work()
    }

    /// Asks for no notification.
    pub fn suppress(&mut self) {
        self.data.suppress(&self.memory, self.produced);
    }

    fn refresh(&mut self) -> Result<bool, Violation> {
        // Acquire: the records in front of the index must be seen as the producer wrote them.
        let value = self.memory.load(Word::Produced, Ordering::Acquire);
        let advance = value.wrapping_sub(self.produced);
        let room = self.memory.capacity().saturating_sub(self.produced.wrapping_sub(self.committed));
        if advance > room || !value.is_multiple_of(CACHE_LINE) {
            return Err(Violation::ImpossibleIndex {
                word: Word::Produced,
                value,
                low: self.produced,
                high: self.committed.wrapping_add(self.memory.capacity()),
            });
        }
        self.produced = value;
        Ok(self.next != value)
    }

    /// The header at the next index, and how many bytes from there on were published.
    fn read_header(&self) -> (RecordHeader, u64) {
        let mut header = RecordHeader::new_zeroed();
        self.memory.read(self.offset(), header.as_mut_bytes());
        (header, self.produced.wrapping_sub(self.next))
    }

    fn offset(&self) -> u64 {
        self.next & self.memory.capacity().wrapping_sub(1)
    }

    fn tail(&self) -> u64 {
        self.memory.capacity().wrapping_sub(self.offset())
    }
}
