"""Images, tables and histograms that a recipe logs: kept as files and sent to the tracker."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from common.console import warn
from common.errors import UserError
from common.failures.sentences import cause_text, writing
from common.storage.files import write_text
from common.storage.json_files import json_safe
from common.system.wording import counted

BINS = 64  # bins of each histogram
MAX_IMAGES = 64  # images that one call logs
# What a recipe may log, for a warning about anything else.
IMAGES_ADVICE = (
    "pass a tensor [images, channels, height, width] of at least one image, or a list of Pillow "
    "images"
)
TABLE_ADVICE = "pass a list of names of columns, and a list of rows with one cell for each column"
HISTOGRAM_ADVICE = "pass a tensor, or a list of numbers, with at least one value"
PILLOW_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # by number of channels
Values = torch.Tensor | np.ndarray | Sequence[float]  # the values of a histogram
Cell = bool | int | float | str | None  # a cell that JSON and a tracker accept


@dataclass
class MediaEntry:
    """The values of one call at a step. Tensors stay on their device until the entry is written."""

    name: str
    step: int

    def write(self, folder: Path) -> None:
        """Write the entry's files under `folder`. This waits for the device."""
        raise NotImplementedError


@dataclass
class ImagesEntry(MediaEntry):
    images: torch.Tensor | list[Image.Image]  # a tensor is [images, channels, height, width]
    captions: list[str] | None
    files: list[Path] = field(default_factory=list)  # filled by `write`

    def write(self, folder: Path) -> None:
        for number, image in enumerate(to_pillow(self.images)):
            path = folder / "images" / f"{file_name(self)}-{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
            self.files.append(path)


@dataclass
class TableEntry(MediaEntry):
    columns: list[str]
    rows: list[list[object]]  # `write` turns each item into a `Cell`

    def write(self, folder: Path) -> None:
        self.rows = [[to_cell(cell) for cell in row] for row in self.rows]
        path = folder / "tables" / f"{file_name(self)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = {"columns": self.columns, "rows": self.rows}
        write_text(path, json.dumps(json_safe(table), indent=2) + "\n")


@dataclass
class HistogramEntry(MediaEntry):
    bin_counts: torch.Tensor  # int64 [BINS]
    limits: torch.Tensor  # float32 [2]: the smallest and the largest finite value
    not_finite: torch.Tensor  # int64 []: the number of values that are not finite
    # `write` fills these two lists.
    counts: list[int] = field(default_factory=list)  # [BINS]
    edges: list[float] = field(default_factory=list)  # [BINS + 1]

    def write(self, folder: Path) -> None:
        low, high = self.limits.tolist()
        self.counts = self.bin_counts.tolist()
        self.edges = np.linspace(low, high, BINS + 1).tolist()
        path = folder / "histograms" / f"{file_name(self)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        contents = {
            "counts": self.counts,
            "edges": self.edges,
            "not_finite": int(self.not_finite),
        }
        write_text(path, json.dumps(contents, indent=2) + "\n")


class RecordedMedia:
    """Queues media until the next row of metrics is written, so that no update waits for the GPU.

    The write of a row has waited for the device anyway. Only rank 0 queues and writes. Media never
    fail a training: media that can't be logged are left out with a warning.
    """

    def __init__(self, directory: Path, is_main_rank: bool) -> None:
        self.folder = directory / "media"
        self.is_main_rank = is_main_rank
        self.entries: list[MediaEntry] = []

    def images(
        self,
        name: str,
        images: torch.Tensor | Iterable[Image.Image],
        captions: Sequence[str] | None,
        step: int,
    ) -> None:
        """Queue a tensor [images, channels, height, width], or an iterable of Pillow's images.

        The first `MAX_IMAGES` images are kept, with their captions.

        Args:
            captions: one for each image; None: no captions.
        """

        def make_entry() -> MediaEntry:
            copies = copy_images(images)
            texts = None if captions is None else [str(caption) for caption in captions]
            if texts is None:
                return ImagesEntry(name, step, copies, None)
            kept_texts = texts[:MAX_IMAGES]
            if len(kept_texts) != len(copies):
                first = "the first " if len(copies) == MAX_IMAGES else ""
                raise UserError(
                    f"{first}{counted(len(copies), 'image')} came with "
                    f"{counted(len(texts), 'caption')}",
                    advice="pass one caption for each image",
                )
            return ImagesEntry(name, step, copies, kept_texts)

        self.queue(name, make_entry, IMAGES_ADVICE)

    def table(
        self, name: str, columns: Sequence[str], rows: Iterable[Sequence[object]], step: int
    ) -> None:
        """Queue a table; each row has a number, string, bool, None or tensor per column."""

        def make_entry() -> MediaEntry:
            copies = [[copy_cell(cell) for cell in row] for row in rows]
            for number, row in enumerate(copies, start=1):
                if len(row) != len(columns):
                    raise UserError(
                        f"row {number} of the table has {counted(len(row), 'cell')}, but the table "
                        f"has {counted(len(columns), 'column')}",
                        advice="pass one cell for each column",
                    )
            return TableEntry(name, step, [str(column) for column in columns], copies)

        self.queue(name, make_entry, TABLE_ADVICE)

    def histogram(self, name: str, values: Values, step: int) -> None:
        """Queue a histogram of values of any shape; only the counts of its bins are kept."""
        self.queue(
            name, lambda: HistogramEntry(name, step, *histogram_of(values)), HISTOGRAM_ADVICE
        )

    def queue(self, name: str, make_entry: Callable[[], MediaEntry], advice: str) -> None:
        """Queue an entry on rank 0, or warn that it can't be made.

        The entry is made in this method, so that other ranks do no work for it, and its errors
        become warnings.

        Args:
            name: the entry's name, for a warning.
            make_entry: makes the entry from copies of the recipe's values. A `UserError` that it
                raises has advice of its own.
            advice: what to do about any other error; usually the values have a wrong type.
        """
        if not self.is_main_rank:
            return
        try:
            self.entries.append(make_entry())
        except UserError as mistake:
            warn(f"{name!r} is not logged, because {mistake.message}")
        except (ValueError, TypeError, AttributeError, RuntimeError) as problem:
            warn(f"{name!r} is not logged ({cause_text(problem)}): {advice}")

    def write(self, send: Callable[[MediaEntry], None] | None) -> None:
        """Write all queued entries to files, and pass each entry to `send` unless `send` is None.

        Args:
            send: sends an entry to the run's tracker.
        """
        entries = self.entries
        self.entries = []
        for entry in entries:
            try:
                with writing(str(self.folder)):  # turns an `OSError` into a `UserError`
                    entry.write(self.folder)
            except UserError as mistake:
                warn(f"{entry.name!r} is not logged, because {mistake.message}")
                continue
            except (ValueError, TypeError, RuntimeError) as problem:
                advice = "pass values that can be written to a file"
                warn(f"{entry.name!r} is not logged ({cause_text(problem)}): {advice}")
                continue
            if send is not None:
                try:
                    send(entry)
                except Exception as problem:  # a tracker may raise anything
                    warn(f"{entry.name!r} is not sent to the tracker ({cause_text(problem)})")


def copy_images(
    images: torch.Tensor | Iterable[Image.Image],
) -> torch.Tensor | list[Image.Image]:
    """Copy at most `MAX_IMAGES` images; those of a tensor without waiting for its device.

    The recipe may change its images before the queue is written.

    Raises:
        UserError: there are no images, an item is not a Pillow image, or the shape of a tensor is
            not [images, channels, height, width] with 1, 3 or 4 channels.
    """
    if isinstance(images, torch.Tensor):
        if images.dim() != 4 or images.shape[1] not in PILLOW_MODES:
            raise UserError(
                f"its images have the shape {list(images.shape)}",
                advice="pass a tensor [images, channels, height, width] with 1, 3 or 4 channels",
            )
        if not len(images) or not images[0].numel():
            raise UserError("it contains no images", advice=IMAGES_ADVICE)
        return images[:MAX_IMAGES].detach().clone()
    pictures = list(images)[:MAX_IMAGES]
    if not pictures:
        raise UserError("it contains no images", advice=IMAGES_ADVICE)
    for picture in pictures:
        if not isinstance(picture, Image.Image):
            raise UserError(
                f"its images are of type {type(picture).__name__}", advice=IMAGES_ADVICE
            )
    return [picture.copy() for picture in pictures]


def to_pillow(images: torch.Tensor | list[Image.Image]) -> list[Image.Image]:
    """Convert a tensor [images, channels, height, width] to Pillow's images.

    Floating-point values from 0 (black) to 1 (white) become 0 to 255, and NaN becomes 0. Booleans
    become 0 and 255. Integers are taken as they are. Values beyond these limits are clipped. A list
    of Pillow's images is returned unchanged.
    """
    if not isinstance(images, torch.Tensor):
        return list(images)
    if images.is_floating_point():
        brightness = images.float().nan_to_num(0).clamp(0, 1)
        images = brightness.mul(255).round()
    elif images.dtype == torch.bool:
        images = images.to(torch.uint8) * 255
    channels_last = images.clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    pixels = channels_last.cpu().numpy()
    mode = PILLOW_MODES[pixels.shape[-1]]
    if mode == "L":
        pixels = pixels[..., 0]
    return [Image.fromarray(image, mode) for image in pixels]


def histogram_of(values: Values) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count values in equal bins on their device, without waiting for the device.

    Returns:
        The counts, int64 [BINS]; the smallest and the largest finite value, float32 [2]; and the
        number of values that are not finite, int64 [].

    Raises:
        UserError: there are no values.
    """
    flat = torch.as_tensor(values).detach().flatten()
    if not flat.numel():
        raise UserError("it contains no values", advice=HISTOGRAM_ADVICE)
    flat = flat.float()
    is_finite = flat.isfinite()
    # Only tensor operations follow, because an `if` on a value would wait for the device.
    low = torch.where(is_finite, flat, torch.inf).min()
    high = torch.where(is_finite, flat, -torch.inf).max()
    has_finite_values = low <= high
    low = torch.where(has_finite_values, low, 0.0)
    high = torch.where(has_finite_values, high, 0.0)
    width = torch.where(high > low, high - low, 1.0)
    fractions = torch.where(is_finite, (flat - low) / width, 0.0)  # 0 at `low`, 1 at `high`
    bins = (fractions * BINS).long().clamp(0, BINS - 1)  # the last bin includes `high`
    counts = torch.zeros(BINS, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, bins, is_finite.long())
    return counts, torch.stack([low, high]), (~is_finite).sum()


def copy_cell(cell: object) -> object:
    """Return a copy of a tensor, which the recipe may change later; any other cell as it is."""
    return cell.detach().clone() if isinstance(cell, torch.Tensor) else cell


def to_cell(cell: object) -> Cell:
    """Convert a table's cell to a type that JSON and a tracker accept; objects become text."""
    if isinstance(cell, torch.Tensor | np.ndarray | np.generic):
        cell = cell.tolist()
    return cell if cell is None or isinstance(cell, bool | int | float | str) else str(cell)


def file_name(entry: MediaEntry) -> str:
    """Return a relative path from the entry's name and step, safe on every file system.

    A slash in the name makes a folder. Characters that are not letters, digits, "_", "+" or "-"
    become "-".
    """
    parts = [re.sub(r"[^\w+-]+", "-", part) for part in entry.name.split("/") if part]
    return f"{'/'.join(parts) or 'unnamed'}-{entry.step:08d}"
