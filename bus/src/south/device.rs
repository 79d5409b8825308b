//! What a device offers to the bus, and how a class makes devices.

use crate::message::{CallData, Status};
use crate::window::WindowRing;

/// A device on a bus, from the bus's side. All calls come from the thread that serves the bus.
pub trait Device: Send {
    /// The host's name of the device.
    fn name(&self) -> &str;
    /// The ABI that the guest's driver matches on.
    fn interface(&self) -> u32;
    /// A driver takes the device into use.
    fn open(&mut self, interface_version: u32) -> Result<(), Status>;
    /// A call whose meaning the interface type defines.
    fn call(&mut self, function: u32, data: &CallData) -> Result<CallData, Status>;
    /// What ring number `ring` needs, or `None` if there is no such ring.
    fn ring(&self, ring: u32) -> Option<RingRequest>;
    /// The guest asked for ring number `ring`; it is zeroed.
    fn attach(&mut self, ring: u32, attachment: Attachment) -> Result<(), Status>;
    /// The driver is gone: on DEVCLOSE, on a reset, and at the end of the connection. When this returns, nothing of the
    /// device touches the window any more.
    fn close(&mut self);
    /// Bytes of all rings of the device, for the size of the window.
    fn ring_lengths(&self) -> Vec<u64>;
    /// How many queues (and so vectors, each way) the device has.
    fn queues(&self) -> u32;
}

/// What a ring needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingRequest {
    /// Bytes of records, a power of two.
    pub length: u64,
    /// Largest payload in bytes.
    pub largest: u64,
}

/// A ring that was handed to a device.
#[derive(Debug)]
pub struct Attachment {
    /// The ring.
    pub ring: WindowRing,
    /// Records carry the low half of it.
    pub generation: u32,
    /// Which doorbell and which interrupt the device's first queue has.
    pub first_vector: u32,
}

/// A factory of devices. Several classes may offer one interface type.
pub trait DeviceClass {
    /// What a device of this class is configured with.
    type Config;
    /// The device, and what else its owner wants to keep.
    type Product;
    /// Why a device cannot be made.
    type Error;
    /// The name that configurations use, for instance `venet-tap`.
    const NAME: &'static str;
    /// Makes a device.
    fn create(&self, config: Self::Config) -> Result<Self::Product, Self::Error>;
}
