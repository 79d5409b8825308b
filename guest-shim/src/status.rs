//! What `guest-shim status` shows.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use venet::counters::Values;

/// The shim and its interface.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Status {
    /// Of the shim.
    pub version: String,
    /// The interface.
    pub interface: String,
    /// Whether a daemon is connected.
    pub connected: bool,
    /// Whether frames pass.
    pub link: bool,
    /// How often it connected.
    pub connections: u64,
    /// The host's name of the device.
    pub device: String,
    /// Offloads in use.
    pub offloads: Vec<String>,
    /// What the pump counted since the shim started.
    pub counters: Values,
}

/// Answers one client; one that does not read is not waited for.
pub fn answer(stream: UnixStream, status: &Status) -> Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(Duration::from_millis(200)))?;
    let mut stream = stream;
    Ok(stream.write_all(&serde_json::to_vec(status)?)?)
}

/// Asks the shim whose status socket is at `path`.
pub fn ask(path: &Path) -> Result<Status> {
    let mut stream = UnixStream::connect(path)
        .with_context(|| format!("no shim answers at {}; was it started with --status?", path.display()))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut text = String::new();
    stream.read_to_string(&mut text).context("the shim does not answer")?;
    serde_json::from_str(&text).context("the shim's answer cannot be understood; are both of one release?")
}

/// As a table for people.
pub fn table(status: &Status) -> String {
    let offloads = if status.offloads.is_empty() { "none".into() } else { status.offloads.join(",") };
    let state = if status.connected { "connected" } else { "waiting for the daemon" };
    let link = if status.link { "up" } else { "down" };
    let counters = &status.counters;
    format!(
        "{}: {state}, link {link}, device {}, offloads {offloads}, {} connections\n\
         sent      {} frames, {} bytes, {} notifications\n\
         received  {} frames, {} bytes, {} dropped\n",
        status.interface,
        status.device,
        status.connections,
        counters.to_ring.frames,
        counters.to_ring.bytes,
        counters.to_ring.notifications_sent,
        counters.from_ring.frames,
        counters.from_ring.bytes,
        counters.from_ring.drops.values().sum::<u64>(),
    )
}
