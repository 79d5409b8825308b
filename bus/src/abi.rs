//! The shared-memory ABI: constants, and the structures that lie in the window.
//!
//! `docs/wire.md` describes the same layout for people who write a driver; the assertions below each structure keep
//! both in step. All integers are little-endian. Every position is an offset from the start of the window in bytes.

use core::mem::{offset_of, size_of};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First eight bytes of every window: `VBUSWIN1` read as a little-endian integer.
pub const WINDOW_MAGIC: u64 = u64::from_le_bytes(*b"VBUSWIN1");
/// Both sides must agree on the major version exactly.
pub const ABI_MAJOR: u16 = 1;
/// A side ignores what a higher minor version adds; what it may use is negotiated.
pub const ABI_MINOR: u16 = 0;
/// Records and control words start on a cache line, so that no two sides write to one line. Bytes.
pub const CACHE_LINE: u64 = 64;
/// The value of an arm word that asks for no notification.
pub const NOT_ARMED: u64 = u64::MAX;
/// Bytes of the four control words of one ring, one cache line each.
pub const RING_WORDS_LENGTH: u64 = 4 * CACHE_LINE;

/// Offset of [`WindowHeader::host_generation`], an atomic word that only the host writes.
pub const HOST_GENERATION_OFFSET: u64 = 128;
/// Offset of the word on the one header line that only the guest writes.
pub const RESET_GENERATION_OFFSET: u64 = 192;

/// Where a ring lies: its four control words, and its records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RingLocation {
    /// Offset of the control words, on a cache line.
    pub words: u64,
    /// Offset of the records, on a cache line.
    pub data: u64,
    /// Bytes of records, a power of two.
    pub length: u64,
}

const _: () = {
    assert!(size_of::<RingLocation>() == 24);
    assert!(offset_of!(RingLocation, words) == 0);
    assert!(offset_of!(RingLocation, data) == 8);
    assert!(offset_of!(RingLocation, length) == 16);
};

/// The start of every window. The host writes it before it passes the window to the guest; only the two generation
/// words change afterwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WindowHeader {
    /// [`WINDOW_MAGIC`].
    pub magic: u64,
    /// [`ABI_MAJOR`] of the host.
    pub abi_major: u16,
    /// [`ABI_MINOR`] of the host.
    pub abi_minor: u16,
    /// Bytes of this structure; a later minor version may append fields.
    pub header_length: u32,
    /// Bytes of the whole window, a power of two.
    pub window_size: u64,
    /// The ring that carries verbs, guest to host.
    pub verbs: RingLocation,
    /// The ring that carries replies and events, host to guest.
    pub events: RingLocation,
    /// How many vectors notify the host (doorbells). Vector 0 is the bus.
    pub doorbells: u32,
    /// How many vectors notify the guest (interrupts). Vector 0 is the bus.
    pub interrupts: u32,
    /// Identifies the connection in the host's log.
    pub peer_id: u64,
    /// Zero.
    pub reserved: [u64; 5],
    /// Counts the resets that the host has completed. Atomic.
    pub host_generation: u64,
    /// Zero.
    pub reserved_host_line: [u64; 7],
    /// The guest asks for a reset by writing `host_generation + 1` here and ringing vector 0. Atomic.
    pub reset_generation: u64,
    /// Zero.
    pub reserved_guest_line: [u64; 7],
}

const _: () = {
    assert!(size_of::<WindowHeader>() == 256);
    assert!(offset_of!(WindowHeader, magic) == 0);
    assert!(offset_of!(WindowHeader, abi_major) == 8);
    assert!(offset_of!(WindowHeader, abi_minor) == 10);
    assert!(offset_of!(WindowHeader, header_length) == 12);
    assert!(offset_of!(WindowHeader, window_size) == 16);
    assert!(offset_of!(WindowHeader, verbs) == 24);
    assert!(offset_of!(WindowHeader, events) == 48);
    assert!(offset_of!(WindowHeader, doorbells) == 72);
    assert!(offset_of!(WindowHeader, interrupts) == 76);
    assert!(offset_of!(WindowHeader, peer_id) == 80);
    assert!(offset_of!(WindowHeader, reserved) == 88);
    assert!(offset_of!(WindowHeader, host_generation) as u64 == HOST_GENERATION_OFFSET);
    assert!(offset_of!(WindowHeader, reset_generation) as u64 == RESET_GENERATION_OFFSET);
};

/// Bytes of the offload metadata that a record carries; the bus does not interpret them.
pub const METADATA_LENGTH: usize = 12;
/// Bytes of [`RecordHeader`], in front of every payload.
pub const RECORD_HEADER_LENGTH: u64 = 32;

/// Fills the ring from here to its end. Carries nothing.
pub const KIND_PAD: u16 = 1;
/// A control message.
pub const KIND_MESSAGE: u16 = 2;
/// First kind that an interface type may give a meaning to.
pub const KIND_INTERFACE_FIRST: u16 = 16;

/// In front of every record of a ring. The record as a whole is padded to a cache line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RecordHeader {
    /// Bytes of payload behind this header.
    pub length: u32,
    /// [`KIND_PAD`], [`KIND_MESSAGE`], or a kind of the interface type.
    pub kind: u16,
    /// Zero.
    pub reserved: u16,
    /// The low half of the generation that the record belongs to.
    pub generation: u32,
    /// Zero.
    pub reserved_before_metadata: [u8; 8],
    /// For the interface type: `virtual-ethernet` puts a `virtio_net_hdr` here, which so ends where the frame starts.
    pub metadata: [u8; METADATA_LENGTH],
}

const _: () = {
    assert!(size_of::<RecordHeader>() as u64 == RECORD_HEADER_LENGTH);
    assert!(offset_of!(RecordHeader, length) == 0);
    assert!(offset_of!(RecordHeader, kind) == 4);
    assert!(offset_of!(RecordHeader, reserved) == 6);
    assert!(offset_of!(RecordHeader, generation) == 8);
    assert!(offset_of!(RecordHeader, reserved_before_metadata) == 12);
    assert!(offset_of!(RecordHeader, metadata) == 20);
};

/// Bytes that a record with `payload` bytes takes in a ring: header and payload, padded to a cache line.
pub const fn record_length(payload: u64) -> u64 {
    payload.saturating_add(RECORD_HEADER_LENGTH).saturating_add(CACHE_LINE - 1) & !(CACHE_LINE - 1)
}
