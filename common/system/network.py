"""The network interface over which the processes of several machines exchange data."""

import os
import socket
from contextlib import suppress

from common.system.launch_variables import several_machines


def set_gloo_interface() -> None:
    """Set GLOO_SOCKET_IFNAME to the network interface that leads to the first machine.

    Otherwise gloo might choose the loopback, over which other machines can't be reached. A job on
    one machine needs no interface. A value that the user has set stays.
    """
    import psutil

    if not several_machines() or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", ""), 1))  # chooses a route, sends nothing
        own_address = probe.getsockname()[0]
        if own_address.startswith("127."):  # this is the first machine, reached by its own name
            return
        for name, addresses in psutil.net_if_addrs().items():
            if any(address.address == own_address for address in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = name
