"""Flags: typed, shared, checked before anything is loaded; mistakes end in one short message."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from common.command_line import read_config, refuse_credentials
from common.config import TrainingConfig, parse_config
from common.errors import UserError
from common.flags import flag, role_of
from tests.launch import RECIPES, REPOSITORY, plain
from tests.unit.recipes import (
    config_class,
    kind_of,
    other_value,
    parse,
    status_of,
    words,
    write_run,
)

# Mistakes that the command line alone shows.


@pytest.mark.parametrize(
    ("recipe", "typo", "meant"),
    [
        *[(recipe, "--lerning-rate", "--learning-rate") for recipe in RECIPES],
        ("mnist_mlp", "--hidden-size", "--hidden-sizes"),
        ("resnet", "--horizontl-flip", "--horizontal-flip"),
        ("bert", "--max-lenght", "--max-length"),
    ],
)
def test_unknown_flag_shows_the_nearest(
    recipe: str,
    typo: str,
    meant: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A mistyped flag is refused with the one that was meant."""
    with pytest.raises(SystemExit) as refused:
        parse(monkeypatch, recipe, typo, 1)
    said = plain("".join(capsys.readouterr()))
    assert refused.value.code == 2
    assert typo in said
    assert meant in said


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (("--batch-size", "many"), ["--batch-size", "many"]),
        (("--mixed-precision", "fp8"), ["fp8", "bf16"]),
        (("--tracker", "paper"), ["paper", "tensorboard"]),
        (("--epochs",), ["--epochs"]),
        (("--epochs", "2.5"), ["--epochs", "2.5"]),
        (("--config",), ["--config"]),
        (("--resume",), ["--resume"]),
        (("--hiden-sizes", 3), ["--hidden-sizes"]),
        (("--resnet",), ["--resnet"]),
        (("digits",), ["digits"]),
    ],
)
def test_wrong_type_is_refused(
    flags: tuple[object, ...],
    wanted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A value of the wrong type, or none, is refused with what would do."""
    with pytest.raises(SystemExit) as error:
        parse(monkeypatch, "mnist_mlp", *flags)
    assert error.value.code not in (0, None)
    said = plain("".join(capsys.readouterr()))
    assert all(word in said for word in wanted), said


@pytest.mark.parametrize(
    ("flags", "sentence"),
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
        (("--target", "nan"), "--target nan"),
        (("--seed", -1), "--seed -1"),
        (("--num-workers", -1), "--num-workers -1"),
        (("--num-threads", 0), "--num-threads 0"),
        (("--num-threads", 1025), "give 1 to 1,024"),
        (("--hidden-sizes", 64, 0), "--hidden-sizes 0"),
        (("--max-grad-norm", -1), "--max-grad-norm -1"),
        (("--image-size", 65537), "give 1 to 65,536"),
    ],
)
def test_impossible_value_is_named(
    flags: tuple[object, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that can't work is refused by the parser, with the flag's name and its limits."""
    with pytest.raises(UserError) as error:
        parse(monkeypatch, "mnist_mlp", *flags)
    assert sentence in error.value.message
    assert "can't work: give" in error.value.message


@pytest.mark.parametrize("recipe", RECIPES)
def test_whole_number_of_any_size_is_a_sentence(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is a tensor's size, a time-out or a number of processes."""
    owner = config_class(recipe)
    for field in dataclasses.fields(owner):
        if kind_of(owner, field.name) is int:
            for number in (10**20, -(10**20)):
                with pytest.raises(UserError, match=rf"{number} can't work: give"):
                    parse(monkeypatch, recipe, *words(owner, field.name, number))


def test_evaluation_alone_needs_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to evaluate without one."""
    with pytest.raises(UserError, match=r"--evaluate-only .*--init-from"):
        parse(monkeypatch, "bert", "--evaluate-only")


def test_target_may_be_of_any_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """An objective is no share of one."""
    for number in (-3.5, 0.0, 97.0):
        assert parse(monkeypatch, "mnist_mlp", "--target", number).target == number


def test_other_ranks_leave_the_message_to_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They meet the same mistake, wait until it is said, and end with its status."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as refused:
        parse(monkeypatch, "mnist_mlp", "--lerning-rate", 1)
    assert refused.value.code == 2
    with pytest.raises(SystemExit) as refused:
        parse(monkeypatch, "mnist_mlp", "--batch-size", 0)
    assert refused.value.code == 1
    assert "".join(capsys.readouterr()) == ""
    assert len(waited) == 2


URL_TOKEN = "hf_TokenOfTheAddress"
URL = f"https://user:{URL_TOKEN}@huggingface.co/datasets/x"


@pytest.mark.parametrize("name", ["dataset", "init-from", "config", "resume", "datset"])
@pytest.mark.parametrize(
    "value", [URL, f"https://{URL_TOKEN}@huggingface.co/x", f"user:{URL_TOKEN}@huggingface.co/x"]
)
@pytest.mark.parametrize("joined", [True, False])
def test_no_flag_takes_credentials(
    name: str,
    value: str,
    joined: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The flag is named, a misspelt one too, and its value is not."""
    given = [f"--{name}={value}"] if joined else [f"--{name}", value]
    with pytest.raises(UserError) as refused:
        parse(monkeypatch, "mnist_mlp", "--epochs", 1, *given)
    shown = capsys.readouterr()
    assert f"--{name}" in refused.value.message
    assert URL_TOKEN not in refused.value.message + shown.out + shown.err


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
        *("--num-threads", 3, "--target", 0.5),
    )
    assert isinstance(config, TrainingConfig)
    assert (config.epochs, config.max_steps, config.batch_size) == (2, 7, 3)
    assert (config.gradient_accumulation_steps, config.learning_rate) == (4, 1e-4)
    assert (config.mixed_precision, config.seed, config.deterministic) == ("bf16", 5, True)
    assert (config.num_workers, config.data_placement) == (1, "workers")
    assert (config.tags, config.compile, config.warmup_steps) == (("one", "two"), True, 0)
    assert (config.num_threads, config.target) == (3, 0.5)
    off = parse(monkeypatch, recipe, "--no-compile", "--no-deterministic")
    assert not off.compile
    assert not off.deterministic


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_flag_is_read_as_it_is_written(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag changes its own value alone; without flags a recipe runs with what `Config` states."""
    defaults = config_class(recipe)()
    assert parse(monkeypatch, recipe) == defaults
    for field in dataclasses.fields(defaults):
        changing = ("config", "resume", "evaluate_only", "effective_batch_size")
        if field.name in changing:  # others
            continue
        value = other_value(defaults, field.name)
        found = parse(monkeypatch, recipe, *words(type(defaults), field.name, value))
        assert found == dataclasses.replace(defaults, **{field.name: value})


@pytest.mark.parametrize("recipe", RECIPES)
def test_config_file_repeats_flags(
    recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--config FILE` gives the flags of an earlier run; flags beside it override them."""
    earlier = parse(
        *(monkeypatch, recipe, "--epochs", 4, "--batch-size", 9, "--seed", 3, "--tags", "a", "b"),
        *("--output-dir", "earlier", "--run-name", "earlier", "--dataset", "digits", "--compile"),
    )
    path = write_run(tmp_path / "run", earlier, recipe) / "config.json"
    again = parse(monkeypatch, recipe, "--config", path)
    same = dataclasses.replace(earlier, output_dir=None, run_name=None, config=again.config)
    assert again == same
    other = parse(monkeypatch, recipe, "--epochs", 1, "--config", path, "--no-compile")
    assert other == dataclasses.replace(same, epochs=1, compile=False, config=other.config)
    assert parse(monkeypatch, recipe, f"--config={path}") == again
    directory = parse(monkeypatch, recipe, "--config", path.parent)
    assert dataclasses.replace(directory, config=again.config) == again


@pytest.mark.parametrize("recipe", RECIPES)
def test_config_file_repeats_by_role(recipe: str, tmp_path: Path) -> None:
    """Each flag that says what a run computes, and none that is of one run alone."""
    owner = config_class(recipe)
    names = [field.name for field in dataclasses.fields(owner)]
    config = dataclasses.replace(owner(), **{name: other_value(owner(), name) for name in names})
    again = read_config(owner, write_run(tmp_path, config, recipe))
    for name in names:
        kept = config if role_of(owner, name).repeated else owner()
        assert getattr(again, name) == getattr(kept, name), name


def test_evaluation_alone_takes_the_flags_of_its_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those that it was trained with; a folder of weights alone has none."""
    trained = dataclasses.replace(
        config_class("mnist_mlp")(), hidden_sizes=(7, 8), dataset="digits", output_dir="before"
    )
    flags = ("--evaluate-only", "--init-from", write_run(tmp_path / "run", trained))
    config = parse(monkeypatch, "mnist_mlp", *flags)
    assert (config.hidden_sizes, config.dataset, config.output_dir) == ((7, 8), "digits", None)
    assert (config.evaluate_only, config.init_from) == (True, str(flags[2]))
    (tmp_path / "model").mkdir()
    config = parse(monkeypatch, "mnist_mlp", *flags[:2], tmp_path / "model")
    assert config.hidden_sizes == (512, 512)
    config = parse(monkeypatch, "mnist_mlp", *flags[1:])
    assert config.hidden_sizes == (512, 512)


# Files that can't be repeated.


def test_config_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no file could have such a name."""
    for path in ("nowhere.json", "x" * 300, "/proc/self/none/config.json"):
        with pytest.raises(UserError, match=r"does not exist: pass a run's config\.json"):
            parse(monkeypatch, "mnist_mlp", "--config", path)


def test_config_of_another_recipe_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A `config.json` of another recipe is refused with what it has too much."""
    path = write_run(tmp_path, config_class("bert")(), "bert")
    with pytest.raises(UserError) as error:
        parse(monkeypatch, "mnist_mlp", "--config", path)
    assert "max_length" in error.value.message
    assert "another recipe" in error.value.message


def test_config_of_another_recipe_with_the_same_flags_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The recipe's name decides too, where all flags of a file are known here."""
    with pytest.raises(UserError, match="belongs to another recipe, resnet"):
        parse(monkeypatch, "mnist_mlp", "--config", write_run(tmp_path, TrainingConfig(), "resnet"))


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"config": 3}', b"\x00", b'{"config": []}', b"\xff", b"[" * 10**5],
)
def test_file_that_is_no_config_is_refused(
    content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file that no recipe wrote is refused, and named."""
    path = tmp_path / "notes.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        parse(monkeypatch, "mnist_mlp", "--config", path)
    assert "notes.json" in error.value.message


@pytest.mark.parametrize("recipe", RECIPES)
def test_wrong_type_in_a_config_file_is_refused(
    recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each flag's value, edited into another type, ends in a message that names it."""
    directory = write_run(tmp_path, config_class(recipe)(), recipe)
    path = directory / "config.json"
    whole = json.loads(path.read_text())
    for name in whole["config"]:
        if not role_of(config_class(recipe), name).repeated:
            continue
        for value in ({}, ["many", 3], 2.5 if kind_of(config_class(recipe), name) is int else {}):
            path.write_text(json.dumps({**whole, "config": whole["config"] | {name: value}}))
            with pytest.raises(UserError, match=f"for --{name.replace('_', '-')}: "):
                parse(monkeypatch, recipe, "--config", path)


def test_impossible_value_in_a_config_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Values from a file are checked as flags are."""
    config = dataclasses.replace(config_class("mnist_mlp")(), batch_size=0)
    with pytest.raises(UserError, match=r"config\.json has 0 for --batch-size: give 1 to"):
        parse(monkeypatch, "mnist_mlp", "--config", write_run(tmp_path, config))


# Supervisors.


@pytest.mark.parametrize("flags", [("--learning-rate", 0.5), ("--larning-rate", 0.5)])
@pytest.mark.parametrize("by", ["auto", "name", "checkpoint"])
def test_mistake_after_a_kill_is_not_tried_again(
    flags: tuple[object, ...], by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`status.json` tells the supervisor; the right command goes on all the same."""
    run = write_run(tmp_path / "run", config_class("mnist_mlp")())
    checkpoint = run / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    asked: dict[str, tuple[object, ...]] = {
        "auto": ("--output-dir", run, "--resume", "auto"),
        "name": ("--resume", run),
        "checkpoint": ("--resume", checkpoint),
    }
    with pytest.raises(SystemExit) as refused:
        parse(monkeypatch, "mnist_mlp", *asked[by], *flags)
    assert refused.value.code
    status = status_of(run)
    assert (status["status"], status["resumable"]) == ("failed", False)
    assert status["global_step"] == 7
    assert "learning-rate 0.5" in status["reason"] or "as it printed" in status["reason"]
    assert parse(monkeypatch, "mnist_mlp", *asked[by]).output_dir == str(run)


def test_mistake_says_nothing_of_a_run_that_is_not_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither of one beside it nor of a finished one."""
    run = write_run(tmp_path, config_class("mnist_mlp")())
    monkeypatch.chdir(run)
    for flags in (("--output-dir", run), ("--resume", "auto"), ("--resume", "nowhere")):
        with pytest.raises(SystemExit):
            parse(monkeypatch, "mnist_mlp", "--larning-rate", 1, *flags)
        assert status_of(run)["status"] == "running"
    write_run(run, config_class("mnist_mlp")(), status="finished")
    with pytest.raises(SystemExit):
        parse(monkeypatch, "mnist_mlp", "--larning-rate", 1, "--resume", run)
    assert status_of(run)["status"] == "finished"


# Help.


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_names_each_flag(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--help` names each flag with its help and default, under the recipe's first words."""
    module = import_module(f"recipes.{recipe}")
    monkeypatch.setattr(sys, "argv", [f"{recipe}.py", "--help"])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as shown:
        parse_config(module.Config, module.__doc__)
    assert not shown.value.code
    said = plain(capsys.readouterr().out)
    assert module.__doc__.split("\n")[0] in said
    for owner, path in ((module.Config, module.__file__), (TrainingConfig, "common/config.py")):
        helps = help_of(owner, Path(REPOSITORY, path))
        for name, text in helps.items():
            assert f"--{name.replace('_', '-')}" in said
            if owner is module.Config or name not in module.Config.__annotations__:
                assert text in said, name
    assert "Newest checkpoints to keep. (default: 2)" in said
    assert "None" not in said


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_is_in_groups(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each flag under its heading; a recipe's own among the data, or at the end."""
    monkeypatch.setenv("COLUMNS", "100")  # one heading below the other
    with pytest.raises(SystemExit):
        parse(monkeypatch, recipe, "--help")
    parts = re.split(r"(?m)^\W*(\w+) options\W*$", capsys.readouterr().out)
    groups = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert [*groups] == ["data", "optimisation", "precision", "output", "tracking", "recipe"]
    own = {
        "mnist_mlp": "--dropout",
        "resnet": "--label-smoothing",
        "bert": "--max-length",
        "cifar10_fast": "--head-rate",
    }
    column = "--text-columns" if recipe == "bert" else "--image-column"
    placed = {"data": column, "optimisation": "--epochs", "precision": "--seed"}
    for group, name in {**placed, "output": "--log-every", "recipe": own[recipe]}.items():
        assert [title for title, text in groups.items() if f"{name} " in text] == [group]


def help_of(owner: type[TrainingConfig], source: Path) -> dict[str, str]:
    """Return each flag's help, which is one comment: beside the field, or above it."""
    text = source.read_text()
    found = {}
    for name in owner.__annotations__:
        beside = re.search(rf"^    {name}: .*  # (.+\.)$", text, re.MULTILINE)
        above = re.search(rf"^    # (.+\.)\n    {name}: [^#\n]*$", text, re.MULTILINE)
        (one,) = [comment for comment in (beside, above) if comment]
        found[name] = one[1]
    return found


# A recipe's own.


@dataclass(kw_only=True)
class Own(TrainingConfig):
    """With a flag that has limits, and two that must agree."""

    count: int = flag(3, least=1, most=5)
    names: tuple[str, ...] = ()

    def validate(self) -> None:
        super().validate()
        if len(self.names) > self.count:
            raise UserError("more names than --count")


def test_flags_of_a_recipes_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits, and a check of its own besides the shared one."""

    def read(*given: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["script.py", *given])
        return parse_config(Own, "What it does.")

    assert read() == Own()
    assert read("--count", "2", "--names", "a", "b") == Own(count=2, names=("a", "b"))
    with pytest.raises(UserError, match="--count 6 can't work: give 1 to 5"):
        read("--count", "6")
    with pytest.raises(UserError, match="more names"):
        read("--count", "1", "--names", "a", "b")
    with pytest.raises(UserError, match="--evaluate-only needs a model"):
        read("--evaluate-only")


@pytest.mark.parametrize(
    "secret", ["hf_" + "aB3" * 11, "wandb_v1_" + "aB3_" * 8, "ghp_" + "aB3" * 12]
)
def test_token_is_refused_wherever_it_stands(secret: str) -> None:
    """The command is kept with the run: no word of it may be a token, which is not repeated."""
    with pytest.raises(UserError, match="--notes holds a user's name or token") as caught:
        refuse_credentials(["--seed", "1", "--notes", f"with {secret}"])
    assert secret not in caught.value.message
    refuse_credentials(["--init-from", "hf_finetuned_models_of_last_week", "--notes", "gh_pages"])
