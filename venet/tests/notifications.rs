//! Who is woken, how often, and when: notifications cost most of what a frame costs.

mod support;

use std::time::Duration;
use support::port::scripted;
use support::{Frame, Lab, PLAIN, Setup, assert_same, frame, notified, until};
use venet::abi::{KIND_LINK, LARGEST_RECORD, LinkState};
use venet::port::loopback::Loopback;
use venet::pump::policy::Policy;
use zerocopy::IntoBytes;

const BURST: usize = 1000;

fn frames(count: usize) -> Vec<Frame> {
    (0..count).map(|number| (PLAIN, frame(60 + number % 1000, number))).collect()
}

/// All that the device says to have sent is what the eventfd counted.
fn assert_counted(lab: &mut Lab) {
    let counters = &lab.shared.counters;
    let said = counters.to_ring.notifications_sent.value() + counters.from_ring.notifications_sent.value();
    assert_eq!(lab.count(), said);
}

#[test]
fn a_burst_to_a_guest_that_is_awake_costs_no_notification() {
    let (port, handle) = scripted();
    let mut lab = Lab::start(port, Setup::default());
    // What is owed to a guest that has just started is out of the way.
    handle.arrive(frames(1));
    lab.receive();
    lab.quiet();
    let before = lab.count();
    handle.arrive(frames(BURST));
    assert_same(&lab.poll(BURST), &frames(BURST));
    lab.quiet();
    assert_eq!(lab.count() - before, 0, "the guest polls, and has not asked to be woken");
    assert!(lab.shared.counters.to_ring.notifications_suppressed.value() > 0);
    assert_counted(&mut lab);
}

#[test]
fn a_burst_to_a_guest_that_sleeps_costs_one_notification() {
    let (port, handle) = scripted();
    let mut lab = Lab::start(port, Setup::default());
    handle.arrive(frames(1));
    lab.receive();
    lab.quiet();
    let before = lab.count();
    assert!(!lab.incoming().arm().unwrap());
    handle.arrive(frames(100));
    until("the burst in the ring", || lab.shared.counters.to_ring.frames.value() == 101);
    lab.quiet();
    assert_eq!(lab.count() - before, 1);
    assert_same(&lab.poll(100), &frames(100));
    assert_eq!(lab.count() - before, 1);
}

#[test]
fn a_burst_to_a_device_that_is_awake_costs_one_doorbell() {
    let (port, handle) = scripted();
    let mut lab = Lab::start(port, Setup { ring_length: 1 << 21, ..Setup::default() });
    lab.send(&frames(1)[0]);
    lab.quiet();
    let before = (lab.doorbells, lab.shared.counters.wake_ups.value());
    // The port holds the device fast in the first frame, so that it stays awake until the burst is complete.
    handle.script().sends_before_gate = Some(0);
    for frame in frames(BURST) {
        lab.send(&frame);
    }
    assert_eq!(lab.doorbells - before.0, 1);
    handle.script().sends_before_gate = None;
    handle.wake();
    assert_same(&handle.sent(BURST + 1)[1..], &frames(BURST));
    lab.quiet();
    assert!(lab.shared.counters.wake_ups.value() - before.1 <= 2, "one for the burst, one for the port");
}

#[test]
fn the_first_frame_of_a_burst_is_announced_at_once() {
    // Also if the first one that the port has is of no use.
    for useless in [0, 3] {
        let (port, handle) = scripted();
        let mut lab = Lab::start(port, Setup::default());
        lab.hear_link();
        lab.quiet();
        let before = lab.count();
        assert!(!lab.incoming().arm().unwrap());
        // The port does not give the second frame before the first one was received.
        handle.script().receives_before_gate = Some(useless + 1);
        let too_long = (PLAIN, frame(LARGEST_RECORD as usize, 0));
        handle.arrive(std::iter::repeat_n(too_long, useless as usize).chain(frames(64)));
        assert!(notified(&lab.interrupt, support::PATIENCE), "the first frame waits for those behind it");
        assert_eq!(lab.take(), Some(frames(1)[0].clone()));
        assert_eq!((lab.take(), lab.count() - before), (None, 1));
        handle.script().receives_before_gate = None;
        handle.wake();
        assert_same(&lab.poll(63), &frames(64)[1..]);
        assert_eq!(lab.count() - before, 1);
    }
}

#[test]
fn the_immediate_policy_announces_each_frame() {
    let (port, handle) = scripted();
    let mut lab = Lab::start(port, Setup { policy: Policy::Immediate, ..Setup::default() });
    lab.hear_link();
    lab.quiet();
    let before = lab.count();
    handle.arrive(frames(100));
    assert_same(&lab.poll(100), &frames(100));
    assert_eq!(lab.count() - before, 100);
    assert_counted(&mut lab);
}

#[test]
fn a_guest_that_waits_for_room_is_woken_by_it() {
    let (port, handle) = scripted();
    let mut lab = Lab::start(port, Setup { ring_length: 1 << 18, ..Setup::default() });
    lab.hear_link();
    // A fresh ring owes one notification of space.
    lab.send(&(PLAIN, frame(1000, 0)));
    handle.sent(1);
    lab.quiet();
    handle.script().full = true;
    let mut count = 1;
    while lab.offer(&(PLAIN, frame(1000, count))) {
        count += 1;
    }
    until("the port to be full", || lab.shared.counters.port_full.value() > 0);
    assert!(!lab.outgoing().arm_space(1000).unwrap());
    let before = lab.count();
    handle.script().full = false;
    handle.wake();
    assert!(notified(&lab.interrupt, support::PATIENCE), "room in the ring is not announced");
    handle.sent(count);
    lab.quiet();
    assert_eq!(lab.count() - before, 1, "once, though it came in many pieces");
    assert!(lab.offer(&(PLAIN, frame(1000, count))));
}

/// Processor time of this process's thread of that name, in clock ticks.
fn ticks(name: &str) -> u64 {
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let text = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
        if let Some((front, rest)) = text.rsplit_once(')')
            && front.ends_with(&format!("({name}"))
        {
            let numbers: Vec<&str> = rest.split_whitespace().collect();
            return numbers[11].parse::<u64>().unwrap() + numbers[12].parse::<u64>().unwrap();
        }
    }
    panic!("no thread is called {name}");
}

/// The pump sleeps: for 300 ms nothing wakes it, and it costs no time.
fn assert_asleep(lab: &Lab, name: &str) {
    let counters = &lab.shared.counters;
    let before = (counters.wake_ups.value(), ticks(name));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(counters.wake_ups.value(), before.0, "{name} woke up without a reason");
    // A spinning thread would have used up to 30.
    assert!(ticks(name) - before.1 <= 2, "{name} spins");
}

#[test]
fn an_idle_pump_sleeps() {
    let mut lab = Lab::start(Loopback::default(), Setup { name: "idle0", ..Setup::default() });
    lab.echo();
    lab.quiet();
    assert_asleep(&lab, "idle0");
    let before = lab.shared.counters.wake_ups.value();
    lab.echo();
    assert!(lab.shared.counters.wake_ups.value() > before);
}

#[test]
fn a_pump_sleeps_while_the_port_is_full() {
    let (port, handle) = scripted();
    let mut lab = Lab::start(port, Setup { name: "full0", ..Setup::default() });
    lab.hear_link();
    lab.quiet();
    handle.script().full = true;
    for frame in frames(100) {
        lab.send(&frame);
    }
    until("the port to be full", || lab.shared.counters.port_full.value() > 0);
    std::thread::sleep(Duration::from_millis(20));
    assert_asleep(&lab, "full0");
    handle.script().full = false;
    handle.wake();
    assert_same(&handle.sent(100), &frames(100));
}

#[test]
fn a_pump_sleeps_while_the_ring_is_full() {
    let (port, handle) = scripted();
    let setup = Setup { name: "ring0", ring_length: 1 << 18, ..Setup::default() };
    let mut lab = Lab::start(port, setup);
    lab.hear_link();
    handle.arrive(frames(BURST));
    until("the ring to be full", || lab.shared.counters.ring_full.value() > 0);
    std::thread::sleep(Duration::from_millis(20));
    assert_asleep(&lab, "ring0");
    assert_same(&lab.poll(BURST), &frames(BURST));
}

#[test]
fn a_guest_that_tells_of_a_link_does_not_keep_the_pump_awake() {
    let mut lab = Lab::start(Loopback::default(), Setup { name: "told0", ..Setup::default() });
    let told = LinkState { up: 0, mtu: 68 };
    assert!(lab.outgoing().push(KIND_LINK, told.as_bytes(), &PLAIN).unwrap());
    lab.announce();
    lab.quiet();
    assert_asleep(&lab, "told0");
    assert!(lab.shared.link());
    lab.echo();
}
