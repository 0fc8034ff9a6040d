"""A trained classifier, ready to use: built from a run's `model` folder, fed as in training."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from common.config import TrainingConfig
from common.data.images import ImageSamples
from common.data.loader import Loader
from common.data.order import EvaluationOrder
from common.data.pixels import FULL_SCALE, image_to_pixels
from common.data.text import TextSamples
from common.data.tokens import encode, load_tokenizer
from common.directory import FACTS
from common.errors import UserError, is_out_of_memory
from common.files import plain, read_json, reading
from common.models.packing import leave_out_padding, token_positions
from common.tools.predict.loading import finished_model, load_model
from common.training.accelerator import build_accelerator, compute_dtype


class Predictor:
    """Gives the probabilities of classes, as an evaluation of the run would compute them."""

    def __init__(
        self,
        run: str | Path,
        batch_size: int = 64,
        mixed_precision: Any = "auto",
        recipe: str | Path | None = None,
    ) -> None:
        """Load the model of a run, or of a `model` folder.

        The code of the model is Transformers' or that of this repository's recipe of the run's
        name; another recipe's file is to be named. Nothing in the folder itself is executed.
        """
        self.folder = finished_model(Path(run))
        self.batch_size = batch_size
        self.facts = facts = read_json(self.folder / FACTS)
        if "class_names" not in facts or not {"mean", "max_length"} & facts.keys():
            file = str(recipe or f"{facts.get('recipe')}.py")
            call = f"load_model({str(run)!r}, {file!r})"
            advice = f"in a program, from common.tools.predict import load_model, then {call}"
            raise UserError(f"{run} is no classifier of images or texts: {advice}")
        self.accelerator = build_accelerator(TrainingConfig(mixed_precision=mixed_precision))
        self.is_text = "max_length" in facts
        with reading(str(self.folder / FACTS)):
            self.class_names = [str(name) for name in facts["class_names"]]
            self.columns = len(facts["text_columns"]) if self.is_text else 1
        model = load_model(self.folder, recipe)
        if self.is_text:
            self.tokenizer = load_tokenizer(str(self.folder))
            self.packs = self.accelerator.device.type == "cpu"  # as the recipe does
            if self.packs:
                leave_out_padding(model)
        else:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = self.accelerator.prepare_model(model, evaluation_mode=True)
        with reading(str(self.folder / FACTS)):  # what does not fit is found at once
            text = "a " * 4096 + "\t" * (self.columns - 1)
            tried = self([text] if self.is_text else [Image.new("L", (1, 1))])
            if tried.shape != (1, len({*self.class_names})):
                raise ValueError(f"{len(self.class_names)} classes, and outputs {tried.tolist()}")

    @torch.inference_mode()
    def __call__(self, inputs: Sequence[Any]) -> torch.Tensor:
        """Return probabilities, float32 [inputs, classes], on the host.

        Inputs are images of Pillow or their files; or texts, a pair of them with a tab between.
        """
        found = []
        try:
            samples = self.texts(inputs) if self.is_text else self.images(inputs)
            order = EvaluationOrder(len(samples), self.batch_size, 1, 0, samples.lengths)
            for batch in Loader(samples, order, self.accelerator.device, "device"):
                del batch["labels"]
                outputs = self.model(**batch) if self.is_text else self.model(batch["images"])
                found.append(getattr(outputs, "logits", outputs).float().softmax(-1))
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise UserError(f"a batch of {self.batch_size} does not fit: lower it") from None
            raise
        unsorted = torch.cat(order.micro_batches()).argsort()
        if not (probabilities := torch.cat(found).cpu()[unsorted]).isfinite().all():
            raise UserError(f"{self.folder}: outputs are not finite: pass --mixed-precision no")
        return probabilities

    def images(self, inputs: Sequence[Any]) -> ImageSamples:
        facts, dtype = self.facts, compute_dtype(self.accelerator)
        decode = partial(
            pixels_of,
            size=int(facts["image_size"]),
            channels=int(facts["channels"]),
            white_level=int(facts.get("white_level") or FULL_SCALE),
        )
        with ThreadPoolExecutor() as pool:
            pixels = np.stack([*pool.map(decode, inputs)])
        labels = np.zeros(len(pixels), dtype=np.int64)
        return ImageSamples(pixels, labels, facts["mean"], facts["std"], dtype)

    def texts(self, inputs: Sequence[str]) -> TextSamples:
        rows = [text.split("\t") for text in inputs]
        if wrong := next((row for row in rows if len(row) != self.columns), None):
            wanted = "two texts with a tab between" if self.columns == 2 else "one text, no tab"
            raise UserError(f"a line has {len(wrong)} texts ({wrong[0]:.60}): give {wanted}")
        with reading(f"{self.folder}: its tokenizer"):
            arrays = encode(self.tokenizer, [*zip(*rows, strict=True)], self.facts["max_length"])
        labels = np.zeros(len(rows), dtype=np.int64)
        return TextSamples(*arrays, labels, token_positions=token_positions if self.packs else None)


def pixels_of(image: Any, size: int, channels: int, white_level: int = FULL_SCALE) -> np.ndarray:
    """Return an image of Pillow, or of a file, as uint8 [size, size, channels]."""
    if isinstance(image, Image.Image):
        return image_to_pixels(image, size, channels, white_level)
    with reading(f"image {image}", "pass image files, or - for their paths on standard input"):
        opened = Image.open(plain(Path(image)))
        return image_to_pixels(opened, size, channels, white_level)
