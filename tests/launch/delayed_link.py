"""A link between two network namespaces that holds every packet back: what `tc netem` does, where a
kernel lacks it.

    python delayed_link.py NAMESPACE NAMESPACE MILLISECONDS

Each end is a TUN device, eth0. Ends when it is killed, and the link with it.
"""

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

# linux/if_tun.h: TUNSETIFF, IFF_TUN, IFF_NO_PI
_SET_INTERFACE = 0x400454CA
_TUN = 0x0001
_PLAIN = 0x1000


def _open_end(namespace: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR)
    found = fcntl.ioctl(end, _SET_INTERFACE, struct.pack("16sH22x", b"fq%d", _TUN | _PLAIN))
    name = found[:16].rstrip(b"\0").decode()
    subprocess.run(["ip", "link", "set", name, "netns", namespace, "name", "eth0"], check=True)
    return end


def relay(ends: list[int], seconds: float) -> None:
    """Write what one end sends to the other one, so many seconds later."""
    # all wait equally long, so they leave in the order of coming
    held: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        for end in select.select(ends, [], [], wait)[0]:
            try:
                held.append((time.monotonic() + seconds, ends[end == ends[0]], os.read(end, 2**16)))
            except OSError:  # the link is down
                time.sleep(0.001)
        while held and held[0][0] <= time.monotonic():
            _, end, packet = held.popleft()
            with contextlib.suppress(OSError):  # the link is down: the packet is lost
                os.write(end, packet)


if __name__ == "__main__":
    opened = [_open_end(namespace) for namespace in sys.argv[1:3]]
    print("ready", flush=True)
    relay(opened, float(sys.argv[3]) / 1000)
