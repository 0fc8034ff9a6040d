"""Checkpoints on disk: complete or absent, whatever stops a save or breaks a file."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from common.checkpoints import publishing, store
from common.checkpoints.folders import (
    damage,
    damage_of_best_model,
    read_manifest,
    step_folders,
)
from common.checkpoints.store import Checkpoints, Contents
from common.checkpoints.tensors import read_tensors, write_tensors
from common.errors import LostProcessError, UserError
from common.run_directory.records import Receipt
from tests.damage import Payload
from tests.unit.checkpoint_store import checkpoints_in, choose, newest_whole
from tests.unit.manifest_facts import identity_at


def contents_of(step: int, rank: int = 0) -> Contents:
    """Return what a rank saves: its own file, and on rank 0 also shared and frozen weights."""
    values = torch.full((3,), float(step))
    contents = Contents(of_rank={"meters": {"seen": step, "rank": rank}})
    contents.files[f"rank-{rank}.safetensors"] = {"mine": values + rank}
    if rank == 0:
        contents.files["model.safetensors"] = {"weight": values}
        contents.shared["log"] = {"step": step}
        contents.lasting_files["frozen-model.safetensors"] = {"frozen": torch.arange(5.0)}
    return contents


def opened(folder: Path, rank: int = 0, world_size: int = 1, keep: int = 2) -> Checkpoints:
    return checkpoints_in(folder, rank, world_size, keep=keep)


def save(folder: Path, step: int, keep: int = 2) -> Checkpoints:
    """Write a checkpoint of one rank."""
    checkpoints = opened(folder, keep=keep)
    checkpoints.save(step, contents_of(step), identity_at(step))
    checkpoints.wait()
    return checkpoints


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_two_ranks_make_one_checkpoint(tmp_path: Path) -> None:
    """The manifest lists the files and states of both ranks. Frozen weights are written once."""
    ranks = [opened(tmp_path, rank, 2) for rank in range(2)]
    for step in (3, 6):
        for rank in reversed(range(2)):
            ranks[rank].save(step, contents_of(step, rank), identity_at(step))
    for checkpoints in ranks:
        checkpoints.wait()
        assert checkpoints.failure is None
    assert names_in(tmp_path) == ["frozen-model.safetensors", "step-00000003", "step-00000006"]
    newest, problems = newest_whole(tmp_path)
    assert newest == tmp_path / "step-00000006"
    assert problems == []
    manifest = read_manifest(newest)
    assert manifest.global_step == 6
    assert manifest.shared == {"log": {"step": 6}}
    assert manifest.of_ranks == [{"meters": {"seen": 6, "rank": rank}} for rank in range(2)]
    written = {"model.safetensors", "rank-0.safetensors", "rank-1.safetensors"}
    assert manifest.files.keys() == written | {"../frozen-model.safetensors"}
    assert {*names_in(newest)} == written | {"manifest.json"}
    assert read_tensors(newest / "rank-1.safetensors")["mine"].tolist() == [7, 7, 7]


def test_frozen_weights_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later checkpoints reuse the file, even after a resume, by its receipt."""
    checkpoints = save(tmp_path, 3)
    written: list[str] = []

    def recording_write(path: Path, *arguments: Any) -> Receipt:
        written.append(path.name)
        return write_tensors(path, *arguments)

    monkeypatch.setattr(store, "write_tensors", recording_write)
    checkpoints.save(6, contents_of(6), identity_at(6))
    checkpoints.wait()
    later = opened(tmp_path)
    newest = tmp_path / "step-00000006"
    later.resume_from(newest, read_manifest(newest), best_is_damaged=False)
    later.save(9, contents_of(9), identity_at(9))
    later.wait()
    assert "frozen-model.safetensors" not in written
    assert names_in(tmp_path) == ["frozen-model.safetensors", "step-00000006", "step-00000009"]
    assert newest_whole(tmp_path) == (tmp_path / "step-00000009", [])


def test_best_model_stays_with_the_checkpoints_that_name_it(tmp_path: Path) -> None:
    """The best model is written at once, and removed with the last checkpoint that names it.

    A damaged best model damages no checkpoint.
    """
    checkpoints = opened(tmp_path)
    weight = torch.zeros(3)
    best = [f"best-{step:08d}.safetensors" for step in (3, 6)]
    checkpoints.save(3, contents_of(3), identity_at(3))
    for step, name in zip((3, 6), best, strict=True):
        checkpoints.save_best(step, {"weight": weight})
        weight += 1
        checkpoints.wait()
        assert name in names_in(tmp_path)
        checkpoints.save(step + 2, contents_of(step), identity_at(step + 2))
    checkpoints.wait()
    assert {*best} < {*names_in(tmp_path)}
    assert read_tensors(tmp_path / best[1])["weight"].tolist() == [1, 1, 1]
    later = opened(tmp_path)
    newest = tmp_path / "step-00000008"
    later.resume_from(newest, read_manifest(newest), best_is_damaged=False)
    later.save(9, contents_of(9), identity_at(9))
    later.wait()
    assert f"../{best[1]}" in read_manifest(tmp_path / "step-00000009").files
    assert {*best} & {*names_in(tmp_path)} == {best[1]}
    (tmp_path / best[1]).write_bytes(b"damaged")
    assert newest_whole(tmp_path) == (tmp_path / "step-00000009", [])
    assert best[1] in (damage_of_best_model(tmp_path / "step-00000009") or "")


def test_failure_to_write_the_best_model_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is reported like that of a checkpoint, and no half-written file is left."""

    def full(path: Path, *arguments: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_tensors", full)
    checkpoints = opened(tmp_path)
    checkpoints.save_best(3, {"weight": torch.zeros(3)})
    checkpoints.wait()
    assert "No space left on device" in str(checkpoints.failure)
    assert not [*tmp_path.glob("best-*")]
    checkpoints.lasting_receipts["best-00000001.safetensors"] = Receipt(size=1, sha256="0")
    checkpoints.save_best(4, {"weight": torch.zeros(3)})
    assert checkpoints.lasting_receipts, "after a failure, nothing is saved and nothing forgotten"


def test_checkpoint_holds_the_state_at_the_call(tmp_path: Path) -> None:
    """Training may change tensors while they are written."""
    checkpoints = opened(tmp_path)
    contents = contents_of(3)
    identity = identity_at(3, list=[1], loss=float("nan"))
    checkpoints.save(3, contents, identity)
    for tensors in contents.files.values():
        for tensor in tensors.values():
            tensor.zero_()
    checkpoints.wait()
    newest = tmp_path / "step-00000003"
    assert read_tensors(newest / "model.safetensors")["weight"].tolist() == [3, 3, 3]
    assert read_manifest(newest).to_json()["list"] == [1]
    assert read_manifest(newest).to_json()["loss"] is None  # JSON has no NaN


def test_states_may_be_nested_deeply(tmp_path: Path) -> None:
    """Pydantic refuses more than 255 levels, so the states of parts bypass it."""
    state: dict[str, Any] = {}
    for _ in range(300):
        state = {"inner": state}
    contents = contents_of(3)
    contents.shared = {"deep": state}
    contents.of_rank = {"deep of rank": state}
    checkpoints = opened(tmp_path)
    checkpoints.save(3, contents, identity_at(3))
    checkpoints.wait()
    assert checkpoints.failure is None
    manifest = read_manifest(tmp_path / "step-00000003")
    assert manifest.recipe == "tiny"
    assert manifest.shared == {"deep": state}
    assert manifest.of_ranks == [{"deep of rank": state}]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    """A signal may ask for a checkpoint at a step that the schedule saves anyway."""
    checkpoints = save(tmp_path, 3)
    written = (tmp_path / "step-00000003").stat().st_mtime_ns
    checkpoints.save(3, contents_of(4), identity_at(3))
    checkpoints.wait()
    assert (tmp_path / "step-00000003").stat().st_mtime_ns == written


def test_resume_from_an_older_checkpoint_puts_newer_ones_aside(tmp_path: Path) -> None:
    """They no longer count as the newest, and stay until a new checkpoint is complete."""
    for step in (3, 6, 9):
        save(tmp_path, step, keep=3)
    old = step_folders(tmp_path)[0]
    assert newest_whole(tmp_path, up_to="step-00000006")[0] == tmp_path / "step-00000006"
    assert choose(tmp_path, old.name) == old
    assert newest_whole(tmp_path) == (old, [])
    assert len([*tmp_path.glob("*.superseded")]) == 2
    save(tmp_path, 4, keep=1)
    assert names_in(tmp_path) == ["frozen-model.safetensors", "step-00000004"]


def test_file_in_place_of_the_folder_is_reported(tmp_path: Path) -> None:
    """The thread that writes survives the error."""
    (tmp_path / "checkpoints").write_text("a file")
    checkpoints = save(tmp_path / "checkpoints", 3)
    assert "rank 0" in str(checkpoints.failure)
    assert newest_whole(tmp_path / "checkpoints") == (None, [])


class Killed(BaseException):
    """An exception that no code catches, as no code runs after kill -9."""


# All calls that change the disk. A run can be killed before and after each of them.
SAVE_FILE = safetensors.torch.save_file
STEPS: list[tuple[Any, str]] = [
    *((os, name) for name in ("mkdir", "open", "fsync", "replace", "rename", "unlink", "rmdir")),
    (shutil, "rmtree"),
    (safetensors.torch, "save_file"),
]


def killed_at(monkeypatch: pytest.MonkeyPatch, moment: int, work: Callable[[], None]) -> bool:
    """Run some work, and kill it before (even moments) or after its `moment // 2`-th disk call.

    Return whether the work got as far as that call.
    """
    count = 0

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            call_number = count
            count += 1
            if call_number == moment // 2 and moment % 2 == 0:
                if real is SAVE_FILE:  # a kill in the middle of the call leaves half a file
                    arguments[1].write_bytes(b"half a file")
                raise Killed
            try:
                return real(*arguments, **keywords)
            finally:
                if call_number == moment // 2:
                    raise Killed

        return call

    with monkeypatch.context() as patch:
        for module, name in STEPS:
            patch.setattr(module, name, counting(getattr(module, name)))
        try:
            work()
        except Killed:
            return True
    return False


def test_kill_during_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest one is the old or the new one, and the resumed run saves as usual."""
    template = tmp_path / "template"
    for step in (3, 6):
        save(template, step)
    shutil.copytree(template / "step-00000006", template / "step-00000008.superseded")
    for moment in range(1000):
        folder = tmp_path / str(moment)
        shutil.copytree(template, folder)
        checkpoints = opened(folder)
        unfinished = folder / "step-00000009.unfinished"
        # This job knows no receipt of frozen weights, so it writes them, too.
        write = partial(checkpoints.write, unfinished, contents_of(9), identity_at(9))
        was_killed = killed_at(monkeypatch, moment, write)
        newest, problems = newest_whole(folder)
        assert problems == []
        assert newest in (folder / "step-00000006", folder / "step-00000009")
        assert read_manifest(newest).global_step == int(newest.name[-1])
        if not was_killed:
            assert newest.name == "step-00000009"
            break
        assert choose(folder, None) == newest
        save(folder, 12)
        assert newest_whole(folder) == (folder / "step-00000012", [])
        assert names_in(folder) == ["frozen-model.safetensors", newest.name, "step-00000012"]
        shutil.rmtree(folder)
    assert moment > 50


def test_files_reach_the_disk_before_the_checkpoints_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power loss, a finished checkpoint has all its files, or its name is not there."""
    calls: list[str] = []

    def record_calls(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*arguments: Any) -> Any:
            paths = [Path(argument).name for argument in arguments[:2] if argument]
            calls.append(f"{name} {' '.join(paths)}")
            return real(*arguments)

        monkeypatch.setattr(module, name, call)

    for module, name in (
        (store, "sync"),
        (publishing, "sync"),
        (os, "rename"),
        (os, "replace"),
    ):
        record_calls(module, name)
    save(tmp_path / "run", 3)
    assert calls == [
        "replace frozen-model.safetensors.unfinished frozen-model.safetensors",
        "sync run",
        f"replace .receipt-0.json.{os.getpid()} receipt-0.json",
        f"replace .manifest.json.{os.getpid()} manifest.json",
        "sync manifest.json",
        "sync step-00000003.unfinished",
        "rename step-00000003.unfinished step-00000003",
        "sync run",
    ]


@pytest.mark.parametrize("module_and_name", STEPS, ids=lambda step: step[1])
def test_any_failed_disk_call_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module_and_name: tuple[Any, str]
) -> None:
    """Training reads `failure`, and a whole checkpoint is still there."""
    module, name = module_and_name
    save(tmp_path, 3, keep=1)
    real = getattr(module, name)

    def fail(*arguments: Any, **keywords: Any) -> Any:
        monkeypatch.setattr(module, name, real)
        raise OSError(28, "No space left on device")

    checkpoints = opened(tmp_path, keep=1)
    monkeypatch.setattr(module, name, fail)
    checkpoints.save(6, contents_of(6), identity_at(6))
    checkpoints.wait()
    assert "No space left on device" in str(checkpoints.failure)
    newest, problems = newest_whole(tmp_path)
    assert newest is not None
    assert problems == []
    checkpoints.save(9, contents_of(9), identity_at(9))  # nothing more is written after a failure
    assert checkpoints.writer is None


def test_failed_allocation_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only errors of the disk are failures of a save."""

    def fail(path: Path, *arguments: object) -> Receipt:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(store, "write_tensors", fail)
    checkpoints = save(tmp_path, 3)
    assert "can't allocate memory" in str(checkpoints.failure)
    assert not step_folders(tmp_path)


def test_damaged_receipt_of_another_rank_is_reported(tmp_path: Path) -> None:
    """The rank that reads it reports it, and no incomplete checkpoint is finished."""
    checkpoints = opened(tmp_path, world_size=2)
    unfinished = tmp_path / "step-00000003.unfinished"
    unfinished.mkdir()
    (unfinished / "receipt-1.json").write_bytes(b"\xff")
    checkpoints.save(3, contents_of(3), identity_at(3))
    checkpoints.wait()
    assert "receipt-1.json can't be read" in str(checkpoints.failure)
    assert not step_folders(tmp_path)


@pytest.mark.parametrize("failing", [0, 1])
def test_failed_rank_is_reported_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The other ranks do not wait for their timeout, and finish no incomplete checkpoint."""

    def written(path: Path, *arguments: Any) -> Receipt:
        if path.name == f"rank-{failing}.safetensors":
            raise OSError(28, "No space left on device")
        return write_tensors(path, *arguments)

    monkeypatch.setattr(store, "write_tensors", written)
    ranks = [opened(tmp_path, rank, 2) for rank in range(2)]
    for rank, checkpoints in enumerate(ranks):
        checkpoints.timeout = 600
        checkpoints.save(3, contents_of(3, rank), identity_at(3))
    for checkpoints in ranks:
        checkpoints.wait()
    assert "No space left" in str(ranks[failing].failure)
    assert f"rank {failing} could not write its part" in str(ranks[1 - failing].failure)
    assert not step_folders(tmp_path)


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_silent_rank_is_named_after_the_timeout(tmp_path: Path, rank: int, other: int) -> None:
    """The end of a run waits for a checkpoint no longer than for a collective."""
    checkpoints = checkpoints_in(tmp_path, rank, world_size=2, keep=1, timeout=0.1)
    checkpoints.save(1, contents_of(1, rank), identity_at(1))
    with pytest.raises(LostProcessError, match=f"rank {other} timed out"):
        checkpoints.wait()
    assert not step_folders(tmp_path)


def test_shorten_wait_shortens_a_wait_that_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure elsewhere, a save does not wait for other ranks until its timeout."""
    monkeypatch.setattr(store, "TIMEOUT_AFTER_ERROR", 0.1)
    checkpoints = checkpoints_in(tmp_path, world_size=2, keep=1, timeout=600)
    checkpoints.save(1, contents_of(1), identity_at(1))
    checkpoints.shorten_wait()
    with pytest.raises(LostProcessError):
        checkpoints.wait()


def test_pickles_in_a_checkpoint_are_never_executed(tmp_path: Path) -> None:
    """Each file in turn becomes a pickle: it counts as damage and cannot be read."""
    save(tmp_path, 3)
    marker = tmp_path / "executed"
    for path in (tmp_path / "step-00000003").iterdir():
        path.write_bytes(pickle.dumps(Payload(marker)))
        assert damage(path.parent) is not None
        with pytest.raises(UserError):
            read_tensors(path)
    assert not marker.exists()
