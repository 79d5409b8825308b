//! A driver and a port that a test holds in its hands, around a real device on a real bus.
//!
//! Every wait has an end: what does not happen within [`PATIENCE`] makes the test fail with a sentence.

#![allow(dead_code, reason = "each test file is a crate of its own and uses some of it")]

pub mod port;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use vbus::abi::RecordHeader;
use vbus::connector::notifier::Vector;
use vbus::message::{DeviceCall, Status, verb};
use vbus::north::{Guest, GuestError, Vector0};
use vbus::ring::{Consumer, Producer, RingMemory, Word};
use vbus::south::{Bus, BusConfig};
use vbus::window::WindowRing;
use venet::abi::{DEFAULT_RING_LENGTH, KIND_FRAME, KIND_LINK, LinkState};
use venet::counters::{DROP_REASONS, Direction, DropReason};
use venet::device::{DeviceConfig, Shared, VenetDevice};
use venet::driver::Driver;
use venet::offload::{Groups, HEADER_LENGTH};
use venet::port::Port;
use venet::pump::placement::Placement;
use venet::pump::policy::Policy;
use venet::queue::RingPair;
use zerocopy::{FromBytes, IntoBytes};

/// Longest wait for anything.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A frame and the offload header in front of it.
pub type Frame = ([u8; HEADER_LENGTH], Vec<u8>);

/// No claim about the frame.
pub const PLAIN: [u8; HEADER_LENGTH] = [0; HEADER_LENGTH];

/// A frame of `length` bytes, told apart by `seed`.
pub fn frame(length: usize, seed: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..length).map(|at| (at * 7 + seed * 31 + (at >> 8)) as u8).collect();
    frame.iter_mut().skip(12).zip([0x08, 0x00]).for_each(|(byte, value)| *byte = value);
    frame
}

/// The same with VLAN tags.
pub fn tagged(length: usize, seed: usize, tags: &[u16]) -> Vec<u8> {
    let mut frame = frame(length, seed);
    let types = tags.iter().flat_map(|tag| [(tag >> 8) as u8, *tag as u8, 0, 5]).chain([0x08, 0x00]);
    frame.iter_mut().skip(12).zip(types).for_each(|(byte, value)| *byte = value);
    frame
}

/// A super-frame of TCP over IPv4, cut into segments of `size` bytes, and its header.
pub fn super_frame(length: usize, seed: usize, size: u16) -> Frame {
    let mut bytes = frame(length, seed);
    bytes[14..34].fill(0);
    (bytes[14], bytes[23], bytes[46]) = (0x45, 6, 0x50);
    let mut header = [1, 1, 54, 0, 0, 0, 34, 0, 16, 0, 0, 0];
    header[4..6].copy_from_slice(&size.to_le_bytes());
    (header, bytes)
}

/// Waits until something is so.
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !so() {
        assert!(Instant::now() < end, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Ends a thread or something that owns one; a thread that does not end makes the test fail.
pub fn finish<T: Send + 'static>(what: &str, end: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, ended) = channel();
    std::thread::spawn(move || done.send(end()));
    ended.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{what} did not end within {PATIENCE:?}"))
}

/// How often a vector was notified since the last call.
pub fn writes(vector: &Vector) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(vector, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}

/// Whether a vector was notified, waiting for at most `timeout`.
pub fn notified(vector: &Vector, timeout: Duration) -> bool {
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
    poll(&mut [PollFd::from_borrowed_fd(vector.as_fd(), PollFlags::IN)], Some(&timeout)).is_ok_and(|count| count > 0)
}

/// A record, written by hand as an honest or a hostile peer would. Returns the index behind it.
pub fn write_record(ring: &WindowRing, index: u64, header: RecordHeader, payload: &[u8]) -> u64 {
    let offset = index & (ring.capacity() - 1);
    ring.write(offset, header.as_bytes());
    ring.write(offset + 32, payload);
    index + vbus::abi::record_length(u64::from(header.length))
}

/// The host, which serves the bus whenever the guest rings it.
pub struct Host(Option<Bus>);

impl Vector0 for Host {
    fn ring(&mut self) -> io::Result<()> {
        let mut bus = self.0.take().unwrap();
        // A reset waits for the device's pump.
        let (bus, served) = finish("serving the bus", move || {
            let served = bus.serve();
            (bus, served)
        });
        self.0 = Some(bus);
        served.map(drop).map_err(io::Error::other)
    }
    fn wait(&mut self) -> io::Result<()> {
        Err(io::Error::other("the host has nothing more to say"))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let bus = self.0.take();
        if std::thread::panicking() {
            std::thread::spawn(move || drop(bus));
        } else {
            finish("the device's pump", move || drop(bus));
        }
    }
}

/// How a device is set up and used.
#[derive(Clone, Copy)]
pub struct Setup {
    pub name: &'static str,
    pub groups: Groups,
    pub policy: Policy,
    pub ring_length: u64,
}

impl Default for Setup {
    fn default() -> Self {
        Self { name: "venet0", groups: Groups::ALL, policy: Policy::EventIndex, ring_length: DEFAULT_RING_LENGTH }
    }
}

/// A guest whose link is up, and what it saw.
pub struct Lab {
    pub guest: Guest,
    pub host: Host,
    pub queue: RingPair,
    pub shared: Arc<Shared>,
    pub doorbell: Vector,
    pub interrupt: Vector,
    groups: Groups,
    /// Notifications that the device sent, as the eventfd counted them.
    pub interrupts: u64,
    /// Notifications that the driver sent.
    pub doorbells: u64,
    /// What the device told about the link.
    pub links: Vec<LinkState>,
}

/// A bus with one device over `port`, and a guest on it that has done nothing yet.
pub fn bus<P: Port + Send + 'static>(port: P, setup: Setup) -> (Guest, Host, Arc<Shared>, Vector, Vector) {
    let (doorbell, interrupt) = (Vector::new().unwrap(), Vector::new().unwrap());
    let config = DeviceConfig {
        name: setup.name.into(),
        mac: [0x52, 0x54, 0, 0, 0, 1],
        mtu: 1500,
        groups: setup.groups,
        ring_length: setup.ring_length,
        policy: setup.policy,
        placement: Placement::None,
    };
    let (rung, rings) = (doorbell.try_clone().unwrap(), interrupt.try_clone().unwrap());
    let device = VenetDevice::new(config, port, rung, rings).unwrap();
    let shared = device.shared();
    let mut host = Host(Some(Bus::create(BusConfig { peer_id: 1 }, vec![Box::new(device)]).unwrap()));
    let window = Arc::clone(host.0.as_ref().unwrap().window());
    (Guest::start(window, &mut host).unwrap(), host, shared, doorbell, interrupt)
}

impl Lab {
    pub fn start<P: Port + Send + 'static>(port: P, setup: Setup) -> Self {
        Self::agree(port, setup, setup.groups)
    }

    /// The same with a port that makes host and guest agree on fewer groups.
    pub fn agree<P: Port + Send + 'static>(port: P, setup: Setup, agreed: Groups) -> Self {
        let (mut guest, mut host, shared, doorbell, interrupt) = bus(port, setup);
        let driver = Driver::open(&mut guest, &mut host).unwrap();
        let (queue, groups) = driver.link_up(&mut guest, &mut host, setup.groups).unwrap();
        assert_eq!(groups, agreed);
        let (interrupts, doorbells, links) = (0, 0, Vec::new());
        Self { guest, host, queue, shared, doorbell, interrupt, groups, interrupts, doorbells, links }
    }

    /// Starts over by a new generation, as a guest does that rebooted.
    pub fn reset(&mut self) {
        self.guest = Guest::start(Arc::clone(self.guest.window()), &mut self.host).unwrap();
        let driver = Driver::open(&mut self.guest, &mut self.host).unwrap();
        self.queue = driver.link_up(&mut self.guest, &mut self.host, self.groups).unwrap().0;
        self.links.clear();
    }

    /// A call to the device, and what the host says to it.
    pub fn call(&mut self, function: u32, argument: &(impl IntoBytes + zerocopy::Immutable)) -> Result<(), Status> {
        let call = DeviceCall { handle: 0, function, data: venet::abi::to_call(argument) };
        match self.guest.call::<_, DeviceCall>(&mut self.host, "DEVCALL", verb::DEVCALL, &call) {
            Ok(_) => Ok(()),
            Err(GuestError::Refused { status, .. }) => Err(status),
            Err(error) => panic!("{error}"),
        }
    }

    pub fn outgoing(&mut self) -> &mut Producer<WindowRing> {
        &mut self.queue.outgoing
    }

    pub fn incoming(&mut self) -> &mut Consumer<WindowRing> {
        &mut self.queue.incoming
    }

    /// Puts a frame into the ring if there is room.
    pub fn offer(&mut self, (header, bytes): &Frame) -> bool {
        let pushed = self.outgoing().push(KIND_FRAME, bytes, header).unwrap();
        self.announce();
        pushed
    }

    /// Publishes what is in the ring, and rings if the device wants that.
    pub fn announce(&mut self) {
        self.outgoing().publish();
        if self.outgoing().should_notify() {
            self.doorbells += 1;
            self.doorbell.notify().unwrap();
        }
    }

    /// Puts a frame into the ring, waiting for room.
    pub fn send(&mut self, frame: &Frame) {
        while !self.offer(frame) {
            if !self.outgoing().arm_space(frame.1.len() as u64).unwrap() {
                self.wait("room in the transmit ring");
            }
            self.outgoing().suppress_space();
        }
    }

    /// The next frame, if one is there. Asks for no notification.
    pub fn take(&mut self) -> Option<Frame> {
        loop {
            let record = self.incoming().peek().unwrap()?;
            let mut bytes = vec![0; record.payload.length as usize];
            self.incoming().copy_payload(&record, &mut bytes);
            self.incoming().advance(&record);
            self.incoming().commit();
            if self.incoming().should_notify() {
                self.doorbells += 1;
                self.doorbell.notify().unwrap();
            }
            match record.kind {
                KIND_FRAME => return Some((record.metadata, bytes)),
                KIND_LINK => self.links.push(LinkState::read_from_bytes(&bytes).unwrap()),
                kind => panic!("the device sent a record of kind {kind}"),
            }
        }
    }

    /// The next frame, waiting for a notification as a driver does.
    pub fn receive(&mut self) -> Frame {
        loop {
            if let Some(frame) = self.take() {
                return frame;
            }
            if !self.incoming().arm().unwrap() {
                self.wait("a frame in the receive ring");
            }
            self.incoming().suppress();
        }
    }

    /// The next frames, polling the ring: a driver that is awake.
    pub fn poll(&mut self, count: usize) -> Vec<Frame> {
        let mut frames = Vec::new();
        until("frames in the receive ring", || {
            frames.extend(std::iter::from_fn(|| self.take()).take(count - frames.len()));
            frames.len() == count
        });
        frames
    }

    fn wait(&mut self, what: &str) {
        assert!(notified(&self.interrupt, PATIENCE), "no notification of {what} within {PATIENCE:?}");
        self.count();
    }

    /// Adds up notifications.
    pub fn count(&mut self) -> u64 {
        self.interrupts += writes(&self.interrupt);
        self.interrupts
    }

    /// Waits until the device has taken everything and asks to be woken.
    pub fn quiet(&mut self) {
        let end = self.outgoing().position();
        let ring = self.queue.outgoing.memory();
        until("the device to go to sleep", || {
            let word = |word| ring.load(word, Ordering::Acquire);
            word(Word::Consumed) == end && word(Word::WakeAt) == end
        });
    }

    /// Takes the news of the link, and with it the notification that a fresh ring owes once.
    pub fn hear_link(&mut self) {
        until("news of the link", || {
            assert_eq!(self.take(), None);
            !self.links.is_empty()
        });
        self.count();
    }

    /// The device works: a few frames come back through a loopback port.
    pub fn echo(&mut self) {
        for seed in 0..3 {
            let sent = (PLAIN, frame(100, seed));
            self.send(&sent);
            assert_eq!(self.receive(), sent);
        }
    }
}

/// Says in words where two sequences of frames differ.
pub fn assert_same(found: &[Frame], expected: &[Frame]) {
    for (number, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(found == expected, "frame {number} of {} bytes came back otherwise", expected.1.len());
    }
    assert_eq!(found.len(), expected.len());
}

/// The drops of one direction that are not zero.
pub fn drops(direction: &Direction) -> Vec<(DropReason, u64)> {
    DROP_REASONS.iter().map(|&reason| (reason, direction.drops(reason))).filter(|(_, count)| *count > 0).collect()
}
