"""The first words of a connection, by a scripted guest and a scripted host. Layout: bus/src/connector/local.rs."""

import os
import socket
import struct

from lab import check, test, until

MAGIC = b"VBUSHELO"
# Magic, major, minor, reserved.
CLIENT = struct.Struct("<8sHHI")
# Magic, accepted, major, minor, doorbells, interrupts, reason.
SERVER = struct.Struct("<8sIHHII128s")
OURS = (1, 0)
LATER = (2, 3)


def connect(lab):
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # With a time limit it would not wait for its turn.
    guest.connect(lab.socket_path("g1"))
    guest.settimeout(5)
    return guest


def names_both(text):
    return all(f"{major}.{minor}" in text for major, minor in (OURS, LATER))


@test
def daemon_refuses_a_guest_of_another_abi(lab):
    daemon = lab.start_daemon()
    with connect(lab) as guest:
        guest.send(CLIENT.pack(MAGIC, *LATER, 0))
        magic, accepted, major, minor, _, _, reason = SERVER.unpack(guest.recv(4096))
        check((magic, accepted, (major, minor)) == (MAGIC, 0, OURS), f"accepted {accepted}, ABI {major}.{minor}")
        reason = reason.rstrip(b"\0").decode()
        check(names_both(reason), f"both versions are named: {reason}")
        check(guest.recv(1) == b"", "the daemon closes the connection")
    until(lambda: names_both(daemon.text()), 2, "the daemon's log names both versions")
    lab.start_shim("g1")


@test
def shim_refuses_a_daemon_of_another_abi(lab):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(5)
        listener.bind(lab.socket_path("g1"))
        listener.listen(1)
        shim = lab.start_shim("g1", wait=False)
        host, _ = listener.accept()
        with host:
            host.settimeout(5)
            magic, major, minor, _ = CLIENT.unpack(host.recv(4096))
            check((magic, (major, minor)) == (MAGIC, OURS), f"the shim speaks ABI {major}.{minor}")
            host.send(SERVER.pack(MAGIC, 0, *LATER, 0, 0, b""))
            check(shim.wait(5) != 0, "the shim ends with a failure")
    check(names_both(shim.text()), f"both versions are named: {shim.text()}")
    check(len(shim.text().splitlines()) == 1, f"one line says why: {shim.text()}")
    check(lab.link("g1", "venet0") is None, "the interface is gone")


@test
def guests_that_leave_at_once_leave_nothing(lab):
    """A hello, and gone before the answer: nothing of it stays in the data process."""
    daemon = lab.start_daemon()
    lab.start_shim("g2")
    data_process = lab.status()["data_process"]

    def descriptors():
        return len(os.listdir(f"/proc/{data_process}/fd"))

    def leave(times):
        for _ in range(times):
            with connect(lab) as guest:
                guest.send(CLIENT.pack(MAGIC, *OURS, 0))
    leave(3)
    until(lambda: not lab.status()["guests"][0]["connected"], 5, "the last one is gone")
    before = descriptors()
    leave(50)
    until(lambda: descriptors() <= before, 5, f"as many descriptors as before, {before}")
    lab.start_shim("g1")
    check(daemon.process.poll() is None, "the daemon is not disturbed")


@test
def daemon_refuses_what_is_no_handshake(lab):
    daemon = lab.start_daemon()
    for said in (b"x", bytes(CLIENT.size), CLIENT.pack(MAGIC, *OURS, 0)[:-1], bytes(4096)):
        with connect(lab) as guest:
            guest.send(said)
            answer = SERVER.unpack(guest.recv(4096))
            check(answer[1] == 0 and b"handshake" in answer[6], f"to {said[:20]}: {answer}")
    # One that says nothing holds up nobody.
    with connect(lab):
        lab.start_shim("g1")
    check(daemon.process.poll() is None, "the daemon is not disturbed")
