"""Ports for the processes that a benchmark launches."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port of this machine that no process uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
