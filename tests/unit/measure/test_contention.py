"""Warnings about contended cores and rising memory, with figures recorded on two cores."""

from __future__ import annotations

import pytest
from accelerate import Accelerator

from common.measure.meters import Meters, contention_sentence, rising_sentence

# ResNet-18 on digits beside other programs: a step of 34.3 s with two threads, 5.4 with one.
CONTENDED = (68.6, 18.7, 2, 2, 8.1)  # wall and CPU seconds, threads, cores, load


def test_contended_threads_get_advice() -> None:
    """The sentence has their share, the load and the flag that helps."""
    sentence = contention_sentence(*CONTENDED)
    assert sentence is not None
    assert "load 8.1 on 2" in sentence
    assert "2 threads get 14%" in sentence
    assert "--num-threads 1" in sentence


def test_single_thread_gets_no_advice() -> None:
    """A single thread that took 10.8 s for 2.1 s of work gets the cause only, and no advice."""
    sentence = contention_sentence(10.8, 2.1, threads=1, cores=2, load=8.1)
    assert sentence is not None
    assert "19% of one" in sentence
    assert "--num-threads" not in sentence


@pytest.mark.parametrize(
    "figures",
    [
        pytest.param((71.8, 141.0, 2, 2, 1.5), id="BERT alone"),
        pytest.param((10.0, 3.1, 2, 2, 0.6), id="waiting for data"),
        pytest.param((10.0, 19.2, 2, 2, 6.0), id="after others have ended"),
        pytest.param((16.0, 15.8, 1, 64, 20.0), id="free cores beside others"),
        pytest.param((0.0, 0.0, 2, 2, 9.0), id="no time at all"),
    ],
)
def test_no_warning_if_cores_are_not_the_cause(
    figures: tuple[float, float, int, int, float],
) -> None:
    """Threads work at full share, or wait for something else beside idle cores."""
    assert contention_sentence(*figures) is None


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
    assert rising_sentence("the GPU", memory_mib) is None


def test_rising_memory_gives_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """The warning comes at line 20, once: the first ten lines do not count."""
    meters = Meters(Accelerator(cpu=True), 1)
    for line in range(30):
        meters.warn_of_rising(1000.0 + 10 * line)
    output = capsys.readouterr().out
    assert output.count("rose over 10 log lines in a row") == 1
    assert "the memory of the process" in output
    assert "from 1,100 to 1,190 MiB" in output


def test_memory_that_rises_only_at_first_gives_no_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Libraries keep buffers for each shape of a batch."""
    meters = Meters(Accelerator(cpu=True), 1)
    for line in range(60):
        meters.warn_of_rising(1000.0 + 10 * min(line, 15))
    assert not capsys.readouterr().out
