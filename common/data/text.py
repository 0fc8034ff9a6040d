"""Text: tokenised once, cached, grouped by length; batches made on the device."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common.console import say
from common.data.batch import Batch, Data, TensorSamples, as_tensor
from common.data.sources import DataSource, cache_folder, cached, prepare_once
from common.data.tables import READS, RawData, existing_column, load_raw
from common.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD_MULTIPLE = 8  # lengths that tensor cores and vector units like
SCRATCH_VOCABULARY = 8192  # tokens, where no checkpoint brings a vocabulary
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # in the order of BERT's
ARRAYS = ("tokens", "offsets", "seconds", "labels")
# From lengths, int64 [batch], and a padded length, both on the host, what a model wants besides.
TokenPositions = Callable[[torch.Tensor, int], torch.Tensor]


class TextSamples(TensorSamples):
    """One split: all tokens in a row (int32), offsets, starts of second sentences, labels."""

    def __init__(self, *arrays: np.ndarray, token_positions: TokenPositions | None = None) -> None:
        self.arrays = dict(zip(ARRAYS, arrays, strict=True))
        self.tensors = {name: as_tensor(array) for name, array in self.arrays.items()}
        self.lengths: np.ndarray = np.diff(self.arrays["offsets"])
        self.size = len(self.lengths)
        self.num_bytes = sum(array.nbytes for array in arrays)
        self.token_positions = token_positions

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
        length = -(-int(lengths.max()) // PAD_MULTIPLE) * PAD_MULTIPLE
        extra = {}
        if self.token_positions is not None:
            positions = self.token_positions(lengths, length)
            extra["token_positions"] = positions.to(device, non_blocking=True)
        samples = samples.to(device, non_blocking=True)
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


@dataclass(kw_only=True)
class TextData(Data):
    """A text classification data set, tokenised, ready to train on."""

    splits: dict[str, TextSamples]
    class_names: list[str]
    source: DataSource
    tokenizer_folder: Path  # `AutoTokenizer.from_pretrained` loads it
    vocabulary_size: int


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
    files = [p for p in Path(checkpoint).glob("*") if p.name.startswith(("token", "vocab"))]
    contents = b"".join(path.read_bytes() for path in sorted(files))  # of a local folder
    folder = cache_folder(
        source,
        kind="text-6",
        tokenizer=[checkpoint, SCRATCH_VOCABULARY, hashlib.sha256(contents).hexdigest()],
        max_length=max_length,
        columns=[*text_columns, label_column],
    )

    def prepare(target: Path) -> dict[str, Any]:
        raw = load_raw(source, label_column)
        return tokenize(target, raw, checkpoint, max_length, text_columns)

    facts = prepare_once(folder, prepare)
    splits = {
        name: TextSamples(*cached(folder, name, *ARRAYS), token_positions=token_positions)
        for name in facts.pop("splits")
    }
    facts |= {"name": source.name, "source": source, "reads": READS | {"text_columns"}}
    return TextData(splits=splits, tokenizer_folder=folder / "tokenizer", **facts)


def tokenize(
    folder: Path, raw: RawData, checkpoint: str, max_length: int, text_columns: tuple[str, ...]
) -> dict[str, Any]:
    """Write all splits of `raw` as flat arrays of tokens, and the tokenizer; return facts."""
    columns = find_text_columns(raw, text_columns)
    texts: dict[str, list[list[str]]] = {}
    for name, split in raw.splits.items():
        rows = [split[column][:] for column in columns]
        kept = [row for row, values in enumerate(zip(*rows, strict=True)) if all(values)]
        raw.keep(name, kept, "text" if len(kept) else f"text in {columns}")
        texts[name] = [[values[row] for row in kept] for values in rows]
    if checkpoint == "scratch":
        encoder = train_wordpiece([text for column in texts["train"] for text in column])
    else:
        encoder = load_tokenizer(checkpoint)
    total = sum(len(split_texts[0]) for split_texts in texts.values())
    say(f"tokenising {total:,} texts once, for this and later runs")
    for name, split_texts in texts.items():
        encoded = encoder(*split_texts, truncation=True, max_length=max_length)
        rows = encoded["input_ids"]
        types = encoded.get("token_type_ids") or [[]] * len(rows)
        pairs = zip(rows, types, strict=True)
        seconds = [kinds.index(1) if 1 in kinds else len(row) for row, kinds in pairs]
        arrays = {
            "tokens": np.concatenate(rows).astype(np.int32),
            "offsets": np.cumsum([0, *map(len, rows)]),
            "seconds": np.array(seconds),
            "labels": raw.labels[name],
        }
        for what, array in arrays.items():
            np.save(folder / f"{name}_{what}.npy", array)
    encoder.save_pretrained(folder / "tokenizer")
    raw.notes.append(f"text from {' and '.join(columns)}")
    return {"vocabulary_size": len(encoder), **raw.facts()}


def find_text_columns(raw: RawData, asked: tuple[str, ...]) -> list[str]:
    """Return the one or two columns of text: named, or all that hold strings."""
    from datasets import Value

    split, others = raw.splits["train"], (raw.label_column, "id", "idx")
    if asked:
        found = [existing_column(split, column, "--text-columns", raw.name) for column in asked]
    else:
        strings = [Value("string"), Value("large_string")]
        found = [c for c, kind in split.features.items() if kind in strings and c not in others]
    if not 1 <= len(found) <= 2:
        raise UserError(
            f"data set {raw.name}: BERT takes one sentence or a pair, and there are {len(found)} "
            f"columns of text: name them by --text-columns: {', '.join(split.column_names)}"
        )
    return found


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    folder, files = Path(name), ("tokenizer.json", "vocab.txt")
    if folder.is_dir() and not any((folder / file).is_file() for file in files):
        raise UserError(f"--model {name}: no tokenizer can be loaded: it has no {files[0]}")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as problem:
        raise UserError(
            f"--model {name}: no tokenizer can be loaded from there "
            f"({str(problem).splitlines()[0]}): pass a Hub id in reach, or a local folder"
        ) from None


def train_wordpiece(texts: list[str]) -> "PreTrainedTokenizerBase":
    """Train BERT's tokenizer, lower-cased WordPiece, on `texts`."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizer

    trained: Any = BertWordPieceTokenizer(lowercase=True)
    characters = sorted({c for text in texts for c in trained.normalize(text)} - {" "})
    # The trainer numbers characters inside of words as it meets them in a hash map, and breaks ties
    # by number: numbered here, the same texts always give the same vocabulary.
    first = [*SPECIAL_TOKENS, *(f"##{character}" for character in characters)]
    trained.train_from_iterator(
        texts, vocab_size=SCRATCH_VOCABULARY, special_tokens=first, show_progress=False
    )
    return BertTokenizer(vocab=trained.get_vocab(), do_lower_case=True)
