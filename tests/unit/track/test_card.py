"""A model card says what its run did, and nothing of the machine's folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from common.config import TrainingConfig
from common.data.batch import Data, TensorSamples
from common.data.sources import DataSource
from common.track.card import flags_given, model_card, without_folder

SUMMARY = {
    "test/accuracy": 0.75,
    "test/count": 4.0,
    "val/best_accuracy": 0.8,
    "perf/samples_per_second": 1234.5,
    "time/train_seconds": 2.0,
    "memory/host_rss_mib": 321.0,
}
FACTS = {
    "recipe": "train",
    "given": {"dataset": "/home/me/animals", "notes": "private", "epochs": 3, "compile": True},
    "data": {"sizes": {"train": 8, "test": 4}},
    "environment": {
        "device": "an abacus",
        "world_size": 2,
        "mixed_precision": "no",
        "effective_batch_size": 64,
        "python": "3",
        "versions": {"torch": "2"},
        "git_commit": None,
    },
}


@pytest.mark.parametrize(
    ("location", "named", "hub"),
    [("/home/me/animals", "animals", None), ("me/animals", "me/animals", ["me/animals"])],
)
def test_card_has_what_the_hub_reads(location: str, named: str, hub: list[str] | None) -> None:
    """Task, data set, and each metric of the final evaluation."""

    splits = {name: TensorSamples(x=torch.zeros(4)) for name in ("train", "test")}
    source = DataSource("animals", location, None, "named", "0")
    data = Data("animals", splits, source=source, notes=["some are missing"])
    description = {"name": "Net", "image_size": 8}
    config = TrainingConfig(seed=7)
    text = model_card(config, FACTS, description, data, "test", SUMMARY)
    card = ModelCard(text)
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.75)
    assert (result.dataset_type, result.dataset_split) == (named, "test")
    assert card.data.to_dict().get("datasets") == hub
    assert card.data.pipeline_tag == "image-classification"
    assert "/home" not in text
    assert "private" not in text
    said = (
        "some are missing",
        "one run, seed 7",
        "0.7500",
        "1,234",
        "321",
        "an abacus",
        "2 × fp32",
    )
    for words in (*said, "--dataset animals --epochs 3 --compile", "recipes predict FOLDER IMAGE"):
        assert words in text, words


def test_model_of_another_task_has_a_card_too() -> None:
    """Without what the Hub would take for a classifier's."""

    data = Data("own", {name: TensorSamples(x=torch.zeros(4)) for name in ("train", "test")})
    card = ModelCard(model_card(TrainingConfig(), FACTS, {"name": "Net"}, data, "test", SUMMARY))
    assert card.data.eval_results is None
    assert "0.7500" in card.text
    assert "recipes predict" not in card.text


def test_folders_lose_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But Hub ids, which look like relative paths, stay."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for text in ("/x/b", "~/b", "./b", "../b", "a/b", "runs/b"):
        assert without_folder(text) == "b"
    for text in ("google-bert/bert-base-uncased", "mnist", "0.5"):
        assert without_folder(text) == text
    assert flags_given(TrainingConfig(), {}) == "none"
