"""Turns the texts of a data set into tokens, and makes or loads the tokenizer for that."""

import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.console import say
from common.data.prepared_data.cache import PreparedFacts, write_array
from common.data.reading.tables import Tables
from common.data.sources import DataSource
from common.data.streaming.parquet_tables import ParquetTables
from common.errors import UserError
from common.failures.sentences import reading
from common.storage.json_files import read_json
from common.system.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# The most texts and characters that are tokenised in one call. Python handles signals only between
# calls, so a call must not take long.
TEXTS_AT_ONCE = 1000
CHARACTERS_AT_ONCE = 2**20
# The most characters of a word; longer words are cut. The time to train a vocabulary grows with the
# square of a word's length.
MAX_WORD_LENGTH = 1000
MAX_TOKEN_ID = 10**7  # see `check_token_ids`
SAMPLED_TEXTS = 20_000  # rows of a streamed data set from whose texts a vocabulary is made
SCRATCH_VOCABULARY = 8192  # tokens of a vocabulary that is trained on the data
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # in BERT's order
# The names of the arrays of a split; see `encode`. "seconds" has the starts of the second texts.
# Don't change these names: they are part of the names of the cache's files, and so of the
# fingerprints of data sets.
ARRAYS = ("tokens", "offsets", "seconds", "labels")

Columns = Sequence[Sequence[str]]  # one or two columns of texts, of the same length


class TextFacts(PreparedFacts):
    """What is known about a prepared data set of text."""

    vocabulary_size: int
    text_columns: list[str]  # one or two


def prepare_text(
    source: DataSource,
    folder: Path,
    checkpoint: str,
    max_length: int,
    text_columns: tuple[str, ...],
    label_column: str | None,
    tokenizer_digest: str | None = None,
) -> TextFacts:
    """Fill a cache folder with a tokenised data set and the tokenizer, and return facts about it.

    For each split, the folder gets the arrays that `encode` returns, and int64 labels [samples]. A
    streamed data set is not tokenised now: the folder gets the places of its row groups.

    Args:
        checkpoint: Hub id or folder of a tokenizer; "scratch" trains one on the training texts.
        max_length: tokens after which a sample is cut, special tokens included; not used here for a
            streamed data set.
        text_columns: the value of `--text-columns`; empty: the columns are inferred.
        label_column: the value of `--label-column`; None: the column is inferred.
        tokenizer_digest: not used here. It is a part of the cache's name, so that another cache is
            made if the tokenizer in a folder changes.

    Raises:
        UserError: the data can't be read, or the tokenizer can't be loaded or used.
        OSError: the tokenizer can't be written.
    """
    table_class = ParquetTables if source.streaming else Tables
    table = table_class(source, label_column)
    columns = table.columns.find_texts("--text-columns", text_columns, table.label_column)
    if isinstance(table, ParquetTables):
        tokenizer = prepare_streamed_text(table, columns, folder, checkpoint)
    else:
        tokenizer = prepare_whole_text(table, columns, folder, checkpoint, max_length)
    save_tokenizer(tokenizer, folder / "tokenizer")
    # The ids of tokens may have gaps, so the largest id counts, and not the number of tokens.
    vocabulary_size = 1 + max(tokenizer.get_vocab().values())
    return {"vocabulary_size": vocabulary_size, "text_columns": columns, **table.facts()}


def prepare_streamed_text(
    table: ParquetTables, columns: list[str], folder: Path, checkpoint: str
) -> "PreTrainedTokenizerBase":
    """Write the places of the row groups, and return the tokenizer.

    If `checkpoint` is "scratch", the vocabulary comes from a sample of the texts. A note tells the
    user from how many.
    """
    rows = table.write_groups(folder, columns)
    if checkpoint != "scratch":
        return load_tokenizer(checkpoint)
    sampled_rows = rows.sample(SAMPLED_TEXTS)
    table.notes.append(f"the vocabulary comes from {len(sampled_rows):,} of the texts")
    return train_wordpiece([text for row in sampled_rows for text in row])


def prepare_whole_text(
    table: Tables, columns: list[str], folder: Path, checkpoint: str, max_length: int
) -> "PreTrainedTokenizerBase":
    """Tokenise all splits, write their arrays, and return the tokenizer.

    Rows that lack a text are dropped.
    """
    # `keep` may remove a split, so the loop goes over a copy of the dict's items.
    for name, split in list(table.splits.items()):
        rows = zip(*(split[column][:] for column in columns), strict=True)
        complete_rows = [number for number, row_texts in enumerate(rows) if all(row_texts)]
        table.keep(name, complete_rows, "text")
    texts = {name: [split[column][:] for column in columns] for name, split in table.splits.items()}
    table.notes.append(f"text from {' and '.join(columns)}")
    # With "scratch", there is a train split: if only one split is evaluated as a whole, the
    # checkpoint is the folder of the evaluated model.
    if checkpoint == "scratch":
        tokenizer = train_wordpiece([text for column in texts["train"] for text in column])
    else:
        tokenizer = load_tokenizer(checkpoint)
    say(f"tokenising {counted(len(table), 'text')} once, for this and later runs")
    for name, split_texts in texts.items():
        advice = "check its files, or pass another model"
        with reading(f"the tokenizer of checkpoint {checkpoint}", advice):
            encoded = encode(tokenizer, split_texts, max_length)
        arrays = [*encoded, table.labels[name]]
        for array_name, array in zip(ARRAYS, arrays, strict=True):
            write_array(folder / f"{name}_{array_name}.npy", [array], len(array))
    return tokenizer


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write a tokenizer to a folder.

    Raises:
        OSError: it can't be written, for any reason. `cached` turns this into a `UserError`.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # the Rust library raises a plain Exception for a full disk
        raise OSError(f"{folder}: {error}") from None


def encode(
    tokenizer: "PreTrainedTokenizerBase", texts: Columns, max_length: int
) -> list[np.ndarray]:
    """Tokenise samples that have one or two texts each.

    Args:
        texts: one column of texts, or two of the same length.
        max_length: tokens after which a sample is cut, special tokens included.

    Returns:
        Three arrays, the first ones of `ARRAYS`:

        - tokens: int32, the tokens of all samples, one sample after the other.
        - offsets: int64 [samples + 1], the place in `tokens` at which each sample begins; the last
          one is the number of tokens.
        - seconds: int64 [samples], the place in each sample at which its second text begins; the
          sample's length if there is only one text, or if the tokenizer does not mark the second.

    Raises:
        UserError: the tokenizer makes no tokens of a sample.
    """
    rows: list[list[int]] = []
    token_types: list[list[int]] = []
    for rows_of_call in slices_for_one_call(texts):
        columns = [[with_short_words(text) for text in column[rows_of_call]] for column in texts]
        encoded = tokenizer(*columns, truncation=True, max_length=max_length)
        rows += encoded["input_ids"]
        types_of_rows = encoded.get("token_type_ids")
        # Not every tokenizer has types, which tell first and second texts apart.
        if not types_of_rows:
            types_of_rows = [[] for _ in columns[0]]
        token_types += types_of_rows
    if not all(rows):
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path} returns no tokens for some texts",
            advice="check its files, or pass another model",
        )
    # The second text of a sample begins at its first token of type 1.
    second_starts = [
        types.index(1) if 1 in types else len(row)
        for row, types in zip(rows, token_types, strict=True)
    ]
    tokens = np.concatenate(rows).astype(np.int32)
    offsets = np.cumsum([0, *map(len, rows)])
    return [tokens, offsets, np.array(second_starts)]


def slices_for_one_call(texts: Columns) -> Iterator[slice]:
    """Yield slices of the rows, each small enough to be tokenised in one call.

    Each slice has at least one row, even if this row alone has more than `CHARACTERS_AT_ONCE`.
    """
    start = 0
    characters = 0
    for row, values in enumerate(zip(*texts, strict=True)):
        added = sum(map(len, values))
        is_full = row - start == TEXTS_AT_ONCE or characters + added > CHARACTERS_AT_ONCE
        if is_full and row > start:
            yield slice(start, row)
            start = row
            characters = 0
        characters += added
    yield slice(start, len(texts[0]))


def with_short_words(text: str) -> str:
    """Cut words that are longer than `MAX_WORD_LENGTH` into several words.

    Training a vocabulary on longer words would take too long. `encode` cuts them, too, so that a
    tokenizer that was trained here gets the same words. A word is a run of characters without white
    space.
    """
    # Most texts have no such word, and need no replacement.
    if len(text) <= MAX_WORD_LENGTH or max(map(len, text.split()), default=0) <= MAX_WORD_LENGTH:
        return text
    return re.sub(r"\S+", lambda match: cut_word(match[0]), text)


def cut_word(word: str) -> str:
    starts = range(0, len(word), MAX_WORD_LENGTH)
    return " ".join(word[start : start + MAX_WORD_LENGTH] for start in starts)


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Return a tokenizer whose tokens are the bytes of a text in UTF-8, and the end of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end_of_text = "<eos>"
    vocabulary = {end_of_text: 0}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):  # one stands for each byte
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end_of_text)


def load_tokenizer(checkpoint: str) -> "PreTrainedTokenizerBase":
    """Load a Transformers tokenizer. Code that comes with the tokenizer is not run.

    Args:
        checkpoint: a Hub id, or a folder with tokenizer.json or vocab.txt.

    Raises:
        UserError: the tokenizer can't be loaded.
    """
    from transformers import AutoTokenizer

    folder = Path(checkpoint)
    tokenizer_file = folder / "tokenizer.json"
    has_vocabulary = tokenizer_file.is_file() or (folder / "vocab.txt").is_file()
    if folder.is_dir() and not has_vocabulary:
        raise UserError(
            f"model folder {checkpoint} has no tokenizer (neither tokenizer.json nor vocab.txt)",
            advice=(
                "save the model's tokenizer in this folder, as with AutoTokenizer.from_pretrained("
                f"ORIGINAL_MODEL).save_pretrained({checkpoint!r}), or pass another model"
            ),
        )
    advice = "check its files (for a model of the Hub, also the connection), or pass another model"
    with reading(f"the tokenizer of checkpoint {checkpoint}", advice):
        if tokenizer_file.is_file():
            check_token_ids(tokenizer_file)
        return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)


def check_token_ids(tokenizer_file: Path) -> None:
    """Raise a `UserError` if a token has an id above `MAX_TOKEN_ID`.

    Transformers would allocate a table up to that id, which might abort the process.

    Args:
        tokenizer_file: a tokenizer.json.
    """
    tokenizer = read_json(tokenizer_file)
    token_ids = set(tokenizer["model"]["vocab"].values())
    token_ids |= {token["id"] for token in tokenizer["added_tokens"]}
    if max(token_ids) > MAX_TOKEN_ID:
        raise UserError(
            f"{tokenizer_file} has {len(token_ids):,} tokens, but one of them has the id "
            f"{max(token_ids):,}",
            advice="copy the file again from where it came, or pass another model",
        )


def train_wordpiece(texts: list[str]) -> "PreTrainedTokenizerBase":
    """Train BERT's tokenizer, lower-cased WordPiece, on `texts`; equal texts give equal tokenizers.

    The training is Rust code, and Python handles no signals in the thread that runs it. So another
    thread runs it, and this thread waits for its end and handles signals.
    """
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizer

    texts = [with_short_words(text) for text in texts]
    wordpiece = BertWordPieceTokenizer(lowercase=True)
    characters = {character for text in texts for character in wordpiece.normalize(text)}
    characters.discard(" ")
    # The trainer merges the most frequent pair of tokens, and between equally frequent pairs it
    # chooses by the numbers of the tokens. By default, it numbers the characters inside words (such
    # as ##a) in the order of a hash map, so the vocabulary would differ from run to run. Special
    # tokens get their numbers in the given order, so the characters are passed as special tokens.
    special_tokens = list(SPECIAL_TOKENS)
    special_tokens += [f"##{character}" for character in sorted(characters)]
    training: Future[None] = Future()

    def train() -> None:
        try:
            wordpiece.train_from_iterator(
                texts,
                vocab_size=SCRATCH_VOCABULARY,
                special_tokens=special_tokens,
                show_progress=False,
            )
            training.set_result(None)
        except BaseException as error:  # a panic of Rust is not an Exception
            training.set_exception(error)

    threading.Thread(target=train, daemon=True).start()
    training.result()
    return BertTokenizer(vocab=wordpiece.get_vocab(), do_lower_case=True)
