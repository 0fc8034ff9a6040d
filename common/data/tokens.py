"""Texts as tokens: all of a data set at once, or some; and the tokenizer that makes them."""

import re
import threading
from collections.abc import Iterator, Sequence
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

# Texts, and their characters, that are tokenised in one go: between two goes a signal is heeded.
AT_ONCE = 1000
CHARACTERS_AT_ONCE = 2**20
# Characters of a word. The time to train a vocabulary grows with the square of a word's length.
LONGEST_WORD = 1000
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
    tokenizer_digest: str | None = None,
) -> dict[str, Any]:
    """Write the tokenizer, and all splits as flat arrays of tokens; return facts.

    Or, in place of the arrays, where the rows of parquet files are. The digest tells caches of
    tokenizers in one folder apart.
    """
    table = (ParquetTables if source.streaming else Tables)(source, label_column)
    columns = table.find_texts("--text-columns", text_columns)
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
    """Tokenise one or two columns of texts.

    Args:
        encoder: a tokenizer of Transformers.
        texts: one or two columns, each a sequence of as many texts.
        max_length: tokens after which a sample is cut, special tokens included.

    Returns:
        tokens (int32, of all samples in a row), offsets (int64 [samples + 1]) and the place in
        each sample at which its second text begins (int64 [samples]).

    Raises:
        ValueError: the tokenizer makes no tokens of a text.
    """
    rows = list[list[int]]()
    token_types = list[list[int]]()
    for part in parts_of(texts):
        columns = [[with_short_words(text) for text in column[part]] for column in texts]
        encoded = encoder(*columns, truncation=True, max_length=max_length)
        rows += encoded["input_ids"]
        token_types += encoded.get("token_type_ids") or [[]] * len(columns[0])
    if not all(rows):
        raise ValueError("it makes no tokens of some texts")
    seconds = [
        types.index(1) if 1 in types else len(row)
        for row, types in zip(rows, token_types, strict=True)
    ]
    tokens = np.concatenate(rows).astype(np.int32)
    offsets = np.cumsum([0, *map(len, rows)])
    return [tokens, offsets, np.array(seconds)]


def parts_of(texts: Sequence[Sequence[str]]) -> Iterator[slice]:
    """Yield slices of the rows, each of few enough texts and characters to tokenise in one go."""
    start = characters = 0
    for row, values in enumerate(zip(*texts, strict=True)):
        added = sum(map(len, values))
        is_full = row - start == AT_ONCE or characters + added > CHARACTERS_AT_ONCE
        if is_full and row > start:
            yield slice(start, row)
            start = row
            characters = 0
        characters += added
    yield slice(start, len(texts[0]))


def with_short_words(text: str) -> str:
    """Cut each run of characters without white space that is longer than `LONGEST_WORD`."""
    if len(text) <= LONGEST_WORD or max(map(len, text.split()), default=0) <= LONGEST_WORD:
        return text
    return re.sub(r"\S+", lambda match: cut_word(match[0]), text)


def cut_word(word: str) -> str:
    starts = range(0, len(word), LONGEST_WORD)
    return " ".join(word[start : start + LONGEST_WORD] for start in starts)


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

    texts = [with_short_words(text) for text in texts]
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
