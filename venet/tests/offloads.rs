//! A port that cannot do all that driver and device know: a TAP has no USO before Linux 6.2.

mod support;

use support::port::scripted;
use support::{Frame, Lab, PLAIN, Setup, bus, drops, frame, super_frame};
use venet::counters::DropReason;
use venet::driver::Driver;
use venet::offload::Groups;

const NO_USO: Groups = Groups::ALL.without(Groups::USO);

/// A super-frame of UDP over IPv4.
fn udp_super_frame(length: usize, seed: usize) -> Frame {
    let (mut header, mut bytes) = super_frame(length, seed, 1000);
    (header[1], header[2], header[8], bytes[23]) = (5, 42, 6, 17);
    (header, bytes)
}

#[test]
fn what_the_port_does_not_accept_is_not_agreed_on() {
    let (port, handle) = scripted();
    handle.script().unknown_offloads = Groups::USO;
    let mut lab = Lab::agree(port, Setup::default(), NO_USO);
    assert_eq!(lab.shared.groups(), Some(NO_USO));
    assert_eq!(handle.script().offloads, [Groups::ALL]);

    // What the port would lose is judged as what was not agreed on, both ways.
    let (tcp, plain) = (super_frame(5000, 1, 1448), (PLAIN, frame(100, 3)));
    for frame in [&udp_super_frame(5000, 2), &tcp, &plain] {
        lab.send(frame);
    }
    assert_eq!(handle.sent(2), [tcp.clone(), plain.clone()]);
    handle.arrive([udp_super_frame(5000, 4), tcp.clone(), plain.clone()]);
    assert_eq!([lab.receive(), lab.receive()], [tcp, plain]);
    lab.quiet();
    let counters = &lab.shared.counters;
    for direction in [&counters.from_ring, &counters.to_ring] {
        assert_eq!(drops(direction), [(DropReason::OffloadNotNegotiated, 1)]);
    }
}

#[test]
fn a_port_that_accepts_nothing_makes_a_link_without_offloads() {
    let (port, handle) = scripted();
    handle.script().unknown_offloads = Groups::CSUM;
    let mut lab = Lab::agree(port, Setup::default(), Groups::LINK_EVENTS);
    lab.hear_link();
    lab.send(&super_frame(5000, 1, 1448));
    lab.send(&(PLAIN, frame(100, 2)));
    assert_eq!(handle.sent(1), [(PLAIN, frame(100, 2))]);
}

#[test]
fn the_port_is_asked_again_at_each_link_up() {
    let (port, handle) = scripted();
    handle.script().unknown_offloads = Groups::USO;
    let (mut guest, mut host, shared, ..) = bus(port, Setup::default());
    let mut agreed = Vec::new();
    for unknown in [Groups::USO, Groups::NONE] {
        handle.script().unknown_offloads = unknown;
        let driver = Driver::open(&mut guest, &mut host).unwrap();
        // The device still offers it: it cannot know before.
        assert_eq!(driver.description.groups, Groups::ALL.bits());
        agreed.push(driver.link_up(&mut guest, &mut host, Groups::ALL).unwrap().1);
        assert_eq!(shared.groups(), agreed.last().copied());
        guest = vbus::north::Guest::start(std::sync::Arc::clone(guest.window()), &mut host).unwrap();
    }
    assert_eq!(agreed, [NO_USO, Groups::ALL]);
}
