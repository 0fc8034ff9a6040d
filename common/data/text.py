"""Text: tokenised once, cached, grouped by length; batches made on the device."""

import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common.console import say
from common.data.batch import Batch, Data, TensorSamples, Work, without_waiting
from common.data.cache import cached, write_array
from common.data.parquet import Index, ParquetRows, read_index
from common.data.sources import DataSource
from common.data.tables import READS, find_columns, load_raw
from common.errors import UserError
from common.files import read_json, reading

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

PAD_MULTIPLE = 8  # lengths that tensor cores and vector units like
AT_ONCE = 1000  # texts that are tokenised before a signal is heeded
MOST_TOKENS = 10**7
LOOKED_AT = 20_000  # texts that a vocabulary is made of where they are streamed
SCRATCH_VOCABULARY = 8192  # tokens, where no checkpoint brings a vocabulary
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # in the order of BERT's
ARRAYS = ("tokens", "offsets", "seconds", "labels")
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
            extra["token_positions"] = without_waiting(positions, device)
        samples = without_waiting(samples, device)
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

    lengths: np.ndarray

    def __init__(
        self, rows: ParquetRows, tokenizer: Path, max_length: int, positions: TokenPositions | None
    ) -> None:
        self.rows, self.blocks, self.token_positions = rows, rows.blocks, positions
        self.folder, self.max_length = tokenizer, max_length
        self.lengths = np.empty(0)  # which are not known
        self.work = Work(0)  # of the batch that was finished last

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
        self.work = batch.pop("work")
        return batch

    def count(self, samples: torch.Tensor) -> Work:
        return self.work


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
    with reading(f"--model {checkpoint}"):
        files = [p for p in Path(checkpoint).glob("*") if p.name.startswith(("token", "vocab"))]
        contents = b"".join(path.read_bytes() for path in sorted(files))  # of a local folder
    version = f"text-8-{SCRATCH_VOCABULARY}-{hashlib.sha256(contents).hexdigest()}"
    columns = {"text_columns": text_columns, "label_column": label_column}
    settings = {"checkpoint": checkpoint, "max_length": max_length, **columns}
    splits = dict[str, TextSamples]()
    if source.streaming:
        found = cached(source, index_text, f"rows-1-{version}", ("groups",), settings)
        folder, facts, arrays = found
        index, brought = Index(**facts.pop("index")), (folder / "tokenizer", max_length)
        for name, held in arrays.items():
            rows = ParquetRows(index, *held)
            splits[name] = StreamedText(rows, *brought, token_positions)
    else:
        folder, facts, arrays = cached(source, tokenize, version, ARRAYS, settings)
        for name, held in arrays.items():
            splits[name] = TextSamples(*held, token_positions=token_positions)
    if token_positions is not None:
        facts["notes"] += ["its padding is left out"]
    facts |= {"name": source.name, "source": source, "reads": READS | {"text_columns"}}
    facts |= {"tokenizer_folder": folder / "tokenizer", "max_length": max_length}
    return TextData(splits=splits, **facts)


def index_text(
    source: DataSource,
    folder: Path,
    checkpoint: str,
    max_length: int,
    text_columns: tuple[str, ...],
    label_column: str | None,
) -> dict[str, Any]:
    """Write where the row groups of all splits are, and the tokenizer; return facts."""
    train, index, groups = read_index(source, label_column)
    index.columns = find_text(train, source.name, index.label_column, text_columns)
    for name, array in groups.items():
        write_array(folder / f"{name}_groups.npy", [array], len(array))
    if checkpoint == "scratch":
        texts = ParquetRows(index, groups["train"]).look(LOOKED_AT)
        encoder = train_wordpiece([*chain(*texts)])
        index.notes.append(f"a vocabulary of {len(texts):,} of the texts")
    else:
        encoder = load_tokenizer(checkpoint)
    return keep_tokenizer(encoder, folder, index.columns) | index.facts(groups)


def tokenize(
    source: DataSource,
    folder: Path,
    checkpoint: str,
    max_length: int,
    text_columns: tuple[str, ...],
    label_column: str | None,
) -> dict[str, Any]:
    """Write all splits as flat arrays of tokens, and the tokenizer; return facts."""
    raw = load_raw(source, label_column)
    columns = find_text(raw.splits["train"], raw.name, raw.label_column, text_columns)
    for name, split in [*raw.splits.items()]:
        texts_of = zip(*(split[column][:] for column in columns), strict=True)
        raw.keep(name, [row for row, values in enumerate(texts_of) if all(values)], "text")
    texts = {name: [split[c][:] for c in columns] for name, split in raw.splits.items()}
    if checkpoint == "scratch":
        encoder = train_wordpiece([*chain(*texts["train"])])
    else:
        encoder = load_tokenizer(checkpoint)
    say(f"tokenising {len(raw):,} texts once, for this and later runs")
    for name, split_texts in texts.items():
        with reading(f"--model {checkpoint}: its tokenizer"):
            encoded = encode(encoder, split_texts, max_length)
        for what, array in zip(ARRAYS, [*encoded, raw.labels[name]], strict=True):
            write_array(folder / f"{name}_{what}.npy", [array], len(array))
    raw.notes.append(f"text from {' and '.join(columns)}")
    return keep_tokenizer(encoder, folder, columns) | raw.facts()


def find_text(train: "Dataset", name: str, label: str, asked: tuple[str, ...]) -> list[str]:
    """Return the one or two columns of text."""
    from datasets import Value

    strings = [Value("string"), Value("large_string")]
    fits = [column for column, kind in train.features.items() if kind in strings]
    found = [column for column in fits if column not in (label, "id", "idx")]
    return find_columns(train, name, "--text-columns", asked, found, fits, most=2)


def keep_tokenizer(encoder: Any, folder: Path, columns: list[str]) -> dict[str, Any]:
    try:
        encoder.save_pretrained(folder / "tokenizer")
    except Exception as problem:  # which Rust raises of a full disk
        raise OSError(f"{folder / 'tokenizer'}: {problem}") from None
    return {"vocabulary_size": 1 + max(encoder.get_vocab().values()), "text_columns": columns}


def encode(encoder: Any, texts: Sequence[Sequence[str]], max_length: int) -> list[np.ndarray]:
    """Return what `ARRAYS` names, but labels, of one or two columns of texts."""
    rows, types = list[list[int]](), list[list[int]]()
    for start in range(0, len(texts[0]), AT_ONCE):
        some = [list(column[start : start + AT_ONCE]) for column in texts]
        encoded = encoder(*some, truncation=True, max_length=max_length)
        rows += encoded["input_ids"]
        types += encoded.get("token_type_ids") or [[]] * len(some[0])
    if not all(rows):
        raise ValueError("it makes no tokens of some texts")
    pairs = zip(rows, types, strict=True)
    seconds = [kinds.index(1) if 1 in kinds else len(row) for row, kinds in pairs]
    tokens, offsets = np.concatenate(rows).astype(np.int32), np.cumsum([0, *map(len, rows)])
    return [tokens, offsets, np.array(seconds)]


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    folder, files = Path(name), ("tokenizer.json", "vocab.txt")
    if folder.is_dir() and not any((folder / file).is_file() for file in files):
        raise UserError(f"--model {name}: no tokenizer can be loaded: it has no {files[0]}")
    with reading(f"--model {name}: its tokenizer", "pass a Hub id in reach, or a local folder"):
        if (folder / files[0]).is_file():
            held = read_json(folder / files[0])
            ids = {*held["model"]["vocab"].values(), *(t["id"] for t in held["added_tokens"])}
            if max(ids) > MOST_TOKENS:  # a table of as many would be made, or the process aborted
                raise ValueError(f"one of its {len(ids):,} tokens has the number {max(ids):,}")
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def train_wordpiece(texts: list[str]) -> "PreTrainedTokenizerBase":
    """Train BERT's tokenizer, lower-cased WordPiece, on `texts`."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizer

    trained: Any = BertWordPieceTokenizer(lowercase=True)
    characters = sorted({c for text in texts for c in trained.normalize(text)} - {" "})
    # The trainer numbers characters inside of words as it meets them in a hash map, and breaks ties
    # by number: numbered here, the same texts always give the same vocabulary.
    first = [*SPECIAL_TOKENS, *(f"##{character}" for character in characters)]
    ended: Future[None] = Future()

    def train() -> None:
        try:
            trained.train_from_iterator(
                texts, vocab_size=SCRATCH_VOCABULARY, special_tokens=first, show_progress=False
            )
            ended.set_result(None)
        except BaseException as problem:  # of Rust's panics, too
            ended.set_exception(problem)

    # Beside this thread, which heeds signals: Rust looks at none until it is done.
    threading.Thread(target=train, daemon=True).start()
    ended.result()
    return BertTokenizer(vocab=trained.get_vocab(), do_lower_case=True)
