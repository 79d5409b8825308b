//! A TAP as a port of a bridge: created or adopted, and put back as it was found.

use crate::config::{DeviceConfig, GuestConfig, format_mac};
use anyhow::{Context, Result, bail};
use std::io;
use venet::port::Port;
use venet::port::interface::Interfaces;
use venet::port::tap::{Tap, TapOptions};

/// A TAP that is a port of a bridge.
#[derive(Debug)]
pub struct TapPort {
    /// An open queue of it.
    pub tap: Tap,
    /// Its name.
    pub name: String,
    /// Payload of the longest frame in bytes.
    pub mtu: u32,
    /// The bridge's MTU before this port joined: a bridge whose MTU nobody set follows the smallest of its ports.
    pub bridge_mtu: u32,
    /// Whether it existed before.
    pub adopted: bool,
}

/// What is said where `/dev/net/tun` cannot be opened.
pub const TUN_ADVICE: &str = "creating a TAP needs CAP_NET_ADMIN, and read and write access to /dev/net/tun \
                              (where it is missing: modprobe tun; where ordinary users may not open it: chmod 666 /dev/net/tun)";

impl TapPort {
    /// Creates the device's TAP or adopts an existing one, and makes it a port of the bridge. The carrier stays down until
    /// a guest has the link up, so the bridge sends nothing to a guest that is not there.
    pub fn attach(guest: &GuestConfig, device: &DeviceConfig) -> Result<Self> {
        let interfaces = Interfaces::open().context("cannot open a socket for network configuration")?;
        let name = device.tap_name(guest);
        let bridge = device.bridge.as_deref().unwrap_or_default();
        let bridge_mtu = interfaces.mtu(bridge).with_context(|| {
            format!("there is no bridge {bridge:?}; create it with: ip link add {bridge} type bridge")
        })?;
        if interfaces.is_bridge(bridge).is_ok_and(|is| !is) {
            bail!("{bridge} is an interface but no bridge");
        }
        let (mut tap, adopted) = open(&interfaces, &name)?;
        tap.set_carrier(false).context("cannot take the TAP's carrier away")?;
        let mtu = device.mtu.unwrap_or(bridge_mtu);
        interfaces.set_mtu(&name, mtu).with_context(|| format!("cannot set the MTU of {name} to {mtu}"))?;
        // The bridge takes the lowest address of its ports unless it has one of its own: fe is hardly ever the lowest.
        let mut mac = device.guest_mac(guest);
        mac[0] = 0xfe;
        interfaces
            .set_mac(&name, mac)
            .with_context(|| format!("cannot set the address of {name} to {}", format_mac(mac)))?;
        quiet_ipv6(&name);
        let bridge_mac = interfaces.mac(bridge).with_context(|| format!("cannot read the address of {bridge}"))?;
        match interfaces.join_bridge(bridge, &name) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && adopted => {}
            other => other.with_context(|| format!("cannot make {name} a port of {bridge}"))?,
        }
        // A bridge without other ports takes even this address; then it is given back the one that it had.
        if bridge_mac != mac && interfaces.mac(bridge).is_ok_and(|taken| taken == mac) {
            interfaces
                .set_mac(bridge, bridge_mac)
                .with_context(|| format!("cannot set the address of {bridge} to {}", format_mac(bridge_mac)))?;
        }
        interfaces.set_up(&name, true).with_context(|| format!("cannot set {name} up"))?;
        Ok(Self { tap, name, mtu, bridge_mtu, adopted })
    }
}

/// Opens the TAP, and tells whether it existed before.
fn open(interfaces: &Interfaces, name: &str) -> Result<(Tap, bool)> {
    let mut opened = open_once(interfaces, name);
    // The queue of a process that was killed a moment ago may not be free yet.
    for _ in 0..50 {
        if !opened.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY)) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
        opened = open_once(interfaces, name);
    }
    opened.map_err(|error| {
        let advice = match error.raw_os_error() {
            Some(libc::EBUSY) => "another process has it open; stop that one or choose another name",
            Some(libc::EINVAL) => "an interface of that name exists and is no TAP; choose another name",
            _ => TUN_ADVICE,
        };
        anyhow::anyhow!("cannot open the TAP {name}: {error}: {advice}")
    })
}

/// An existing TAP may have several queues or not, and only the right way succeeds.
fn open_once(interfaces: &Interfaces, name: &str) -> io::Result<(Tap, bool)> {
    let before = interfaces.index(name).ok();
    let options = TapOptions { multi_queue: false, persist: before.is_some() };
    let mut opened = Tap::open(name, options);
    if before.is_some() && opened.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL)) {
        opened = Tap::open(name, TapOptions { multi_queue: true, ..options });
    }
    let tap = opened?;
    // One that vanished meanwhile, together with the process that was killed, is a new one now, and ours to end.
    let adopted = before.is_some() && interfaces.index(name).ok() == before;
    if options.persist && !adopted {
        tap.set_persist(false)?;
    }
    Ok((tap, adopted))
}

/// The host side of a bridge port needs no address of its own, and its router solicitations would wake guests. Best effort:
/// where `/proc/sys` is not writable, the kernel's default stays.
fn quiet_ipv6(name: &str) {
    let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
}
