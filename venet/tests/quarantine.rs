//! A guest that breaks the ring protocol, a port that breaks, and how the device comes back.

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use support::port::scripted;
use support::{Lab, PLAIN, Setup, bus, frame, until, write_record};
use vbus::abi::RecordHeader;
use vbus::message::{DeviceClose, DeviceMemory, DeviceMemoryGranted, Empty, Status, verb};
use vbus::north::{Guest, GuestError};
use vbus::ring::{RingMemory, Word};
use venet::abi::{KIND_FRAME, LARGEST_RECORD, LinkUp, function, receive_ring, transmit_ring};
use venet::counters::Values;
use venet::driver::{Driver, DriverError};
use venet::offload::Groups;
use venet::port::loopback::Loopback;

const ASKED: LinkUp = LinkUp { groups: Groups::ALL.bits(), queue_pairs: 1, reserved: 0 };

/// Writes a record that is longer than the largest, and rings.
fn violate(lab: &mut Lab) {
    let (generation, index) = (lab.guest.generation(), lab.outgoing().position());
    let length = LARGEST_RECORD as u32 + 1;
    let header = RecordHeader { length, kind: KIND_FRAME, generation, ..RecordHeader::default() };
    let ring = lab.outgoing().memory();
    let end = write_record(ring, index, header, &[]);
    ring.store(Word::Produced, end, Ordering::Release);
    lab.doorbell.notify().unwrap();
}

fn refused<T>(result: Result<T, GuestError>) -> Status {
    match result {
        Err(GuestError::Refused { status, .. }) => status,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("the host agreed"),
    }
}

#[test]
fn a_violation_is_seen_and_a_reset_brings_the_device_back() {
    let (port, handle) = scripted();
    let mut lab = Lab::start(port, Setup::default());
    let shared = Arc::clone(&lab.shared);
    for round in 1..=3 {
        let sent = (PLAIN, frame(100, round));
        lab.send(&sent);
        assert_eq!(handle.sent(round)[round - 1], sent);
        handle.arrive([sent.clone()]);
        assert_eq!(lab.receive(), sent);
        assert_eq!((shared.groups(), shared.quarantined()), (Some(Groups::ALL), false));
        assert_eq!(handle.script().carriers.last(), Some(&true));

        violate(&mut lab);
        until("the quarantine", || shared.quarantined());
        assert_eq!((shared.groups(), shared.counters.violations.value()), (None, round as u64));
        assert_eq!(Values::from(&*shared.counters).violations, round as u64);
        until("the carrier to go", || handle.script().carriers.last() == Some(&false));
        // Asking again does not help, and says why.
        assert_eq!(lab.call(function::LINK_UP, &ASKED), Err(Status::NotReady));
        assert!(shared.quarantined());

        lab.reset();
        assert_eq!(lab.guest.generation() as usize, round + 1);
    }
    assert_eq!(shared.counters.violations.value(), 3);
    assert_eq!(handle.script().offloads.len(), 4);
}

#[test]
fn closing_the_device_ends_the_quarantine_as_well() {
    let mut lab = Lab::start(Loopback::default(), Setup::default());
    violate(&mut lab);
    until("the quarantine", || lab.shared.quarantined());
    lab.call(function::LINK_DOWN, &ASKED).unwrap();
    assert_eq!(lab.call(function::LINK_UP, &ASKED), Err(Status::NotReady));
    lab.guest
        .call::<_, Empty>(&mut lab.host, "DEVCLOSE", verb::DEVCLOSE, &DeviceClose { handle: 0, reserved: 0 })
        .unwrap();
    assert!(!lab.shared.quarantined());
    lab.reset();
    lab.echo();
}

#[test]
fn a_guest_that_violates_in_its_last_moment_is_not_quarantined_in_the_next_life() {
    let mut lab = Lab::start(Loopback::default(), Setup::default());
    for _ in 0..200 {
        violate(&mut lab);
        // At once: the pump may or may not have seen it.
        lab.reset();
        assert_eq!((lab.shared.groups(), lab.shared.quarantined()), (Some(Groups::ALL), false));
    }
    lab.echo();
    assert!(lab.shared.counters.violations.value() <= 200);
}

#[test]
fn records_of_the_last_generation_are_dropped() {
    let mut lab = Lab::start(Loopback::default(), Setup::default());
    lab.echo();
    lab.reset();
    let sent = lab.shared.counters.from_ring.frames.value();
    let header = RecordHeader { length: 100, kind: KIND_FRAME, generation: 1, ..RecordHeader::default() };
    let ring = lab.queue.outgoing.memory();
    let end = write_record(ring, 0, header, &frame(100, 1));
    ring.store(Word::Produced, end, Ordering::Release);
    lab.doorbell.notify().unwrap();
    until("the record to be taken", || ring.load(Word::Consumed, Ordering::Acquire) == end);
    assert_eq!(lab.shared.counters.from_ring.frames.value(), sent);
    assert_eq!(lab.take(), None);
}

#[test]
fn a_port_that_is_gone_stops_the_device_but_is_no_violation() {
    let (port, handle) = scripted();
    let mut lab = Lab::start(port, Setup::default());
    handle.script().answers.push_back(libc::EBADFD);
    lab.send(&(PLAIN, frame(100, 1)));
    until("the link to go", || lab.shared.groups().is_none());
    assert_eq!((lab.shared.quarantined(), lab.shared.counters.violations.value()), (false, 0));
    assert_eq!(lab.call(function::LINK_UP, &ASKED), Err(Status::NotReady));
    lab.reset();
    lab.send(&(PLAIN, frame(100, 2)));
    assert_eq!(handle.sent(1), [(PLAIN, frame(100, 2))]);
}

/// What brings the link up fails once; the port is not lost by it.
fn comes_up_the_second_time(fail: impl FnOnce(), repair: impl FnOnce(), port: support::port::ScriptedPort) {
    let (mut guest, mut host, shared, ..) = bus(port, Setup::default());
    fail();
    let driver = Driver::open(&mut guest, &mut host).unwrap();
    let Err(DriverError::Bus(error)) = driver.link_up(&mut guest, &mut host, Groups::ALL) else {
        panic!("the link came up");
    };
    assert_eq!(refused::<()>(Err(error)), Status::HostFailure);
    assert_eq!((shared.groups(), shared.quarantined()), (None, false));
    repair();
    let mut guest = Guest::start(Arc::clone(guest.window()), &mut host).unwrap();
    let driver = Driver::open(&mut guest, &mut host).unwrap();
    driver.link_up(&mut guest, &mut host, Groups::ALL).unwrap();
    assert_eq!(shared.groups(), Some(Groups::ALL));
}

#[test]
fn a_port_that_refuses_its_offloads_once_is_kept() {
    let (port, handle) = scripted();
    comes_up_the_second_time(|| handle.script().failing_offloads = 1, || {}, port);
}

#[test]
fn a_port_that_cannot_be_waited_for_is_kept() {
    let (port, _handle) = scripted();
    let useless = Arc::clone(&port.useless);
    // epoll refuses files on a disk.
    let file = Arc::new(std::fs::File::open(std::env::current_exe().unwrap()).unwrap());
    let fail = || *useless.lock().unwrap() = Some(file);
    comes_up_the_second_time(fail, || *useless.lock().unwrap() = None, port);
}

#[test]
fn the_link_comes_up_when_both_rings_are_there() {
    let (mut guest, mut host, ..) = bus(Loopback::default(), Setup::default());
    Driver::open(&mut guest, &mut host).unwrap();
    let call = vbus::message::DeviceCall { handle: 0, function: function::LINK_UP, data: venet::abi::to_call(&ASKED) };
    let link_up = |guest: &mut Guest, host: &mut support::Host| {
        guest.call::<_, vbus::message::DeviceCall>(host, "DEVCALL", verb::DEVCALL, &call)
    };
    assert_eq!(refused(link_up(&mut guest, &mut host)), Status::NotReady);
    for (ring, expected) in [(transmit_ring(0), Some(Status::NotReady)), (receive_ring(0), None)] {
        let asked = DeviceMemory { handle: 0, ring };
        guest.call::<_, DeviceMemoryGranted>(&mut host, "DEVSHM", verb::DEVSHM, &asked).unwrap();
        match expected {
            Some(status) => assert_eq!(refused(link_up(&mut guest, &mut host)), status),
            None => drop(link_up(&mut guest, &mut host).unwrap()),
        }
    }
    assert_eq!(refused(link_up(&mut guest, &mut host)), Status::Busy);
}

#[test]
fn what_a_device_refuses() {
    let mut lab = Lab::start(Loopback::default(), Setup::default());
    assert_eq!(lab.call(function::LINK_UP, &ASKED), Err(Status::Busy));
    assert_eq!(lab.call(99, &ASKED), Err(Status::UnknownFunction));
    lab.call(function::LINK_DOWN, &ASKED).unwrap();
    assert_eq!(lab.shared.groups(), None);
    for queue_pairs in [0, 2, u32::MAX] {
        assert_eq!(lab.call(function::LINK_UP, &LinkUp { queue_pairs, ..ASKED }), Err(Status::InvalidArgument));
    }
    lab.reset();
    lab.echo();
}
