"""Data sets of text: tokenised once and cached, or tokenised while training.

Batches of cached text have samples of similar length, and are padded where the tokens lie: on the
device, if they fit there. Streamed batches mix lengths, and are padded on the host.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch

from common.data.dataset import Data
from common.data.labelled_data.labels import LABELLED_DATA_FLAGS
from common.data.prepared_data.cache import Prepared
from common.data.prepared_data.unseen_samples import prepared_samples
from common.data.samples import Batch, Samples, Work
from common.data.sources import DataSource
from common.data.stored_samples import StoredSamples
from common.data.streaming.parquet_rows import ParquetRows
from common.data.tokens import (
    ARRAYS,
    SCRATCH_VOCABULARY,
    TextFacts,
    encode,
    load_tokenizer,
    prepare_text,
)
from common.data.versions.fingerprint import fingerprint_of_tokenizer
from common.errors import UserError
from common.run_directory.init_from import weights_file
from common.system.devices import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Batches are padded to a multiple of this many tokens, because tensor cores and vector units are
# fast with such lengths.
PAD_MULTIPLE = 8
# A function that returns the positions of a flattened batch that a packed model computes, as
# `common.models.packing.token_positions` does. It takes the length of each sample (int64 [batch],
# on the host) and the padded length.
TokenPositions = Callable[[torch.Tensor, int], torch.Tensor]


class TextSamples(Samples):
    """One split of text with labels, cached or streamed."""

    has_tokens = True

    def __init__(self, token_positions: TokenPositions | None) -> None:
        """Store the function that chooses the tokens to compute; None: all, padding included."""
        self.token_positions = token_positions

    def example(self, size: int, length: int) -> Batch:
        """Return a batch of any length without values, to count a model's operations with.

        No sample is read. So this works for streamed text, too, whose lengths are not known.
        """
        tokens = torch.zeros(size, length, device="meta", dtype=torch.long)
        return {
            "input_ids": tokens,
            "token_type_ids": tokens,
            # There is no mask: BERT would read its values, and a meta tensor has no values.
            "attention_mask": None,
            "labels": tokens[:, 0],
        }


class CachedText(TextSamples, StoredSamples):
    """One split of tokenised text.

    Its arrays are `ARRAYS`: tokens (int32, for all samples, one after the other), offsets
    (int64 [samples + 1], where each sample begins in `tokens`), seconds (int64 [samples], where the
    second text begins, counted from the sample's start) and labels (int64 [samples]).
    """

    def __init__(self, *arrays: np.ndarray, token_positions: TokenPositions | None) -> None:
        TextSamples.__init__(self, token_positions)
        StoredSamples.__init__(self, **dict(zip(ARRAYS, arrays, strict=True)))
        # A loader reads them to make batches of samples of similar length.
        self.lengths: np.ndarray = np.diff(self.arrays["offsets"])

    def __len__(self) -> int:
        return len(self.arrays["labels"])

    def take(self, arrays: dict[str, torch.Tensor], indices: torch.Tensor) -> Batch:
        """Make a batch: cut the samples out of `tokens`, and pad them with 0, BERT's padding token.

        The batch is as long as its longest sample, rounded up to a multiple of `PAD_MULTIPLE`. The
        host computes this length, because reading it from the device would mean a wait.

        Args:
            arrays: `ARRAYS` by name, all on one device.
            indices: those of the samples of the batch, int64 [batch], on the host.

        Returns:
            input_ids and token_type_ids: int64 [batch, length]; labels: int64 [batch];
            attention_mask: bool [batch, 1, 1, length], false for padding; and token_positions, if
            the attribute of that name is set.
        """
        device = arrays["labels"].device
        lengths = torch.from_numpy(self.lengths)[indices]
        length = padded_length(int(lengths.max()))
        extra = {}
        if self.token_positions is not None:
            token_positions = self.token_positions(lengths, length)
            extra["token_positions"] = to_device(token_positions, device)
        indices = to_device(indices, device)
        start = arrays["offsets"][indices][:, None]
        end = arrays["offsets"][indices + 1][:, None]
        position = start + torch.arange(length, device=device)
        is_token = position < end
        # The padding of the last samples may lie beyond the end of the array. `clamp` gives it a
        # valid position, and the mask below replaces the token.
        tokens = arrays["tokens"][position.clamp(max=len(arrays["tokens"]) - 1)]
        second_starts = arrays["seconds"][indices][:, None]  # counted from the sample's start
        is_in_second = position - start >= second_starts
        return {
            "input_ids": tokens.long().masked_fill(~is_token, 0),
            # The four dimensions that SDPA takes. For a mask with two, Transformers would read
            # values from the device at each step to find out whether there is padding.
            "attention_mask": is_token[:, None, None, :],
            "token_type_ids": (is_in_second & is_token).long(),
            "labels": arrays["labels"][indices],
            **extra,
        }


class StreamedText(TextSamples):
    """One split of text, read from parquet files and tokenised while training.

    Lengths are known only after a batch was tokenised. So samples are not grouped by length, and
    each batch brings along how much work it is.
    """

    def __init__(
        self,
        rows: ParquetRows,
        tokenizer_folder: Path,
        max_length: int,
        token_positions: TokenPositions | None,
    ) -> None:
        super().__init__(token_positions)
        self.rows = rows
        self.blocks = rows.blocks  # row groups: a loader orders batches by them
        self.tokenizer_folder = tokenizer_folder
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer, loaded at the first batch, once in each process that makes batches."""
        return load_tokenizer(str(self.tokenizer_folder))

    def fetch(self, indices: torch.Tensor, epoch: int | None) -> Batch:
        """Read and tokenise the rows of a batch, and add the entry "work", which `finish` removes.

        The size of the batch is counted here, where its lengths are known on the host.
        """
        rows, labels = self.rows.read(indices, epoch)
        columns = list(zip(*rows, strict=True))
        encoded = encode(self.tokenizer, columns, self.max_length)
        # Treat these rows as a whole split, all of whose samples make up the batch.
        batch_samples = CachedText(*encoded, labels, token_positions=self.token_positions)
        all_indices = torch.arange(len(batch_samples))
        batch = batch_samples.fetch(all_indices, epoch)
        return batch | {"work": batch_samples.work_by_index(all_indices)}

    def finish(self, batch: Batch, indices: torch.Tensor, epoch: int | None) -> Batch:
        """Move the work from an entry of the batch to an attribute: the model gets all entries."""
        work = batch.pop("work")
        return CountedBatch(batch, work)

    def work_of(self, batch: Batch, indices: torch.Tensor) -> Work:
        """Return the work that `fetch` counted, because no length is known before that."""
        assert isinstance(batch, CountedBatch)
        return batch.work


NO_WORK = Work(0)


class CountedBatch(dict[str, torch.Tensor]):
    """A batch that knows how much work it is.

    Accelerate and DDP make copies with only the first argument, for another device or dtype. These
    copies have the default, `NO_WORK`. No speed is measured by them.
    """

    def __init__(self, batch: Batch, work: Work = NO_WORK) -> None:
        super().__init__(batch)
        self.work = work


def padded_length(length: int) -> int:
    """Round a number of tokens up to a multiple of `PAD_MULTIPLE`."""
    return -(-length // PAD_MULTIPLE) * PAD_MULTIPLE


class TextPreprocessing(TypedDict):
    """What a saved model needs to predict on new texts."""

    class_names: list[str]
    text_columns: list[str]
    max_length: int
    files: Path  # a folder with the tokenizer, whose files are copied beside the weights


@dataclass(kw_only=True)
class TextData(Data):
    """A text classification data set, tokenised, ready to train on."""

    splits: dict[str, TextSamples]
    class_names: list[str]
    source: DataSource
    tokenizer_folder: Path  # `AutoTokenizer.from_pretrained` loads it
    vocabulary_size: int
    text_columns: list[str]  # one or two
    max_length: int  # tokens after which a sample is cut, special tokens included

    def preprocessing(self) -> TextPreprocessing:
        """Return the entries that a recipe adds to the description of its saved model.

        A saved model needs them to predict on new texts. The predict tool reads them again.
        """
        return {
            "class_names": self.class_names,
            "text_columns": self.text_columns,
            "max_length": self.max_length,
            "files": self.tokenizer_folder,
        }


def load_text(
    source: DataSource,
    *,
    checkpoint: str,
    max_length: int,
    text_columns: tuple[str, ...],
    label_column: str | None,
    token_positions: TokenPositions | None = None,
) -> TextData:
    """Load a text data set.

    Its texts come tokenised from the cache, and are tokenised into it first if they are not there.
    With `--streaming`, they are tokenised when a batch needs them.

    Args:
        checkpoint: Hub id or folder of a tokenizer; "scratch" trains one on the training text.
        max_length: tokens after which a sample is cut, special tokens included.
        text_columns: the value of `--text-columns`; empty: the columns are inferred.
        label_column: the value of `--label-column`; None: the column is inferred.
        token_positions: makes the entry `token_positions` of a batch, which a model needs that
            leaves out padding (see `common.models.packing`); None: batches have no such entry.

    Raises:
        UserError: the data can't be read or have no text (synthetic data are images), or the
            tokenizer can't be loaded.
    """
    if source.location == "synthetic":
        raise UserError(
            "--dataset synthetic makes images, not text",
            advice="pass --dataset docstrings, or a folder of texts",
        )
    data = tokenised(source, checkpoint, max_length, text_columns, label_column)
    facts = data.facts
    tokenizer_folder = data.folder / "tokenizer"
    splits = text_splits(data, tokenizer_folder, max_length, token_positions)
    if token_positions is not None:
        facts["notes"].append("padding is not computed (--padding-free)")
    return TextData(
        name=source.name,
        splits=splits,
        source=source,
        reads=LABELLED_DATA_FLAGS | {"text_columns"},
        notes=facts["notes"],
        class_names=facts["class_names"],
        fingerprint=facts.get("fingerprint"),
        tokenizer_folder=tokenizer_folder,
        vocabulary_size=facts["vocabulary_size"],
        text_columns=facts["text_columns"],
        max_length=max_length,
        is_evaluated_only="train" not in splits,
    )


def tokenised(
    source: DataSource,
    checkpoint: str,
    max_length: int,
    text_columns: tuple[str, ...],
    label_column: str | None,
) -> Prepared[TextFacts]:
    """Return a tokenised data set, from the cache if it is there; see `load_text`.

    The arrays are `ARRAYS`. For streamed data, which are not tokenised yet, they are row groups.
    """
    # Raise the 11 whenever the same texts give other arrays, so that no old cache is used.
    version = f"text-11-{SCRATCH_VOCABULARY}-{fingerprint_of_tokenizer(checkpoint)}"
    settings = {
        "checkpoint": checkpoint,
        "max_length": max_length,
        "text_columns": text_columns,
        "label_column": label_column,
    }
    return prepared_samples(
        source,
        prepare_text,
        version,
        ARRAYS,
        settings,
        evaluation_settings=tokenizer_of_evaluated(source, checkpoint),
    )


def text_splits(
    data: Prepared[TextFacts],
    tokenizer_folder: Path,
    max_length: int,
    token_positions: TokenPositions | None,
) -> dict[str, TextSamples]:
    """Return the samples of each split, from the cache or streamed."""
    # Only a streamed data set has an index: the files, columns and classes to read rows with.
    index = data.facts.get("index")
    splits: dict[str, TextSamples] = {}
    for name, arrays in data.arrays.items():
        if index is None:
            splits[name] = CachedText(*arrays, token_positions=token_positions)
        else:
            (groups,) = arrays
            rows = ParquetRows(groups, **index)
            splits[name] = StreamedText(rows, tokenizer_folder, max_length, token_positions)
    return splits


def tokenizer_of_evaluated(source: DataSource, checkpoint: str) -> dict[str, str]:
    """Return the settings that replace "scratch" by the tokenizer of the evaluated model.

    They are needed only for data that the model was not trained on. "scratch" would train a new
    tokenizer on these, which numbers tokens differently.

    In all other cases the result is empty. A run that trains makes its own tokenizer. The texts
    that the model was trained on give its tokenizer again. Any checkpoint but "scratch" has the
    model's tokenizer already.
    """
    if not source.is_whole or source.evaluated is None or checkpoint != "scratch":
        return {}
    model_folder = str(weights_file(source.evaluated.model).parent)
    return {
        "checkpoint": model_folder,
        # This makes another cache if the tokenizer in the folder changes.
        "tokenizer_digest": fingerprint_of_tokenizer(model_folder),
    }
