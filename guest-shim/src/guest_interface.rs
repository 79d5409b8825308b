//! The interface in the guest's network namespace.

use anyhow::{Context, Result, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use venet::port::Port;
use venet::port::interface::Interfaces;
use venet::port::tap::{Tap, TapOptions};

/// An address with its prefix length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    /// The address.
    pub address: IpAddr,
    /// Bits of the network.
    pub prefix: u8,
}

impl FromStr for Cidr {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('/').and_then(|(address, prefix)| {
            let address: IpAddr = address.parse().ok()?;
            let longest = if address.is_ipv4() { 32 } else { 128 };
            Some(Self { address, prefix: prefix.parse().ok().filter(|prefix| *prefix <= longest)? })
        });
        parsed.ok_or_else(|| format!("{text:?} is no address with a prefix length, such as 10.0.0.2/24 or fd00::2/64"))
    }
}

/// The interface: a TAP, and what is to become of it.
#[derive(Debug)]
pub struct GuestInterface {
    name: String,
    tap: Tap,
    interfaces: Interfaces,
    addresses: Vec<Cidr>,
    up: bool,
    configured: bool,
}

impl GuestInterface {
    /// Creates the TAP `name`, or adopts a persistent one; its carrier is down. In the calling thread's namespace.
    pub fn open(name: &str, persist: bool, addresses: Vec<Cidr>, up: bool) -> Result<Self> {
        let interfaces = Interfaces::open().context("cannot open a socket for network configuration")?;
        let mut tap = Tap::open(name, TapOptions { multi_queue: false, persist }).map_err(|error| {
            let advice = match error.raw_os_error() {
                Some(libc::EBUSY) => "another process has it open; is another guest-shim running?",
                Some(libc::EINVAL) => "an interface of that name exists and is no TAP with one queue",
                Some(libc::EACCES | libc::ENOENT) => {
                    "no access to /dev/net/tun; where it is missing: modprobe tun; where ordinary users may not open it: chmod 666 /dev/net/tun"
                }
                _ => "it needs CAP_NET_ADMIN in the guest's network namespace",
            };
            anyhow::anyhow!("cannot open the interface {name}: {error}: {advice}")
        })?;
        tap.set_carrier(false).context("cannot take the interface's carrier away")?;
        let up = up || !addresses.is_empty();
        Ok(Self { name: name.into(), tap, interfaces, addresses, up, configured: false })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A descriptor of the TAP for a pump.
    pub fn port(&self) -> Result<Tap> {
        Ok(self.tap.try_clone()?)
    }

    /// Shows whether frames pass.
    pub fn set_carrier(&mut self, up: bool) -> Result<()> {
        Ok(self.tap.set_carrier(up)?)
    }

    /// Takes over address and MTU of the device; the first time also sets the interface up as asked. What the guest's
    /// administrator has changed meanwhile stays, as far as the device allows.
    pub fn configure(&mut self, mac: [u8; 6], mtu: u32) -> Result<()> {
        let name = &self.name;
        if self.interfaces.mac(name)? != mac {
            self.interfaces.set_mac(name, mac).with_context(|| format!("cannot set the address of {name}"))?;
        }
        if !self.configured || self.interfaces.mtu(name)? > mtu {
            self.interfaces.set_mtu(name, mtu).with_context(|| format!("cannot set the MTU of {name} to {mtu}"))?;
        }
        if !self.configured && self.up {
            self.interfaces.set_up(name, true).with_context(|| format!("cannot set {name} up"))?;
            for Cidr { address, prefix } in &self.addresses {
                self.interfaces
                    .add_address(name, *address, *prefix)
                    .with_context(|| format!("cannot give {name} the address {address}/{prefix}"))?;
            }
        }
        self.configured = true;
        Ok(())
    }
}

/// Moves the process into a network namespace: a name that `ip netns` knows, or a path. The process must have one thread.
pub fn enter(namespace: &str) -> Result<()> {
    let path: PathBuf =
        if namespace.contains('/') { namespace.into() } else { Path::new("/run/netns").join(namespace) };
    let file = File::open(&path).with_context(|| {
        format!("cannot open the network namespace {}; create it with: ip netns add {namespace}", path.display())
    })?;
    match move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)) {
        Ok(()) => Ok(()),
        Err(error) => bail!("cannot enter the network namespace {}: {error}", path.display()),
    }
}
