"""The flags with which a proof runs a recipe: those of the user, and its own short ones."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.config import TrainingConfig
from common.errors import UserError
from common.tools.recipe import loading

Flags = dict[str, list[str]]  # by name, such as "--batch-size", its values
EPOCHS = 4
BATCH_SIZE = 16
ACCUMULATION = 2
LOG_EVERY = 3  # updates; no divisor of an epoch, so that a row spans two epochs
CHECKPOINT_EVERY = 3
# The proof sets these flags itself, or they make no sense in it.
REFUSED = {
    "--output-dir": "a proof writes into a folder of its own (name it with --folder)",
    "--resume": "a proof starts its own runs",
    "--evaluate-only": "a proof trains",
    "--auto-batch-size": "its choice depends on the clock, so two runs may differ",
    "--early-stopping": "a proof needs the whole run",
    "--target": "a proof trains too little to reach it",
    "--config": "a proof needs each flag on its command line",
}


def flags_of(words: Sequence[str]) -> Flags:
    """Return the values of each flag on a command line; the last of equal flags counts.

    Raises:
        UserError: the first word is a value without a flag.
    """
    flags: Flags = {}
    name = ""
    for word in words:
        if not word.startswith("--"):
            if not name:
                raise UserError(
                    f"{word} is a value without a flag", advice="write the flag before it"
                )
            flags[name].append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        flags[name] = [value] if equals else []
    return flags


def words_of(flags: Flags) -> list[str]:
    """Return flags as the words of a command line."""
    words: list[str] = []
    for name, values in flags.items():
        words += [name, *values]
    return words


def merged(flags: Flags, others: Flags) -> Flags:
    """Return flags, with those of `others` in the place of flags of the same name.

    A switch replaces its opposite: `--no-compile` takes the place of `--compile`.
    """
    kept = {
        name: values
        for name, values in flags.items()
        if positive(name) not in map(positive, others)
    }
    return {**kept, **others}


def positive(name: str) -> str:
    """Return the name of a switch without its ``no-``."""
    return f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name


def refuse_unfit(flags: Flags) -> None:
    """Raise a `UserError` for a flag that can't be part of a proof."""
    for name in flags:
        reason = REFUSED.get(positive(name))
        if reason is not None:
            raise UserError(
                f"{name} can't be part of a proof, because {reason}", advice=f"leave {name} out"
            )


@dataclass(frozen=True)
class ProofFlags:
    """The flags of the reference run, and the sizes that follow from them."""

    flags: Flags
    batch_size: int
    accumulation: int
    training_samples: int  # of the training split, at most
    evaluation_samples: int  # of each other split, at most


def proof_flags(
    given: Flags, config_class: type[TrainingConfig], built_in: str | None, updates: int
) -> ProofFlags:
    """Return the flags for a short training, in which those of the user have precedence.

    Args:
        given: of the user.
        config_class: of the recipe.
        built_in: the recipe's built-in data set, which replaces ``auto``; None if it has none.
        updates: how many the training should have.

    Raises:
        UserError: a flag of the user can't be part of a proof, or is no whole number.
    """
    refuse_unfit(given)
    batch_size = number(given, "--batch-size", BATCH_SIZE)
    accumulation = number(given, "--gradient-accumulation-steps", ACCUMULATION)
    effective = number(given, "--effective-batch-size", batch_size * accumulation)
    accumulation = max(1, effective // batch_size)
    stated = {name: values for name, values in given.items() if name != "--effective-batch-size"}
    flags: Flags = {
        "--batch-size": [str(batch_size)],
        "--gradient-accumulation-steps": [str(accumulation)],
        "--log-every": [str(LOG_EVERY)],
        "--checkpoint-every": [str(CHECKPOINT_EVERY)],
        "--tracker": ["none"],
    }
    epochs = number(given, "--epochs", EPOCHS)
    steps = number(given, "--max-steps", updates)
    if "--max-steps" not in given:
        flags["--epochs"] = [str(epochs)]
    if built_in is not None and config_class.dataset == "auto":
        flags["--dataset"] = [built_in]
    updates_per_epoch = max(2, steps // epochs)
    # Half a batch more than the updates need, so that there is an incomplete one to drop. An odd
    # number of samples to evaluate, so that the last batch and the shares of ranks are incomplete.
    return ProofFlags(
        flags=merged(flags, stated),
        batch_size=batch_size,
        accumulation=accumulation,
        training_samples=updates_per_epoch * effective + max(1, effective // 2),
        evaluation_samples=4 * batch_size + max(1, batch_size // 2) + 1,
    )


def number(flags: Flags, name: str, default: int) -> int:
    """Return the value of a flag of whole numbers; raise a `UserError` for another value."""
    if name not in flags:
        return default
    text = " ".join(flags[name])
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            f"{name} {text:.99} is out of range", advice="pass a whole number of 1 or more"
        )
    return int(text)


def built_in_dataset(recipe: Path) -> str | None:
    """Return the data set that a recipe names as `built_in` to `choose_source`; None without it."""
    with loading(recipe):
        module = ast.parse(recipe.read_text(encoding="utf-8"))
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "choose_source":
            for keyword in node.keywords:
                if keyword.arg == "built_in" and isinstance(keyword.value, ast.Constant):
                    return str(keyword.value.value)
    return None
