"""Warnings about rising memory."""

from __future__ import annotations

import pytest
import torch

from common.measure.rising_memory import RisingMemoryWatch, warning_of_rise

RISING = [1000.0 + 10 * line for line in range(10)]  # MiB at log lines


@pytest.mark.parametrize(
    "memory_mib",
    [
        RISING[1:],  # too few lines
        [*RISING[:5], RISING[4], *RISING[6:]],  # one line without a rise
        [1000.0 + line for line in range(10)],  # negligible rises
        [0.0] * 10,
    ],
)
def test_steady_memory_gives_no_warning(memory_mib: list[float]) -> None:
    """Too few lines, single drops and tiny steps are normal."""
    assert warning_of_rise("the GPU", memory_mib) is None


def test_rising_memory_gives_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """The warning comes at line 20, once: the first ten lines do not count."""
    watch = RisingMemoryWatch(torch.device("cpu"))
    for line in range(30):
        watch.warn_if_rising(1000.0 + 10 * line)
    output = capsys.readouterr().out
    assert output.count("rose over 10 log lines in a row") == 1
    assert "the memory of the process" in output
    assert "from 1,100 to 1,190 MiB" in output


def test_memory_that_rises_only_at_first_gives_no_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Libraries keep buffers for each shape of a batch."""
    watch = RisingMemoryWatch(torch.device("cpu"))
    for line in range(60):
        watch.warn_if_rising(1000.0 + 10 * min(line, 15))
    assert not capsys.readouterr().out
