"""What `scaling.py` measures: processes that train when they are asked, also over slow links."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.rounds import Measurement, Round, Suite
from benchmarks.scaling_study.link import ADDRESSES, DEVICE, Link, LinkError
from benchmarks.scaling_study.options import Options

REPOSITORY = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, dict[str, Any]] = {
    "mnist_mlp": {"hidden_sizes": (512, 512), "image_size": 16},
    "resnet": {"image_size": 32},
}


class Run(NamedTuple):
    """One thing to measure."""

    processes: int
    batch: int  # per process
    link: str | None = None  # of two namespaces, as in the flags
    strategy: str = "DDP"
    is_fitted: bool = True

    @property
    def name(self) -> str:
        """What it is, for people."""
        rate, _, delay = (self.link or "").partition(":")
        where = f", {rate} Mbit/s, {delay} ms" if self.link else ""
        return f"{self.processes} × {self.batch:,}, {self.strategy}{where}"


def plan(options: Options, has_link: bool) -> list[Run]:
    """Return what to measure."""
    counts, batch = options.processes, options.batch
    sizes = {(p, size) for p in counts for size in (batch, batch // p)}
    sizes |= {(1, batch // p) for p in counts}  # what computing alone takes
    runs = [Run(*size) for size in sorted(sizes)]
    if has_link:
        checked = options.check_links
        runs += [Run(2, batch, link) for link in options.fit_links]
        runs += [Run(2, batch, link, "DDP", False) for link in checked]
        runs += [Run(2, batch // 2, link, "DDP", False) for link in checked[:1]]
        runs += [Run(2, batch, link, "DDP fp16", False) for link in checked[:2]]
    return runs


class Processes:
    """Processes that train together whenever they are asked; see `scaling_rank.py`."""

    def __init__(self, count: int, link: Link | None = None) -> None:
        import torch

        on_cpu = not torch.accelerator.is_available()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        address = ADDRESSES[0] if link else "127.0.0.1"
        # Threads that spin keep from its core what carries the gradients.
        common: dict[str, Any] = {"OMP_WAIT_POLICY": "PASSIVE"} if on_cpu else {}
        if count > 1:
            common |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            common |= {"MASTER_ADDR": address, "MASTER_PORT": port}
            common |= {"GLOO_SOCKET_IFNAME": DEVICE if link else "lo"}
            common |= {"ACCELERATE_USE_CPU": "true"} if on_cpu else {}
        self.log, self.members = tempfile.TemporaryFile("w+"), []  # noqa: SIM115
        for rank in range(count):
            prefix = ["ip", "netns", "exec", link.namespaces[rank]] if link else []
            named = {**common, **({"RANK": rank, "LOCAL_RANK": rank} if count > 1 else {})}
            member = subprocess.Popen(
                [*prefix, sys.executable, "-m", "benchmarks.scaling_study.rank"],
                cwd=REPOSITORY,
                env={**os.environ, **{name: str(value) for name, value in named.items()}},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                encoding="utf-8",
            )
            self.members.append(member)
            if on_cpu:
                cores = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(member.pid, {cores[rank % len(cores)]})
        self.threads = 1 if on_cpu else None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have all train, and return the first one's answer."""
        request["settings"]["num_threads"] = self.threads
        for member in self.members:
            assert member.stdin is not None
            member.stdin.write(json.dumps(request) + "\n")
            member.stdin.flush()
        lines = [member.stdout.readline() for member in self.members if member.stdout is not None]
        if not all(lines):
            self.log.seek(0)
            raise SystemExit(f"a process ended:\n{self.log.read()[-4000:]}")
        return json.loads(lines[0])

    def close(self) -> None:
        """End the processes."""
        for member in self.members:
            member.kill()
            member.communicate()


def measure(options: Options, announce: Any) -> tuple[dict[str, Any], dict[Run, Any]]:
    """Return facts of all runs, and of each its seconds an update in every round, and shares."""
    facts: dict[str, Any] = {}
    with contextlib.ExitStack() as opened:
        link: Link | None = None
        try:
            link = opened.enter_context(Link())
            facts["link"] = link.kind
        except LinkError as problem:
            facts["link"] = f"left out: {problem}"
        announce(f"link between namespaces: {facts['link']}")
        groups: dict[Any, Processes] = {}

        def ask(run: Run, updates: int, profile: bool = False) -> dict[str, Any]:
            key = run.processes, run.link is not None
            if is_new := key not in groups:
                groups[key] = Processes(run.processes, link if run.link else None)
                opened.callback(groups[key].close)
            if run.link and link:
                link.slow(*map(float, run.link.split(":")))
            sent = "fp16" if run.strategy == "DDP fp16" else "no"
            own = {"batch_size": run.batch, "gradient_compression": sent, "dataset": "synthetic"}
            request = {
                "recipe": options.recipe,
                "updates": updates,
                "profile": profile,
                "shard": run.strategy.startswith("FSDP2"),
                "settings": {**SETTINGS[options.recipe], **own},
            }
            if is_new:  # the data are prepared, and libraries loaded
                groups[key].ask(request)
            return groups[key].ask(request)

        def contestant(run: Run) -> Any:
            def compete(asked: Round) -> Measurement:
                done = ask(run, asked.steps)
                facts["parameters"] = done["parameters"]
                return Measurement(run.processes * run.batch / done["seconds"])

            return compete

        runs = {run.name: run for run in plan(options, link is not None)}
        contestants = {name: contestant(run) for name, run in runs.items()}
        suite = Suite("scaling", "samples/s", options.updates, {}, contestants, [])
        suite.run(options.rounds, announce)
        found: dict[Run, Any] = {}
        for name, run in runs.items():
            speeds = [one.value for one in suite.measurements[name]]
            found[run] = {"samples_per_second": suite.median(name), "rounds": speeds}
            if run.processes > 1 and run.link in (None, *options.check_links[:1]):
                announce(f"profiling {name}")
                shares = ask(run, 3, profile=True)
                found[run] |= {key: shares[key] for key in ("under_way", "alone")}
    return facts, found
