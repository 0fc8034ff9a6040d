"""Odd values of launchers' variables: a run ends with a sentence, or ignores them."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from unittest import mock

import pytest

from common.errors import UserError
from tests.conftest import first
from tests.small_run import FLAGS, newest_checkpoint_digests, run

pytestmark = pytest.mark.usefixtures("quick_runs")

VALUES = ("", "x", "-1", "0", "1.5", "9" * 20, "9" * 5000, "٣", "²")
NOT_INTEGERS = {"", "x", "1.5", "9" * 5000, "²"}  # Python refuses to convert so many digits
# The variables that a run or one of its libraries reads, and the values with which the run goes on.
# With any other value it is refused.
HARMLESS: dict[str, set[str]] = {
    "RANK": {"0"} | NOT_INTEGERS,
    "WORLD_SIZE": set(),
    "LOCAL_RANK": {"-1"},
    "LOCAL_WORLD_SIZE": {*VALUES},
    "PMI_SIZE": {"-1", "0"},
    "OMP_NUM_THREADS": {*VALUES},
    "ACCELERATE_USE_CPU": {"0"},
    "ACCELERATE_USE_FSDP": {"0"},
    "ACCELERATE_DEBUG_MODE": {"0"},
    "ACCELERATE_TORCH_DEVICE": set(),
    "ACCELERATE_MIXED_PRECISION": {*VALUES},
    "ACCELERATE_DYNAMO_BACKEND": set(),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": {*VALUES} - NOT_INTEGERS,
}


def run_among(directory: Path, **variables: str) -> BaseException | None:
    """Run with these variables, and undo what libraries set; return the sentence, if any."""
    # Launchers set the number of threads. Without it, Accelerate warns.
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", **variables}):
        error, _ = run(*FLAGS, "--output-dir", directory)
        assert error is None or isinstance(error, UserError), f"{variables}: {error!r}"
        if error is not None:
            assert "\n" not in error.message
            assert str(error.code).startswith("error: "), "no process printed it"
    return error


@pytest.mark.parametrize("name", first(5, HARMLESS))
def test_misspelt_variable(tmp_path: Path, name: str) -> None:
    """Each variable may have odd values: some are ignored, the others are refused."""
    refused = set()
    for number, value in enumerate(VALUES):
        if run_among(tmp_path / str(number), **{name: value}) is not None:
            refused.add(value)
    assert refused == {*VALUES} - HARMLESS[name]


def test_ranks_that_do_not_fit(tmp_path: Path) -> None:
    """Ranks beyond the world size, and several processes without an address, are refused."""
    for rank, size, here in itertools.product("0126", "12", "01"):
        error = run_among(tmp_path / "run", RANK=rank, WORLD_SIZE=size, LOCAL_RANK=here)
        assert (error is None) or "with accelerate launch" in error.message
        assert error is not None or (rank, size) == ("0", "1")


def test_accumulation_is_that_of_the_flag(tmp_path: Path) -> None:
    """Accelerate's variable changes nothing, because the plan counts by the flag."""
    plain = tmp_path / "plain"
    varied = tmp_path / "varied"
    assert run_among(plain) is None
    assert run_among(varied, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="3") is None
    assert newest_checkpoint_digests(varied) == newest_checkpoint_digests(plain)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a directory in use may not be removed")
def test_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removed current directory is refused; in it, Intel's library would exit silently."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    error, _ = run(*FLAGS, "--output-dir", tmp_path / "run")
    assert isinstance(error, UserError)
    assert error.message.startswith("the current directory can't be read")
