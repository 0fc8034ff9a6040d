"""The flags with which a proof runs a recipe: the user's flags, and flags for a short training."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.config import TrainingConfig
from common.errors import UserError
from common.flags import words_of_flag
from common.tools.flag_words import flags_with_values
from common.tools.recipe import loading

FlagValues = dict[str, list[str]]  # the values of each flag by its name, such as "--batch-size"
EPOCHS = 4
BATCH_SIZE = 16
ACCUMULATION = 2
LOG_EVERY = 3  # updates; by default it does not divide an epoch, so some rows span two epochs
CHECKPOINT_EVERY = 3  # updates
# Flags that the proof sets itself or can't use, each with the reason.
REFUSED = {
    "--output-dir": "a proof writes into a folder of its own (name it with --folder)",
    "--resume": "a proof starts its own runs",
    "--evaluate-only": "a proof trains",
    "--auto-batch-size": "its choice depends on the clock, so two runs may differ",
    "--early-stopping": "a proof needs the whole run",
    "--target": "a proof trains too little to reach it",
    "--config": "a proof needs each flag on its command line",
}


def parse_flags(words: Sequence[str]) -> FlagValues:
    """Return the values of each flag on a command line. If a flag is repeated, the last one counts.

    Raises:
        UserError: the first word is a value without a flag.
    """
    return dict(flags_with_values(words))


def as_words(**values: object) -> tuple[str, ...]:
    """Return the words of a command line for shared flags that Python code names.

    `as_words(max_steps=3, compile=False)` is `("--max-steps", "3", "--no-compile")`. A value stays
    one word even if it has spaces, as a path may.
    """
    words: list[str] = []
    for name, value in values.items():
        words += words_of_flag(TrainingConfig, name, value)
    return tuple(words)


def flag_words(flags: FlagValues) -> list[str]:
    """Return the words of a command line with these flags."""
    words: list[str] = []
    for name, values in flags.items():
        words += [name, *values]
    return words


def merged(flags: FlagValues, overrides: FlagValues) -> FlagValues:
    """Return `flags` and `overrides`, in which `overrides` has precedence.

    A switch also replaces its opposite: `--no-compile` replaces `--compile`.
    """
    kept = {
        name: values
        for name, values in flags.items()
        if without_negation(name) not in map(without_negation, overrides)
    }
    return {**kept, **overrides}


def without_negation(name: str) -> str:
    """Return the name of a flag without the ``no-`` of a switch."""
    return f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name


def refuse_unfit_flags(flags: FlagValues) -> None:
    """Raise a `UserError` for a flag that can't be part of a proof."""
    for name in flags:
        reason = REFUSED.get(without_negation(name))
        if reason is not None:
            raise UserError(
                f"recipes prove can't pass {name} to the recipe, because {reason}",
                advice=f"leave {name} out of the command",
            )


@dataclass(frozen=True)
class ProofFlags:
    """The flags of the reference run, and the sizes that follow from them."""

    values: FlagValues
    batch_size: int
    accumulation: int
    training_samples: int  # the most samples of the training split
    evaluation_samples: int  # the most samples of each other split


def proof_flags(
    user_flags: FlagValues, config_class: type[TrainingConfig], built_in: str | None, updates: int
) -> ProofFlags:
    """Return the flags for a short training. The user's flags have precedence.

    Args:
        user_flags: the flags that the user has passed.
        config_class: the class of the recipe's config.
        built_in: the recipe's built-in data set, which replaces ``auto``; None if it has none.
        updates: about the number of updates of the training, which has whole epochs of at least
            two updates. The user's `--max-steps` has precedence.

    Raises:
        UserError: a flag of the user can't be part of a proof, or its value is out of range.
    """
    refuse_unfit_flags(user_flags)
    batch_size = whole_number(user_flags, "--batch-size", BATCH_SIZE)
    accumulation = whole_number(user_flags, "--gradient-accumulation-steps", ACCUMULATION)
    effective_batch_size = whole_number(
        user_flags, "--effective-batch-size", batch_size * accumulation
    )
    accumulation = max(1, effective_batch_size // batch_size)
    epochs = whole_number(user_flags, "--epochs", EPOCHS)
    steps = whole_number(user_flags, "--max-steps", updates)
    flags: FlagValues = {
        "--batch-size": [str(batch_size)],
        "--gradient-accumulation-steps": [str(accumulation)],
        "--log-every": [str(LOG_EVERY)],
        "--checkpoint-every": [str(CHECKPOINT_EVERY)],
        "--tracker": ["none"],
    }
    if "--max-steps" not in user_flags:
        flags["--epochs"] = [str(epochs)]
    if built_in is not None and config_class.dataset == "auto":
        flags["--dataset"] = [built_in]
    updates_per_epoch = max(2, steps // epochs)
    # The training split has half a batch more than the updates need, so that each epoch drops an
    # incomplete batch. The evaluation has an odd number of samples, so that its last batch and the
    # shares of the ranks are incomplete.
    return ProofFlags(
        values=merged(flags, without_accumulation(user_flags)),
        batch_size=batch_size,
        accumulation=accumulation,
        training_samples=updates_per_epoch * effective_batch_size
        + max(1, effective_batch_size // 2),
        evaluation_samples=4 * batch_size + max(1, batch_size // 2) + 1,
    )


def without_accumulation(flags: FlagValues) -> FlagValues:
    """Return flags without those from which the number of micro-batches in an update follows."""
    kept_flags = dict(flags)
    for name in ("--gradient-accumulation-steps", "--effective-batch-size"):
        kept_flags.pop(name, None)
    return kept_flags


def whole_number(flags: FlagValues, name: str, default: int) -> int:
    """Return the value of a flag, or `default` if it is not passed.

    Raises:
        UserError: the value is not a whole number of 1 or more.
    """
    if name not in flags:
        return default
    text = " ".join(flags[name])  # several values are no number, so they are refused
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            f"{name} {text:.99} is out of range", advice="pass a whole number of 1 or more"
        )
    return int(text)


def built_in_dataset(recipe: Path) -> str | None:
    """Return the data set that a recipe passes to `choose_source` as `built_in`, or None.

    A proof trains on it instead of on ``auto``, which may mean data of the Hub. The recipe is
    parsed, and not run.
    """
    with loading(recipe):
        module = ast.parse(recipe.read_text(encoding="utf-8"))
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "choose_source":
            for keyword in node.keywords:
                if keyword.arg == "built_in" and isinstance(keyword.value, ast.Constant):
                    return str(keyword.value.value)
    return None
