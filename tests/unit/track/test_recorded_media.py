"""A recipe's images, tables and histograms: written, sent to a tracker, and never fatal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from common.track.recorded_media import BINS, RecordedMedia, histogram_of


class Broken:
    """A tracker that fails."""

    def log_media(self, entry: object) -> None:
        """Fail."""
        raise OSError("the tracker is gone")


def test_images_are_saved_as_they_were_at_the_call(tmp_path: Path) -> None:
    """The tensor may change before the row is written. Values outside 0 to 1 are clipped."""
    media = RecordedMedia(tmp_path, True)
    images = torch.tensor([0.0, 0.5, 1.0, 7.0]).view(1, 1, 2, 2)
    media.images("val/some thing", images, ["one"], step=12)
    images.zero_()
    media.images("rgb", torch.full((2, 3, 1, 1), 9, dtype=torch.uint8), None, step=12)
    media.images("pillow", [Image.new("L", (3, 3), 5)], None, step=12)
    assert not (tmp_path / "media").exists()  # so the call did not wait for the device
    media.write(None)
    folder = tmp_path / "media" / "images"
    pixels = np.asarray(Image.open(folder / "val" / "some-thing-00000012-0.png"))
    assert pixels.tolist() == [[0, 128], [255, 255]]
    assert Image.open(folder / "rgb-00000012-1.png").getpixel((0, 0)) == (9, 9, 9)
    assert Image.open(folder / "pillow-00000012-0.png").size == (3, 3)


def test_tables_hold_numbers_and_texts(tmp_path: Path) -> None:
    """Tensors are read when the row is written. NaN becomes null."""
    media = RecordedMedia(tmp_path, True)
    media.table("../up", ["a", "b"], [[torch.tensor(2.5), "x"], [float("nan"), Path("p")]], 3)
    media.write(None)
    (file,) = (tmp_path / "media" / "tables").rglob("*.json")
    assert json.loads(file.read_text()) == {
        "columns": ["a", "b"],
        "rows": [[2.5, "x"], [None, "p"]],
    }


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_histogram_counts_each_finite_value(values: list[float]) -> None:
    """Values that are not finite are counted separately."""
    counts, limits, left_out = histogram_of(values)
    finite = [value for value in values if np.isfinite(value)]
    assert (len(counts), int(counts.sum())) == (BINS, len(finite))
    assert int(left_out) == len(values) - len(finite)
    if finite:
        assert limits.tolist() == [min(finite), max(finite)]


@pytest.mark.parametrize("count", [64, 100])
def test_captions_of_many_images_are_kept(count: int, tmp_path: Path) -> None:
    """Only the first 64 images are kept, and as many of the captions."""
    media = RecordedMedia(tmp_path, True)
    captions = [f"image {number}" for number in range(count)]
    media.images("x", torch.zeros(100, 1, 8, 8), captions, 0)
    entries: list[Any] = []
    media.write(entries.append)
    assert [entry.captions for entry in entries] == [captions[:64]]


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (lambda m: m.images("x", torch.zeros(3, 8), None, 0), r"shape \[3, 8\]: pass a tensor"),
        (lambda m: m.images("x", torch.zeros(1, 2, 8, 8), None, 0), "with 1, 3 or 4 channels"),
        (
            lambda m: m.images("x", torch.zeros(1, 1, 8, 8), ["a", "b"], 0),
            "1 image came with 2 captions: pass one caption for each image",
        ),
        (
            lambda m: m.images("x", torch.zeros(99, 1, 8, 8), ["a"] * 63, 0),
            "the first 64 images came with 63 captions: pass one caption for each image",
        ),
        (
            lambda m: m.images("x", [], None, 0),
            "because it contains no images: pass a tensor .* of at least one image",
        ),
        (
            lambda m: m.images("x", np.zeros((8, 8, 8)), None, 0),
            "'x' is not logged, because its images are of type ndarray: pass a tensor",
        ),
        (
            lambda m: m.images("x", "text", None, 0),
            "'x' is not logged, because its images are of type str: .* of at least one image",
        ),
        (
            lambda m: m.table("x", ["a"], [[1, 2]], 0),
            "row 1 of the table has 2 cells, but the table has 1 column: pass one cell for each",
        ),
        (lambda m: m.table("x", None, 3, 0), "'x' is not logged .*: pass a list of names"),
        (lambda m: m.histogram("x", [], 0), "no values: pass a tensor, or a list"),
        (lambda m: m.histogram("x", "text", 0), "'x' is not logged .*: pass a tensor, or a list"),
    ],
)
def test_invalid_media_are_warned_of(
    log: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training continues without them."""
    media = RecordedMedia(tmp_path, True)
    log(media)
    media.write(None)
    assert pytest.importorskip("re").search(message, capsys.readouterr().out)


def test_failures_to_send_or_write_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the tracker fails, the file is still written."""
    media = RecordedMedia(tmp_path, True)
    media.histogram("weights", torch.arange(5), 1)
    media.write(Broken().log_media)
    assert "'weights' is not sent to the tracker (the tracker is gone)" in capsys.readouterr().out
    assert (tmp_path / "media" / "histograms" / "weights-00000001.json").is_file()
    (tmp_path / "file").write_text("")
    media = RecordedMedia(tmp_path / "file", True)
    media.histogram("weights", torch.arange(5), 1)
    media.write(None)
    assert "'weights' is not logged, because " in capsys.readouterr().out


def test_other_ranks_log_nothing(tmp_path: Path) -> None:
    """Other ranks log no media, and do not even check their arguments."""
    media = RecordedMedia(tmp_path, False)
    media.images("x", "no image", None, 0)
    media.write(None)
    assert not [*tmp_path.iterdir()]
