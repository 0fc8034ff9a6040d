"""What a reproduction says before and while the new run trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import UserError
from common.storage.json_files import write_json
from common.tools.reproduce import reproduction
from common.tools.reproduce.compared_run import NO_FOLDER, ComparedRun
from common.tools.reproduce.fact_differences import differences_of
from common.tools.reproduce.receipt import FactDifference
from common.tools.reproduce.report import show_differences
from common.tools.reproduce.reproduction import (
    DifferenceReporter,
    ReproductionRequest,
    claim_folder,
    train,
)
from tests.unit.tools.reproduce.made_up_runs import write_run

DATA = {"name": "digits", "fingerprint": "one"}


@pytest.fixture
def old(tmp_path: Path) -> ComparedRun:
    """Return the run to reproduce."""
    return write_run(tmp_path / "old", data=DATA)


def test_other_data_are_told_before_the_training(
    old: ComparedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As soon as the new run has written what it reads; only once."""
    write_run(tmp_path / "new", data={**DATA, "fingerprint": "two"})
    (tmp_path / "new" / "provenance" / "attempts.json").unlink()  # written a little later
    reporter = DifferenceReporter(old, old, [])
    reporter.compare_facts(tmp_path / "new")
    printed = " ".join(capsys.readouterr().out.split())
    assert "this is a different experiment: data's fingerprint was one and is" in printed
    assert "Ctrl-C stops it" in printed
    reporter.compare_facts(tmp_path / "new")
    assert capsys.readouterr().out == ""


def test_what_is_on_the_screen_is_not_repeated(
    old: ComparedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what is new is shown while the new run trains, and after it."""
    new = write_run(tmp_path / "new", data=DATA, environment={"world_size": 2})
    reporter = DifferenceReporter(old, old, differences_of(old, new))
    reporter.compare_facts(new.directory)
    assert capsys.readouterr().out == ""
    other = write_run(tmp_path / "other", data=DATA, environment={"threads_per_process": 3})
    reporter = DifferenceReporter(write_run(tmp_path / "first", data=DATA), old, [])
    reporter.show_more(differences_of(other, new))
    assert "more differences" in capsys.readouterr().out


def test_interrupted_reproduction_keeps_the_time_of_its_start(
    old: ComparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that continues it begins nothing new."""
    request = ReproductionRequest(old.directory, tmp_path / "new", (), None, False)
    times = iter(("2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"))
    monkeypatch.setattr(reproduction, "current_time", lambda: next(times))
    first = claim_folder(request, old)
    assert first.began == "2026-01-01T00:00:00+00:00"
    assert claim_folder(request, old) == first


def test_command_that_trained_nothing_may_be_repeated_with_other_flags(
    old: ComparedRun, tmp_path: Path
) -> None:
    """The data may have been moved, and then the repetition names the new place."""
    request = ReproductionRequest(old.directory, tmp_path / "new", (), None, False)
    claim_folder(request, old)
    flags = ("--dataset", "elsewhere")
    assert claim_folder(replace(request, flags=flags), old).flags == [*flags]


def test_folder_of_another_reproduction_is_refused(old: ComparedRun, tmp_path: Path) -> None:
    """The message says whether the run differs or its flags."""
    request = ReproductionRequest(old.directory, tmp_path / "new", (), None, False)
    claim_folder(request, old)
    write_json(tmp_path / "new" / "config.json", {})  # the training has begun
    with pytest.raises(UserError, match=r"with other flags \(no flags of the recipe\): pass"):
        claim_folder(replace(request, flags=("--seed", "1")), old)
    other = write_run(tmp_path / "other", data=DATA)
    other_config = other.saved_config.model_copy(update={"run_id": "another"})
    with pytest.raises(UserError, match=f"reproduction of another run, .* in {old.directory}: "):
        claim_folder(request, replace(other, saved_config=other_config))


class FailingRun:
    """A launched run that ends after its first row, because its data are gone."""

    def __init__(self, command: list[str], directory: Path, environment: dict[str, str]) -> None:
        write_run(directory, losses=(1.5,))
        write_json(directory / "status.json", {"status": "failed", "run_id": directory.name})
        (directory / "summary.json").unlink()

    def follow(self) -> Iterator[None]:
        yield from ()

    def close(self) -> None:
        pass

    def reason(self) -> str:
        return "the data are gone"


@pytest.mark.parametrize(
    ("folder", "advice_on_paths"),
    [
        ("/nowhere", ""),
        (
            NO_FOLDER,
            "; if data or a checkpoint is missing on this machine, repeat it with --dataset PATH, "
            "--model PATH or --init-from PATH after the run, and with another --output-dir",
        ),
    ],
)
def test_run_that_ends_midway_gets_the_advice_of_its_kind(
    folder: str, advice_on_paths: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A published run has names in the place of paths, which may be missing at any update."""
    attempt = {"trees": [{"folder": folder, "commit": "ab" * 20}]}
    old = write_run(tmp_path / "old", data=DATA, attempt=attempt)
    monkeypatch.setattr(reproduction, "LaunchedRun", FailingRun)
    request = ReproductionRequest(old.directory, tmp_path / "new", (), None, False)
    with pytest.raises(UserError) as refused:
        train(request, old, [], {}, DifferenceReporter(old, old, []))
    assert "ended at update 2 of 6: the data are gone" in refused.value.message
    advice = f"fix the reported error, then repeat the command{advice_on_paths}"
    assert refused.value.advice == advice


class UnstartedRun(FailingRun):
    """A launched run that ends before it has written its configuration."""

    def __init__(self, command: list[str], directory: Path, environment: dict[str, str]) -> None:
        pass


@pytest.mark.parametrize("folder", ["/nowhere", NO_FOLDER])
def test_run_that_did_not_begin_gets_advice_on_moved_data(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data of any run may have been moved, and the same folder serves for the repetition."""
    attempt = {"trees": [{"folder": folder, "commit": "ab" * 20}]}
    old = write_run(tmp_path / "old", data=DATA, attempt=attempt)
    monkeypatch.setattr(reproduction, "LaunchedRun", UnstartedRun)
    request = ReproductionRequest(old.directory, tmp_path / "new", (), None, False)
    with pytest.raises(UserError, match="did not begin to train: the data are gone") as refused:
        train(request, old, [], {}, DifferenceReporter(old, old, []))
    assert refused.value.advice is not None
    assert "repeat it with --dataset PATH" in refused.value.advice
    assert "--output-dir" not in refused.value.advice


class StoppedRun(FailingRun):
    """A launched run that a signal stops after its first row."""

    def __init__(self, command: list[str], directory: Path, environment: dict[str, str]) -> None:
        super().__init__(command, directory, environment)
        write_json(directory / "status.json", {"status": "preempted", "run_id": directory.name})


def test_run_that_a_signal_stopped_needs_no_mending(
    old: ComparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command continues it."""
    monkeypatch.setattr(reproduction, "LaunchedRun", StoppedRun)
    request = ReproductionRequest(old.directory, tmp_path / "stopped", (), None, False)
    with pytest.raises(UserError) as refused:
        train(request, old, [], {}, DifferenceReporter(old, old, []))
    assert refused.value.advice == "repeat the command, which continues the new run"


def test_packages_that_compute_nothing_are_only_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Dozens of packages may have changed. Those that can change bits are named."""

    def version(package: str, changes_bits: bool) -> FactDifference:
        return FactDifference(
            fact=f"version of {package}", before="1.0", now="2.0", changes_bits=changes_bits
        )

    show_differences([version("torch", True), version("rich", False), version("yarl", False)])
    printed = capsys.readouterr().out
    assert "version of torch" in printed
    assert "rich" not in printed
    assert "2 other packages differ" in printed
    show_differences([version("rich", False)])
    assert capsys.readouterr().out.startswith("1 other package differs")
