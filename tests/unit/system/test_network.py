"""The network interface of a process."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import psutil
import pytest

from common.system.network import set_gloo_interface


@pytest.mark.parametrize(("ranks_here", "named"), [("1", True), ("2", False)])
def test_gloo_uses_the_interface_to_the_other_machine(
    ranks_here: str, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named if there are several machines, except the loopback or if the user named one."""
    address = SimpleNamespace(address="10.9.8.7")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [], "ib0": [address]})
    socket = SimpleNamespace(connect=lambda to: None, getsockname=lambda: ("10.9.8.7", 5))
    monkeypatch.setattr("socket.socket", lambda *kind: contextlib.nullcontext(socket))
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": ranks_here})
    set_gloo_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == ("ib0" if named else None)
    os.environ["GLOO_SOCKET_IFNAME"] = "mine"
    set_gloo_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    del os.environ["GLOO_SOCKET_IFNAME"]
    address.address = "127.0.0.1"
    socket.getsockname = lambda: ("127.0.0.1", 5)
    set_gloo_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
