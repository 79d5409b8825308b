"""vbus-ab: what it reports, as whom it runs, and what it refuses."""

import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time

from lab import check, note, output, test

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Of no user that exists.
ORDINARY_USER = 54321
RATIOS_OF = {("venet", "forwarder"), ("venet", "veth"), ("forwarder", "veth")}
LATENCY = {"transactions_per_s", "rtt_p50_us", "rtt_p99_us", "cpu_us_per_transaction"}
THROUGHPUT = {"gbps", "cpu_s_per_gb"}
DATA_PATH = {"cpu_ns_per_frame"}
NOTIFIED = {"notifications_per_frame"}
WORKLOADS = {"tcp_rr": LATENCY, "tcp_stream": THROUGHPUT, "tcp_maerts": THROUGHPUT, "udp_stream": THROUGHPUT}
ARMS = {"venet": DATA_PATH | NOTIFIED, "forwarder": DATA_PATH, "veth": set()}


def compare(lab, *arguments, timeout=120):
    """Runs vbus-ab as root."""
    command = [lab.binary("vbus-ab"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def results(lab, *arguments):
    """What it found, from its JSON."""
    done = compare(lab, "--json", "-", *arguments)
    check(done.returncode == 0, f"exit status {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


@test
def report_has_what_its_schema_says(lab):
    before = sorted(lab.links()), os.listdir("/run")
    file = lab.path("result.json")
    done = compare(lab, "--time", "8", "--json", file)
    check(done.returncode == 0, f"exit status {done.returncode}: {done.stderr}")
    for word in ("tcp_rr", "venet : forwarder", "notif./frame", "release build", "daemon: data process", "shim g2"):
        check(word in done.stdout, f"the table shows {word!r}:\n{done.stdout}")
    with open(file, encoding="utf-8") as opened:
        found = json.load(opened)
    check(list(found) == ["schema", "env", "arms", "ratios"] and found["schema"] == 1, f"keys: {list(found)}")
    check({(entry["arm"], entry["workload"]) for entry in found["arms"]} == {(arm, load) for arm in ARMS for load in WORKLOADS},
          "every arm under every workload, by the names given")
    for entry in found["arms"]:
        wanted = WORKLOADS[entry["workload"]] | ARMS[entry["arm"]]
        foreign = (LATENCY | THROUGHPUT | DATA_PATH | NOTIFIED) - wanted
        has = set(entry["metrics"])
        check(wanted <= has and not has & foreign, f"{entry['arm']} under {entry['workload']}: {sorted(has)}")
        check(all(value > 0 for name, value in entry["metrics"].items() if name in wanted), f"figures: {entry}")
        check(entry["params"]["sessions"] == 1 and entry["params"]["size"] > 0, f"params: {entry['params']}")
    pairs = {(ratio["a"], ratio["b"]) for ratio in found["ratios"]}
    check(pairs == RATIOS_OF, f"pairs: {pairs}")
    for ratio in found["ratios"]:
        low, high = ratio["ci95"]
        check(low <= ratio["ratio"] <= high and ratio["pairs"] >= 1, f"the interval covers the ratio: {ratio}")
    check(all("lost" not in ratio["metric"] for ratio in found["ratios"]), "no ratio of shares near nothing")
    check((sorted(lab.links()), os.listdir("/run")) == before, "nothing on the host was touched")


@test
def processes_are_those_that_run(lab):
    """Five roles, each a process of its own and none of them the generator."""
    found = results(lab, "--time", "2", "--workload", "tcp_rr")
    pids = [process["pid"] for process in found["env"]["processes"]]
    check(len(pids) == 6 and len(set(pids)) == 6, f"processes: {found['env']['processes']}")
    roles = " ".join(process["role"] for process in found["env"]["processes"])
    for role in ("supervisor", "data process", "shim g1", "shim g2", "forwarder", "generator"):
        check(role in roles, f"{role} in {roles}")


@test
def arms_and_workloads_take_keys(lab):
    """Sizes, sessions and offloads do what they say: without offloads no frame is longer than the MTU."""
    arms = ["venet:offloads=none,cpus=0", "venet"]
    loads = ["tcp_stream:size=1000,sessions=3", "udp_stream:size=64", "tcp_rr:sessions=4"]
    options = [word for arm in arms for word in ("--arm", arm)] + [word for load in loads for word in ("--workload", load)]
    found = results(lab, "--time", "4", *options)
    entries = {(entry["arm"], entry["workload"]): entry for entry in found["arms"]}
    check(set(entries) == {(arm, load) for arm in arms for load in loads}, f"entries: {set(entries)}")
    check(entries[arms[0], loads[0]]["params"] == {"size": 1000, "sessions": 3, "offloads": "none", "cpus": "0"},
          f"params: {entries[arms[0], loads[0]]['params']}")

    def bytes_per_frame(arm, load):
        metrics = entries[arm, load]["metrics"]
        return metrics["gbps"] * 1e9 / 8 / metrics["frames_per_s"]
    plain, offloaded = bytes_per_frame(arms[0], loads[0]), bytes_per_frame(arms[1], loads[0])
    note(f"payload per TCP frame: {plain:.0f} bytes without offloads, {offloaded:.0f} with")
    check(plain <= 1460 * 1.1, f"{plain:.0f} bytes per frame without offloads")
    check(offloaded > 1460 * 2, f"{offloaded:.0f} bytes per frame with offloads")
    check(bytes_per_frame(arms[1], loads[1]) <= 64 * 1.05, "a datagram per frame")


@test
def process_that_dies_meanwhile_ends_the_run(lab):
    """Not silently: a data process that was replaced would cost nothing in the figures."""
    file = lab.path("result.json")
    command = [lab.binary("vbus-ab"), "--time", "20", "--arm", "venet", "--workload", "tcp_rr", "--json", file]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(3)
    victims = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", encoding="utf-8") as opened:
                words = opened.read().split("\0")
        except OSError:
            continue
        if "data-process" in words:
            victims.append(int(pid))
    check(len(victims) == 1, f"one data process: {victims}")
    os.kill(victims[0], signal.SIGKILL)
    said, complaint = running.communicate(timeout=30)
    check(running.returncode == 1, f"exit status {running.returncode}: {said}{complaint}")
    check("cut short" in complaint and "tcp_rr over venet" in complaint, f"what it says: {complaint}")
    with open(file, encoding="utf-8") as opened:
        found = json.load(opened)
    check(found["env"]["rounds"] >= 1 and "tcp_rr" in said, "the rounds before are shown")


@test
def wrong_arguments_are_named(lab):
    for arguments, word in (
        (["--arm", "vnet"], '"vnet"'),
        (["--arm", "venet:cpu=0"], '"cpu"'),
        (["--workload", "tcp_rr:size=0"], "size must be"),
        (["--time", "0"], "--time"),
        (["--arm", "veth", "--arm", "veth"], "given twice"),
        (["--json", "/nonexistent/file"], "/nonexistent/file"),
    ):
        done = compare(lab, *arguments)
        check(done.returncode in (1, 2) and word in done.stderr, f"{arguments}: {done.returncode}: {done.stderr}")
        check(not done.stdout, f"{arguments}: {done.stdout}")


@test
def arm_can_be_compared_with_itself(lab):
    found = results(lab, "--time", "2", "--arm", "venet", "--arm", "venet:", "--workload", "tcp_rr")
    check({(ratio["a"], ratio["b"]) for ratio in found["ratios"]} == {("venet", "venet:")}, "one pair")


@test
def programs_print_their_manual_pages_and_completions(lab):
    for program in ("host-bridge", "guest-shim", "vbus-ab"):
        page = output(lab.binary(program), "man")
        check(page.startswith(".") and program in page.replace("\\-", "-"), f"{program}: a manual page")
        script = output(lab.binary(program), "completions", "bash")
        check(any(line.startswith("complete ") and line.endswith(f" {program}")
                  for line in map(str.strip, script.splitlines())), f"{program}: completions")
        # And bash takes it.
        output("bash", "-n", "-c", script)
        check("Examples:" in output(lab.binary(program), "--help"), f"{program}: help with examples")


@test
def user_namespaces_that_are_off_are_explained(lab):
    inside = f"echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --inh-caps=-all --bounding-set=-all {lab.binary('vbus-ab')}"
    done = subprocess.run(["unshare", "--user", "--map-root-user", "sh", "-c", inside],
                          capture_output=True, text=True, timeout=30)
    check(done.returncode == 1, f"exit status {done.returncode}: {done.stdout}{done.stderr}")
    for word in ("user namespace", "switched off", "sysctl user.max_user_namespaces", "as root"):
        check(word in done.stderr, f"{word!r} in: {done.stderr}")


# Runs as root in a mount namespace of its own: the toolchain, the sources and a copy of what is built, as far as
# possible where they always are, but so that an ordinary user may use them; and a TUN device as distributions have it.
ORDINARY = """
set -e
[ ! -d {work}/target ] || mount --bind {work}/target {repository}/target
case {home} in
/root)
    for part in .cargo .rustup; do
        mkdir -p {work}/home/$part
        [ ! -d /root/$part ] || mount --bind /root/$part {work}/home/$part
    done
    mount --rbind {work}/home /root
    ;;
esac
mount -t tmpfs -o mode=755 tmpfs /dev/net
mknod -m {mode} /dev/net/tun c 10 200
cd {repository}
exec setpriv --reuid={user} --regid={user} --clear-groups --inh-caps=-all --bounding-set=-all \\
    env -i PATH={path} HOME=/nonexistent {environment} {command}
"""


def as_ordinary_user(work, command, mode="666", environment=""):
    """Runs a command as an ordinary user whose PATH holds cargo, the compiler and the linker, and nothing else."""
    path = os.path.join(work, "bin")
    os.makedirs(path, exist_ok=True)
    for program in ("cargo", "rustc", "cc"):
        found = shutil.which(program)
        if found and not os.path.lexists(os.path.join(path, program)):
            os.symlink(found, os.path.join(path, program))
    home = os.path.expanduser("~")
    script = ORDINARY.format(work=work, repository=REPOSITORY, home=home, user=ORDINARY_USER, path=path, mode=mode,
                             environment=environment, command=command)
    return subprocess.run(["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True, timeout=900)


@test
def main_job_as_an_ordinary_user_with_an_empty_path(lab):
    """The README's first command as it stands there, by somebody who can do nothing else."""
    built = os.path.join(REPOSITORY, "target", "release")
    with tempfile.TemporaryDirectory(prefix="ordinary-", dir="/var/tmp") as work:
        os.chmod(work, 0o755)
        os.makedirs(os.path.join(work, "target"))
        # With its times, so that cargo finds nothing to build.
        output("cp", "-a", built, os.path.join(work, "target"), timeout=300)
        output("chown", "-R", str(ORDINARY_USER), os.path.join(work, "target"), timeout=300)
        home = os.path.expanduser("~")
        cargo = os.environ.get("CARGO_HOME", os.path.join(home, ".cargo"))
        rustup = os.environ.get("RUSTUP_HOME", os.path.join(home, ".rustup"))
        environment = f"CARGO_HOME={cargo} RUSTUP_HOME={rustup} CARGO_NET_OFFLINE=true"
        done = as_ordinary_user(work, "cargo build --release --bin vbus-ab", environment=environment)
        check(done.returncode == 0, f"build: exit status {done.returncode}: {done.stderr[-3000:]}")
        start = time.monotonic()
        done = as_ordinary_user(work, "cargo run --release --bin vbus-ab", environment=environment)
        seconds = time.monotonic() - start
    check(done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-3000:]}")
    note(f"{seconds:.0f} s as an ordinary user")
    check(seconds < 60, f"{seconds:.0f} s")
    for word in ("tcp_rr", "udp_stream", "venet : forwarder", "venet : veth"):
        check(word in done.stdout, f"the table shows {word!r}:\n{done.stdout}")
    # For the reader of the output.
    print(done.stdout, flush=True)


@test
def tun_device_that_may_not_be_opened_is_explained(lab):
    with tempfile.TemporaryDirectory(prefix="ordinary-", dir="/var/tmp") as work:
        os.chmod(work, 0o755)
        copy = os.path.join(work, "vbus-ab")
        shutil.copy(lab.binary("vbus-ab"), copy)
        os.chmod(copy, os.stat(copy).st_mode | stat.S_IXOTH | stat.S_IROTH)
        done = as_ordinary_user(work, f"{copy} --time 2", mode="600")
    check(done.returncode == 1, f"exit status {done.returncode}: {done.stdout}{done.stderr}")
    check("chmod 666 /dev/net/tun" in done.stderr, f"what to do, in: {done.stderr}")
