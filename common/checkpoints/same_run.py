"""Compares a run with its checkpoint: the facts and flags that a resume must not change."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from common.checkpoints.description import require_same_parts
from common.errors import UserError
from common.run_directory.records import RunIdentity
from common.run_directory.saved_flags import differing_flags, flags_in_words
from common.system.wording import shortened

MAX_SHOWN = 200  # characters of a value in a message
SAME_DATA = (
    "change the data back, or start a new run, which may begin from the weights of a finished one "
    "with --init-from runs/NAME"
)
# A resume takes these facts from `config.json`, so they change only if that file does.
SAME_CONFIG = "restore the run's config.json from a backup"


class FixedFact(NamedTuple):
    """A fact of a run that a resume must not change."""

    subject: str  # the fact in words, for a message
    value_of: Callable[[RunIdentity], object]  # returns the value of the fact
    advice: str  # for a resume that changes it
    may_be_added: bool = False  # whether a resume may state the fact if it was None before


MUST_MATCH_ON_RESUME = (
    FixedFact(
        "the recipe",
        lambda run: run.recipe,
        "resume it with its own recipe, or start another run",
    ),
    # The best value so far is meaningless under another objective.
    FixedFact(
        "the objective",
        lambda run: run.objective,
        "change OBJECTIVE back in the recipe, or start another run",
    ),
    FixedFact("the mixed precision", lambda run: run.mixed_precision, SAME_CONFIG),
    FixedFact("the effective batch size", lambda run: run.effective_batch_size, SAME_CONFIG),
    FixedFact("the number of samples in the splits", lambda run: run.data.sizes, SAME_DATA),
    FixedFact("the list of class names", lambda run: run.data.class_names, SAME_DATA),
    # A user may provide the fingerprint of data whose contents were unknown before.
    FixedFact(
        "the fingerprint of the data",
        lambda run: run.data.fingerprint,
        SAME_DATA,
        may_be_added=True,
    ),
)


def require_same_run(path: Path, manifest: RunIdentity, identity: RunIdentity) -> None:
    """Raise a `UserError` if a resume would change a fact, a flag or a part of the run.

    Args:
        path: the checkpoint, for a message.
        manifest: the checkpoint's `Manifest`, which is a `RunIdentity`, too.
        identity: the identity of the run as it would go on.
    """
    require_same_facts(path, manifest, identity)
    require_same_flags(path, manifest.flags, identity.flags)
    require_same_parts(path, manifest.parts_described, identity.parts_described)


def require_same_facts(path: Path, manifest: RunIdentity, identity: RunIdentity) -> None:
    """Raise a `UserError` for the first fact in `MUST_MATCH_ON_RESUME` that has changed."""
    for fact in MUST_MATCH_ON_RESUME:
        saved_value = fact.value_of(manifest)
        current_value = fact.value_of(identity)
        is_added = fact.may_be_added and saved_value is None
        if saved_value != current_value and not is_added:
            before, now = excerpts(saved_value, current_value)
            raise UserError(
                f"{path} can't be resumed, because {fact.subject} changed from {before} to {now}",
                advice=fact.advice,
            )


def excerpts(before: object, now: object) -> tuple[str, str]:
    """Return two differing values as texts, cut so that their first difference can be seen."""
    texts = (str(before), str(now))
    if max(map(len, texts)) <= MAX_SHOWN:
        return texts
    first_difference = min(map(len, texts))  # this holds if one text begins with the other
    for position, (character_before, character_now) in enumerate(zip(*texts, strict=False)):
        if character_before != character_now:
            first_difference = position
            break
    start = max(0, first_difference - MAX_SHOWN // 2)
    ellipsis = "…" if start else ""
    text_before, text_now = texts
    shown_before = ellipsis + shortened(text_before[start:], MAX_SHOWN)
    shown_now = ellipsis + shortened(text_now[start:], MAX_SHOWN)
    return shown_before, shown_now


def require_same_flags(
    path: Path, saved_flags: Mapping[str, object], current_flags: Mapping[str, object]
) -> None:
    """Raise a `UserError` if flags that a resume can't change differ from the saved ones.

    This happens if the recipe has new code that sets a flag to another value, for example. The path
    of a local data set may differ, because its fingerprint identifies it.
    """
    changes = differing_flags(saved_flags, current_flags, is_moved_data_fine=True)
    if changes:
        phrases = flags_in_words(changes, "{flag} was {saved} and is {current} now")
        raise UserError(
            f"{path} was trained with other flags than this run has now ({', '.join(phrases)})",
            advice="restore the config.json and the recipe of that time, or start another run",
        )
