"""Names the cause of a difference between two observed runs, and what to change in the recipe."""

from collections.abc import Mapping

from common.tools.prove.bench import Cause
from common.tools.prove.differences import Difference, Subject
from common.tools.prove.observation import (
    Description,
    EvaluationBatch,
    MicroBatch,
    ObservedLaunch,
    ObservedRun,
    ValueType,
    differing,
)

MOST_CAUSES = 4  # that a report names
KEEP = "pass it to run.keep(..., {name}={path}), so that each checkpoint holds it"
COMPUTE = (
    "compute it from run.progress.global_step or run.epoch, or hold it in an object with "
    "state_dict and load_state_dict that is passed to run.keep"
)
# The advice for a value that no checkpoint has.
ADVICE_FOR_LOST: dict[ValueType, str] = {
    "generator": (
        "draw from the global generator of torch, numpy or random, whose states checkpoints hold, "
        "or give an object with state_dict that holds it to run.keep"
    ),
    "buffer": "register it without persistent=False",
    "network": KEEP,
    "stateful": KEEP,
    "file": (
        "read by sample index in the data set's __getitem__, so that no position has to be restored"
    ),
    "text": COMPUTE,
    "other": COMPUTE,
}
# The types of values that are likelier causes than all others, the likeliest first.
LIKELIEST: tuple[ValueType, ...] = ("generator", "buffer", "network", "stateful", "file")
UNKNOWN = Description(type="other", text="value")
# The advice for a first difference, by what differs.
DEPEND_ON = "let it depend on the weights, the batches and the update alone"
LOOK_FOR = (
    "look there for a clock, a random generator of the recipe's own, a file, or a value that an "
    "earlier update left behind"
)
ADVICE_FOR_DIFFERENCE: dict[Subject, str] = {
    "samples": "let run.batches(loader) and run.loaders(data) choose the samples",
    "generators": (
        "seed no generator by a clock or a process id, and draw equally many numbers in each pass "
        "of the loop"
    ),
    "parts": "build and change it by nothing but config, the batches and the seeded generators",
    "batch": (
        "let the data set depend on the sample index alone, and draw random numbers in __getitem__ "
        "from torch, numpy or random, which are seeded for each sample"
    ),
    "loss": LOOK_FOR,
    "metrics": LOOK_FOR,
    "learning_rates": DEPEND_ON,
    "figures": DEPEND_ON,
}
# What was compared before, and is equal.
SAME_BEFORE = "although weights, batch and the states of all random generators were the same before"
EQUAL_BEFORE: dict[Subject, str] = {
    "batch": "although its samples are the same",
    "loss": SAME_BEFORE,
    "metrics": SAME_BEFORE,
}


# Causes after a resume


def causes_of_resume(
    reference: ObservedRun, other: ObservedRun, difference: Difference | None
) -> list[Cause]:
    """Return why a run that was interrupted and resumed differs from one that was not.

    Args:
        difference: the first one; None if only the results differ.
    """
    lost = lost_values(reference, other)
    causes = [cause_of_lost(path, description) for path, description in lost.items()]
    if causes:
        return causes[:MOST_CAUSES]
    if difference is None:
        return []
    record = difference.record
    is_restored = isinstance(record, MicroBatch) and is_first(other, difference)
    if is_restored and difference.launch > 0 and difference.subject == "parts":
        return [cause_of_part(name) for name in difference.names]
    if is_restored and difference.launch > 0 and difference.subject == "generators":
        return [cause_of_generator(name, difference.place) for name in difference.names]
    return [cause_of_difference(difference)]


def is_first(run: ObservedRun, difference: Difference) -> bool:
    """Whether a difference is in the first micro-batch of its launch."""
    record = difference.record
    place = (record.step, getattr(record, "micro_batch", None))
    for launch in run.of_rank(difference.rank):
        if launch.launch == difference.launch:
            first = launch.of(MicroBatch)[0]
            return place == (first.step, first.micro_batch)
    return False


def lost_values(reference: ObservedRun, other: ObservedRun) -> dict[str, Description]:
    """Return what changed during training and was not restored, by path, with descriptions.

    A value was lost if it had changed in the reference run by the update at which a launch began,
    and had another value there in this launch. Variables that the loop sets anew in each pass are
    equal again after the first update of the launch, so those that stay different come first.
    """
    lasting: dict[str, Description] = {}
    passing: dict[str, Description] = {}
    for launch in other.launches:
        whole = reference_of(reference, launch.rank)
        if launch.launch == 0 or whole is None or not launch.micro_batches:
            continue
        steps = [step for step, number in launch.micro_batches if number == 0]
        lost = lost_at(whole, launch, steps[0])
        differing_later = lost_at(whole, launch, steps[1]) if len(steps) > 1 else lost
        for path in lost:
            group = lasting if path in differing_later else passing
            group.setdefault(path, whole.described.get(path, UNKNOWN))
    return sorted_by_likelihood(without_inner(lasting or passing))


def reference_of(reference: ObservedRun, rank: int) -> ObservedLaunch | None:
    """Return the launch of the reference run on a rank; None if it had fewer ranks."""
    launches = [launch for launch in reference.of_launch(0) if launch.rank == rank]
    return launches[0] if launches else None


def lost_at(whole: ObservedLaunch, launch: ObservedLaunch, step: int) -> list[str]:
    """Return the paths that had changed in the whole run by an update, and differ there."""
    expected = whole.micro_batches.get((step, 0))
    present = launch.micro_batches[step, 0]
    if expected is None:
        return []
    at_first = whole.of(MicroBatch)[0].state
    paths = []
    for path, digest in expected.state.items():
        has_changed = at_first.get(path) != digest
        if has_changed and path in present.state and present.state[path] != digest:
            paths.append(path)
    return paths


def without_inner(described: Mapping[str, Description]) -> dict[str, Description]:
    """Leave out the values inside of another one, such as `ema.decay` beside `ema`."""
    outer = {}
    for path, description in described.items():
        containers = (f"{other}{sign}" for other in described for sign in ".[")
        if not path.startswith(tuple(containers)):
            outer[path] = description
    return outer


def sorted_by_likelihood(described: Mapping[str, Description]) -> dict[str, Description]:
    """Sort values by how likely they are the cause: see `LIKELIEST`."""

    def place(item: tuple[str, Description]) -> int:
        value_type = item[1].type
        return LIKELIEST.index(value_type) if value_type in LIKELIEST else len(LIKELIEST)

    return dict(sorted(described.items(), key=place))


def cause_of_lost(path: str, description: Description) -> Cause:
    """Return the cause for a value that no checkpoint has."""
    name = path.rpartition(".")[2]
    if not name.isidentifier():
        name = "name"
    return Cause(
        f"{path} ({description.text}) changes during training and is in no checkpoint",
        ADVICE_FOR_LOST[description.type].format(name=name, path=path),
    )


def cause_of_part(name: str) -> Cause:
    """Return the cause for a kept part whose state differs right after a resume."""
    return Cause(
        f"the part {name} was restored with another state than it was saved with",
        f"have the state_dict of {name} return all that changes in training, and its "
        "load_state_dict restore it",
    )


def cause_of_generator(name: str, place: str) -> Cause:
    """Return the cause for a random generator whose state differs right after a resume."""
    return Cause(
        f"the random generator {name} had another state {place} after a resume than in the run "
        "that was not interrupted",
        "between run.start(...) and the loop, draw no random numbers and seed no generator",
    )


# Causes of any difference


def causes_of_repeat(
    reference: ObservedRun, other: ObservedRun, difference: Difference | None
) -> list[Cause]:
    """Return why two runs of the same command differ."""
    causes = []
    for path, description in early_differences(reference, other, difference).items():
        causes.append(
            Cause(
                f"{path} ({description.text}) differs between two runs of the same command",
                "let it depend on config.seed alone, and on no clock, process id, hash of a text "
                "or order of a set",
            )
        )
    causes = causes[: MOST_CAUSES - 1]
    if difference is not None:
        causes.append(cause_of_difference(difference))
    return causes


def early_differences(
    reference: ObservedRun, other: ObservedRun, difference: Difference | None
) -> dict[str, Description]:
    """Return what differed within reach of the loop before the first difference of the training.

    Texts are left out, because the runs have different directories.
    """
    described: dict[str, Description] = {}
    for launch, twin in zip(reference.launches, other.launches, strict=False):
        for place, record in launch.micro_batches.items():
            is_later = difference is not None and record.step > difference.step
            if place[1] != 0 or place not in twin.micro_batches or is_later:
                continue
            twin_state = twin.micro_batches[place].state
            for path in differing(record.state, twin_state):
                description = launch.described.get(path, UNKNOWN)
                if description.type != "text":
                    described.setdefault(path, description)
    return sorted_by_likelihood(without_inner(described))


def cause_of_difference(difference: Difference) -> Cause:
    """Return the cause that a first difference itself shows."""
    rank = f" on rank {difference.rank}" if difference.rank else ""
    sentence = f"the first difference is {in_words(difference)} {difference.place}{rank}"
    if difference.subject in EQUAL_BEFORE:
        sentence += f", {EQUAL_BEFORE[difference.subject]}"
    return Cause(sentence, ADVICE_FOR_DIFFERENCE[difference.subject])


def in_words(difference: Difference) -> str:
    """Return what differs, such as "the metric accuracy"."""
    names = ", ".join(difference.names)
    purpose = "evaluation" if isinstance(difference.record, EvaluationBatch) else "training"
    words: dict[Subject, str] = {
        "samples": "which samples the batch has",
        "generators": f"the state of the random generator {names}",
        "parts": f"the state of {names}",
        "batch": f"the contents of a {purpose} batch",
        "loss": "the loss",
        "metrics": f"the metric {names}",
        "learning_rates": "the learning rate",
        "figures": f"the figure {names}",
    }
    return words[difference.subject]
