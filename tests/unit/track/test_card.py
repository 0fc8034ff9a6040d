"""Model cards: what a run did, without paths of the machine."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath

import pytest
import torch
from huggingface_hub import ModelCard

from common.config import TrainingConfig
from common.data.dataset import Data
from common.data.sources import DataSource
from common.data.stored_samples import TensorSamples
from common.track import card as card_module
from common.track.card import card_metadata, flags_as_text, model_card, without_folder
from tests.unit.saved_config import saved_config

SUMMARY = {
    "test/accuracy": 0.75,
    "test/count": 4.0,
    "val/best_accuracy": 0.8,
    "perf/samples_per_second": 1234.5,
    "time/train_seconds": 2.0,
    "memory/host_rss_mib": 321.0,
}
RUN = saved_config(
    given={"dataset": "/home/me/animals", "notes": "private", "epochs": 3, "compile": True},
    environment={"world_size": 2},
)


@pytest.mark.parametrize(
    ("location", "named", "hub"),
    [("/home/me/animals", "animals", None), ("me/animals", "me/animals", ["me/animals"])],
)
def test_card_has_the_metadata_of_the_hub(location: str, named: str, hub: list[str] | None) -> None:
    """The card has the task, the data set, and each metric of the final evaluation."""

    splits = {name: TensorSamples(x=torch.zeros(4)) for name in ("train", "test")}
    source = DataSource("animals", location, None, "named", "0")
    data = Data("animals", splits, source=source, notes=["some are missing"])
    description = {"name": "Net", "image_size": 8}
    config = TrainingConfig(seed=7)
    text = model_card(config, RUN, description, data, "test", SUMMARY)
    card = ModelCard(text)
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.75)
    assert (result.dataset_type, result.dataset_split) == (named, "test")
    assert card.data.to_dict().get("datasets") == hub
    assert card.data.pipeline_tag == "image-classification"
    assert "/home" not in text
    assert "private" not in text
    facts = (
        "some are missing",
        "one run, seed 7",
        "0.7500",
        "1,234",
        "321",
        "an abacus",
        "2 × fp32",
    )
    for words in (*facts, "--dataset animals --epochs 3 --compile", "recipes predict FOLDER IMAGE"):
        assert words in text, words


def test_model_of_another_task_has_a_card() -> None:
    """A card for another task lacks the metadata of a classifier."""

    data = Data("own", {name: TensorSamples(x=torch.zeros(4)) for name in ("train", "test")})
    card = ModelCard(model_card(TrainingConfig(), RUN, {"name": "Net"}, data, "test", SUMMARY))
    assert card.data.eval_results is None
    assert "0.7500" in card.text
    assert "recipes predict" not in card.text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_metadata_has_no_value_that_is_not_finite(value: float) -> None:
    """The Hub takes no such value; the table for people has it."""
    data = Data("own", {name: TensorSamples(x=torch.zeros(4)) for name in ("train", "test")})
    description = {"name": "Net", "image_size": 8}
    summary = SUMMARY | {"test/loss": value}
    card = ModelCard(model_card(TrainingConfig(), RUN, description, data, "test", summary))
    (result,) = card.data.eval_results
    assert result.metric_type == "accuracy"


def test_paths_are_reduced_to_their_last_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hub ids, which look like relative paths, stay."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for text in ("/x/b", "~/b", "./b", "../b", "a/b", "runs/b"):
        assert without_folder(text) == "b"
    for text in ("google-bert/bert-base-uncased", "mnist", "0.5"):
        assert without_folder(text) == text
    assert flags_as_text(TrainingConfig(), {}) == "none"


def test_card_on_windows_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a local folder is cut to its last part, and a Hub id keeps its slash."""

    class WindowsPath(PureWindowsPath):
        def exists(self) -> bool:
            return self.name == "animals"

    monkeypatch.setattr(card_module, "Path", WindowsPath)
    for text in (r"C:\Users\me\animals", "C:/Users/me/animals", r"data\animals", "animals"):
        assert without_folder(text) == "animals"
    splits = {name: TensorSamples(x=torch.zeros(4)) for name in ("train", "test")}
    source = DataSource("animals", "me/animals", None, "named", "0")
    data = Data("animals", splits, source=source)
    metadata = card_metadata(RUN, {"name": "Net"}, data, "test", SUMMARY, task=None)
    assert "me/animals" in metadata
