//! Completed checksums, against one that is computed as RFC 1071 and the protocols say.

use proptest::prelude::*;
use venet::offload::{HEADER_LENGTH, NEEDS_CSUM, OffloadHeader, complete_checksum};

const TCP: u8 = 6;
const UDP: u8 = 17;

/// RFC 1071, section 1: the one's complement sum of the 16-bit words, an odd last byte counting as the high half.
fn ones_complement_sum(bytes: &[u8]) -> u16 {
    let mut sum = 0u16;
    for pair in bytes.chunks(2) {
        let word = u16::from(pair[0]) << 8 | pair.get(1).map_or(0, |&low| u16::from(low));
        let (added, carry) = sum.overflowing_add(word);
        sum = added + u16::from(carry);
    }
    sum
}

/// The pseudo header of RFC 768, RFC 9293 and RFC 8200.
fn pseudo_header(addresses: &[u8], protocol: u8, length: usize) -> Vec<u8> {
    let mut header = addresses.to_vec();
    if addresses.len() == 8 {
        header.extend([0, protocol]);
        header.extend((length as u16).to_be_bytes());
    } else {
        header.extend((length as u32).to_be_bytes());
        header.extend([0, 0, 0, protocol]);
    }
    header
}

fn field_offset(protocol: u8) -> usize {
    if protocol == UDP { 6 } else { 16 }
}

/// A frame whose checksum field holds the sum of the pseudo header, as a stack leaves it that offloads the rest.
fn unfinished(in_front: usize, addresses: &[u8], protocol: u8, segment: &[u8]) -> (OffloadHeader, Vec<u8>) {
    let mut frame = vec![0xa5; in_front];
    frame.extend_from_slice(segment);
    let pseudo = ones_complement_sum(&pseudo_header(addresses, protocol, segment.len()));
    let field = in_front + field_offset(protocol);
    frame[field..field + 2].copy_from_slice(&pseudo.to_be_bytes());
    let header = OffloadHeader {
        flags: NEEDS_CSUM,
        csum_start: in_front as u16,
        csum_offset: field_offset(protocol) as u16,
        ..OffloadHeader::default()
    };
    (header, frame)
}

/// The whole checksum at once, and what belongs into the field.
fn expected(addresses: &[u8], protocol: u8, segment: &[u8]) -> u16 {
    let mut whole = pseudo_header(addresses, protocol, segment.len());
    let field = whole.len() + field_offset(protocol);
    whole.extend_from_slice(segment);
    whole[field..field + 2].fill(0);
    match !ones_complement_sum(&whole) {
        // RFC 768: an all zero transmitted checksum would mean that there is none.
        0 if protocol == UDP => 0xffff,
        sum => sum,
    }
}

fn check(in_front: usize, addresses: &[u8], protocol: u8, segment: &[u8]) {
    let (header, mut frame) = unfinished(in_front, addresses, protocol, segment);
    let before = frame.clone();
    assert!(complete_checksum(&header, &mut frame));
    let field = in_front + field_offset(protocol);
    let found = u16::from_be_bytes([frame[field], frame[field + 1]]);
    // In one's complement both zeroes are one number; only UDP gives one of them another meaning.
    let same = |sum: u16| if sum == 0xffff && protocol == TCP { 0 } else { sum };
    assert_eq!(same(found), same(expected(addresses, protocol, segment)), "{} bytes", segment.len());
    frame[field..field + 2].copy_from_slice(&before[field..field + 2]);
    assert_eq!(frame, before, "nothing but the field changes");
    if protocol == UDP {
        assert_ne!(found, 0);
    }
}

#[test]
fn the_example_of_the_rfc() {
    // RFC 1071, section 3: 0001 f203 f4f5 f6f7 sum up to ddf2.
    let words = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
    assert_eq!(ones_complement_sum(&words), 0xddf2);
    assert_eq!(venet::offload::checksum_finish(venet::offload::checksum_add(0, &words)), !0xddf2);
}

#[test]
fn a_datagram_calculated_by_hand() {
    // 10.0.0.1:1000 to 10.0.0.2:2000, UDP, "a": pseudo header 0a00 + 0001 + 0a00 + 0002 + 0011 + 0009 = 141d;
    // 03e8 + 07d0 + 0009 + 6100 = 6cc1; together 80de; inverted 7f21.
    let segment = [0x03, 0xe8, 0x07, 0xd0, 0, 9, 0, 0, b'a'];
    let (header, mut frame) = unfinished(34, &[10, 0, 0, 1, 10, 0, 0, 2], UDP, &segment);
    assert_eq!(frame[40..42], [0x14, 0x1d]);
    assert!(complete_checksum(&header, &mut frame));
    assert_eq!(frame[40..42], [0x7f, 0x21]);
}

#[test]
fn every_short_length_of_both_protocols_over_both_versions() {
    for addresses in [&[192, 168, 1, 250, 10, 20, 30, 40][..], &[0xfd; 32][..]] {
        for (protocol, least) in [(TCP, 20usize), (UDP, 8)] {
            for length in (least..least + 70).chain([1459, 1460, 1480]) {
                let segment: Vec<u8> = (0..length).map(|at| (at * 37 + 11) as u8).collect();
                check(14 + 20, addresses, protocol, &segment);
                // An odd start: nothing in the header says that it is even.
                check(15, addresses, protocol, &segment);
            }
        }
    }
}

#[test]
fn a_udp_checksum_that_comes_out_as_zero_is_sent_as_all_ones() {
    let addresses = [10, 0, 0, 1, 10, 0, 0, 2];
    let mut segment = vec![0x03, 0xe8, 0x07, 0xd0, 0, 10, 0, 0, 0, 0];
    // The payload makes the sum all ones, so that its inverse is zero.
    let rest = ones_complement_sum(&[pseudo_header(&addresses, UDP, 10), segment.clone()].concat());
    segment[8..].copy_from_slice(&(0xffff - rest).to_be_bytes());
    let (header, mut frame) = unfinished(34, &addresses, UDP, &segment);
    assert!(complete_checksum(&header, &mut frame));
    assert_eq!(frame[40..42], [0xff, 0xff]);
}

#[test]
fn a_field_outside_the_frame_changes_nothing() {
    let untouched: Vec<u8> = (0..60).collect();
    for (csum_start, csum_offset) in [(60, 0), (59, 0), (34, 25), (34, u16::MAX), (61, 0), (u16::MAX, u16::MAX)] {
        let header = OffloadHeader { flags: NEEDS_CSUM, csum_start, csum_offset, ..OffloadHeader::default() };
        let mut frame = untouched.clone();
        assert!(!complete_checksum(&header, &mut frame), "{csum_start} + {csum_offset}");
        assert_eq!(frame, untouched);
    }
    let last = OffloadHeader { flags: NEEDS_CSUM, csum_start: 34, csum_offset: 24, ..OffloadHeader::default() };
    assert!(complete_checksum(&last, &mut untouched.clone()));
    assert!(!complete_checksum(&OffloadHeader::default(), &mut []));
}

#[test]
fn the_offload_header_has_the_layout_of_the_specification() {
    // virtio 1.2, section 5.1.6: u8 flags, u8 gso_type, le16 hdr_len, gso_size, csum_start, csum_offset, num_buffers.
    let bytes = [1, 4, 0x36, 0x01, 0xb4, 0x05, 0x22, 0x02, 0x10, 0x03, 0, 0];
    let header =
        OffloadHeader { flags: 1, gso_type: 4, hdr_len: 0x136, gso_size: 0x5b4, csum_start: 0x222, csum_offset: 0x310 };
    assert_eq!(OffloadHeader::from_bytes(&bytes), header);
    assert_eq!(header.to_bytes(), bytes);
    // The number of buffers is not ours to say.
    let mut with_buffers = bytes;
    with_buffers[10..].copy_from_slice(&[7, 7]);
    assert_eq!(OffloadHeader::from_bytes(&with_buffers), header);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(2000), ..ProptestConfig::default() })]

    #[test]
    fn any_segment(
        in_front in 14usize..120,
        addresses in prop_oneof![
            proptest::collection::vec(any::<u8>(), 8),
            proptest::collection::vec(any::<u8>(), 32),
        ],
        udp in any::<bool>(),
        segment in proptest::collection::vec(prop_oneof![any::<u8>(), Just(0xff), Just(0)], 20..3000),
    ) {
        check(in_front, &addresses, if udp { UDP } else { TCP }, &segment);
    }

    /// No header makes it panic, or write anything but two bytes where the header says.
    #[test]
    fn any_header(bytes in any::<[u8; HEADER_LENGTH]>(), near in any::<bool>(), length in 0usize..400) {
        let mut header = OffloadHeader::from_bytes(&bytes);
        if near {
            (header.csum_start, header.csum_offset) = (header.csum_start % 400, header.csum_offset % 400);
        }
        let mut frame = vec![0x5a; length];
        let done = complete_checksum(&header, &mut frame);
        let field = usize::from(header.csum_start) + usize::from(header.csum_offset);
        prop_assert_eq!(done, field + 2 <= length);
        for (at, byte) in frame.iter().enumerate() {
            prop_assert!(*byte == 0x5a || done && (field..field + 2).contains(&at));
        }
    }
}
