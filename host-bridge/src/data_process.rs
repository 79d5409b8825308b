//! The process that moves frames: no capability, no root, and only the descriptors that the supervisor passes.

use crate::channel::{self, Answer, DeviceReport, DeviceSpec, Order};
use crate::privileges;
use anyhow::{Context, Result, bail};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use vbus::connector::notifier::Vector;
use vbus::private_state::{PrivateState, field};
use vbus::south::{Bus, BusConfig, Device, DeviceClass};
use vbus::window::Window;
use venet::counters::DropReason;
use venet::device::{DeviceConfig, Shared, VenetDevice};
use venet::offload::Groups;
use venet::port::loopback::Loopback;
use venet::port::tap::Tap;

/// Serves the supervisor at the other end of `supervisor` until that ends. Gives up all privileges first.
pub fn run(supervisor: OwnedFd, user: &str) -> Result<()> {
    // As started the name would be `exe`.
    rustix::thread::set_name(c"host-bridge")?;
    if !privileges::drop_all(user)? {
        tracing::debug!("no other user can be had in this user namespace; capabilities are given up");
    }
    // If the supervisor dies while no thread listens to the socket. The kernel forgets this when the user changes, so it
    // comes after.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let mut process =
        DataProcess { supervisor, connections: BTreeMap::new(), epoll: epoll::create(CreateFlags::CLOEXEC)? };
    let token = EventData::new_u64(SUPERVISOR);
    epoll::add(&process.epoll, &process.supervisor, token, EventFlags::IN)?;
    process.serve()
}

/// Not the number of any connection.
const SUPERVISOR: u64 = 0;

struct DataProcess {
    supervisor: OwnedFd,
    connections: BTreeMap<u64, Connection>,
    epoll: OwnedFd,
}

struct Connection {
    guest: String,
    bus: Bus,
    doorbell: Vector,
    interrupt: Vector,
    devices: Vec<(String, Arc<Shared>)>,
    private: PrivateState,
    quarantined: bool,
    quarantines: u64,
}

impl DataProcess {
    fn serve(&mut self) -> Result<()> {
        loop {
            let mut space = [const { MaybeUninit::<Event>::uninit() }; 32];
            let events = match epoll::wait(&self.epoll, &mut space, None) {
                Ok((events, _)) => events,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            for event in events {
                match event.data.u64() {
                    SUPERVISOR => {
                        let Some((order, descriptors)) = channel::receive(&self.supervisor)? else { return Ok(()) };
                        self.obey(order, descriptors)?;
                    }
                    peer_id => {
                        if let Some(connection) = self.connections.get_mut(&peer_id) {
                            connection.serve();
                        }
                    }
                }
            }
        }
    }

    fn obey(&mut self, order: Order, descriptors: Vec<OwnedFd>) -> Result<()> {
        match order {
            Order::Connect { guest, peer_id, devices } => match Connection::new(&guest, peer_id, &devices, descriptors)
            {
                Ok(connection) => {
                    // Edge-triggered and never read: the guest shares the file description.
                    let token = EventData::new_u64(peer_id);
                    epoll::add(&self.epoll, &connection.doorbell, token, EventFlags::IN | EventFlags::ET)?;
                    self.connections.insert(peer_id, connection);
                }
                Err(error) => tracing::error!("{guest}: cannot serve the connection: {error:#}"),
            },
            Order::Disconnect { peer_id } => {
                if let Some(connection) = self.connections.remove(&peer_id) {
                    epoll::delete(&self.epoll, &connection.doorbell)?;
                    drop(connection.bus.into_devices());
                }
            }
            Order::Link { peer_id, device, up } => {
                let connection = self.connections.get(&peer_id);
                if let Some((_, shared)) = connection.and_then(|connection| connection.devices.get(device)) {
                    shared.set_link(up)?;
                }
            }
            Order::Status => {
                for (peer_id, connection) in &self.connections {
                    self.answer(&connection.report(*peer_id))?;
                }
                self.answer(&Answer::StatusEnd)?;
            }
        }
        Ok(())
    }

    fn answer(&self, answer: &Answer) -> Result<()> {
        loop {
            match channel::send(self.supervisor.as_fd(), answer, &[]) {
                // The supervisor is reading; it has asked.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                other => return Ok(other?),
            }
        }
    }
}

impl Connection {
    fn new(guest: &str, peer_id: u64, specs: &[DeviceSpec], descriptors: Vec<OwnedFd>) -> Result<Self> {
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().context("the supervisor passed too few descriptors");
        let window = Arc::new(Window::adopt(next()?)?);
        let (private, _) = PrivateState::open(next()?)?;
        let vectors = specs.len().saturating_add(1);
        let doorbells = (0..vectors).map(|_| next().map(Vector::from)).collect::<Result<Vec<_>>>()?;
        let interrupts = (0..vectors).map(|_| next().map(Vector::from)).collect::<Result<Vec<_>>>()?;
        let mut devices: Vec<Box<dyn Device>> = Vec::new();
        let mut shared = Vec::new();
        for (number, spec) in specs.iter().enumerate() {
            let (Some(doorbell), Some(interrupt)) =
                (doorbells.get(number.saturating_add(1)), interrupts.get(number.saturating_add(1)))
            else {
                bail!("the supervisor passed too few vectors");
            };
            let parts = Parts {
                config: device_config(spec)?,
                doorbell: doorbell.try_clone()?,
                interrupt: interrupt.try_clone()?,
                link: spec.link,
                tap: if spec.tap { Some(Tap::from(next()?)) } else { None },
            };
            let (device, seen) = if spec.tap { VenetTap.create(parts)? } else { VenetLoopback.create(parts)? };
            devices.push(device);
            shared.push(seen);
        }
        let bus = Bus::over(BusConfig { peer_id }, window, devices)?;
        let mut vectors = doorbells.into_iter().zip(interrupts);
        let (doorbell, interrupt) = vectors.next().context("a bus has a vector")?;
        let guest = guest.to_owned();
        Ok(Self { guest, bus, doorbell, interrupt, devices: shared, private, quarantined: false, quarantines: 0 })
    }

    /// The guest rang the bus.
    fn serve(&mut self) {
        let before = self.bus.generation();
        if self.quarantined {
            match self.bus.reset_if_asked() {
                Ok(true) => self.quarantined = false,
                _ => return,
            }
        }
        let outcome = self.bus.serve();
        // Not only what `serve` says of a reset: one that ended a quarantine came before it, and an error may follow one.
        if self.bus.generation() != before {
            self.store_private_state();
        }
        match outcome {
            Ok(served) => {
                if served.notify || self.bus.generation() > 0 {
                    let _ = self.interrupt.notify();
                }
            }
            Err(error) => {
                self.bus.close_devices();
                self.quarantined = true;
                self.quarantines = self.quarantines.wrapping_add(1);
                tracing::warn!("{}: quarantined until it resets: {error}", self.guest);
            }
        }
    }

    fn store_private_state(&mut self) {
        let fields = [(field::GENERATION, self.bus.generation().to_le_bytes().to_vec())];
        if let Err(error) = self.private.store(&fields) {
            tracing::error!("{}: cannot store private state: {error}", self.guest);
        }
    }

    fn report(&self, peer_id: u64) -> Answer {
        let report = |(name, shared): &(String, Arc<Shared>)| DeviceReport {
            name: name.clone(),
            linked: shared.groups().is_some(),
            quarantined: shared.quarantined(),
            groups: shared.groups().map_or(0, Groups::bits),
            counters: (&*shared.counters).into(),
        };
        Answer::Connection {
            peer_id,
            resets: self.bus.generation(),
            quarantines: self.quarantines,
            devices: self.devices.iter().map(report).collect(),
        }
    }
}

fn device_config(spec: &DeviceSpec) -> Result<DeviceConfig> {
    Ok(DeviceConfig {
        name: spec.name.clone(),
        mac: spec.mac,
        mtu: spec.mtu,
        groups: Groups::from_bits(spec.groups),
        ring_length: spec.ring,
        policy: spec.policy.parse()?,
        placement: spec.cpus.parse()?,
    })
}

/// What every class makes a device from.
struct Parts {
    config: DeviceConfig,
    doorbell: Vector,
    interrupt: Vector,
    link: bool,
    tap: Option<Tap>,
}

impl Parts {
    fn device<P: venet::port::Port + Send + 'static>(self, port: P) -> io::Result<Made> {
        let name = self.config.name.clone();
        let device = VenetDevice::new(self.config, port, self.doorbell, self.interrupt)?;
        let shared = device.shared();
        shared.set_link(self.link)?;
        Ok((Box::new(device), (name, shared)))
    }
}

/// A device, and what others may see of it.
type Made = (Box<dyn Device>, (String, Arc<Shared>));

/// The class whose frames go to a TAP on a bridge.
struct VenetTap;

/// The class whose frames go back to the guest.
struct VenetLoopback;

impl DeviceClass for VenetTap {
    type Config = Parts;
    type Product = Made;
    type Error = io::Error;
    const NAME: &'static str = "venet-tap";

    fn create(&self, mut parts: Parts) -> io::Result<Made> {
        let mut tap = parts.tap.take().ok_or_else(|| io::Error::other("the supervisor passed no TAP"))?;
        // Frames for the guest that was here before.
        let stale = tap.discard_queued();
        let made = parts.device(tap)?;
        made.1.1.counters.to_ring.dropped_many(DropReason::Stale, stale);
        Ok(made)
    }
}

impl DeviceClass for VenetLoopback {
    type Config = Parts;
    type Product = Made;
    type Error = io::Error;
    const NAME: &'static str = "venet-loopback";

    fn create(&self, parts: Parts) -> io::Result<Made> {
        parts.device(Loopback::default())
    }
}
