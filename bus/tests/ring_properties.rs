//! Properties of the ring over real window memory: what comes out is what went in, from every offset, for every size.

use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vbus::abi::{KIND_INTERFACE_FIRST, METADATA_LENGTH, NOT_ARMED, RING_WORDS_LENGTH, RingLocation, record_length};
use vbus::ring::{Consumer, Producer, RingConfig, RingMemory, Violation, Word};
use vbus::window::{Window, WindowRing};

const KIND: u16 = KIND_INTERFACE_FIRST;

struct Fixture {
    window: Arc<Window>,
    location: RingLocation,
    config: RingConfig,
}

impl Fixture {
    fn new(capacity: u64, largest: u64) -> Self {
        let window = Arc::new(Window::create((capacity + 4096).next_power_of_two()).unwrap());
        let location = RingLocation { words: 256, data: 256 + RING_WORDS_LENGTH, length: capacity };
        Self { window, location, config: RingConfig { largest, generation: 7 } }
    }

    fn memory(&self) -> WindowRing {
        WindowRing::new(Arc::clone(&self.window), self.location).unwrap()
    }

    fn ends_at(&self, start: u64) -> (Producer<WindowRing>, Consumer<WindowRing>) {
        let memory = self.memory();
        memory.clear();
        memory.store(Word::Produced, start, Ordering::Relaxed);
        memory.store(Word::Consumed, start, Ordering::Relaxed);
        (
            Producer::new(self.memory(), self.config, start).unwrap(),
            Consumer::new(self.memory(), self.config, start).unwrap(),
        )
    }
}

fn pattern(seed: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (seed.wrapping_mul(31).wrapping_add(at.wrapping_mul(7)) >> 1) as u8).collect()
}

fn take(consumer: &mut Consumer<WindowRing>) -> Option<(Vec<u8>, [u8; METADATA_LENGTH])> {
    let record = consumer.peek().unwrap()?;
    let mut bytes = vec![0; record.payload.length as usize];
    consumer.copy_payload(&record, &mut bytes);
    consumer.advance(&record);
    Some((bytes, record.metadata))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(400), ..ProptestConfig::default() })]

    /// Any interleaving of pushes and takes, near any index, gives back the records in order and whole.
    #[test]
    fn what_comes_out_is_what_went_in(
        capacity_shift in 10u32..15,
        start_lines in any::<u64>(),
        near_overflow in any::<bool>(),
        steps in prop::collection::vec((any::<bool>(), 0u64..4096), 1..300),
    ) {
        let capacity = 1u64 << capacity_shift;
        let largest = capacity / 2 - 32;
        let fixture = Fixture::new(capacity, largest);
        let start = if near_overflow { (start_lines % 64).wrapping_mul(64).wrapping_neg() } else { start_lines & !63 };
        let (mut producer, mut consumer) = fixture.ends_at(start);
        let mut sent = std::collections::VecDeque::new();
        for (number, (push, size)) in steps.into_iter().enumerate() {
            if push {
                let bytes = pattern(number as u64, (size % (largest + 1)) as usize);
                let metadata = [number as u8; METADATA_LENGTH];
                if producer.push(KIND, &bytes, &metadata).unwrap() {
                    producer.publish();
                    sent.push_back((bytes, metadata));
                } else {
                    prop_assert!(!sent.is_empty(), "an empty ring refused a legal record");
                }
            } else {
                prop_assert_eq!(take(&mut consumer), sent.pop_front());
                consumer.commit();
            }
        }
        while let Some(expected) = sent.pop_front() {
            prop_assert_eq!(take(&mut consumer), Some(expected));
        }
        prop_assert_eq!(take(&mut consumer), None);
    }

    /// Reserving more than is used in the end, as for a frame of unknown length, gives the same records.
    #[test]
    fn a_record_may_be_shorter_than_its_reservation(
        lines in 0u64..64,
        lengths in prop::collection::vec(0usize..1900, 1..60),
    ) {
        let fixture = Fixture::new(4096, 1984);
        let (mut producer, mut consumer) = fixture.ends_at(lines * 64);
        for (number, length) in lengths.into_iter().enumerate() {
            let bytes = pattern(number as u64, length);
            let place = producer.reserve(1984).unwrap().expect("an empty ring has room");
            let (first, rest) = bytes.split_at(length.min(place.first.length as usize));
            producer.memory().write(place.first.offset, first);
            if let Some(extent) = place.rest {
                prop_assert!(extent.length + place.first.length >= 1984);
                producer.memory().write(extent.offset, rest);
            }
            producer.commit(place, KIND, length as u64, &[1; METADATA_LENGTH]);
            producer.publish();
            prop_assert_eq!(take(&mut consumer), Some((bytes, [1; METADATA_LENGTH])));
            consumer.commit();
        }
    }
}

/// Exhaustive where it is small: an empty ring takes every legal record from every offset.
#[test]
fn an_empty_ring_makes_progress_from_every_offset() {
    let fixture = Fixture::new(1024, 480);
    for line in 0..16 {
        for length in 0..=480 {
            for start in [line * 64, (line * 64u64).wrapping_sub(1024)] {
                let (mut producer, mut consumer) = fixture.ends_at(start);
                let bytes = pattern(length, length as usize);
                assert!(producer.push(KIND, &bytes, &[0; 12]).unwrap(), "{length} bytes at {start:#x}");
                producer.publish();
                assert_eq!(take(&mut consumer).unwrap().0, bytes);
            }
        }
    }
}

#[test]
fn records_may_fill_the_ring_exactly_from_every_offset() {
    let fixture = Fixture::new(1024, 480);
    for line in 0..16u64 {
        let (mut producer, mut consumer) = fixture.ends_at(line * 64);
        let mut count = 0;
        while producer.push(KIND, &pattern(count, 32), &[0; 12]).unwrap() {
            count += 1;
        }
        assert_eq!((count, producer.in_flight()), (16, 1024));
        producer.publish();
        for number in 0..count {
            assert_eq!(take(&mut consumer).unwrap().0, pattern(number, 32));
        }
        assert_eq!(take(&mut consumer), None);
    }
}

#[test]
fn rings_that_could_hang_are_refused() {
    for (capacity, largest) in [(1000, 100), (1024, 481), (0, 0), (64, 0), (512, 1024)] {
        let memory = Fixture::new(1024, 1).memory();
        let refused = vbus::ring::check_capacity(capacity, largest).unwrap_err();
        assert!(refused.to_string().contains("power of two"), "{refused}");
        drop(memory);
    }
}

#[test]
fn a_taken_record_can_be_put_back() {
    let fixture = Fixture::new(1024, 128);
    let (mut producer, mut consumer) = fixture.ends_at(0);
    for number in 0..3 {
        producer.push(KIND, &pattern(number, 100), &[0; 12]).unwrap();
    }
    producer.publish();
    assert_eq!(take(&mut consumer).unwrap().0, pattern(0, 100));
    consumer.commit();
    assert_eq!(take(&mut consumer).unwrap().0, pattern(1, 100));
    consumer.rewind();
    assert_eq!(take(&mut consumer).unwrap().0, pattern(1, 100));
    assert_eq!(take(&mut consumer).unwrap().0, pattern(2, 100));
}

#[test]
fn one_notification_covers_everything_while_the_consumer_is_awake() {
    let fixture = Fixture::new(4096, 128);
    let (mut producer, mut consumer) = fixture.ends_at(0);
    let mut push = || {
        producer.push(KIND, &[0; 64], &[0; 12]).unwrap();
        producer.publish();
        producer.should_notify()
    };
    assert!(push(), "after a reset the first test is unconditional");
    assert!(!push(), "nobody armed");
    while take(&mut consumer).is_some() {}
    consumer.commit();
    assert!(!consumer.arm().unwrap(), "nothing waits");
    assert!(push(), "the armed record");
    assert!(!push() && !push(), "one notification is enough");
    while take(&mut consumer).is_some() {}
    consumer.commit();
    assert!(!consumer.arm().unwrap());
    consumer.suppress();
    assert!(!push(), "suppressed");
}

#[test]
fn impossible_indices_are_violations() {
    let fixture = Fixture::new(1024, 480);
    for bad in [1, 63, 1024 + 64, u64::MAX, u64::MAX - 63, 1 << 63] {
        let (mut producer, mut consumer) = fixture.ends_at(0);
        fixture.memory().store(Word::Produced, bad, Ordering::Relaxed);
        assert!(matches!(consumer.peek(), Err(Violation::ImpossibleIndex { word: Word::Produced, .. })), "{bad:#x}");
        fixture.memory().store(Word::Consumed, bad, Ordering::Relaxed);
        assert!(
            matches!(producer.consumed(), Err(Violation::ImpossibleIndex { word: Word::Consumed, .. })),
            "{bad:#x}"
        );
    }
}

#[test]
fn impossible_records_are_violations() {
    let fixture = Fixture::new(1024, 480);
    let cases: [(u32, u16, &str); 8] = [
        (481, KIND, "longer"),
        (u32::MAX, KIND, "longer"),
        (100, KIND, "longer"),
        (0, 0, "unknown kind"),
        (0, 5, "unknown kind"),
        (0, 1, "padding"),
        (u32::MAX, 1, "padding"),
        (1024 - 32, 1, "padding"),
    ];
    for (length, kind, complaint) in cases {
        let (_, mut consumer) = fixture.ends_at(0);
        let memory = fixture.memory();
        memory.write(0, &length.to_le_bytes());
        memory.write(4, &kind.to_le_bytes());
        memory.write(8, &7u32.to_le_bytes());
        memory.store(Word::Produced, record_length(0).max(64), Ordering::Release);
        let violation = consumer.peek().unwrap_err().to_string();
        assert!(violation.contains(complaint), "{length} bytes of kind {kind}: {violation}");
    }
}

#[test]
fn records_of_another_generation_are_stepped_over() {
    let fixture = Fixture::new(1024, 480);
    let (mut producer, _) = fixture.ends_at(0);
    producer.push(KIND, &[1; 10], &[0; 12]).unwrap();
    producer.publish();
    let other = RingConfig { generation: 8, ..fixture.config };
    let mut consumer = Consumer::new(fixture.memory(), other, 0).unwrap();
    assert_eq!(take(&mut consumer), None);
    assert!(consumer.commit(), "its space is free again");
}

#[test]
fn an_arm_word_that_somebody_else_wrote_is_reported() {
    let fixture = Fixture::new(1024, 480);
    let (mut producer, mut consumer) = fixture.ends_at(0);
    consumer.arm().unwrap();
    fixture.memory().store(Word::WakeAt, NOT_ARMED - 5, Ordering::Relaxed);
    assert!(matches!(consumer.arm(), Err(Violation::OwnWordChanged { word: Word::WakeAt, .. })));
    producer.arm_space(100).unwrap();
    fixture.memory().store(Word::SpaceWantedAt, 0, Ordering::Relaxed);
    assert!(matches!(producer.arm_space(100), Err(Violation::OwnWordChanged { word: Word::SpaceWantedAt, .. })));
}

#[test]
fn space_is_asked_for_by_the_half_ring() {
    let fixture = Fixture::new(1024, 32);
    let (mut producer, mut consumer) = fixture.ends_at(0);
    while producer.push(KIND, &[0; 32], &[0; 12]).unwrap() {}
    producer.publish();
    assert!(!producer.arm_space(32).unwrap());
    consumer.peek().unwrap();
    assert!(!consumer.should_notify() || consumer.position() == 0);
    let mut freed = 0;
    loop {
        let record = consumer.peek().unwrap().unwrap();
        consumer.advance(&record);
        consumer.commit();
        freed += 64;
        if consumer.should_notify() {
            break;
        }
    }
    assert_eq!(freed, 512);
}
