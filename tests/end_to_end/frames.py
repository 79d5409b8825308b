"""Raw frames: whatever is legal passes unchanged and in order, and what is not is dropped and counted."""

import itertools
import random
import struct

from lab import BRIDGE, GUESTS, check, test, until
from network import mac_of, packet_socket, receive_frame, set_sysctl

# For local experiments, IEEE 802: no protocol of the kernel takes or answers such frames.
ETHERTYPE = 0x88B5
HEADER = 14
TAG = 4
# Fewer than the shortest queue on the way holds, so that nothing is lost for want of room.
BURST = 64


def quiet():
    """No IPv6 on interfaces that are yet to come, so that the guests send nothing by themselves."""
    for guest in GUESTS:
        set_sysctl(guest, "net/ipv6/conf/default/disable_ipv6", 1)


def frame(destination, source, length, tags=(), number=0):
    """A frame of so many bytes in all, with VLAN tags; its payload is the same for the same number, and only then."""
    types = b"".join(struct.pack("!HH", 0x8100, tag) for tag in tags) + struct.pack("!H", ETHERTYPE)
    front = destination + source + types
    return front + random.Random(number).randbytes(length - len(front))


def is_ours(received):
    """Whether the frame carries our protocol behind any tags."""
    at = 12
    while received[at:at + 2] == b"\x81\x00":
        at += 4
    return received[at:at + 2] == struct.pack("!H", ETHERTYPE)


def next_of_ours(opened):
    while True:
        received, _ = receive_frame(opened)
        if is_ours(received):
            return received


def exchange(lab, sizes, tags=()):
    """Sends a frame of each size from each guest to the other, and compares what arrives, byte for byte."""
    macs = {guest: mac_of(lab, guest) for guest in GUESTS}
    sockets = {guest: packet_socket(guest) for guest in GUESTS}
    try:
        for sender, receiver in itertools.permutations(GUESTS):
            for start in range(0, len(sizes), BURST):
                sent = [frame(macs[receiver], macs[sender], size, tags, size) for size in sizes[start:start + BURST]]
                for one in sent:
                    sockets[sender].send(one)
                for number, expected in enumerate(sent):
                    compare(sockets[receiver], expected, f"{sender} to {receiver}, tags {tags}", number)
    finally:
        for opened in sockets.values():
            opened.close()


def compare(opened, expected, what, number):
    try:
        received = next_of_ours(opened)
    except TimeoutError:
        raise AssertionError(f"{what}: the frame of {len(expected)} bytes, number {number} of its burst, "
                             "did not arrive") from None
    check(len(received) == len(expected),
          f"{what}: expected a frame of {len(expected)} bytes, received one of {len(received)}")
    # In words, since two frames side by side tell nobody anything.
    different = [at for at in range(len(expected)) if received[at] != expected[at]]
    check(not different,
          f"{what}: a frame of {len(expected)} bytes differs in {len(different)} bytes, the first at {different[:1]}")


@test
def raw_frames_of_every_size(lab):
    quiet()
    lab.start_all()
    exchange(lab, range(60, 1500 + HEADER + 1))


@test
def tagged_frames_of_every_size(lab):
    quiet()
    lab.start_all()
    # Identifier 5; and the highest one with priority 6 and the drop bit.
    exchange(lab, range(60, 1500 + HEADER + TAG + 1), (5,))
    exchange(lab, (60, 64, 1514, 1518), (6 << 13 | 1 << 12 | 4094,))


@test
def raw_frames_without_offloads(lab):
    quiet()
    lab.start_all(("none", "none"))
    exchange(lab, range(60, 1500 + HEADER + 1, 7))
    exchange(lab, range(60, 1500 + HEADER + TAG + 1, 7), (5,))


def frames_with_mtu(lab, mtu):
    quiet()
    # The bridge has no port yet; with an MTU that was set by hand, it keeps that.
    lab.ip(None, "link", "set", BRIDGE, "mtu", str(mtu))
    lab.start_all()
    for guest in GUESTS:
        check(lab.link(guest, "venet0")["mtu"] == mtu, f"{guest} took over the bridge's MTU of {mtu}")
    longest = mtu + HEADER
    exchange(lab, (60, 1514, 1515, longest - 1, longest))
    exchange(lab, (60, longest, longest + 1, longest + TAG), (5,))


@test
def jumbo_frames(lab):
    frames_with_mtu(lab, 9000)


@test
def frames_of_the_largest_mtu(lab):
    # The largest that the kernel lets a TAP have: 65535 less the Ethernet header.
    frames_with_mtu(lab, 65521)


@test
def illegal_frames_are_dropped_and_counted(lab):
    quiet()
    lab.start_all()
    macs = {guest: mac_of(lab, guest) for guest in GUESTS}
    # Only the guest's own interface lets longer frames out; what was agreed on stays.
    lab.ip("g1", "link", "set", "venet0", "mtu", "9000")
    too_long = [frame(macs["g2"], macs["g1"], size) for size in (1515, 3000, 9014)]
    too_long += [frame(macs["g2"], macs["g1"], 1519, (5,))]
    double = [frame(macs["g2"], macs["g1"], size, (5, 7)) for size in (60, 1000, 1518)]
    legal = frame(macs["g2"], macs["g1"], 100, number=1)
    with packet_socket("g1") as sender, packet_socket("g2") as receiver:
        for one in (*too_long, *double, legal):
            sender.send(one)
        check(next_of_ours(receiver) == legal, "a frame that must be dropped arrived")

    def dropped():
        drops = lab.counters("g1")["from_ring"]["drops"]
        return drops["too_long"] == len(too_long) and drops["double_tagged"] == len(double)

    until(dropped, 2, f"{len(too_long)} frames dropped as too long, {len(double)} as double-tagged")
    check(lab.status()["guests"][0]["quarantines"] == 0, "a frame that is too long is no violation")
