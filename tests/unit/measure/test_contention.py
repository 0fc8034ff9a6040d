"""Warnings about contended cores, with figures recorded on two cores."""

from __future__ import annotations

import pytest

from common.measure.contention import contention_sentence

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
