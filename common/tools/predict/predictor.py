"""Classifies images or texts with the model of a run, with inputs prepared as in training."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from common.config import RequestedPrecision, TrainingConfig
from common.data.image_batches.image_samples import CachedImages
from common.data.image_decoding.pixels import image_to_pixels
from common.data.loader import Loader
from common.data.order import EvaluationOrder
from common.data.text import CachedText
from common.data.tokens import encode, load_tokenizer
from common.errors import UserError
from common.failures.error_causes import is_out_of_memory
from common.failures.sentences import reading
from common.models.packing import leave_out_padding, token_positions
from common.run_directory.model_records import (
    FULL_SCALE,
    ImageInput,
    ModelFacts,
    PixelFormat,
    TextInput,
)
from common.run_directory.record_files import parse_record
from common.run_directory.records import MODEL_JSON
from common.storage.files import refuse_pipe
from common.storage.json_files import PUT_BACK, read_json
from common.system.wording import counted
from common.tools.predict.loading import RecipeArgument, finished_model_folder, load_trained_model
from common.training.accelerator import build_accelerator
from common.training.out_of_memory import END_OTHER_PROGRAMS
from common.training.precision import compute_dtype

# The number of words in the text of the probe. No model takes so many, so the probe also tests that
# texts are truncated.
PROBE_WORDS = 4096


Input = Image.Image | str  # an image, the path of an image, or a text


class Predictor:
    """Computes the probabilities of classes exactly as an evaluation of the run would."""

    def __init__(
        self,
        run: str | Path,
        batch_size: int = 64,
        mixed_precision: RequestedPrecision = "auto",
        recipe: str | Path | None = None,
    ) -> None:
        """Load the model of a run, and test it with one input.

        The model's code comes from Transformers, or from this repository's recipe that trained it.
        Nothing in the run's folder is executed.

        Args:
            run: a run's directory, or a `model` folder.
            batch_size: the number of inputs in a batch.
            mixed_precision: the value of the flag with this name.
            recipe: the file that trained the model, if it is a copy of a recipe.

        Raises:
            UserError: the model is not finished, is not a classifier, or has files that contradict
                each other.
        """
        self.folder = finished_model_folder(Path(run))
        self.batch_size = batch_size
        description = read_input_description(self.folder / MODEL_JSON, str(run), recipe)
        self.accelerator = build_accelerator(TrainingConfig(mixed_precision=mixed_precision))
        self.input_description = description
        self.is_text = isinstance(description, TextInput)
        self.class_names = [str(name) for name in description.class_names]
        # An input is one text, or a pair of texts. For images, this number does not matter.
        self.texts_per_input = (
            len(description.text_columns) if isinstance(description, TextInput) else 1
        )
        # On a CPU, recipes leave out the padding of texts. The predictor must do the same.
        self.leaves_out_padding = self.is_text and self.accelerator.device.type == "cpu"
        model = self.for_evaluation(load_trained_model(self.folder, RecipeArgument(recipe)))
        if self.is_text:
            self.tokenizer = load_tokenizer(str(self.folder))
        self.model = self.accelerator.prepare_model(model, evaluation_mode=True)
        with reading(str(self.folder / MODEL_JSON), PUT_BACK):
            self.classify_probe()

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        """Return the model in the form that evaluations use: without padding, or channels last."""
        if self.leaves_out_padding:
            leave_out_padding(model)
        if not self.is_text:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def classify_probe(self) -> None:
        """Classify one made-up input, so that contradictory files are an error at once.

        Raises:
            UserError: the number of outputs is not the number of class names, or a name occurs
                twice.
        """
        text = "a " * PROBE_WORDS + "\t" * (self.texts_per_input - 1)  # a second text is empty
        probabilities = self([text] if self.is_text else [Image.new("L", (1, 1))])
        repeated = [name for name, count in Counter(self.class_names).items() if count > 1]
        path = self.folder / MODEL_JSON
        if repeated:
            raise UserError(
                f"{path} can't be used, because its class name {repeated[0]!r} occurs twice",
                advice=PUT_BACK,
            )
        expected_shape = (1, len(self.class_names))
        if probabilities.shape != expected_shape:
            raise UserError(
                f"{path} has {counted(len(self.class_names), 'class name')}, but the model's "
                f"output for one input has the shape {tuple(probabilities.shape)} instead of "
                f"{expected_shape}",
                advice=PUT_BACK,
            )

    @torch.inference_mode()
    def __call__(self, inputs: Sequence[Input]) -> torch.Tensor:
        """Return probabilities, float32 [inputs, classes], on the host.

        Args:
            inputs: Pillow's images or paths of image files; or texts, in pairs with a tab between
                if the model classifies pairs.

        Raises:
            UserError: an input can't be read, a batch does not fit into memory, or the outputs are
                not finite.
        """
        outputs_of_batches = []
        try:
            samples = self.texts(inputs) if self.is_text else self.images(inputs)
            order = EvaluationOrder(
                len(samples), self.batch_size, world_size=1, rank=0, lengths=samples.lengths
            )
            for batch in Loader(samples, order, self.accelerator.device, "device"):
                del batch["labels"]  # they mean nothing here, and a text model would compute a loss
                outputs = self.model(**batch) if self.is_text else self.model(batch["images"])
                # Models of Transformers return an object that holds the logits.
                logits = getattr(outputs, "logits", outputs)
                outputs_of_batches.append(logits.float().softmax(-1))
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise self.out_of_memory_error(len(inputs)) from None
            raise
        # The order sorts texts by length, so put the outputs back into the order of the inputs.
        input_order = torch.cat(order.batches()).argsort()
        probabilities = torch.cat(outputs_of_batches).cpu()[input_order]
        if not probabilities.isfinite().all():
            is_fp32 = self.accelerator.mixed_precision == "no"
            raise UserError(
                f"some outputs of the model in {self.folder} are NaN or infinite",
                advice="train it with a lower --learning-rate"
                if is_fp32
                else "pass --mixed-precision no",
            )
        return probabilities

    def out_of_memory_error(self, count: int) -> UserError:
        """Return the error for a prediction that ran out of memory.

        Args:
            count: the number of inputs of the prediction.
        """
        size = min(self.batch_size, count)
        advice = END_OTHER_PROGRAMS
        if size > 1:
            advice = f"pass a --batch-size below {size}"
        elif self.accelerator.device.type != "cpu":
            advice += ", or pass --device cpu"
        batch = counted(size, "input")
        return UserError(
            f"the prediction of {batch} at once does not fit into memory", advice=advice
        )

    def images(self, inputs: Sequence[Input]) -> CachedImages:
        """Decode images and normalise them as in training.

        Samples need labels, so these have the label 0, which nothing reads.
        """
        description = self.input_description
        assert isinstance(description, ImageInput)
        # Without a white level, images of more than 8 bits a channel would be refused.
        pixel_format = PixelFormat(
            channels=description.channels,
            image_size=description.image_size,
            white_level=description.white_level or FULL_SCALE,
        )
        decode = partial(pixels_of, pixel_format=pixel_format)
        with ThreadPoolExecutor() as pool:
            pixels = np.stack([*pool.map(decode, inputs)])
        labels = np.zeros(len(pixels), dtype=np.int64)
        dtype = compute_dtype(self.accelerator)
        return CachedImages(pixels, labels, description, dtype)

    def texts(self, inputs: Sequence[Input]) -> CachedText:
        """Encode texts as in training.

        Samples need labels, so these have the label 0, which nothing reads.

        Raises:
            UserError: an input does not have as many texts as the model takes.
        """
        assert isinstance(self.input_description, TextInput)
        rows = [str(text).split("\t") for text in inputs]
        for row in rows:
            if len(row) != self.texts_per_input:
                texts = "1 text" if len(row) == 1 else f"{len(row)} texts with tabs between them"
                expected = (
                    "two texts with a tab between them"
                    if self.texts_per_input == 2
                    else "one text without a tab"
                )
                raise UserError(
                    f"a line has {texts} (it begins with {row[0]:.60})",
                    advice=f"write {expected} on each line",
                )
        with reading(f"the tokenizer in {self.folder}", "copy the folder again from its source"):
            columns = list(zip(*rows, strict=True))
            arrays = encode(self.tokenizer, columns, self.input_description.max_length)
        labels = np.zeros(len(rows), dtype=np.int64)
        positions = token_positions if self.leaves_out_padding else None
        return CachedText(*arrays, labels, token_positions=positions)


def read_input_description(
    path: Path, run: str, recipe: str | Path | None
) -> ImageInput | TextInput:
    """Return the description of a classifier's inputs in its `model.json`.

    Args:
        path: the file.
        run: the run's directory as the caller wrote it, for the advice.
        recipe: the file that trained the model, for the advice.

    Raises:
        UserError: the model is not a classifier of images or texts, or the file is damaged.
    """
    contents = read_json(path)
    facts = parse_record(contents, ModelFacts, str(path))
    if facts.takes_texts:
        return parse_record(contents, TextInput, str(path))
    if facts.takes_images:
        return parse_record(contents, ImageInput, str(path))
    file = str(recipe or f"{facts.recipe}.py")
    code = f"from common.tools.predict import load_model; model = load_model({run!r}, {file!r})"
    raise UserError(
        f"recipes predict takes classifiers of images or texts, and the model of {run} is neither",
        advice=f"load it in a program, with the path of its recipe: `{code}`",
    )


def pixels_of(image: Image.Image | str, pixel_format: PixelFormat) -> np.ndarray:
    """Return a Pillow image, or the image in a file, as uint8 [image_size, image_size, channels].

    Args:
        image: the image, or the path of its file.
        pixel_format: the size and the number of channels that the model takes, and the value that
            is white in images of more than 8 bits a channel.

    Raises:
        UserError: the file is not an image that Pillow can read, or `image_to_pixels` refuses it.
    """
    if isinstance(image, Image.Image):
        return image_to_pixels(image, pixel_format, "an image")
    name = f"image {image}"
    with reading(name, "pass image files, or - for their paths on standard input"):
        return image_to_pixels(Image.open(refuse_pipe(Path(image))), pixel_format, name)
