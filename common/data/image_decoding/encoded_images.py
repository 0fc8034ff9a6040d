"""Reads the encoded images of a whole split, in worker processes if there are many.

Reading a small image takes a tenth of a millisecond, nearly all of it in Python code, which only
one thread at a time can run. So processes share this work.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import get_worker_info

from common.data.image_decoding.image_files import EncodedImage
from common.data.loader import never
from common.data.samples import Samples
from common.data.workers.pool import PREFETCHED, Workers
from common.data.workers.watch import WorkerNames
from common.errors import LostProcessError, UserError
from common.system.platforms.limits import usable_cores, worker_start_method
from common.system.wording import counted, listed

if TYPE_CHECKING:
    from datasets import Dataset

# With fewer images, the start of workers would take longer than they save.
MANY_IMAGES = 5000
MAX_WORKERS = 32
# The most images whose results travel together. With 64, preparing MNIST took 1.2 times as long,
# because each list costs time in both processes.
IMAGES_AT_ONCE = 256
ENCODED_AT_ONCE = 16  # the most encoded images that a process holds
RESULT_BYTES = 2**26  # the most bytes of all results that wait in memory
MOST_UNREADABLE = 100  # reading ends after so many images that can't be read
DECODING_TIMEOUT = 600.0  # seconds to wait for results
DECODER_NAMES = WorkerNames("the processes that decode images")

Result = TypeVar("Result")


class UnreadableImage(NamedTuple):
    """The place of an image that can't be read, and the error that says why."""

    path: str | None  # None for an image that a table contains
    error: UserError


class EncodedImages(Samples, Generic[Result]):
    """The encoded images of a split, which workers read in their order.

    Nothing trains on them. They are `Samples` only because `Workers` takes no other class.
    """

    def __init__(
        self, split: "Dataset", column: str, read: Callable[[EncodedImage], Result]
    ) -> None:
        """Store how images are read.

        Args:
            column: the column of images, which are undecoded.
            read: a function of one image.
        """
        self.split = split
        self.column = column
        self.read_image = read

    def __len__(self) -> int:
        return len(self.split)

    def fetch(self, indices: torch.Tensor, epoch: int | None) -> list[Result | UnreadableImage]:
        """Return a list of results, instead of a batch of tensors.

        An image that can't be read has an `UnreadableImage` as its result, so that the others are
        still read.

        Args:
            indices: consecutive and in ascending order, int64 [batch], because only the first and
                the last of them are used.
        """
        images = self.images_between(int(indices[0]), int(indices[-1]))
        if get_worker_info() is not None:
            return [self.result_of(image) for image in images]
        # Without workers, threads help with large images: the decoder lets other threads run.
        with ThreadPoolExecutor() as pool:
            return list(pool.map(self.result_of, images))

    def result_of(self, image: EncodedImage) -> Result | UnreadableImage:
        """Return the result for an image, or the error if it can't be read."""
        try:
            return self.read_image(image)
        except UserError as error:
            return UnreadableImage(image["path"], error)

    def images_between(self, first: int, last: int) -> Iterator[EncodedImage]:
        """Yield the images from one sample index to another, both included."""
        for start in range(first, last + 1, ENCODED_AT_ONCE):
            rows = self.split[start : min(start + ENCODED_AT_ONCE, last + 1)]
            yield from rows[self.column]


def read_images(
    split: "Dataset", column: str, read: Callable[[EncodedImage], Result], result_bytes: int
) -> Iterator[list[Result]]:
    """Yield what `read` returns for each image of a split, in order, in lists.

    After the first image that can't be read, nothing more is yielded. The rest is still read, so
    that one error counts all such images, up to `MOST_UNREADABLE`.

    Args:
        column: the column of images, which are undecoded.
        read: a function of one image, whose result can be pickled.
        result_bytes: the size of a result, which limits the length of the lists.

    Raises:
        UserError: `read` raises it for one or more images, or a worker was killed or does not
            answer.
    """
    # A forked worker shares the data. Any other would have to import torch and get a copy.
    has_workers = len(split) >= MANY_IMAGES and worker_start_method() == "fork"
    # Other processes of this machine wait for these images, so all cores are free.
    worker_count = min(usable_cores(), MAX_WORKERS) if has_workers else 0
    images = EncodedImages(split, column, read)
    length = list_length(worker_count, result_bytes)
    lists_of_indices = torch.arange(len(split)).split(length)
    workers = Workers(
        images, worker_count, torch.device("cpu"), DECODING_TIMEOUT, never, DECODER_NAMES
    )
    unreadable: list[UnreadableImage] = []
    try:
        for results in workers.fetched(lists_of_indices, None):
            unreadable += [result for result in results if isinstance(result, UnreadableImage)]
            if len(unreadable) >= MOST_UNREADABLE:
                break
            if not unreadable:
                yield results
    except LostProcessError:
        raise UserError(
            "a process that decodes images was killed, perhaps for lack of memory",
            advice="start the same command again",
            every_rank=True,
            resumable=True,
        ) from None
    finally:
        workers.close()
    if unreadable:
        raise unreadable_error(unreadable)


def list_length(worker_count: int, result_bytes: int) -> int:
    """Return how many results to put into a list, so that all waiting lists fit into memory."""
    lists_in_memory = 1 + PREFETCHED * worker_count
    most_that_fit = 1 + RESULT_BYTES // (lists_in_memory * result_bytes)
    return min(IMAGES_AT_ONCE, most_that_fit)


def unreadable_error(unreadable: list[UnreadableImage]) -> UserError:
    """Return one error for all images of a split that can't be read.

    It has the reason for the first image, and the paths of a few others.
    """
    first, *others = unreadable
    if not others:
        return first.error
    count = counted(len(others), "other image")
    if len(unreadable) >= MOST_UNREADABLE:
        count = f"at least {count}"
    # The folder of an image is often its class.
    paths = ["/".join(Path(image.path).parts[-2:]) for image in others if image.path]
    names = f" ({listed(paths)})" if paths else ""
    return UserError(
        f"{first.error.problem}; {count} can't be used either{names}",
        advice=f"{first.error.advice}, and do the same for the others",
    )
