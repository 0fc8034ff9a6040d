"""Tokenizers: the texts alone decide their vocabulary, and a signal ends their training."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from common.data.tokens import (
    MAX_WORD_LENGTH,
    SPECIAL_TOKENS,
    encode,
    slices_for_one_call,
    train_wordpiece,
    with_short_words,
)
from common.errors import Preempted
from tests.local_data import sentences


def test_vocabulary_depends_on_the_texts_only() -> None:
    """Training again gives the same tokens and ids, with BERT's special tokens first."""
    texts = sentences(200, 0)["sentence"] + sentences(200, 1)["sentence"]
    first, again = (train_wordpiece(texts).get_vocab() for _ in range(2))
    assert first == again
    assert sorted(first, key=first.__getitem__)[:5] == [*SPECIAL_TOKENS]


def test_signal_ends_the_training_of_a_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library ignores signals and may train for minutes. Its own exceptions are passed on."""
    from tokenizers import BertWordPieceTokenizer

    ended = threading.Event()
    waited = list[bool]()

    def train(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        waited.append(ended.wait(60))

    def stop(*_: object) -> None:
        raise Preempted("stopped", is_by_ctrl_c=False)

    before = signal.signal(signal.SIGUSR1, stop)
    monkeypatch.setattr(BertWordPieceTokenizer, "train_from_iterator", train)
    try:
        with pytest.raises(Preempted):
            train_wordpiece(["some words"])
        assert not waited
    finally:
        ended.set()
        signal.signal(signal.SIGUSR1, before)
    monkeypatch.setattr(BertWordPieceTokenizer, "train_from_iterator", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_wordpiece(["some words"])


def test_endless_word_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A very long word is cut, because it would make tokenising take quadratic time."""
    from tokenizers import BertWordPieceTokenizer

    text = "some words " + "ab" * 250_000 + " and more"
    longest: list[int] = []
    train = BertWordPieceTokenizer.train_from_iterator

    def look(self: object, texts: list[str], **options: object) -> None:
        longest.append(max(len(word) for text in texts for word in text.split()))
        train(self, texts, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(BertWordPieceTokenizer, "train_from_iterator", look)
    encoder = train_wordpiece([text, *sentences(20, 0)["sentence"]])
    assert longest == [MAX_WORD_LENGTH]
    tokens, offsets, _ = encode(encoder, [[text, "some words"]], 16)
    assert offsets.tolist()[1] == 16
    assert len(tokens) == offsets[-1]
    assert with_short_words(text).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    "text", ["", "a b", "x" * MAX_WORD_LENGTH, "words \n\t of  any  spacing " * 99]
)
def test_text_with_short_words_stays_unchanged(text: str) -> None:
    """Spaces and words of the longest length stay as well."""
    assert with_short_words(text) == text


@pytest.mark.parametrize("sizes", [[1], [3] * 2500, [2**21, 1, 2**21], [2**19] * 5])
def test_parts_cover_all_rows_in_order(sizes: list[int]) -> None:
    """A part has at most 1,000 texts, and about 1 MiB unless a single text is longer."""
    texts = ["x" * size for size in sizes]
    parts = [texts[part] for part in slices_for_one_call([texts])]
    assert [text for part in parts for text in part] == texts
    assert all(part and len(part) <= 1000 for part in parts)
    assert all(len(part) == 1 or sum(map(len, part)) <= 2**20 for part in parts)
