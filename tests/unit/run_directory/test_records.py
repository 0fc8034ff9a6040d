"""Records: readable again after writing, and strict about everything else."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.run_directory.excerpts import Excerpt, excerpt_of
from common.run_directory.model_records import (
    ImageInput,
    InitialFacts,
    ModelFacts,
    TextInput,
    WeightsDigest,
)
from common.run_directory.record_files import (
    Record,
    parse_record,
    read_record,
    read_record_if_there,
)
from common.run_directory.records import (
    Architecture,
    DataFacts,
    Environment,
    Manifest,
    PlanFacts,
    RunConfig,
    Status,
    Summary,
)
from tests.unit.manifest_facts import facts_at

CONFIG = {
    "recipe": "tiny",
    "objective": "accuracy:max",
    "config": {"seed": 0, "tags": ["a"]},
    "given": {"seed": 0},
    "environment": {
        "device": "a CPU",
        "device_type": "cpu",
        "processor": "a CPU, AVX2",
        "world_size": 2,
        "mixed_precision": "bf16",
        "effective_batch_size": 64,
        "versions": {"torch": "2.13.0"},
    },
    "data": {"name": "digits", "sizes": {"train": 1437}},
    "architecture": {"name": "MLP", "parameters": 12},
    "plan": {"total_steps": 9, "updates_per_epoch": 3, "log_every": 1, "eval_every": 3},
    "memory_plan": {"total_mib": 1.5, "device_mib": 8.0, "weights_mib": None},
    "source": {"sha256": "00", "changes": [{"global_step": 3, "sha256": "01", "file": "x.py"}]},
}
MANIFEST = {
    **facts_at(3),
    "parts": {"model": None},
    "ranks": [{"random": {"seed": 0}}],
    "files": {"model.safetensors": {"size": 8, "sha256": "00"}},
}
REQUIRED = {
    "recipe", "objective", "config", "environment", "data", "architecture", "plan",
    "environment.device", "environment.device_type", "environment.processor",
    "environment.world_size", "environment.mixed_precision", "environment.effective_batch_size",
    "data.name",
    "architecture.name", "architecture.parameters", "plan.total_steps", "plan.updates_per_epoch",
    "plan.log_every", "plan.eval_every", "memory_plan.total_mib", "memory_plan.device_mib",
    "source.changes.0.global_step", "source.changes.0.sha256", "source.changes.0.file",
}  # fmt: skip


def places_in(value: object, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of each value within nested dicts and lists."""
    items: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for name, inner in items:
        yield (*place, name)
        yield from places_in(inner, (*place, name))


def parent_of(contents: dict, place: tuple[str | int, ...]) -> dict:
    """Return the dict or list that holds the value at a place."""
    for name in place[:-1]:
        contents = contents[name]
    return contents


def text_of(place: tuple[str | int, ...]) -> str:
    """Return a place as a message names it."""
    return ".".join(map(str, place))


# The values of flags, and the states of parts, may be any JSON.
TYPED_PLACES = [
    place for place in places_in(CONFIG) if place[0] not in ("config", "given") or len(place) == 1
]


def test_record_survives_a_round_trip(tmp_path: Path) -> None:
    """Keys of newer versions stay, and no default is added."""
    contents = {**CONFIG, "of_a_newer_version": {"a": [1]}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(contents))
    record = read_record(file, RunConfig)
    assert record.to_json() == contents
    assert record.plan.total_steps == 9
    assert record.source.changes[0].file == "x.py"


def test_constructed_record_can_be_parsed() -> None:
    """The core constructs what the tools parse."""
    record = RunConfig(
        recipe="tiny",
        objective="accuracy:max",
        config={"seed": 0},
        environment=Environment(
            device="a CPU",
            device_type="cpu",
            processor="a CPU, AVX2",
            world_size=1,
            mixed_precision="no",
            effective_batch_size=8,
        ),
        data=DataFacts(name="digits"),
        architecture=Architecture(name="MLP", parameters=3),
        plan=PlanFacts(total_steps=1, updates_per_epoch=1, log_every=1, eval_every=1),
    )
    assert parse_record(json.loads(json.dumps(record.to_json())), RunConfig, "here") == record


@pytest.mark.parametrize("place", TYPED_PLACES, ids=text_of)
def test_missing_key_has_a_default_or_gives_one_sentence(place: tuple[str | int, ...]) -> None:
    """The sentence names the file and the key."""
    contents = copy.deepcopy(CONFIG)
    del parent_of(contents, place)[place[-1]]
    if text_of(place) not in REQUIRED:
        parse_record(contents, RunConfig, "runs/x/config.json")
        return
    with pytest.raises(UserError) as caught:
        parse_record(contents, RunConfig, "runs/x/config.json")
    assert f"runs/x/config.json is damaged or was edited ({text_of(place)} is missing)" in str(
        caught.value.message
    )


@pytest.mark.parametrize("place", TYPED_PLACES, ids=text_of)
def test_value_of_another_type_gives_one_sentence(place: tuple[str | int, ...]) -> None:
    """Nothing is converted, neither text to numbers nor numbers to text."""
    for wrong in ("3", 3, 2.5, True, [3], {"a": []}, None):
        contents = copy.deepcopy(CONFIG)
        before = parent_of(contents, place)[place[-1]]
        parent_of(contents, place)[place[-1]] = wrong
        mistake = None
        try:
            parse_record(contents, RunConfig, "config.json")
        except UserError as error:
            mistake = error.message
        if mistake is not None:
            assert text_of(place) in mistake
            assert "\n" not in mistake
            continue
        is_same_type = type(wrong) is type(before) or wrong is None
        is_number = isinstance(before, float) and isinstance(wrong, int)
        is_unknown = before is None  # for example an unknown size
        assert is_same_type or is_number or is_unknown, (place, wrong)


def test_invalid_manifest_is_refused() -> None:
    """A manifest without ranks, or with an invalid receipt, is refused."""
    assert parse_record(MANIFEST, Manifest, "here").files["model.safetensors"].size == 8
    for damage in (
        {"ranks": []},
        {"ranks": None},
        {"files": {"a": 3}},
        {"files": {"a": {"size": 3}}},
        {"parts": []},
        {"parts_described": {"model": 3}},
        {"parts_described": {"model": {"groups": []}}},
        {"parts_described": {"model": {"class": "SGD", "groups": [{"parameters": ["a"]}]}}},
        {"parts_described": {"model": {"class": "SGD", "schedules": [{"rates": [0.1]}]}}},
        {"data": {"name": "tiny"}},
        {"data": {"name": "tiny", "class_names": 3}},
    ):
        with pytest.raises(UserError, match="is damaged or was edited"):
            parse_record(MANIFEST | damage, Manifest, "here")


def test_manifest_survives_a_round_trip() -> None:
    """Its keys keep their names and their order, and no default is added."""
    optimizer = {"class": "SGD", "groups": [{"parameters": ["a"], "options": {"lr": 0.1}}]}
    schedule = {"class": "Both", "rates": None, "schedules": [{"class": "One", "rates": [0.1]}]}
    contents = MANIFEST | {
        "parts_described": {"model": {"class": "Net"}, "sgd": optimizer, "schedule": schedule}
    }
    manifest = parse_record(contents, Manifest, "here")
    assert json.dumps(manifest.to_json(), sort_keys=True) == json.dumps(contents, sort_keys=True)
    assert [*manifest.to_json()][-2:] == ["parts", "ranks"]
    assert manifest.parts_described["sgd"].groups[0].options == {"lr": 0.1}
    assert manifest.shared == MANIFEST["parts"]
    assert manifest.of_ranks == MANIFEST["ranks"]


@pytest.mark.parametrize("name", sorted(MANIFEST))
def test_manifest_without_an_entry_is_refused(name: str) -> None:
    """Each manifest has all entries. Its digest is checked before."""
    assert len(MANIFEST) == len(Manifest.model_fields.keys() - {"sha256"})
    contents = {key: value for key, value in MANIFEST.items() if key != name}
    with pytest.raises(UserError, match=rf"here is damaged or was edited \({name} is missing\)"):
        parse_record(contents, Manifest, "here")


def test_missing_file_is_no_record(tmp_path: Path) -> None:
    """Where the record is required, one sentence says so."""
    assert read_record_if_there(tmp_path / "status.json", Status) is None
    with pytest.raises(UserError, match=r"status\.json does not exist"):
        read_record(tmp_path / "status.json", Status)


def test_nan_becomes_none() -> None:
    """JSON has no NaN."""
    contents = copy.deepcopy(CONFIG)
    contents["memory_plan"]["weights_mib"] = float("nan")
    memory_plan = parse_record(contents, RunConfig, "here").memory_plan
    assert memory_plan is not None
    assert memory_plan.weights_mib is None


MODEL = {
    "recipe": "tiny",
    "class": "MLP",
    "update": 9,
    "run_id": "0a",
    "arguments": {"sizes": [3, 2], "dropout": 0.5},
    "class_names": ["a", "b"],
    "channels": 3,
    "image_size": 8,
    "mean": [0.5, 0.5, 0.5],
    "std": [0.1, 0.2, 0.3],
    "white_level": None,
    "weights_sha256": "00",
}
TEXT_MODEL = {"class_names": ["a", "b"], "text_columns": ["text"], "max_length": 8}
WRONG_VALUES = ("3", 3, 2.5, True, [3], ["3"], {"a": []}, None, "\ud800")


def test_facts_of_a_model_survive_a_round_trip() -> None:
    """The entry "class" keeps its name, and what the recipe described stays."""
    facts = parse_record(MODEL, ModelFacts, "here")
    assert facts.class_name == "MLP"
    assert facts.takes_images
    assert not facts.takes_texts
    assert facts.to_json() == MODEL
    assert ModelFacts(class_name="MLP", update=9).to_json() == {"class": "MLP", "update": 9}
    assert parse_record(MODEL, ImageInput, "here").std == [0.1, 0.2, 0.3]
    assert parse_record(TEXT_MODEL, ModelFacts, "here").takes_texts
    assert parse_record(TEXT_MODEL, TextInput, "here").max_length == 8


@pytest.mark.parametrize(
    ("record_class", "contents"),
    [
        (WeightsDigest, {"weights_sha256": "00"}),
        (ModelFacts, {name: MODEL[name] for name in ("recipe", "class", "update", "arguments")}),
        (ImageInput, {name: MODEL[name] for name in ("channels", "image_size", "mean", "std")}),
        (TextInput, {name: TEXT_MODEL[name] for name in ("text_columns", "max_length")}),
    ],
)
def test_wrong_entry_of_a_model_is_named(
    record_class: type[Record], contents: dict[str, Any]
) -> None:
    """What code uses without another check has its type."""
    whole = TEXT_MODEL if record_class is TextInput else MODEL
    for name, value in contents.items():
        for wrong in WRONG_VALUES:
            if type(wrong) is type(value) or wrong is None:
                continue
            with pytest.raises(UserError, match=rf"is damaged or was edited \({name}"):
                parse_record({**whole, name: wrong}, record_class, "model.json")


def test_tolerant_records_accept_any_json_object() -> None:
    """What they do not use may have any type, and what they use is then missing or unchanged."""
    flags = {"seed": 0, "dataset": "\ud800"}
    names = ("run_id", "recipe", "config", "flags", "data", "else", "\ud800", "mean", "class_names")
    for name in names:
        for wrong in WRONG_VALUES:
            contents = {"config": flags, "flags": flags, "run_id": "0a", name: wrong}
            excerpt = excerpt_of(contents)
            assert excerpt.run_id == contents["run_id"]
            is_dict = isinstance(contents["config"], dict)
            assert excerpt.config_flags == (contents["config"] if is_dict else None)
            if name != "\ud800":
                parse_record(contents, InitialFacts, "here")
    assert excerpt_of(
        {"data": {"sizes": {"train": "3"}, "fingerprint": "01"}}
    ) == Excerpt.model_validate({"data": {"sizes": None, "fingerprint": "01"}})
    assert parse_record({"mean": None, "std": 1, "channels": []}, InitialFacts, "here").has_scaling
    assert not parse_record({"mean": [0.5]}, InitialFacts, "here").has_scaling


def test_summary_has_the_numbers() -> None:
    """A figure that was NaN is None in the file, and a user may have added a note."""
    contents = {
        "val/accuracy": 0.5,
        "progress/kept_step": 3,
        "val/f1": None,
        "note": "x",
        "ok": True,
    }
    summary = parse_record(contents, Summary, "here")
    assert summary.figures == {"val/accuracy": 0.5, "progress/kept_step": 3}
    assert summary.to_json() == contents
    assert [*summary.to_json()] == [*contents]
