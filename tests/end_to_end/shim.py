"""What guest-shim does with its interface: it waits for the daemon, and shows the link."""

import json
import subprocess

from lab import ADDRESS, GUESTS, check, test, until
from network import ping


@test
def shim_waits_for_a_daemon(lab):
    shims = [lab.start_shim(guest, wait=False) for guest in GUESTS]
    for guest in GUESTS:
        until(lambda: lab.link(guest, "venet0") is not None, 5, f"{guest} has its interface")
        check(not lab.carrier(guest), f"{guest} has no carrier without a daemon")
    for shim in shims:
        check(shim.process.poll() is None, "the shim waits")
        until(lambda: shim.text().count("waiting for the daemon") == 1, 5, "the shim says once what it waits for")
    status = lab.shim_status("g1")
    check((status["connected"], status["link"]) == (False, False), f"the status is that of a waiting shim: {status}")
    lab.start_daemon()
    for guest in GUESTS:
        until(lambda: lab.carrier(guest), 2, f"{guest} connects by itself")
    lab.wait_for_traffic()


@test
def carrier_follows_the_link(lab):
    lab.start_all()
    before = lab.link("g1", "venet0")["ifindex"]
    for _ in range(3):
        lab.ip(None, "link", "set", "vb-g1", "down")
        until(lambda: not lab.carrier("g1"), 2, "the carrier goes when the port goes down")
        check(lab.carrier("g2"), "the other guest keeps its carrier")
        until(lambda: lab.device("g1")["link"] == "down", 2, "the daemon shows that the link is down")
        check(not lab.shim_status("g1")["link"], "the shim shows that the link is down")
        lab.ip(None, "link", "set", "vb-g1", "up")
        until(lambda: lab.carrier("g1"), 2, "the carrier comes back with the port")
        until(lambda: lab.device("g1")["link"] == "up", 2, "the daemon shows that the link is up")
        check(lab.shim_status("g1")["link"], "the shim shows that the link is up")
        lab.wait_for_traffic()
    check(lab.link("g1", "venet0")["ifindex"] == before, "the interface is the same")


@test
def port_has_a_carrier_only_with_a_guest(lab):
    lab.start_daemon()
    for guest in GUESTS:
        check(not lab.carrier(None, f"vb-{guest}"), f"the port of {guest} has no carrier before it is there")
    shims = {guest: lab.start_shim(guest) for guest in GUESTS}
    for guest in GUESTS:
        until(lambda: lab.carrier(None, f"vb-{guest}"), 2, f"the port of {guest} has a carrier")
    shims["g1"].kill()
    until(lambda: not lab.carrier(None, "vb-g1"), 2, "the carrier goes with the guest")
    check(lab.carrier(None, "vb-g2"), "the other port keeps its carrier")


@test
def port_that_is_down_before_the_guest_comes(lab):
    lab.start_daemon()
    lab.ip(None, "link", "set", "vb-g1", "down")
    lab.start_shim("g1", wait=False)
    until(lambda: lab.shim_status("g1")["connected"], 5, "the shim connects")
    until(lambda: lab.device("g1")["link"] == "down", 2, "the daemon shows that the link is down")
    check(not lab.carrier("g1"), "no carrier while the port is down")
    lab.ip(None, "link", "set", "vb-g1", "up")
    until(lambda: lab.carrier("g1"), 2, "the carrier comes with the port")


@test
def status_path_that_is_no_socket_is_left_alone(lab):
    path = lab.path("precious")
    with open(path, "w", encoding="utf-8") as file:
        file.write("precious")
    command = [lab.binary("guest-shim"), "run", "--connect", lab.socket_path("g1"), "--netns", "g1", "--status", path]
    shim = lab.start("guest-shim", *command)
    check(shim.wait(5) not in (0, None) and "no socket" in shim.text(), f"it is refused: {shim.text()}")
    with open(path, encoding="utf-8") as file:
        check(file.read() == "precious", "the file is still there")


@test
def offloads_that_lack_what_they_need_are_left_out(lab):
    """A TAP refuses ECN without TSO; the link comes up without it."""
    lab.start_daemon()
    for guest in ADDRESS:
        lab.start_shim(guest, "--offloads", "csum,ecn")
        check(sorted(lab.device(guest)["offloads"]) == ["csum", "link"], f"{guest}: {lab.device(guest)['offloads']}")
    lab.wait_for_traffic()


@test
def offloads_in_use_are_shown_at_both_ends(lab):
    lab.start_daemon()
    wanted = {"g1": ["csum", "tso4", "link"], "g2": ["link"]}
    for guest, offloads in wanted.items():
        lab.start_shim(guest, "--offloads", ",".join(offloads))
        check(sorted(lab.device(guest)["offloads"]) == sorted(offloads), f"{guest}: {lab.device(guest)['offloads']}")
        shown = lab.shim_status(guest)["offloads"]
        check(sorted(shown) == sorted(offloads), f"{guest}: {shown}")
    lab.wait_for_traffic()


@test
def status_of_a_shim_that_does_not_run_says_so(lab):
    command = [lab.binary("guest-shim"), "status", "--status", lab.path("absent.status")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    check(done.returncode != 0 and "no shim answers at" in done.stderr and len(done.stderr.splitlines()) == 1,
          f"exit status {done.returncode}: {done.stderr}")


@test
def missing_namespace_is_refused(lab):
    command = [lab.binary("guest-shim"), "run", "--connect", lab.socket_path("g1"), "--netns", "absent"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    check(done.returncode != 0 and "ip netns add absent" in done.stderr and len(done.stderr.splitlines()) == 1,
          f"exit status {done.returncode}: {done.stderr}")


@test
def address_and_mac_are_those_that_were_asked_for(lab):
    lab.start_daemon(device='mtu = 1400')
    for guest in GUESTS:
        lab.start_shim(guest)
        link, device = lab.link(guest, "venet0"), lab.device(guest)
        check(link["address"] == device["mac"], f"{guest}: MAC {link['address']}, and {device['mac']} at the host")
        check(link["mtu"] == device["mtu"] == 1400, f"{guest}: MTU {link['mtu']}, and {device['mtu']} at the host")
        found = [info["local"] for info in link["addr_info"] if info["family"] == "inet"]
        check(found == [ADDRESS[guest]], f"{guest}: addresses {json.dumps(found)}")
    check(ping("g1", ADDRESS["g2"], 2) is not None, "the guests reach each other")
