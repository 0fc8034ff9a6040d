"""Panels of W&B: confusions, and samples that can be shown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from common.data.image_batches.image_samples import StreamedImages
from common.data.text import StreamedText
from common.run_directory.model_records import ImageFormat
from common.track.trackers.wandb_panels import content_reader, most_confused_pairs


def test_confusion_of_many_classes_lists_pairs() -> None:
    """The most frequent confusions are listed where a matrix would be too large."""
    counts = torch.eye(100) * 5
    counts[3, 4] = 2
    counts[70, 2] = 9
    table = most_confused_pairs(counts, [f"class {i}" for i in range(100)])
    assert table.data == [["class 70", "class 2", 9], ["class 3", "class 4", 2]]


def test_streamed_samples_are_not_shown(tmp_path: Path) -> None:
    """They are not stored, so there is no table of mistakes."""
    rows: Any = SimpleNamespace(blocks=None)
    data: Any = SimpleNamespace(tokenizer_folder=tmp_path)
    decode: Any = None  # nothing is decoded
    image_format = ImageFormat(channels=1, image_size=8, mean=[0.5], std=[0.25])
    images = StreamedImages(rows, decode, image_format, torch.float32)
    assert content_reader(images, data) is None
    assert content_reader(StreamedText(rows, tmp_path, 8, None), data) is None
