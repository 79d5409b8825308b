//! What `host-bridge status` shows.

use crate::channel::DeviceReport;
use crate::config::format_mac;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use venet::counters::Values;
use venet::offload::Groups;

/// The whole daemon.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Of the daemon.
    pub version: String,
    /// Process that owns sockets and TAPs.
    pub supervisor: u32,
    /// Process that moves frames.
    pub data_process: u32,
    /// The guests.
    pub guests: Vec<GuestStatus>,
}

/// One guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GuestStatus {
    /// Its name.
    pub name: String,
    /// Where it connects.
    pub socket: String,
    /// Whether it is connected.
    pub connected: bool,
    /// How often it connected.
    pub connections: u64,
    /// How often it started over on this connection.
    pub resets: u64,
    /// How often this connection was quarantined.
    pub quarantines: u64,
    /// Its devices.
    pub devices: Vec<DeviceStatus>,
}

/// One device.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// Its name.
    pub name: String,
    /// The TAP on the bridge, if it has one.
    pub tap: Option<String>,
    /// The bridge, if it has one.
    pub bridge: Option<String>,
    /// Address of the guest's interface.
    pub mac: String,
    /// Payload of the longest frame in bytes.
    pub mtu: u32,
    /// `up`: frames pass. `down`: the port is down. `idle`: no driver has brought the link up. `quarantined`: the guest broke
    /// the rules of a ring of this device, and has not started over yet.
    pub link: String,
    /// Offloads in use.
    pub offloads: Vec<String>,
    /// Frames that the kernel dropped at the TAP, on their way to the guest.
    pub tap_dropped: u64,
    /// What the pump counted on this connection.
    pub counters: Values,
}

impl DeviceStatus {
    /// Takes over what the data process said.
    pub fn report(&mut self, report: DeviceReport, port_up: bool) {
        self.counters = report.counters;
        self.link = match (report.quarantined, report.linked, port_up) {
            (true, ..) => "quarantined",
            (_, false, _) => "idle",
            (_, true, true) => "up",
            (_, true, false) => "down",
        }
        .into();
        if report.linked {
            self.offloads = Groups::from_bits(report.groups).names().into_iter().map(str::to_owned).collect();
        }
    }

    /// A device of which nothing is known but its configuration.
    pub fn idle(name: &str, tap: Option<String>, bridge: Option<String>, mac: [u8; 6], mtu: u32) -> Self {
        Self {
            name: name.into(),
            tap,
            bridge,
            mac: format_mac(mac),
            mtu,
            link: "idle".into(),
            offloads: Vec::new(),
            tap_dropped: 0,
            counters: Values::default(),
        }
    }
}

/// Asks the daemon whose control socket is at `path`.
pub fn ask(path: &Path) -> Result<Status> {
    let mut stream = UnixStream::connect(path).with_context(|| {
        format!("no daemon answers at {}; is host-bridge running, and is this its control socket?", path.display())
    })?;
    stream.set_read_timeout(Some(std::time::Duration::from_secs(5)))?;
    let mut text = String::new();
    stream.read_to_string(&mut text).context("the daemon does not answer")?;
    serde_json::from_str(&text).context("the daemon's answer cannot be understood; are both of one release?")
}

/// As a table for people.
pub fn table(status: &Status) -> String {
    let mut text = format!(
        "host-bridge {}, supervisor {}, data process {}\n",
        status.version, status.supervisor, status.data_process
    );
    for guest in &status.guests {
        let state = if guest.connected { "connected" } else { "waiting" };
        let _ = writeln!(
            text,
            "\nguest {} at {}: {state}, {} connections, {} resets, {} quarantines",
            guest.name, guest.socket, guest.connections, guest.resets, guest.quarantines
        );
        for device in &guest.devices {
            let _ = writeln!(
                text,
                "  {}: link {}, tap {} on {}, mac {}, mtu {}, offloads {}",
                device.name,
                device.link,
                device.tap.as_deref().unwrap_or("-"),
                device.bridge.as_deref().unwrap_or("-"),
                device.mac,
                device.mtu,
                if device.offloads.is_empty() { "none".into() } else { device.offloads.join(",") },
            );
            let counters = &device.counters;
            let _ = writeln!(
                text,
                "    {:<11} {:>12} {:>15} {:>12} {:>10} {:>10} {:>8}",
                "", "frames", "bytes", "segments", "notified", "suppressed", "dropped"
            );
            for (name, direction) in [("from guest", &counters.from_ring), ("to guest", &counters.to_ring)] {
                let dropped: u64 = direction.drops.values().sum();
                let _ = writeln!(
                    text,
                    "    {name:<11} {:>12} {:>15} {:>12} {:>10} {:>10} {dropped:>8}",
                    direction.frames,
                    direction.bytes,
                    direction.segments,
                    direction.notifications_sent,
                    direction.notifications_suppressed,
                );
                for (reason, count) in direction.drops.iter().filter(|(_, count)| **count > 0) {
                    let _ = writeln!(text, "    {:<11} dropped as {reason:?}: {count}", "");
                }
            }
            let _ = writeln!(
                text,
                "    wake-ups {}, notifications received {}, waits for the port {}, for the guest {}, dropped by the kernel at the tap {}, violations {}",
                counters.wake_ups,
                counters.notifications_received,
                counters.port_full,
                counters.ring_full,
                device.tap_dropped,
                counters.violations,
            );
        }
    }
    text
}
