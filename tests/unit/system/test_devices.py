"""Capabilities of devices: each one tested present and missing."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from common.checkpoints.adapters import OptimizerState, RandomState
from common.measure import memory, memory_limits
from common.system import devices
from common.system.devices import streams, trials
from common.training.evaluation.mode import seed_generators
from common.training.gradients.guard import GradientGuard
from common.training.optim import turn_off_unfit_fused_kernel
from tests.launch import REPOSITORY

CPU = torch.device("cpu")
OTHER = torch.device("mps", 0)  # a type of device that this machine lacks

# The files of `common` that may name CUDA, and why.
NAMES_CUDA = {
    "common/checkpoints/adapters.py": "a docstring's example",
    "common/system/devices/compilation.py": "torch.compile records CUDA graphs alone",
    "common/system/devices/libraries.py": "the versions of torch's libraries",
    "common/measure/power.py": "NVML finds a GPU by its uuid",
    "common/models/compile.py": "CUDA graphs, in a docstring and in a message",
    "common/models/packing.py": "a kernel of FlashAttention needs a compute capability",
    "common/profile/phases.py": "NVTX",
    "common/profile/profiler.py": "the history of allocations",
    "common/tools/predict/command.py": "an example in --help",
    "common/tools/prove/instruments/waits.py": "its call of synchronize() is a wait",
    "common/training/precision.py": "the precision that `auto` takes, by what is known of kinds",
}
# Those of them that decide something by the name.
DECIDES_BY_NAME = {
    "common/measure/power.py",
    "common/models/packing.py",
    "common/profile/phases.py",
    "common/profile/profiler.py",
    "common/system/devices/compilation.py",
    "common/training/precision.py",
}


def lines_with_cuda() -> list[str]:
    command = ["git", "grep", "-i", "-n", "cuda", "--", "common"]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_only_some_files_name_cuda() -> None:
    """Code that asks for a device's name excludes others. It should ask `common.system.devices`."""
    unexpected = [line for line in lines_with_cuda() if line.split(":")[0] not in NAMES_CUDA]
    assert unexpected == []
    assert {*NAMES_CUDA} == {line.split(":")[0] for line in lines_with_cuda()}


def test_decisions_by_the_name_cuda_are_few() -> None:
    """They are allowed only for features that no other GPUs have; `DECIDES_BY_NAME` lists them."""
    decision = re.compile(r'[!=]= "cuda"|\{"cuda": ')  # a comparison, or a table by type
    files = {line.split(":")[0] for line in lines_with_cuda() if decision.search(line)}
    assert files == DECIDES_BY_NAME


def test_page_lists_the_files_that_decide_by_name() -> None:
    """The table in docs/architecture.md has exactly these files."""
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    section = page.partition("\n## Devices\n")[2].partition("\n## ")[0]
    files = re.findall(r"^\| `([\w/]+\.py)` \|", section, re.MULTILINE)
    assert {f"common/{file}" for file in files} == DECIDES_BY_NAME


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a stand-in for modules such as `torch.mps`, to which a test adds functions.

    Answers of earlier tests are forgotten.
    """
    stand_in = SimpleNamespace()
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: stand_in)
    monkeypatch.setattr(trials, "ANSWERS", {})
    return stand_in


def test_cpu_is_no_accelerator() -> None:
    """The CPU has float64 and autocast, but no streams, pinned memory or memory figures."""
    assert devices.has_float64(CPU)
    assert devices.has_autocast(CPU, torch.bfloat16)
    assert not devices.has_streams(CPU)
    assert not devices.has_timed_events(CPU)
    assert not devices.has_pinned_memory(CPU)
    assert not devices.has_generator(CPU)
    assert devices.memory_info(CPU) is None
    assert devices.allocated_bytes(CPU) is None
    assert devices.peak_bytes(CPU) is None
    assert devices.indexed(CPU) == CPU
    assert devices.device_name(CPU).endswith(" cores")


@pytest.mark.usefixtures("module")
def test_bare_device_lacks_everything() -> None:
    """A backend may have no function at all.

    Then every capability is absent, and no error is raised.
    """
    capabilities = (
        devices.has_float64,
        devices.has_streams,
        devices.has_timed_events,
        devices.has_pinned_memory,
        devices.has_generator,
        devices.has_loss_scaling,
        devices.has_tf32,
        devices.keeps_peaks,
        devices.has_own_memory_figures,
    )
    assert [has(OTHER) for has in capabilities] == [False] * len(capabilities)
    assert not devices.has_autocast(OTHER, torch.float16)
    assert devices.generator_state(OTHER) is None
    assert devices.memory_info(OTHER) is None
    assert not devices.reset_peaks(OTHER)
    devices.synchronize(OTHER)
    devices.synchronize_stream(OTHER)
    devices.seed_generator(OTHER, 1)
    devices.empty_cache(OTHER)
    devices.use(OTHER)


@pytest.mark.usefixtures("module")
def test_capabilities_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later questions cost no work on the device."""
    trials: list[object] = []

    def fail(*unused: Any, **keywords: Any) -> None:
        trials.append(keywords)
        raise TypeError("no float64 here")

    monkeypatch.setattr(torch, "ones", fail)
    assert [devices.has_float64(OTHER) for _ in range(3)] == [False] * 3
    assert len(trials) == 1


def test_device_without_a_name_has_its_type_in_it(module: SimpleNamespace) -> None:
    """A device without a name is shown by its type, so that it does not look like the processor."""
    assert devices.device_name(OTHER).startswith("mps of ")
    module.get_device_name = lambda device: "Arc B580"
    assert devices.device_name(OTHER) == "Arc B580"


# --- optimizers


class IgnoresSkips(SGD):
    """An optimizer that ignores `found_inf` and applies non-finite gradients, as MPS did."""

    def step(self, closure: Any = None) -> Any:
        """Step without `found_inf`."""
        self.found_inf = None
        return super().step(closure)


class IgnoresScale(AdamW):
    """An optimizer that ignores the scale of gradients."""

    def step(self, closure: Any = None) -> Any:
        """Step without `grad_scale`."""
        self.grad_scale = None
        return super().step(closure)


OPTIMIZERS: list[tuple[Any, dict[str, Any], bool]] = [
    (SGD, {"lr": 0.1}, True),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, True),
    (Adam, {}, True),
    (AdamW, {"amsgrad": True, "maximize": True}, True),
    (AdamW, {"lr": torch.tensor(0.1)}, True),
    (Adagrad, {}, True),
    (IgnoresSkips, {"lr": 0.1}, False),
    (IgnoresSkips, {"lr": 0.1, "momentum": 0.9}, False),
    (IgnoresScale, {}, False),
]


@pytest.mark.parametrize(("optimizer_class", "options", "expected"), OPTIMIZERS)
def test_fused_kernels_are_tried(
    optimizer_class: Any, options: dict[str, Any], expected: bool
) -> None:
    """A trial shows whether each optimizer honours `grad_scale` and `found_inf`."""
    optimizer = optimizer_class([nn.Parameter(torch.ones(3))], fused=True, **options)
    assert devices.honours_scaling(optimizer, CPU) is expected
    turn_off_unfit_fused_kernel(optimizer, CPU)
    assert optimizer.param_groups[0]["fused"] is expected
    assert bool(getattr(optimizer, "_step_supports_amp_scaling", False)) is expected


@pytest.mark.parametrize("optimizer_class", [SGD, IgnoresSkips])
def test_non_finite_updates_are_skipped_on_any_device(optimizer_class: Any, capsys: Any) -> None:
    """The device's fused kernel may not be able to skip them."""
    model = nn.Linear(3, 1)
    optimizer: Optimizer = optimizer_class(model.parameters(), lr=0.1, fused=True)
    turn_off_unfit_fused_kernel(optimizer, CPU)
    assert ("can't skip an update" in capsys.readouterr().out) == (optimizer_class is IgnoresSkips)
    accelerator: Any = SimpleNamespace(
        device=CPU, scaler=None, unscale_gradients=lambda optimizer: None, _optimizers=[]
    )
    guard = GradientGuard(accelerator, max_grad_norm=1.0, by_layer=False)
    before = model.weight.detach().clone()
    for gradient, is_applied in ((torch.nan, False), (1.0, True)):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        guard.clip(model, optimizer)
        optimizer.step()
        assert torch.equal(model.weight, before) != is_applied


@pytest.mark.parametrize(("saved", "present"), [(True, False), (False, True)])
def test_resume_keeps_the_kernels_of_the_device(saved: bool, present: bool) -> None:
    """A checkpoint records how its run stepped, but the resumed run may have another device."""

    def stepped(is_fused: bool) -> Any:
        parameter = nn.Parameter(torch.ones(3))
        optimizer = AdamW([parameter], fused=is_fused)
        parameter.grad = torch.ones(3)
        optimizer.step()
        return optimizer

    state = OptimizerState(stepped(saved)).state_dict()
    optimizer = stepped(present)
    OptimizerState(optimizer).load_state_dict(state)
    assert optimizer.param_groups[0]["fused"] is present
    assert state["param_groups"][0]["fused"] is saved  # the state that was read is unchanged
    optimizer.step()


# --- waiting and copies


def test_device_without_streams_is_awaited_as_a_whole(module: SimpleNamespace) -> None:
    """Waiting for a stream would fail there."""
    waits: list[str] = []
    module.synchronize = lambda: waits.append("device")
    devices.synchronize_stream(OTHER)
    assert waits == ["device"]


def test_device_with_streams_is_awaited_by_its_stream(
    module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stopwatch does not wait for a checkpoint that another stream copies."""
    waits: list[str] = []
    module.synchronize = lambda: waits.append("device")
    stream = SimpleNamespace(synchronize=lambda: waits.append("stream"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: stream)
    trials.ANSWERS["has_streams", OTHER] = True
    devices.synchronize_stream(OTHER)
    assert waits == ["stream"]


@pytest.mark.usefixtures("module")
def test_one_stream_under_two_names_is_no_second_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that returns its only stream as a new one cannot copy during training."""

    def stream(number: int) -> Any:
        event = SimpleNamespace(synchronize=lambda: None)
        answers = {
            "wait_stream": lambda other: None,
            "wait_event": lambda event: None,
            "record_event": lambda: event,
            "synchronize": lambda: None,
        }
        return SimpleNamespace(stream_id=number, **answers)

    class On:
        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda size, device: ones(size))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(streams, "on_stream", lambda stream: On())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: stream(0))
    for number, expected in ((0, False), (1, True)):
        trials.ANSWERS.clear()
        monkeypatch.setattr(streams, "new_stream", lambda device, n=number: stream(n))
        assert devices.has_streams(OTHER) is expected


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.usefixtures("module")
def test_copies_without_pinned_memory_are_waited_for(
    is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for such copies, so that it can't change memory before it is read."""
    copies: list[bool] = []

    def to(values: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        copies.append(non_blocking)
        return values

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda values: values)
    trials.ANSWERS["has_pinned_memory", OTHER] = is_pinned
    devices.to_device(torch.arange(3), OTHER)
    assert copies == [is_pinned]


# --- memory


@pytest.mark.usefixtures("module")
def test_device_without_memory_figures_reports_the_host() -> None:
    """No figure claims to be the device's."""
    assert memory.memory_used(OTHER).keys() == {"memory/host_rss_mib"}
    assert memory_limits.device_memory(OTHER) == memory_limits.device_memory(CPU)
    assert memory.memory_now(OTHER) > 2**20
    with memory.MemoryTracker(OTHER) as tracker:
        pass
    assert tracker.peak_mib > 1


def test_device_without_peaks_reports_current_memory(module: SimpleNamespace) -> None:
    """Apple's GPUs report it, and it is not called a peak."""
    module.current_allocated_memory = lambda: 3 * 2**20
    module.driver_allocated_memory = lambda: 4 * 2**20
    module.recommended_max_memory = lambda: 10 * 2**20
    used = memory.memory_used(OTHER)
    assert used.keys() == {"memory/allocated_mib", "memory/host_rss_mib"}
    assert used["memory/allocated_mib"] == 3
    assert memory_limits.device_memory(OTHER) == 10 * 2**20
    assert devices.memory_info(OTHER) == (6 * 2**20, 10 * 2**20)
    with memory.MemoryTracker(OTHER) as tracker:
        module.current_allocated_memory = lambda: 5 * 2**20
    assert (tracker.peak_mib, tracker.delta_mib, tracker.kept_mib) == (5, 2, 2)


def test_device_with_peaks_reports_them(
    module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions of its module take the device as an argument."""
    sizes = {"memory_allocated": 3, "max_memory_allocated": 5, "max_memory_reserved": 8}
    for name, size in sizes.items():
        setattr(module, name, lambda device, size=size: size * 2**20)
    module.mem_get_info = lambda device: (7 * 2**20, 16 * 2**20)
    resets: list[torch.device] = []
    module.reset_peak_memory_stats = resets.append
    monkeypatch.setattr(
        memory, "EARLIER_PEAKS", type(memory.EARLIER_PEAKS)(lambda: [memory.NO_PEAKS])
    )
    used = memory.memory_used(OTHER)
    assert (used["memory/peak_allocated_mib"], used["memory/peak_reserved_mib"]) == (5, 8)
    assert memory_limits.device_memory(OTHER) == 16 * 2**20
    with memory.MemoryTracker(OTHER) as tracker:
        pass
    assert resets == [OTHER]
    assert (tracker.peak_mib, tracker.delta_mib) == (5, 2)


# --- random numbers


def with_generator(module: SimpleNamespace) -> Callable[[], list[int]]:
    """Give a device's module a generator, and return a function that reads its state."""
    state = torch.arange(4, dtype=torch.uint8)
    module.get_rng_state = lambda device: state.clone()
    module.set_rng_state = lambda new_state, device: state.copy_(new_state)
    module.manual_seed = lambda seed: state.fill_(seed % 256)
    return state.tolist


def test_generator_of_any_device_is_saved_and_restored(module: SimpleNamespace) -> None:
    """Dropout on the device continues where it was."""
    read = with_generator(module)
    random_state = RandomState(OTHER)
    saved = random_state.state_dict()
    seed_generators(OTHER, 7)
    assert read() == [7] * 4
    random_state.load_state_dict(saved)
    assert read() == [0, 1, 2, 3]


def test_generator_state_of_another_device_type_is_ignored(module: SimpleNamespace) -> None:
    """The state of another type's generator is ignored, and a CPU run has none."""
    read = with_generator(module)
    random_state = RandomState(OTHER)
    saved = random_state.state_dict()
    saved["cuda"] = saved.pop("mps").fill_(9)
    random_state.load_state_dict(saved)
    assert read() == [0, 1, 2, 3]
    on_cpu = RandomState(CPU).state_dict()
    assert on_cpu.keys() == {"torch", "numpy", "python"}


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, OTHER), ("False", OTHER), ("junk", OTHER), ("true", CPU), ("1", CPU)],
)
def test_requested_cpu_is_used_beside_an_accelerator(
    variable: str | None, expected: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`default_device` and the tracker of memory agree."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if variable is not None:
        monkeypatch.setenv("ACCELERATE_USE_CPU", variable)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    assert devices.default_device() == expected
    assert memory.MemoryTracker().device == expected
