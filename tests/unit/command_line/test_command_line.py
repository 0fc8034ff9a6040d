"""Flags: typed, shared, and checked before anything is loaded. A mistake ends in one sentence."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from common.command_line.credentials import refuse_credentials
from common.command_line.help_groups import GROUPS, comments_of
from common.command_line.parsing import parse_words
from common.command_line.saved_defaults import read_config
from common.config import TrainingConfig, parse_config
from common.errors import UserError
from common.flags import flag, role_of, spelled, words_of_flag
from tests.examples import EXAMPLES
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

MODULES_OF_EXAMPLES = [f"examples.{example.name}" for example in EXAMPLES]

# Mistakes on the command line.


@pytest.mark.parametrize(
    ("recipe", "typo", "suggestion"),
    [
        *[(recipe, "--lerning-rate", "--learning-rate") for recipe in RECIPES],
        ("mnist_mlp", "--hidden-size", "--hidden-sizes"),
        ("resnet", "--horizontl-flip", "--horizontal-flip"),
        ("bert", "--max-lenght", "--max-length"),
    ],
)
def test_unknown_flag_is_refused_with_the_nearest_one(
    recipe: str,
    typo: str,
    suggestion: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message names the mistyped flag and the one that was probably meant."""
    with pytest.raises(SystemExit) as refused:
        parse(monkeypatch, recipe, typo, 1)
    output = plain("".join(capsys.readouterr()))
    assert refused.value.code == 2
    assert typo in output
    assert suggestion in output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--batch-size", "many"), ["--batch-size", "many"]),
        (("--mixed-precision", "fp8"), ["fp8", "bf16"]),
        (("--tracker", "paper"), ["paper", "tensorboard", "trackio"]),
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
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message names the flag or the value, and the choices if there are any."""
    with pytest.raises(SystemExit) as error:
        parse(monkeypatch, "mnist_mlp", *flags)
    assert error.value.code not in (0, None)
    output = plain("".join(capsys.readouterr()))
    assert all(word in output for word in words), output


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
        (("--num-threads", 1025), "pass a number from 1 to 1024"),
        (("--hidden-sizes", 64, 0), "--hidden-sizes 0"),
        (("--max-grad-norm", -1), "--max-grad-norm -1"),
        (("--image-size", 65537), "pass a number from 1 to 65536"),
    ],
)
def test_value_beyond_its_limits_is_refused(
    flags: tuple[object, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser names the flag, the value and the limits."""
    with pytest.raises(UserError) as error:
        parse(monkeypatch, "mnist_mlp", *flags)
    assert sentence in error.value.message
    assert "is out of range: pass" in error.value.message


@pytest.mark.slow  # It parses some 50 command lines.
@pytest.mark.parametrize("recipe", RECIPES[:1])
def test_huge_integers_are_refused(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Huge integers are refused, because they become sizes, timeouts or numbers of processes."""
    owner = config_class(recipe)
    for field in dataclasses.fields(owner):
        if kind_of(owner, field.name) is int:
            for number in (10**20, -(10**20)):
                with pytest.raises(UserError, match=rf"{number} is out of range: pass"):
                    parse(monkeypatch, recipe, *words(owner, field.name, number))


@pytest.mark.parametrize("name", ["config", "init_from", "resume", "output_dir", "label_column"])
def test_empty_text_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for flags that are read before all others, because they name folders and files."""
    with pytest.raises(UserError, match=f"{spelled(name)} '' can't be used: pass text that is not"):
        parse(monkeypatch, "mnist_mlp", spelled(name), "")


def test_evaluate_only_needs_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names `--init-from`."""
    with pytest.raises(UserError, match=r"--evaluate-only .*--init-from"):
        parse(monkeypatch, "bert", "--evaluate-only")


def test_target_may_be_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric need not lie between 0 and 1."""
    for number in (-3.5, 0.0, 97.0):
        assert parse(monkeypatch, "mnist_mlp", "--target", number).target == number


def test_only_rank_0_prints_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other ranks meet the same mistake, wait until rank 0 printed it, and exit with its status."""
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
def test_flag_with_credentials_is_refused(
    name: str,
    value: str,
    joined: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message names the flag, even a misspelt one, and never repeats the value."""
    flag = [f"--{name}={value}"] if joined else [f"--{name}", value]
    with pytest.raises(UserError) as refused:
        parse(monkeypatch, "mnist_mlp", "--epochs", 1, *flag)
    shown = capsys.readouterr()
    assert f"--{name}" in refused.value.message
    assert URL_TOKEN not in refused.value.message + shown.out + shown.err


# Valid flags.


@pytest.mark.parametrize("recipe", RECIPES)
def test_shared_flags_are_the_same_in_every_recipe(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each recipe has all shared flags, in kebab-case and typed."""
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
def test_flag_changes_its_own_field_only(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without flags, a recipe runs with the defaults of its `Config`.

    Each command line has half of the flags. Of any two flags, one command line has the first
    without the second, and another the second without the first.
    """
    owner = config_class(recipe)
    defaults = owner()
    assert parse(monkeypatch, recipe) == defaults
    # These change other fields, too.
    exceptions = ("config", "resume", "evaluate_only", "effective_batch_size")
    names = [field.name for field in dataclasses.fields(owner) if field.name not in exceptions]
    values = {name: other_value(defaults, name) for name in names}
    for digit, bit in itertools.product(range(len(names).bit_length()), (0, 1)):
        half = [name for number, name in enumerate(names) if (number >> digit) % 2 == bit]
        flags = [word for name in half for word in words(owner, name, values[name])]
        expected = dataclasses.replace(defaults, **{name: values[name] for name in half})
        assert parse(monkeypatch, recipe, *flags) == expected


# Values of each type of a flag, of which each one may be spelled in another way.
VALUES: dict[Any, list[Any]] = {
    bool: [False, True],
    int: [7, -3],
    float: [0.5, -1e-05, 3.0],
    str: ["other", "two words", "-x", "--epochs", "a=b", "it's"],
    NoneType: [None],
}


def values_of_type(flag_type: Any) -> list[Any]:
    """Return values of a flag's type, such as both of a switch and each choice of a `Literal`."""
    if flag_type in VALUES:
        return VALUES[flag_type]
    members = get_args(flag_type)
    if get_origin(flag_type) is Literal:
        return [*members]
    if get_origin(flag_type) is tuple:
        plain = [value for value in VALUES[members[0]] if not str(value).startswith("--")]
        return [(plain[0],), (*plain[:2],), ()]
    return [value for member in members for value in values_of_type(member)]


@pytest.mark.parametrize(
    "name_of_module",
    [
        *(f"recipes.{recipe}" for recipe in RECIPES),
        *(pytest.param(name, marks=pytest.mark.slow) for name in MODULES_OF_EXAMPLES),
    ],
)
def test_words_of_each_flag_are_read_back(
    name_of_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`config.json` and model cards have a command line, which a user may repeat."""
    owner = import_module(name_of_module).Config
    types = get_type_hints(owner)
    values = {field.name: values_of_type(types[field.name]) for field in dataclasses.fields(owner)}
    for number in range(max(map(len, values.values()))):
        chosen = {name: each[number % len(each)] for name, each in values.items()}
        words = [word for item in chosen.items() for word in words_of_flag(owner, *item)]
        monkeypatch.setattr(sys, "argv", ["script.py", *words])
        assert vars(parse_words(owner, None, owner())) == chosen


@pytest.mark.parametrize("recipe", RECIPES)
def test_config_file_repeats_the_flags_of_a_run(
    recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Flags on the command line override those of `--config FILE`."""
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
def test_config_file_repeats_exactly_the_repeated_roles(recipe: str, tmp_path: Path) -> None:
    """Flags that decide what a run computes are repeated, and flags of a single run are not."""
    owner = config_class(recipe)
    names = [field.name for field in dataclasses.fields(owner)]
    config = dataclasses.replace(owner(), **{name: other_value(owner(), name) for name in names})
    again = read_config(owner, write_run(tmp_path, config, recipe))
    for name in names:
        kept = config if role_of(owner, name).repeated else owner()
        assert getattr(again, name) == getattr(kept, name), name


def test_evaluate_only_takes_the_flags_of_the_trained_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder that holds weights only has no flags to take."""
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


# Invalid files for --config.


def test_missing_config_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name may even be one that no file can have."""
    for path in ("nowhere.json", "x" * 300, "/proc/self/none/config.json"):
        with pytest.raises(UserError, match=r"does not exist: pass the config\.json of a run"):
            parse(monkeypatch, "mnist_mlp", "--config", path)


def test_damaged_config_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This command starts a new run already, so the advice names another file."""
    path = tmp_path / "config.json"
    for contents in ("{", "[]"):
        path.write_text(contents)
        with pytest.raises(UserError) as refused:
            parse(monkeypatch, "mnist_mlp", "--config", path)
        assert str(path) in refused.value.problem
        advice = "restore it from a backup, or pass the config.json of another run"
        assert refused.value.advice == advice


def test_config_of_another_recipe_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The message names the flags that this recipe lacks."""
    path = write_run(tmp_path, config_class("bert")(), "bert")
    with pytest.raises(UserError) as error:
        parse(monkeypatch, "mnist_mlp", "--config", path)
    assert "--max-length" in error.value.message
    assert "another recipe" in error.value.message
    assert error.value.advice == "pass the config.json of a run of this recipe"


def test_evaluated_run_of_another_recipe_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The user named a run, so the advice does not ask for its config.json."""
    path = write_run(tmp_path, config_class("bert")(), "bert")
    with pytest.raises(UserError, match=r"another recipe.*--max-length") as error:
        parse(monkeypatch, "mnist_mlp", "--evaluate-only", "--init-from", path)
    assert error.value.advice.startswith("evaluate that run with its own recipe")


def test_config_of_another_recipe_with_the_same_flags_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The recipe's name decides if this recipe knows all flags of the file."""
    with pytest.raises(UserError, match="belongs to another recipe, resnet"):
        parse(monkeypatch, "mnist_mlp", "--config", write_run(tmp_path, TrainingConfig(), "resnet"))


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"config": 3}', b"\x00", b'{"config": []}', b"\xff", b"[" * 10**5],
)
def test_file_that_is_no_config_is_refused(
    content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The message names the file."""
    path = tmp_path / "notes.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        parse(monkeypatch, "mnist_mlp", "--config", path)
    assert "notes.json" in error.value.message


@pytest.mark.parametrize("recipe", RECIPES)
def test_wrong_type_in_a_config_file_is_refused(
    recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each value in turn gets another type, and the message names its flag."""
    directory = write_run(tmp_path, config_class(recipe)(), recipe)
    path = directory / "config.json"
    whole = json.loads(path.read_text())
    for name in whole["config"]:
        if not role_of(config_class(recipe), name).repeated:
            continue
        is_integer = kind_of(config_class(recipe), name) is int
        for value in ({}, ["many", 3], 2.5 if is_integer else {}):
            path.write_text(json.dumps({**whole, "config": whole["config"] | {name: value}}))
            with pytest.raises(
                UserError, match=f"an invalid value of --{name.replace('_', '-')}, "
            ):
                parse(monkeypatch, recipe, "--config", path)


def test_value_beyond_its_limits_in_a_config_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Values from a file are checked like flags."""
    config = dataclasses.replace(config_class("mnist_mlp")(), batch_size=0)
    with pytest.raises(
        UserError,
        match=r"contains an invalid value of --batch-size, 0: replace it with a number from 1 to",
    ):
        parse(monkeypatch, "mnist_mlp", "--config", write_run(tmp_path, config))


# Supervisors.


@pytest.mark.parametrize("flags", [("--learning-rate", 0.5), ("--larning-rate", 0.5)])
@pytest.mark.parametrize("selection", ["auto", "name", "checkpoint"])
def test_mistake_on_resume_stops_the_supervisor(
    flags: tuple[object, ...], selection: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`status.json` says that the run is not resumable, but the corrected command resumes it."""
    run = write_run(tmp_path / "run", config_class("mnist_mlp")())
    checkpoint = run / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    resume_flags: dict[str, tuple[object, ...]] = {
        "auto": ("--output-dir", run, "--resume", "auto"),
        "name": ("--resume", run),
        "checkpoint": ("--resume", checkpoint),
    }
    with pytest.raises(SystemExit) as refused:
        parse(monkeypatch, "mnist_mlp", *resume_flags[selection], *flags)
    assert refused.value.code
    status = status_of(run)
    assert (status["status"], status["resumable"]) == ("failed", False)
    assert status["global_step"] == 7
    assert "learning-rate 0.5" in status["reason"] or "see its output" in status["reason"]
    assert parse(monkeypatch, "mnist_mlp", *resume_flags[selection]).output_dir == str(run)


def test_mistake_leaves_the_status_of_other_runs_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither a run that is not resumed nor a finished one is marked as failed."""
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


@pytest.mark.parametrize(
    "name_of_module",
    [
        *(f"recipes.{recipe}" for recipe in RECIPES),
        *(pytest.param(name, marks=pytest.mark.slow) for name in MODULES_OF_EXAMPLES),
    ],
)
def test_help_names_each_flag(
    name_of_module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--help` shows each flag with its help and default, below the script's first line."""
    module = import_module(name_of_module)
    monkeypatch.setattr(sys, "argv", [f"{module.__file__}", "--help"])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as shown:
        parse_config(module.Config, module.__doc__)
    assert not shown.value.code
    output = plain(capsys.readouterr().out)
    assert module.__doc__.split("\n")[0] in output
    for owner, path in ((module.Config, module.__file__), (TrainingConfig, "common/config.py")):
        helps = help_of(owner, Path(REPOSITORY, path))
        for name, text in helps.items():
            assert f"--{name.replace('_', '-')}" in output
            if owner is module.Config or name not in module.Config.__annotations__:
                assert text in output, name
    assert "Newest checkpoints to keep. (default: 2)" in output
    assert "None" not in output


@pytest.mark.parametrize("name_of_module", MODULES_OF_EXAMPLES)
def test_each_flag_of_an_example_has_a_help(name_of_module: str) -> None:
    """The comment at its field is the help, and not one of the base class."""
    module = import_module(name_of_module)
    assert comments_of(module.Config) == help_of(module.Config, Path(str(module.__file__)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_is_in_groups(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each flag has a heading. A recipe's own flags stand among the data flags or at the end."""
    monkeypatch.setenv("COLUMNS", "100")  # one heading below another
    with pytest.raises(SystemExit):
        parse(monkeypatch, recipe, "--help")
    parts = re.split(r"(?m)^\W*(\w+) options\W*$", capsys.readouterr().out)
    groups = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert [*groups] == [*GROUPS]
    recipe_flags = {
        "mnist_mlp": "--dropout",
        "resnet": "--label-smoothing",
        "bert": "--max-length",
        "cifar10_fast": "--head-rate",
    }
    column = "--text-columns" if recipe == "bert" else "--image-column"
    flags_by_group = {
        "data": column,
        "optimisation": "--seed",
        "computation": "--num-workers",
        "evaluation": "--early-stopping",
        "run": "--config",
        "logging": "--tags",
        "recipe": recipe_flags[recipe],
    }
    for group, name in flags_by_group.items():
        assert [title for title, text in groups.items() if f"{name} " in text] == [group]


def test_each_shared_flag_is_in_one_group() -> None:
    """A flag without a group would stand among the recipe's own."""
    names = [name for flags in GROUPS.values() for name in flags.split()]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(TrainingConfig))


@dataclass(kw_only=True)
class Formatted(TrainingConfig):
    """A config whose lines a formatter has broken."""

    # fmt: off

    rate: float = (
        2e-3  # Beside the value.
    )
    size: int = flag(
        32, least=1
    )  # Beside the closing bracket.
    # Above the field,
    # on two lines.
    share: float = flag(
        0.1, least=0,
    )
    text: str = "a  # b"
    # fmt: on


def test_help_survives_a_formatter() -> None:
    """It moves a comment into or behind the brackets of a long field."""
    assert comments_of(Formatted) == {
        "rate": "Beside the value.",
        "size": "Beside the closing bracket.",
        "share": "Above the field, on two lines.",
    }


def help_of(owner: type[TrainingConfig], source: Path) -> dict[str, str]:
    """Return each flag's help: the comment beside the field, or the one above it, of some lines."""
    text = source.read_text()
    helps = {}
    for name in owner.__annotations__:
        beside = re.search(rf"^    {name}: .*  # (.+\.)$", text, re.MULTILINE)
        above = re.search(rf"((?:^    # .+\n)+)    {name}: [^#\n]*$", text, re.MULTILINE)
        (comment,) = [match for match in (beside, above) if match]
        helps[name] = re.sub(r"\s*\n *# |^ *# ", " ", comment[1]).strip()
        assert helps[name].endswith(".")
    return helps


# Flags of a single recipe.


@dataclass(kw_only=True)
class Own(TrainingConfig):
    """A config with a flag that has limits, and two flags that must agree."""

    count: int = flag(3, least=1, most=5)
    names: tuple[str, ...] = ()

    def validate(self) -> None:
        super().validate()
        if len(self.names) > self.count:
            raise UserError("more names than --count")


def test_flags_of_a_recipe_have_limits_and_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe's own `validate` runs besides the shared one."""

    def read(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
        return parse_config(Own, "What it does.")

    assert read() == Own()
    assert read("--count", "2", "--names", "a", "b") == Own(count=2, names=("a", "b"))
    with pytest.raises(UserError, match="--count 6 is out of range: pass a number from 1 to 5"):
        read("--count", "6")
    with pytest.raises(UserError, match="more names"):
        read("--count", "1", "--names", "a", "b")
    with pytest.raises(UserError, match="--evaluate-only needs a model"):
        read("--evaluate-only")


@pytest.mark.parametrize(
    "secret", ["hf_" + "aB3" * 11, "wandb_v1_" + "aB3_" * 8, "ghp_" + "aB3" * 12]
)
def test_token_is_refused_wherever_it_stands(secret: str) -> None:
    """No argument may hold a token, because the run directory keeps the command."""
    with pytest.raises(
        UserError, match=r"--notes seems to contain an access token, .*: leave it out of"
    ) as caught:
        refuse_credentials(["--seed", "1", "--notes", f"with {secret}"])
    assert secret not in caught.value.message
    for named in (["--run-name", "a:b@c"], ["--run_name=a:b@c"]):
        with pytest.raises(UserError, match=r"--run.name seems to contain .* password: leave"):
            refuse_credentials(named)
    for loaded in (["--init-from", secret], [f"--init_from={secret}"]):
        with pytest.raises(
            UserError, match=r"--init.from seems to contain an access token, .* HF_TOKEN"
        ):
            refuse_credentials(loaded)
    for unnamed in ([secret], ["--tags", "first", secret], [f"--{secret}"]):
        with pytest.raises(UserError, match="the command line seems to contain an access token, "):
            refuse_credentials(unnamed)
    refuse_credentials(["--init-from", "hf_finetuned_models_of_last_week", "--notes", "gh_pages"])
