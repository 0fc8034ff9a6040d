"""`--profile`: which updates are profiled, which files are written, and that training continues."""

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from PIL import Image
from torch import nn

from common.config import TrainingConfig
from common.data.samples import Work
from common.measure.stopwatch import FIRST_UPDATES, Stopwatch
from common.profile import profiler as module
from common.profile import report, waits
from common.profile.profiler import Profiler, Window, choose_window
from common.profile.verdict import DATA
from common.system.devices import trials


@pytest.mark.parametrize("every", [7, 11, 25, 60, 1000])
@pytest.mark.parametrize("first", [0, 5, 44])
def test_window_lies_between_evaluations(first: int, every: int) -> None:
    """No evaluation disturbs the timed and the profiled updates; timed updates come first."""
    window = choose_window(first, first + 200, lambda step: step % every == 0)
    assert window is not None
    assert (
        FIRST_UPDATES
        <= window.timing_start
        < window.warm_up_start
        < window.record_start
        < window.end
        <= 200
    )
    assert not [n for n in range(window.timing_start, window.end) if (first + n) % every == 0]


def test_window_is_as_large_as_the_run_allows() -> None:
    """Ten updates are timed and ten profiled, fewer in a short run, and none without room."""
    assert FIRST_UPDATES == 3
    assert choose_window(0, 1000, lambda _: False) == Window(3, 13, 15, 25)
    assert choose_window(0, 16, lambda _: False) == Window(3, 8, 10, 15)
    assert choose_window(0, 6, lambda _: False) == Window(3, 4, 5, 6)
    assert choose_window(0, 5, lambda _: False) is None
    assert choose_window(100, 105, lambda _: False) is None


def test_window_includes_evaluations_if_it_must() -> None:
    """The run evaluates after each update."""
    assert choose_window(0, 100, lambda _: True) is not None


class Training:
    """A run in this process with a clock of its own: a batch takes 30 s, an update 10 s."""

    updates_per_epoch = 20

    def __init__(self, folder: Path, *, total_steps: int = 40, **settings: Any) -> None:
        self.now = 0.0
        self.total_steps = total_steps
        self.global_step = 0
        self.paused_while_waiting: list[bool] = []
        self.sent: list[Any] = []
        accelerator: Any = SimpleNamespace(
            device=torch.device(settings.pop("device", "cpu")),
            is_main_process=settings.pop("is_main_process", True),
            wait_for_everyone=self.wait_for_everyone,
            mixed_precision="no",
            num_processes=1,
            backward=torch.Tensor.backward,
        )
        self.accelerator = accelerator
        self.at_once = settings.pop("at_once", 1)
        self.config = TrainingConfig(**{"profile": True} | settings)
        self.stopwatch = Stopwatch(lambda: None, lambda: self.now, energy=lambda: 0.0)
        self.profiler = Profiler(
            self.config,
            folder / "profile",
            accelerator,
            self.stopwatch,
            self,  # type: ignore[arg-type]
            lambda *call: self.sent.append(call),
        )
        self.model = nn.Linear(16, 16)

    def evaluates(self, step: int) -> bool:
        return False

    saves = evaluates

    def wait_for_everyone(self) -> None:
        """Let the clock move on by 1,000 s, while the first rank writes its files."""
        self.now += 1000
        self.paused_while_waiting.append(not self.stopwatch.is_running)

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield batches that are made `at_once` at a time, fewer at the end of an epoch."""
        count = self.updates_per_epoch * self.config.gradient_accumulation_steps
        for number in range(count):
            if number % self.at_once == 0:
                self.now += 30 * min(self.at_once, count - number)
            yield torch.ones(8, 16)

    def run(self) -> None:
        """Train to the end, and take the only lap there."""
        loader: Any = SimpleNamespace(placement="device", batches_per_gather=self.at_once)
        self.stopwatch.start()
        while self.global_step < self.total_steps:
            batches = self.profiler.watch(self.batches(), loader, self.global_step)
            for number, batch in enumerate(batches, start=1):
                self.accelerator.backward(self.model(batch).relu().sum())
                self.now += 10 / self.config.gradient_accumulation_steps
                is_update = number % self.config.gradient_accumulation_steps == 0
                self.stopwatch.count(Work(8), 0.0, is_update)
                if is_update:
                    self.global_step += 1
                    self.profiler.step()
                if self.global_step == self.total_steps:
                    break
        self.stopwatch.lap()


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a run, whose clock the profiler uses."""

    def make(**settings: Any) -> Training:
        run = Training(tmp_path, **settings)
        for timed_module in (module, waits):
            clock = SimpleNamespace(perf_counter=lambda: run.now)
            monkeypatch.setattr(timed_module, "time", clock)
        return run

    return make


@pytest.mark.parametrize(("at_once", "accumulation"), [(1, 1), (1, 2), (7, 1), (16, 2)])
def test_cost_of_an_update_includes_its_batches_only(
    at_once: int, accumulation: int, training: Any, tmp_path: Path
) -> None:
    """Several batches may be made at once, but an update counts the wait for its own."""
    run = training(at_once=at_once, gradient_accumulation_steps=accumulation)
    run.run()
    verdict = json.loads((tmp_path / "profile" / "verdict.json").read_text())
    milliseconds = verdict["milliseconds_per_update"]
    assert verdict["verdict"] == "data-bound"
    assert milliseconds["data"] == pytest.approx(30_000 * accumulation)
    assert milliseconds["total"] == pytest.approx(10_000 + 30_000 * accumulation)


def test_profile_files_can_be_read(
    training: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chrome reads the trace, the tables name operations, and the picture opens."""
    run = training()
    run.run()
    folder = tmp_path / "profile"
    names = {"rank0.pt.trace.json.gz", "top_operations.txt", "top_operations.csv", "memory.png"}
    assert {path.name for path in folder.iterdir()} == names | {"verdict.json"}
    with gzip.open(folder / "rank0.pt.trace.json.gz", "rt") as file:
        trace = [item.get("name") for item in json.load(file)["traceEvents"]]
    assert {"aten::addmm", DATA, "forward", "backward", "optimizer"} <= set(trace)
    # The trace has the profiled updates, without those that warm up the profiler.
    assert len({name for name in trace if name and name.startswith("ProfilerStep")}) == 10
    with (folder / "top_operations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["name"]: row["calls"] for row in rows}["aten::addmm"] == "10"
    times = [float(row["self_cpu_microseconds"]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert "aten::addmm" in (folder / "top_operations.txt").read_text()
    with Image.open(folder / "memory.png") as picture:
        assert picture.size == (1200, 480)
        assert len(set(picture.convert("L").resize((60, 24)).tobytes())) > 5
    output = capsys.readouterr().out
    assert "profile data-bound: of" in output
    assert "updates 14 to 25 are left out of perf/" in output
    verdict = json.loads((folder / "verdict.json").read_text())
    assert [*verdict["phases"]] == ["data", "forward", "backward", "optimizer"]
    assert sum(verdict["phases"].values()) == pytest.approx(1)
    assert min(verdict["phases"].values()) > 0
    assert len(verdict["slowest_operations"]) == 3
    assert not any(phase in output.split("slowest")[1] for phase in ("forward", "ProfilerStep"))
    assert run.accelerator.backward is torch.Tensor.backward  # as it was


@pytest.mark.parametrize("is_main_process", [True, False])
def test_profiled_updates_do_not_count_on_any_rank(
    is_main_process: bool, training: Any, tmp_path: Path
) -> None:
    """Neither does the time that other ranks wait for the profiled one."""
    run = training(is_main_process=is_main_process)
    run.run()
    assert run.global_step == 40
    assert run.paused_while_waiting == [True]
    assert run.stopwatch.total.updates == 40 - 12
    assert run.stopwatch.total.seconds == pytest.approx(40 * (40 - 12))
    assert (tmp_path / "profile" / "verdict.json").is_file() == is_main_process
    assert len(run.sent) == is_main_process


def test_short_run_says_that_it_is_not_profiled(
    training: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is too short for a profile trains as without the flag, and one line says so."""
    run = training(total_steps=5)
    run.updates_per_epoch = 2
    run.run()
    assert run.global_step == run.stopwatch.total.updates == 5
    warning = "the run is not profiled, because fewer than 6 updates are left: start a new run"
    assert capsys.readouterr().out.count(warning) == 1
    assert not (tmp_path / "profile").exists()


def test_batches_are_not_wrapped_without_the_flag(training: Any) -> None:
    """The loop iterates over the loader's own batches."""
    run = training(profile=False)
    batches = run.batches()
    assert run.profiler.watch(batches, SimpleNamespace(), 0) is batches
    run.run()
    assert run.stopwatch.total.updates == 40


@pytest.mark.parametrize("place", ["start", "step", "write"])
def test_failing_profile_never_stops_a_run(
    place: str,
    training: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line reports the profiler's error, and only profiling ends."""

    def fail(*others: Any) -> None:
        raise RuntimeError("no such device")

    if place == "write":
        monkeypatch.setattr(module, "write_profile", fail)
    else:
        monkeypatch.setattr(torch.profiler.profile, place, fail)
    run = training()
    run.run()
    assert run.global_step == 40
    assert run.stopwatch.is_running
    assert capsys.readouterr().out.count("--profile failed (RuntimeError: no such device)") == 1
    assert not (tmp_path / "profile" / "verdict.json").exists()
    assert not run.sent


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Pretend that there is a GPU, and return the mock that records its memory history."""
    # The public function passes its keywords on unchecked, so this one has the right signature.
    recorder = create_autospec(torch.cuda.memory._record_memory_history_impl)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", recorder)
    real = torch.cuda.memory._dump_snapshot
    dump = create_autospec(real, side_effect=lambda path: Path(path).touch())
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**20)
    event = MagicMock(**{"return_value.elapsed_time.return_value": 1.0})
    monkeypatch.setattr(torch, "Event", event)
    for capability in ("has_streams", "has_timed_events"):
        monkeypatch.setitem(trials.ANSWERS, (capability, torch.device("cuda")), True)
    activities = set(torch.profiler.ProfilerActivity.__members__.values())
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: activities)
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, create_autospec(getattr(torch.cuda.nvtx, name)))
    monkeypatch.setattr(torch.accelerator, "current_stream", create_autospec(torch.cuda.Stream))
    return recorder


# The plan of a longer run, which stops within the profiled window.
PLAN = {
    "total_steps": 40,
    "updates_per_epoch": 20,
    "evaluates": lambda step: False,
    "saves": lambda step: False,
}


def calls(history: MagicMock) -> list[dict[str, Any]]:
    return [call.kwargs for call in history.call_args_list]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_memory_history_of_a_gpu_is_written(
    history: MagicMock, training: Any, tmp_path: Path
) -> None:
    """It records Python stacks only, because C++ stacks take minutes to write, and it ends."""
    training(device="cuda").run()
    (start, stop) = calls(history)
    assert start["stacks"] == "python"
    assert stop == {"enabled": None}
    nvtx: Any = torch.cuda.nvtx
    pushed = [call.args[0] for call in nvtx.range_push.call_args_list]
    assert {"data", "forward", "backward", "optimizer"} == set(pushed)
    assert nvtx.range_pop.call_count == len(pushed)
    assert (tmp_path / "profile" / "memory_snapshot.pickle").is_file()
    assert (tmp_path / "profile" / "verdict.json").is_file()


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("end", ["error", "stop"])
def test_memory_history_of_a_gpu_always_ends(
    end: str, history: MagicMock, training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing may fail, or the run may end before its profile."""
    run = training(device="cuda")
    if end == "error":
        monkeypatch.setattr(module, "write_profile", MagicMock(side_effect=OSError("full")))
        run.run()
    else:
        run.profiler.plan = SimpleNamespace(**PLAN)
        run.total_steps = 20
        run.run()
        assert len(calls(history)) == 1
        run.profiler.stop()
    assert calls(history)[-1] == {"enabled": None}
    assert len(calls(history)) == 2


def test_device_without_kernel_times_gets_no_verdict(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The profiler sees only the host's work, which must not count as kernels."""
    monkeypatch.setattr(report, "is_accelerator", lambda device: True)
    training().run()
    printed = capsys.readouterr().out
    assert "no verdict: torch's profiler can't time the kernels of cpu" in printed
    assert "forward" in printed
    assert not (tmp_path / "profile" / "verdict.json").exists()
    assert (tmp_path / "profile" / "top_operations.csv").is_file()


def test_operations_are_grouped_by_shape(training: Any, tmp_path: Path) -> None:
    """`--profile-shapes` turns profiling on and lists the shapes of inputs."""
    training(profile=False, profile_shapes=True).run()
    with (tmp_path / "profile" / "top_operations.csv").open() as file:
        shapes = {
            row["input_shapes"] for row in csv.DictReader(file) if row["name"] == "aten::addmm"
        }
    assert "[[16], [8, 16], [16, 16], [], []]" in shapes
