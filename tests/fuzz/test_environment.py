"""Odd values of launchers' variables: a run ends with a sentence, or ignores them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from common.errors import UserError
from tests.fuzz.small_run import FLAGS, learned, prepared, run

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_SIZE", "OMP_NUM_THREADS")
FLAGS_OF_LAUNCHERS = ("ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "ACCELERATE_DEBUG_MODE")
OTHERS = (
    *("ACCELERATE_TORCH_DEVICE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
)
VALUES = ("", "x", "-1", "0", "1.5", "9" * 20, "9" * 5000, "٣", "²")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with prepared():
        yield


def run_among(directory: Path, **variables: str) -> BaseException | None:
    """Run with these variables, and undo what libraries set; return the sentence, if any."""
    with mock.patch.dict(os.environ, variables):
        error, _ = run(*FLAGS, "--output-dir", directory)
        assert error is None or isinstance(error, UserError), f"{variables}: {error!r}"
        if error is not None:
            assert "\n" not in error.message
            assert str(error.code).startswith("error: "), "no process printed it"
    return error


@pytest.mark.parametrize("name", [*NUMBERS, *FLAGS_OF_LAUNCHERS, *OTHERS])
def test_misspelt_variable(tmp_path: Path, name: str) -> None:
    """Each variable that a run or one of its libraries reads may have odd values."""
    for number, value in enumerate(VALUES):
        run_among(tmp_path / str(number), **{name: value})


def test_ranks_that_do_not_fit(tmp_path: Path) -> None:
    """Ranks beyond the world size, and several processes without an address, are refused."""
    for rank, size, here in itertools.product("0126", "12", "01"):
        error = run_among(tmp_path / "run", RANK=rank, WORLD_SIZE=size, LOCAL_RANK=here)
        assert (error is None) or "launch with" in error.message
        assert error is not None or (rank, size) == ("0", "1")


def test_accumulation_is_that_of_the_flag(tmp_path: Path) -> None:
    """Accelerate's variable changes nothing, because the plan counts by the flag."""
    plain = tmp_path / "plain"
    varied = tmp_path / "varied"
    assert run_among(plain) is None
    assert run_among(varied, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="3") is None
    assert learned(varied) == learned(plain)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a directory in use may not be removed")
def test_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a removed current directory, Intel's library would end the process silently."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    error, _ = run(*FLAGS, "--output-dir", tmp_path / "run")
    assert isinstance(error, UserError)
    assert error.message.startswith("the current directory can't be read")
