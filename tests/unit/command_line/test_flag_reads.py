"""Flags that were set but not used: refused after the first update."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from common.command_line import flag_reads
from common.command_line.flag_reads import mark_read, record_reads, unread_flags, unused_flag_error
from common.config import TrainingConfig
from common.data.dataset import Data
from common.data.stored_samples import TensorSamples
from common.data.unused_flags import refuse_unused_data_flags
from common.flags import as_typed, flag


@dataclass(kw_only=True)
class Config(TrainingConfig):
    mixup: float = flag(0.0, least=0)
    width: int = flag(8, role="size")
    comment: str = flag("", role="record")


LEARNING = [
    "auto_batch_size",
    "scale_learning_rate",
    "base_batch_size",
    "weight_decay",
    "warmup_steps",
    "schedule",
    "max_grad_norm",
    "compile",
    "gradient_checkpointing",
    "mixup",
    "width",
]
OTHER: dict[str, Any] = {
    "auto_batch_size": True,
    "scale_learning_rate": "sqrt",
    "schedule": "cosine",
    "compile": True,
    "gradient_checkpointing": True,
}


def recorded(**values: Any) -> Config:
    """Return a config whose reads are recorded."""
    config = Config(**values)
    record_reads(config)
    return config


@pytest.mark.parametrize("name", LEARNING)
def test_flag_that_nothing_reads_is_refused(name: str) -> None:
    """The message has its name on the command line, and where it would take effect."""
    config = recorded(**{name: OTHER.get(name, 7)})
    assert unread_flags(config, dict(vars(config))) == [name]
    error = unused_flag_error(config, name, "mine.py")
    typed_flag = as_typed(Config, name, OTHER.get(name, 7))
    assert f"{typed_flag} was set, but nothing in mine.py" in error.message
    if name in flag_reads.TAKES_EFFECT_IN:
        assert f"add {flag_reads.TAKES_EFFECT_IN[name].text} to" in error.message
    else:
        assert f"use config.{name} before the loop" in error.message


def test_flag_of_a_config_file_is_left_out_of_a_copy() -> None:
    """A command can't leave out what its `--config` sets."""
    alone = unused_flag_error(Config(mixup=0.5), "mixup", "mine.py")
    assert alone.advice.startswith("leave --mixup out, or use config.mixup")
    repeated = unused_flag_error(Config(mixup=0.5, config="old.json"), "mixup", "mine.py")
    advice = (
        "leave --mixup out of the command, or out of a copy of old.json to pass as --config, or"
    )
    assert repeated.advice.startswith(advice)


@pytest.mark.parametrize("name", LEARNING)
def test_flag_that_is_read_or_applied_is_accepted(name: str) -> None:
    """One use is enough. Afterwards the object has its own class again."""
    for use in (lambda c: getattr(c, name), lambda c: mark_read(c, name)):
        config = recorded(**{name: OTHER.get(name, 7)})
        use(config)
        assert not unread_flags(config, dict(vars(config)))
        assert type(config) is Config


def test_copies_are_no_reads() -> None:
    """`asdict`, `replace`, `vars`, copies and pickles do not count as reads of a flag."""
    config = recorded(mixup=0.5)
    assert dataclasses.asdict(config)["mixup"] == 0.5
    assert dataclasses.replace(config, width=9).mixup == 0.5
    assert vars(config)["mixup"] == 0.5
    assert copy.copy(config) == Config(mixup=0.5)
    assert copy.deepcopy(config) == Config(mixup=0.5)
    assert pickle.loads(pickle.dumps(config)) == Config(mixup=0.5)
    assert isinstance(config, Config)
    assert unread_flags(config, vars(config)) == ["mixup"]


def test_check_of_data_flags_is_no_read() -> None:
    """Every run makes this check before the first update."""
    config = recorded(mixup=0.5, weight_decay=0.3, compile=True)
    images = TensorSamples(images=torch.zeros(4, 2))
    refuse_unused_data_flags(config, Data("own", {"train": images, "test": images}))
    assert unread_flags(config, vars(config)) == ["weight_decay", "compile", "mixup"]


def test_only_flags_that_change_learning_must_be_read() -> None:
    """Defaults, repeated values, and flags for the record or the pace may be unread."""
    config = recorded(comment="mine", log_every=3)
    assert not unread_flags(config, dict(vars(config)))
    config = recorded(mixup=0.5)
    assert not unread_flags(config, {**vars(config), "mixup": 0.0})


def test_reading_costs_nothing_after_recording() -> None:
    """The attribute lookup is Python's own again."""
    config = recorded()
    assert type(config) is not Config
    unread_flags(config, dict(vars(config)))
    assert type(config).__getattribute__ is object.__getattribute__
