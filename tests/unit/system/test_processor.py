"""The processor's kind, and the number of threads of a process."""

from __future__ import annotations

import os

import pytest

from common.system import processor


@pytest.mark.parametrize(
    ("num_threads", "variable", "cores", "processes", "expected"),
    [
        (None, "1", 8, 1, 8),  # a bare launch exports 1
        (None, None, 8, 1, 8),
        (None, "1", 8, 2, 4),
        (None, "3", 8, 2, 3),  # the user's number
        (None, "64", 8, 1, 8),  # a number for a machine with more cores than are usable
        (None, "1", 1, 2, 1),
        (None, "4,2", 8, 1, 4),  # one number per level of nesting
        (None, "", 8, 1, 8),
        (None, "many", 8, 1, 8),
        (5, "3", 8, 2, 5),
        (1, None, 8, 1, 1),
    ],
)
def test_each_core_has_one_thread(
    num_threads: int | None,
    variable: str | None,
    cores: int,
    processes: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The processes of a machine share its cores, unless the user states a number."""
    monkeypatch.setattr(processor, "usable_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert processor.cpu_threads(num_threads) == expected


def test_only_usable_cores_count() -> None:
    """A process may be restricted to fewer cores."""
    if hasattr(os, "sched_getaffinity"):
        assert processor.usable_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("info", "capability", "expected"),
    [
        ({}, "DEFAULT", "a CPU, DEFAULT"),
        (
            {"model name": "AMD EPYC", "cpu family": "25", "model": "1", "flags": "avx2"},
            "AVX2",
            "AMD EPYC, family 25, model 1, AVX2",
        ),
        (
            {"model name": "AMD EPYC", "cpu family": "25", "model": "17", "flags": "avx512_bf16"},
            "AVX512",
            "AMD EPYC, family 25, model 17, AVX512-BF16",
        ),
        # The user restricts torch to other kernels, for example by ATEN_CPU_CAPABILITY.
        (
            {"model name": "AMD EPYC", "cpu family": "25", "model": "17", "flags": "avx512_bf16"},
            "AVX2",
            "AMD EPYC, family 25, model 17, AVX2",
        ),
        (
            {
                "model name": "Xeon",
                "cpu family": "6",
                "model": "143",
                "flags": "avx512_bf16 amx_bf16",
            },
            "AVX512",
            "Xeon, family 6, model 143, AVX512-BF16 with AMX-BF16",
        ),
    ],
)
def test_processor_kind_names_model_and_instructions(
    info: dict[str, str], capability: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Virtual machines hide the exact name, and other systems tell no family."""
    monkeypatch.setattr(processor, "cpu_info", lambda: info)
    monkeypatch.setattr(processor.platform, "processor", lambda: "a CPU")
    assert processor.processor_kind(capability) == expected
