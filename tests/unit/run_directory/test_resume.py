"""Which run `--resume` selects, and which flags may change on resume."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from common.checkpoints.same_run import require_same_flags
from common.config import TrainingConfig
from common.errors import UserError
from common.flags import role_of
from common.run_directory.effective_batch import keep_effective_batch
from common.run_directory.identity import edited_config_error
from common.run_directory.resume import require_unchanged_run
from common.run_directory.run_to_resume import RunToResume, read_run
from common.storage.digests import signed
from common.storage.files import LOCK, locked
from tests.launch import RECIPES
from tests.unit.recipes import config_class, other_value, parse, words, write_run

MLP = config_class("mnist_mlp")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in a folder of its own, where `--resume auto` looks for `runs/`."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def read_mlp(directory: Path) -> RunToResume:
    """Read a run of the MLP again."""
    return read_run(directory, MLP, "mnist_mlp")


def as_saved(value: object) -> str:
    """Return the value of a flag as messages show it."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_free_flags_may_change_on_resume(
    recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Flags with the role `free` are taken.

    Each of the others is refused, and the message has both of its values.
    """
    owner = config_class(recipe)
    resolved = dataclasses.replace(owner(), epochs=20, init_from="there", mixed_precision="bf16")
    run = write_run(tmp_path / "run", resolved, recipe)
    free_words: list[object] = []
    fixed_words: list[object] = []
    free_values = {}
    refusals = []
    for field in dataclasses.fields(resolved):
        name = field.name
        batch = ("batch_size", "gradient_accumulation_steps", "effective_batch_size")
        if name in ("config", "resume", "output_dir", *batch):
            continue
        value = other_value(resolved, name)
        if role_of(owner, name).free_on_resume:
            free_words += words(owner, name, value)
            free_values[name] = value
        else:
            fixed_words += words(owner, name, value)
            spelled = f"--{name.replace('_', '-')}"
            saved = as_saved(getattr(resolved, name))
            refusals.append(f"{spelled} {as_saved(value)} (the run has {saved})")
    config = parse(monkeypatch, recipe, "--resume", run, *free_words)
    assert {name: getattr(config, name) for name in free_values} == free_values
    with pytest.raises(UserError) as refused:
        parse(monkeypatch, recipe, "--resume", run, *fixed_words)
    for refusal in refusals:
        assert refusal in refused.value.message
    assert len(free_values) > 10
    assert len(refusals) > 10


def test_resumed_run_keeps_its_resolved_values(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Flags may repeat what the run was started with, or be left out."""
    typed = MLP(dataset="auto", hidden_sizes=(9, 9), log_every=3)
    resolved = dataclasses.replace(typed, dataset="digits", epochs=20, mixed_precision="bf16")
    run = write_run(tmp_path / "run", resolved, given=typed)
    for flags in ((), ("--dataset", "auto"), ("--dataset", "digits", "--hidden-sizes", 9, 9)):
        config = parse(monkeypatch, "mnist_mlp", "--resume", run, *flags)
        expected = dataclasses.replace(resolved, resume=str(run), output_dir=str(run))
        assert config == expected
    auto = ("--output-dir", run, "--resume", "auto", "--hidden-sizes", 9, 9, "--log-every", 5)
    config = parse(monkeypatch, "mnist_mlp", *auto)
    assert config == dataclasses.replace(expected, log_every=5)


def test_local_data_may_move_between_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The data must be gone from the old folder. Otherwise the new folder is a change of data."""
    here = tmp_path / "work" / "here"
    there = tmp_path / "there"
    here.mkdir()
    run = write_run(tmp_path / "run", MLP(dataset=str(there)))
    flags = ("--resume", run, "--dataset", "here")
    config = parse(monkeypatch, "mnist_mlp", *flags)
    assert config.dataset == str(here)
    require_unchanged_run(read_mlp(run), config)
    before = {"dataset": str(there), "seed": 1}
    now = {"dataset": str(here), "seed": 1}
    require_same_flags(run, before, now)
    for is_other in ({"seed": 2}, {"dataset": "digits"}):
        with pytest.raises(UserError, match="was trained with other flags than"):
            require_same_flags(run, before, now | is_other)
    there.mkdir()
    with pytest.raises(UserError, match=r"with other flags than this run has now \(--dataset was"):
        require_same_flags(run, before, now)
    with pytest.raises(UserError, match="can't resume"):
        parse(monkeypatch, "mnist_mlp", *flags)


def test_resume_takes_the_path_of_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the path of a checkpoint, the run's directory becomes the output directory.

    A path that is neither a run nor a checkpoint is refused.
    """
    run = write_run(tmp_path / "run", MLP(), status=None)
    checkpoint = run / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    config = parse(monkeypatch, "mnist_mlp", "--resume", checkpoint)
    assert (config.resume, config.output_dir) == (str(checkpoint), str(run))
    for missing in (checkpoint.with_name("step-00000999"), tmp_path, "x" * 300, "nowhere"):
        expected = "is neither the directory of a run nor a checkpoint"
        if not os.path.exists(missing):
            expected = "does not exist"
        with pytest.raises(UserError, match=expected):
            parse(monkeypatch, "mnist_mlp", "--resume", missing)
    unbegun = tmp_path / "unbegun"
    unbegun.mkdir()
    (unbegun / "status.json").write_text('{"status": "running", "global_step": 0}')
    with pytest.raises(
        UserError,
        match=r"unbegun is not possible, because that run has not begun to train: wait",
    ):
        parse(monkeypatch, "mnist_mlp", "--resume", unbegun)
    assert parse(
        monkeypatch, "mnist_mlp", "--resume", run, "--output-dir", tmp_path / "work" / ".." / "run"
    ).output_dir == str(run)
    with pytest.raises(UserError, match="leave --output-dir out"):
        parse(monkeypatch, "mnist_mlp", "--resume", run, "--output-dir", tmp_path / "other")


@pytest.mark.parametrize("named", [".", "checkpoints/step-00000002"])
def test_run_without_its_config_is_told_from_no_run(
    named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The message asks for the missing `config.json`, as the checkpoints are still there."""
    run = write_run(tmp_path / "run", MLP())
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    (run / "config.json").unlink()
    with pytest.raises(
        UserError, match=r"run contains checkpoints but no config\.json: put the run's"
    ):
        parse(monkeypatch, "mnist_mlp", "--resume", run / named)


def test_run_of_another_recipe_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message names both recipes."""
    run = write_run(tmp_path / "run", MLP())
    with pytest.raises(UserError, match="is a run of mnist_mlp, but this recipe is resnet"):
        parse(monkeypatch, "resnet", "--resume", run)


@pytest.mark.parametrize("selection", ["auto", "name"])
def test_finished_run_is_left_alone(
    selection: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command ends with status 0, so that a supervisor's loop ends."""
    run = write_run(tmp_path / "run", MLP(), status="finished")
    flags = ("--resume", run) if selection == "name" else ("--resume", "auto", "--output-dir", run)
    with pytest.raises(SystemExit) as end:
        parse(monkeypatch, "mnist_mlp", *flags)
    assert end.value.code == 0
    assert "is finished, so there is nothing to resume" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", RECIPES)
def test_finished_run_refuses_the_flags_that_an_unfinished_run_refuses(
    recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A command that would extend a finished run must not seem to succeed."""
    owner = config_class(recipe)
    config = owner()
    status: dict[str, Path] = {
        name: write_run(tmp_path / name, config, recipe, status=name)
        for name in ("finished", "failed")
    }
    refused_names = []
    # The flags of all recipes are tried with the first one only.
    is_first = recipe == RECIPES[0]
    shared_names = {field.name for field in dataclasses.fields(TrainingConfig)}
    left_out = {"config", "resume", "output_dir", "effective_batch_size"}
    for field in dataclasses.fields(config):
        if field.name in left_out or (field.name in shared_names and not is_first):
            continue
        value = words(owner, field.name, other_value(config, field.name))
        outcomes = {}
        for name, run in status.items():
            try:
                parse(monkeypatch, recipe, "--resume", run, *value)
            except SystemExit as outcome:
                outcomes[name] = outcome
        error = outcomes["finished"]
        is_refused = isinstance(error, UserError)
        if field.name not in ("batch_size", "gradient_accumulation_steps"):  # the batch is kept
            assert is_refused == isinstance(outcomes.get("failed"), UserError), field.name
        if isinstance(error, UserError):
            refused_names.append(field.name)
            assert "finished is finished, so no flag can extend or change it" in error.message
            assert f"the command has {value[0]}" in error.message or len(value) == 1
            assert "--init-from" in error.advice
            assert "None" not in error.message
        else:
            assert error.code == 0
    assert not is_first or {"epochs", "seed", "learning_rate"} <= {*refused_names}
    assert refused_names


def age(run: Path, seconds: int) -> Path:
    """Date a run's config back by so many seconds, and return the run's path."""
    os.utime(run / "config.json", (10**9 - seconds, 10**9 - seconds))
    return run


def test_auto_selects_the_newest_unfinished_run_with_the_same_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`--resume auto` skips finished and damaged runs, and those of other recipes or flags."""
    config = MLP(seed=3)
    fresh = parse(monkeypatch, "mnist_mlp", "--seed", 3, "--resume", "auto")
    assert fresh == config
    age(write_run(Path("runs/older"), config), 9)
    age(write_run(Path("runs/wanted"), dataclasses.replace(config, epochs=20), given=config), 8)
    age(write_run(Path("runs/finished"), config, status="finished"), 7)
    age(write_run(Path("runs/other-recipe"), config, "other"), 6)
    age(write_run(Path("runs/other-seed"), MLP()), 5)
    for index, content in enumerate((b"", b"[]", b'{"given": 3}', b'{"given": {"seed": "a"}}')):
        damaged = write_run(Path(f"runs/damaged-{index}"), config)
        (damaged / "config.json").write_bytes(content)
    resumed = parse(monkeypatch, "mnist_mlp", "--seed", 3, "--resume", "auto", "--log-every", 9)
    assert (resumed.output_dir, resumed.resume) == ("runs/wanted", "runs/wanted")
    assert (resumed.epochs, resumed.log_every) == (20, 9)


def test_auto_refuses_to_start_beside_an_unfinished_run_with_other_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A forgotten flag must not start a new run.

    The message names the newest such run and both values.
    """
    age(write_run(Path("runs/older"), MLP(seed=9, epochs=3)), 9)
    run = age(write_run(Path("runs/killed"), MLP(epochs=3)), 8)
    for count in (1, 2):
        with pytest.raises(UserError) as refused:
            parse(monkeypatch, "mnist_mlp", "--resume", "auto")
        assert "found the unfinished run runs/killed" in refused.value.message
        assert "runs/killed, which was started with --epochs 3: pass --" in refused.value.message
        assert "--resume runs/killed" in refused.value.message
        resumed = parse(monkeypatch, "mnist_mlp", "--resume", "auto", "--epochs", 3)
        assert resumed.resume == "runs/killed"
        if count == 1:  # a finished run with the same flags makes no difference
            write_run(Path("runs/finished"), MLP(), status="finished")
    assert parse(monkeypatch, "mnist_mlp", "--resume", "auto", "--output-dir", "x").resume is None
    # Neither a run that is training now nor a finished one stops a new run.
    with locked(run / LOCK, 0), locked(Path("runs/older", LOCK), 0):
        assert parse(monkeypatch, "mnist_mlp", "--resume", "auto").resume is None
    assert "so a new run starts" in capsys.readouterr().out
    for name in ("killed", "older"):
        Path("runs", name, "summary.json").write_text("{}")
        write_run(Path("runs", name), MLP(epochs=3), status="failed")
    assert parse(monkeypatch, "mnist_mlp", "--resume", "auto").resume is None


def test_auto_names_each_flag_as_it_can_be_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that this command lacks is named with the value to pass, and None is no value."""
    given: dict[str, Any] = {"epochs": 3, "hidden_sizes": (64, 32)}
    write_run(Path("runs/killed"), MLP(**given))
    with pytest.raises(UserError) as refused:
        parse(monkeypatch, "mnist_mlp", "--resume", "auto", "--seed", 4, "--max-steps", 7)
    message = refused.value.message
    assert "which was started with --epochs 3, --hidden-sizes 64 32 instead of" in message
    assert "no --max-steps instead of 7" in message
    assert "--seed 0 instead of 4" in message
    assert "None" not in message
    command = ["--epochs", "3", "--hidden-sizes", "64", "32", "--resume", "auto"]
    assert parse(monkeypatch, "mnist_mlp", *command).resume == "runs/killed"


def test_run_is_read_again_after_another_job_releases_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By then the run may be finished, or may have other flags."""
    run = write_run(tmp_path / "run", MLP(seed=3))
    config = parse(monkeypatch, "mnist_mlp", "--resume", run)
    assert not read_mlp(run).is_finished()
    require_unchanged_run(read_mlp(run), config)
    write_run(run, MLP(seed=4))
    with pytest.raises(UserError, match="--seed 4, which was 3") as refused:
        require_unchanged_run(read_mlp(run), config)
    assert refused.value.resumable
    write_run(run, MLP(seed=3, batch_size=16))
    with pytest.raises(UserError, match="effective batch of 16"):
        require_unchanged_run(read_mlp(run), config)
    write_run(run, MLP(seed=3), status="finished")
    assert read_mlp(run).is_finished()


def test_auto_starts_a_new_run_in_an_empty_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The new run uses the flags of `--config`, if any, and ignores runs elsewhere."""
    write_run(Path("runs/other"), MLP())
    earlier = write_run(tmp_path / "earlier", MLP(hidden_sizes=(7,), batch_size=64))
    flags = ("--config", earlier, "--max-steps", 2, "--resume", "auto", "--output-dir", tmp_path)
    config = parse(monkeypatch, "mnist_mlp", *flags)
    assert (config.resume, config.output_dir) == (None, str(tmp_path))
    assert (config.hidden_sizes, config.batch_size, config.max_steps) == ((7,), 64, 2)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_resume_keeps_the_effective_batch_size(
    processes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Accumulation adapts to the number of processes. Flags with another product are refused."""
    config = MLP(batch_size=32, gradient_accumulation_steps=2)
    run = write_run(tmp_path / "run", config, processes=2)  # 128 an update
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    resumed = parse(monkeypatch, "mnist_mlp", "--resume", run)
    assert (resumed.batch_size, resumed.gradient_accumulation_steps) == (32, 4 // processes)
    flags = ("--batch-size", 16, "--gradient-accumulation-steps", 8 // processes)
    resumed = parse(monkeypatch, "mnist_mlp", "--resume", run, *flags)
    assert (resumed.batch_size, resumed.gradient_accumulation_steps) == (16, 8 // processes)
    for flags in (("--batch-size", 7), ("--gradient-accumulation-steps", 3)):
        with pytest.raises(UserError, match="each update of the run to resume has 128 samples"):
            parse(monkeypatch, "mnist_mlp", "--resume", run, *flags)


def test_processes_that_cannot_divide_the_effective_batch_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The message says which number of processes or which batch size would work."""
    run = write_run(tmp_path / "run", MLP(batch_size=32))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        UserError,
        match=r"the run to resume has 32 samples, which is not a multiple of 96 "
        r"\(--batch-size 32 × 3 processes\)",
    ):
        parse(monkeypatch, "mnist_mlp", "--resume", run)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"32 × 2 processes\): pass --batch-size 16"):
        parse(monkeypatch, "mnist_mlp", "--resume", run)


@pytest.mark.parametrize(
    ("processes", "batch", "accumulation"), [(1, 32, 6), (2, 16, 6), (6, 8, 4)]
)
def test_effective_batch_size_sets_accumulation(
    processes: int, batch: int, accumulation: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This holds for a new run, for `--config` and for `--resume`."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    batch_flags = ("--batch-size", batch)
    config = parse(monkeypatch, "mnist_mlp", "--effective-batch-size", 192, *batch_flags)
    assert (config.batch_size, config.gradient_accumulation_steps) == (batch, accumulation)
    saved = MLP(batch_size=64, gradient_accumulation_steps=3, effective_batch_size=192)
    run = write_run(tmp_path / "run", saved)
    for flags in (
        ("--config", run),
        ("--resume", run),
        ("--resume", run, "--effective-batch-size", 192),
    ):
        config = parse(monkeypatch, "mnist_mlp", *flags, *batch_flags)
        assert (config.batch_size, config.gradient_accumulation_steps) == (batch, accumulation)
    with pytest.raises(
        UserError, match=r"--effective-batch-size 384 can't be used, because .* has 192 samples"
    ):
        parse(monkeypatch, "mnist_mlp", "--resume", run, "--effective-batch-size", 384)
    with pytest.raises(
        UserError,
        match=rf"--effective-batch-size 100 is not a multiple of {64 * processes} "
        rf"\(--batch-size 64 × {processes}",
    ):
        parse(monkeypatch, "mnist_mlp", "--batch-size", 64, "--effective-batch-size", 100)


@pytest.mark.parametrize("saved_processes", [1, 2, 3, 8])
@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 8])
def test_advice_on_sizes_can_be_followed(
    saved_processes: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with these sizes, resumed or new, has the effective batch that was asked for."""
    for batch, accumulation in itertools.product((5, 48, 64), (1, 2, 3)):
        saved = MLP(batch_size=batch, gradient_accumulation_steps=accumulation)
        effective = batch * accumulation * saved_processes
        for size, steps, total in itertools.product(
            (0, 7, 32, batch), (1, 3, accumulation), (None, effective)
        ):
            config = dataclasses.replace(
                saved,
                batch_size=size,
                gradient_accumulation_steps=steps,
                effective_batch_size=total,
            )
            monkeypatch.setenv("WORLD_SIZE", str(processes))
            try:
                kept = keep_effective_batch(config, saved, effective)
            except UserError as refused:
                config = following(refused.advice, config, monkeypatch)
                kept = keep_effective_batch(config, saved, effective)
            if kept.batch_size:  # another check refuses 0
                product = kept.batch_size * kept.gradient_accumulation_steps
                assert product * int(os.environ["WORLD_SIZE"]) == effective


def following(advice: str, config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start as many processes as the advice says, and return a configuration of its sizes."""
    parts = re.fullmatch(
        r"(?:pass|start .* such as (\d+) with) --batch-size (\d+)"
        r"(?: --gradient-accumulation-steps (\d+))?",
        advice,
    )
    assert parts is not None, advice
    processes, size, steps = parts.groups()
    if processes:
        monkeypatch.setenv("WORLD_SIZE", processes)
    sizes = {"batch_size": int(size)}
    if steps:
        sizes["gradient_accumulation_steps"] = int(steps)
    return dataclasses.replace(config, **sizes)


def test_advice_on_sizes_is_accepted_by_a_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The accumulation of the saved run would not fit to the batch size that is advised."""
    run = write_run(tmp_path / "run", MLP(batch_size=64, gradient_accumulation_steps=2))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError) as refused:
        parse(monkeypatch, "mnist_mlp", "--resume", run)
    assert refused.value.advice == "pass --batch-size 32 --gradient-accumulation-steps 1"
    flags = refused.value.advice.split()[1:]
    resumed = parse(monkeypatch, "mnist_mlp", "--resume", run, *flags)
    assert (resumed.batch_size, resumed.gradient_accumulation_steps) == (32, 1)


def damaged(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Return copies of an object that lack one key each, or have a value of another type."""
    copies = []
    for name in value:
        without = dict(value)
        del without[name]
        copies.append(without)
        copies += [value | {name: other} for other in (3, None, [], "x")]
    return copies


def test_damaged_config_gives_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Any part may be missing or of another type, and the file may end anywhere."""
    run = write_run(tmp_path / "run", MLP())
    path = run / "config.json"
    text = path.read_text()
    facts = json.loads(text)
    sha256 = facts.pop("sha256")
    contents = [json.dumps(value | {"sha256": sha256}) for value in damaged(facts)]
    contents += [text[:length] for length in range(0, len(text), 101)]
    for content in contents:
        path.write_text(content)
        with pytest.raises(UserError) as refused:
            parse(monkeypatch, "mnist_mlp", "--resume", run)
        assert str(run) in refused.value.message


def test_flags_of_a_recipe_may_be_added_and_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Flags that a run lacks get their defaults, and those that it alone has are ignored."""
    run = write_run(tmp_path / "run", MLP(seed=4))
    path = run / "config.json"
    facts = json.loads(path.read_text())
    for group in ("config", "given"):
        del facts[group]["num_threads"]
        facts[group]["target_accuracy"] = 0.5
    path.write_text(json.dumps(signed(facts)))
    config = parse(monkeypatch, "mnist_mlp", "--resume", run)
    assert (config.seed, config.num_threads) == (4, None)


def test_commands_in_advice_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell takes a path with a space or another of its signs as one word."""
    run = write_run(Path("runs/my run; $HOME"), MLP(epochs=3))
    with pytest.raises(UserError) as refused:
        parse(monkeypatch, "mnist_mlp", "--resume", "auto")
    command, _, _ = refused.value.advice.partition(",")
    assert shlex.split(command)[-2:] == ["--resume", str(run)]
    path = run / "config.json"
    contents = json.loads(path.read_text())
    contents["config"]["epochs"] = 4
    path.write_text(json.dumps(contents))
    edited = edited_config_error(run, json.loads(path.read_text()))
    assert edited is not None
    assert shlex.split(edited.advice)[-2:] == ["--config", str(path)]
