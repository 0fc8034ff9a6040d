"""A resume names each change of the environment on which the bits of a run depend."""

from __future__ import annotations

from typing import Any

import pytest

from common.lifecycle.start.environment_changes import say_changed_environment
from common.run_directory.records import Environment

CPU = Environment(
    device="AMD EPYC, 2 cores",
    device_type="cpu",
    processor="AMD EPYC, family 25, model 17, AVX512-BF16",
    world_size=2,
    mixed_precision="bf16",
    effective_batch_size=64,
    threads_per_process=2,
    versions={"torch": "2.13.0", "numpy": "2.3.1", "wandb": "0.25.0"},
)
GPU = CPU.model_copy(update={"device": "NVIDIA H100", "device_type": "cuda"})


@pytest.mark.parametrize(
    ("before", "change", "words"),
    [
        (CPU, {"world_size": 1}, "1 process instead of 2"),
        (CPU, {"processor": "AMD EPYC, AVX2"}, "AMD EPYC, AVX2 instead of AMD EPYC, family 25"),
        (CPU, {"threads_per_process": 1}, "a thread count of 1 instead of 2"),
        (CPU, {"versions": {"torch": "2.14.0"}}, "torch 2.14.0 instead of 2.13.0"),
        (CPU, {"versions": {"numpy": "2.4.0"}}, "numpy 2.4.0 instead of 2.3.1"),
        (GPU, {"device": "NVIDIA A100"}, "NVIDIA A100 instead of NVIDIA H100"),
        (GPU, {"device": "AMD EPYC", "device_type": "cpu"}, "cpu instead of cuda, so metrics"),
    ],
)
def test_change_that_may_change_bits_is_named(
    before: Environment, change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence states the new value and the earlier one."""
    say_changed_environment(before, before.model_copy(update=change))
    printed = " ".join(capsys.readouterr().out.split())
    assert f"the run continues {'on' if 'device_type' in change else 'with'} {words}" in printed


@pytest.mark.parametrize(
    ("before", "change"),
    [
        (CPU, {}),
        (CPU, {"versions": {"torch": "2.13.0", "wandb": "0.26.0"}}),  # a tracker computes nothing
        (CPU, {"versions": {"torch": "2.13.0", "transformers": "5.23"}}),  # newly installed
        (CPU, {"device": "AMD EPYC, 64 cores"}),  # the number of threads counts, not of cores
        (CPU, {"data_placement": "workers", "python": "3.12"}),
        (GPU, {"processor": "Intel Xeon", "threads_per_process": 8}),  # the GPU computes
    ],
)
def test_other_changes_are_not_mentioned(
    before: Environment, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume in the same environment prints nothing either."""
    say_changed_environment(before, before.model_copy(update=change))
    assert not capsys.readouterr().out
