"""Tokenizers: their vocabulary is that of the texts, and a signal ends its training."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from common.data.tokens import (
    LONGEST_WORD,
    SPECIAL_TOKENS,
    encode,
    parts_of,
    train_wordpiece,
    with_short_words,
)
from common.errors import Preempted
from tests.local_data import sentences


def test_vocabulary_is_a_function_of_the_texts() -> None:
    """Trained anew it has the same tokens under the same numbers, those of BERT first."""
    texts = sentences(200, 0)["sentence"] + sentences(200, 1)["sentence"]
    first, again = (train_wordpiece(texts).get_vocab() for _ in range(2))
    assert first == again
    assert sorted(first, key=first.__getitem__)[:5] == [*SPECIAL_TOKENS]


def test_signal_ends_the_training_of_a_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which looks at none itself, and may take minutes; a mistake of its own is raised."""
    from tokenizers import BertWordPieceTokenizer

    ended, waited = threading.Event(), list[bool]()

    def train(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        waited.append(ended.wait(60))

    def stop(*_: object) -> None:
        raise Preempted("stopped")

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


def test_word_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a vocabulary is trained and before it is tokenised: else the time is quadratic."""
    from tokenizers import BertWordPieceTokenizer

    text = "some words " + "ab" * 250_000 + " and more"
    longest: list[int] = []
    train = BertWordPieceTokenizer.train_from_iterator

    def look(self: object, texts: list[str], **options: object) -> None:
        longest.append(max(len(word) for text in texts for word in text.split()))
        train(self, texts, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(BertWordPieceTokenizer, "train_from_iterator", look)
    encoder = train_wordpiece([text, *sentences(20, 0)["sentence"]])
    assert longest == [LONGEST_WORD]
    tokens, offsets, _ = encode(encoder, [[text, "some words"]], 16)
    assert offsets.tolist()[1] == 16
    assert len(tokens) == offsets[-1]
    assert with_short_words(text).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    "text", ["", "a b", "x" * LONGEST_WORD, "words \n\t of  any  spacing " * 99]
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert with_short_words(text) == text


@pytest.mark.parametrize("sizes", [[1], [3] * 2500, [2**21, 1, 2**21], [2**19] * 5])
def test_parts_are_all_rows_in_order(sizes: list[int]) -> None:
    texts = ["x" * size for size in sizes]
    parts = [texts[part] for part in parts_of([texts])]
    assert [text for part in parts for text in part] == texts
    assert all(part and len(part) <= 1000 for part in parts)
    assert all(len(part) == 1 or sum(map(len, part)) <= 2**20 for part in parts)
