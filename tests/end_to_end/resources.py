"""What the programs use: nothing grows with connections, and nothing happens while nothing is to do."""

import os
import time

from frames import quiet
from lab import ADDRESS, BRIDGE, GUESTS, check, note, test, until
from network import ping, set_sysctl

WARM_UP = 10
CONNECTIONS = 100
MIB = 1 << 20


def usage(pid):
    """Open descriptors and resident bytes of a process."""
    with open(f"/proc/{pid}/statm", encoding="utf-8") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir(f"/proc/{pid}/fd")), resident


@test
def descriptors_and_memory_stay_flat(lab):
    lab.start_daemon()
    lab.start_shim("g2")
    status = lab.status()
    processes = {"supervisor": status["supervisor"], "data process": status["data_process"]}

    def connected():
        return lab.status()["guests"][0]["connected"]

    def connect_and_disconnect(count):
        for number in range(count):
            shim = lab.start_shim("g1", wait=False)
            until(lambda: lab.carrier("g1"), 10, "g1 is connected")
            # Each third one has no chance to say anything.
            if number % 3 == 0:
                shim.kill()
            else:
                check(shim.terminate() == 0, "the shim ends with exit status 0")
            until(lambda: not connected(), 5, "the daemon notices the end of g1")
            lab.forget(shim)

    connect_and_disconnect(WARM_UP)
    before = {name: usage(pid) for name, pid in processes.items()}
    connect_and_disconnect(CONNECTIONS)
    check(lab.status()["guests"][0]["connections"] == WARM_UP + CONNECTIONS, "each connection was counted once")
    for name, pid in processes.items():
        (descriptors, resident), (descriptors_now, resident_now) = before[name], usage(pid)
        note(f"{name}: {descriptors} descriptors, then {descriptors_now}; "
             f"{resident / MIB:.2f} MiB resident, then {resident_now / MIB:.2f}")
        check(descriptors_now == descriptors, f"{name}: {descriptors} descriptors, then {descriptors_now}")
        check(resident_now - resident < 2 * MIB, f"{name}: {resident} bytes resident, then {resident_now}")


def switches(pid, thread_name=None):
    """Voluntary context switches of each thread; of those with that name if one is given."""
    found = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/status", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file)
        if thread_name in (None, fields["Name"].strip()):
            found[int(thread)] = int(fields["voluntary_ctxt_switches"])
    return found


@test
def no_wake_ups_while_idle(lab):
    quiet()
    set_sysctl(None, f"net/ipv6/conf/{BRIDGE}/disable_ipv6", 1)
    lab.start_all(settle=False)
    seconds = 10
    shims = {guest: program for guest, program in zip(GUESTS, lab.programs[1:])}
    data_process = lab.status()["data_process"]

    def pumps():
        threads = {("host", thread): count for thread, count in switches(data_process, "venet0").items()}
        for guest, program in shims.items():
            threads |= {(guest, thread): count for thread, count in switches(program.pid).items()}
        return threads

    def wake_ups():
        counted = {("host", guest): lab.counters(guest)["wake_ups"] for guest in GUESTS}
        # The question itself wakes a shim, once.
        return counted | {("shim", guest): lab.shim_status(guest)["counters"]["wake_ups"] - 1 for guest in GUESTS}

    # The link has just come up: neighbours and multicast groups are announced for a while.
    def settled():
        now = pumps()
        time.sleep(2)
        return pumps() == now
    until(settled, 20, "the guests are silent for 2 s")
    counted = wake_ups()
    counted |= {key: value + 1 for key, value in counted.items() if key[0] == "shim"}
    time.sleep(0.1)
    before = pumps()
    check(len(before) == 4, f"expected two pumps of the host and one of each guest, found {sorted(before)}")
    time.sleep(seconds)
    after = pumps()
    check(after == before, f"context switches of idle pumps in {seconds} s: {before}, then {after}")
    again = wake_ups()
    check(again == counted, f"wake-ups while idle for {seconds} s: {counted}, then {again}")
    # Counts that never change would prove nothing.
    check(ping("g1", ADDRESS["g2"], 1) is not None, "the guests reach each other")
    check(all(count > after[pump] for pump, count in pumps().items()), "the pumps' context switches are counted")
    check(all(count > again[pump] for pump, count in wake_ups().items()), "the pumps' wake-ups are counted")
