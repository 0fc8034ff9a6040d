"""Ports for the processes that a benchmark or a test launches."""

from __future__ import annotations

import random
import socket

# Below the ports that systems give to outgoing connections (from 32768 on Linux). One of those may
# be taken between this choice and the start of the process that listens.
PORTS = range(10_000, 30_000)


def free_port() -> int:
    """Return a port of this machine that no process listens on now."""
    chooser = random.SystemRandom()
    while True:
        port = chooser.choice(PORTS)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
