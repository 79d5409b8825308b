//! The host's end: a device on a bus, with a pump in a thread of its own once the link is up.

#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]

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
    /// Groups in use, or [`NOT_LINKED`].
    groups: AtomicU64,
    /// 1 if the host side of the link is up.
    link: AtomicU64,
    waker: Waker,
}

/// In place of groups: no driver has the link up.
const NOT_LINKED: u64 = u64::MAX;

impl Shared {
    /// The offload groups in use; `None` if no driver has brought the link up.
    pub fn groups(&self) -> Option<Groups> {
        // Relaxed: shown to people only.
        let bits = self.groups.load(Ordering::Relaxed);
        (bits != NOT_LINKED).then(|| Groups::from_bits(bits))
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
    thread: JoinHandle<P>,
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
            return Err(Status::Busy);
        }
        if asked.queue_pairs != 1 {
            return Err(Status::InvalidArgument);
        }
        let groups = self.config.groups & Groups::from_bits(asked.groups);
        self.start(groups)?;
        Ok(LinkUp { groups: groups.bits(), queue_pairs: 1, reserved: 0 })
    }

    fn start(&mut self, groups: Groups) -> Result<(), Status> {
        let (Some(incoming), Some(outgoing)) = (self.incoming.take(), self.outgoing.take()) else {
            return Err(Status::NotReady);
        };
        let mut port = self.port.take().ok_or(Status::HostFailure)?;
        let ring = |attachment: &Attachment| RingConfig { largest: LARGEST_RECORD, generation: attachment.generation };
        let (to_host, to_guest) = (ring(&incoming), ring(&outgoing));
        let failed = |error: &dyn core::fmt::Display| {
            tracing::error!("{}: cannot bring the link up: {error}", self.config.name);
            Status::HostFailure
        };
        let incoming = Consumer::new(incoming.ring, to_host, 0).map_err(|error| failed(&error))?;
        let outgoing = Producer::new(outgoing.ring, to_guest, 0).map_err(|error| failed(&error))?;
        let [doorbell, interrupt] = &self.vectors;
        port.set_offloads(groups).map_err(|error| failed(&error))?;
        let config = PumpConfig {
            limits: Limits { mtu: self.config.mtu, groups },
            policy: self.config.policy,
            back_pressure: false,
            notify: interrupt.try_clone().map_err(|error| failed(&error))?,
            notified: doorbell.try_clone().map_err(|error| failed(&error))?,
            counters: Arc::clone(&self.shared.counters),
        };
        let mut pump = Pump::new(RingPair { incoming, outgoing }, port, config).map_err(|error| failed(&error))?;
        let stop = Waker::new().map_err(|error| failed(&error))?;
        pump.watch(&stop).and_then(|()| pump.watch(&self.shared.waker)).map_err(|error| failed(&error))?;
        let thread = Worker {
            pump,
            stop: stop.clone(),
            shared: Arc::clone(&self.shared),
            placement: self.config.placement.clone(),
            name: self.config.name.clone(),
            mtu: self.config.mtu,
            events: groups.contains(Groups::LINK_EVENTS),
        };
        let thread = std::thread::Builder::new()
            .name(format!("{:.15}", self.config.name))
            .spawn(move || thread.run())
            .map_err(|error| failed(&error))?;
        // Relaxed: shown to people only.
        self.shared.groups.store(groups.bits(), Ordering::Relaxed);
        self.running = Some(Running { stop, thread });
        Ok(())
    }

    fn link_down(&mut self) {
        let Some(running) = self.running.take() else { return };
        // Relaxed: shown to people only.
        self.shared.groups.store(NOT_LINKED, Ordering::Relaxed);
        if running.stop.stop().is_ok()
            && let Ok(mut port) = running.thread.join()
        {
            if let Err(error) = port.set_carrier(false) {
                tracing::warn!("{}: cannot take the carrier away: {error}", self.config.name);
            }
            self.port = Some(port);
        }
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
            match self.pump.run() {
                Ok(()) => {}
                Err(PumpError::Violation(violation)) => {
                    tracing::warn!("{}: quarantined until the guest resets: {violation}", self.name);
                    break;
                }
                Err(error) => {
                    tracing::error!("{}: stopped: {error}", self.name);
                    break;
                }
            }
        }
        self.pump.into_port()
    }
}
