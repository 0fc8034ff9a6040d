"""Finished checkpoints: a run resumes from the newest whole one, whatever happened to others."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from common.checkpoints.folders import (
    damage,
    damage_of_best_model,
    step_folders,
)
from common.errors import UserError
from common.storage.digests import signed
from tests.unit.checkpoint_store import checkpoints_in, choose, newest_whole
from tests.unit.checkpoints.test_store import contents_of, killed_at, names_in, save
from tests.unit.manifest_facts import identity_at


def test_steps_are_compared_as_numbers(tmp_path: Path) -> None:
    """A step may have more digits than the folder's name pads to."""
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step)
    assert newest_whole(tmp_path)[0] == tmp_path / "step-100000000"
    choose(tmp_path, "step-99999999")
    assert newest_whole(tmp_path)[0] == tmp_path / "step-99999999"


@pytest.mark.parametrize("name", ["step-3", "step-00000003.superseded", "step-old"])
def test_invalid_checkpoint_name_is_refused(tmp_path: Path, name: str) -> None:
    """An invalid name is not taken for a new start, which would put all checkpoints aside."""
    save(tmp_path, 3)
    with pytest.raises(UserError, match=f"{name} is not the name of a checkpoint"):
        newest_whole(tmp_path, up_to=name)


def damages(path: Path) -> Iterator[bytes | None]:
    """Yield damaged contents: flipped bits, truncated, extended, replaced; None for no file."""
    whole = path.read_bytes()
    generator = random.Random(path.name)
    places = {0, 1, 7, 8, 9, len(whole) - 1, *(generator.randrange(len(whole)) for _ in range(60))}
    for place in sorted(places):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << generator.randrange(8)
        yield bytes(flipped)
    yield from (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0", b"\xff\xfe", b"{}", b"[]")
    yield from (b"null", b'{"files": 3, "sha256": "0"}', b"[" * 100_000, None)


def test_every_damaged_file_is_named(tmp_path: Path) -> None:
    """The problem names the file, and the run resumes from the checkpoint before."""
    for step in (3, 6):
        save(tmp_path, step)
    old, new = step_folders(tmp_path)
    for path in sorted(new.iterdir()):
        whole = path.read_bytes()
        for broken in damages(path):
            replace_content(path, broken)
            newest, problems = newest_whole(tmp_path)
            is_harmless = path.suffix == ".json" and is_same_json(broken, whole)
            assert newest == (new if is_harmless else old)
            assert is_harmless or str(path) in problems[0]
            path.write_bytes(whole)
    assert newest_whole(tmp_path) == (new, [])


def replace_content(path: Path, content: bytes | None) -> None:
    """Write other content to a file, or remove the file if there is None."""
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


def is_same_json(broken: bytes | None, whole: bytes) -> bool:
    """Return whether a manifest means the same, for example if a space became a tab."""
    try:
        return json.loads(broken or b"") == json.loads(whole)
    except (ValueError, RecursionError):
        return False


def test_damaged_frozen_weights_damage_every_checkpoint_that_needs_them(tmp_path: Path) -> None:
    """They are verified like the checkpoint's own files."""
    for step in (3, 6):
        save(tmp_path, step)
    path = tmp_path / "frozen-model.safetensors"
    whole = path.read_bytes()
    for broken in damages(path):
        replace_content(path, broken)
        newest, problems = newest_whole(tmp_path)
        assert newest is None
        assert len(problems) == 2
        assert all(str(path) in problem for problem in problems)
        path.write_bytes(whole)
    # A new start writes the frozen weights again.
    path.write_bytes(b"")
    assert choose(tmp_path, None) is None
    save(tmp_path, 1)
    assert newest_whole(tmp_path) == (tmp_path / "step-00000001", [])
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "change",
    [
        *("ranks", "parts", "files", "rank", "receipt", "size", "none"),
        *("parts_described", "class", "groups", "data", "sizes"),
    ],
)
def test_manifest_with_invalid_content_is_damaged(tmp_path: Path, change: str) -> None:
    """Even a correct digest does not make such a manifest valid, and there is no traceback."""
    save(tmp_path, 3)
    path = tmp_path / "step-00000003" / "manifest.json"
    manifest = json.loads(path.read_text())
    if change in manifest:
        manifest[change] = 3
    elif change == "rank":
        manifest["ranks"] = [None]
    elif change == "none":
        manifest["ranks"] = []
    elif change in ("class", "groups"):
        manifest["parts_described"] = {"model": {"class": "Net", change: [3]}}
    elif change == "sizes":
        manifest["data"]["sizes"] = ["x"]
    else:
        manifest["files"]["model.safetensors"] = 3 if change == "receipt" else {"size": "x"}
    path.write_text(json.dumps(signed(manifest)))
    newest, problems = newest_whole(tmp_path)
    assert newest is None
    assert str(path.parent) in problems[0]


def test_plain_files_with_checkpoint_names_are_ignored_and_removed(tmp_path: Path) -> None:
    """Choosing, putting aside, cleaning up and saving all work in spite of them."""
    save(tmp_path, 3)
    for name in ("step-00000009", "step-00000001", "step-00000005.unfinished", "step-notes"):
        (tmp_path / name).write_text("a file")
    (tmp_path / "step-00000004.superseded").write_text("a file")
    newest, problems = newest_whole(tmp_path)
    assert newest == tmp_path / "step-00000003"
    assert problems == [f"{tmp_path}/step-00000009/manifest.json does not exist"]
    assert choose(tmp_path, None) == newest
    checkpoints = save(tmp_path, 9, keep=1)
    assert checkpoints.failure is None
    assert names_in(tmp_path) == ["frozen-model.safetensors", "step-00000009", "step-notes"]


def test_kill_while_putting_checkpoints_aside_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint that the run resumes from is whole at each moment."""
    for moment in range(1000):
        folder = tmp_path / str(moment)
        for step in (3, 6, 9):
            save(folder, step, keep=3)
        chosen = folder / "step-00000003"
        if not killed_at(monkeypatch, moment, partial(choose, folder, chosen.name)):
            break
        assert newest_whole(folder, up_to=chosen.name) == (chosen, [])
        choose(folder, chosen.name)
        assert newest_whole(folder) == (chosen, [])
    assert moment >= 4


# Checkpoints of another run.


def save_of(folder: Path, step: int, run_id: str, keep: int = 2) -> None:
    """Write a best model and a checkpoint of the run with this identity."""
    checkpoints = checkpoints_in(folder, keep=keep, run_id=run_id)
    contents = contents_of(step)
    contents.lasting_files = {}
    checkpoints.save_best(step, {"weight": torch.full((2,), float(step))})
    checkpoints.save(step, contents, identity_at(step, run_id=run_id))
    checkpoints.wait()
    assert checkpoints.failure is None


def test_checkpoints_of_another_run_are_put_aside_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both newer and older ones move to a folder of their own with their best models, and stay
    usable.
    """
    folder = tmp_path / "own"
    other = tmp_path / "other"
    for step in (3, 6):
        save_of(folder, step, "mine")
    for step in (4, 9):
        save_of(other, step, "its")
    shutil.copytree(other, folder, dirs_exist_ok=True)
    assert choose(folder, None, "mine") == folder / "step-00000006"
    output = capsys.readouterr().out
    assert "step-00000009 was written by another run" in output
    aside = folder / "of-another-run"
    assert newest_whole(aside, None, "its") == (aside / "step-00000009", [])
    assert damage_of_best_model(aside / "step-00000009") is None
    for step in (7, 9, 10):
        save_of(folder, step, "mine", keep=1)
    assert len(step_folders(aside)) == 2
    # Another run's checkpoint that is copied in during training replaces none of the run's own.
    shutil.copytree(other / "step-00000009", folder / "step-00000099")
    save_of(folder, 11, "mine", keep=1)
    assert newest_whole(folder, None, "mine")[0] == folder / "step-00000011"
    assert (folder / "step-00000099").exists()


@pytest.mark.parametrize("has_own", [False, True], ids=["none", "damaged ones"])
def test_another_runs_whole_checkpoints_stay_apart_from_damaged_ones(
    has_own: bool, tmp_path: Path
) -> None:
    """Without a whole checkpoint of its own, a run still sets another run's checkpoints apart."""
    folder = tmp_path / "own"
    other = tmp_path / "other"
    save_of(other, 9, "its")
    folder.mkdir()
    if has_own:
        save_of(folder, 3, "mine")
        (folder / "step-00000003" / "manifest.json").write_text("{}")
    shutil.copytree(other, folder, dirs_exist_ok=True)
    assert choose(folder, None, "mine") is None
    aside = folder / "of-another-run"
    assert newest_whole(aside, None, "its") == (aside / "step-00000009", [])
    put_aside = tmp_path / "own-put-aside"
    assert [path.name for path in step_folders(put_aside)] == ["step-00000003"] * has_own


def test_damaged_checkpoints_are_put_aside_not_removed(tmp_path: Path) -> None:
    """Damaged checkpoints stay for a repair by the user, and the run starts again."""
    folder = tmp_path / "checkpoints"
    for step in (3, 6):
        save(folder, step)
    path = folder / "frozen-model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(b"damaged")
    assert choose(folder, None) is None
    save(folder, 1)
    assert newest_whole(folder)[0] == folder / "step-00000001"
    aside = tmp_path / "checkpoints-put-aside"
    (aside / path.name).write_bytes(whole)
    assert newest_whole(aside) == (aside / "step-00000006", [])


def test_damaged_named_checkpoint_is_refused(tmp_path: Path) -> None:
    """If no earlier one is whole, newer ones are not put aside for a start from update 0."""
    for step in (3, 6, 9):
        save(tmp_path, step, keep=3)
    (tmp_path / "step-00000003" / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="no checkpoint up to step-00000003 can be used"):
        choose(tmp_path, "step-00000003")
    assert len(step_folders(tmp_path)) == 3


@pytest.mark.parametrize("is_newest_whole", [True, False])
def test_name_before_the_first_checkpoint_is_refused(is_newest_whole: bool, tmp_path: Path) -> None:
    """The message names the first checkpoint, and the newest one if it is whole."""
    for step in (3, 6):
        save(tmp_path, step)
    if not is_newest_whole:
        for step in (3, 6):
            (tmp_path / f"step-{step:08d}" / "manifest.json").write_text("{}")
    with pytest.raises(UserError) as refused:
        choose(tmp_path, "step-00000002")
    message = refused.value.message
    assert "no checkpoint up to step-00000002, because its first one is step-00000003" in message
    assert ("the newest checkpoint, step-00000006" in message) == is_newest_whole
    assert ("restore a checkpoint from a backup" in message) != is_newest_whole
    assert len(step_folders(tmp_path)) == 2


def test_renamed_checkpoint_gets_its_name_back(tmp_path: Path) -> None:
    """The manifest decides which update a checkpoint holds."""
    save(tmp_path, 3)
    (tmp_path / "step-00000003").rename(tmp_path / "step-00000009")
    assert "was renamed from step-00000003" in str(damage(tmp_path / "step-00000009"))
    assert choose(tmp_path, None) == tmp_path / "step-00000003"
