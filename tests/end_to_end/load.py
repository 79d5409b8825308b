"""UDP at full rate: everything works again at once when it ends, and nothing stays queued."""

import json
import os
import sys
import time

from lab import ADDRESS, check, note, test
from network import ping, udp

# The payload of a datagram that fills a frame with the usual MTU.
PAYLOAD = 1472
PORT = 5005


def start_flood(lab, sender, receiver, seconds, rate=0):
    """Starts a process that sends to the receiver's PORT, as fast as it can or so many datagrams a second."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "flood.py")
    more = (sender, ADDRESS[receiver], str(PORT), str(PAYLOAD), str(seconds), str(rate))
    return lab.start(f"flood-{sender}", sys.executable, "-B", program, *more)


def flood(lab, directions):
    seconds = 60 if lab.long else 20
    lab.start_all()
    sinks = {receiver: udp(receiver, PORT) for _, receiver in directions}
    before = {guest: lab.counters(guest)["to_ring"]["frames"] for guest in ADDRESS}
    floods = [start_flood(lab, *direction, seconds) for direction in directions]
    for program in floods:
        check(program.wait(seconds + 15) == 0, f"{program.name} failed: {program.text()}")
    ended = time.monotonic()
    for sender, receiver in directions:
        answered = ping(sender, ADDRESS[receiver], 1)
        check(answered is not None, f"no answer within 1 s after the flood, {sender} to {receiver}")
        note(f"ping after the flood, {sender} to {receiver}: {answered * 1e3:.2f} ms, "
             f"{(time.monotonic() - ended) * 1e3:.0f} ms after the last sender ended")
    after = {guest: lab.counters(guest)["to_ring"]["frames"] for guest in ADDRESS}
    for program, (sender, receiver) in zip(floods, directions):
        seen = json.loads(program.text())
        delivered = after[receiver] - before[receiver]
        note(f"{sender} to {receiver}: {seen['sent'] / seconds:.0f} datagrams/s sent, "
             f"{delivered / seconds:.0f} frames/s delivered; queue last seen not empty {seen['not_empty_ms']:.3f} ms after the last one, "
             f"empty at {seen['empty_ms'] or 100:.3f} ms")
        check(delivered > 0 and received_any(sinks[receiver]), f"{receiver} received nothing")
        check(seen["empty_ms"] is not None, f"{sender}: the socket's queue is not empty after 100 ms")
        check(seen["not_empty_ms"] <= 10,
              f"{sender}: the socket's queue was not empty {seen['not_empty_ms']:.1f} ms after the last datagram")
    for opened in sinks.values():
        opened.close()


def received_any(opened):
    opened.settimeout(0.1)
    try:
        return len(opened.recv(2048)) == PAYLOAD
    except OSError:
        return False


@test
def udp_flood_there(lab):
    flood(lab, [("g1", "g2")])


@test
def udp_flood_back(lab):
    flood(lab, [("g2", "g1")])


@test
def udp_flood_both_ways(lab):
    flood(lab, [("g1", "g2"), ("g2", "g1")])
