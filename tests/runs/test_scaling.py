"""The scaling study: its model of an update's time, its slow link, and its script."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from benchmarks import transfer
from benchmarks.scaling_study import step_time
from benchmarks.scaling_study.link import ADDRESSES, Link, LinkError
from benchmarks.scaling_study.options import Options
from benchmarks.scaling_study.rank import shares_of_communication
from benchmarks.scaling_study.step_time import Job, StepTime, buckets_of, error, fit
from tests.launch import REPOSITORY, Runner, clean_environment, run_command

TRUTH = StepTime(0.004, 6e-5, 8e8, 0.95, 2e-4, 0.3, 5e5, 1.3)
RATES = (6e6, 25e6, 1e8)
DELAYS = (0.0, 0.004)


def jobs(sizes: tuple[int, ...], delays: tuple[float, ...], **more: Any) -> list[Job]:
    """Return jobs of one process and of two, over memory and over links."""
    shared: dict[str, Any] = {"parameters": 1_200_000, "buckets": 2, "last_share": 0.5, **more}
    local = [Job(count, size, **shared) for count in (1, 2) for size in sizes]
    links = [
        Job(2, size, rate=rate, delay=delay, **shared)
        for size in sizes
        for rate in RATES
        for delay in delays
    ]
    return local + links


def test_fit_finds_the_model_that_made_the_measurements() -> None:
    """The fit predicts unseen delays, processes, batches and strategies within 2 %."""
    # With one size of a model, the fit could not separate a hop's latency from the software's rate.
    seen = [*jobs((512, 2048), DELAYS), *jobs((64, 128), DELAYS, parameters=100_000)]
    fitted = fit([(job, TRUTH.update(job)) for job in seen])
    unseen = [*jobs((1024,), (0.001, 0.02)), *jobs((1024,), DELAYS, strategy="DDP fp16")]
    unseen += [dataclasses.replace(job, processes=8) for job in unseen if job.processes > 1]
    assert max(abs(error(fitted, job, TRUTH.update(job))) for job in unseen) < 0.02
    wrong = dataclasses.replace(TRUTH, per_sample=2 * TRUTH.per_sample)
    assert max(abs(error(wrong, job, TRUTH.update(job))) for job in unseen) > 0.5


def test_fit_holds_with_hardly_any_measurement() -> None:
    """A fit to one process alone finds the speed of this process, without any network."""
    job = Job(1, 256, 10_000)
    assert abs(error(fit([(job, 0.05)]), job, 0.05)) < 0.02


def test_ring_by_hand() -> None:
    """The modelled time of a ring agrees with a calculation by hand.

    Two devices exchange each byte once and wait twice. FSDP2 takes half as much again, fp16 half.
    """
    model = StepTime(0, 0.001, math.inf, 1, 0.001, 0)
    job = Job(2, 10, parameters=1000, rate=1e5)
    assert model.network(job) == pytest.approx(4000 / 1e5 + 2 * 0.001)
    assert model.update(job) == pytest.approx(0.01 + 0.042)
    for strategy, seconds in (("DDP fp16", 0.02 + 0.002), ("FSDP2", 0.06 + 0.003)):
        assert model.network(dataclasses.replace(job, strategy=strategy)) == pytest.approx(seconds)
    many = dataclasses.replace(job, processes=8, delay=0.01)
    assert model.network(many) == pytest.approx(2 * 7 / 8 * 4000 / 1e5 + 14 * 0.011)
    assert model.network(Job(1, 10, 1000)) == 0


def test_last_bucket_hides_behind_nothing() -> None:
    """The last bucket always adds its time, however much computation there is to hide behind."""
    model = StepTime(0, 1.0, math.inf, 1, 0, 0.5)
    job = Job(2, 10, 1000, buckets=4, last_share=0.25, rate=1e5)
    assert model.update(job) == pytest.approx(10 + 0.25 * 0.04)
    slow = dataclasses.replace(job, rate=100.0)
    assert model.update(slow) == pytest.approx(10 + 40 - 0.5 * 10)


@pytest.mark.parametrize(
    "sizes", [[10], [300_000, 10], [393_216, 512, 262_144, 512, 512_000, 1000]]
)
def test_buckets_are_those_of_ddp(sizes: list[int]) -> None:
    """The modelled buckets are those that torch's own function computes."""
    tensors = [torch.empty(size) for size in reversed(sizes)]
    limits = [step_time.FIRST_BUCKET, step_time.BUCKET]
    groups, _ = distributed._compute_bucket_assignment_by_size(tensors, limits)
    last = sum(tensors[index].numel() for index in groups[-1])
    assert buckets_of(sizes) == (len(groups), pytest.approx(last / sum(sizes)))


def event(name: str, start: float, end: float, thread: int = 1, device: str = "CPU") -> Any:
    """Return an operation as the profiler describes it."""
    return SimpleNamespace(
        name=name,
        thread=thread,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=SimpleNamespace(name=device),
        is_user_annotation=False,
    )


def test_shares_of_communication_of_the_profiler() -> None:
    """Overlapping collectives count once, and those beside computation are not alone."""
    computing = [event("aten::mm", 0, 40), event("aten::add", 10, 20), event("aten::mm", 90, 100)]
    sums = [event("aten::add_", 50, 60, thread=2), event("c10d::allreduce_", 30, 31)]
    sent = [event("gloo:all_reduce", 30, 60, thread=2), event("gloo:all_reduce", 50, 80, thread=3)]
    shares = shares_of_communication([*computing, *sums, *sent])
    assert shares == {"under_way": pytest.approx(0.5), "alone": pytest.approx(0.4)}
    kernels = [event("gemm", 0, 60, 7, "CUDA"), event("ncclDevKernel", 40, 100, 7, "CUDA")]
    shares = shares_of_communication([*computing, *kernels])
    assert shares == {"under_way": pytest.approx(0.6), "alone": pytest.approx(0.4)}
    assert shares_of_communication([]) == {"under_way": 0, "alone": 0}


SERVE = (
    "import socket; s = socket.create_server(('{address}', 5000)); print(flush=True);"
    "c = s.accept()[0]; n = 0\n"
    "while n < {size}: n += len(c.recv(2**20))\n"
    "c.send(b'.')"
)
SEND = (
    "import socket, time; c = socket.create_connection(('{address}', 5000)); t = time.time();"
    "c.sendall(bytes({size})); c.recv(1); print(time.time() - t)"
)


@pytest.mark.parametrize(
    "wrong",
    [
        {"processes": ()},
        {"processes": (1, 0)},
        {"rounds": 0},
        {"updates": 0},
        {"batch": -1},
        {"devices": (0,)},
        {"fit_links": ("foo",)},
        {"check_links": ("5",)},
        {"links": ("a:1",)},
        {"overlap": 2.0},
        {"link_efficiency": 0.0},
    ],
)
def test_mistakes_are_found_before_anything_is_measured(wrong: dict[str, Any]) -> None:
    """A wrong setting ends the script with one sentence before any measurement."""
    with pytest.raises(SystemExit, match=r"error: .* (take 1 or more|no link|of 1 at most)"):
        Options(**wrong)
    assert Options()


@pytest.mark.parametrize(
    "wrong",
    [
        {"largest": 0},
        {"largest": 10**9},
        {"repeats": 0},
        {"plot": "x.txt"},
        {"output": "no/x.json"},
    ],
)
def test_mistakes_are_found_before_a_transfer_is_measured(wrong: dict[str, Any]) -> None:
    """A wrong setting of the transfer benchmark, also a bad path, ends it with one sentence."""
    with pytest.raises(SystemExit, match="error: "):
        transfer.Options(**{n: Path(v) if isinstance(v, str) else v for n, v in wrong.items()})


def test_link_is_as_slow_as_it_is_asked_to_be() -> None:
    """The link is no faster than its rate and delay, and closing it removes its namespaces."""
    try:
        link = Link().__enter__()
    except LinkError as problem:
        pytest.skip(f"no network namespaces here: {problem}")

    def seconds(size: int) -> float:
        words = [
            [sys.executable, "-c", t.format(address=ADDRESSES[0], size=size)] for t in (SERVE, SEND)
        ]
        prefixes = [["ip", "netns", "exec", name] for name in link.namespaces]
        server = subprocess.Popen(prefixes[0] + words[0], stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()
        sent = subprocess.run(prefixes[1] + words[1], capture_output=True, timeout=60, check=True)
        server.communicate(timeout=60)
        return float(sent.stdout)

    try:
        link.slow(8, 0)
        assert seconds(500_000) > 0.4
        link.slow(1000, 50)
        assert seconds(10) > 0.1
    finally:
        link.close()
    named = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert not [name for name in link.namespaces if name in named]


@pytest.mark.slow
def test_script_measures_fits_and_reports(runner: Runner, tmp_path: Path) -> None:
    """The script measures processes, fits its model and writes tables and a picture.

    Without network namespaces, it says so and leaves out the measurements over links.
    """
    words = ["benchmarks/scaling.py", "--output", str(tmp_path / "found"), "--batch", "64"]
    words += ["--updates", "2", "--rounds", "1", "--fit-links", "400:0", "--check-links", "200:2"]
    environment = clean_environment(runner.folder) | {"TMPDIR": str(tmp_path)}
    command = [str(runner.python), *words]
    status, printed, errors = run_command(command, environment, REPOSITORY, 300, one_core=False)
    assert status == 0, printed + errors
    results = json.loads((tmp_path / "found" / "scaling.json").read_text())
    names = [run["name"] for run in results["runs"]]
    assert names[:2] == ["1 × 32, DDP", "1 × 64, DDP"]
    assert all(run["samples_per_second"] > 0 and run["predicted"] > 0 for run in results["runs"])
    shares = [run for run in results["runs"] if "alone" in run]
    assert {run["processes"] for run in shares} == {2}
    assert all(0 < run["alone"] <= run["under_way"] <= 1 for run in shares)
    if results["link"].startswith("left out"):
        assert len(names) == 4
    else:
        assert "2 × 64, DDP fp16, 200 Mbit/s, 2 ms" in names
        assert results["largest_unseen_error"] > 0
    table = (tmp_path / "found" / "scaling.md").read_text()
    assert table in printed
    assert "| InfiniBand NDR, 1,024 devices |" in table
    assert (tmp_path / "found" / "scaling.png").stat().st_size > 10_000
