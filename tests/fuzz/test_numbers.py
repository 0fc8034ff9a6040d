"""Extreme values of flags: a run ends with one sentence, or finishes."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import UserError
from common.run import Run
from tests.small_run import FLAGS, run

pytestmark = pytest.mark.usefixtures("quick_runs")

MANY = 10**9  # the most that a count may be


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    """Restore the limit of memory."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--batch-size", MANY, "--gradient-accumulation-steps", MANY), "samples of one update"),
        (("--gradient-accumulation-steps", MANY), "samples of one update"),
        (("--hidden-sizes", 10**6, 10**6), "out of memory"),
        (("--hidden-sizes", *[10**6] * 9), "out of memory"),
        (("--hidden-sizes", 10**6 + 1), "pass a number from 1 to 1000000"),
        (("--auto-batch-size", "--hidden-sizes", 10**6, 10**6), "lower --hidden-sizes, or"),
        (("--max-steps", 10**20), "pass a number from 1 to 1000000000"),
        (("--seed", 2**32), "pass a number from 0 to 4294967295"),
        (("--seed", 2**32 - 1), None),
        (("--epochs", MANY, "--warmup-steps", MANY, "--keep-checkpoints", MANY), None),
        (("--log-every", MANY, "--eval-every", MANY, "--checkpoint-every", MANY), None),
        (("--collective-timeout", 10**6), None),
        (("--learning-rate", "1e309"), "pass a finite number"),
        (("--learning-rate", "1e308"), "became NaN or infinite in update"),
        (("--weight-decay", "1e308"), "became NaN or infinite in update"),
        (("--learning-rate", "1e-320", "--weight-decay", "-0.0", "--dropout", "-0.0"), None),
        (("--learning-rate", "-0.0", "--max-grad-norm", "1e-300"), None),
        (("--max-grad-norm", "1e308", "--dropout", 1), None),
        (("--target", "-inf"), "pass a finite number"),
        (("--tags", "x" * 999, "a,b", "a", "a"), None),
        (("--tags", "a", "\t"), "pass text that is not empty"),
        (("--tags", "\udcff"), "pass text"),
        (("--run-name", "a\tb", "--notes", "a\nb", "--group", "x" * 9999), None),
        (("--project", ""), "pass text that is not empty"),
    ],
)
def test_extremes(tmp_path: Path, flags: tuple[object, ...], expected: str | None) -> None:
    """Products that overflow, sizes beyond any memory, floats at the end of their range."""
    error, _ = run(*FLAGS, "--output-dir", tmp_path / "run", *flags)
    if expected is None:
        assert error is None, repr(error)
    else:
        assert isinstance(error, UserError), repr(error)
        assert expected in error.message
        assert "\n" not in error.message


@pytest.mark.skipif(sys.platform != "linux", reason="no other system counts what is asked for")
def test_more_than_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of many pieces, each of which fits, ends with advice; nothing kills the run."""
    monkeypatch.setattr("common.measure.memory_limits.device_memory", lambda device: 64 * 2**20)
    error, _ = run(*FLAGS, "--output-dir", tmp_path / "run", "--hidden-sizes", *[1500] * 10)
    assert isinstance(error, UserError), repr(error)
    assert "lower --hidden-sizes, or" in error.message


@pytest.mark.skipif(sys.platform != "linux", reason="no other system counts what is asked for")
@pytest.mark.parametrize("place", ["make_plan", "start", "save", "finish"])
@pytest.mark.parametrize("error_class", [MemoryError, OSError, RuntimeError])
def test_no_memory_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error_class: type[Exception]
) -> None:
    """A run that meets the memory limit lifts it, so that it can still print its sentence."""

    def fill(*_: object, **__: object) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (0, most))
        raise {
            MemoryError: MemoryError(),
            OSError: OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
            RuntimeError: RuntimeError("can't start new thread"),
        }[error_class]

    monkeypatch.setattr(Run, place, fill)
    error, _ = run(*FLAGS, "--output-dir", tmp_path / "run")
    assert isinstance(error, UserError), repr(error)
    assert "out of memory" in error.message
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] != 0
