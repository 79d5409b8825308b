"""The README's commands, typed as they are written."""

import hashlib
import os
import re
import shutil
import subprocess

from comparison import REPOSITORY, results
from lab import Skipped, check, note, test

FIRST = "## A first set-up"
CONFIGURATION = "### One daemon for all guests"
# As a person would: what a line started has a moment before the next line comes.
PAUSE = "sleep 0.7"


def section(title):
    """The commands under a heading, up to the next one; a list of lines."""
    with open(os.path.join(REPOSITORY, "README.md"), encoding="utf-8") as file:
        text = file.read().split(f"\n{title}\n", 1)[1]
    text = re.split(r"\n##", text, maxsplit=1)[0]
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.S)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    check(lines, f"the README has commands under {title}")
    return lines


def type_in(lab, lines, timeout=120):
    """Types lines into a shell with job control, as an interactive one has; a line that fails ends it."""
    typed = ["set -e", "set -m"]
    for line in lines:
        typed += [f"echo '$ {line}'", line, PAUSE]
    script, log = lab.path("typed.sh"), lab.path("typed.log")
    with open(script, "w", encoding="utf-8") as file:
        file.write("\n".join(typed) + "\n")
    with open(log, "wb") as file:
        process = subprocess.Popen(["bash", script], stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=REPOSITORY)
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        code = None
    with open(log, encoding="utf-8", errors="replace") as file:
        return code, file.read()


def without_set_up(lab):
    """The README makes bridge and guests by itself."""
    for program in ("iperf3", "ping", "nc", "cargo"):
        if not shutil.which(program):
            raise Skipped(f"{program} is missing")
    lab.ip(None, "link", "del", "br0")


@test
def first_set_up_works_and_agrees_with_the_comparison(lab):
    without_set_up(lab)
    code, said = type_in(lab, section(FIRST))
    print(said, flush=True)
    check(code == 0, f"the shell ended with {code}")
    check(re.search(r"3 received, .*0% packet loss", said), "the guests reach each other")
    rates = re.findall(r"([0-9.]+) Gbits/sec\s+receiver", said)
    check(rates, "iperf3 shows what was received")
    hashes = re.findall(r"^([0-9a-f]{64})  /var/tmp/vbus-(?:sent|received)$", said, flags=re.M)
    check(len(hashes) == 2 and hashes[0] == hashes[1], f"what arrives equals what was sent: {hashes}")
    check(hashes[0] != hashlib.sha256().hexdigest(), "something arrives")
    check("link up" in said and "connected" in said, "both sides show the link")
    found = results(lab, "--time", "6", "--arm", "venet", "--workload", "tcp_stream")
    ours, iperf = found["arms"][0]["metrics"]["gbps"], float(rates[0])
    note(f"one TCP stream: iperf3 {iperf:.2f} Gb/s, vbus-ab {ours:.2f} Gb/s")
    # Identical runs on a shared machine differ by a third, in either figure.
    check(0.5 <= ours / iperf <= 2.0, f"iperf3 {iperf} Gb/s and vbus-ab {ours} Gb/s agree")


@test
def configuration_file_of_the_documentation_works(lab):
    (command,) = section(CONFIGURATION)
    words = command.split()
    check(words[0] == "host-bridge", f"the command: {command}")
    os.makedirs("/run/vbus", exist_ok=True)
    daemon = lab.start("host-bridge", lab.binary("host-bridge"), words[1], words[2], os.path.join(REPOSITORY, words[3]))
    lab.wait_for_daemon(daemon)
    lab.control = lambda: "/run/vbus/control.sock"
    names = [guest["name"] for guest in lab.status()["guests"]]
    check(names == ["guest1", "guest2"], f"guests: {names}")
    check(daemon.terminate() == 0, "it ends cleanly")
