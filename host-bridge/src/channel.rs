//! What supervisor and data process say to each other: JSON messages with descriptors, on a socket pair.

use rustix::net::RecvFlags;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use vbus::connector::local;
use venet::counters::Values;

/// What the data process needs to know of a device.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DeviceSpec {
    /// Its name on the bus.
    pub name: String,
    /// Whether a TAP descriptor comes with it; otherwise frames go back to the guest.
    pub tap: bool,
    /// Address of the guest's interface.
    pub mac: [u8; 6],
    /// Payload of the longest frame in bytes.
    pub mtu: u32,
    /// Offload groups that are offered.
    pub groups: u64,
    /// Bytes of each ring.
    pub ring: u64,
    /// When to notify.
    pub policy: String,
    /// Where the pump runs.
    pub cpus: String,
    /// Whether the port is up.
    pub link: bool,
}

/// From the supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// A guest is connected. Descriptors: window, private state, doorbells, interrupts, then a TAP for each device that has
    /// one.
    Connect {
        /// The guest's name.
        guest: String,
        /// Number of the connection.
        peer_id: u64,
        /// Its devices.
        devices: Vec<DeviceSpec>,
    },
    /// A guest is gone.
    Disconnect {
        /// Number of the connection.
        peer_id: u64,
    },
    /// A device's port went up or down.
    Link {
        /// Number of the connection.
        peer_id: u64,
        /// Which of its devices.
        device: usize,
        /// The new state.
        up: bool,
    },
    /// Tell the state of all guests.
    Status,
}

/// From the data process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The state of one connection.
    Connection {
        /// Number of the connection.
        peer_id: u64,
        /// How often the guest started over.
        resets: u64,
        /// How often the connection was quarantined.
        quarantines: u64,
        /// Its devices.
        devices: Vec<DeviceReport>,
    },
    /// The state of all connections was told.
    StatusEnd,
}

/// The state of one device.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Its name on the bus.
    pub name: String,
    /// Whether a driver has brought the link up.
    pub linked: bool,
    /// Whether the guest broke the rules of one of its rings, and has not started over yet.
    pub quarantined: bool,
    /// Offload groups in use.
    pub groups: u64,
    /// What was counted.
    pub counters: Values,
}

/// Sends a message.
pub fn send<T: Serialize>(socket: BorrowedFd<'_>, message: &T, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    local::send(socket, &serde_json::to_vec(message)?, descriptors)
}

/// Receives a message without waiting; `None` at the end of the other process.
pub fn receive<T: DeserializeOwned>(socket: &OwnedFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; 256 * 1024];
    let (length, descriptors) = local::receive(socket.as_fd(), &mut bytes, RecvFlags::DONTWAIT)?;
    if length == 0 {
        return Ok(None);
    }
    let message = serde_json::from_slice(bytes.get(..length).unwrap_or_default())?;
    Ok(Some((message, descriptors)))
}
