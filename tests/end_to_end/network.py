"""Sockets in the guests' namespaces, and what is sent through them."""

import contextlib
import ctypes
import hashlib
import os
import random
import socket
import struct
import threading
import time

from lab import check

CLONE_NEWNET = 0x40000000
SOL_PACKET = 263
PACKET_AUXDATA = 8
PACKET_IGNORE_OUTGOING = 23
ETH_P_ALL = 3
# From asm-generic/socket.h; without the limit that holds for ordinary users.
SO_RCVBUFFORCE = 33
# In the status of a packet's auxiliary data, see include/uapi/linux/if_packet.h.
TP_STATUS_CSUMNOTREADY = 1 << 3
TP_STATUS_VLAN_VALID = 1 << 4

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def inside(guest):
    """Runs the calling thread in a guest's network namespace. A socket stays where it was created."""
    with open("/proc/thread-self/ns/net", "rb") as back, open(f"/run/netns/{guest}", "rb") as there:
        _enter(there)
        try:
            yield
        finally:
            _enter(back)


def _enter(file):
    if _libc.setns(file.fileno(), CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def set_sysctl(guest, name, value):
    """Sets a switch of a guest's network, or the host's if `guest` is None. Nothing if the kernel has no such switch."""
    with inside(guest) if guest else contextlib.nullcontext():
        # What is below /proc/sys/net depends on the thread that looks.
        with contextlib.suppress(FileNotFoundError), open(f"/proc/sys/{name}", "w", encoding="ascii") as file:
            file.write(str(value))


def open_socket(guest, family, kind, protocol=0, timeout=10):
    """A socket in a guest's namespace."""
    with inside(guest):
        opened = socket.socket(family, kind, protocol)
    opened.settimeout(timeout)
    return opened


def udp(guest, port=0, timeout=1):
    """A UDP socket that is bound in a guest's namespace."""
    opened = open_socket(guest, socket.AF_INET, socket.SOCK_DGRAM, timeout=timeout)
    opened.bind(("0.0.0.0", port))
    return opened


def packet_socket(guest, interface="venet0", timeout=2):
    """A raw socket that sees all incoming frames of an interface, with their auxiliary data."""
    opened = open_socket(guest, socket.AF_PACKET, socket.SOCK_RAW, 0, timeout)
    opened.setsockopt(SOL_PACKET, PACKET_AUXDATA, 1)
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    # As much as the kernel lets root have, so that a reader that is not scheduled for a while loses nothing.
    opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 << 20)
    opened.bind((interface, ETH_P_ALL))
    return opened


def receive_frame(opened):
    """The next frame as it was on the wire, and its auxiliary status. The kernel keeps a VLAN tag beside the frame."""
    frame, control, _, _ = opened.recvmsg(1 << 17, 256)
    status = 0
    for level, kind, data in control:
        if (level, kind) == (SOL_PACKET, PACKET_AUXDATA):
            status, _, _, _, _, tag, protocol = struct.unpack("=IIIHHHH", data[:20])
            if status & TP_STATUS_VLAN_VALID:
                frame = frame[:12] + struct.pack("!HH", protocol, tag) + frame[12:]
    return frame, status


def mac_of(lab, guest, interface="venet0"):
    """The address of an interface as bytes."""
    return bytes.fromhex(lab.link(guest, interface)["address"].replace(":", ""))


def checksum(data):
    """The Internet checksum of RFC 1071. Zero over data that contains its own right checksum."""
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ping(guest, address, timeout=1.0):
    """Sends one ICMP or ICMPv6 echo request; the round trip in seconds, or None if there is no answer in time."""
    version6 = ":" in address
    family, protocol = (socket.AF_INET6, 58) if version6 else (socket.AF_INET, 1)
    ask, answer = (128, 129) if version6 else (8, 0)
    identifier, payload = random.randrange(1 << 16), os.urandom(48)
    request = struct.pack("!BBHHH", ask, 0, 0, identifier, 1) + payload
    # The kernel makes the checksum of ICMPv6, whose pseudo header it knows.
    if not version6:
        request = request[:2] + struct.pack("!H", checksum(request)) + request[4:]
    with open_socket(guest, family, socket.SOCK_RAW, protocol) as opened:
        started = time.monotonic()
        try:
            opened.sendto(request, (address, 0))
            while (left := started + timeout - time.monotonic()) > 0:
                opened.settimeout(left)
                reply = opened.recv(2048)
                reply = reply if version6 else reply[(reply[0] & 15) * 4:]
                if reply[0] == answer and reply[4:6] == request[4:6] and reply[8:] == payload:
                    return time.monotonic() - started
        except OSError:
            pass
    return None


class Worker(threading.Thread):
    """A thread whose failure is the test's failure."""

    def __init__(self, function, *arguments):
        super().__init__(daemon=True)
        self.function, self.arguments = function, arguments
        self.value, self.error = None, None
        self.start()

    def run(self):
        try:
            self.value = self.function(*self.arguments)
        except Exception as error:
            self.error = error

    def result(self, seconds):
        """What the function returned; fails if it is not done in time."""
        self.join(seconds)
        check(not self.is_alive(), f"not done within {seconds} s: {self.function.__name__}")
        if self.error:
            raise self.error
        return self.value


def send_stream(opened, size, seed):
    """Sends so many bytes that are nowhere the same, and returns their SHA-256."""
    block = bytearray(random.Random(seed).randbytes(min(size, 1 << 20)))
    digest = hashlib.sha256()
    sent = 0
    while sent < size:
        # Each block differs, so that one that is lost, repeated or moved changes the hash.
        struct.pack_into("!Q", block, 0, sent)
        now = memoryview(block)[:size - sent]
        opened.sendall(now)
        digest.update(now)
        sent += len(now)
    opened.shutdown(socket.SHUT_WR)
    return digest.hexdigest()


def receive_stream(opened):
    """Receives until the end; returns the number of bytes and their SHA-256."""
    digest, size, space = hashlib.sha256(), 0, bytearray(1 << 20)
    while (length := opened.recv_into(space)) > 0:
        digest.update(memoryview(space)[:length])
        size += length
    return size, digest.hexdigest()


def transfer(sender, receiver, address, size, seconds, port=5001):
    """Sends a stream by TCP from one guest to the other, and checks that it arrived. Returns how long it took."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with open_socket(receiver, family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1)
        with open_socket(sender, family, socket.SOCK_STREAM) as client:
            client.connect((address, port))
            server, _ = listener.accept()
            with server:
                server.settimeout(10)
                started = time.monotonic()
                receiving = Worker(receive_stream, server)
                sending = Worker(send_stream, client, size, size)
                sent = sending.result(seconds)
                received = receiving.result(seconds)
                took = time.monotonic() - started
    check(received == (size, sent), f"sent {size} bytes with SHA-256 {sent}, received {received}")
    return took
