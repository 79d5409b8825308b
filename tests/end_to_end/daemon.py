"""What host-bridge refuses, what it warns of, and how it treats what it finds on the host."""

import grp
import os
import re
import socket
import stat
import subprocess

from lab import ADDRESS, BRIDGE, GUESTS, check, output, test, until
from network import ping

ON_BRIDGE = "10.0.0.254"


def single(lab, *more, bridge=BRIDGE, path=None):
    """The command line for one guest."""
    path = path or lab.socket_path("g1")
    return [lab.binary("host-bridge"), "run", "--bridge", bridge, "--socket", path, *more]


def start_single(lab, *more):
    """A daemon for one guest, ready."""
    daemon = lab.start("host-bridge", *single(lab, *more))

    def ready():
        check(daemon.process.poll() is None, f"host-bridge ended: {daemon.text().strip()}")
        return "waiting at" in daemon.text()
    until(ready, 5, "host-bridge waits for its guest")
    return daemon


def refused(command, *words, lines=1):
    """Runs a command that must fail with one clear line that contains these words."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    said = done.stderr.strip()
    check(done.returncode != 0, f"{command} succeeded")
    check(lines is None or len(said.splitlines()) == lines, f"expected {lines} line on stderr, not: {said}")
    check(said.splitlines()[0].startswith("host-bridge: "), f"who says it comes first, not: {said}")
    for word in words:
        check(word in said, f"expected {word!r} in: {said}")


def configuration(lab, text):
    path = lab.path("test.toml")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return [lab.binary("host-bridge"), "run", "--config", path]


@test
def unknown_keys_are_errors_that_name_them(lab):
    guest = f'[[guest]]\nname = "a"\nsocket = "{lab.path("a.sock")}"\n'
    # The message shows the place in the file, in lines of its own.
    refused(configuration(lab, "brigde = 1\n"), "brigde", lines=None)
    refused(configuration(lab, guest + 'moed = "0600"\n'), "moed", lines=None)
    refused(configuration(lab, guest + f'[[guest.device]]\nbridge = "{BRIDGE}"\nmtuu = 1500\n'), "mtuu", lines=None)
    refused([lab.binary("host-bridge"), "run", "--config", lab.path("absent.toml")], "absent.toml")


@test
def values_that_cannot_work_are_refused(lab):
    guest = f'[[guest]]\nname = "a"\nsocket = "{lab.path("a.sock")}"\n[[guest.device]]\n'
    refused(configuration(lab, guest), "guest a", "venet-tap needs a bridge")
    refused(configuration(lab, guest + f'bridge = "{BRIDGE}"\nmtu = 67\n'), "guest a", "mtu", "68")
    refused(configuration(lab, guest + f'bridge = "{BRIDGE}"\nring = 65536\n'), "guest a")
    refused(configuration(lab, (guest + f'bridge = "{BRIDGE}"\n') * 2), "two guests of this name")


@test
def missing_bridge_is_refused(lab):
    refused(single(lab, bridge="br9"), "there is no bridge", "br9", "ip link add br9 type bridge")
    refused(single(lab, bridge="lo"), "lo is an interface but no bridge")


@test
def status_without_a_daemon_says_so(lab):
    command = [lab.binary("host-bridge"), "status", "--control", lab.path("absent.control")]
    refused(command, "no daemon answers at", "absent.control")


@test
def live_socket_is_refused_and_stale_one_replaced(lab):
    path = lab.socket_path("g1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(path)
    check(os.path.exists(path), "the socket is stale")
    daemon = start_single(lab)
    shim = lab.start_shim("g1")
    # The control socket is the first that the second daemon finds taken; with another one, it is the guest's.
    refused(single(lab), f"{path}.control is in use")
    with open(lab.path("second.toml"), "w", encoding="utf-8") as file:
        file.write(f'control = "{lab.path("second.control")}"\n[[guest]]\nname = "second"\nsocket = "{path}"\n'
                   f'[[guest.device]]\nbridge = "{BRIDGE}"\n')
    refused([lab.binary("host-bridge"), "run", "--config", lab.path("second.toml")], f"{path} is in use")
    check(lab.link(None, "vb-second") is None, "a daemon that is refused leaves no TAP")
    check(daemon.process.poll() is None and shim.process.poll() is None, "the first daemon is not disturbed")
    check(lab.carrier("g1"), "the first daemon's guest is not disturbed")
    file = lab.path("a file")
    with open(file, "w", encoding="utf-8"):
        pass
    refused(single(lab, path=file), "a file exists and is no socket")
    check(os.path.isfile(file), "the file is still there")


@test
def sockets_have_mode_and_group(lab):
    def mode(path):
        return stat.S_IMODE(os.stat(path).st_mode)

    daemon = lab.start_daemon()
    for path in (lab.control(), *map(lab.socket_path, GUESTS)):
        check(mode(path) == 0o660, f"{path} has mode {mode(path):o}, not 660")
    check(daemon.terminate() == 0, "the daemon ends with exit status 0")
    group = grp.getgrgid(1)
    lab.start_daemon(guest=f'mode = "0620"\ngroup = "{group.gr_name}"')
    for path in map(lab.socket_path, GUESTS):
        check(mode(path) == 0o620, f"{path} has mode {mode(path):o}, not 620")
        check(os.stat(path).st_gid == group.gr_gid, f"{path} has group {os.stat(path).st_gid}, not {group.gr_gid}")


@test
def data_process_has_no_privileges(lab):
    lab.start_all()
    with open(f"/proc/{lab.status()['data_process']}/status", encoding="utf-8") as file:
        fields = {name: value.split() for name, value in (line.split(":", 1) for line in file)}
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        check(int(fields[name][0], 16) == 0, f"{name} is {fields[name][0]}")
    check("0" not in fields["Uid"] + fields["Gid"], f"user {fields['Uid']}, group {fields['Gid']}")
    check(fields["Groups"] == [], f"groups {fields['Groups']}")
    check(fields["NoNewPrivs"] == ["1"], "no_new_privs is set")


@test
def data_process_that_cannot_give_up_root_is_an_error(lab):
    """CAP_NET_ADMIN alone is enough for the supervisor, but not for becoming another user."""
    daemon = lab.start("host-bridge", "setpriv", "--inh-caps=-all", "--bounding-set=-all,+net_admin", *single(lab))
    check(daemon.wait(10) not in (0, None), "it fails")
    check("cannot become user" in daemon.text() and "CAP_SETUID" in daemon.text(), f"it says why: {daemon.text()}")


@test
def spanning_tree_is_warned_of(lab):
    # In hundredths of a second: 4 s of listening and 4 s of learning.
    lab.ip(None, "link", "set", BRIDGE, "type", "bridge", "stp_state", "1", "forward_delay", "400")
    daemon = start_single(lab)
    warning = [line for line in daemon.text().splitlines() if "spanning tree" in line]
    check(len(warning) == 1 and "WARN" in warning[0] and re.search(r"\b8 s\b", warning[0]),
          f"expected one warning that names 8 s, not: {daemon.text()}")


def mtu_warning(lab, *options):
    daemon = start_single(lab, *options)
    return [line for line in daemon.text().splitlines() if "MTUs differ" in line and "WARN" in line]


@test
def different_mtus_are_warned_of(lab):
    # One that was set by hand stays, and only a change is a setting.
    for mtu in ("1400", "1500"):
        lab.ip(None, "link", "set", BRIDGE, "mtu", mtu)
    warning = mtu_warning(lab, "--mtu", "1400")
    check(len(warning) == 1 and "1400" in warning[0] and "1500" in warning[0], f"expected a warning, not: {warning}")


@test
def bridge_that_follows_the_smaller_mtu_is_warned_of(lab):
    # Nobody set an MTU, so the bridge takes the smallest of its ports, and longer frames of its other ports are lost.
    warning = mtu_warning(lab, "--mtu", "1400")
    check(len(warning) == 1 and "1400" in warning[0] and "1500" in warning[0], f"expected a warning, not: {warning}")


@test
def equal_mtus_are_not_warned_of(lab):
    check(mtu_warning(lab) == [], "a warning without a reason")


@test
def bridge_that_is_down_is_warned_of(lab):
    lab.ip(None, "link", "set", BRIDGE, "down")
    daemon = start_single(lab)
    check(f"the bridge {BRIDGE} is down" in daemon.text(), f"expected a warning, not: {daemon.text()}")


@test
def bridge_keeps_its_address(lab):
    def address():
        return lab.link(None, BRIDGE)["address"]

    # A bridge without an address of its own takes the lowest one of its ports.
    before = address()
    daemon = lab.start_daemon()
    taps = {lab.link(None, f"vb-{guest}")["address"] for guest in GUESTS}
    check(address() not in taps, f"without other ports: the bridge took the address {address()} of a TAP")
    check(address() == before, f"without other ports: the bridge's address was {before}, and is {address()}")
    check(daemon.terminate() == 0, "the daemon ends with exit status 0")
    check(address() == before, f"after the daemon: the bridge's address was {before}, and is {address()}")


@test
def bridge_keeps_the_address_of_another_port(lab):
    # The highest address that is legal, but for those that TAPs get.
    uplink = "fa:ff:ff:ff:ff:ff"
    output("ip", "tuntap", "add", "dev", "uplink", "mode", "tap")
    try:
        output("ip", "link", "set", "uplink", "address", uplink, "master", BRIDGE, "up")
        lab.start_daemon()
        check(lab.link(None, BRIDGE)["address"] == uplink, "the bridge has the address of its other port")
    finally:
        output("ip", "link", "del", "uplink")


def adopted(lab, *options):
    """Whether a TAP that exists with these options is adopted, works, and stays."""
    output("ip", "tuntap", "add", "dev", "mine", "mode", "tap", *options)
    try:
        index = lab.link(None, "mine")["ifindex"]
        lab.ip(None, "address", "add", f"{ON_BRIDGE}/24", "dev", BRIDGE)
        daemon = start_single(lab, "--tap", "mine")
        lab.start_shim("g1")
        until(lambda: ping("g1", ON_BRIDGE, 0.5) is not None, 5, "the guest reaches the bridge")
        check(daemon.terminate() == 0, "the daemon ends with exit status 0")
        link = lab.link(None, "mine")
        check(link is not None and link["ifindex"] == index, "the adopted TAP stays")
        check(link["linkinfo"]["info_data"]["persist"], "the adopted TAP stays persistent")
        multi_queue = link["linkinfo"]["info_data"]["multi_queue"]
        check(multi_queue == ("multi_queue" in options), "the adopted TAP has as many queues as before")
        # And the next daemon adopts it again.
        start_single(lab, "--tap", "mine")
        until(lambda: ping("g1", ON_BRIDGE, 0.5) is not None, 5, "the guest reaches the bridge again")
    finally:
        output("ip", "link", "del", "mine")


@test
def existing_tap_is_adopted_and_stays(lab):
    adopted(lab)


@test
def existing_tap_with_several_queues_is_adopted_and_stays(lab):
    adopted(lab, "multi_queue")


@test
def second_guest_on_one_socket_is_refused(lab):
    lab.start_all()
    second = lab.start("guest-shim-second", lab.binary("guest-shim"), "run", "--connect", lab.socket_path("g1"),
                       "--netns", "g2", "--ifname", "venet1")
    until(lambda: "another guest is connected" in second.text(), 5, "the second guest is refused with a reason")
    check(second.process.poll() is None, "it keeps trying, since the first one may end")
    check(ping("g1", ADDRESS["g2"], 1) is not None, "the first guest is not disturbed")
