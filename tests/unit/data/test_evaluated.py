"""The data of `--evaluate-only`: all of what the run never saw, or what the run held out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from common.config import TrainingConfig
from common.data.evaluated_model.model import EvaluatedModel
from common.data.evaluated_model.training_data import TrainedOn, is_same_place, own_configuration
from common.data.images import ImageData, load_images
from common.data.prepared_data.cache import Prepared, PreparedFacts
from common.data.prepared_data.unseen_samples import renumber_labels, require_same_sizes
from common.data.sources import DataSource, find_named, for_evaluation
from common.data.text import TextData, load_text
from common.errors import UserError
from common.run_directory.model_records import RequestedFormat
from tests.local_data import sentences, write_csv
from tests.unit.data.loading import images, refusal, text

NAMES = ("a", "b", "c")


def write_images(
    folder: Path, per_class: int, names: tuple[str, ...] = NAMES, split: str = "", seed: int = 0
) -> Path:
    random = np.random.default_rng(seed)
    for name in names:
        for index in range(per_class):
            path = folder / split / name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
    return folder


def write_run(run: Path, folder: Path, data: ImageData | TextData, **config: Any) -> str:
    """Write the files of a run that an evaluation reads, and return its path."""
    if isinstance(data, TextData):
        shutil.copytree(data.tokenizer_folder, run / "model")
    (run / "model").mkdir(parents=True, exist_ok=True)
    preprocessing = {n: v for n, v in data.preprocessing().items() if n != "files"}
    (run / "model" / "model.json").write_text(json.dumps(preprocessing))
    save_file({"x": torch.zeros(1)}, run / "model" / "model.safetensors")
    flags = {"dataset": str(folder), "dataset_config": None, "validation_share": None, **config}
    record = {"config": flags, "data": data.facts().to_json()}
    (run / "config.json").write_text(json.dumps(record))
    return str(run)


def evaluated(folder: Path, run: str, share: float | None = None) -> ImageData:
    source = for_evaluation(with_share(folder, share), run)
    return load_images(
        source,
        image_size=None,
        image_column=None,
        label_column=None,
        dtype=torch.float32,
        init_from=run,
    )


def with_share(folder: Path, share: float | None) -> DataSource:
    import dataclasses

    return dataclasses.replace(find_named(str(folder), None), validation_share=share)


SOURCE = DataSource("mine", "/mine", None, "named", "01")


def prepared_with(class_names: list[str], **labels: np.ndarray) -> Prepared[PreparedFacts]:
    """Return prepared data of some classes, with these labels in each split."""
    facts = PreparedFacts(class_names=class_names, notes=[])
    return Prepared(Path(), facts, {name: [split, split] for name, split in labels.items()})


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, ImageData, str]:
    """Return a folder, the data that a run read from it, and the run's path."""
    folder = write_images(tmp_path / "first", per_class=10)
    data = images(folder)
    return folder, data, write_run(tmp_path / "runs" / "one", folder, data)


@pytest.mark.parametrize("split", ["", "test", "validation", "train"])
def test_new_data_are_evaluated_completely(
    split: str, trained: tuple[Path, ImageData, str], tmp_path: Path
) -> None:
    """All 46 images count, whatever their split, though one of three classes is missing."""
    new_folder = write_images(tmp_path / "own", per_class=23, names=("a", "c"), split=split, seed=1)
    data = evaluated(new_folder, trained[2])
    role = "validation" if split == "validation" else "test"
    assert data.facts().sizes == {role: 46}
    assert data.class_names == [*NAMES]
    assert np.bincount(data.splits[role].labels).tolist() == [23, 0, 23]
    assert data.image_format.mean == trained[1].image_format.mean
    assert any("was not trained on these data" in note for note in data.notes)
    warning = f"if these data include samples of {trained[0]}"
    is_doubtful = any(warning in note for note in data.notes)
    assert is_doubtful == (split in ("", "train"))


def test_data_with_only_a_test_split_cannot_be_trained_on(tmp_path: Path) -> None:
    """Data with a test split only serve for evaluation and are refused for training."""
    folder = write_images(tmp_path / "own", per_class=5, split="test")
    assert "has no split train, only" in refusal(lambda: images(folder))


def test_data_of_the_run_keep_their_splits(trained: tuple[Path, ImageData, str]) -> None:
    """The held-out images are evaluated."""
    folder, before, run = trained
    data = evaluated(folder, run)
    assert data.facts().sizes == before.facts().sizes
    for name in ("train", "validation"):
        assert np.array_equal(data.splits[name].images, before.splits[name].images)
    assert any("only its held-out samples are evaluated" in note for note in data.notes)


def test_copy_of_the_data_is_recognised(
    trained: tuple[Path, ImageData, str], tmp_path: Path
) -> None:
    """A copy of the data under another name, with other file times, is recognised."""
    folder, before, run = trained
    shutil.copytree(folder, tmp_path / "copy")
    data = evaluated(tmp_path / "copy", run)
    assert data.fingerprint == before.fingerprint
    assert any("trained on the same data" in note for note in data.notes)


def test_data_that_have_grown_since_the_run_are_refused(
    trained: tuple[Path, ImageData, str],
) -> None:
    """The samples that the run held out can no longer be told."""
    folder, _, run = trained
    write_images(folder, per_class=14)
    message = refusal(lambda: evaluated(folder, run))
    assert "now has another number of rows than when" in message
    assert "restore the data and the flags as they were, or put the new samples into" in message


def test_path_of_another_form_keeps_the_configuration(
    trained: tuple[Path, ImageData, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that only evaluates takes `--dataset-config` from the run for the same data alone."""
    folder, data, _ = trained
    run = write_run(tmp_path / "configured", folder, data, dataset_config="plain")
    monkeypatch.chdir(folder.parent)
    expected = {str(folder): "plain", f"./{folder.name}": "plain", "digits": None, ".": None}
    for dataset, configuration in expected.items():
        config = TrainingConfig(
            dataset=dataset, dataset_config="plain", init_from=run, evaluate_only=True
        )
        assert own_configuration(config) == configuration, dataset


def test_built_in_data_are_not_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = TrainedOn("run", str(tmp_path / "digits"), None, None, None, {})
    assert not is_same_place(trained, "digits", None)
    assert is_same_place(trained, str(tmp_path / "digits"), "ignored for paths")


def test_notes_do_not_decide_what_was_held_out() -> None:
    """A split of the data set itself may grow, whatever its notes say."""
    source = DataSource("mine", "/mine", None, "named", "01")
    before = TrainedOn("runs/one", "/mine", None, None, "02", {"train": 2})
    arrays = {"train": [np.zeros(3), np.zeros(3)]}
    for held_out in (0, 1):
        facts = PreparedFacts(class_names=[], notes=["held out of the rain"], held_out=held_out)
        facts["fingerprint"] = "03"
        data = Prepared(Path(), facts, arrays)
        if held_out:
            with pytest.raises(UserError, match="now has another number of rows than when"):
                require_same_sizes(source, before, data)
        else:
            require_same_sizes(source, before, data)


def test_evaluation_takes_the_validation_share_of_the_run(tmp_path: Path) -> None:
    """Another `--validation-share` is refused."""
    folder = write_images(tmp_path / "first", per_class=10)
    source = with_share(folder, 0.4)
    before = load_images(
        source, image_size=None, image_column=None, label_column=None, dtype=torch.float32
    )
    run = write_run(tmp_path / "runs" / "one", folder, before, validation_share=0.4)
    assert evaluated(folder, run).facts().sizes == {"train": 18, "validation": 12}
    assert evaluated(folder, run, 0.4).facts().sizes == {"train": 18, "validation": 12}
    assert "--validation-share 0.2" in refusal(lambda: evaluated(folder, run, 0.2))


def test_data_of_an_earlier_run_are_recognised(
    trained: tuple[Path, ImageData, str], tmp_path: Path
) -> None:
    """A run that started from another run's weights has seen both data sets."""
    folder, _, first = trained
    other = write_images(tmp_path / "other", per_class=6, seed=5)
    second = write_run(tmp_path / "runs" / "two", other, images(other), init_from=first)
    assert evaluated(folder, second).facts().sizes == {"train": 27, "validation": 3}


def test_class_that_the_model_lacks_is_named(
    trained: tuple[Path, ImageData, str], tmp_path: Path
) -> None:
    """The message lists the model's classes."""
    new_folder = write_images(tmp_path / "own", per_class=4, names=("a", "zebra"))
    message = refusal(lambda: evaluated(new_folder, trained[2]))
    assert "zebra" in message
    assert "a, b, c" in message


@pytest.mark.parametrize("names", [("cat", "dog", "emu"), ("0", "1", "2")])
@pytest.mark.parametrize("others", [(), ("zebra",), ("10", "zebra"), ("zebra", "3")])
@pytest.mark.parametrize("seed", range(3))
def test_only_classes_that_occur_must_be_those_of_the_model(
    names: tuple[str, ...], others: tuple[str, ...], seed: int
) -> None:
    """A column's type may list others. Classes may have the model's names or its numbers."""
    random = np.random.default_rng(seed)
    model = EvaluatedModel("runs/one", ["cat", "dog", "emu"], RequestedFormat(), ())
    listed = [str(name) for name in random.permutation([*names, *others])]
    by_name = {"cat": 0, "dog": 1, "emu": 2, "0": 0, "1": 1, "2": 2}
    allowed = [label for label, name in enumerate(listed) if name in names]
    labels = random.choice(allowed, size=20)
    data = prepared_with(listed, test=labels[:10], train=labels[10:])
    renumber_labels(data, model, SOURCE.name)
    assert data.facts["class_names"] == model.class_names
    model_labels = np.concatenate([arrays[-1] for arrays in data.arrays.values()])
    assert model_labels.tolist() == [by_name[listed[label]] for label in labels]
    for label in {*range(len(listed))} - {*allowed}:
        data = prepared_with(listed, test=np.array([*allowed, label]))
        message = refusal(lambda data=data: renumber_labels(data, model, SOURCE.name))
        assert f"has the class {listed[label]}, but runs/one knows only cat, dog" in message


@pytest.mark.parametrize(
    ("listed", "named"),
    [([str(label) for label in range(4)], "3"), (["cat", "1"], "1"), (["0", "1", "x"], "x")],
)
def test_message_names_the_class_that_does_not_fit(listed: list[str], named: str) -> None:
    """A number that the model has is named only if other classes have the model's names."""
    model = EvaluatedModel("runs/one", ["cat", "dog", "emu"], RequestedFormat(), ())
    data = prepared_with(listed, test=np.arange(len(listed)))
    assert f"has the class {named}, " in refusal(lambda: renumber_labels(data, model, SOURCE.name))


def test_training_without_validation_needs_a_test_split(tmp_path: Path) -> None:
    """With `--validation-share 0`, nothing is held out."""
    folder = write_images(tmp_path / "mine", per_class=10, split="train")

    def load() -> ImageData:
        return load_images(
            with_share(folder, 0),
            image_size=None,
            image_column=None,
            label_column=None,
            dtype=torch.float32,
        )

    message = refusal(load)
    assert "--validation-share 0 leaves nothing to evaluate on" in message
    assert "no validation or test split with labels" in message
    write_images(folder, per_class=3, split="test")
    assert load().facts().sizes == {"train": 30, "test": 9}


def test_new_texts_are_evaluated_completely(tmp_path: Path) -> None:
    """The run's tokenizer is used, not a new one."""
    write_csv(tmp_path / "first" / "train.csv", sentences(60, 0))
    before = text(tmp_path / "first")
    run = write_run(tmp_path / "run", tmp_path / "first", before)
    write_csv(tmp_path / "own.csv", sentences(46, 1))
    source = for_evaluation(find_named(str(tmp_path / "own.csv"), None), run)
    data = load_text(
        source, checkpoint="scratch", max_length=32, text_columns=(), label_column=None
    )
    assert data.facts().sizes == {"test": 46}
    assert data.vocabulary_size == before.vocabulary_size  # not the vocabulary of the new texts
    same = (data.tokenizer_folder / "tokenizer.json").read_bytes()
    assert same == (before.tokenizer_folder / "tokenizer.json").read_bytes()
