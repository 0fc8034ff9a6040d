"""A state machine over run directories: no run ever takes the files of another run for its own.

In random order, the machine starts runs, kills them at any moment, starts them twice and resumes
them. It copies, edits, damages, renames and removes their files. Each command must succeed or end
with one sentence, resume from the newest whole checkpoint of its own run, and lose no checkpoint of
another run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import PartialState
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from torch import nn

from common.checkpoints.export import save_model
from common.checkpoints.newest import restore_newest
from common.checkpoints.state import Parts
from common.checkpoints.store import Checkpoints
from common.config import TrainingConfig
from common.errors import UserError
from common.flags import role_of
from common.lifecycle.saving import named_checkpoint
from common.run_directory.finished_model import WEIGHTS, model_folder
from common.run_directory.records import MODEL_JSON, RunIdentity
from common.run_directory.resume import resumed_config
from common.run_directory.taking import take_run_directory
from common.storage.digests import signed
from common.storage.files import UNFINISHED, locked, open_to_append
from tests.small_run import Inline
from tests.unit.checkpoints.test_store import killed_at
from tests.unit.manifest_facts import identity_at
from tests.unit.saved_config import contents_with

NAMES = ("one", "two")
LAST = 6  # updates of a run
KEEP = 2
ENDED: Counter[str] = Counter()  # how often commands began, resumed, were refused and so on
LOCKS: list[contextlib.ExitStack] = []  # of the directories that were taken


@dataclass(kw_only=True)
class Config(TrainingConfig):
    """Each run has its own seed, which is also the initial value of all its weights."""

    dropout: float = 0.0


class Counted:
    """The progress of a training: the number of updates."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        """Return the step."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the step."""
        self.step = state["step"]


def remembered_lock(path: Path, timeout: float, flag: str | None) -> contextlib.ExitStack:
    """Lock as `locked` does, and remember the lock: the test releases it after a kill."""
    lock = contextlib.ExitStack()
    lock.enter_context(locked(path, timeout, flag))
    LOCKS.append(lock)
    return lock


class Attempt:
    """One process that trains: uses the files of a run as a recipe does, with a tiny model."""

    def __init__(self, config: Config) -> None:
        """Take the directory, restore and write `config.json`; raise what ends the process."""
        self.config = config
        self.directory = take_run_directory(config, "tiny", timeout=0)
        try:
            self.begin()
        except BaseException:
            self.directory.release()
            raise

    def begin(self) -> None:
        """Make the model, restore a checkpoint, and write `config.json`."""
        self.model = nn.Linear(2, 1, bias=False)
        self.progress = Counted()
        self.parts = Parts(0, mesh=None)
        nn.init.constant_(self.model.weight, self.config.seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.parts.add("model", self.model)
        self.parts.add("optimizer", self.optimizer)
        self.parts.add("progress", self.progress)
        self.checkpoints = Checkpoints(
            self.directory.path / "checkpoints",
            0,
            1,
            KEEP,
            5.0,
            torch.device("cpu"),
            run_id=self.directory.run_id,
            require_ownership=self.directory.require_ownership,
        )
        self.manifest = None
        if self.config.resume is not None:
            named = named_checkpoint(Path(self.config.resume))
            self.manifest = restore_newest(self.checkpoints, named, self.parts, self.identity())
        facts = contents_with(
            environment={"effective_batch_size": self.config.batch_size},
            run_id=self.directory.run_id,
        )
        facts["config"] = vars(self.config)
        facts["given"] = vars(self.config)
        self.directory.write("config.json", facts)

    def identity(self) -> RunIdentity:
        """Return the facts of the run that a manifest holds."""
        flags = {}
        for name, value in vars(self.config).items():
            if not role_of(Config, name).free_on_resume:
                flags[name] = value
        del flags["mixed_precision"]
        return identity_at(
            self.progress.step,
            run_id=self.directory.run_id,
            flags=flags,
            parts_described=self.parts.parts_described,
        )

    def train(self, updates: int) -> None:
        """Make updates, each with a checkpoint, some with a better model; finish at the last."""
        for _ in range(updates):
            if self.progress.step == LAST:
                break
            self.progress.step += 1
            with torch.no_grad():
                self.model.weight[0, 1] = self.progress.step
            if self.progress.step % 2:
                self.checkpoints.save_best(self.progress.step, {"best": self.model.weight})
            self.checkpoints.save(self.progress.step, self.parts.collect(), self.identity())
            self.checkpoints.wait()
            if self.checkpoints.failure is not None:
                raise UserError(self.checkpoints.failure.message)
            with open_to_append(self.directory.path / "metrics.jsonl") as file:
                file.write(json.dumps({"progress/global_step": self.progress.step}) + "\n")
        if self.progress.step == LAST:
            facts = {"run_id": self.directory.run_id}
            save_model(self.directory.path / "model", self.model, facts, card="", skeleton=None)
            self.directory.write_status("finished", LAST)


def command(directory: Path, resume: str | None, seed: int | None) -> Config:
    """Read a command line, as `parse_config` does."""

    def parse(defaults: Config) -> Config:
        config = replace(defaults, resume=resume, output_dir=str(directory))
        return config if seed is None else replace(config, seed=seed)

    new_run_defaults = Config(mixed_precision="no", tracker="none")
    if resume is None:
        return parse(new_run_defaults)
    return resumed_config(Config, parse, new_run_defaults, resume, str(directory), "tiny")


Whole = dict[str, tuple[str, int, Path]]  # by digest of the manifest: run, update, place


def whole_checkpoints(root: Path) -> Whole:
    """Return all whole checkpoints anywhere under a folder, without asking the code under test.

    A checkpoint exists once its folder has its final name: a kill just before leaves none.
    """
    checkpoints: Whole = {}
    for path in root.rglob("manifest.json"):
        if path.parent.name.endswith(UNFINISHED):
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            manifest = json.loads(path.read_text())
            if manifest != signed(manifest):
                continue
            files = manifest["files"].items()
            if all(is_file_whole(path.parent / n, r) for n, r in files if "best-" not in n):
                place = manifest["run_id"], manifest["global_step"], path.parent
                checkpoints[f"{manifest['sha256']}"] = place
    return checkpoints


def is_file_whole(path: Path, receipt: dict[str, Any]) -> bool:
    """Whether a file has the digest of its receipt."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(path.read_bytes()).hexdigest() == receipt["sha256"]
    return False


class Runs(RuleBasedStateMachine):
    """Two run directories, and all that can happen to them."""

    def __init__(self) -> None:
        """Make a folder for them."""
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.seeds: dict[str, int] = {}  # by the identity of a run
        self.next_seed = 1

    def teardown(self) -> None:
        """Remove the folder."""
        self.folder.cleanup()

    # What a user starts.

    def launch(
        self, directory: Path, config: Callable[[], Config], updates: int, moment: int | None
    ) -> None:
        """Run a command until it ends or is killed; check that no run has lost anything."""
        before = whole_checkpoints(self.root)
        attempts: list[Attempt] = []

        def work() -> None:
            attempts.append(Attempt(config()))
            self.check_restored(attempts[0], before)
            attempts[0].train(updates)

        with ending_well(), pytest.MonkeyPatch.context() as patch:
            try:
                if moment is None:
                    work()
                elif killed_at(patch, moment, work):
                    ENDED["killed"] += 1
            finally:
                # The kernel releases the lock of a process that was killed.
                while LOCKS:
                    LOCKS.pop().close()
        if attempts:
            ENDED["began" if attempts[0].manifest is None else "resumed"] += 1
        self.check_kept(directory, before, attempts[0] if attempts else None)
        if (directory / "model").exists():
            self.read_export(directory)

    def check_restored(self, attempt: Attempt, before: Whole) -> None:
        """Check that the run resumed with the newest whole weights that `--resume` allows."""
        run_id = attempt.directory.run_id
        config = attempt.config
        if config.resume is None:
            assert run_id not in self.seeds
            self.seeds[run_id] = config.seed
            return
        # Whatever was edited or copied in, the run keeps its identity, also if it starts at update
        # 0.
        # A start that was killed may have written the run's config before it came to this check.
        assert self.seeds.setdefault(run_id, config.seed) == config.seed
        weight = attempt.model.weight[0].tolist()
        assert weight[0] == config.seed
        if attempt.manifest is not None:
            assert weight == [self.seeds[run_id], attempt.progress.step]
        last = LAST
        if Path(config.resume).name.startswith("step-"):
            last = int(Path(config.resume).name[5:])
        folder = attempt.directory.path / "checkpoints"
        steps = [
            step
            for owner, step, path in before.values()
            if owner == run_id and path.parent == folder and step <= last
            and path.name == f"step-{step:08d}"
        ]  # fmt: skip
        assert attempt.progress.step >= max(steps, default=0)

    def check_kept(self, directory: Path, before: Whole, attempt: Attempt | None) -> None:
        """Check that other runs lose no checkpoint, and this run not its newest whole one."""
        after = whole_checkpoints(self.root)
        own_run_id = None if attempt is None else attempt.directory.run_id
        for digest, (owner, _, path) in before.items():
            assert digest in after or owner == own_run_id, f"{path} of another run was lost"
        named = attempt is not None and "step-" in (attempt.config.resume or "")
        steps = [step for owner, step, _ in before.values() if owner == own_run_id]
        steps_after = [step for owner, step, _ in after.values() if owner == own_run_id]
        if steps and not named:
            assert steps_after
            assert max(steps_after) >= max(steps), "the newest whole checkpoint was lost"
        if steps and named:
            assert steps_after, "all whole checkpoints were lost"

    def new_config(self, directory: Path) -> Config:
        """Return the configuration of a fresh start."""
        self.next_seed += 1
        return command(directory, None, self.next_seed)

    @rule(
        name=st.sampled_from(NAMES),
        updates=st.integers(0, LAST),
        moment=st.none() | st.integers(0, 60),
        clears=st.booleans(),
    )
    def start(self, name: str, updates: int, moment: int | None, clears: bool) -> None:
        """Start a run, perhaps after the directory was removed."""
        directory = self.root / name
        if clears:
            shutil.rmtree(directory, ignore_errors=True)
        self.launch(directory, lambda: self.new_config(directory), updates, moment)

    @rule(
        name=st.sampled_from(NAMES),
        updates=st.integers(0, LAST),
        moment=st.none() | st.integers(0, 60),
        step=st.none() | st.integers(1, LAST),
    )
    def resume(self, name: str, updates: int, moment: int | None, step: int | None) -> None:
        """Resume from the newest checkpoint, or from one that is named."""
        directory = self.root / name
        resumed_from = directory if step is None else directory / "checkpoints" / f"step-{step:08d}"
        self.launch(directory, lambda: command(directory, str(resumed_from), None), updates, moment)

    @rule(name=st.sampled_from(NAMES), updates=st.integers(0, LAST))
    def resume_auto(self, name: str, updates: int) -> None:
        """Start or resume, as a supervisor does with `--resume auto`."""
        directory = self.root / name
        self.launch(directory, lambda: command(directory, "auto", None), updates, None)

    @rule(name=st.sampled_from(NAMES))
    def resume_finished(self, name: str) -> None:
        """Resume a run that is finished: nothing is left to do."""
        directory = self.root / name
        shutil.rmtree(directory, ignore_errors=True)
        self.launch(directory, lambda: self.new_config(directory), LAST, None)
        nothing_to_do = ENDED["nothing to do"]
        self.launch(directory, lambda: command(directory, str(directory), None), LAST, None)
        assert ENDED["nothing to do"] == nothing_to_do + 1

    @rule(name=st.sampled_from(NAMES), resumes=st.booleans(), updates=st.integers(0, LAST))
    def start_twice(self, name: str, resumes: bool, updates: int) -> None:
        """Start twice: the second command is read before the first run gets the lock."""
        directory = self.root / name
        config = None
        with ending_well():
            resume = "auto" if resumes else None
            config = command(directory, resume, None if resumes else self.next_seed + 1)
        self.launch(directory, lambda: self.new_config(directory), updates, None)
        if config is not None:
            second = config
            self.next_seed += 1
            self.launch(directory, lambda: second, updates, None)

    @rule(name=st.sampled_from(NAMES), resume=st.sampled_from([None, "auto"]))
    def start_while_another_runs(self, name: str, resume: str | None) -> None:
        """Start a run while another one uses the directory: it is refused, and changes nothing."""
        directory = self.root / name
        shutil.rmtree(directory, ignore_errors=True)
        with ending_well():
            first = Attempt(self.new_config(directory))
            self.seeds[first.directory.run_id] = first.config.seed
            try:
                first.train(2)
                before = contents(directory)
                with pytest.raises(UserError):
                    Attempt(command(directory, resume, self.next_seed if resume is None else None))
                assert contents(directory) == before
                first.train(1)
            finally:
                first.directory.release()

    @rule(name=st.sampled_from(NAMES))
    def removed_while_it_runs(self, name: str) -> None:
        """Remove the directory during the run: it ends with a sentence, and makes no new folder."""
        directory = self.root / name
        shutil.rmtree(directory, ignore_errors=True)
        with ending_well():
            attempt = Attempt(self.new_config(directory))
            self.seeds[attempt.directory.run_id] = attempt.config.seed
            try:
                attempt.train(1)
                shutil.rmtree(directory)
                with pytest.raises(UserError, match="was removed, moved or replaced"):
                    attempt.train(1)
                assert not directory.exists()
            finally:
                attempt.directory.release()

    # What happens to their files otherwise.

    def files(self, name: str) -> list[Path]:
        """Return the files of a run, without the lock."""
        paths = sorted(path for path in (self.root / name).rglob("*") if path.is_file())
        return [path for path in paths if path.name != ".lock"]

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def damage(self, name: str, data: st.DataObject) -> None:
        """Flip a bit of a file, cut it, or remove it."""
        if files := self.files(name):
            path = data.draw(st.sampled_from(files))
            content = bytearray(path.read_bytes())
            place = data.draw(st.integers(0, max(0, len(content) - 1)))
            way = data.draw(st.sampled_from(["flip", "cut", "remove"]))
            if way == "remove":
                path.unlink()
            elif way == "cut":
                path.write_bytes(content[:place])
            elif content:
                content[place] ^= 1
                path.write_bytes(content)

    @rule(source=st.sampled_from(NAMES), data=st.data())
    def copy_in(self, source: str, data: st.DataObject) -> None:
        """Copy a checkpoint, or a file, of one run into the other's directory."""
        target = NAMES[1 - NAMES.index(source)]
        checkpoints = sorted((self.root / source).glob("checkpoints/step-*"))
        choices = [*checkpoints, *self.files(source)]
        if choices and (self.root / target).exists():
            path = data.draw(st.sampled_from(choices))
            copy = self.root / target / path.relative_to(self.root / source)
            if path.is_dir():
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(path, copy, dirs_exist_ok=True)
            elif not copy.is_dir():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def rename(self, name: str, data: st.DataObject) -> None:
        """Rename a checkpoint to the name of another checkpoint."""
        if checkpoints := sorted((self.root / name).glob("checkpoints/step-*")):
            path = data.draw(st.sampled_from(checkpoints))
            other = path.with_name(f"step-{data.draw(st.integers(1, 2 * LAST)):08d}")
            if not other.exists():
                path.rename(other)

    @rule(
        name=st.sampled_from(NAMES),
        edit=st.sampled_from(["seed", "dropout", "max_grad_norm", "run_id", "another run's"]),
        value=st.integers(0, 3),
    )
    def edit_config(self, name: str, edit: str, value: int) -> None:
        """Edit a flag, or the identity, in `config.json`; or put another run's in its place."""
        path = self.root / name / "config.json"
        other = self.root / NAMES[1 - NAMES.index(name)]
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            facts = json.loads(path.read_text())
            if edit == "another run's":
                facts = json.loads((other / "config.json").read_text())
                if value % 2:
                    shutil.copy(other / "status.json", path.with_name("status.json"))
            elif edit == "run_id":
                facts["run_id"] = f"{value:016x}"
            else:
                facts["config"][edit] = value if edit == "seed" else value / 4
            path.write_text(json.dumps(facts))

    @rule(
        name=st.sampled_from(NAMES),
        pattern=st.sampled_from(
            ["metrics.jsonl", "checkpoints/best-*.safetensors", "model/model.*"]
        ),
        which=st.integers(0, 3),
        is_cut=st.booleans(),
    )
    def damage_beside(self, name: str, pattern: str, which: int, is_cut: bool) -> None:
        """Cut a file that no resume needs, or flip a bit of it: no checkpoint is lost by that."""
        paths = sorted((self.root / name).glob(pattern))
        if paths:
            path = paths[which % len(paths)]
            content = bytearray(path.read_bytes())
            if content:
                content[-1 - which % len(content)] ^= 1
            path.write_bytes(content[: len(content) // 2] if is_cut else content)
            self.read_export(self.root / name)

    def read_export(self, directory: Path) -> None:
        """Use the exported model, as `--init-from` and `predict` do: it is whole, or refused."""
        with ending_well():
            folder = model_folder(directory)
            weights = safetensors.torch.load_file(folder / WEIGHTS)
            run_id = json.loads((folder / MODEL_JSON).read_text()).get("run_id")
            if run_id in self.seeds:
                assert weights["weight"].tolist() == [[self.seeds[run_id], LAST]]
            ENDED["read export"] += 1


def contents(directory: Path) -> dict[str, bytes]:
    """Return the contents of all files of a directory, by path."""
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in paths}


@contextlib.contextmanager
def ending_well() -> Iterator[None]:
    """Accept the ways in which a command may end: success, one sentence, or nothing to do."""
    end: SystemExit | None = None
    try:
        yield
    except SystemExit as ended:
        end = ended
    if isinstance(end, UserError):
        assert end.message
        assert "\n" not in end.message
        ENDED["refused"] += 1
    elif end is not None:
        assert not end.code
        ENDED["nothing to do"] += 1


@pytest.fixture(autouse=True)
def _in_this_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write checkpoints in the test's own thread, and do not wait for the disk."""
    PartialState(cpu=True)
    monkeypatch.setattr("common.checkpoints.store.threading.Thread", Inline)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("common.run_directory.taking.time.sleep", lambda seconds: None)
    monkeypatch.setattr("common.run_directory.taking.locked", remembered_lock)
    monkeypatch.setattr("common.console.messages.print", lambda *_, **__: None, raising=False)


def test_runs_stay_apart(thorough: bool) -> None:
    """Random orders of starts, kills, copies, edits, damage and resumes keep runs apart."""
    run_state_machine_as_test(
        Runs,
        settings=settings(
            max_examples=30 if thorough else 10,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[*HealthCheck],
            derandomize=not thorough,
        ),
    )
    ways = ("began", "resumed", "refused", "nothing to do", "killed", "read export")
    assert all(ENDED[way] > 0 for way in ways), ENDED
