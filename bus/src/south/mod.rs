//! The host's half: a bus that serves one guest, and what a device has to offer.
//!
//! [`Bus`] is a state machine without threads and without I/O: whoever owns the doorbell of vector 0 calls
//! [`Bus::serve`] when it rang, and rings the guest's vector 0 when told so.

mod bus;
mod device;

pub use bus::{Bus, BusConfig, BusError, Served};
pub use device::{Attachment, Device, DeviceClass, RingRequest};
