//! Which frames pass from a ring to a port. Values are those of the virtio specification 1.2, section 5.1.6, and of the
//! protocols themselves.

use proptest::prelude::*;
use venet::counters::DropReason;
use venet::frame::{FRONT_LENGTH, Limits, judge, segments};
use venet::offload::{Groups, OffloadHeader};

const MTU: u32 = 1500;
const ALL: Limits = Limits { mtu: MTU, groups: Groups::ALL };
const NONE: Limits = Limits { mtu: MTU, groups: Groups::NONE };
const PLAIN: OffloadHeader =
    OffloadHeader { flags: 0, gso_type: 0, hdr_len: 0, gso_size: 0, csum_start: 0, csum_offset: 0 };

const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;
const RSC_INFO: u8 = 4;
const TCP4: u8 = 1;
const UDP_FRAGMENTS: u8 = 3;
const TCP6: u8 = 4;
const UDP: u8 = 5;
const ECN: u8 = 0x80;

const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const TAGS: [u16; 2] = [0x8100, 0x88a8];
const TCP_PROTOCOL: u8 = 6;
const UDP_PROTOCOL: u8 = 17;

/// Ethernet header, tags and ethertype.
fn ethernet(tags: &[u16], ethertype: u16) -> Vec<u8> {
    let mut frame = vec![0x52, 0x54, 0, 0, 0, 1, 0x52, 0x54, 0, 0, 0, 2];
    for tag in tags {
        frame.extend(tag.to_be_bytes());
        frame.extend([0, 5]);
    }
    frame.extend(ethertype.to_be_bytes());
    frame
}

/// An IPv4 header with `options` words of options.
fn ipv4(protocol: u8, options: u8) -> Vec<u8> {
    let mut header = vec![0; 20 + 4 * usize::from(options)];
    header[0] = 0x40 | (5 + options);
    header[6] = 0x40;
    header[8] = 64;
    header[9] = protocol;
    header
}

/// An IPv6 header, and extension headers given as type and length in bytes.
fn ipv6(extensions: &[(u8, usize)], protocol: u8) -> Vec<u8> {
    let next = |at: usize| extensions.get(at).map_or(protocol, |(kind, _)| *kind);
    let mut header = vec![0; 40];
    header[0] = 0x60;
    header[6] = next(0);
    header[7] = 64;
    for (at, (kind, length)) in extensions.iter().enumerate() {
        let start = header.len();
        header.resize(start + length, 0);
        header[start] = next(at + 1);
        // A fragment header has no length field.
        header[start + 1] = if *kind == 44 { 0 } else { (length / 8 - 1) as u8 };
    }
    header
}

fn tcp(words: u8) -> Vec<u8> {
    let mut header = vec![0; 4 * usize::from(words)];
    header[12] = words << 4;
    header
}

/// A super-frame as an honest peer makes it: its front, and the offload header.
fn super_frame(gso_type: u8, parts: [Vec<u8>; 3]) -> (Vec<u8>, OffloadHeader) {
    let transport = parts[0].len() + parts[1].len();
    let front = parts.concat();
    let header = OffloadHeader {
        flags: NEEDS_CSUM,
        gso_type,
        hdr_len: front.len() as u16,
        gso_size: 1000,
        csum_start: transport as u16,
        csum_offset: if gso_type & !ECN == UDP { 6 } else { 16 },
    };
    (front, header)
}

fn tcp4() -> (Vec<u8>, OffloadHeader) {
    super_frame(TCP4, [ethernet(&[], IPV4), ipv4(TCP_PROTOCOL, 0), tcp(5)])
}
fn tcp6() -> (Vec<u8>, OffloadHeader) {
    super_frame(TCP6, [ethernet(&[], IPV6), ipv6(&[], TCP_PROTOCOL), tcp(5)])
}
fn udp4() -> (Vec<u8>, OffloadHeader) {
    super_frame(UDP, [ethernet(&[], IPV4), ipv4(UDP_PROTOCOL, 0), vec![0; 8]])
}
fn udp6() -> (Vec<u8>, OffloadHeader) {
    super_frame(UDP, [ethernet(&[], IPV6), ipv6(&[], UDP_PROTOCOL), vec![0; 8]])
}

/// The judgement on a frame of `length` bytes of which the first are `front` and all others zero.
fn judged(front: &[u8], length: u64, alleged: OffloadHeader, limits: &Limits) -> Result<OffloadHeader, DropReason> {
    let mut front = front.to_vec();
    front.resize(FRONT_LENGTH.min(length as usize), 0);
    judge(&front, length, &alleged, limits)
}

#[test]
fn lengths_of_plain_frames() {
    use DropReason::{TooLong, TooShort};
    let (plain, tagged) = (ethernet(&[], IPV4), ethernet(&[0x8100], IPV4));
    let longest = u64::from(MTU) + 14;
    let table: [(&[u8], u64, Result<(), DropReason>); 14] = [
        (&plain, 0, Err(TooShort)),
        (&plain, 1, Err(TooShort)),
        (&plain, 13, Err(TooShort)),
        (&plain, 14, Ok(())),
        (&plain, 60, Ok(())),
        (&plain, longest, Ok(())),
        (&plain, longest + 1, Err(TooLong)),
        (&plain, longest + 4, Err(TooLong)),
        (&plain, 65536, Err(TooLong)),
        // A tag without the ethertype behind it.
        (&tagged, 17, Err(TooShort)),
        (&tagged, 18, Ok(())),
        (&tagged, longest + 1, Ok(())),
        (&tagged, longest + 4, Ok(())),
        (&tagged, longest + 5, Err(TooLong)),
    ];
    for (front, length, expected) in table {
        for limits in [ALL, NONE] {
            assert_eq!(judged(front, length, PLAIN, &limits).map(drop), expected, "{length} bytes");
        }
    }
    for mtu in [68, 9000, 65535] {
        let limits = Limits { mtu, groups: Groups::NONE };
        assert!(judged(&plain, u64::from(mtu) + 14, PLAIN, &limits).is_ok());
        assert_eq!(judged(&plain, u64::from(mtu) + 15, PLAIN, &limits), Err(TooLong));
    }
}

#[test]
fn two_tags_are_refused_in_every_combination() {
    for outer in TAGS {
        assert!(judged(&ethernet(&[outer], IPV6), 100, PLAIN, &NONE).is_ok(), "{outer:#x}");
        for inner in TAGS {
            for length in [18, 60, 1514, 1518, 1522, 9000] {
                let judgement = judged(&ethernet(&[outer, inner], IPV4), length, PLAIN, &ALL);
                assert_eq!(judgement, Err(DropReason::DoubleTagged), "{outer:#x} {inner:#x} {length}");
            }
        }
    }
}

#[test]
fn a_plain_frame_is_sent_without_any_claim() {
    // Nothing in these was checked, so none of it may reach the kernel.
    let claims = OffloadHeader {
        flags: DATA_VALID | RSC_INFO | 0xf8,
        gso_type: ECN,
        hdr_len: 77,
        gso_size: 9,
        csum_start: 9,
        csum_offset: 9,
    };
    for limits in [ALL, NONE] {
        assert_eq!(judged(&ethernet(&[], IPV4), 100, claims, &limits), Ok(PLAIN));
    }
}

#[test]
fn checksums_lie_in_the_frame_and_behind_the_ethernet_header() {
    let bad = Err(DropReason::BadOffload);
    let ok = Ok(());
    let (plain, tagged) = (ethernet(&[], IPV4), ethernet(&[0x8100], IPV4));
    let table: [(&[u8], u64, u16, u16, _); 13] = [
        (&plain, 100, 34, 16, ok),
        // The last two bytes, and one byte further.
        (&plain, 100, 34, 64, ok),
        (&plain, 100, 34, 65, bad),
        (&plain, 100, 98, 0, ok),
        (&plain, 100, 99, 0, bad),
        (&plain, 100, 100, 0, bad),
        (&plain, 100, u16::MAX, 6, bad),
        (&plain, 100, u16::MAX, u16::MAX, bad),
        (&plain, 100, 34, u16::MAX, bad),
        // In the Ethernet header.
        (&plain, 100, 13, 16, bad),
        (&plain, 100, 14, 16, ok),
        (&tagged, 100, 17, 16, bad),
        (&tagged, 100, 18, 16, ok),
    ];
    for (front, length, csum_start, csum_offset, expected) in table {
        let alleged = OffloadHeader { flags: NEEDS_CSUM, csum_start, csum_offset, ..PLAIN };
        let judgement = judged(front, length, alleged, &ALL);
        assert_eq!(judgement.map(drop), expected, "{length} bytes, checksum at {csum_start} + {csum_offset}");
        if let Ok(checked) = judgement {
            assert_eq!(checked, alleged);
        }
    }
    // Behind the part that is judged, but in the frame: the position is all that there is to check.
    let far = OffloadHeader { flags: NEEDS_CSUM, csum_start: 600, csum_offset: 16, ..PLAIN };
    assert_eq!(judged(&plain, 1000, far, &ALL), Ok(far));
}

#[test]
fn a_checksum_request_is_cleaned_of_other_claims() {
    let alleged =
        OffloadHeader { flags: 0xff, gso_type: ECN, hdr_len: 77, gso_size: 9, csum_start: 34, csum_offset: 6 };
    let expected = OffloadHeader { flags: NEEDS_CSUM, csum_start: 34, csum_offset: 6, ..PLAIN };
    assert_eq!(judged(&ethernet(&[], IPV4), 100, alleged, &ALL), Ok(expected));
}

#[test]
fn honest_super_frames_pass_as_they_are() {
    let vlan = |tag| super_frame(TCP4, [ethernet(&[tag], IPV4), ipv4(TCP_PROTOCOL, 0), tcp(5)]);
    let options = super_frame(TCP4, [ethernet(&[], IPV4), ipv4(TCP_PROTOCOL, 10), tcp(15)]);
    let udp_options = super_frame(UDP, [ethernet(&[], IPV4), ipv4(UDP_PROTOCOL, 3), vec![0; 8]]);
    let extended = |kind: &[(u8, usize)]| super_frame(TCP6, [ethernet(&[], IPV6), ipv6(kind, TCP_PROTOCOL), tcp(8)]);
    let hop_by_hop = extended(&[(0, 8)]);
    let several = extended(&[(0, 16), (60, 24), (43, 8)]);
    for (number, (front, header)) in [
        tcp4(),
        tcp6(),
        udp4(),
        udp6(),
        vlan(0x8100),
        vlan(0x88a8),
        options,
        udp_options,
        hop_by_hop,
        several,
        super_frame(TCP4 | ECN, [ethernet(&[], IPV4), ipv4(TCP_PROTOCOL, 0), tcp(5)]),
        super_frame(TCP6 | ECN, [ethernet(&[], IPV6), ipv6(&[], TCP_PROTOCOL), tcp(5)]),
    ]
    .into_iter()
    .enumerate()
    {
        for length in [front.len() as u64 + 1, 20_000, 65_535] {
            assert_eq!(judged(&front, length, header, &ALL), Ok(header), "case {number}, {length} bytes");
        }
        // Headers and nothing behind them.
        assert_eq!(judged(&front, front.len() as u64, header, &ALL), Err(DropReason::BadOffload), "case {number}");
    }
}

#[test]
fn what_the_peer_says_of_the_headers_length_does_not_matter() {
    // It is a hint by the specification, and may say anything.
    for hdr_len in [0, 1, 53, 55, 1000, u16::MAX] {
        let (front, honest) = tcp4();
        let checked = judged(&front, 20_000, OffloadHeader { hdr_len, ..honest }, &ALL);
        assert_eq!(checked, Ok(OffloadHeader { hdr_len: 14 + 20 + 20, ..honest }));
    }
}

#[test]
fn segments_are_no_longer_than_frames() {
    let (front, honest) = tcp4();
    let (tagged, tagged_honest) = super_frame(TCP4, [ethernet(&[0x8100], IPV4), ipv4(TCP_PROTOCOL, 0), tcp(5)]);
    let size = |header: OffloadHeader, gso_size| OffloadHeader { gso_size, ..header };
    for (front, honest) in [(&front, honest), (&tagged, tagged_honest)] {
        assert!(judged(front, 20_000, size(honest, 1460), &ALL).is_ok());
        assert!(judged(front, 20_000, size(honest, 1), &ALL).is_ok());
        assert_eq!(judged(front, 20_000, size(honest, 1461), &ALL), Err(DropReason::TooLong));
        assert_eq!(judged(front, 20_000, size(honest, u16::MAX), &ALL), Err(DropReason::TooLong));
        assert_eq!(judged(front, 20_000, size(honest, 0), &ALL), Err(DropReason::BadOffload));
    }
    // 20000 bytes, of which 54 are headers: 13 segments of 1460 bytes and one of 966.
    assert_eq!(segments(&size(honest, 1460), 20_000), 14);
    assert_eq!(segments(&size(honest, 1460), 54 + 2 * 1460), 2);
    assert_eq!(segments(&PLAIN, 1514), 1);
}

#[test]
fn super_frames_are_no_longer_than_a_packet_can_be() {
    let tagged = |tag| super_frame(TCP4, [ethernet(&[tag], IPV4), ipv4(TCP_PROTOCOL, 0), tcp(5)]);
    for (link, (front, header)) in
        [(14, tcp4()), (14, tcp6()), (14, udp4()), (14, udp6()), (18, tagged(0x8100)), (18, tagged(0x88a8))]
    {
        let longest = 65_535 + link;
        assert_eq!(judged(&front, longest, header, &ALL), Ok(header));
        for length in [longest + 1, longest + 5, 65_558, u64::MAX] {
            assert_eq!(judged(&front, length, header, &ALL), Err(DropReason::TooLong), "{length} bytes");
        }
    }
    // It does not matter how long frames may be.
    let (front, header) = tcp4();
    let jumbo = Limits { mtu: 65_535, groups: Groups::ALL };
    assert_eq!(judged(&front, 65_550, header, &jumbo), Err(DropReason::TooLong));
}

#[test]
fn groups_that_were_not_agreed_on() {
    let cases = [
        ("checksum", udp4(), Groups::CSUM),
        ("tcp over ipv4", tcp4(), Groups::TSO4),
        ("tcp over ipv6", tcp6(), Groups::TSO6),
        ("udp over ipv4", udp4(), Groups::USO),
        ("udp over ipv6", udp6(), Groups::USO),
        ("ecn", super_frame(TCP4 | ECN, [ethernet(&[], IPV4), ipv4(TCP_PROTOCOL, 0), tcp(5)]), Groups::ECN),
        ("ecn", super_frame(TCP6 | ECN, [ethernet(&[], IPV6), ipv6(&[], TCP_PROTOCOL), tcp(5)]), Groups::ECN),
    ];
    for (name, (front, header), group) in cases {
        let others = Limits { mtu: MTU, groups: Groups::ALL.without(group) };
        let judgement = judged(&front, 20_000, header, &others);
        assert_eq!(judgement, Err(DropReason::OffloadNotNegotiated), "{name}");
        assert_eq!(judged(&front, 20_000, header, &NONE), Err(DropReason::OffloadNotNegotiated), "{name}");
    }
    let alleged = OffloadHeader { flags: NEEDS_CSUM, csum_start: 34, csum_offset: 6, ..PLAIN };
    assert_eq!(judged(&ethernet(&[], IPV4), 100, alleged, &NONE), Err(DropReason::OffloadNotNegotiated));
}

#[test]
fn super_frames_that_are_not_what_they_claim() {
    let lie = |(front, header): (Vec<u8>, OffloadHeader), change: fn(&mut OffloadHeader)| {
        let mut header = header;
        change(&mut header);
        (front, header)
    };
    let edit = |(front, header): (Vec<u8>, OffloadHeader), at: usize, byte: u8| {
        let mut front = front;
        front[at] = byte;
        (front, header)
    };
    let fragment = ipv6(&[(44, 8)], TCP_PROTOCOL);
    let long_chain = ipv6(&[(0, 200), (60, 48)], TCP_PROTOCOL);
    let cases = [
        ("no checksum asked for", lie(tcp4(), |header| header.flags = 0)),
        ("only said to be valid", lie(tcp4(), |header| header.flags = DATA_VALID)),
        ("UDP fragmentation", lie(udp4(), |header| header.gso_type = UDP_FRAGMENTS)),
        ("type 2", lie(tcp4(), |header| header.gso_type = 2)),
        ("type 6", lie(tcp4(), |header| header.gso_type = 6)),
        ("type 0x7f", lie(tcp4(), |header| header.gso_type = 0x7f)),
        ("type 0x41", lie(tcp4(), |header| header.gso_type = 0x41)),
        ("TSO4 on IPv6", lie(tcp6(), |header| header.gso_type = TCP4)),
        ("TSO6 on IPv4", lie(tcp4(), |header| header.gso_type = TCP6)),
        ("TSO4 on UDP", edit(tcp4(), 14 + 9, UDP_PROTOCOL)),
        ("TSO6 on UDP", edit(tcp6(), 14 + 6, UDP_PROTOCOL)),
        ("USO on TCP", edit(udp4(), 14 + 9, TCP_PROTOCOL)),
        ("USO on TCP over IPv6", edit(udp6(), 14 + 6, TCP_PROTOCOL)),
        ("USO with congestion notification", lie(udp4(), |header| header.gso_type = UDP | ECN)),
        ("ARP", edit(tcp4(), 13, 0x06)),
        ("an IPv6 header behind the type of IPv4", edit(tcp4(), 14, 0x65)),
        ("an IPv4 header behind the type of IPv6", edit(tcp6(), 14, 0x40)),
        ("an IPv4 header of four words", edit(tcp4(), 14, 0x44)),
        ("an IPv4 header that ends elsewhere", edit(tcp4(), 14, 0x46)),
        ("the first fragment of several", edit(tcp4(), 14 + 6, 0x20)),
        ("a middle fragment", edit(tcp4(), 14 + 6, 0x01)),
        ("a last fragment", edit(tcp4(), 14 + 7, 0x10)),
        ("a fragment of UDP", edit(udp4(), 14 + 6, 0x20)),
        ("an IPv6 fragment", super_frame(TCP6, [ethernet(&[], IPV6), fragment, tcp(5)])),
        ("an extension header that ends elsewhere", {
            edit(super_frame(TCP6, [ethernet(&[], IPV6), ipv6(&[(0, 8)], TCP_PROTOCOL), tcp(5)]), 14 + 40 + 1, 1)
        }),
        ("an extension header that is not mentioned", lie(tcp6(), |header| header.csum_start += 8)),
        ("extension headers beyond what is judged", { super_frame(TCP6, [ethernet(&[], IPV6), long_chain, tcp(5)]) }),
        ("a TCP header of four words", edit(tcp4(), 14 + 20 + 12, 0x40)),
        ("the checksum of UDP in TCP", lie(tcp4(), |header| header.csum_offset = 6)),
        ("the checksum of TCP in UDP", lie(udp4(), |header| header.csum_offset = 16)),
        ("a checksum that starts elsewhere", lie(tcp4(), |header| header.csum_start += 2)),
        ("a checksum beyond what is judged", lie(tcp4(), |header| header.csum_start = 300)),
        ("a checksum beyond the frame", lie(tcp4(), |header| header.csum_start = 30_000)),
        ("a checksum in the Ethernet header", lie(tcp4(), |header| header.csum_start = 0)),
    ];
    for (name, (front, header)) in cases {
        assert_eq!(judged(&front, 20_000, header, &ALL), Err(DropReason::BadOffload), "{name}");
    }
    for front_length in 14..54 {
        // A frame that ends within its headers.
        let (front, header) = tcp4();
        let judgement = judge(&front[..front_length], front_length as u64, &header, &ALL);
        assert_eq!(judgement, Err(DropReason::BadOffload), "{front_length} bytes");
    }
}

#[test]
fn a_double_tagged_super_frame_is_double_tagged() {
    let (front, header) = super_frame(TCP4, [ethernet(&TAGS, IPV4), ipv4(TCP_PROTOCOL, 0), tcp(5)]);
    assert_eq!(judged(&front, 20_000, header, &ALL), Err(DropReason::DoubleTagged));
}

/// Offload headers: any, and such as are nearly right.
fn headers() -> impl Strategy<Value = OffloadHeader> {
    let near = |values: &'static [u16]| prop_oneof![3 => proptest::sample::select(values), 1 => any::<u16>()];
    let flags = prop_oneof![3 => Just(NEEDS_CSUM), 1 => any::<u8>()];
    let kinds = prop_oneof![4 => proptest::sample::select(&[0, TCP4, TCP6, UDP, TCP4 | ECN][..]), 1 => any::<u8>()];
    let sizes = near(&[0, 1, 1000, 1460, 1461]);
    let starts = near(&[14, 18, 34, 38, 54, 62]);
    (flags, kinds, any::<u16>(), sizes, starts, near(&[6, 16])).prop_map(
        |(flags, gso_type, hdr_len, gso_size, csum_start, csum_offset)| OffloadHeader {
            flags,
            gso_type,
            hdr_len,
            gso_size,
            csum_start,
            csum_offset,
        },
    )
}

/// Fronts: noise, and honest ones with a byte changed.
fn fronts() -> impl Strategy<Value = Vec<u8>> {
    let honest = proptest::sample::select(vec![tcp4().0, tcp6().0, udp4().0, udp6().0]);
    let damaged = (honest, any::<proptest::sample::Index>(), any::<u8>(), any::<bool>()).prop_map(
        |(mut front, at, byte, damage)| {
            if damage {
                let at = at.index(front.len());
                front[at] = byte;
            }
            front.resize(FRONT_LENGTH, 0);
            front
        },
    );
    prop_oneof![1 => proptest::collection::vec(any::<u8>(), 0..=FRONT_LENGTH), 3 => damaged]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(20_000), ..ProptestConfig::default() })]

    /// Whatever a peer writes, what is accepted can be sent.
    #[test]
    fn an_accepted_frame_is_what_was_agreed_on(
        front in fronts(),
        length in prop_oneof![0u64..2000, 0u64..70_000, any::<u64>()],
        alleged in headers(),
        bits in any::<u64>(),
        mtu in prop_oneof![Just(1500u32), any::<u32>()],
    ) {
        let limits = Limits { mtu, groups: Groups::from_bits(bits) };
        let front = &front[..front.len().min(usize::try_from(length).unwrap_or(usize::MAX))];
        let Ok(checked) = judge(front, length, &alleged, &limits) else { return Ok(()) };
        let longest = u64::from(mtu) + 18;
        prop_assert!(length >= 14);
        prop_assert_eq!(checked.flags & !NEEDS_CSUM, 0);
        if checked.flags == NEEDS_CSUM {
            let field = u64::from(checked.csum_start) + u64::from(checked.csum_offset);
            prop_assert!(limits.groups.contains(Groups::CSUM));
            prop_assert!(checked.csum_start >= 14 && field + 2 <= length);
        } else {
            prop_assert_eq!(checked, PLAIN);
        }
        let group = match checked.gso_type & !ECN {
            0 => {
                prop_assert!(length <= longest);
                prop_assert_eq!((checked.gso_type, checked.gso_size, checked.hdr_len), (0, 0, 0));
                return Ok(());
            }
            TCP4 => Groups::TSO4,
            TCP6 => Groups::TSO6,
            UDP => Groups::USO,
            other => panic!("accepted type {other}"),
        };
        prop_assert!(length <= 65_535 + 18);
        prop_assert!(limits.groups.contains(group) && checked.flags == NEEDS_CSUM);
        prop_assert!(checked.gso_type & ECN == 0 || limits.groups.contains(Groups::ECN));
        prop_assert!(checked.gso_size > 0 && u64::from(checked.hdr_len) < length);
        prop_assert!(usize::from(checked.hdr_len) <= front.len());
        prop_assert!(u64::from(checked.hdr_len) + u64::from(checked.gso_size) <= longest);
        prop_assert!(checked.csum_start < checked.hdr_len);
    }
}
