"""Reads the encoded images of a whole split, in worker processes if there are many.

Reading a small image takes a tenth of a millisecond, nearly all of it in Python code. So threads
can't share this work, but processes can.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from common.data.image_files import EncodedImage
from common.data.loader import never
from common.data.samples import Samples
from common.data.workers import PATIENCE, PREFETCHED, Workers
from common.system.platforms import usable_cores, worker_start_method

if TYPE_CHECKING:
    from datasets import Dataset

# With fewer images, the start of workers would take longer than they save.
MANY_IMAGES = 5000
MAX_WORKERS = 32
IMAGES_AT_ONCE = 256  # the most images of a batch
BATCH_BYTES = 2**26  # the most bytes of all batches that are in memory at once

Result = TypeVar("Result")


class EncodedImages(Samples, Generic[Result]):
    """A split of encoded images; its batches are what a function makes of them."""

    def __init__(
        self, split: "Dataset", column: str, read: Callable[[EncodedImage], Result], threads: int
    ) -> None:
        """Store how a batch is made.

        Args:
            column: the column of images, which are undecoded.
            read: a function of one image.
            threads: the threads that call it.
        """
        self.split = split
        self.column = column
        self.read_image = read
        self.threads = threads

    def __len__(self) -> int:
        return len(self.split)

    def fetch(self, samples: torch.Tensor, epoch: int | None) -> list[Result]:
        """Read images that follow each other."""
        first = int(samples[0])
        images: list[EncodedImage] = self.split[first : first + len(samples)][self.column]
        if self.threads == 1:
            return [self.read_image(image) for image in images]
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(self.read_image, images))


def read_images(
    split: "Dataset", column: str, read: Callable[[EncodedImage], Result], result_bytes: int
) -> Iterator[list[Result]]:
    """Yield what `read` returns for each image of a split, in lists of up to 256 images.

    Args:
        column: the column of images, which are undecoded.
        read: a function of one image, whose result can be pickled.
        result_bytes: the size of a result, which limits the length of the lists.

    Raises:
        UserError: `read` raises it, or a worker does not answer.
        LostProcessError: a worker was killed.
    """
    # A forked worker shares the data. Any other would have to import torch and get a copy.
    has_workers = len(split) >= MANY_IMAGES and worker_start_method() == "fork"
    # Other processes of this machine wait for these images, so all cores are free.
    cores = usable_cores()
    worker_count = min(cores, MAX_WORKERS) if has_workers else 0
    images = EncodedImages(split, column, read, threads=1 if has_workers else cores)
    lists_in_memory = 1 + PREFETCHED * worker_count
    images_at_once = 1 + BATCH_BYTES // (lists_in_memory * result_bytes)
    lists = torch.arange(len(split)).split(min(IMAGES_AT_ONCE, images_at_once))
    workers = Workers(images, worker_count, torch.device("cpu"), PATIENCE, never)
    try:
        yield from workers.fetched(lists, None)
    finally:
        workers.close()
