"""Two network namespaces of this machine, and between them a link as slow as it is asked to be.

The kernel's netem slows a pair of veth devices; where the kernel has none, the packets of two TUN
devices pass through a thread of this process, which keeps each for as long as netem would: until
those before it are through, as long as its bytes take at the rate, and the delay. Needs root.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from functools import partial
from types import TracebackType

DEVICE = "wire"
ADDRESSES = ("10.213.77.1", "10.213.77.2")
TUN_SET_INTERFACE, TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
LARGEST_PACKET = 16_000  # bytes: few enough packets for a thread of Python
LONGEST_WAIT = 0.1  # seconds until the thread looks whether it is to end


class LinkError(Exception):
    """Namespaces or devices can't be made here, and why."""


def command(*words: str) -> None:
    """Run a command of iproute2.

    Raises:
        LinkError: with what it said.
    """
    if shutil.which(words[0]) is None:
        raise LinkError(f"there is no {words[0]}: install iproute2")
    done = subprocess.run(words, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise LinkError(f"{' '.join(words)}: {done.stderr.strip()}")


class Relay(threading.Thread):
    """Carries packets between two devices, each way at the rate and with the delay it is set to."""

    def __init__(self, devices: tuple[int, int]) -> None:
        super().__init__(daemon=True)
        self.devices = devices
        self.seconds_per_byte = self.delay = 0.0
        self.is_over = threading.Event()

    def run(self) -> None:
        waiting: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
        free_at = [0.0, 0.0]
        while not self.is_over.is_set():
            now = time.perf_counter()
            due = min((queue[0][0] - now for queue in waiting if queue), default=LONGEST_WAIT)
            select.select(self.devices, [], [], min(max(due, 0), LONGEST_WAIT))
            now = time.perf_counter()
            for way, device in enumerate(self.devices):
                for packet in iter(partial(self.read, device), b""):
                    began = max(now, free_at[way])
                    free_at[way] = began + len(packet) * self.seconds_per_byte
                    waiting[way].append((free_at[way] + self.delay, packet))
                while waiting[way] and waiting[way][0][0] <= now:
                    with contextlib.suppress(OSError):  # one that is down loses it, as wires do
                        os.write(self.devices[1 - way], waiting[way].popleft()[1])

    @staticmethod
    def read(device: int) -> bytes:
        """Return the next packet, or nothing where there is none."""
        try:
            return os.read(device, LARGEST_PACKET + 100)
        except BlockingIOError:
            return b""


class Link:
    """Two namespaces, joined; each has the `DEVICE`, with one of the `ADDRESSES`.

    Raises:
        LinkError: on entry, where that isn't allowed.
    """

    def __init__(self) -> None:
        self.namespaces = tuple(f"scaling-{os.getpid()}-{end}" for end in "ab")
        self.relay: Relay | None = None

    def __enter__(self) -> Link:
        try:
            for name in self.namespaces:
                command("ip", "netns", "add", name)
            try:
                self.join_by_veth()
                self.slow(math.inf, 0.0)
            except LinkError as problem:
                if "qdisc" not in str(problem):
                    raise
                command("ip", "-n", self.namespaces[0], "link", "delete", DEVICE)
                self.join_by_relay()
            for name, address in zip(self.namespaces, ADDRESSES, strict=True):
                command("ip", "-n", name, "address", "add", f"{address}/30", "dev", DEVICE)
                command("ip", "-n", name, "link", "set", DEVICE, "up")
                command("ip", "-n", name, "link", "set", "lo", "up")
        except (LinkError, OSError) as problem:
            self.close()
            raise LinkError(str(problem)) from None
        return self

    def join_by_veth(self) -> None:
        one, other = self.namespaces
        ends = ("name", DEVICE, "netns", one), ("name", DEVICE, "netns", other)
        command("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])

    def join_by_relay(self) -> None:
        """Make a TUN device in each namespace: it stays open here, wherever it is moved to."""
        opened = []
        for number, name in enumerate(self.namespaces):
            device, here = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), f"scaling{number}"
            opened.append(device)
            asked = struct.pack("16sH22x", here.encode(), TUN_WITHOUT_HEADER)
            fcntl.ioctl(device, TUN_SET_INTERFACE, asked)
            size = str(LARGEST_PACKET)
            command("ip", "link", "set", here, "mtu", size, "netns", name, "name", DEVICE)
        self.relay = Relay((opened[0], opened[1]))
        self.relay.start()

    @property
    def kind(self) -> str:
        """What slows the link."""
        return "a relay in this process" if self.relay else "tc netem"

    def slow(self, megabits: float, milliseconds: float) -> None:
        """Set the rate, infinite for none, and the delay of each way, from now on."""
        if self.relay:
            self.relay.seconds_per_byte = 8 / (megabits * 1e6)
            self.relay.delay = milliseconds / 1e3
            return
        # As many packets as fit into a delay of 100 ms at 10 Gbit/s.
        rule = ["netem", "limit", "100000", "delay", f"{milliseconds}ms"]
        rule += ["rate", f"{megabits}mbit"] if math.isfinite(megabits) else []
        for name in self.namespaces:
            command("tc", "-n", name, "qdisc", "replace", "dev", DEVICE, "root", *rule)

    def close(self) -> None:
        """Remove the namespaces, and with them their devices."""
        if self.relay:
            self.relay.is_over.set()
            self.relay.join()
            for device in self.relay.devices:
                os.close(device)
            self.relay = None
        for name in self.namespaces:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
