"""A run's files, edited or damaged anywhere: the run resumes, or a sentence names the file."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.run_directory.records import MANIFEST
from common.storage.digests import signed
from tests.damage import MISSING, broken, wrong
from tests.own_errors import require_no_own_class
from tests.small_run import FLAGS, STEPS, digest, prepared, run

pytestmark = pytest.mark.usefixtures("quick_runs")

CHECKPOINTS = [Path("checkpoints", f"step-{step:08d}") for step in STEPS]
# What an edit puts in the place of a value.
OTHERS: list[Any] = [MISSING, None, "x", -1, 1.5, 10**20, True, [], {}, [[[]]], {"x": {"y": 0}}]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed between its last update and its end."""
    directory = tmp_path_factory.mktemp("killed") / "run"
    with prepared():
        assert run(*FLAGS, "--output-dir", directory)[0] is None
    for name in ("summary.json", "memory.json"):
        (directory / name).unlink()
    shutil.rmtree(directory / "model")
    (directory / "status.json").write_text('{"status": "running", "global_step": 4}')
    return directory


def damaged_contents(path: Path) -> Iterator[bytes]:
    """Yield damaged contents of a file: other text, cut, with another byte, or a part twice."""
    yield from (b"", b"\xff\xfe", b"[]", b"null", b"{}", b'{"a": ' * 100_000, b"\0" * 99)
    yield b'{"a": ' * 400 + b"1" + b"}" * 400
    yield from broken(path.read_bytes(), 40)


def digests_of(directory: Path) -> set[str]:
    """Return digests of all files of a run, except `status.json` and the lock."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {digest(path) for path in files if path.name not in ("status.json", ".lock")}


def require_a_sentence(error: BaseException | None, directory: Path) -> None:
    """Check that an error is one short sentence that names the run or a flag."""
    assert isinstance(error, UserError), repr(error)
    assert "\n" not in error.message
    assert len(error.message) < 600
    require_no_own_class(error)
    assert str(directory) in error.message or "--" in error.message, error.message


def go_on(directory: Path, *flags: object) -> bool:
    """Return whether a run resumes and finishes; if not, check its sentence and its files."""
    before = digests_of(directory)
    error, _ = run("--resume", directory, *flags)
    if isinstance(error, UserError) and "worse than --target" in error.message:
        return True  # the edit set a target, which the run missed
    if error is None:
        assert json.loads((directory / "status.json").read_text())["status"] == "finished"
        return True
    require_a_sentence(error, directory)
    assert before <= digests_of(directory)
    return False


@pytest.fixture
def share(thorough: bool) -> int:
    """One in `share` cases is tried."""
    return 20 if thorough else 40


def tried(cases: Iterator[Any], share: int) -> Iterator[Any]:
    """Yield a random one in `share` of the cases, the same ones in each run."""
    chance = random.Random(0)
    return (case for case in cases if chance.random() < 1 / share)


def test_edited_config(killed: Path, tmp_path: Path, share: int) -> None:
    """Each value of `config.json` is removed or replaced by one of another type.

    The digest in the file is right, unless it is removed itself.
    """
    directory = tmp_path / "run"
    facts = json.loads((killed / "config.json").read_text())
    ends = [0, 0]
    for _, changed in tried(wrong(facts, OTHERS, every_item=False), share):
        shutil.copytree(killed, directory)
        if "sha256" in changed:
            changed = signed(changed)
        (directory / "config.json").write_text(json.dumps(changed))
        ends[go_on(directory)] += 1
        shutil.rmtree(directory)
    assert min(ends) > 0, ends


def test_edit_of_a_signed_config_is_refused(killed: Path, tmp_path: Path, share: int) -> None:
    """A change of any value is refused, also if the digest itself is missing."""
    directory = tmp_path / "run"
    shutil.copytree(killed, directory)
    facts = json.loads((killed / "config.json").read_text())
    for description, changed in tried(wrong(facts, OTHERS, every_item=False), share):
        if changed == facts:
            continue
        (directory / "config.json").write_text(json.dumps(changed))
        assert not go_on(directory), description


def test_edited_manifest(killed: Path, tmp_path: Path, share: int) -> None:
    """An edited manifest with the right digest is refused, or the run resumes."""
    directory = tmp_path / "run"
    manifest = json.loads((killed / CHECKPOINTS[1] / MANIFEST).read_text())
    ends = [0, 0]
    for _, changed in tried(wrong(manifest, OTHERS, every_item=False), 3 * share):
        shutil.copytree(killed, directory)
        if "sha256" in changed:
            changed = signed(changed)
        (directory / CHECKPOINTS[1] / MANIFEST).write_text(json.dumps(changed))
        ends[go_on(directory)] += 1
        shutil.rmtree(directory)
    assert min(ends) > 0, ends


def test_edited_status_and_metrics(killed: Path, tmp_path: Path, share: int) -> None:
    """A resume does not need these files, so the run resumes whatever they contain."""
    directory = tmp_path / "run"
    rows = (killed / "metrics.jsonl").read_text().splitlines()
    status = json.loads((killed / "status.json").read_text())
    changes = [("status.json", json.dumps(changed)) for _, changed in wrong(status, OTHERS)]
    changes += [
        ("metrics.jsonl", "\n".join([*rows[:-1], json.dumps(changed), rows[-1]]))
        for _, changed in wrong(json.loads(rows[-1]), OTHERS)
    ]
    for name, text in tried(iter(changes), share):
        shutil.copytree(killed, directory)
        (directory / name).write_text(text)
        assert go_on(directory)
        shutil.rmtree(directory)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes that have names")
def test_pipe_in_the_place_of_a_file(killed: Path, tmp_path: Path) -> None:
    """A resume does not read a pipe that replaces a file, because it would wait for ever."""

    def give_up(*_: object) -> None:
        raise KeyboardInterrupt  # which nothing turns into a sentence

    directory = tmp_path / "run"
    before = signal.signal(signal.SIGALRM, give_up)
    files = [path.relative_to(killed) for path in killed.rglob("*") if path.is_file()]
    for name in (path for path in files if path.name != ".lock"):
        shutil.copytree(killed, directory)
        (directory / name).unlink()
        os.mkfifo(directory / name)
        signal.alarm(60)
        try:
            error, _ = run("--resume", directory)
        except KeyboardInterrupt:
            pytest.fail(f"{name} is read, or written to, for ever")
        finally:
            signal.alarm(0)
        assert error is None or isinstance(error, UserError), f"{name}: {error!r}"
        assert error is None or str(directory) in error.message, name
        shutil.rmtree(directory)
    signal.signal(signal.SIGALRM, before)


def test_broken_bytes(killed: Path, tmp_path: Path, share: int) -> None:
    """Each file is cut, flipped or replaced; a resume skips a damaged checkpoint."""
    directory = tmp_path / "run"
    files = [
        path.relative_to(killed)
        for path in sorted(killed.rglob("*"))
        if path.is_file() and path.name != ".lock"
    ]
    cases = ((name, content) for name in files for content in damaged_contents(killed / name))
    for name, content in tried(cases, share):
        shutil.copytree(killed, directory)
        (directory / name).write_bytes(content)
        resumed = go_on(directory)
        assert resumed or name.name == "config.json", name
        shutil.rmtree(directory)
