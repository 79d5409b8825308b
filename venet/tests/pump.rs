//! What becomes of frames between a ring and a port: each has one fate.

mod support;

use libc::{EAGAIN, EINVAL, EIO, ENETDOWN, ENOBUFS};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use support::port::{Event, scripted};
use support::{Frame, Lab, PLAIN, Setup, assert_same, drops, frame, super_frame, tagged, until};
use vbus::ring::{RingMemory, Word};
use venet::abi::LinkState;
use venet::counters::DropReason;
use venet::offload::Groups;
use venet::port::loopback::Loopback;
use venet::pump::FRAME_BUDGET;
use venet::pump::policy::Policy;

/// Sends all frames, and returns what comes back of `expected` frames.
fn exchange(lab: &mut Lab, frames: &[Frame], expected: usize) -> Vec<Frame> {
    let mut back = Vec::new();
    for frame in frames {
        while !lab.offer(frame) {
            // The device waits for us as well: room comes from taking.
            back.push(lab.receive());
        }
        back.extend(std::iter::from_fn(|| lab.take()));
    }
    while back.len() < expected {
        back.push(lab.receive());
    }
    back
}

#[test]
fn frames_of_every_size_come_back_equal_and_in_order() {
    for policy in [Policy::EventIndex, Policy::Immediate] {
        let mut lab = Lab::start(Loopback::default(), Setup { policy, ..Setup::default() });
        let of = |size| if size <= 1514 { frame(size, size) } else { tagged(size, size, &[0x8100]) };
        let frames: Vec<Frame> = (0..=1518).map(|size| (PLAIN, of(size))).collect();
        let back = exchange(&mut lab, &frames, frames.len() - 14);
        assert_same(&back, &frames[14..]);
        lab.quiet();
        let counters = &lab.shared.counters;
        assert_eq!(drops(&counters.from_ring), [(DropReason::TooShort, 14)]);
        assert_eq!(drops(&counters.to_ring), []);
        for direction in [&counters.from_ring, &counters.to_ring] {
            assert_eq!(direction.frames.value(), 1519 - 14);
            assert_eq!(direction.bytes.value(), (14..=1518).sum::<u64>());
            assert_eq!(direction.segments.value(), 1519 - 14);
            assert_eq!(direction.super_frame_bytes.value(), 0);
        }
    }
}

#[test]
fn super_frames_come_back_equal_and_in_order() {
    let mut lab = Lab::start(Loopback::default(), Setup::default());
    let sizes = [55, 256, 257, 2000, 20_000, 65_000, 65_535 + 14];
    // Many laps of the ring, so that records meet its end in many ways.
    let frames: Vec<Frame> = (0..200).map(|number| super_frame(sizes[number * 3 % 7], number, 1448)).collect();
    let back = exchange(&mut lab, &frames, frames.len());
    assert_same(&back, &frames);
    lab.quiet();
    let segments: u64 = frames.iter().map(|(_, bytes)| (bytes.len() as u64 - 54).div_ceil(1448)).sum();
    assert_eq!(lab.shared.counters.from_ring.segments.value(), segments);
    assert_eq!(lab.shared.counters.to_ring.segments.value(), segments);
    assert_eq!((drops(&lab.shared.counters.from_ring), drops(&lab.shared.counters.to_ring)), (vec![], vec![]));
}

#[test]
fn illegal_frames_are_dropped_by_reason_and_nothing_else_is() {
    let groups = Groups::ALL.without(Groups::ECN);
    let mut lab = Lab::start(Loopback::default(), Setup { groups, ..Setup::default() });
    let plain = |bytes| (PLAIN, bytes);
    let mut with_ecn = super_frame(3000, 1, 1448);
    with_ecn.0[1] |= 0x80;
    let mut unknown = super_frame(3000, 1, 1448);
    unknown.0[1] = 3;
    let illegal = [
        (DropReason::TooShort, plain(frame(0, 1))),
        (DropReason::TooShort, plain(frame(13, 1))),
        (DropReason::TooLong, plain(frame(1515, 1))),
        (DropReason::TooLong, plain(frame(9000, 1))),
        (DropReason::TooLong, plain(tagged(1519, 1, &[0x88a8]))),
        (DropReason::TooLong, super_frame(3000, 1, 1461)),
        (DropReason::DoubleTagged, plain(tagged(60, 1, &[0x8100, 0x8100]))),
        (DropReason::DoubleTagged, plain(tagged(1522, 1, &[0x88a8, 0x8100]))),
        (DropReason::BadOffload, unknown),
        (DropReason::BadOffload, super_frame(3000, 1, 0)),
        (DropReason::BadOffload, ([1, 0, 0, 0, 0, 0, 255, 0, 16, 0, 0, 0], frame(100, 1))),
        (DropReason::OffloadNotNegotiated, with_ecn),
    ];
    let mut frames = Vec::new();
    let mut legal = Vec::new();
    for (number, (_, bad)) in illegal.iter().enumerate() {
        let good = (PLAIN, frame(100 + number, number));
        frames.extend([good.clone(), bad.clone()]);
        legal.push(good);
    }
    let back = exchange(&mut lab, &frames, legal.len());
    assert_same(&back, &legal);
    lab.quiet();
    let counters = &lab.shared.counters;
    for reason in venet::counters::DROP_REASONS {
        let expected = illegal.iter().filter(|(other, _)| *other == reason).count() as u64;
        assert_eq!(counters.from_ring.drops(reason), expected, "{reason:?}");
    }
    assert_eq!(counters.from_ring.frames.value(), legal.len() as u64);
    assert_eq!(drops(&counters.to_ring), []);
    assert!(lab.take().is_none());
}

#[test]
fn what_the_port_answers_decides_the_fate_of_a_frame() {
    let (port, handle) = scripted();
    let mut lab = Lab::start(port, Setup::default());
    let answers = [0, EIO, 0, ENETDOWN, ENOBUFS, 0, EINVAL, EAGAIN, 0, ENOBUFS, 0];
    handle.script().answers.extend(answers);
    let frames: Vec<Frame> = (0..10).map(|number| (PLAIN, frame(60 + number, number))).collect();
    for frame in &frames {
        lab.send(frame);
    }
    // The one answered with EAGAIN waits until the port says that it is writable.
    until("the port to be full", || lab.shared.counters.port_full.value() == 1);
    handle.wake();
    let sent = handle.sent(5);
    lab.quiet();
    // The frames and their answers in order; the one that had to wait got the answer after its own as well.
    assert_same(&sent, &[0, 2, 5, 7, 9].map(|number| frames[number].clone()));
    let counters = &lab.shared.counters.from_ring;
    assert_eq!(drops(counters), [(DropReason::PortRefused, 3), (DropReason::PortDown, 2)]);
    assert_eq!(counters.frames.value(), 5);
}

/// A sequence of numbers that looks like chance and is the same each time.
fn chance(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed;
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    }
}

#[test]
fn every_record_has_one_fate() {
    for seed in 0..8 {
        let (port, handle) = scripted();
        let policy = if seed % 2 == 0 { Policy::EventIndex } else { Policy::Immediate };
        let mut lab = Lab::start(port, Setup { policy, ring_length: 1 << 18, ..Setup::default() });
        let mut chance = chance(seed);
        let answers = [0, 0, 0, 0, EIO, ENOBUFS, EINVAL, EAGAIN];
        handle.script().answers.extend((0..4000).map(|_| answers[chance(8) as usize]));
        let records = 2000;
        for number in 0..records {
            let length = chance(1600) as usize;
            let next = match chance(4) {
                0 => super_frame(100 + 40 * length, number, 1448),
                1 => (PLAIN, tagged(length + 18, number, &[0x8100])),
                _ => (PLAIN, frame(length, number)),
            };
            until("room in the transmit ring", || {
                // The port was full, and is no more.
                handle.wake();
                lab.offer(&next)
            });
        }
        let counters = Arc::clone(&lab.shared.counters);
        let fates =
            || counters.from_ring.frames.value() + drops(&counters.from_ring).iter().map(|(_, n)| n).sum::<u64>();
        until("a fate for every record", || {
            handle.wake();
            fates() == records as u64
        });
        lab.quiet();
        assert_eq!(fates(), records as u64);
        assert_eq!(handle.script().sent.len() as u64, counters.from_ring.frames.value());
        let reasons: Vec<DropReason> = drops(&counters.from_ring).iter().map(|(reason, _)| *reason).collect();
        use DropReason::{PortDown, PortRefused, TooLong, TooShort};
        assert_eq!(reasons, [TooShort, TooLong, PortRefused, PortDown]);
    }
}

#[test]
fn a_full_port_keeps_the_frame_and_sends_it_once() {
    let (port, handle) = scripted();
    let mut lab = Lab::start(port, Setup::default());
    handle.script().full = true;
    let frames: Vec<Frame> = (0..300).map(|number| (PLAIN, frame(60 + number, number))).collect();
    for frame in &frames {
        lab.send(frame);
    }
    until("the port to be full", || lab.shared.counters.port_full.value() > 0);
    // The other direction goes on meanwhile.
    handle.arrive(frames[..100].to_vec());
    for frame in &frames[..100] {
        assert_eq!(&lab.receive(), frame);
    }
    let ring = lab.outgoing().memory();
    assert_eq!(ring.load(Word::Consumed, Ordering::Acquire), 0, "the first frame is kept");
    assert!(handle.script().refused < 10, "a full port is not asked again and again");
    handle.script().full = false;
    handle.wake();
    let sent = handle.sent(frames.len());
    lab.quiet();
    assert_same(&sent, &frames);
    assert_eq!(handle.script().sent.len(), frames.len());
    assert_eq!(drops(&lab.shared.counters.from_ring), []);
}

#[test]
fn a_reader_that_stops_loses_nothing() {
    let mut lab = Lab::start(Loopback::default(), Setup { ring_length: 1 << 18, ..Setup::default() });
    let mut sent = Vec::new();
    // Nothing is taken until all is full: our ring, the loopback, and the ring to us.
    until("all to be full", || {
        let next = (PLAIN, frame(1000, sent.len()));
        if lab.offer(&next) {
            sent.push(next);
            return false;
        }
        let counters = &lab.shared.counters;
        counters.ring_full.value() > 0 && counters.port_full.value() > 0
    });
    let back = lab.poll(sent.len());
    assert_same(&back, &sent);
    lab.quiet();
    let counters = &lab.shared.counters;
    assert_eq!(counters.from_ring.frames.value(), sent.len() as u64);
    assert_eq!((drops(&counters.from_ring), drops(&counters.to_ring)), (vec![], vec![]));
    lab.echo();
}

#[test]
fn frames_from_the_port_reach_a_reader_in_the_form_that_it_agreed_on() {
    let (port, handle) = scripted();
    let mut lab = Lab::start(port, Setup { groups: Groups::LINK_EVENTS, ..Setup::default() });
    assert_eq!(handle.script().offloads, [Groups::LINK_EVENTS]);
    // 10.0.0.1:1000 to 10.0.0.2:2000, UDP, "a", with the sum of the pseudo header where the checksum goes.
    let mut unfinished = frame(34, 1);
    unfinished.extend([0x03, 0xe8, 0x07, 0xd0, 0, 9, 0x14, 0x1d, b'a']);
    let mut finished = unfinished.clone();
    finished[40..42].copy_from_slice(&[0x7f, 0x21]);
    let needs = |start: u8, offset: u8| [1, 0, 0, 0, 0, 0, start, 0, offset, 0, 0, 0];
    let last = (PLAIN, frame(60, 9));
    handle.arrive([
        (needs(34, 6), unfinished.clone()),
        // Queued before the offloads were reduced.
        super_frame(3000, 1, 1448),
        // A checksum that is nowhere.
        (needs(200, 6), unfinished),
        // Known to be right, which only a reader may hear that agreed on checksums.
        ([2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], frame(100, 2)),
        (PLAIN, frame(65_535 + 23, 3)),
        last.clone(),
    ]);
    assert_eq!(lab.receive(), (PLAIN, finished));
    assert_eq!(lab.receive(), (PLAIN, frame(100, 2)));
    assert_eq!(lab.receive(), last);
    let expected = [(DropReason::TooLong, 1), (DropReason::BadOffload, 1), (DropReason::OffloadNotNegotiated, 1)];
    assert_eq!(drops(&lab.shared.counters.to_ring), expected);
    assert_eq!(lab.shared.counters.to_ring.frames.value(), 3);
}

#[test]
fn a_port_that_fails_to_deliver_one_frame_delivers_the_next() {
    let (port, handle) = scripted();
    let mut lab = Lab::start(port, Setup::default());
    let frames: Vec<Frame> = (0..3).map(|number| (PLAIN, frame(60, number))).collect();
    let [first, second, third] = [0, 1, 2].map(|number| frames[number].clone());
    handle.script().incoming.extend([Ok(first), Err(EINVAL), Ok(second), Err(EIO)]);
    handle.wake();
    assert_eq!((lab.receive(), lab.receive()), (frames[0].clone(), frames[1].clone()));
    // The interface is down now, and comes up again.
    lab.quiet();
    handle.arrive([third]);
    assert_eq!(lab.receive(), frames[2]);
    assert_eq!(drops(&lab.shared.counters.to_ring), [(DropReason::PortRefused, 1)]);
}

#[test]
fn the_device_tells_of_its_link() {
    let mut lab = Lab::start(Loopback::default(), Setup::default());
    let state = |up| LinkState { up, mtu: 1500 };
    let mut expected = Vec::new();
    for up in [1, 0, 1] {
        lab.shared.set_link(up == 1).unwrap();
        expected.push(state(up));
        until("news of the link", || {
            assert_eq!(lab.take(), None);
            lab.links.len() >= expected.len()
        });
        assert_eq!(lab.links, expected);
    }
    lab.echo();
    assert_eq!(lab.links, expected, "told once");
}

#[test]
fn a_guest_without_link_events_hears_nothing() {
    let groups = Groups::ALL.without(Groups::LINK_EVENTS);
    let mut lab = Lab::start(Loopback::default(), Setup { groups, ..Setup::default() });
    lab.shared.set_link(false).unwrap();
    lab.quiet();
    lab.echo();
    assert_eq!(lab.links, []);
}

#[test]
fn neither_direction_starves_the_other() {
    let (port, handle) = scripted();
    // The first call waits until everything is there.
    (handle.script().sends_before_gate, handle.script().receives_before_gate) = (Some(0), Some(0));
    let mut lab = Lab::start(port, Setup::default());
    let count = 500;
    for number in 0..count {
        lab.send(&(PLAIN, frame(60, number)));
    }
    {
        let mut script = handle.script();
        script.endless = true;
        (script.sends_before_gate, script.receives_before_gate) = (None, None);
    }
    handle.wake();
    let end = std::time::Instant::now() + support::PATIENCE;
    while handle.script().sent.len() < count {
        assert!(std::time::Instant::now() < end, "frames from the port starve those from the ring");
        while lab.take().is_some() {}
    }
    handle.script().endless = false;
    // From the first frame sent to the last, both directions had work all the time.
    let events: Vec<Event> = handle.script().events.clone();
    let sent = |event: &Event| *event == Event::Sent;
    let (first, last) = (events.iter().position(sent).unwrap(), events.iter().rposition(sent).unwrap());
    let runs: Vec<usize> = events[first..=last].chunk_by(|a, b| a == b).map(<[Event]>::len).collect();
    let longest = runs.iter().max().unwrap();
    assert!(*longest <= FRAME_BUDGET as usize, "{longest} frames of one direction in a row");
    assert!(runs.len() > count / FRAME_BUDGET as usize, "the directions take turns: {runs:?}");
    assert!(lab.shared.counters.to_ring.budget_stops.value() > 0);
}
