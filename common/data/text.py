"""Text: tokenised once, cached, grouped by length; batches made on the device."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.data.batch import Batch, Data, TensorSamples, Work
from common.data.labels import READS
from common.data.parquet import ParquetRows
from common.data.prepared import prepared
from common.data.sources import DataSource
from common.data.tokens import ARRAYS, SCRATCH_VOCABULARY, encode, load_tokenizer, prepare_text
from common.devices import to_device
from common.errors import UserError
from common.files import reading
from common.initial import weights_file

PAD_MULTIPLE = 8  # lengths that tensor cores and vector units like
# From lengths, int64 [batch], and a padded length, both on the host, what a model wants besides.
TokenPositions = Callable[[torch.Tensor, int], torch.Tensor]


class TextSamples(TensorSamples):
    """One split: all tokens in a row (int32), offsets, starts of second sentences, labels."""

    def __init__(self, *arrays: np.ndarray, token_positions: TokenPositions | None = None) -> None:
        self.keep(**dict(zip(ARRAYS, arrays, strict=True)))
        self.lengths: np.ndarray = np.diff(self.arrays["offsets"])
        self.token_positions = token_positions

    def __len__(self) -> int:
        return len(self.arrays["labels"])

    def example(self, size: int, length: int) -> Batch:
        # Without a mask, whose values BERT would look at.
        tokens = torch.zeros(size, length, device="meta", dtype=torch.long)
        batch = {"input_ids": tokens, "token_type_ids": tokens, "attention_mask": None}
        return batch | {"labels": tokens[:, 0]}

    def take(self, arrays: dict[str, torch.Tensor], samples: torch.Tensor) -> Batch:
        """Cut `samples` out of the row of tokens and pad them with 0, BERT's padding token.

        The length, the longest one rounded up, is known on the host: nothing waits for the device.

        Returns:
            input_ids, token_type_ids: int64 [batch, length]; labels [batch]; attention_mask:
            bool [batch, 1, 1, length]; and `token_positions`, if the model is to know.
        """
        device = arrays["labels"].device
        lengths = torch.from_numpy(self.lengths)[samples]
        length = padded_length(int(lengths.max()))
        extra = {}
        if self.token_positions is not None:
            positions = self.token_positions(lengths, length)
            extra["token_positions"] = to_device(positions, device)
        samples = to_device(samples, device)
        start = arrays["offsets"][samples][:, None]
        end = arrays["offsets"][samples + 1][:, None]
        position = start + torch.arange(length, device=device)
        real = position < end
        tokens = arrays["tokens"][position.clamp(max=len(arrays["tokens"]) - 1)]
        second = position - start >= arrays["seconds"][samples][:, None]
        return {
            "input_ids": tokens.long().masked_fill(~real, 0),
            # As SDPA takes it: of a mask with two dimensions Transformers reads values back from
            # the device at each step, to see whether there is any padding.
            "attention_mask": real[:, None, None, :],
            "token_type_ids": (second & real).long(),
            "labels": arrays["labels"][samples],
            **extra,
        }


class StreamedText(TextSamples):
    """One split, read from parquet files and tokenised while training; in no order of lengths."""

    lengths = np.empty(0)  # which are not known

    def __init__(
        self, tokenizer: Path, max_length: int, rows: ParquetRows, token_positions: Any
    ) -> None:
        self.rows, self.blocks, self.token_positions = rows, rows.blocks, token_positions
        self.folder, self.max_length = tokenizer, max_length

    def __len__(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(str(self.folder))

    def fetch(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        rows, labels = self.rows.read(samples, epoch)
        encoded = encode(self.tokenizer, [*zip(*rows, strict=True)], self.max_length)
        made = TextSamples(*encoded, labels, token_positions=self.token_positions)
        every = torch.arange(len(made))
        return made.fetch(every, epoch) | {"work": made.count(every)}

    def finish(self, batch: Batch, samples: torch.Tensor, epoch: int | None) -> Batch:
        work = batch.pop("work")
        return CountedBatch(batch, work)

    def work_of(self, batch: Batch, samples: torch.Tensor) -> Work:
        """Return the work that `fetch` counted: no sample's length is known before."""
        assert isinstance(batch, CountedBatch)
        return batch.work


NO_WORK = Work(0)


class CountedBatch(dict[str, Any]):
    """A batch that knows how much work it is.

    Copies of it on other devices, which only show its shapes, do not know.
    """

    def __init__(self, batch: Batch, work: Work = NO_WORK) -> None:
        super().__init__(batch)
        self.work = work


def padded_length(length: int) -> int:
    return -(-length // PAD_MULTIPLE) * PAD_MULTIPLE


@dataclass(kw_only=True)
class TextData(Data):
    """A text classification data set, tokenised, ready to train on."""

    splits: dict[str, TextSamples]
    class_names: list[str]
    source: DataSource
    tokenizer_folder: Path  # `AutoTokenizer.from_pretrained` loads it
    vocabulary_size: int
    text_columns: list[str]  # one or two
    max_length: int

    def preprocessing(self) -> dict[str, Any]:
        names = ("class_names", "text_columns", "max_length")
        return {name: getattr(self, name) for name in names} | {"files": self.tokenizer_folder}


def tokenizer_digest(checkpoint: str) -> str:
    """Return a digest of a tokenizer in a local folder; the same for all that are not."""
    with reading(f"checkpoint {checkpoint}"):
        files = [p for p in Path(checkpoint).glob("*") if p.name.startswith(("token", "vocab"))]
        contents = b"".join(path.read_bytes() for path in sorted(files))
    return hashlib.sha256(contents).hexdigest()


def load_text(
    source: DataSource,
    *,
    checkpoint: str,
    max_length: int,
    text_columns: tuple[str, ...],
    label_column: str | None,
    token_positions: TokenPositions | None = None,
) -> TextData:
    """Return a text data set, tokenising it first where no cache of it exists.

    Args:
        checkpoint: Hub id or folder of a tokenizer; "scratch" trains one on the training text.
        max_length: tokens after which a sample is cut, special tokens included.
        token_positions: makes what a batch has of that name, as `common.models.packing` needs it.
    """
    if source.location == "synthetic":
        raise UserError("--dataset synthetic makes images, not text: pass docstrings or a folder")
    version = f"text-9-{SCRATCH_VOCABULARY}-{tokenizer_digest(checkpoint)}"
    columns = {"text_columns": text_columns, "label_column": label_column}
    settings = {"checkpoint": checkpoint, "max_length": max_length, **columns}
    for_model: dict[str, Any] = {}
    if source.is_whole and source.evaluated is not None and checkpoint == "scratch":
        # No other vocabulary has the model's numbers.
        own = str(weights_file(source.evaluated.model).parent)
        for_model = {"checkpoint": own, "tokenizer_digest": tokenizer_digest(own)}
    folder, facts, arrays = prepared(source, prepare_text, version, ARRAYS, settings, for_model)
    make: Callable[..., TextSamples] = TextSamples
    tokenizer = folder / "tokenizer"
    if index := facts.pop("index", None):
        arrays = {name: [ParquetRows(groups, **index)] for name, (groups,) in arrays.items()}
        make = functools.partial(StreamedText, tokenizer, max_length)
    splits = {name: make(*one, token_positions=token_positions) for name, one in arrays.items()}
    if token_positions is not None:
        facts["notes"] += ["its padding is left out"]
    facts |= {"name": source.name, "source": source, "reads": READS | {"text_columns"}}
    facts |= {"max_length": max_length, "is_evaluated_only": "train" not in splits}
    return TextData(splits=splits, tokenizer_folder=tokenizer, **facts)
