"""Two network namespaces of this machine, joined by a link of a chosen rate and delay. Needs root.

The kernel's netem slows a pair of veth devices. Where the kernel has no netem, a thread of this
process relays packets between two TUN devices instead. It delays each packet as netem would: until
earlier packets have passed, then for the time that its bytes take at the rate, then for the delay.
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

DEVICE = "wire"  # name of the device in each namespace
ADDRESSES = ("10.213.77.1", "10.213.77.2")
TUN_SET_INTERFACE = 0x400454CA  # request of ioctl
TUN_WITHOUT_HEADER = 0x1001  # flags: a TUN device whose packets have no header
MAX_PACKET_SIZE = 16_000  # bytes; larger packets are fewer, so that a Python thread keeps up
MAX_WAIT = 0.1  # seconds until the relay checks whether it should end


class LinkError(Exception):
    """Namespaces or devices can't be made here; the message says why."""


def command(*words: str) -> None:
    """Run a command of iproute2.

    Raises:
        LinkError: when the command is missing or fails; with its error output.
    """
    if shutil.which(words[0]) is None:
        raise LinkError(f"there is no {words[0]}: install iproute2")
    completed = subprocess.run(words, capture_output=True, encoding="utf-8")
    if completed.returncode:
        raise LinkError(f"{' '.join(words)}: {completed.stderr.strip()}")


class Relay(threading.Thread):
    """Relays packets between two devices, with a rate and a delay in each direction."""

    def __init__(self, devices: tuple[int, int]) -> None:
        super().__init__(daemon=True)
        self.devices = devices  # file descriptors
        self.seconds_per_byte = 0.0
        self.delay = 0.0  # seconds
        self.is_over = threading.Event()
        # By direction: packets with the times at which they are due, and when the wire is free.
        self.queues: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
        self.free_at = [0.0, 0.0]

    def run(self) -> None:
        """Relay packets until `is_over` is set."""
        while not self.is_over.is_set():
            select.select(self.devices, [], [], self.seconds_until_due())
            now = time.perf_counter()
            for direction in range(len(self.devices)):
                self.receive(direction, now)
                self.deliver(direction, now)

    def seconds_until_due(self) -> float:
        """Return the time until the next packet is due, between 0 and `MAX_WAIT`."""
        now = time.perf_counter()
        waits = [queue[0][0] - now for queue in self.queues if queue]
        return min(max(min(waits, default=MAX_WAIT), 0), MAX_WAIT)

    def receive(self, direction: int, now: float) -> None:
        """Queue all packets that a device has sent."""
        for packet in iter(partial(self.read, self.devices[direction]), b""):
            began = max(now, self.free_at[direction])
            self.free_at[direction] = began + len(packet) * self.seconds_per_byte
            self.queues[direction].append((self.free_at[direction] + self.delay, packet))

    def deliver(self, direction: int, now: float) -> None:
        """Write all packets that are due to the other device."""
        queue = self.queues[direction]
        while queue and queue[0][0] <= now:
            _, packet = queue.popleft()
            with contextlib.suppress(OSError):  # a device that is down loses it, as a wire would
                os.write(self.devices[1 - direction], packet)

    @staticmethod
    def read(device: int) -> bytes:
        """Return the next packet, or nothing if there is none."""
        try:
            return os.read(device, MAX_PACKET_SIZE + 100)
        except BlockingIOError:
            return b""


class Link:
    """Two joined namespaces. Each has the device `DEVICE` with one of the `ADDRESSES`.

    Raises:
        LinkError: on entry, when this process may not make namespaces or devices.
    """

    def __init__(self) -> None:
        self.namespaces = tuple(f"scaling-{os.getpid()}-{end}" for end in "ab")
        self.relay: Relay | None = None

    def __enter__(self) -> Link:
        """Make the namespaces and join them."""
        try:
            for name in self.namespaces:
                command("ip", "netns", "add", name)
            self.join()
            for name, address in zip(self.namespaces, ADDRESSES, strict=True):
                command("ip", "-n", name, "address", "add", f"{address}/30", "dev", DEVICE)
                command("ip", "-n", name, "link", "set", DEVICE, "up")
                command("ip", "-n", name, "link", "set", "lo", "up")
        except (LinkError, OSError) as problem:
            self.close()
            raise LinkError(str(problem)) from None
        return self

    def join(self) -> None:
        """Join the namespaces by veth devices, or by the relay where the kernel has no netem."""
        try:
            self.join_by_veth()
            self.slow(math.inf, 0.0)
        except LinkError as problem:
            if "qdisc" not in str(problem):
                raise
            command("ip", "-n", self.namespaces[0], "link", "delete", DEVICE)
            self.join_by_relay()

    def join_by_veth(self) -> None:
        """Make a pair of veth devices, one in each namespace."""
        first, second = self.namespaces
        first_end = ("name", DEVICE, "netns", first)
        second_end = ("name", DEVICE, "netns", second)
        command("ip", "link", "add", *first_end, "type", "veth", "peer", *second_end)

    def join_by_relay(self) -> None:
        """Make a TUN device in each namespace, and start the relay between them.

        A device stays open in this process after it has moved to a namespace.
        """
        devices = []
        for number, namespace in enumerate(self.namespaces):
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            devices.append(device)
            temporary_name = f"scaling{number}"
            request = struct.pack("16sH22x", temporary_name.encode(), TUN_WITHOUT_HEADER)
            fcntl.ioctl(device, TUN_SET_INTERFACE, request)
            size = ("mtu", str(MAX_PACKET_SIZE))
            place = ("netns", namespace, "name", DEVICE)
            command("ip", "link", "set", temporary_name, *size, *place)
        self.relay = Relay((devices[0], devices[1]))
        self.relay.start()

    @property
    def mechanism(self) -> str:
        """What slows the link, for people."""
        return "a relay in this process" if self.relay else "tc netem"

    def slow(self, megabits: float, milliseconds: float) -> None:
        """Set the rate and the delay of each direction from now on.

        Args:
            megabits: Mbit/s; infinite for no limit.
            milliseconds: delay of a packet.
        """
        if self.relay:
            self.relay.seconds_per_byte = 8 / (megabits * 1e6)
            self.relay.delay = milliseconds / 1e3
            return
        # The queue's limit is what fits into a delay of 100 ms at 10 Gbit/s.
        rule = ["netem", "limit", "100000", "delay", f"{milliseconds}ms"]
        if math.isfinite(megabits):
            rule += ["rate", f"{megabits}mbit"]
        for name in self.namespaces:
            command("tc", "-n", name, "qdisc", "replace", "dev", DEVICE, "root", *rule)

    def close(self) -> None:
        """Remove the namespaces and with them their devices."""
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
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove the link."""
        self.close()
