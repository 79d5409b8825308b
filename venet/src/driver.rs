//! The guest's end: finds a venet device on a bus, agrees on offloads, and brings the link up.

use crate::abi::{
    DeviceDescription, INTERFACE_VERSION, INTERFACE_VIRTUAL_ETHERNET, LARGEST_RECORD, LinkUp, from_call, function,
    receive_ring, to_call, transmit_ring,
};
use crate::offload::Groups;
use crate::queue::RingPair;
use std::sync::Arc;
use thiserror::Error;
use vbus::message::{
    CallData, DeviceCall, DeviceMemory, DeviceMemoryGranted, DeviceOpen, DeviceOpened, decode_name, verb,
};
use vbus::north::{Event, Guest, GuestError, Vector0};
use vbus::ring::{Consumer, Producer, RingConfig};
use vbus::window::WindowRing;

/// Why a driver cannot use the device.
#[derive(Debug, Error)]
pub enum DriverError {
    /// The bus does not work.
    #[error(transparent)]
    Bus(#[from] GuestError),
    /// A ring does not lie in the window.
    #[error(transparent)]
    Window(#[from] vbus::window::WindowError),
    /// A ring cannot work.
    #[error(transparent)]
    Ring(#[from] vbus::ring::UnusableRing),
    /// The host offers something that cannot work.
    #[error("the host offers a device that cannot work: {0}")]
    Unusable(&'static str),
}

/// A device that was opened; the link is down.
#[derive(Debug)]
pub struct Driver {
    handle: u32,
    /// Ring this doorbell for the queue pair.
    pub doorbell: u32,
    /// The host notifies of the queue pair by this interrupt.
    pub interrupt: u32,
    /// The host's name of the device.
    pub name: String,
    /// What the device is.
    pub description: DeviceDescription,
}

impl Driver {
    /// Waits for the first venet device on the bus, and opens it.
    pub fn open(guest: &mut Guest, vector: &mut impl Vector0) -> Result<Self, DriverError> {
        let added = loop {
            match guest.wait_for(vector)? {
                Event::Added(added) if added.interface == INTERFACE_VIRTUAL_ETHERNET => break added,
                _ => {}
            }
        };
        let open = DeviceOpen { device: added.device, interface_version: INTERFACE_VERSION };
        let opened: DeviceOpened = guest.call(vector, "DEVOPEN", verb::DEVOPEN, &open)?;
        let mut driver = Self {
            handle: opened.handle,
            doorbell: opened.first_doorbell,
            interrupt: opened.first_interrupt,
            name: decode_name(&added.name),
            description: from_call(&[0; 64]),
        };
        driver.description = from_call(&driver.call(guest, vector, function::QUERY, [0; 64])?);
        if !(68..=65535).contains(&driver.description.mtu) {
            return Err(DriverError::Unusable("its MTU is not from 68 to 65535"));
        }
        if driver.description.mac.first().is_none_or(|first| first & 1 == 1) {
            return Err(DriverError::Unusable("its MAC address is a group address"));
        }
        Ok(driver)
    }

    /// Asks for the rings and brings the link up, with those of `groups` that the host offers too. Returns them.
    pub fn link_up(
        &self,
        guest: &mut Guest,
        vector: &mut impl Vector0,
        groups: Groups,
    ) -> Result<(RingPair, Groups), DriverError> {
        let outgoing = self.ring(guest, vector, transmit_ring(0))?;
        let incoming = self.ring(guest, vector, receive_ring(0))?;
        let config = RingConfig { largest: LARGEST_RECORD, generation: guest.generation() };
        let pair =
            RingPair { incoming: Consumer::new(incoming, config, 0)?, outgoing: Producer::new(outgoing, config, 0)? };
        let asked = LinkUp { groups: groups.bits(), queue_pairs: 1, reserved: 0 };
        let answer: LinkUp = from_call(&self.call(guest, vector, function::LINK_UP, to_call(&asked))?);
        Ok((pair, groups & Groups::from_bits(answer.groups)))
    }

    fn ring(&self, guest: &mut Guest, vector: &mut impl Vector0, ring: u32) -> Result<WindowRing, DriverError> {
        let asked = DeviceMemory { handle: self.handle, ring };
        let granted: DeviceMemoryGranted = guest.call(vector, "DEVSHM", verb::DEVSHM, &asked)?;
        if granted.largest != LARGEST_RECORD {
            return Err(DriverError::Unusable("its rings are for records of another size"));
        }
        Ok(WindowRing::new(Arc::clone(guest.window()), granted.location())?)
    }

    fn call(
        &self,
        guest: &mut Guest,
        vector: &mut impl Vector0,
        function: u32,
        data: CallData,
    ) -> Result<CallData, DriverError> {
        let call = DeviceCall { handle: self.handle, function, data };
        let answer: DeviceCall = guest.call(vector, "DEVCALL", verb::DEVCALL, &call)?;
        Ok(answer.data)
    }
}
