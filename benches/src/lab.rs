//! Where an arm runs: a bridge in one network namespace, two guests in two more, and the arm's processes in between.

use crate::arguments::{Arm, ArmKind};
use crate::children::{Child, ShimArguments};
use crate::forwarder::{ForwarderConfig, ForwarderGuest};
use crate::namespaces::{DIRECTORY, NetworkNamespace};
use crate::veth;
use anyhow::{Context, Result, bail};
use guest_shim::guest_interface::Cidr;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use venet::port::interface::Interfaces;

/// The bridge of every lab.
const BRIDGE: &str = "br0";
/// How long a lab may take until both guests have a carrier.
const PATIENCE: Duration = Duration::from_secs(10);

/// An arm that is ready for load.
#[derive(Debug)]
pub struct Lab {
    /// What it is.
    pub arm: Arm,
    /// The guests.
    pub guests: [Guest; 2],
    /// Processes of the data path.
    pub processes: Vec<Process>,
    control: Option<PathBuf>,
    shims: Vec<PathBuf>,
    _host: NetworkNamespace,
    children: Vec<Child>,
}

/// One guest.
#[derive(Debug)]
pub struct Guest {
    /// Where its sockets live.
    pub namespace: Arc<NetworkNamespace>,
    /// Its address.
    pub address: Ipv4Addr,
    interface: &'static str,
    /// `/proc/net/dev` of its namespace.
    counters: File,
}

/// A process of the data path.
#[derive(Clone, Debug, Serialize)]
pub struct Process {
    /// The arm.
    pub arm: String,
    /// What it does.
    pub role: String,
    /// Its number.
    pub pid: u32,
    /// CPUs that it may run on.
    pub cpus_allowed: String,
}

/// Notifications and frames that the guests' drivers counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Notifications {
    /// Sent by daemon and shims.
    pub sent: u64,
    /// Frames delivered to each guest.
    pub delivered: [u64; 2],
}

impl Lab {
    /// Builds the arm. The calling thread is in another network namespace afterwards, and must live as long as the lab.
    pub fn build(arm: &Arm, number: usize) -> Result<Self> {
        let name = |part: &str| format!("arm{number}-{part}");
        let interface = match arm.kind {
            ArmKind::Venet => "venet0",
            ArmKind::Forwarder => "tap0",
            ArmKind::Veth => "eth0",
        };
        let guest = |number: u8, name: String| {
            let namespace = Arc::new(NetworkNamespace::create(&name)?);
            let counters = File::open("/proc/thread-self/net/dev").context("cannot open /proc/thread-self/net/dev")?;
            Ok::<_, anyhow::Error>(Guest { namespace, address: Ipv4Addr::new(10, 0, 0, number), interface, counters })
        };
        let guests = [guest(1, name("g1"))?, guest(2, name("g2"))?];
        let host = NetworkNamespace::create(&name("host"))?;
        let interfaces = Interfaces::open()?;
        interfaces.create_bridge(BRIDGE).context("cannot create a bridge; does this kernel have the module bridge?")?;
        interfaces.set_up(BRIDGE, true)?;
        let directory = Path::new(DIRECTORY).join(name("sockets"));
        fs::create_dir(&directory)?;
        let mut lab = Self {
            arm: arm.clone(),
            guests,
            processes: Vec::new(),
            control: None,
            shims: Vec::new(),
            _host: host,
            children: Vec::new(),
        };
        match arm.kind {
            ArmKind::Venet => lab.start_venet(&directory)?,
            ArmKind::Forwarder => lab.start_forwarder()?,
            ArmKind::Veth => lab.connect_veth()?,
        }
        lab.wait_for_carrier()?;
        // By now the pumps run where they were told to.
        lab.processes.iter_mut().for_each(|process| process.cpus_allowed = cpus_allowed(process.pid));
        Ok(lab)
    }

    /// Frames that the guests received, a super-frame counting as one.
    pub fn received(&self) -> Result<[u64; 2]> {
        let [first, second] = &self.guests;
        Ok([first.received()?, second.received()?])
    }

    /// What daemon and shims counted; `None` for an arm that sends no notifications.
    pub fn notifications(&self) -> Result<Option<Notifications>> {
        let Some(control) = &self.control else { return Ok(None) };
        let mut sum = Notifications::default();
        let daemon = host_bridge::status::ask(control)?;
        if !self.processes.iter().any(|process| process.pid == daemon.data_process) {
            bail!("the daemon's data process was replaced");
        }
        for device in daemon.guests.iter().flat_map(|guest| &guest.devices) {
            sum.sent += device.counters.from_ring.notifications_sent + device.counters.to_ring.notifications_sent;
        }
        for (shim, delivered) in self.shims.iter().zip(&mut sum.delivered) {
            let status = guest_shim::status::ask(shim)?;
            if !status.connected || status.connections != 1 {
                bail!("a shim lost its connection");
            }
            let counters = status.counters;
            sum.sent += counters.from_ring.notifications_sent + counters.to_ring.notifications_sent;
            *delivered = counters.from_ring.frames;
        }
        Ok(Some(sum))
    }

    /// An error if a process of the arm has ended.
    pub fn check(&mut self) -> Result<()> {
        self.children.iter_mut().try_for_each(Child::check)
    }

    /// The daemon, and one shim per guest.
    fn start_venet(&mut self, directory: &Path) -> Result<()> {
        let arm = self.arm.clone();
        let socket = |name: &str| directory.join(format!("{name}.sock"));
        let control = socket("control");
        let mut config = format!("control = {:?}\n", control.display().to_string());
        for guest in ["g1", "g2"] {
            config += &format!(
                "[[guest]]\nname = {guest:?}\nsocket = {:?}\n[[guest.device]]\nbridge = {BRIDGE:?}\n\
                 cpus = {:?}\npolicy = {:?}\noffloads = {:?}\n",
                socket(guest).display().to_string(),
                arm.placement.to_string(),
                arm.policy.to_string(),
                arm.offloads.to_string(),
            );
        }
        let path = directory.join("host-bridge.toml");
        fs::write(&path, config)?;
        let supervisor = Child::supervisor(&path)?;
        let pid = supervisor.pid();
        self.children.push(supervisor);
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            match host_bridge::status::ask(&control) {
                Ok(status) => break status,
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => self.nap()?,
            }
        };
        self.add_process("daemon: supervisor", pid);
        self.add_process("daemon: data process", status.data_process);
        self.control = Some(control);
        for (number, name) in [(0, "g1"), (1, "g2")] {
            let Some(guest) = self.guests.get(number) else { continue };
            let status = socket(&format!("{name}-shim"));
            let shim = Child::shim(&ShimArguments {
                connect: socket(name),
                interface: guest.interface.into(),
                namespace: guest.namespace.name.clone(),
                address: guest.cidr(),
                offloads: arm.offloads.to_string(),
                policy: arm.policy.to_string(),
                cpus: arm.placement.to_string(),
                status: status.clone(),
            })?;
            let pid = shim.pid();
            self.children.push(shim);
            self.shims.push(status.clone());
            let deadline = Instant::now() + PATIENCE;
            while guest_shim::status::ask(&status).is_err() {
                if Instant::now() > deadline {
                    bail!("the shim of guest {name} does not answer");
                }
                self.nap()?;
            }
            self.add_process(&format!("shim {name}"), pid);
        }
        Ok(())
    }

    fn start_forwarder(&mut self) -> Result<()> {
        let guest = |(guest, name): (&Guest, &str)| ForwarderGuest {
            name: name.into(),
            namespace: guest.namespace.name.clone(),
            interface: guest.interface.into(),
            address: guest.cidr().to_owned(),
        };
        let config = ForwarderConfig {
            bridge: BRIDGE.into(),
            guests: self.guests.iter().zip(["g1", "g2"]).map(guest).collect(),
            cpus: self.arm.placement.to_string(),
            offloads: self.arm.offloads.to_string(),
        };
        let child = Child::forwarder(&config)?;
        let pid = child.pid();
        self.children.push(child);
        self.wait_for_carrier()?;
        self.add_process("forwarder, a thread per guest", pid);
        Ok(())
    }

    fn connect_veth(&mut self) -> Result<()> {
        let interfaces = Interfaces::open()?;
        for (number, guest) in self.guests.iter().enumerate() {
            let name = format!("veth{number}");
            veth::create(&name, guest.interface, guest.namespace.descriptor())?;
            interfaces.join_bridge(BRIDGE, &name)?;
            interfaces.set_up(&name, true)?;
        }
        for guest in &self.guests {
            guest.namespace.enter()?;
            let Cidr { address, prefix } = guest.cidr().parse().map_err(anyhow::Error::msg)?;
            let interfaces = Interfaces::open()?;
            interfaces.set_up(guest.interface, true)?;
            interfaces.add_address(guest.interface, address, prefix)?;
        }
        Ok(())
    }

    /// Waits a moment; an error if a process of the arm has ended.
    fn nap(&mut self) -> Result<()> {
        std::thread::sleep(Duration::from_millis(5));
        self.check()
    }

    fn wait_for_carrier(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        for number in 0..self.guests.len() {
            while !self.guests.get(number).is_some_and(Guest::is_running) {
                if Instant::now() > deadline {
                    bail!("guest {} has no carrier after {} s", number + 1, PATIENCE.as_secs());
                }
                self.nap()?;
            }
        }
        Ok(())
    }

    fn add_process(&mut self, role: &str, pid: u32) {
        let cpus_allowed = cpus_allowed(pid);
        self.processes.push(Process { arm: self.arm.text.clone(), role: role.into(), pid, cpus_allowed });
    }
}

/// Where the threads of a process may run; more than one list if they differ.
fn cpus_allowed(pid: u32) -> String {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let allowed = |thread: fs::DirEntry| {
        let status = fs::read_to_string(thread.path().join("status")).ok()?;
        Some(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim().to_owned())
    };
    let lists: BTreeSet<String> = threads.filter_map(allowed).collect();
    lists.into_iter().collect::<Vec<_>>().join(" and ")
}

impl Drop for Lab {
    fn drop(&mut self) {
        // The last first: a shim that sees its daemon end would say so.
        while let Some(child) = self.children.pop() {
            drop(child);
        }
    }
}

impl Guest {
    fn cidr(&self) -> String {
        format!("{}/24", self.address)
    }

    fn is_running(&self) -> bool {
        let running =
            || anyhow::Ok(self.namespace.enter().and_then(|()| Ok(Interfaces::open()?))?.is_running(self.interface)?);
        running().unwrap_or(false)
    }

    fn received(&self) -> Result<u64> {
        let mut text = vec![0; 16384];
        let length = self.counters.read_at(&mut text, 0).context("cannot read /proc/net/dev")?;
        let text = String::from_utf8_lossy(text.get(..length).unwrap_or_default()).into_owned();
        received_by(&text, self.interface).with_context(|| format!("/proc/net/dev does not show {}", self.interface))
    }
}

/// The frames that an interface received, from the text of `/proc/net/dev`.
fn received_by(text: &str, interface: &str) -> Option<u64> {
    let numbers = text.lines().find_map(|line| line.trim_start().strip_prefix(interface)?.strip_prefix(':'))?;
    numbers.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::received_by;

    #[test]
    fn packets_are_the_second_number_of_an_interface() {
        let text = "Inter-|   Receive  |  Transmit\n face |bytes    packets errs\n    lo:       1       2    0\n  eth0: 3000      40    0    0\n eth01: 5 6 0\n";
        assert_eq!(received_by(text, "eth0"), Some(40));
        assert_eq!(received_by(text, "lo"), Some(2));
        assert_eq!(received_by(text, "eth1"), None);
    }
}
