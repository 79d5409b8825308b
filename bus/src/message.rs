//! Control messages: verbs that the guest sends, replies and events that the host sends.
//!
//! Every message is a flat structure of fixed-width little-endian integers and fixed arrays behind one
//! [`MessageHeader`]. bincode encodes them in its fixed-integer form, which is exactly the C layout: the structures have
//! no padding, and a test compares both. A decoded message proves only that its length was right; every field in it is
//! still what the peer claims.

use crate::abi::RingLocation;
use bincode::config::{Configuration, Fixint, LittleEndian, NoLimit};
use bincode::{Decode, Encode};
use core::mem::offset_of;
use thiserror::Error;

/// Bytes that a DEVCALL carries at most, each way.
pub const CALL_DATA_LENGTH: usize = 64;
/// Bytes of the longest message.
pub const LARGEST_MESSAGE: u64 = 128;
/// Bytes of a name in a message, padded with zeroes.
pub const NAME_LENGTH: usize = 32;
/// Set in the verb of a reply.
pub const REPLY: u32 = 1 << 31;

/// What a message is about.
pub mod verb {
    /// Agree on the version and the features of the bus.
    pub const NEGOTIATE: u32 = 1;
    /// The guest is ready; the host announces every device that exists.
    pub const READY: u32 = 2;
    /// Take a device into use.
    pub const DEVOPEN: u32 = 3;
    /// Give a device back.
    pub const DEVCLOSE: u32 = 4;
    /// A call whose meaning the interface type defines.
    pub const DEVCALL: u32 = 5;
    /// Ask for one of the device's rings.
    pub const DEVSHM: u32 = 6;
    /// Event: a device exists.
    pub const DEVADD: u32 = 0x101;
    /// Event: a device is gone.
    pub const DEVDROP: u32 = 0x102;
    /// Event: a ring is out of use.
    pub const SHMCLOSE: u32 = 0x103;
}

/// Outcome of a verb, in its reply.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// There is no such verb.
    #[error("unknown verb")]
    UnknownVerb = 1,
    /// The handle or device number means nothing on this bus.
    #[error("no such device or handle")]
    NoSuchDevice = 2,
    /// A field has a value that is not allowed.
    #[error("invalid argument")]
    InvalidArgument = 3,
    /// The device's quota or the window is used up.
    #[error("no space")]
    NoSpace = 4,
    /// The interface version is not supported.
    #[error("unsupported version")]
    UnsupportedVersion = 5,
    /// Something has to come first, for instance READY before DEVOPEN.
    #[error("not ready")]
    NotReady = 6,
    /// It is in use already.
    #[error("busy")]
    Busy = 7,
    /// There is no such function.
    #[error("unknown function")]
    UnknownFunction = 8,
    /// The host could not do it.
    #[error("failed on the host, see its log")]
    HostFailure = 9,
}

impl Status {
    /// The outcome that a reply's status field stands for; 0 is success.
    pub fn from_wire(value: u32) -> Result<(), Status> {
        Err(match value {
            0 => return Ok(()),
            1 => Status::UnknownVerb,
            2 => Status::NoSuchDevice,
            4 => Status::NoSpace,
            5 => Status::UnsupportedVersion,
            6 => Status::NotReady,
            7 => Status::Busy,
            8 => Status::UnknownFunction,
            9 => Status::HostFailure,
            _ => Status::InvalidArgument,
        })
    }
}

macro_rules! message {
    ($(#[$doc:meta])* $name:ident, $length:expr, { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
        #[repr(C)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }
        const _: () = assert!(core::mem::size_of::<$name>() == $length);
    };
}

message!(
    /// In front of every message.
    #[derive(Default)]
    MessageHeader, 24, {
    /// Bytes of the whole message, this header included.
    length: u32,
    /// One of [`verb`], with [`REPLY`] set in a reply.
    verb: u32,
    /// Low half of the generation that the message belongs to.
    generation: u32,
    /// Of a verb: counts up from 1. Of a reply: that of its verb. Of an event: 0.
    sequence: u32,
    /// Of a reply: a [`Status`], or 0 for success. Otherwise 0.
    status: u32,
    /// Zero.
    reserved: u32,
});

const _: () = {
    assert!(offset_of!(MessageHeader, length) == 0);
    assert!(offset_of!(MessageHeader, verb) == 4);
    assert!(offset_of!(MessageHeader, generation) == 8);
    assert!(offset_of!(MessageHeader, sequence) == 12);
    assert!(offset_of!(MessageHeader, status) == 16);
    assert!(offset_of!(MessageHeader, reserved) == 20);
};

message!(
    /// NEGOTIATE, and its reply.
    #[derive(Default)]
    Negotiate, 16, {
    /// Of the sender.
    abi_major: u16,
    /// Of the sender.
    abi_minor: u16,
    /// Zero.
    reserved: u32,
    /// Guest: what it can use. Host: what is in use from now on. No feature is defined yet.
    features: u64,
});

const _: () = {
    assert!(offset_of!(Negotiate, abi_major) == 0);
    assert!(offset_of!(Negotiate, abi_minor) == 2);
    assert!(offset_of!(Negotiate, reserved) == 4);
    assert!(offset_of!(Negotiate, features) == 8);
};

message!(
    /// DEVOPEN.
    DeviceOpen, 8, {
    /// From DEVADD.
    device: u32,
    /// Version of the interface type that the driver speaks.
    interface_version: u32,
});

const _: () = {
    assert!(offset_of!(DeviceOpen, device) == 0);
    assert!(offset_of!(DeviceOpen, interface_version) == 4);
};

message!(
    /// Reply to DEVOPEN.
    DeviceOpened, 16, {
    /// Names the open device in later verbs.
    handle: u32,
    /// How many queues the vectors below are for.
    queues: u32,
    /// Queue `n` of the device notifies the host by doorbell `first_doorbell + n`.
    first_doorbell: u32,
    /// Queue `n` of the device notifies the guest by interrupt `first_interrupt + n`.
    first_interrupt: u32,
});

const _: () = {
    assert!(offset_of!(DeviceOpened, handle) == 0);
    assert!(offset_of!(DeviceOpened, queues) == 4);
    assert!(offset_of!(DeviceOpened, first_doorbell) == 8);
    assert!(offset_of!(DeviceOpened, first_interrupt) == 12);
};

message!(
    /// DEVCLOSE.
    DeviceClose, 8, {
    /// From DEVOPEN.
    handle: u32,
    /// Zero.
    reserved: u32,
});

const _: () = {
    assert!(offset_of!(DeviceClose, handle) == 0);
    assert!(offset_of!(DeviceClose, reserved) == 4);
};

/// Payload of a DEVCALL, padded with zeroes.
pub type CallData = [u8; CALL_DATA_LENGTH];

message!(
    /// DEVCALL, and its reply.
    DeviceCall, 72, {
    /// From DEVOPEN.
    handle: u32,
    /// What to do; the interface type defines it.
    function: u32,
    /// Argument or result.
    data: [u8; CALL_DATA_LENGTH],
});

const _: () = {
    assert!(offset_of!(DeviceCall, handle) == 0);
    assert!(offset_of!(DeviceCall, function) == 4);
    assert!(offset_of!(DeviceCall, data) == 8);
};

message!(
    /// DEVSHM.
    DeviceMemory, 8, {
    /// From DEVOPEN.
    handle: u32,
    /// Which ring; the interface type numbers them.
    ring: u32,
});

const _: () = {
    assert!(offset_of!(DeviceMemory, handle) == 0);
    assert!(offset_of!(DeviceMemory, ring) == 4);
};

message!(
    /// Reply to DEVSHM.
    DeviceMemoryGranted, 32, {
    /// Offset of the control words.
    words: u64,
    /// Offset of the records.
    data: u64,
    /// Bytes of the records.
    length: u64,
    /// Largest payload of a record.
    largest: u64,
});

const _: () = {
    assert!(offset_of!(DeviceMemoryGranted, words) == 0);
    assert!(offset_of!(DeviceMemoryGranted, data) == 8);
    assert!(offset_of!(DeviceMemoryGranted, length) == 16);
    assert!(offset_of!(DeviceMemoryGranted, largest) == 24);
};

impl DeviceMemoryGranted {
    /// The location, as the host claims it.
    pub fn location(&self) -> RingLocation {
        RingLocation { words: self.words, data: self.data, length: self.length }
    }
}

message!(
    /// Event DEVADD.
    DeviceAdded, 40, {
    /// Names the device in DEVOPEN.
    device: u32,
    /// The ABI that a driver matches on, for instance `venet::INTERFACE_VIRTUAL_ETHERNET`.
    interface: u32,
    /// The host's name of the device, for people; padded with zeroes.
    name: [u8; NAME_LENGTH],
});

const _: () = {
    assert!(offset_of!(DeviceAdded, device) == 0);
    assert!(offset_of!(DeviceAdded, interface) == 4);
    assert!(offset_of!(DeviceAdded, name) == 8);
};

message!(
    /// Event DEVDROP.
    DeviceDropped, 8, {
    /// From DEVADD.
    device: u32,
    /// Zero.
    reserved: u32,
});

const _: () = {
    assert!(offset_of!(DeviceDropped, device) == 0);
    assert!(offset_of!(DeviceDropped, reserved) == 4);
};

message!(
    /// Event SHMCLOSE.
    DeviceMemoryClosed, 8, {
    /// From DEVOPEN.
    handle: u32,
    /// Which ring.
    ring: u32,
});

const _: () = {
    assert!(offset_of!(DeviceMemoryClosed, handle) == 0);
    assert!(offset_of!(DeviceMemoryClosed, ring) == 4);
};

message!(
    /// The body of verbs and replies that say nothing more.
    Empty, 0, {});

/// A message that cannot be understood. The consequence is quarantine.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("a control message of {found} bytes where verb {verb:#x} has {expected}")]
pub struct MalformedMessage {
    /// As the peer wrote it.
    pub verb: u32,
    /// Bytes that were there.
    pub found: usize,
    /// Bytes that should have been there.
    pub expected: usize,
}

/// Header and body as bytes. The header's length is filled in.
pub fn encode<Body: Encode>(header: MessageHeader, body: &Body) -> Vec<u8> {
    let body = bincode::encode_to_vec(body, CODEC).unwrap_or_default();
    let length = body.len().saturating_add(HEADER_LENGTH);
    let header = MessageHeader { length: length as u32, ..header };
    let mut bytes = bincode::encode_to_vec(header, CODEC).unwrap_or_default();
    bytes.extend_from_slice(&body);
    bytes
}

/// The header of a message, checked against how many bytes there are.
pub fn decode_header(bytes: &[u8]) -> Result<MessageHeader, MalformedMessage> {
    let short = MalformedMessage { verb: 0, found: bytes.len(), expected: HEADER_LENGTH };
    let (header, _) = bincode::decode_from_slice::<MessageHeader, _>(bytes, CODEC).map_err(|_| short)?;
    if header.length as usize == bytes.len() {
        Ok(header)
    } else {
        Err(MalformedMessage { verb: header.verb, found: bytes.len(), expected: header.length as usize })
    }
}

/// The body of a message; neither missing nor surplus bytes are accepted.
pub fn decode_body<Body: Decode<()>>(bytes: &[u8]) -> Result<Body, MalformedMessage> {
    let header = decode_header(bytes)?;
    let body = bytes.get(HEADER_LENGTH..).unwrap_or_default();
    let expected = core::mem::size_of::<Body>().saturating_add(HEADER_LENGTH);
    let malformed = MalformedMessage { verb: header.verb, found: bytes.len(), expected };
    match bincode::decode_from_slice::<Body, _>(body, CODEC) {
        Ok((decoded, used)) if used == body.len() => Ok(decoded),
        _ => Err(malformed),
    }
}

/// A name as a message carries it; cut at [`NAME_LENGTH`].
pub fn encode_name(name: &str) -> [u8; NAME_LENGTH] {
    let mut padded = [0; NAME_LENGTH];
    padded.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
    padded
}

/// A name from a message, fit for a log: control characters are replaced.
pub fn decode_name(padded: &[u8]) -> String {
    let end = padded.iter().position(|&byte| byte == 0).unwrap_or(padded.len());
    let name = String::from_utf8_lossy(padded.get(..end).unwrap_or_default());
    name.chars().map(|character| if character.is_control() { '?' } else { character }).collect()
}

const HEADER_LENGTH: usize = core::mem::size_of::<MessageHeader>();
const CODEC: Configuration<LittleEndian, Fixint, NoLimit> =
    bincode::config::standard().with_fixed_int_encoding().with_little_endian();
