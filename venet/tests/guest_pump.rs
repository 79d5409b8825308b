//! A pump by itself, as an agent in a guest runs it, over rings that the test holds the other end of.

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use support::port::{Handle, ScriptedPort, scripted};
use support::{Frame, Lab, PLAIN, Setup, assert_same, finish, frame, notified, until, write_record, writes};
use vbus::abi::{KIND_MESSAGE, KIND_PAD, NOT_ARMED, RecordHeader, RingLocation};
use vbus::connector::notifier::Vector;
use vbus::ring::{Consumer, Producer, RingConfig, RingMemory, Violation, Word};
use vbus::window::{Window, WindowRing};
use venet::abi::{KIND_FRAME, KIND_LINK, LARGEST_RECORD, LinkState};
use venet::counters::Counters;
use venet::frame::Limits;
use venet::offload::Groups;
use venet::port::loopback::Loopback;
use venet::pump::policy::Policy;
use venet::pump::{Pump, PumpConfig, PumpError, Waker};
use venet::queue::RingPair;

const RING: u64 = 1 << 18;
const GENERATION: u32 = 7;

/// The host's end, by hand: what the pump reads from and writes to, and its vectors.
struct Far {
    to_pump: WindowRing,
    from_pump: WindowRing,
    /// The pump notifies.
    rung: Vector,
    /// Notifies the pump.
    ring: Vector,
    counters: Arc<Counters>,
    waker: Waker,
    handle: Handle,
}

fn config(policy: Policy, notify: Vector, notified: Vector, counters: &Arc<Counters>) -> PumpConfig {
    let limits = Limits { mtu: 1500, groups: Groups::ALL };
    PumpConfig { limits, policy, back_pressure: true, notify, notified, counters: Arc::clone(counters) }
}

fn pump(back_pressure: bool) -> (Pump<RingPair, ScriptedPort>, Far) {
    let window = Arc::new(Window::create(1 << 20).unwrap());
    let ring = |number: u64| {
        let location = RingLocation { words: 256 + number * 256, data: 4096 + number * RING, length: RING };
        let ring = WindowRing::new(Arc::clone(&window), location).unwrap();
        ring.clear();
        ring
    };
    let vectors = || (Vector::new().unwrap(), Vector::new().unwrap());
    let ((notify, notified), (port, handle)) = (vectors(), scripted());
    let far = Far {
        to_pump: ring(0),
        from_pump: ring(1),
        rung: notify.try_clone().unwrap(),
        ring: notified.try_clone().unwrap(),
        counters: Arc::default(),
        waker: Waker::new().unwrap(),
        handle,
    };
    let rings = RingConfig { largest: LARGEST_RECORD, generation: GENERATION };
    let queue = RingPair {
        incoming: Consumer::new(ring(0), rings, 0).unwrap(),
        outgoing: Producer::new(ring(1), rings, 0).unwrap(),
    };
    let config = PumpConfig { back_pressure, ..config(Policy::EventIndex, notify, notified, &far.counters) };
    let mut pump = Pump::new(queue, port, config).unwrap();
    pump.watch(&far.waker).unwrap();
    (pump, far)
}

type Ended = (Result<(), PumpError>, Pump<RingPair, ScriptedPort>);

fn run(mut pump: Pump<RingPair, ScriptedPort>) -> JoinHandle<Ended> {
    std::thread::spawn(move || (pump.run(), pump))
}

fn ended(what: &str, running: JoinHandle<Ended>) -> Ended {
    finish(what, move || running.join().unwrap())
}

impl Far {
    /// Lets the pump see what is in the ring up to `index`.
    fn publish(&self, index: u64) {
        self.to_pump.store(Word::Produced, index, Ordering::Release);
        self.ring.notify().unwrap();
    }
}

fn frames(count: usize) -> Vec<Frame> {
    (0..count).map(|number| (PLAIN, frame(60 + number % 1000, number))).collect()
}

fn record(kind: u16, length: u64) -> RecordHeader {
    RecordHeader { length: length as u32, kind, generation: GENERATION, ..RecordHeader::default() }
}

#[test]
fn it_hears_of_the_link_and_moves_frames() {
    let lab = Lab::start(Loopback::default(), Setup::default());
    let Lab { queue, shared, doorbell, interrupt, guest, host, .. } = lab;
    let (port, handle) = scripted();
    let counters = Arc::default();
    let mut pump = Pump::new(queue, port, config(Policy::EventIndex, doorbell, interrupt, &counters)).unwrap();
    let waker = Waker::new().unwrap();
    pump.watch(&waker).unwrap();
    for up in [1, 0, 1] {
        shared.set_link(up == 1).unwrap();
        let (result, back) = ended("a pump that is told of a link", run(pump));
        result.unwrap();
        pump = back;
        assert_eq!(pump.take_link(), Some(LinkState { up, mtu: 1500 }));
        assert_eq!(pump.take_link(), None);
    }
    // There and back, under a limit of what may be on its way.
    handle.arrive(frames(2000));
    let running = run(pump);
    assert_same(&handle.sent(2000), &frames(2000));
    waker.wake().unwrap();
    let (result, mut pump) = ended("a pump that is woken", running);
    result.unwrap();
    assert_eq!(pump.take_link(), None);
    drop((guest, host));
}

#[test]
fn it_tells_of_a_link_ahead_of_the_next_frame() {
    let (mut pump, far) = pump(false);
    let told = LinkState { up: 1, mtu: 1400 };
    pump.tell_link(told);
    far.handle.arrive(frames(1));
    let running = run(pump);
    let rings = RingConfig { largest: LARGEST_RECORD, generation: GENERATION };
    let mut reader = Consumer::new(far.from_pump, rings, 0).unwrap();
    let mut next = |kind, length| {
        let mut found = Vec::new();
        until("a record from the pump", || match reader.peek().unwrap() {
            Some(record) => {
                assert_eq!((record.kind, record.payload.length), (kind, length));
                found.resize(length as usize, 0);
                reader.copy_payload(&record, &mut found);
                reader.advance(&record);
                true
            }
            None => false,
        });
        found
    };
    // Two little-endian words: up, MTU.
    assert_eq!(next(KIND_LINK, 8), [1, 0, 0, 0, 0x78, 0x05, 0, 0]);
    assert_eq!(next(KIND_FRAME, 60), frames(1)[0].1);
    far.waker.wake().unwrap();
    ended("a pump that is woken", running).0.unwrap();
}

#[test]
fn bytes_on_their_way_are_limited_until_the_other_side_takes_them() {
    let (pump, far) = pump(true);
    let count = 2000;
    far.handle.arrive(frames(count));
    let running = run(pump);
    let word = |word| far.from_pump.load(word, Ordering::Acquire);
    let (mut taken, mut rounds) = (0, 0);
    while far.counters.to_ring.frames.value() < count as u64 {
        until("the pump to ask for a notification of space, or to be done", || {
            let frames = far.counters.to_ring.frames.value();
            frames == count as u64 || word(Word::SpaceWantedAt) != NOT_ARMED && word(Word::Produced) > taken
        });
        let produced = word(Word::Produced);
        if taken == 0 {
            // Nothing was measured yet: a quarter of the ring, the headers of one pass, and one frame.
            assert!(produced <= RING / 4 + 64 * 96 + 1500, "{produced} bytes are on their way in a ring of {RING}");
        }
        (taken, rounds) = (produced, rounds + 1);
        far.from_pump.store(Word::Consumed, taken, Ordering::Release);
        far.ring.notify().unwrap();
    }
    assert!(far.counters.back_pressure.value() > 0, "in {rounds} rounds");
    far.waker.wake().unwrap();
    ended("a pump that is woken", running).0.unwrap();
}

#[test]
fn a_woken_pump_returns_and_goes_on_where_it_was() {
    let (mut pump, far) = pump(false);
    for round in 0..20 {
        far.handle.arrive([(PLAIN, frame(60, round))]);
        far.waker.wake().unwrap();
        let (result, back) = ended("a pump that is woken", run(pump));
        result.unwrap();
        pump = back;
    }
    let running = run(pump);
    until("all frames", || far.counters.to_ring.frames.value() == 20);
    assert!(notified(&far.rung, support::PATIENCE) && writes(&far.rung) > 0);
    assert!(!far.waker.stopped());
    far.waker.stop().unwrap();
    ended("a pump that is stopped", running).0.unwrap();
    assert!(far.waker.stopped());
}

#[test]
fn records_of_another_generation_or_a_later_release_are_passed_over() {
    let (pump, far) = pump(false);
    let good = frame(100, 1);
    let old = RecordHeader { generation: GENERATION - 1, ..record(KIND_FRAME, 100) };
    let mut index = write_record(&far.to_pump, 0, old, &frame(100, 2));
    index = write_record(&far.to_pump, index, record(KIND_FRAME, 100), &good);
    index = write_record(&far.to_pump, index, record(KIND_LINK + 1, 100), &good);
    index = write_record(&far.to_pump, index, record(KIND_MESSAGE, 0), &[]);
    index = write_record(&far.to_pump, index, record(KIND_FRAME, 100), &good);
    let running = run(pump);
    far.publish(index);
    assert_eq!(far.handle.sent(2), vec![(PLAIN, good); 2]);
    far.waker.wake().unwrap();
    ended("a pump that is woken", running).0.unwrap();
    assert_eq!(far.counters.from_ring.frames.value(), 2);
}

/// What a hostile peer does, and the violation that it has to be called.
type Attack = (&'static str, fn(&Far), fn(&Violation) -> bool);

const ATTACKS: [Attack; 11] = [
    (
        "a record longer than the largest",
        |far| far.publish(write_record(&far.to_pump, 0, record(KIND_FRAME, LARGEST_RECORD + 1), &[])),
        |found| matches!(found, Violation::RecordTooLong { length, limit: LARGEST_RECORD, .. } if *length == LARGEST_RECORD + 1),
    ),
    (
        "a record of four gigabytes",
        |far| {
            write_record(&far.to_pump, 0, record(KIND_FRAME, u64::from(u32::MAX)), &[]);
            far.publish(RING);
        },
        |found| matches!(found, Violation::RecordTooLong { length: 0xffff_ffff, .. }),
    ),
    (
        "a record beyond the producer's index",
        |far| {
            write_record(&far.to_pump, 0, record(KIND_FRAME, 33), &[]);
            far.publish(64);
        },
        |found| matches!(found, Violation::RecordTooLong { length: 33, limit: 32, .. }),
    ),
    (
        "padding that ends elsewhere",
        |far| far.publish(write_record(&far.to_pump, 0, record(KIND_PAD, 100), &[])),
        |found| matches!(found, Violation::CrookedPad { index: 0, length: 100 }),
    ),
    (
        "padding beyond the producer's index",
        |far| {
            write_record(&far.to_pump, 0, record(KIND_PAD, RING - 32), &[]);
            far.publish(RING - 64);
        },
        |found| matches!(found, Violation::CrookedPad { .. }),
    ),
    (
        "a kind that does not exist",
        |far| far.publish(write_record(&far.to_pump, 0, record(3, 10), &[])),
        |found| matches!(found, Violation::UnknownKind { kind: 3, .. }),
    ),
    (
        "an index off the cache lines",
        |far| far.publish(65),
        |found| matches!(found, Violation::ImpossibleIndex { word: Word::Produced, value: 65, .. }),
    ),
    (
        "an index beyond the ring",
        |far| far.publish(RING + 64),
        |found| matches!(found, Violation::ImpossibleIndex { word: Word::Produced, .. }),
    ),
    (
        "an index that goes backwards",
        |far| far.publish(0u64.wrapping_sub(64)),
        |found| matches!(found, Violation::ImpossibleIndex { word: Word::Produced, .. }),
    ),
    (
        "another value in the pump's own word",
        |far| {
            until("the pump to arm", || far.to_pump.load(Word::WakeAt, Ordering::Acquire) == 0);
            far.to_pump.store(Word::WakeAt, 4711, Ordering::Release);
            far.handle.wake();
        },
        |found| matches!(found, Violation::OwnWordChanged { word: Word::WakeAt, left: 0, found: 4711 }),
    ),
    (
        "more taken than there was",
        |far| {
            far.from_pump.store(Word::Consumed, 64, Ordering::Release);
            far.handle.arrive(frames(1000));
        },
        |found| matches!(found, Violation::ImpossibleIndex { word: Word::Consumed, value: 64, .. }),
    ),
];

#[test]
fn a_violation_ends_the_pump_and_has_a_name() {
    for (name, attack, expected) in ATTACKS {
        // The last one is seen at once only by a pump that follows the other side's progress.
        let (pump, far) = pump(true);
        let good = frame(100, 1);
        let running = run(pump);
        attack(&far);
        let (result, _) = ended(name, running);
        match result {
            Err(PumpError::Violation(violation)) => assert!(expected(&violation), "{name}: {violation}"),
            other => panic!("{name}: {other:?}"),
        }
        assert_eq!(far.handle.script().sent, [], "{name}: nothing of it is sent");
        drop(good);
    }
}

#[test]
fn honest_records_in_front_of_a_violation_have_their_fate() {
    let (pump, far) = pump(false);
    let good = frame(100, 1);
    let mut index = write_record(&far.to_pump, 0, record(KIND_FRAME, 100), &good);
    index = write_record(&far.to_pump, index, record(KIND_FRAME, 5), &[0; 5]);
    index = write_record(&far.to_pump, index, record(3, 100), &good);
    far.publish(index);
    let (result, _) = ended("a pump that found a violation", run(pump));
    assert!(matches!(result, Err(PumpError::Violation(Violation::UnknownKind { .. }))));
    assert_eq!(far.handle.script().sent, [(PLAIN, good)]);
    let counters = &far.counters.from_ring;
    assert_eq!(counters.frames.value() + counters.drops(venet::counters::DropReason::TooShort), 2);
}
