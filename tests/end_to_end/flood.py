"""Sends datagrams in a process of its own:  flood.py GUEST ADDRESS PORT SIZE SECONDS RATE

As fast as it can if RATE is 0, otherwise about so many a second.

Prints how many, and when the socket's queue was last seen not empty after the last of them.
"""

import fcntl
import json
import struct
import sys
import time

from network import udp

# SIOCOUTQ, see socket(7) and udp(7): bytes that were sent and that the kernel still has.
SIOCOUTQ = 0x5411
# Datagrams between two looks at the clock.
BURST = 32


def queued(opened):
    return struct.unpack("i", fcntl.ioctl(opened, SIOCOUTQ, bytes(4)))[0]


def flood(guest, address, port, size, seconds, rate):
    opened = udp(guest, timeout=None)
    opened.connect((address, port))
    payload, sent, refused = bytes(size), 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if rate:
            # What was missed while this process was not scheduled is not made up for, since that would be a flood.
            time.sleep(BURST / rate)
        for _ in range(BURST):
            try:
                opened.send(payload)
                sent += 1
            except OSError:
                # Nobody listens at the other end just now, or the interface has no room.
                refused += 1
    last = time.monotonic()
    # What is looked for is a queue that still is not empty. When exactly it became empty, a process that was not
    # scheduled meanwhile cannot tell.
    not_empty, empty = 0.0, None
    while time.monotonic() < last + 0.1:
        if queued(opened) > 0:
            not_empty, empty = time.monotonic() - last, None
        elif empty is None:
            empty = time.monotonic() - last
    return {"sent": sent, "refused": refused, "not_empty_ms": not_empty * 1e3,
            "empty_ms": None if empty is None else empty * 1e3}


if __name__ == "__main__":
    where, to, *numbers = sys.argv[1:]
    print(json.dumps(flood(where, to, *map(int, numbers))))
