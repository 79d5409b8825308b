"""The place where a test runs: a bridge, two guests' network namespaces, and the programs under test."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time

MODULES = ("traffic", "frames", "services", "load", "restarts", "resources", "daemon", "shim", "handshake", "comparison",
           "readme")
BRIDGE = "br0"
ADDRESS = {"g1": "10.0.0.1", "g2": "10.0.0.2"}
GUESTS = tuple(ADDRESS)
_tests = {}


class Skipped(Exception):
    """The machine lacks what the test needs."""


def test(function):
    """Makes a function that takes a lab a test of that name."""
    _tests[function.__name__] = function
    return function


def load_tests():
    """All tests by name, in the order in which they are to run."""
    for module in MODULES:
        importlib.import_module(module)
    return _tests


def check(condition, message):
    """Fails the test if the condition does not hold. Unlike `assert`, also with python -O."""
    if not condition:
        raise AssertionError(message)


def until(condition, seconds, what, pause=0.01):
    """Waits for a true value and returns it; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        check(time.monotonic() < deadline, f"not within {seconds} s: {what}")
        time.sleep(pause)


def note(text):
    """A measured value, for the reader of the output."""
    print(f"  {text}", flush=True)


def output(*command, timeout=20):
    """What a command that must succeed says."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    check(done.returncode == 0, f"{' '.join(command)}: exit status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


class Program:
    """A started program; its output goes to a file."""

    def __init__(self, name, command, log):
        self.name, self.log = name, log
        with open(log, "ab") as file:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self.pid = self.process.pid

    def text(self):
        """What it has said so far."""
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def wait(self, seconds):
        """Its exit status; fails if it does not end."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end within {seconds} s") from None

    def terminate(self, seconds=5):
        """Asks it to end, and returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(seconds)

    def kill(self):
        """Ends it at once."""
        self.process.kill()
        self.process.wait(5)


class Lab:
    """Use as a context; nothing is left when it ends, and a test that leaves something fails."""

    def __init__(self, options):
        self.options, self.long = options, options.long
        self.programs = []

    def __enter__(self):
        self.directory = tempfile.mkdtemp(prefix="lab-", dir="/run")
        # The data process is another user; it needs nothing in here, but the sockets' directory must be passable.
        os.chmod(self.directory, 0o755)
        output("ip", "link", "add", BRIDGE, "type", "bridge")
        output("ip", "link", "set", BRIDGE, "up")
        for guest in GUESTS:
            output("ip", "netns", "add", guest)
            self.ip(guest, "link", "set", "lo", "up")
        return self

    def __exit__(self, kind, error, trace):
        for program in reversed(self.programs):
            if program.process.poll() is None:
                program.kill()
        for guest in GUESTS:
            subprocess.run(["ip", "netns", "del", guest], capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)
        try:
            if error is None:
                until(lambda: not self.leftovers(), 5, "nothing is left over")
        except AssertionError:
            raise AssertionError(f"the test left: {', '.join(self.leftovers())}") from None
        finally:
            # What one test leaves must not fail the next one.
            for link in self.links():
                subprocess.run(["ip", "link", "del", link], capture_output=True)
            shutil.rmtree(self.directory, ignore_errors=True)

    def links(self):
        """The host's interfaces but for loopback."""
        return [link["ifname"] for link in json.loads(output("ip", "-j", "link")) if link["ifname"] != "lo"]

    def leftovers(self):
        """Interfaces and processes that should not be there at the end."""
        return self.links() + [f"{name} ({pid})" for pid, name in self.processes()]

    def processes(self):
        """The programs under test that run in this process namespace, with their names."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                    name, state = file.read().split("(", 1)[1].rsplit(") ", 1)
            except OSError:
                continue
            if name in ("host-bridge", "guest-shim") and state[0] not in "ZX":
                found.append((int(pid), name))
        return found

    def logs(self):
        """What the programs said, for a test that failed."""
        return "".join(f"---- {program.name}\n{program.text()[-4000:]}" for program in self.programs)

    def path(self, name):
        """A path in the lab's directory."""
        return os.path.join(self.directory, name)

    def binary(self, name):
        """The path of a program under test."""
        return os.path.join(self.options.binaries, name)

    def start(self, name, *command):
        """Starts a program; it is killed at the latest when the lab ends."""
        log = self.path(f"{len(self.programs)}-{name}.log")
        self.programs.append(Program(name, command, log))
        return self.programs[-1]

    def forget(self, *programs):
        """No longer of interest: ended, and their output with them. For tests that start many."""
        for program in programs:
            self.programs.remove(program)
            os.remove(program.log)

    def ip(self, guest, *command):
        """Runs `ip` in a guest's namespace; in the host's if `guest` is None."""
        return output("ip", *(("-n", guest) if guest else ()), *command)

    def link(self, guest, name):
        """What `ip` says about an interface; None if there is none of that name."""
        command = ["ip", *(("-n", guest) if guest else ()), "-j", "-d", "address", "show", "dev", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return json.loads(done.stdout)[0] if done.returncode == 0 else None

    def carrier(self, guest, name="venet0"):
        """Whether an interface has a carrier."""
        link = self.link(guest, name)
        return link is not None and "LOWER_UP" in link["flags"]

    def socket_path(self, guest):
        """Where a guest connects."""
        return self.path(f"{guest}.sock")

    def control(self):
        """The daemon's control socket."""
        return self.path("control.sock")

    def start_daemon(self, device="", guest="", wait=True):
        """One daemon for both guests. `device` and `guest` are more lines for each [[guest.device]] and [[guest]]."""
        lines = [f'control = "{self.control()}"']
        for name in GUESTS:
            lines += ["[[guest]]", f'name = "{name}"', f'socket = "{self.socket_path(name)}"', guest]
            lines += ["[[guest.device]]", f'bridge = "{BRIDGE}"', device]
        path = self.path("host-bridge.toml")
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        daemon = self.start("host-bridge", self.binary("host-bridge"), "run", "--config", path)
        if wait:
            self.wait_for_daemon(daemon)
        return daemon

    def wait_for_daemon(self, daemon):
        """Until it accepts guests."""
        def ready():
            check(daemon.process.poll() is None, f"host-bridge ended: {daemon.text().strip()}")
            return daemon.text().count("waiting at") >= len(GUESTS)
        until(ready, 5, "host-bridge waits for guests")

    def start_shim(self, guest, *more, wait=True, address=True):
        """A guest's shim, with its status socket."""
        command = [self.binary("guest-shim"), "run", "--connect", self.socket_path(guest), "--netns", guest]
        command += ["--status", self.path(f"{guest}.status")]
        command += ["--address", f"{ADDRESS[guest]}/24"] if address else ["--up"]
        shim = self.start(f"guest-shim-{guest}", *command, *more)
        if wait:
            until(lambda: self.carrier(guest), 10, f"the link of {guest} is up")
        return shim

    def start_all(self, offloads=("all", "all"), device="", settle=True):
        """The daemon and both guests. Returns the three programs."""
        daemon = self.start_daemon(device)
        shims = [self.start_shim(guest, "--offloads", which) for guest, which in zip(GUESTS, offloads)]
        if settle:
            self.wait_for_traffic()
        return daemon, *shims

    def wait_for_traffic(self, seconds=5):
        """Until the guests reach each other."""
        from network import ping
        until(lambda: ping("g1", ADDRESS["g2"], 0.5) is not None, seconds, "the guests reach each other")

    def status(self):
        """What `host-bridge status --json` says."""
        return json.loads(output(self.binary("host-bridge"), "status", "--json", "--control", self.control()))

    def device(self, guest):
        """The one device of a guest, as the daemon shows it."""
        guests = {entry["name"]: entry for entry in self.status()["guests"]}
        return guests[guest]["devices"][0]

    def counters(self, guest):
        """What the daemon counts for a guest: `from_ring` is what the guest sent, `to_ring` what it is to receive."""
        return self.device(guest)["counters"]

    def shim_status(self, guest):
        """What `guest-shim status --json` says. Asking wakes the shim's pump once."""
        path = self.path(f"{guest}.status")
        until(lambda: os.path.exists(path), 5, f"the shim of {guest} listens at its status socket")
        return json.loads(output(self.binary("guest-shim"), "status", "--json", "--status", path))
