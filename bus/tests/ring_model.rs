//! A model of the ring under every interleaving of two threads (loom): the production code over modelled memory.
//!
//! Each scenario must hold as it is, and must fail when any one of the full fences that it depends on is left out: that
//! shows that the fence is needed and that the model would notice.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, fence};
use std::sync::atomic::Ordering;
use vbus::abi::{KIND_INTERFACE_FIRST, METADATA_LENGTH, NOT_ARMED};
use vbus::ring::{Consumer, FenceSite, Producer, RingConfig, RingMemory, Word};

const LINE: u64 = 64;
const CAPACITY: u64 = 2 * LINE;
const METADATA: [u8; METADATA_LENGTH] = [0; METADATA_LENGTH];
const CONFIG: RingConfig = RingConfig { largest: 8, generation: 0 };

/// Modelled memory: loom reports any access to a line of records that the indices do not order.
struct Modelled {
    words: [AtomicU64; 4],
    lines: [UnsafeCell<[u8; LINE as usize]>; (CAPACITY / LINE) as usize],
    left_out: Option<FenceSite>,
}

#[derive(Clone)]
struct Handle(Arc<Modelled>);

impl Handle {
    fn new(left_out: Option<FenceSite>) -> Self {
        let word = AtomicU64::new;
        Self(Arc::new(Modelled {
            words: [word(0), word(0), word(NOT_ARMED), word(NOT_ARMED)],
            lines: [UnsafeCell::new([0; LINE as usize]), UnsafeCell::new([0; LINE as usize])],
            left_out,
        }))
    }
}

impl RingMemory for Handle {
    fn capacity(&self) -> u64 {
        CAPACITY
    }
    fn load(&self, word: Word, order: Ordering) -> u64 {
        self.0.words[(word.offset() / LINE) as usize].load(order)
    }
    fn store(&self, word: Word, value: u64, order: Ordering) {
        self.0.words[(word.offset() / LINE) as usize].store(value, order);
    }
    fn full_fence(&self, site: FenceSite) {
        if self.0.left_out != Some(site) {
            fence(Ordering::SeqCst);
        }
    }
    fn read(&self, offset: u64, into: &mut [u8]) {
        let at = (offset % LINE) as usize;
        // SAFETY: loom checks that no write is concurrent.
        self.0.lines[(offset / LINE) as usize]
            .with(|line| into.copy_from_slice(unsafe { &(&*line)[at..at + into.len()] }));
    }
    fn write(&self, offset: u64, from: &[u8]) {
        let at = (offset % LINE) as usize;
        // SAFETY: loom checks that no other access is concurrent.
        self.0.lines[(offset / LINE) as usize]
            .with_mut(|line| unsafe { (&mut (*line))[at..at + from.len()].copy_from_slice(from) });
    }
    fn copy_within(&self, _from: u64, _to: u64, _length: u64) {
        unreachable!("every record of the model fits one line");
    }
}

/// An eventfd: remembers that it was rung.
#[derive(Clone)]
struct Bell(Arc<loom::sync::Notify>);

impl Bell {
    fn new() -> Self {
        Self(Arc::new(loom::sync::Notify::new()))
    }
    fn ring(&self) {
        self.0.notify();
    }
    /// loom reports a deadlock if nobody ever rings: that is the lost wake-up.
    fn wait(&self) {
        self.0.wait();
    }
}

fn produce(memory: Handle, records: &[u8], batch: usize, data: Bell, space: Bell) {
    let mut producer = Producer::new(memory, CONFIG, 0).unwrap();
    for chunk in records.chunks(batch) {
        for &value in chunk {
            while !producer.push(KIND_INTERFACE_FIRST, &[value; 8], &METADATA).unwrap() {
                producer.publish();
                if producer.should_notify() {
                    data.ring();
                }
                if !producer.arm_space(8).unwrap() {
                    space.wait();
                }
                producer.suppress_space();
            }
        }
        producer.publish();
        if producer.should_notify() {
            data.ring();
        }
    }
}

fn consume(memory: Handle, records: &[u8], batch: usize, data: Bell, space: Bell) {
    let mut consumer = Consumer::new(memory, CONFIG, 0).unwrap();
    let mut expected = records.iter();
    while expected.len() > 0 {
        let mut taken = 0;
        while taken < batch
            && let Some(record) = consumer.peek().unwrap()
        {
            let mut payload = [0; 8];
            assert_eq!(consumer.copy_payload(&record, &mut payload), 8);
            assert_eq!(payload, [*expected.next().unwrap(); 8], "a record was torn, lost or repeated");
            consumer.advance(&record);
            taken += 1;
        }
        consumer.commit();
        if consumer.should_notify() {
            space.ring();
        }
        if taken == 0 && expected.len() > 0 {
            if !consumer.arm().unwrap() {
                data.wait();
            }
            consumer.suppress();
        }
    }
}

fn run(left_out: Option<FenceSite>, records: &'static [u8], producer_batch: usize, consumer_batch: usize) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let memory = Handle::new(left_out);
        let (data, space) = (Bell::new(), Bell::new());
        let consumer = {
            let (memory, data, space) = (memory.clone(), data.clone(), space.clone());
            loom::thread::spawn(move || consume(memory, records, consumer_batch, data, space))
        };
        produce(memory, records, producer_batch, data, space);
        consumer.join().unwrap();
    });
}

#[test]
fn one_record_at_a_time_through_a_ring_that_fills() {
    run(None, &[1, 2, 3], 1, 1);
}

#[test]
fn batches_of_two_fill_the_ring_exactly() {
    run(None, &[1, 2, 3, 4], 2, 2);
}

#[test]
fn the_consumer_arms_again_between_records() {
    run(None, &[1, 2], 1, 2);
}

/// loom ends the process when it finds a deadlock, so the broken model runs in a process of its own.
fn must_fail_without(test: &str, site: FenceSite) {
    const CHILD: &str = "VBUS_RING_MODEL_CHILD";
    if std::env::var_os(CHILD).is_some() {
        run(Some(site), &[1, 2, 3], 1, 1);
        run(Some(site), &[1, 2, 3, 4], 2, 2);
        return;
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--test-threads=1"])
        .env(CHILD, "1")
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
    assert!(!child.status.success(), "the model does not notice that the fence {site:?} is missing:\n{said}");
    assert!(said.contains("deadlock"), "the model failed for another reason than a lost wake-up:\n{said}");
}

#[test]
fn without_the_fence_after_publishing_data_a_wake_up_is_lost() {
    must_fail_without("without_the_fence_after_publishing_data_a_wake_up_is_lost", FenceSite::DataPublished);
}

#[test]
fn without_the_fence_after_arming_for_data_a_wake_up_is_lost() {
    must_fail_without("without_the_fence_after_arming_for_data_a_wake_up_is_lost", FenceSite::DataArmed);
}

#[test]
fn without_the_fence_after_publishing_space_a_wake_up_is_lost() {
    must_fail_without("without_the_fence_after_publishing_space_a_wake_up_is_lost", FenceSite::SpacePublished);
}

#[test]
fn without_the_fence_after_arming_for_space_a_wake_up_is_lost() {
    must_fail_without("without_the_fence_after_arming_for_space_a_wake_up_is_lost", FenceSite::SpaceArmed);
}
