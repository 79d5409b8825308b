#!/usr/bin/env python3
"""End-to-end tests: the real host-bridge and guest-shim, a Linux bridge, and two guests' network namespaces.

    tests/end_to_end.py [--binaries DIR] [--long] [--list] [NAME...]

Needs root, python3 and iproute2; isc-dhcp-server for two tests. Runs in namespaces of its own, which end with it, so
that nothing on the machine is touched and nothing stays behind. The last line is that of cargo's test harness.
"""

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "end_to_end"))
sys.dont_write_bytecode = True

import lab  # noqa: E402

INSIDE = "VBUS_END_TO_END_INSIDE"
# From linux/prctl.h.
PR_SET_PDEATHSIG = 1


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    binaries = os.path.join(os.path.dirname(HERE), "target", "release")
    parser.add_argument("--binaries", default=binaries, metavar="DIR", help="where host-bridge and guest-shim are")
    parser.add_argument("--long", action="store_true", help="more repetitions, and longer ones")
    parser.add_argument("--list", action="store_true", help="only list the tests")
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only these tests")
    return parser.parse_args()


def enter_namespaces():
    """Starts this program again in network, mount and process namespaces of its own."""
    if os.geteuid() != 0:
        sys.exit("end_to_end.py needs root: it creates namespaces and interfaces (all of them private to it)")
    missing = [program for program in ("unshare", "ip") if not shutil.which(program)]
    if missing:
        sys.exit(f"missing: {', '.join(missing)}; install with: apt-get install iproute2 util-linux")
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
    # The end of unshare is the end of everything inside; and unshare ends with us, however we end.
    inside = subprocess.Popen(command, env=os.environ | {INSIDE: "1"}, preexec_fn=die_with_parent)

    def end(number, _):
        inside.kill()
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    return inside.wait()


def die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prepare():
    """Private directories in place of what belongs to the machine."""
    for target, kind in (("/run", "tmpfs"), ("/sys", "sysfs")):
        subprocess.run(["mount", "-t", kind, kind, target], check=True)
    os.makedirs("/run/netns")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def run(name, function, options):
    """Runs one test; returns `ok`, `failed` or `skipped`."""
    try:
        with lab.Lab(options) as fresh:
            try:
                function(fresh)
            except BaseException as error:
                # The logs are gone with the lab, so they are taken before.
                error.logs = fresh.logs()
                raise
    except lab.Skipped as reason:
        print(f"SKIPPED: {name}: {reason}", flush=True)
        return "skipped"
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        print("".join(traceback.format_exception(error)), file=sys.stderr)
        print(getattr(error, "logs", ""), file=sys.stderr, flush=True)
        print(f"FAILED {name}: {why}", flush=True)
        return "failed"
    print(f"ok {name}", flush=True)
    return "ok"


def main():
    options = arguments()
    tests = lab.load_tests()
    unknown = [name for name in options.names if name not in tests]
    if unknown:
        sys.exit(f"there is no test {', '.join(unknown)}; --list shows them")
    if options.list:
        print("\n".join(tests))
        return 0
    options.binaries = os.path.abspath(options.binaries)
    for binary in ("host-bridge", "guest-shim"):
        if not os.access(os.path.join(options.binaries, binary), os.X_OK):
            sys.exit(f"there is no {options.binaries}/{binary}; build it with: cargo build --release --bins")
    if INSIDE not in os.environ:
        return enter_namespaces()
    prepare()
    results = [run(name, tests[name], options) for name in tests if not options.names or name in options.names]
    failed = results.count("failed")
    # As with cargo, where a test that finds nothing to test with returns as if it had passed; its SKIPPED line tells.
    passed = len(results) - failed
    print(f"test result: {'FAILED' if failed else 'ok'}. {passed} passed; {failed} failed; 0 ignored", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
