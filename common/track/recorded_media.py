"""Images, tables and histograms that a recipe logs: as files of the run, and at its tracker."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from common.console import warn
from common.errors import UserError
from common.files import json_safe, write_text, writing

BINS = 64  # of a histogram
MOST_IMAGES = 64  # of one call, and of one step at the tracker
CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass
class Entry:
    """What one call logged. Tensors stay on their device until the entry is written."""

    name: str
    step: int

    def write(self, folder: Path) -> None:
        """Write the entry's files under `folder`, for which it waits for the device."""
        raise NotImplementedError


@dataclass
class ImagesEntry(Entry):
    images: Any  # a tensor [images, channels, height, width], or a list of Pillow's
    captions: list[str] | None
    files: list[Path] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        for number, image in enumerate(as_pictures(self.images)):
            path = folder / "images" / f"{file_name(self)}-{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
            self.files.append(path)


@dataclass
class TableEntry(Entry):
    columns: list[str]
    rows: list[list[Any]]

    def write(self, folder: Path) -> None:
        self.rows = [[as_cell(cell) for cell in row] for row in self.rows]
        path = folder / "tables" / f"{file_name(self)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = {"columns": self.columns, "rows": self.rows}
        write_text(path, json.dumps(json_safe(table), indent=2) + "\n")


@dataclass
class HistogramEntry(Entry):
    counts: Any  # int64 [BINS]
    limits: Any  # the least and the greatest finite value
    left_out: Any  # number of values that are not finite

    def write(self, folder: Path) -> None:
        low, high = self.limits.tolist()
        self.counts = self.counts.tolist()
        self.edges = np.linspace(low, high, BINS + 1).tolist()
        path = folder / "histograms" / f"{file_name(self)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {"counts": self.counts, "edges": self.edges, "not_finite": int(self.left_out)}
        write_text(path, json.dumps(facts, indent=2) + "\n")


class RecordedMedia:
    """Keeps what a recipe logs until the next row is written, which has waited for the device.

    Rank 0 alone keeps and writes. Nothing here fails a training: what can't be logged is left out
    with a warning.
    """

    def __init__(self, directory: Path, is_main_rank: bool) -> None:
        self.folder = directory / "media"
        self.is_main_rank = is_main_rank
        self.entries: list[Entry] = []

    def images(self, name: str, images: Any, captions: Sequence[str] | None, step: int) -> None:
        def entry() -> Entry:
            kept = kept_images(images)
            texts = None if captions is None else [str(caption) for caption in captions]
            if texts is not None and len(texts) != len(kept):
                raise ValueError(f"{len(kept)} images and {len(texts)} captions")
            return ImagesEntry(name, step, kept, texts)

        self.keep(name, entry)

    def table(
        self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], step: int
    ) -> None:
        def entry() -> Entry:
            kept = [[as_kept_cell(cell) for cell in row] for row in rows]
            if wrong := next((row for row in kept if len(row) != len(columns)), None):
                raise ValueError(f"{len(columns)} columns, and a row of {len(wrong)} cells")
            return TableEntry(name, step, [str(column) for column in columns], kept)

        self.keep(name, entry)

    def histogram(self, name: str, values: Any, step: int) -> None:
        self.keep(name, lambda: HistogramEntry(name, step, *histogram_of(values)))

    def keep(self, name: str, make: Callable[[], Entry]) -> None:
        if not self.is_main_rank:
            return
        try:
            self.entries.append(make())
        except (ValueError, TypeError, AttributeError, RuntimeError) as problem:
            warn(f"{name} is not logged: {problem}")

    def write(self, tracker: Any) -> None:
        """Write all entries to files and to a tracker; None stands for no tracker."""
        entries, self.entries = self.entries, []
        for entry in entries:
            try:
                with writing(str(self.folder)):
                    entry.write(self.folder)
            except (UserError, ValueError, TypeError, RuntimeError) as problem:
                warn(f"{entry.name} is not logged: {getattr(problem, 'message', problem)}")
                continue
            if tracker is not None:
                try:
                    tracker.log_media(entry)
                except Exception as problem:  # a tracker may fail in any way
                    message = f"{type(problem).__name__}: {problem}"
                    warn(f"{entry.name} is not sent to the tracker ({message})")


def kept_images(images: Any) -> Any:
    """Return a copy of at most `MOST_IMAGES` images, made without waiting for their device."""
    if isinstance(images, torch.Tensor):
        if images.dim() != 4 or images.shape[1] not in CHANNELS:
            shape = "[images, channels, height, width], of 1, 3 or 4 channels"
            raise ValueError(f"its images have the shape {list(images.shape)}: give {shape}")
        if not len(images) or not images[0].numel():
            raise ValueError("it has no images")
        return images[:MOST_IMAGES].detach().clone()
    pictures = [image.copy() for image in list(images)[:MOST_IMAGES]]
    if not pictures or not all(isinstance(picture, Image.Image) for picture in pictures):
        raise ValueError("it has no images: give a tensor, or a list of Pillow's images")
    return pictures


def as_pictures(images: Any) -> list[Image.Image]:
    """Return Pillow's images of a tensor: of real numbers, 0 is black and 1 is white."""
    if not isinstance(images, torch.Tensor):
        return list(images)
    if images.is_floating_point():
        images = images.float().nan_to_num(0).clamp(0, 1).mul(255).round()
    elif images.dtype == torch.bool:
        images = images.to(torch.uint8) * 255
    pixels = images.clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    mode = CHANNELS[pixels.shape[-1]]
    return [Image.fromarray(one[..., 0] if mode == "L" else one, mode) for one in pixels]


def histogram_of(values: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return counts [BINS], limits [2] and the number of values left out, on the values' device.

    Nothing waits for the device: only these few numbers are kept of the values.
    """
    flat = torch.as_tensor(values).detach().flatten()
    if not flat.numel():
        raise ValueError("it has no values")
    flat = flat.float()
    is_finite = flat.isfinite()
    low = torch.where(is_finite, flat, torch.inf).min()
    high = torch.where(is_finite, flat, -torch.inf).max()
    low, high = torch.where(low <= high, low, 0.0), torch.where(low <= high, high, 0.0)
    width = torch.where(high > low, high - low, 1.0)
    shares = torch.where(is_finite, (flat - low) / width, 0.0)
    bins = (shares * BINS).long().clamp(0, BINS - 1)
    counts = torch.zeros(BINS, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, bins, is_finite.long())
    return counts, torch.stack([low, high]), (~is_finite).sum()


def as_kept_cell(cell: Any) -> Any:
    return cell.detach().clone() if isinstance(cell, torch.Tensor) else cell


def as_cell(cell: Any) -> Any:
    """Return what JSON and a tracker take: a number, a text, a truth value or None."""
    if isinstance(cell, torch.Tensor | np.ndarray | np.generic):
        cell = cell.tolist()
    return cell if cell is None or isinstance(cell, bool | int | float | str) else str(cell)


def file_name(entry: Entry) -> str:
    """Return the entry's name and step, as part of a path inside the run's directory."""
    parts = [re.sub(r"[^\w+-]+", "-", part) for part in entry.name.split("/") if part]
    return f"{'/'.join(parts) or 'unnamed'}-{entry.step:08d}"
