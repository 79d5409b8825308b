"""Either side is killed at any instant: traffic comes back by itself, and nothing is left over."""

import os
import signal
import struct
import threading
import time

from lab import ADDRESS, GUESTS, check, note, test, until
from load import PORT, start_flood
from network import transfer, udp

BACK_WITHIN = 2
# Datagrams a second. Below what the queues can take: a guest asks for an address once a second only, and a full queue
# would throw away the answers.
LOAD = 10_000
TAPS = tuple(f"vb-{guest}" for guest in GUESTS)


class Echo:
    """Numbered datagrams from g1 to g2 and back, all the time. Use as a context."""

    def __init__(self, pause=0.005):
        self.client, self.server = udp("g1", timeout=pause), udp("g2", 5006, timeout=0.1)
        self.pause, self.ended = pause, False
        self.answered = 0.0
        self.threads = [threading.Thread(target=run, daemon=True) for run in (self.answer, self.ask)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        self.wait(10)
        return self

    def __exit__(self, *_):
        self.ended = True
        for thread in self.threads:
            thread.join(5)
        self.client.close()
        self.server.close()

    def answer(self):
        while not self.ended:
            try:
                asked, address = self.server.recvfrom(64)
                self.server.sendto(asked, address)
            except OSError:
                # Nothing came, or there is no way back just now.
                pass

    def ask(self):
        while not self.ended:
            try:
                self.client.sendto(struct.pack("d", time.monotonic()), (ADDRESS["g2"], 5006))
            except OSError:
                time.sleep(self.pause)
            try:
                # When it was sent, so that an answer that was under way all the time does not count.
                self.answered = max(self.answered, struct.unpack("d", self.client.recv(64))[0])
            except OSError:
                pass

    def wait(self, seconds, since=None):
        """Until a datagram that was sent from now on is answered; how long that took, from `since` or now."""
        now = time.monotonic()
        since = since or now
        until(lambda: self.answered >= now, seconds - (now - since), f"traffic is back within {seconds} s", 0.002)
        return time.monotonic() - since


def identity(lab, guest):
    """What must stay as it is while the other side comes and goes."""
    link = lab.link(guest, "venet0")
    addresses = sorted((info["local"], info["prefixlen"]) for info in link["addr_info"])
    return link["ifindex"], link["address"], link["mtu"], addresses, lab.ip(guest, "route").split()


def prepare(lab, *shim_options):
    """Both guests, each with an address and a route that its administrator added."""
    daemon = lab.start_daemon()
    shims = [lab.start_shim(guest, *shim_options) for guest in GUESTS]
    for guest in GUESTS:
        lab.ip(guest, "address", "add", f"10.1.0.{guest[1]}/24", "dev", "venet0")
        lab.ip(guest, "route", "add", "10.2.0.0/16", "via", ADDRESS["g1" if guest == "g2" else "g2"])
    lab.wait_for_traffic()
    return daemon, shims, {guest: identity(lab, guest) for guest in GUESTS}


def check_identities(lab, before):
    for guest, expected in before.items():
        found = identity(lab, guest)
        check(found == expected, f"{guest}: the interface was {expected}, and is {found}")


def no_orphans(lab, programs):
    """Waits until only these supervisors and shims run, and one data process for each supervisor."""
    def expected():
        pids = {pid for pid, _ in lab.processes()}
        supervisors = [program for program in programs if program.name == "host-bridge"]
        return {program.pid for program in programs} <= pids and len(pids) == len(programs) + len(supervisors)
    until(expected, 2, f"no process but {[program.name for program in programs]} and one data process runs")


def start_load(lab):
    """Datagrams both ways, for far longer than the test; they end with the lab."""
    return [start_flood(lab, sender, receiver, 600, LOAD) for sender, receiver in (("g1", "g2"), ("g2", "g1"))]


def rounds(lab):
    return 60 if lab.long else 20


def finish(load, back):
    """Ends the load, which must have been there all the time, and tells how long each restart took."""
    for program in load:
        check(program.process.poll() is None, f"the load ended: {program.text()}")
        program.kill()
    note("back after " + ", ".join(f"{seconds * 1e3:.0f}" for seconds in back) + " ms")


@test
def daemon_killed_under_load(lab):
    daemon, shims, before = prepare(lab)
    load, back = start_load(lab), []
    with udp("g1", PORT), udp("g2", PORT), Echo() as echo:
        for number in range(rounds(lab)):
            data_process = lab.status()["data_process"]
            daemon.kill()
            if number % 2 == 0:
                gone = lambda: data_process not in [pid for pid, _ in lab.processes()]  # noqa: E731
                until(gone, 2, "the data process ends with its supervisor")
                until(lambda: not any(lab.link(None, tap) for tap in TAPS), 2, "the TAPs end with the daemon")
            # In the other rounds it starts while what was killed may not be gone yet.
            started = time.monotonic()
            daemon = lab.start_daemon(wait=False)
            back.append(echo.wait(BACK_WITHIN, started))
            no_orphans(lab, [daemon, *shims])
            check_identities(lab, before)
    finish(load, back)
    transfer("g1", "g2", ADDRESS["g2"], 16 << 20, 30)
    check(daemon.terminate() == 0, "SIGTERM ends the daemon with exit status 0")
    until(lambda: not any(lab.link(None, tap) for tap in TAPS), 2, "the TAPs end with the daemon")


@test
def data_process_killed_under_load(lab):
    daemon, shims, before = prepare(lab)
    load, back = start_load(lab), []
    with udp("g1", PORT), udp("g2", PORT), Echo() as echo:
        for _ in range(rounds(lab)):
            os.kill(lab.status()["data_process"], signal.SIGKILL)
            back.append(echo.wait(BACK_WITHIN))
            check(daemon.process.poll() is None, "the supervisor outlives the data process")
            no_orphans(lab, [daemon, *shims])
            check_identities(lab, before)
    finish(load, back)


@test
def persistent_shim_killed_under_load(lab):
    daemon, shims, before = prepare(lab, "--persist")
    load, back = start_load(lab), []
    with udp("g1", PORT), udp("g2", PORT), Echo() as echo:
        for number in range(rounds(lab)):
            which = number % 2
            shims[which].kill()
            until(lambda: not lab.carrier(GUESTS[which]), 2, "the carrier ends with the shim")
            started = time.monotonic()
            shims[which] = lab.start_shim(GUESTS[which], "--persist", wait=False)
            back.append(echo.wait(BACK_WITHIN, started))
            no_orphans(lab, [daemon, *shims])
            check_identities(lab, before)
    finish(load, back)
    for guest, shim in zip(GUESTS, shims):
        check(shim.terminate() == 0, "SIGTERM ends the shim with exit status 0")
        check(lab.link(guest, "venet0")["ifindex"] == before[guest][0], "the interface outlives the shim")


@test
def sigterm_ends_cleanly(lab):
    daemon, *shims = lab.start_all()
    check(shims[0].terminate() == 0, f"exit status 0 of the shim, not {shims[0].process.returncode}")
    check(lab.link("g1", "venet0") is None, "the interface ends with the shim")
    check(not os.path.exists(lab.path("g1.status")), "the status socket is removed")
    check(daemon.terminate() == 0, f"exit status 0 of the daemon, not {daemon.process.returncode}")
    for path in (lab.control(), *map(lab.socket_path, GUESTS)):
        check(not os.path.exists(path), f"{path} is removed")
    until(lambda: not any(lab.link(None, tap) for tap in TAPS), 2, "the TAPs are removed")
    until(lambda: not lab.carrier("g2"), 2, "the other guest loses its carrier")
    check(shims[1].process.poll() is None, "the other shim waits for a daemon")
    check(shims[1].terminate() == 0, "a shim without a daemon ends with exit status 0")
    no_orphans(lab, [])
