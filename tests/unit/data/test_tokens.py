"""Tokenizers: their vocabulary is that of the texts, and a signal ends its training."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from common.data.tokens import SPECIAL_TOKENS, train_wordpiece
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
