"""Flags: typed, shared, checked before anything is loaded; mistakes end in one short message."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from common.config import TrainingConfig, parse_config, read_config
from common.errors import UserError
from tests.launch import RECIPES, REPOSITORY, UNREACHABLE, Finished, Launcher, Runner, plain


def config_class(recipe: str) -> type[TrainingConfig]:
    """Return the configuration of a recipe."""
    return import_module(f"recipes.{recipe}").Config


def parse(monkeypatch: pytest.MonkeyPatch, recipe: str, *flags: object) -> Any:
    """Read a command line as a recipe does."""
    monkeypatch.setattr(sys, "argv", [f"{recipe}.py", *map(str, flags)])
    return parse_config(config_class(recipe), "What it does.")


def message_of(run: Finished) -> str:
    """Return the one message of a failed run, after checking that nothing else was said.

    The launcher's own report of a failed process follows it, and is not ours to hide.
    """
    assert run.returncode != 0, run.explain()
    assert str(REPOSITORY / "common") not in run.errors, run.explain()
    assert f'File "{REPOSITORY}' not in run.errors, run.explain()
    said = run.said()
    if "Unrecognized options" in said:
        assert said.count("Unrecognized options:") == 1, run.explain()
        return plain(said)
    messages = re.findall(r"^error: .*$", said, re.MULTILINE)
    assert len(messages) == 1, run.explain()
    assert len(messages[0]) < 500
    return messages[0]


# Mistakes that the command line alone shows.


@pytest.mark.parametrize("recipe", RECIPES)
def test_unknown_flag_shows_the_nearest(recipe: str, runner: Runner) -> None:
    """A mistyped flag is refused with the one that was meant, before a library is imported."""
    run = runner.run(recipe, "--lerning-rate", 0.1, launcher="python", succeeds=False)
    message = message_of(run)
    assert "--lerning-rate" in message
    assert "--learning-rate" in message
    assert "Traceback" not in run.errors
    assert run.returncode == 2
    assert not run.directory.exists()


MISTAKES = [
    ("resnet", ("--batch-size", 0), ["--batch-size 0", "1 or more"]),
    ("bert", ("--evaluate-only",), ["--evaluate-only", "--init-from"]),
    ("mnist_mlp", ("--config", "nowhere.json"), ["nowhere.json", "config.json"]),
    ("mnist_mlp", ("--mixed-precision", "fp16"), ["fp16", "--mixed-precision"]),
]


@pytest.mark.parametrize(("recipe", "flags", "words"), MISTAKES)
def test_mistake_ends_in_one_message(
    recipe: str, flags: tuple[object, ...], words: list[str], runner: Runner
) -> None:
    """What is wrong and what to do instead, in one line without a traceback, and status 1."""
    run = runner.run(recipe, *flags, launcher="python", succeeds=False)
    message = message_of(run)
    assert all(word in message for word in words), message
    assert "Traceback" not in run.errors
    assert "Traceback" not in run.output
    assert run.returncode == 1
    assert not (run.directory / "model").exists()


def test_missing_data_set_without_the_hub(runner: Runner) -> None:
    """A named data set is never replaced: without the Hub the run ends and says what to pass."""
    run = runner.run(
        *("mnist_mlp", "--dataset", "mnist"),
        environment={"HF_HUB_OFFLINE": None, "HF_ENDPOINT": UNREACHABLE},
        succeeds=False,
    )
    message = message_of(run)
    assert "ylecun/mnist" in message
    assert "digits" in message
    assert run.status["status"] == "failed"
    assert "ylecun/mnist" in run.status["reason"]


# The first is seen by the parser, the second before the accelerator is built, the third by rank 0
# alone; `test_data` has one that each rank sees.
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--lerning-rate", 1), ["--lerning-rate", "--learning-rate"]),
        (("--mixed-precision", "fp16"), ["fp16", "CUDA"]),
        (("--dataset", "nobody/nothing"), ["nobody/nothing", "digits"]),
    ],
)
@pytest.mark.parametrize("launcher", ["two"])
def test_two_processes_speak_with_one_voice(
    flags: tuple[object, ...], words: list[str], launcher: Launcher, runner: Runner
) -> None:
    """Two processes that meet the same mistake print it once, and both end."""
    run = runner.run("mnist_mlp", *flags, launcher=launcher, succeeds=False, timeout=120)
    message = message_of(run)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--batch-size", 0), "--batch-size 0"),
        (("--epochs", -1), "--epochs -1"),
        (("--max-steps", 0), "--max-steps 0"),
        (("--log-every", 0), "--log-every 0"),
        (("--learning-rate", -0.1), "--learning-rate -0.1"),
        (("--learning-rate", "nan"), "--learning-rate nan"),
        (("--learning-rate", "inf"), "--learning-rate inf"),
        (("--gradient-accumulation-steps", 0), "--gradient-accumulation-steps 0"),
        (("--dropout", 1.5), "--dropout 1.5"),
        (("--target-accuracy", 97), "--target-accuracy 97"),
        (("--seed", -1), "--seed -1"),
        (("--num-workers", -1), "--num-workers -1"),
        (("--hidden-sizes", 64, 0), "--hidden-sizes 0"),
        (("--max-grad-norm", -1), "--max-grad-norm -1"),
    ],
)
def test_impossible_value_is_named(
    flags: tuple[object, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that can't work is refused by the parser, with the flag's name and its limits."""
    with pytest.raises(UserError) as error:
        parse(monkeypatch, "mnist_mlp", *flags)
    assert words in error.value.message
    assert "give" in error.value.message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--batch-size", "many"), ["--batch-size", "many"]),
        (("--mixed-precision", "fp8"), ["fp8", "bf16"]),
        (("--tracker", "paper"), ["paper", "tensorboard"]),
        (("--epochs",), ["--epochs"]),
        (("--config",), ["--config"]),
        (("--hiden-sizes", 3), ["--hidden-sizes"]),
        (("--resnet",), ["--resnet"]),
        (("digits",), ["digits"]),
    ],
)
def test_wrong_type_is_refused(
    flags: tuple[object, ...],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A value of the wrong type, or none, is refused with what would do."""
    with pytest.raises(SystemExit) as error:
        parse(monkeypatch, "mnist_mlp", *flags)
    assert error.value.code not in (0, None)
    captured = capsys.readouterr()
    said = plain(captured.out + captured.err)
    assert all(word in said for word in words), said


# What is read right.


@pytest.mark.parametrize("recipe", RECIPES)
def test_shared_flags_mean_the_same(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each recipe has all shared flags, in kebab-case, with types."""
    config = parse(
        *(monkeypatch, recipe, "--dataset", "digits", "--epochs", 2, "--max-steps", 7),
        *("--batch-size", 3, "--gradient-accumulation-steps", 4, "--learning-rate", "1e-4"),
        *("--mixed-precision", "bf16", "--seed", 5, "--deterministic", "--num-workers", 1),
        *("--data-placement", "workers", "--output-dir", "somewhere", "--log-every", 6),
        *("--tracker", "none", "--tags", "one", "two", "--compile", "--warmup-steps", 0),
    )
    assert isinstance(config, TrainingConfig)
    assert (config.epochs, config.max_steps, config.batch_size) == (2, 7, 3)
    assert (config.gradient_accumulation_steps, config.learning_rate) == (4, 1e-4)
    assert (config.mixed_precision, config.seed, config.deterministic) == ("bf16", 5, True)
    assert (config.num_workers, config.data_placement) == (1, "workers")
    assert (config.tags, config.compile, config.warmup_steps) == (("one", "two"), True, 0)
    off = parse(monkeypatch, recipe, "--no-compile", "--no-deterministic")
    assert not off.compile
    assert not off.deterministic


@pytest.mark.parametrize("recipe", RECIPES)
def test_defaults_are_the_dataclass(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without flags a recipe runs with what its `Config` states."""
    assert parse(monkeypatch, recipe) == config_class(recipe)()


def write_config(path: Path, config: TrainingConfig) -> Path:
    """Write what a run's `config.json` says of its flags."""
    path.write_text(json.dumps({"recipe": "x", "config": dataclasses.asdict(config)}))
    return path


@pytest.mark.parametrize("recipe", RECIPES)
def test_config_file_repeats_flags(
    recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--config FILE` gives the flags of an earlier run; flags beside it override them."""
    earlier = parse(
        *(monkeypatch, recipe, "--epochs", 4, "--batch-size", 9, "--seed", 3, "--tags", "a", "b"),
        *("--output-dir", "earlier", "--run-name", "earlier", "--dataset", "digits", "--compile"),
    )
    path = write_config(tmp_path / "config.json", earlier)
    again = parse(monkeypatch, recipe, "--config", path)
    same = dataclasses.replace(earlier, output_dir=None, run_name=None, config=again.config)
    assert again == same
    other = parse(monkeypatch, recipe, "--epochs", 1, "--config", path, "--no-compile")
    assert other == dataclasses.replace(same, epochs=1, compile=False, config=other.config)
    assert parse(monkeypatch, recipe, f"--config={path}") == again


def test_config_of_another_recipe_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A `config.json` of another recipe is refused with what it has too much."""
    path = write_config(tmp_path / "config.json", config_class("bert")())
    with pytest.raises(UserError) as error:
        parse(monkeypatch, "mnist_mlp", "--config", path)
    assert "max_length" in error.value.message
    assert "another recipe" in error.value.message


def test_config_of_another_recipe_with_the_same_flags_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The recipe's name decides too, where all flags of a file are known here."""
    values = dataclasses.asdict(TrainingConfig())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"recipe": "resnet", "config": values}))
    with pytest.raises(UserError) as error:
        parse(monkeypatch, "mnist_mlp", "--config", path)
    assert "resnet" in error.value.message


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"config": 3}', "\x00", '{"config": []}'])
def test_file_that_is_no_config_is_refused(
    content: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file that no recipe wrote is refused, and named."""
    path = tmp_path / "notes.json"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        parse(monkeypatch, "mnist_mlp", "--config", path)
    assert "notes.json" in error.value.message


def test_impossible_value_in_a_config_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Values from a file are checked as flags are."""
    config = dataclasses.replace(config_class("mnist_mlp")(), batch_size=0)
    path = write_config(tmp_path / "config.json", config)
    with pytest.raises(UserError, match="error: --batch-size 0"):
        parse(monkeypatch, "mnist_mlp", "--config", path)


def test_wrong_type_in_a_config_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A value that was edited into another type ends in a message too."""
    values = dataclasses.asdict(config_class("mnist_mlp")()) | {"batch_size": "many"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"recipe": "mnist_mlp", "config": values}))
    with pytest.raises(SystemExit) as error:
        parse(monkeypatch, "mnist_mlp", "--config", path)
    assert error.value.code != 0


def test_run_directory_is_a_config_too(tmp_path: Path) -> None:
    """`--config` takes the run's directory as well as the file in it."""
    config = config_class("resnet")()
    write_config(tmp_path / "config.json", config)
    assert read_config(config_class("resnet"), tmp_path) == config


# Help.

LOADED_BY_HELP = """
import json, runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_is_quick_and_complete(recipe: str, runner: Runner, tmp_path: Path) -> None:
    """`--help` names each flag with its help and default, and imports no slow library."""
    script = tmp_path / "help.py"
    script.write_text(LOADED_BY_HELP)
    recipe_path = REPOSITORY / "recipes" / f"{recipe}.py"
    run = runner.run(script, recipe_path, launcher="python", output_directory=False)
    text, loaded = run.output.rstrip().rsplit("\n", 1)
    assert not {"transformers", "datasets", "wandb", "sklearn"} & set(json.loads(loaded))
    for field in dataclasses.fields(config_class(recipe)):
        assert f"--{field.name.replace('_', '-')}" in text, field.name
    help_lines = re.findall(r"#\s(.+)\.$", recipe_path.read_text(), re.MULTILINE)
    assert help_lines
    said = plain(text)
    assert "Updates between log lines" in said
    assert "(default: 50)" in said
    first_words = import_module(f"recipes.{recipe}").__doc__.split("\n")[0]
    assert first_words in said


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_field_has_one_line_of_help(recipe: str) -> None:
    """Each flag of a recipe is explained in one comment, on its own line."""
    fields = config_class(recipe).__annotations__
    source = (REPOSITORY / "recipes" / f"{recipe}.py").read_text()
    for name in fields:
        assert re.search(rf"^    {name}: .*  # .+\.$", source, re.MULTILINE), name
    shared = (REPOSITORY / "common" / "config.py").read_text()
    for name in TrainingConfig.__annotations__:
        assert re.search(rf"^    {name}: .*  # .+\.$", shared, re.MULTILINE), name


# Runs repeated, and launched otherwise.


def test_config_file_repeats_a_run_under_plain_python(runner: Runner, whole_mlp: Finished) -> None:
    """`--config runs/X/config.json` repeats a run to the last bit; a flag beside it overrides."""
    again = runner.run(
        *("mnist_mlp", "--config", whole_mlp.directory / "config.json"),
        *("--tracker", "tensorboard", "--log-every", 3),
        launcher="python",
    )
    assert again.summary["train/loss"] == whole_mlp.summary["train/loss"]
    assert again.summary["eval/loss"] == whole_mlp.summary["eval/loss"]
    assert again.summary["eval/accuracy"] == whole_mlp.summary["eval/accuracy"]
    changed = {"config", "output_dir", "tracker", "log_every"}
    before, now = whole_mlp.config["config"], again.config["config"]
    assert {name for name in now if now[name] != before[name]} == changed
    assert list(again.series("train/loss")) == [3, 6, 9]
    events = list(again.directory.rglob("events.out.tfevents.*"))
    assert len(events) == 1
    assert not again.wandb_folder.exists()
    assert_events_hold(events[0], again)


def assert_events_hold(path: Path, run: Finished) -> None:
    """Check that TensorBoard's file has the same values as `metrics.jsonl`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path.parent))
    events.Reload()
    for name in ("train/loss", "eval/accuracy", "train/learning_rate"):
        logged = {event.step: event.value for event in events.Scalars(name)}
        assert logged == pytest.approx(run.series(name), rel=1e-5), name


def test_torchrun_with_two_processes(runner: Runner, whole_mlp: Finished) -> None:
    """`torchrun` works as `accelerate launch` does, and an earlier run scales to two processes."""
    run = runner.run(
        *("mnist_mlp", "--config", whole_mlp.directory, "--batch-size", 32), launcher="torchrun"
    )
    assert run.config["environment"]["world_size"] == 2
    assert run.config["environment"]["effective_batch_size"] == 64
    assert run.summary["train/loss"] == pytest.approx(whole_mlp.summary["train/loss"], rel=2e-4)
    assert run.summary["eval/loss"] == pytest.approx(whole_mlp.summary["eval/loss"], rel=2e-4)


def test_copied_recipe_runs_from_elsewhere(
    runner: Runner, odd_images: Path, tmp_path: Path
) -> None:
    """A recipe copied to any folder trains from any working directory, into `runs/` there."""
    script = tmp_path / "elsewhere" / "train.py"
    script.parent.mkdir()
    script.write_text((REPOSITORY / "recipes" / "mnist_mlp.py").read_text())
    working_directory = tmp_path / "work"
    working_directory.mkdir()
    runner.run(
        *(
            script,
            "--dataset",
            odd_images,
            "--batch-size",
            64,
            "--max-steps",
            2,
            "--tracker",
            "none",
        ),
        working_directory=working_directory,
        output_directory=False,
    )
    (directory,) = (working_directory / "runs").iterdir()
    assert directory.name.startswith("train-")
    assert json.loads((directory / "status.json").read_text())["status"] == "finished"
    assert json.loads((directory / "summary.json").read_text())["progress/global_step"] == 2


def test_initial_weights_are_those_of_a_run(
    runner: Runner, odd_images: Path, whole_mlp: Finished
) -> None:
    """`--init-from RUN` starts from its weights: without learning they are kept."""
    run = runner.run(
        *(
            "mnist_mlp",
            "--dataset",
            odd_images,
            "--batch-size",
            64,
            "--init-from",
            whole_mlp.directory,
        ),
        *("--learning-rate", 0, "--max-steps", 1, "--mixed-precision", "no", "--tracker", "none"),
        launcher="python",
    )
    assert run.summary["eval/loss"] == pytest.approx(whole_mlp.summary["eval/loss"], rel=1e-6)
    before, after = whole_mlp.weights(), run.weights()
    assert all(before[name].equal(after[name]) for name in after)


def test_runs_of_one_second_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that start at once never share a directory."""
    from accelerate import PartialState

    from common.directory import RunDirectory

    PartialState(cpu=True)
    monkeypatch.chdir(tmp_path)
    paths = [RunDirectory(None, "resnet", False).path.resolve() for _ in range(3)]
    assert len(set(paths)) == 3
    assert all(path.parent == tmp_path / "runs" for path in paths)


def test_target_accuracy_decides_the_status(runner: Runner, odd_images: Path) -> None:
    """A run that ends below `--target-accuracy` says so, keeps its model, and fails."""
    run = runner.run(
        *(
            "mnist_mlp",
            "--dataset",
            odd_images,
            "--batch-size",
            64,
            "--max-steps",
            1,
            "--learning-rate",
            0,
        ),
        *("--target-accuracy", 0.99, "--tracker", "none"),
        launcher="python",
        succeeds=False,
    )
    message = message_of(run)
    assert "--target-accuracy 0.99" in message
    assert run.status["status"] == "failed"
    assert run.summary["eval/accuracy"] < 0.99
    assert (run.directory / "model" / "model.safetensors").is_file()


def test_run_directory_is_never_written_over(tmp_path: Path) -> None:
    """An `--output-dir` that holds a run is refused, and the run stays as it was."""
    from accelerate import PartialState

    from common.directory import RunDirectory

    PartialState(cpu=True)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError) as error:
        RunDirectory(str(tmp_path), "mnist_mlp", False)
    assert str(tmp_path) in error.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    with pytest.raises(UserError, match="can't be made"):
        RunDirectory(str(tmp_path / "config.json" / "run"), "mnist_mlp", False)
