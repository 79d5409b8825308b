"""What a guest needs to get onto a network: DHCP, whose clients check checksums themselves, and IPv6 by SLAAC."""

import os
import random
import shutil
import socket
import struct
import time

from lab import ADDRESS, Skipped, check, note, test, until
from network import (TP_STATUS_CSUMNOTREADY, Worker, checksum, inside, mac_of, open_socket, packet_socket, ping,
                     receive_frame)

DISCOVER, OFFER, REQUEST, ACK = 1, 2, 3, 5
MAGIC = bytes((99, 130, 83, 99))
# Not an address that a server in the tests would give by accident.
LEASED = "10.0.0.77"


def message(operation, transaction, mac, options, yours="0.0.0.0"):
    """A DHCP message (RFC 2131) with the broadcast flag, so that the answer does not need an address to arrive at."""
    fixed = struct.pack("!BBBBIHH", operation, 1, 6, 0, transaction, 0, 0x8000)
    fixed += socket.inet_aton("0.0.0.0") + socket.inet_aton(yours) + bytes(8) + mac + bytes(10) + bytes(192)
    coded = b"".join(bytes((code, len(value))) + value for code, value in options)
    # BOOTP's shortest message is 300 bytes.
    return (fixed + MAGIC + coded + b"\xff").ljust(300, b"\0")


def options_of(received):
    """The options of a message by code."""
    found, at = {}, 240
    while at < len(received) and received[at] != 255:
        if received[at] == 0:
            at += 1
            continue
        length = received[at + 1]
        found[received[at]] = received[at + 2:at + 2 + length]
        at += 2 + length
    return found


def request_frame(mac, payload):
    """A broadcast frame from port 68 to port 67, with both checksums."""
    udp = struct.pack("!HHHH", 68, 67, 8 + len(payload), 0) + payload
    pseudo = bytes(4) + b"\xff" * 4 + struct.pack("!BBH", 0, 17, len(udp))
    udp = udp[:6] + struct.pack("!H", checksum(pseudo + udp) or 0xFFFF) + udp[8:]
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0) + bytes(4) + b"\xff" * 4
    ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]
    return b"\xff" * 6 + mac + b"\x08\x00" + ip + udp


class Client:
    """A DHCP client on a raw socket, as dhclient is one: what the kernel would check, it checks."""

    def __init__(self, lab, guest, partial_allowed):
        self.mac = mac_of(lab, guest)
        self.socket = packet_socket(guest)
        self.transaction = random.randrange(1 << 32)
        self.partial_allowed = partial_allowed
        self.partial = 0

    def ask(self, kind, expected, more=()):
        """Sends a message, again each second as clients do, and returns the address and the options of the answer."""
        sent = request_frame(self.mac, message(1, self.transaction, self.mac, [(53, bytes((kind,))), *more]))
        for _ in range(8):
            self.socket.send(sent)
            answer = self.answer(expected, time.monotonic() + 1)
            if answer:
                return socket.inet_ntoa(answer[16:20]), options_of(answer)
        raise AssertionError(f"no DHCP answer of type {expected}")

    def answer(self, expected, deadline):
        while time.monotonic() < deadline:
            try:
                frame, status = receive_frame(self.socket)
            except TimeoutError:
                return None
            if frame[12:14] != b"\x08\x00" or frame[23] != 17:
                continue
            header = (frame[14] & 15) * 4
            ip = frame[14:14 + struct.unpack_from("!H", frame, 16)[0]]
            udp = ip[header:]
            payload = udp[8:]
            if struct.unpack_from("!HH", udp) != (67, 68) or payload[4:8] != struct.pack("!I", self.transaction):
                continue
            if options_of(payload).get(53) != bytes((expected,)):
                continue
            self.check_checksums(ip[:header], udp, status)
            return payload
        return None

    def check_checksums(self, ip, udp, status):
        check(checksum(ip) == 0, "the IPv4 header's checksum is wrong")
        check(struct.unpack_from("!H", udp, 4)[0] == len(udp), "the UDP length is that of the datagram")
        if status & TP_STATUS_CSUMNOTREADY:
            check(self.partial_allowed, "an unfinished checksum reached a guest that did not ask for that offload")
            self.partial += 1
            return
        check(udp[6:8] != b"\0\0", "the UDP checksum is missing")
        pseudo = ip[12:20] + struct.pack("!BBH", 0, 17, len(udp))
        check(checksum(pseudo + udp) == 0, "the UDP checksum is wrong, and nothing says that it is still to be made")

    def lease(self):
        """Discover and request, as RFC 2131 has it. Returns the address."""
        offered, options = self.ask(DISCOVER, OFFER)
        chosen = [(50, socket.inet_aton(offered)), (54, options[54])]
        acknowledged, _ = self.ask(REQUEST, ACK, chosen)
        check(acknowledged == offered, f"{offered} was offered, {acknowledged} acknowledged")
        return offered


def start_dhcpd(lab):
    """The DHCP server of Debian's isc-dhcp-server in g1."""
    program = shutil.which("dhcpd", path=os.environ["PATH"] + ":/usr/sbin")
    if not program:
        raise Skipped("dhcpd is missing; install it with: apt-get install isc-dhcp-server")
    configuration, leases = lab.path("dhcpd.conf"), lab.path("dhcpd.leases")
    with open(configuration, "w", encoding="utf-8") as file:
        file.write(f"authoritative;\nsubnet 10.0.0.0 netmask 255.255.255.0 {{ range {LEASED} {LEASED}; }}\n")
    with open(leases, "w", encoding="utf-8"):
        pass
    # Without the user it would become one of its own, who may not write into the lab's directory.
    lab.start("dhcpd", "ip", "netns", "exec", "g1", program, "-f", "-4", "-user", "root", "-group", "root",
              "-cf", configuration, "-lf", leases, "--no-pid", "venet0")


def small_server(guest, ended):
    """Answers by an ordinary UDP socket, so that the kernel leaves the checksum to the interface."""
    with open_socket(guest, socket.AF_INET, socket.SOCK_DGRAM, timeout=0.1) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"venet0")
        opened.bind(("0.0.0.0", 67))
        while not ended:
            try:
                asked = opened.recv(2048)
            except TimeoutError:
                continue
            kind = OFFER if options_of(asked).get(53) == bytes((DISCOVER,)) else ACK
            options = [(53, bytes((kind,))), (54, socket.inet_aton(ADDRESS[guest]))]
            transaction, mac = struct.unpack_from("!I", asked, 4)[0], asked[28:34]
            opened.sendto(message(2, transaction, mac, options, LEASED), ("255.255.255.255", 68))


def lease_from_dhcpd(lab, offloads):
    lab.start_daemon()
    lab.start_shim("g1")
    lab.start_shim("g2", "--offloads", offloads, address=False)
    start_dhcpd(lab)
    client = Client(lab, "g2", offloads != "none")
    with client.socket:
        leased = client.lease()
    check(leased == LEASED, f"{leased} was leased, not {LEASED}")


@test
def dhcp_with_offloads(lab):
    lease_from_dhcpd(lab, "all")


@test
def dhcp_without_offloads_at_the_client(lab):
    lease_from_dhcpd(lab, "none")


def lease_from_small_server(lab, offloads):
    lab.start_daemon()
    lab.start_shim("g1")
    lab.start_shim("g2", "--offloads", offloads, address=False)
    client, ended = Client(lab, "g2", offloads != "none"), []
    server = Worker(small_server, "g1", ended)
    with client.socket:
        try:
            leased = client.lease()
        finally:
            ended.append(True)
            server.result(5)
    check(leased == LEASED, f"{leased} was leased, not {LEASED}")
    note(f"{client.partial} of 2 answers came with a checksum that is marked as unfinished")


@test
def checksum_left_to_the_interface_arrives_marked_or_right(lab):
    lease_from_small_server(lab, "all")


@test
def checksum_left_to_the_interface_arrives_right_without_offloads(lab):
    lease_from_small_server(lab, "none")


def router_advertisement(prefix):
    """RFC 4861: a router for nobody, and a prefix to make addresses from. The kernel fills in the checksum."""
    header = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 0, 0, 0)
    on_link_and_autonomous = 0xC0
    option = struct.pack("!BBBBIII", 3, 4, 64, on_link_and_autonomous, 3600, 3600, 0)
    return header + option + socket.inet_pton(socket.AF_INET6, prefix)


def global_addresses(lab, guest):
    """The IPv6 addresses of a guest that can be used beyond the link."""
    infos = lab.link(guest, "venet0")["addr_info"]
    return [info["local"] for info in infos
            if info["family"] == "inet6" and info["scope"] == "global" and not info.get("tentative")]


@test
def ipv6_address_by_slaac(lab):
    if not os.path.exists("/proc/net/if_inet6"):
        raise Skipped("this kernel has no IPv6")
    lab.start_daemon()
    for guest in ADDRESS:
        lab.start_shim(guest, address=False)
    lab.ip("g1", "address", "add", "fd00:5::1/64", "dev", "venet0", "nodad")

    def link_local_ready():
        infos = lab.link("g1", "venet0")["addr_info"]
        return any(info["scope"] == "link" and not info.get("tentative") for info in infos)

    # Address detection takes a second; before, the kernel sends nothing from the link-local address.
    until(link_local_ready, 10, "g1 has a link-local address")
    with open_socket("g1", socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as router:
        with inside("g1"):
            index = socket.if_nametoindex("venet0")
        router.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
        # Receivers take no advertisement that may have passed a router.
        router.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        router.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 0)

        def advertised():
            router.sendto(router_advertisement("fd00:5::"), ("ff02::1", 0, 0, index))
            return global_addresses(lab, "g2")

        address = until(advertised, 10, "g2 made itself an address", 0.5)[0]
    # The lower half is made from the MAC, RFC 4291 appendix A.
    mac = bytearray(mac_of(lab, "g2"))
    mac[0] ^= 2
    expected = socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, "fd00:5::")[:8]
                                + mac[:3] + b"\xff\xfe" + mac[3:])
    check(address == expected, f"g2 made itself {address}, not {expected}")
    until(lambda: ping("g1", address, 1) is not None, 5, f"g1 reaches {address}")
    check(ping("g2", "fd00:5::1", 1) is not None, "g2 reaches g1")
