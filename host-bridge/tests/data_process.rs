//! The data process alone: the test is its supervisor, and the guest.

use host_bridge::channel::{self, Answer, DeviceReport, DeviceSpec, Order};
use host_bridge::status::DeviceStatus;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vbus::connector::notifier::Vector;
use vbus::layout::Layout;
use vbus::north::{Guest, Vector0};
use vbus::private_state::{PrivateState, field};
use vbus::ring::{RingMemory, Word};
use vbus::window::{Window, WindowRing};
use venet::abi::DEFAULT_RING_LENGTH;
use venet::driver::Driver;
use venet::offload::Groups;
use venet::queue::RingPair;

const PEER: u64 = 7;

fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !so() {
        assert!(Instant::now() < end, "{what}: not within 10 s");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A data process with one guest, whose one device is a loopback.
struct Lab {
    process: Child,
    supervisor: OwnedFd,
    window: Arc<Window>,
    private: PrivateState,
    vectors: Vectors,
}

struct Vectors {
    doorbells: [Vector; 2],
    interrupts: [Vector; 2],
}

impl Vector0 for Vectors {
    fn ring(&mut self) -> io::Result<()> {
        self.doorbells[0].notify()
    }
    fn wait(&mut self) -> io::Result<()> {
        let timeout = Timespec { tv_sec: 10, tv_nsec: 0 };
        let mut watched = [PollFd::from_borrowed_fd(self.interrupts[0].as_fd(), PollFlags::IN)];
        if poll(&mut watched, Some(&timeout))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        rustix::io::read(&self.interrupts[0], &mut [0; 8])?;
        Ok(())
    }
}

impl Lab {
    fn start() -> Self {
        let flags = SocketFlags::CLOEXEC;
        let (supervisor, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_host-bridge"))
            .args(["data-process", "nobody"])
            .env("RUST_LOG", "off")
            .stdin(theirs)
            .spawn()
            .unwrap();
        let window = Window::create(Layout::window_size(&[DEFAULT_RING_LENGTH; 2])).unwrap();
        let private = PrivateState::create().unwrap();
        let pair = || [Vector::new().unwrap(), Vector::new().unwrap()];
        let vectors = Vectors { doorbells: pair(), interrupts: pair() };
        let device = DeviceSpec {
            name: "venet0".into(),
            tap: false,
            mac: [0x52, 0, 0, 0, 0, 1],
            mtu: 1500,
            groups: Groups::ALL.bits(),
            ring: DEFAULT_RING_LENGTH,
            policy: "event-index".into(),
            cpus: "none".into(),
            link: true,
        };
        let order = Order::Connect { guest: "guest".into(), peer_id: PEER, devices: vec![device] };
        let mut descriptors = vec![window.as_fd(), private.as_fd()];
        descriptors.extend(vectors.doorbells.iter().chain(&vectors.interrupts).map(AsFd::as_fd));
        channel::send(supervisor.as_fd(), &order, &descriptors).unwrap();
        until("the window's header", || window.has_header());
        Self { process, supervisor, window: Arc::new(window), private, vectors }
    }

    fn guest(&mut self) -> Guest {
        Guest::start(Arc::clone(&self.window), &mut self.vectors).unwrap()
    }

    fn link(&mut self, guest: &mut Guest) -> RingPair {
        let driver = Driver::open(guest, &mut self.vectors).unwrap();
        driver.link_up(guest, &mut self.vectors, Groups::ALL).unwrap().0
    }

    /// What the data process says of the connection: resets, quarantines, and the device.
    fn status(&self) -> (u64, u64, DeviceReport) {
        channel::send(self.supervisor.as_fd(), &Order::Status, &[]).unwrap();
        let mut told = None;
        loop {
            match channel::receive(&self.supervisor) {
                Ok(Some((Answer::Connection { peer_id, resets, quarantines, mut devices }, _))) => {
                    assert_eq!((peer_id, devices.len()), (PEER, 1));
                    told = devices.pop().map(|device| (resets, quarantines, device));
                }
                Ok(Some((Answer::StatusEnd, _))) => return told.unwrap(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// What a successor of the data process would find.
    fn stored_generation(&self) -> Option<u64> {
        let (_, fields) = PrivateState::open(self.private.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let bytes = fields.into_iter().find(|(number, _)| *number == field::GENERATION)?.1;
        Some(u64::from_le_bytes(bytes.try_into().unwrap()))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// An index that no producer writes.
fn violate(ring: &WindowRing, doorbell: &Vector) {
    ring.store(Word::Produced, 1, Ordering::Release);
    doorbell.notify().unwrap();
}

#[test]
fn the_generation_is_stored_after_every_reset() {
    let mut lab = Lab::start();
    assert_eq!(lab.stored_generation(), None);
    for generation in 1..=3 {
        lab.guest();
        until("the generation", || lab.stored_generation() == Some(generation));
    }
    for round in 1..=3 {
        let verbs = WindowRing::new(Arc::clone(&lab.window), lab.window.header().verbs).unwrap();
        violate(&verbs, &lab.vectors.doorbells[0]);
        until("the quarantine", || lab.status().1 == round);
        assert_eq!(lab.stored_generation(), Some(2 + round));
        lab.guest();
        until("the generation after the quarantine", || lab.stored_generation() == Some(3 + round));
        assert_eq!((lab.status().0, lab.status().1), (3 + round, round));
    }
}

#[test]
fn a_device_in_quarantine_is_shown_as_that() {
    let mut lab = Lab::start();
    let link = |report: DeviceReport, port_up| {
        let mut status = DeviceStatus::idle("venet0", None, None, [0; 6], 1500);
        status.report(report, port_up);
        status.link
    };
    let mut guest = lab.guest();
    assert_eq!(link(lab.status().2, true), "idle");
    for round in 1..=2 {
        let rings = lab.link(&mut guest);
        assert_eq!((link(lab.status().2, true), link(lab.status().2, false)), ("up".into(), "down".into()));
        violate(rings.outgoing.memory(), &lab.vectors.doorbells[1]);
        until("the quarantine", || lab.status().2.quarantined);
        let report = lab.status().2;
        assert_eq!((report.linked, report.counters.violations), (false, round));
        assert_eq!((link(report.clone(), true), link(report, false)), ("quarantined".into(), "quarantined".into()));
        assert_eq!(lab.status().1, 0, "the control rings go on");
        guest = lab.guest();
        assert_eq!(link(lab.status().2, true), "idle");
    }
}
