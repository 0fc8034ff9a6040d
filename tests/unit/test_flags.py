"""Limits and roles: stated once at a flag's field, and applied wherever it is read."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_origin

import numpy as np
import pytest
from pydantic import JsonValue, TypeAdapter

from common.config import TrainingConfig
from common.errors import UserError
from common.flags import (
    ROLES,
    as_typed,
    check_limits,
    check_number,
    expected_values,
    flag,
    flag_values_of,
    from_json,
    role_of,
    spelled,
    stated_metadata,
)
from common.storage.json_files import json_safe
from common.system.platforms.commands import quoted
from tests.launch import RECIPES
from tests.unit.recipes import config_class, kind_of

CLASSES = [TrainingConfig, *map(config_class, RECIPES)]
FIELDS = [
    pytest.param(owner, field.name, id=f"{owner.__module__}-{field.name}")
    for owner in CLASSES
    for field in dataclasses.fields(owner)
]
NUMBERS = [
    case for case in FIELDS
    if kind_of(*case.values) in (int, float, tuple[int, ...])  # type: ignore[arg-type]
]  # fmt: skip
TEXTS = [
    case for case in FIELDS
    if kind_of(*case.values) in (str, tuple[str, ...])  # type: ignore[arg-type]
]  # fmt: skip
ROLE_OF_FLAGS = {
    "data": "dataset dataset_config label_column validation_share init_from image_column "
    "text_columns streaming",
    "pace": "batch_size gradient_accumulation_steps num_workers num_threads data_placement "
    "log_every eval_every checkpoint_every effective_batch_size",
    "record": "tracker project group tags log_model target keep_checkpoints collective_timeout "
    "log_gradients",
    "once": "config output_dir resume run_name notes profile profile_shapes",
    "kind": "evaluate_only",
}


def with_value(owner: type[TrainingConfig], name: str, number: Any) -> TrainingConfig:
    """Return the default config with another number in one flag."""
    default = getattr(owner(), name)
    value = (*default, number) if isinstance(default, tuple) else number
    return dataclasses.replace(owner(), **{name: value})


@pytest.mark.parametrize(("owner", "name"), NUMBERS)
def test_limits_are_kept(owner: type[TrainingConfig], name: str) -> None:
    """A number at a limit is taken. One beyond it is refused with the flag and its limits."""
    least, most = stated_metadata(owner, name)["limits"]
    is_whole = kind_of(owner, name) is not float
    assert not is_whole or None not in (least, most), "a whole number needs both"
    beyond: list[Any] = [10**20, -(10**20)] if is_whole else [math.nan, math.inf, -math.inf]
    for limit, outwards in ((least, -math.inf), (most, math.inf)):
        if limit is not None:
            check_limits(with_value(owner, name, limit))
            step = math.copysign(1, outwards)
            beyond.append(limit + step if is_whole else math.nextafter(limit, outwards))
    for number in beyond:
        number = int(number) if is_whole else number
        with pytest.raises(UserError) as refused:
            check_limits(with_value(owner, name, number))
        assert refused.value.message.startswith(f"{spelled(name)} {number} is out of range: pass ")


@pytest.mark.parametrize("empty", ["", " "])
@pytest.mark.parametrize(("owner", "name"), TEXTS)
def test_empty_text_is_refused(owner: type[TrainingConfig], name: str, empty: str) -> None:
    """It is a variable of the shell that is not set, and no path and no name."""
    value = (empty,) if isinstance(getattr(owner(), name), tuple) else empty
    with pytest.raises(UserError) as refused:
        check_limits(dataclasses.replace(owner(), **{name: value}))
    expected = f"{spelled(name)} {empty!r} can't be used: pass text that is not empty, or leave"
    assert refused.value.message.startswith(expected)


def test_empty_text_is_allowed_if_it_is_the_default() -> None:
    """A recipe's own flag may mean something by it."""

    @dataclass
    class Prefixed:
        prefix: str = ""
        name: str = "x"

    check_limits(Prefixed())
    with pytest.raises(UserError, match="--name '' can't be used"):
        check_limits(Prefixed(name=""))


@pytest.mark.parametrize("owner", CLASSES)
def test_roles_are_as_agreed(owner: type[TrainingConfig]) -> None:
    """A recipe's own default does not change the role of a flag."""
    for field in dataclasses.fields(owner):
        name = field.name
        role = next((r for r, names in ROLE_OF_FLAGS.items() if name in names.split()), "learning")
        assert role_of(owner, name) == ROLES[role], name


@pytest.mark.parametrize("owner", CLASSES)
def test_defaults_are_within_their_limits(owner: type[TrainingConfig]) -> None:
    """A default of None counts as valid."""
    check_limits(owner())
    with pytest.raises(UserError, match="--batch-size 0 is out of range"):
        check_limits(owner(batch_size=0))


@dataclass
class Base:
    rate: float = flag(0.5, least=0, most=1, role="pace")
    sizes: tuple[int, ...] = flag((1,), least=1)
    name: str = "x"


@dataclass
class Own(Base):
    rate: float = 0.25
    name: str = flag("y", role="data")
    choice: Literal["a", "b"] = "a"
    maybe: int | None = None


def test_overridden_default_keeps_limits_and_role() -> None:
    """A class may also state new ones."""
    assert Own().rate == 0.25
    assert role_of(Own, "rate") == ROLES["pace"]
    assert role_of(Own, "name") == ROLES["data"]
    assert role_of(Base, "name") == role_of(Own, "choice") == ROLES["learning"]
    with pytest.raises(UserError, match="--rate 2 is out of range: pass a number from 0 to 1"):
        check_limits(Own(rate=2))
    with pytest.raises(UserError, match="--sizes 0 is out of range: pass 1 or more"):
        check_limits(Own(sizes=(3, 0)))


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "1 or more"), (0.5, "1 or more"), (math.nan, "a finite number"), (1, None), (None, None)],
)
def test_number_of_a_tool_has_limits(number: float | None, expected: str | None) -> None:
    """A flag that is not passed has no number to check."""
    if expected is None:
        check_number("seeds", number, least=1)
        return
    with pytest.raises(UserError) as refused:
        check_number("seeds", number, least=1)
    assert refused.value.message == f"--seeds {number} is out of range: pass {expected}"


def test_json_lists_become_tuples() -> None:
    """An integer is a valid real number."""
    values = {"rate": 1, "sizes": [1, 2], "name": "x", "choice": "b", "maybe": None}
    assert from_json(Own, values, "file") == {**values, "sizes": (1, 2)}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("epochs", "three", "a value of type int | None"),
        ("batch_size", 2.5, "a value of type int"),
        ("dropout", None, "a value of type float"),
        ("keep", "first", "a value of type Literal['best', 'last']"),
        ("deterministic", 1, "a value of type bool"),
        ("tags", [3], "a value of type tuple[str, ...]"),
        ("output_dir", 3, "a value of type str | None"),
        ("epochs", np.int64(3), None),
        ("learning_rate", np.float32(0.5), None),
        ("learning_rate", 1, None),
        ("learning_rate", np.float64(0.5), None),
        ("hidden_sizes", np.array([64, 32]), None),
        ("hidden_sizes", [64, 32], None),
        ("tags", ["a"], None),
        ("output_dir", Path("runs/a"), None),
    ],
)
def test_types_of_a_program_are_checked(name: str, value: Any, expected: str | None) -> None:
    """The message is as that of a `config.json`, which can store all values that are accepted."""
    config: Any = config_class("mnist_mlp")(**{name: value})
    if expected is None:
        TypeAdapter(JsonValue).validate_python(json_safe(flag_values_of(config)[name]))
        return
    with pytest.raises(UserError) as refused:
        flag_values_of(config)
    assert refused.value.problem == f"Config({name}={value!r}) can't be used"
    assert refused.value.advice == f"pass {expected}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_defaults_have_their_types(recipe: str) -> None:
    """A program may leave all flags out."""
    flag_values_of(config_class(recipe)())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("rate", value) for value in ("0.5", None, [0.5], {})],
        *[("sizes", value) for value in (3, ["a"], [1, None], [1.5], None)],
        *[("name", value) for value in (3, None, ["x"])],
        *[("choice", value) for value in ("c", None, 1)],
        *[("maybe", value) for value in ("3", 1.5, [])],
    ],
)
def test_value_of_another_type_is_refused(name: str, value: Any) -> None:
    """Unlike words of a command line, values of a file are not converted."""
    with pytest.raises(UserError) as refused:
        from_json(Own, {name: value}, "some/config.json")
    assert refused.value.message.startswith("some/config.json contains ")
    assert f"an invalid value of --{name}, " in refused.value.message


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("name", ["läuft", "数据", "x" * 250])
def test_non_ascii_paths_are_accepted_in_any_locale(
    name: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ASCII locale gives Python their bytes in another form."""

    def fsencode(text: str) -> bytes:
        return text.encode(encoding, "surrogateescape")

    monkeypatch.setattr("common.flags.os.fsencode", fsencode)
    path = name.encode().decode(encoding, "surrogateescape")
    assert expected_values(TrainingConfig, "output_dir", path) is None
    for wrong in (f"{path}\0", f"{path}\udcff", "\ud800"):
        assert expected_values(TrainingConfig, "output_dir", wrong) == "text without NUL, in UTF-8"


TUPLES = [
    case for case in FIELDS
    if get_origin(kind_of(*case.values)) is tuple  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name"), TUPLES)
def test_flag_without_a_value_is_refused(owner: type[TrainingConfig], name: str) -> None:
    """The command line or a program may pass none. An empty default allows this.

    A saved file is read as it is: a run of an earlier version may have had no value.
    """
    default = getattr(owner(), name)
    config = dataclasses.replace(owner(), **{name: ()})
    assert from_json(owner, {name: []}, "some/config.json") == {name: ()}
    if not default:
        check_limits(config)
        return
    with pytest.raises(UserError) as refused:
        check_limits(config)
    assert refused.value.problem == f"{spelled(name)} has no value"
    example = " ".join(map(str, default))
    assert refused.value.advice == f"pass one or more numbers, such as {spelled(name)} {example}"


def test_limits_may_be_passed_by_position() -> None:
    """Copies of earlier recipes pass them so."""

    @dataclasses.dataclass(kw_only=True)
    class Config(TrainingConfig):
        image_size: int | None = flag(None, 1, 65536, role="size")

    check_limits(Config(image_size=65536))
    with pytest.raises(UserError, match="--image-size 0 is out of range"):
        check_limits(Config(image_size=0))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("batch_size", 64, "--batch-size 64"),
        ("hidden_sizes", (64, 32), "--hidden-sizes 64 32"),
        ("streaming", True, "--streaming"),
        ("streaming", False, "--no-streaming"),
        ("dataset", "digits", "--dataset digits"),
        ("dataset", "my digits", f"--dataset {quoted('my digits')}"),
        ("horizontal_flip", False, "--horizontal-flip False"),
        ("widths", (64, 256), "--widths 64 256"),
        ("notes", "--x", "--notes=--x"),
    ],
)
def test_flag_is_shown_as_it_is_typed(name: str, value: object, expected: str) -> None:
    """A switch has no value. A value with a space is quoted."""
    owner = config_class("mnist_mlp" if name == "hidden_sizes" else "cifar10_fast")
    assert as_typed(owner, name, value) == expected
