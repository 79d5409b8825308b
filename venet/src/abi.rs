//! The interface type `virtual-ethernet`: its calls, its rings and its kinds of records.

use core::mem::{offset_of, size_of};
use vbus::abi::KIND_INTERFACE_FIRST;
use vbus::message::{CALL_DATA_LENGTH, CallData};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// The interface type, as DEVADD carries it: `VETH` read as a little-endian integer.
pub const INTERFACE_VIRTUAL_ETHERNET: u32 = u32::from_le_bytes(*b"VETH");
/// Version of the interface type, for DEVOPEN.
pub const INTERFACE_VERSION: u32 = 1;

/// Record: one Ethernet frame without frame check sequence; the metadata is a `virtio_net_hdr` with 12 bytes.
pub const KIND_FRAME: u16 = KIND_INTERFACE_FIRST;
/// Record, host to guest: a [`LinkState`].
pub const KIND_LINK: u16 = KIND_INTERFACE_FIRST + 1;

/// Longest legal payload of a frame record in bytes: an IP packet of 65535, Ethernet header, two tags; and one byte more,
/// so that a frame that is too long is seen.
pub const LARGEST_RECORD: u64 = 65535 + 14 + 4 + 4 + 1;
/// Bytes of a ring by default: four of the largest records, rounded up to a power of two.
pub const DEFAULT_RING_LENGTH: u64 = (4 * LARGEST_RECORD).next_power_of_two();

/// Ring number, as DEVSHM names it, for frames of queue pair `pair` from guest to host.
pub const fn transmit_ring(pair: u32) -> u32 {
    pair.wrapping_mul(2)
}
/// Ring number for frames of queue pair `pair` from host to guest.
pub const fn receive_ring(pair: u32) -> u32 {
    pair.wrapping_mul(2).wrapping_add(1)
}

/// Functions of DEVCALL.
pub mod function {
    /// Ask what the device is; the result is [`super::DeviceDescription`].
    pub const QUERY: u32 = 1;
    /// Fix the offloads and start; argument and result are [`super::LinkUp`].
    pub const LINK_UP: u32 = 2;
    /// Stop.
    pub const LINK_DOWN: u32 = 3;
}

/// Result of QUERY.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceDescription {
    /// Offload groups that the host offers, see [`crate::offload`].
    pub groups: u64,
    /// Payload of the longest frame, in bytes.
    pub mtu: u32,
    /// How many queue pairs the device has.
    pub queue_pairs: u32,
    /// Address of the guest's interface.
    pub mac: [u8; 6],
    /// Zero.
    pub reserved: [u8; 2],
    /// Zero.
    pub reserved_end: [u8; 8],
}

const _: () = {
    assert!(size_of::<DeviceDescription>() == 32);
    assert!(offset_of!(DeviceDescription, groups) == 0);
    assert!(offset_of!(DeviceDescription, mtu) == 8);
    assert!(offset_of!(DeviceDescription, queue_pairs) == 12);
    assert!(offset_of!(DeviceDescription, mac) == 16);
    assert!(offset_of!(DeviceDescription, reserved) == 22);
    assert!(offset_of!(DeviceDescription, reserved_end) == 24);
};

/// Argument of LINK_UP: what the guest wants. Result: what is in use until LINK_DOWN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LinkUp {
    /// Offload groups, a subset of those offered.
    pub groups: u64,
    /// Queue pairs, at most as many as the device has.
    pub queue_pairs: u32,
    /// Zero.
    pub reserved: u32,
}

const _: () = {
    assert!(size_of::<LinkUp>() == 16);
    assert!(offset_of!(LinkUp, groups) == 0);
    assert!(offset_of!(LinkUp, queue_pairs) == 8);
    assert!(offset_of!(LinkUp, reserved) == 12);
};

/// Payload of a record of [`KIND_LINK`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LinkState {
    /// 1 if frames pass, 0 if not.
    pub up: u32,
    /// Payload of the longest frame from now on, in bytes.
    pub mtu: u32,
}

const _: () = {
    assert!(size_of::<LinkState>() == 8);
    assert!(offset_of!(LinkState, up) == 0);
    assert!(offset_of!(LinkState, mtu) == 4);
};

/// A structure as the data of a call.
pub fn to_call<T: IntoBytes + Immutable>(value: &T) -> CallData {
    let mut data = [0; CALL_DATA_LENGTH];
    data.iter_mut().zip(value.as_bytes()).for_each(|(to, from)| *to = *from);
    data
}

/// The structure at the start of a call's data. What it says is still only what the peer claims.
pub fn from_call<T: FromBytes + FromZeros>(data: &CallData) -> T {
    T::read_from_prefix(data).map_or_else(|_| T::new_zeroed(), |(value, _)| value)
}
