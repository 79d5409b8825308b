//! Which frames pass from a ring to a port.
//!
//! What is judged is a private copy of the frame's front, and exactly that copy is sent, followed by the rest of the
//! payload from the ring; so the peer cannot change what was judged afterwards.

use crate::counters::DropReason;
use crate::offload::{Groups, NEEDS_CSUM, OffloadHeader, Segmentation};

/// Bytes of a frame's front that are copied and judged: longer than Ethernet with a tag, IPv4 and TCP with all options,
/// or IPv6 with some extension headers. A frame that is not longer is copied whole.
pub const FRONT_LENGTH: usize = 256;
/// Bytes of an Ethernet header.
pub const ETHERNET_LENGTH: u32 = 14;
/// Bytes of the longest IP packet. A super-frame is one such packet behind its link header.
pub const LONGEST_PACKET: u32 = 65535;
/// Bytes of a VLAN tag.
pub const TAG_LENGTH: u32 = 4;

/// What was agreed on at link up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Payload of the longest frame.
    pub mtu: u32,
    /// Offload groups in use.
    pub groups: Groups,
}

/// Judges a frame of `length` bytes that starts with `front`, and returns the header to send it with: only fields that
/// were checked, or that follow from the front.
pub fn judge(front: &[u8], length: u64, alleged: &OffloadHeader, limits: &Limits) -> Result<OffloadHeader, DropReason> {
    if length < u64::from(ETHERNET_LENGTH) {
        return Err(DropReason::TooShort);
    }
    let (ethertype, network) = ethertype(front)?;
    let longest = limits.mtu.saturating_add(network as u32);
    if !alleged.is_super_frame() {
        if length > u64::from(longest) {
            return Err(DropReason::TooLong);
        }
        return judge_checksum(length, network, alleged, limits);
    }
    if length > u64::from(LONGEST_PACKET).saturating_add(network as u64) {
        return Err(DropReason::TooLong);
    }
    let (segmentation, needed) = alleged.segmentation().ok_or(DropReason::BadOffload)?;
    if !limits.groups.contains(needed) {
        return Err(DropReason::OffloadNotNegotiated);
    }
    let checked = judge_checksum(length, network, alleged, limits)?;
    let headers = headers_length(front, ethertype, network, segmentation, &checked).ok_or(DropReason::BadOffload)?;
    let segment = headers.saturating_add(usize::from(alleged.gso_size));
    if alleged.gso_size == 0 || headers as u64 >= length {
        return Err(DropReason::BadOffload);
    }
    if segment > longest as usize {
        return Err(DropReason::TooLong);
    }
    Ok(OffloadHeader {
        gso_type: alleged.gso_type,
        gso_size: alleged.gso_size,
        hdr_len: u16::try_from(headers).map_err(|_| DropReason::BadOffload)?,
        ..checked
    })
}

/// How many segments a super-frame of `length` bytes makes; 1 for any other frame.
pub fn segments(header: &OffloadHeader, length: u64) -> u64 {
    if !header.is_super_frame() {
        return 1;
    }
    let payload = length.saturating_sub(u64::from(header.hdr_len));
    payload.div_ceil(u64::from(header.gso_size.max(1))).max(1)
}

/// The type of the frame behind at most one tag, and where its payload starts.
fn ethertype(front: &[u8]) -> Result<(u16, usize), DropReason> {
    let outer = read_u16(front, 12).ok_or(DropReason::TooShort)?;
    if !is_tag(outer) {
        return Ok((outer, ETHERNET_LENGTH as usize));
    }
    let inner = read_u16(front, 16).ok_or(DropReason::TooShort)?;
    if is_tag(inner) {
        return Err(DropReason::DoubleTagged);
    }
    Ok((inner, ETHERNET_LENGTH.saturating_add(TAG_LENGTH) as usize))
}

fn is_tag(ethertype: u16) -> bool {
    matches!(ethertype, 0x8100 | 0x88a8 | 0x9100)
}

fn judge_checksum(
    length: u64,
    network: usize,
    alleged: &OffloadHeader,
    limits: &Limits,
) -> Result<OffloadHeader, DropReason> {
    if !alleged.needs_checksum() {
        return if alleged.is_super_frame() { Err(DropReason::BadOffload) } else { Ok(OffloadHeader::default()) };
    }
    if !limits.groups.contains(Groups::CSUM) {
        return Err(DropReason::OffloadNotNegotiated);
    }
    let end = u64::from(alleged.csum_start).saturating_add(u64::from(alleged.csum_offset)).saturating_add(2);
    if usize::from(alleged.csum_start) < network || end > length {
        return Err(DropReason::BadOffload);
    }
    Ok(OffloadHeader {
        flags: NEEDS_CSUM,
        csum_start: alleged.csum_start,
        csum_offset: alleged.csum_offset,
        ..OffloadHeader::default()
    })
}

/// Bytes of all headers of a super-frame, if they are what the offload header claims.
fn headers_length(
    front: &[u8],
    ethertype: u16,
    network: usize,
    segmentation: Segmentation,
    checked: &OffloadHeader,
) -> Option<usize> {
    let transport = usize::from(checked.csum_start);
    let tcp = segmentation != Segmentation::Udp;
    let protocol = if tcp { 6 } else { 17 };
    let found = match ethertype {
        0x0800 if segmentation != Segmentation::Tcp6 => ipv4_payload(front, network)?,
        0x86dd if segmentation != Segmentation::Tcp4 => ipv6_payload(front, network)?,
        _ => return None,
    };
    (found == (transport, protocol)).then_some(())?;
    let length = if tcp {
        let words = usize::from(front.get(transport.checked_add(12)?)? >> 4);
        (words >= 5 && checked.csum_offset == 16).then_some(words.checked_mul(4)?)?
    } else {
        (checked.csum_offset == 6).then_some(8)?
    };
    let headers = transport.checked_add(length)?;
    (headers <= front.len()).then_some(headers)
}

/// Where the payload of an IPv4 packet starts, and its protocol. `None` for a fragment, which cannot be cut into segments.
fn ipv4_payload(front: &[u8], network: usize) -> Option<(usize, u8)> {
    let first = *front.get(network)?;
    let words = usize::from(first & 0x0f);
    // More fragments follow, or fragments came before; the bit that forbids fragments does not matter.
    let fragment = read_u16(front, network.checked_add(6)?)? & 0x3fff != 0;
    (first >> 4 == 4 && words >= 5 && !fragment).then_some(())?;
    Some((network.checked_add(words.checked_mul(4)?)?, *front.get(network.checked_add(9)?)?))
}

/// Where the payload of an IPv6 packet starts, behind extension headers that each segment may repeat, and its protocol.
/// A fragment header is none of those, so it is taken for the payload.
fn ipv6_payload(front: &[u8], network: usize) -> Option<(usize, u8)> {
    (*front.get(network)? >> 4 == 6).then_some(())?;
    let mut protocol = *front.get(network.checked_add(6)?)?;
    let mut at = network.checked_add(40)?;
    // Hop-by-hop options, routing, destination options: the next protocol, and a length in words of 8 bytes, less one.
    while matches!(protocol, 0 | 43 | 60) {
        let words = usize::from(*front.get(at.checked_add(1)?)?).checked_add(1)?;
        protocol = *front.get(at)?;
        at = at.checked_add(words.checked_mul(8)?)?;
    }
    Some((at, protocol))
}

fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    let pair = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_be_bytes(pair.try_into().ok()?))
}
