//! The host's end: a device on a bus, with a pump in a thread of its own once the link is up.

use crate::abi::{
    DeviceDescription, INTERFACE_VERSION, INTERFACE_VIRTUAL_ETHERNET, LARGEST_RECORD, LinkState, LinkUp, from_call,
    function, receive_ring, to_call, transmit_ring,
};
use crate::counters::Counters;
use crate::frame::Limits;
use crate::offload::Groups;
use crate::port::Port;
use crate::pump::placement::Placement;
use crate::pump::policy::Policy;
use crate::pump::{Pump, PumpConfig, PumpError, Waker};
use crate::queue::RingPair;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SendError, channel};
use std::thread::JoinHandle;
use vbus::connector::notifier::Vector;
use vbus::message::{CallData, Status};
use vbus::ring::{Consumer, Producer, RingConfig};
use vbus::south::{Attachment, Device, RingRequest};

/// How a device is set up.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// The device's name on the bus.
    pub name: String,
    /// Address of the guest's interface.
    pub mac: [u8; 6],
    /// Payload of the longest frame, in bytes.
    pub mtu: u32,
    /// Offload groups that are offered.
    pub groups: Groups,
    /// Bytes of each ring, a power of two.
    pub ring_length: u64,
    /// When to notify.
    pub policy: Policy,
    /// Where the pump runs.
    pub placement: Placement,
}

/// What others may see and do while the pump runs.
#[derive(Debug)]
pub struct Shared {
    /// What is counted.
    pub counters: Arc<Counters>,
    /// Groups in use, [`NOT_LINKED`] or [`QUARANTINED`].
    groups: AtomicU64,
    /// 1 if the host side of the link is up.
    link: AtomicU64,
    waker: Waker,
}

/// In place of groups: no driver has the link up.
const NOT_LINKED: u64 = u64::MAX;
/// In place of groups: the guest broke the ring protocol, and has not started over yet.
const QUARANTINED: u64 = u64::MAX - 1;

impl Shared {
    /// The offload groups in use; `None` if no driver has brought the link up, or the pump has ended.
    pub fn groups(&self) -> Option<Groups> {
        // Relaxed: nothing else is ordered by it.
        let bits = self.groups.load(Ordering::Relaxed);
        (bits != NOT_LINKED && bits != QUARANTINED).then(|| Groups::from_bits(bits))
    }

    /// Whether the guest broke the ring protocol, and has not started over yet.
    pub fn quarantined(&self) -> bool {
        // Relaxed: as above.
        self.groups.load(Ordering::Relaxed) == QUARANTINED
    }

    fn set_groups(&self, bits: u64) {
        // Relaxed: as above.
        self.groups.store(bits, Ordering::Relaxed);
    }

    /// Whether the host side of the link is up.
    pub fn link(&self) -> bool {
        // Relaxed: the pump looks again after each wake-up.
        self.link.load(Ordering::Relaxed) != 0
    }

    /// Tells the guest that the host side of the link went up or down.
    pub fn set_link(&self, up: bool) -> io::Result<()> {
        // Relaxed: the eventfd write orders it before the pump's look.
        self.link.store(u64::from(up), Ordering::Relaxed);
        self.waker.wake()
    }
}

/// A venet device over one port.
pub struct VenetDevice<P: Port + Send + 'static> {
    config: DeviceConfig,
    vectors: [Vector; 2],
    port: Option<P>,
    shared: Arc<Shared>,
    incoming: Option<Attachment>,
    outgoing: Option<Attachment>,
    running: Option<Running<P>>,
}

struct Running<P> {
    stop: Waker,
    thread: JoinHandle<Option<P>>,
}

impl<P: Port + Send + 'static> VenetDevice<P> {
    /// A device that is rung by `doorbell` and notifies the guest by `interrupt`.
    pub fn new(config: DeviceConfig, port: P, doorbell: Vector, interrupt: Vector) -> io::Result<Self> {
        let shared = Shared {
            counters: Arc::default(),
            groups: AtomicU64::new(NOT_LINKED),
            link: AtomicU64::new(1),
            waker: Waker::new()?,
        };
        Ok(Self {
            config,
            vectors: [doorbell, interrupt],
            port: Some(port),
            shared: Arc::new(shared),
            incoming: None,
            outgoing: None,
            running: None,
        })
    }

    /// What others may see and do.
    pub fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    fn link_up(&mut self, asked: LinkUp) -> Result<LinkUp, Status> {
        if self.running.is_some() {
            // The rings of a pump that has ended are of no use any more: the guest has to start over.
            return Err(if self.shared.groups().is_some() { Status::Busy } else { Status::NotReady });
        }
        if asked.queue_pairs != 1 {
            return Err(Status::InvalidArgument);
        }
        let groups = self.start(self.config.groups & Groups::from_bits(asked.groups))?;
        Ok(LinkUp { groups: groups.bits(), queue_pairs: 1, reserved: 0 })
    }

    /// Starts the pump. Returns those of `groups` that the port accepts: they are in use.
    fn start(&mut self, groups: Groups) -> Result<Groups, Status> {
        if self.incoming.is_none() || self.outgoing.is_none() {
            // The one that is there stays, for when the other has come.
            return Err(Status::NotReady);
        }
        let (Some(incoming), Some(outgoing)) = (self.incoming.take(), self.outgoing.take()) else {
            return Err(Status::NotReady);
        };
        let port = self.port.take().ok_or(Status::HostFailure)?;
        match self.spawn(port, [incoming, outgoing], groups) {
            Ok((running, groups)) => {
                self.running = Some(running);
                Ok(groups)
            }
            Err((port, error)) => {
                tracing::error!("{}: cannot bring the link up: {error}", self.config.name);
                self.shared.set_groups(NOT_LINKED);
                self.port = Some(port);
                Err(Status::HostFailure)
            }
        }
    }

    /// As [`Self::start`]. Gives the port back if that cannot be done.
    fn spawn(&self, mut port: P, rings: [Attachment; 2], groups: Groups) -> Result<(Running<P>, Groups), (P, Failure)> {
        let (stop, queue, config) = match self.prepare(&mut port, rings, groups) {
            Ok(prepared) => prepared,
            Err(error) => return Err((port, error)),
        };
        let groups = config.limits.groups;
        let mut pump = Pump::try_new(queue, port, config).map_err(|(port, error)| (port, error.into()))?;
        if let Err(error) = pump.watch(&stop).and_then(|()| pump.watch(&self.shared.waker)) {
            return Err((pump.into_port(), error.into()));
        }
        let worker = Worker {
            pump,
            stop: stop.clone(),
            shared: Arc::clone(&self.shared),
            placement: self.config.placement.clone(),
            name: self.config.name.clone(),
            mtu: self.config.mtu,
            events: groups.contains(Groups::LINK_EVENTS),
        };
        // Before the pump runs, which may end it at once.
        self.shared.set_groups(groups.bits());
        // What a thread is started with is lost if it does not start, so the worker follows afterwards.
        let (hand_over, handed) = channel::<Worker<P>>();
        let builder = std::thread::Builder::new().name(format!("{:.15}", self.config.name));
        match builder.spawn(move || handed.recv().ok().map(Worker::run)) {
            Ok(thread) => match hand_over.send(worker) {
                Ok(()) => Ok((Running { stop, thread }, groups)),
                Err(SendError(worker)) => Err((worker.pump.into_port(), "the pump's thread is gone".into())),
            },
            Err(error) => Err((worker.pump.into_port(), error.into())),
        }
    }

    fn prepare(
        &self,
        port: &mut P,
        [incoming, outgoing]: [Attachment; 2],
        groups: Groups,
    ) -> Result<(Waker, RingPair, PumpConfig), Failure> {
        let ring = |attachment: &Attachment| RingConfig { largest: LARGEST_RECORD, generation: attachment.generation };
        let (to_host, to_guest) = (ring(&incoming), ring(&outgoing));
        let incoming = Consumer::new(incoming.ring, to_host, 0)?;
        let outgoing = Producer::new(outgoing.ring, to_guest, 0)?;
        let [doorbell, interrupt] = &self.vectors;
        let groups = groups & port.set_offloads(groups)?;
        let config = PumpConfig {
            limits: Limits { mtu: self.config.mtu, groups },
            policy: self.config.policy,
            back_pressure: false,
            notify: interrupt.try_clone()?,
            notified: doorbell.try_clone()?,
            counters: Arc::clone(&self.shared.counters),
        };
        Ok((Waker::new()?, RingPair { incoming, outgoing }, config))
    }

    fn link_down(&mut self) {
        let Some(running) = self.running.take() else { return };
        if running.stop.stop().is_ok()
            && let Ok(Some(mut port)) = running.thread.join()
        {
            take_carrier_away(&mut port, &self.config.name);
            self.port = Some(port);
        }
        // After the thread, which may have found a violation to the last.
        self.shared.set_groups(NOT_LINKED);
    }
}

/// Why a link does not come up.
type Failure = Box<dyn std::error::Error>;

fn take_carrier_away(port: &mut impl Port, name: &str) {
    if let Err(error) = port.set_carrier(false) {
        tracing::warn!("{name}: cannot take the carrier away: {error}");
    }
}

impl<P: Port + Send + 'static> Device for VenetDevice<P> {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn interface(&self) -> u32 {
        INTERFACE_VIRTUAL_ETHERNET
    }

    fn open(&mut self, interface_version: u32) -> Result<(), Status> {
        if interface_version == INTERFACE_VERSION { Ok(()) } else { Err(Status::UnsupportedVersion) }
    }

    fn call(&mut self, number: u32, data: &CallData) -> Result<CallData, Status> {
        match number {
            function::QUERY => Ok(to_call(&DeviceDescription {
                groups: self.config.groups.bits(),
                mtu: self.config.mtu,
                queue_pairs: 1,
                mac: self.config.mac,
                reserved: [0; 2],
                reserved_end: [0; 8],
            })),
            function::LINK_UP => self.link_up(from_call(data)).map(|answer| to_call(&answer)),
            function::LINK_DOWN => {
                self.link_down();
                Ok(*data)
            }
            _ => Err(Status::UnknownFunction),
        }
    }

    fn ring(&self, ring: u32) -> Option<RingRequest> {
        let known = ring == transmit_ring(0) || ring == receive_ring(0);
        known.then_some(RingRequest { length: self.config.ring_length, largest: LARGEST_RECORD })
    }

    fn attach(&mut self, ring: u32, attachment: Attachment) -> Result<(), Status> {
        if ring == transmit_ring(0) {
            self.incoming = Some(attachment);
        } else {
            self.outgoing = Some(attachment);
        }
        Ok(())
    }

    fn close(&mut self) {
        self.link_down();
        (self.incoming, self.outgoing) = (None, None);
    }

    fn ring_lengths(&self) -> Vec<u64> {
        vec![self.config.ring_length; 2]
    }

    fn queues(&self) -> u32 {
        1
    }
}

impl<P: Port + Send + 'static> Drop for VenetDevice<P> {
    fn drop(&mut self) {
        self.link_down();
    }
}

/// The thread that runs a device's pump.
struct Worker<P> {
    pump: Pump<RingPair, P>,
    stop: Waker,
    shared: Arc<Shared>,
    placement: Placement,
    name: String,
    mtu: u32,
    /// Link events were agreed on.
    events: bool,
}

impl<P: Port> Worker<P> {
    fn run(mut self) -> P {
        if let Err(error) = self.placement.apply() {
            tracing::warn!("{}: cannot run on CPUs {}: {error}", self.name, self.placement);
        }
        if let Err(error) = self.pump.port().set_carrier(true) {
            tracing::warn!("{}: cannot raise the carrier: {error}", self.name);
        }
        let mut told = None;
        while !self.stop.stopped() {
            let up = self.shared.link();
            if told != Some(up) && self.events {
                told = Some(up);
                self.pump.tell_link(LinkState { up: u32::from(up), mtu: self.mtu });
            }
            if let Err(error) = self.pump.run() {
                self.give_up(&error);
                break;
            }
            // The guest has no say in this; left where it is, it would keep the pump from sleeping.
            self.pump.take_link();
        }
        self.pump.into_port()
    }

    /// Shows that no frames pass any more. The thread ends; the port comes back when the device is closed.
    fn give_up(&mut self, error: &PumpError) {
        if let PumpError::Violation(violation) = error {
            tracing::warn!("{}: quarantined until the guest resets: {violation}", self.name);
            self.shared.counters.violations.add(1);
            self.shared.set_groups(QUARANTINED);
        } else {
            tracing::error!("{}: stopped: {error}", self.name);
            self.shared.set_groups(NOT_LINKED);
        }
        take_carrier_away(self.pump.port(), &self.name);
    }
}
