"""Streams between the guests: everything arrives, and the offloads that were agreed on are in use."""

import os
import random
import socket
import threading

from lab import ADDRESS, check, note, test
from network import SO_RCVBUFFORCE, Worker, open_socket, ping, receive_stream, send_stream, transfer, udp

GIB = 1 << 30
MIB = 1 << 20
# From linux/udp.h.
UDP_SEGMENT = 103
# Payload of a full frame.
SEGMENT = 1472


def stream_with(lab, size, offloads, address=ADDRESS["g2"]):
    """Both guests with these offloads, and one stream from g1 to g2. Returns what the counters grew by."""
    lab.start_all(offloads)
    if ":" in address:
        lab.ip("g1", "address", "add", "fd00::1/64", "dev", "venet0", "nodad")
        lab.ip("g2", "address", "add", f"{address}/64", "dev", "venet0", "nodad")
    before = {guest: lab.counters(guest) for guest in ADDRESS}
    seconds = transfer("g1", "g2", address, size, 90)
    after = {guest: lab.counters(guest) for guest in ADDRESS}
    note(f"{size / MIB:.0f} MiB in {seconds:.1f} s, {size * 8 / seconds / 1e9:.2f} Gb/s, hash included")

    def grown(guest, direction, name):
        return after[guest][direction][name] - before[guest][direction][name]

    check(grown("g1", "from_ring", "bytes") >= size, "what g1 sent was counted")
    check(grown("g2", "to_ring", "bytes") >= size, "what g2 was sent was counted")
    return grown


@test
def ping_between_the_guests(lab):
    lab.start_all()
    for guest, address in (("g1", ADDRESS["g2"]), ("g2", ADDRESS["g1"])):
        for _ in range(3):
            check(ping(guest, address, 1) is not None, f"{guest} does not reach {address}")


def mostly_super_frames(grown):
    for guest, direction in (("g1", "from_ring"), ("g2", "to_ring")):
        share = grown(guest, direction, "super_frame_bytes") / grown(guest, direction, "bytes")
        note(f"{guest} {direction}: {share:.1%} of the bytes in frames larger than the MTU")
        check(share >= 0.8, f"{guest} {direction}: only {share:.1%} of the bytes in frames larger than the MTU")


@test
def stream_uses_segmentation_offload(lab):
    mostly_super_frames(stream_with(lab, GIB, ("all", "all")))


@test
def stream_over_ipv6_uses_segmentation_offload(lab):
    mostly_super_frames(stream_with(lab, 256 * MIB, ("all", "all"), "fd00::2"))


def no_super_frames(lab, guests):
    offloads = tuple("none" if guest in guests else "all" for guest in ADDRESS)
    grown = stream_with(lab, GIB, offloads)
    for guest in guests:
        check("csum" not in lab.device(guest)["offloads"], f"{guest} agreed on an offload that it did not ask for")
        for direction in ("from_ring", "to_ring"):
            bytes_larger = grown(guest, direction, "super_frame_bytes")
            check(bytes_larger == 0, f"{guest} {direction}: {bytes_larger} bytes in frames larger than the MTU")


@test
def stream_without_offloads_at_the_sender(lab):
    no_super_frames(lab, ["g1"])


@test
def stream_without_offloads_at_the_receiver(lab):
    no_super_frames(lab, ["g2"])


@test
def stream_without_offloads_at_both(lab):
    no_super_frames(lab, ["g1", "g2"])


def segmented_datagrams(lab, offloads):
    """Datagrams that g1 sends many at once for its interface to cut (UDP_SEGMENT, udp(7)), one by one at g2."""
    lab.start_all(offloads)
    before = lab.counters("g1")["from_ring"]["super_frame_bytes"]
    with udp("g1") as sender, udp("g2", 5007) as receiver:
        # Room for all of them, so that a receiver that is not scheduled for a while loses none.
        receiver.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 << 20)
        sender.connect((ADDRESS["g2"], 5007))
        sender.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, SEGMENT)
        for number in range(8):
            # The last one is shorter than the others.
            sent = random.Random(number).randbytes(40 * SEGMENT + 100)
            sender.send(sent)
            received = [receiver.recv(2048) for _ in range(41)]
            expected = [sent[at:at + SEGMENT] for at in range(0, len(sent), SEGMENT)]
            check(received == expected, f"send {number}: a datagram was lost, changed or moved")
    return lab.counters("g1")["from_ring"]["super_frame_bytes"] - before


@test
def udp_segmentation_offload(lab):
    larger = segmented_datagrams(lab, ("all", "all"))
    if "uso" in lab.device("g1")["offloads"] and kernel_has_uso():
        check(larger >= 8 * 40 * SEGMENT, f"only {larger} bytes in frames larger than the MTU")


@test
def udp_segmentation_without_offloads(lab):
    check(segmented_datagrams(lab, ("none", "all")) == 0, "g1 sent super-frames without having agreed on them")


@test
def udp_segmentation_without_offloads_at_the_receiver(lab):
    segmented_datagrams(lab, ("all", "none"))


def kernel_has_uso():
    """Whether a TAP can carry UDP super-frames: from Linux 6.2 on."""
    return tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 2)


@test
def many_connections_at_once(lab):
    lab.start_all()
    count = 64
    listener = open_socket("g2", socket.AF_INET, socket.SOCK_STREAM)
    with listener:
        listener.bind((ADDRESS["g2"], 5002))
        listener.listen(count)
        # Nobody sends before all are connected.
        connected = threading.Barrier(count + 1, timeout=30)

        def client(number):
            with open_socket("g1", socket.AF_INET, socket.SOCK_STREAM, timeout=30) as opened:
                opened.connect((ADDRESS["g2"], 5002))
                opened.sendall(bytes([number]))
                connected.wait()
                return send_stream(opened, MIB, number)

        def server(opened):
            with opened:
                opened.settimeout(30)
                number = opened.recv(1)[0]
                return number, receive_stream(opened)

        clients = [Worker(client, number) for number in range(count)]
        servers = [Worker(server, listener.accept()[0]) for _ in range(count)]
        connected.wait()
        sent = {number: worker.result(60) for number, worker in enumerate(clients)}
        received = dict(worker.result(60) for worker in servers)
    check(received == {number: (MIB, digest) for number, digest in sent.items()}, "a stream did not arrive whole")


@test
def streams_in_both_directions_at_once(lab):
    lab.start_all()
    there = Worker(transfer, "g1", "g2", ADDRESS["g2"], 128 * MIB, 60, 5003)
    back = Worker(transfer, "g2", "g1", ADDRESS["g1"], 128 * MIB, 60, 5004)
    there.result(120)
    back.result(120)
