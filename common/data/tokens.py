"""Texts as tokens: all of a data set at once, or some; and the tokenizer that makes them."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.console import say
from common.data.cache import write_array
from common.data.parquet import ParquetTables
from common.data.sources import DataSource
from common.data.tables import Tables
from common.errors import UserError
from common.files import read_json, reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AT_ONCE = 1000  # texts that are tokenised before a signal is heeded
MOST_TOKENS = 10**7
LOOKED_AT = 20_000  # texts that a vocabulary is made of where they are streamed
SCRATCH_VOCABULARY = 8192  # tokens, where no checkpoint brings a vocabulary
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # in the order of BERT's
ARRAYS = ("tokens", "offsets", "seconds", "labels")


def prepare_text(
    source: DataSource,
    folder: Path,
    checkpoint: str,
    max_length: int,
    text_columns: tuple[str, ...],
    label_column: str | None,
) -> dict[str, Any]:
    """Write the tokenizer, and all splits as flat arrays of tokens; return facts.

    Or, in place of the arrays, where the rows of parquet files are.
    """
    from datasets import Value

    table = (ParquetTables if source.streaming else Tables)(source, label_column)
    strings = [*map(Value, ("string", "large_string", "string_view"))]
    fits = [column for column, kind in table.features.items() if kind in strings]
    found = [column for column in fits if column not in (table.label, "id", "idx")]
    columns = table.find("--text-columns", text_columns, found, fits, most=2)
    texts: dict[str, list[Any]] = {}
    if isinstance(table, ParquetTables):
        rows = table.keep(folder, columns)
        if checkpoint == "scratch":
            texts["train"] = rows.look(LOOKED_AT)
            table.notes.append(f"a vocabulary of {len(texts['train']):,} of the texts")
    else:
        for name, split in [*table.splits.items()]:
            texts_of = zip(*(split[column][:] for column in columns), strict=True)
            table.keep(name, [row for row, values in enumerate(texts_of) if all(values)], "text")
        texts = {name: [split[c][:] for c in columns] for name, split in table.splits.items()}
        table.notes.append(f"text from {' and '.join(columns)}")
    if checkpoint == "scratch":
        encoder = train_wordpiece([*chain(*texts["train"])])
    else:
        encoder = load_tokenizer(checkpoint)
    if isinstance(table, Tables):
        say(f"tokenising {len(table):,} texts once, for this and later runs")
        for name, split_texts in texts.items():
            with reading(f"checkpoint {checkpoint}: its tokenizer"):
                encoded = encode(encoder, split_texts, max_length)
            for what, array in zip(ARRAYS, [*encoded, table.labels[name]], strict=True):
                write_array(folder / f"{name}_{what}.npy", [array], len(array))
    try:
        encoder.save_pretrained(folder / "tokenizer")
    except Exception as problem:  # which Rust raises of a full disk
        raise OSError(f"{folder / 'tokenizer'}: {problem}") from None
    vocabulary = {"vocabulary_size": 1 + max(encoder.get_vocab().values())}
    return vocabulary | {"text_columns": columns} | table.facts()


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
        raise UserError(f"checkpoint {name}: no tokenizer can be loaded: it has no {files[0]}")
    with reading(f"checkpoint {name}: its tokenizer", "pass a Hub id in reach, or a local folder"):
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
