//! Offload groups, and the `virtio_net_hdr` that says which of them a frame needs.
//!
//! Values are those of the virtio specification 1.2, section 5.1.6, and of the kernel's `include/uapi/linux/virtio_net.h`.

use core::fmt;
use core::ops::BitAnd;
use core::str::FromStr;
use thiserror::Error;

/// Bytes of a `virtio_net_hdr` with `num_buffers`, as TAPs and records carry it.
pub const HEADER_LENGTH: usize = 12;
/// In `flags`: the checksum at `csum_start + csum_offset` covers everything from `csum_start`, and is still to be made.
pub const NEEDS_CSUM: u8 = 1;
/// In `gso_type`: the sender uses explicit congestion notification.
pub const GSO_ECN: u8 = 0x80;

/// A set of offload groups, agreed on at link up and the same in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Groups(u64);

impl Groups {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// A frame may still need its checksum. All others need this one.
    pub const CSUM: Self = Self(1);
    /// TCP over IPv4 may come in super-frames.
    pub const TSO4: Self = Self(2);
    /// TCP over IPv6 may come in super-frames.
    pub const TSO6: Self = Self(4);
    /// UDP may come in super-frames.
    pub const USO: Self = Self(8);
    /// Super-frames of TCP with explicit congestion notification.
    pub const ECN: Self = Self(16);
    /// The host tells the guest when the link goes up or down.
    pub const LINK_EVENTS: Self = Self(32);
    /// All groups that this release knows.
    pub const ALL: Self = Self(63);

    /// The known ones of some bits, without those whose precondition is missing.
    pub const fn from_bits(bits: u64) -> Self {
        let known = bits & Self::ALL.0;
        if known & Self::CSUM.0 == 0 {
            return Self(known & Self::LINK_EVENTS.0);
        }
        // Of TCP super-frames only; a TAP refuses it without them.
        if known & (Self::TSO4.0 | Self::TSO6.0) == 0 { Self(known & !Self::ECN.0) } else { Self(known) }
    }

    /// As bits.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether all of `other` are in the set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The set without `other`.
    pub const fn without(self, other: Self) -> Self {
        Self::from_bits(self.0 & !other.0)
    }

    /// The names of the members, as users write them.
    pub fn names(self) -> Vec<&'static str> {
        NAMES.iter().filter(|(_, group)| self.contains(*group)).map(|(name, _)| *name).collect()
    }
}

impl BitAnd for Groups {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self::from_bits(self.0 & other.0)
    }
}

impl fmt::Display for Groups {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.names();
        formatter.write_str(if names.is_empty() { "none" } else { "" })?;
        formatter.write_str(&names.join(","))
    }
}

/// A name that is no offload group.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("unknown offload {0:?}: expected all, none, or a list of csum, tso4, tso6, uso, ecn, link")]
pub struct UnknownGroup(String);

impl FromStr for Groups {
    type Err = UnknownGroup;
    fn from_str(text: &str) -> Result<Self, UnknownGroup> {
        let mut bits = Self::LINK_EVENTS.0;
        for word in text.split([',', '+']) {
            bits |= match word {
                "all" => Self::ALL.0,
                "none" => 0,
                _ => NAMES.iter().find(|(name, _)| *name == word).ok_or_else(|| UnknownGroup(word.into()))?.1.0,
            };
        }
        Ok(Self::from_bits(bits))
    }
}

const NAMES: [(&str, Groups); 6] = [
    ("csum", Groups::CSUM),
    ("tso4", Groups::TSO4),
    ("tso6", Groups::TSO6),
    ("uso", Groups::USO),
    ("ecn", Groups::ECN),
    ("link", Groups::LINK_EVENTS),
];

/// What a super-frame is to be cut into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segmentation {
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
    /// UDP over either.
    Udp,
}

/// A `virtio_net_hdr`, taken apart. What it says about its frame is an allegation until [`crate::frame::judge`] has
/// compared both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadHeader {
    /// [`NEEDS_CSUM`] and others.
    pub flags: u8,
    /// 0, or what to cut into, possibly with [`GSO_ECN`].
    pub gso_type: u8,
    /// Bytes of all headers of a super-frame.
    pub hdr_len: u16,
    /// Bytes of payload of each segment.
    pub gso_size: u16,
    /// Where the checksum starts to count.
    pub csum_start: u16,
    /// Where the checksum goes, from there.
    pub csum_offset: u16,
}

impl OffloadHeader {
    /// Takes the bytes apart.
    pub fn from_bytes(bytes: &[u8; HEADER_LENGTH]) -> Self {
        let [flags, gso_type, h0, h1, g0, g1, s0, s1, o0, o1, _, _] = *bytes;
        Self {
            flags,
            gso_type,
            hdr_len: u16::from_le_bytes([h0, h1]),
            gso_size: u16::from_le_bytes([g0, g1]),
            csum_start: u16::from_le_bytes([s0, s1]),
            csum_offset: u16::from_le_bytes([o0, o1]),
        }
    }

    /// Puts the bytes together; `num_buffers` is 0.
    pub fn to_bytes(self) -> [u8; HEADER_LENGTH] {
        let [h0, h1] = self.hdr_len.to_le_bytes();
        let [g0, g1] = self.gso_size.to_le_bytes();
        let [s0, s1] = self.csum_start.to_le_bytes();
        let [o0, o1] = self.csum_offset.to_le_bytes();
        [self.flags, self.gso_type, h0, h1, g0, g1, s0, s1, o0, o1, 0, 0]
    }

    /// Whether the checksum is still to be made.
    pub fn needs_checksum(&self) -> bool {
        self.flags & NEEDS_CSUM != 0
    }

    /// Whether it is a super-frame.
    pub fn is_super_frame(&self) -> bool {
        self.gso_type & !GSO_ECN != 0
    }

    /// How it is to be cut, and which groups that takes. `None` if there is no such way.
    pub fn segmentation(&self) -> Option<(Segmentation, Groups)> {
        let (segmentation, group) = match self.gso_type & !GSO_ECN {
            1 => (Segmentation::Tcp4, Groups::TSO4),
            4 => (Segmentation::Tcp6, Groups::TSO6),
            // Congestion notification in this form is TCP's alone.
            5 if self.gso_type & GSO_ECN == 0 => (Segmentation::Udp, Groups::USO),
            _ => return None,
        };
        let ecn = if self.gso_type & GSO_ECN == 0 { Groups::NONE } else { Groups::ECN };
        Some((segmentation, Groups(group.0 | ecn.0 | Groups::CSUM.0)))
    }
}

/// The Internet checksum (RFC 1071) of some bytes, not yet inverted; `sum` is that of the bytes before, an even number.
pub fn checksum_add(sum: u64, bytes: &[u8]) -> u64 {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let sum = pairs.iter().fold(sum, |sum, pair| sum.wrapping_add(u64::from(u16::from_be_bytes(*pair))));
    sum.wrapping_add(rest.first().map_or(0, |&last| u64::from(last) << 8))
}

/// The final checksum, to be stored big-endian.
pub fn checksum_finish(mut sum: u64) -> u16 {
    while sum >> 16 != 0 {
        sum = (sum & 0xffff).wrapping_add(sum >> 16);
    }
    !(sum as u16)
}

/// Makes the checksum that a frame still needs. `false`, and nothing done, if the offsets are not inside the frame.
pub fn complete_checksum(header: &OffloadHeader, frame: &mut [u8]) -> bool {
    let start = usize::from(header.csum_start);
    let at = start.saturating_add(usize::from(header.csum_offset));
    let Some(covered) = frame.get(start..) else { return false };
    // The field holds the sum of the pseudo header already, so it takes part.
    let sum = match checksum_finish(checksum_add(0, covered)) {
        // UDP has no zero checksum; for TCP both zeroes are the same.
        0 => 0xffff,
        sum => sum,
    };
    let Some(field) = frame.get_mut(at..at.saturating_add(2)) else { return false };
    field.copy_from_slice(&sum.to_be_bytes());
    true
}
