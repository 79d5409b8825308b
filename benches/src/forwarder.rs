//! The floor: per guest one thread that copies frames between the guest's TAP and its port on the bridge.
//!
//! The same system calls, sizes, offloads, batching and placement as venet's pumps, but without a ring, without a second
//! process and without a second wake-up. Whatever venet costs beyond this is venet's own.

use anyhow::{Context, Result};
use guest_shim::guest_interface::{Cidr, GuestInterface, enter};
use host_bridge::config::{DeviceConfig, GuestConfig};
use host_bridge::tap_port::TapPort;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use venet::abi::LARGEST_RECORD;
use venet::offload::{Groups, HEADER_LENGTH};
use venet::port::Port;
use venet::port::tap::Tap;
use venet::pump::{BYTE_BUDGET, FRAME_BUDGET};

/// One guest of the forwarder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ForwarderGuest {
    /// Names its TAP.
    pub name: String,
    /// Its network namespace.
    pub namespace: String,
    /// Name of its interface.
    pub interface: String,
    /// Its address with prefix length.
    pub address: String,
}

/// What the forwarder's process is asked to do; passed as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ForwarderConfig {
    /// Bridge of the namespace that the process starts in.
    pub bridge: String,
    /// The guests.
    pub guests: Vec<ForwarderGuest>,
    /// CPUs to run on.
    pub cpus: String,
    /// Offloads of all TAPs.
    pub offloads: String,
}

/// Runs until it is killed.
pub fn run(config: &ForwarderConfig) -> Result<()> {
    let groups: Groups = config.offloads.parse()?;
    let placement: venet::pump::placement::Placement = config.cpus.parse()?;
    placement.apply().context("cannot run on these CPUs")?;
    // All ports first: joining a guest's namespace is for good.
    let mut ports = Vec::new();
    for guest in &config.guests {
        let (guest, device) =
            (as_configured(guest), DeviceConfig { bridge: Some(config.bridge.clone()), ..Default::default() });
        let mut port = TapPort::attach(&guest, &device)?;
        // As the shim does: what a kernel does not have is not used on either side.
        let accepted = port.tap.set_offloads(groups)?;
        ports.push((port, device.guest_mac(&guest), accepted));
    }
    let mut interfaces = Vec::new();
    let mut threads = Vec::new();
    for (guest, (mut port, mac, accepted)) in config.guests.iter().zip(ports) {
        enter(&guest.namespace)?;
        let address: Cidr = guest.address.parse().map_err(anyhow::Error::msg)?;
        let mut interface = GuestInterface::open(&guest.interface, false, vec![address], true)?;
        interface.configure(mac, port.mtu)?;
        let mut tap = interface.port()?;
        tap.set_offloads(accepted)?;
        tap.set_carrier(true)?;
        port.tap.set_carrier(true)?;
        interfaces.push(interface);
        let name = format!("{:.15}", guest.name);
        threads.push(std::thread::Builder::new().name(name).spawn(move || {
            // One that ends by itself would leave half a forwarder.
            if let Err(error) = forward(&tap, &port.tap) {
                tracing::error!("forwarder: {error:#}");
                std::process::exit(1);
            }
        })?);
    }
    for thread in threads {
        thread.join().map_err(|_| anyhow::anyhow!("a forwarding thread panicked"))?;
    }
    Ok(())
}

/// A guest of the daemon's that makes the same TAP as the daemon would.
fn as_configured(guest: &ForwarderGuest) -> GuestConfig {
    GuestConfig {
        name: guest.name.clone(),
        socket: "/nonexistent".into(),
        mode: 0o600,
        group: None,
        devices: vec![DeviceConfig::default()],
    }
}

/// Copies frames both ways for good.
fn forward(guest: &Tap, bridge: &Tap) -> Result<()> {
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    for (token, tap) in [guest, bridge].into_iter().enumerate() {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
        epoll::add(&epoll, tap, EventData::new_u64(token as u64), flags)?;
    }
    let mut buffer = vec![0; HEADER_LENGTH + LARGEST_RECORD as usize];
    loop {
        let there = drain(guest, bridge, &mut buffer)?;
        let back = drain(bridge, guest, &mut buffer)?;
        if !there && !back {
            wait(&epoll)?;
        }
    }
}

/// Copies until nothing is left or a budget is used up; returns whether there was anything.
fn drain(from: &Tap, to: &Tap, buffer: &mut [u8]) -> Result<bool> {
    let (mut frames, mut bytes) = (0, 0);
    while frames < FRAME_BUDGET && bytes < BYTE_BUDGET {
        let length = match rustix::io::read(from, &mut *buffer) {
            Ok(length) => length,
            Err(Errno::AGAIN | Errno::IO) => break,
            Err(error) => return Err(error).context("cannot read from a TAP"),
        };
        // A TAP takes every frame at once, or its interface is down and the frame is lost as on any unplugged cable.
        match rustix::io::write(to, buffer.get(..length).unwrap_or_default()) {
            Ok(_) | Err(Errno::IO | Errno::NETDOWN | Errno::AGAIN) => {}
            Err(error) => return Err(error).context("cannot write to a TAP"),
        }
        frames += 1;
        bytes += length as u64;
    }
    Ok(frames > 0)
}

fn wait(epoll: &OwnedFd) -> Result<()> {
    let mut space = [const { MaybeUninit::uninit() }; 4];
    match epoll::wait(epoll, &mut space, None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error).context("cannot wait for the TAPs"),
    }
}
