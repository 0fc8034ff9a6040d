"""Finds the causes of a difference between two observed runs, with advice for the recipe."""

from collections.abc import Mapping

from common.tools.prove.bench import Cause
from common.tools.prove.differences import Difference, Subject
from common.tools.prove.records.observed_run import ObservedLaunch, ObservedRun, differing_keys
from common.tools.prove.records.run_records import (
    OF_RECIPE,
    Description,
    EvaluationBatch,
    MicroBatch,
    ValueType,
)

MAX_CAUSES = 4  # the most causes that a check names
KEEP = "pass it to run.keep(..., {name}={path}), so that each checkpoint holds it"
COMPUTE = (
    "compute it from run.progress.global_step or run.epoch, or hold it in an object with "
    "state_dict and load_state_dict that is passed to run.keep"
)
# The advice for a value that checkpoints lack, by its type.
ADVICE_FOR_LOST: dict[ValueType, str] = {
    "generator": (
        "draw from the global generator of torch, numpy or random, whose states checkpoints hold, "
        "or pass run.keep an object whose state_dict and load_state_dict save and restore its state"
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
# Values of these types are the likeliest causes, the likeliest first.
LIKELIEST: tuple[ValueType, ...] = ("generator", "buffer", "network", "stateful", "file")
UNDESCRIBED = Description(type="other", text="value")
DEPEND_ON = "compute it from nothing but the weights, the batches and the number of the update"
LOOK_FOR = (
    "in the code that computes it, look for a clock, a random generator that the recipe made, a "
    "file, or a value that an earlier update left behind"
)
# The advice for a first difference, by the field that differs.
ADVICE_FOR_DIFFERENCE: dict[Subject, str] = {
    "samples": "let run.batches(loader) and run.loaders(data) choose the samples",
    "generators": (
        "do not seed a generator with a clock or a process id, and draw the same number of random "
        "numbers in each pass of the loop"
    ),
    "parts": "build and change it with nothing but config, the batches and the seeded generators",
    "batch": (
        "let the data set depend on the sample index alone, and draw random numbers in __getitem__ "
        "from torch, numpy or random, which are seeded for each sample"
    ),
    "loss": LOOK_FOR,
    "metrics": LOOK_FOR,
    "learning_rates": DEPEND_ON,
    "figures": DEPEND_ON,
}
SAME_BEFORE = (
    "although the weights, the batch and the states of all random generators were the same before"
)
# A clause about the values that are compared earlier and are equal, by the field that differs.
EQUAL_BEFORE: dict[Subject, str] = {
    "batch": "although its samples are the same",
    "loss": SAME_BEFORE,
    "metrics": SAME_BEFORE,
}


# Causes after a resume


def causes_after_resume(
    reference: ObservedRun, other: ObservedRun, difference: Difference | None
) -> list[Cause]:
    """Return the causes why a resumed run differs from the uninterrupted run.

    The causes are the values that checkpoints lack. If none is found, the first difference shows
    the cause. Without such values and without a first difference, the list is empty.

    Args:
        reference: the uninterrupted run.
        other: the resumed run.
        difference: the first difference; None if only the results differ.
    """
    lost = lost_values(reference, other)
    causes = [cause_of_lost(path, description) for path, description in lost.items()]
    if causes:
        return causes[:MAX_CAUSES]
    if difference is None:
        return []
    # The first micro-batch after a resume shows the state that the checkpoint restored. Launch 0 is
    # the first start, which resumed nothing.
    is_in_restored_state = difference.launch > 0 and is_in_first_micro_batch(other, difference)
    if is_in_restored_state and difference.subject == "parts":
        return [cause_of_part(name) for name in difference.names]
    if is_in_restored_state and difference.subject == "generators":
        return [cause_of_generator(name, difference.moment) for name in difference.names]
    return [cause_of_difference(difference)]


def is_in_first_micro_batch(run: ObservedRun, difference: Difference) -> bool:
    """Whether a difference is in the first micro-batch of its launch."""
    record = difference.record
    if not isinstance(record, MicroBatch):
        return False
    for launch in run.of_rank(difference.rank):
        if launch.launch == difference.launch:
            first = launch.of(MicroBatch)[0]
            return (record.step, record.micro_batch) == (first.step, first.micro_batch)
    return False


def lost_values(reference: ObservedRun, other: ObservedRun) -> dict[str, Description]:
    """Return the values that changed during training and were not restored by a resume, by path.

    `lost_at` says which values a resumed launch has lost when it begins. Some of them do no harm:
    the loop sets a variable such as the last loss in each update, so it is right again one update
    later. Such temporary values are returned only if no other value was lost. If a launch makes
    only one update, all the values that it lost count as lasting.
    """
    lasting: dict[str, Description] = {}
    temporary: dict[str, Description] = {}
    for launch in other.launches:
        uninterrupted = reference_of(reference, launch.rank)
        if launch.launch == 0 or uninterrupted is None or not launch.micro_batches:
            continue
        steps = [step for step, number in launch.micro_batches if number == 0]
        lost = lost_at(uninterrupted, launch, steps[0])
        differing_later = lost
        if len(steps) > 1:
            differing_later = lost_at(uninterrupted, launch, steps[1])
        for path in lost:
            group = lasting if path in differing_later else temporary
            group.setdefault(path, uninterrupted.described.get(path, UNDESCRIBED))
    return sorted_by_likelihood(without_nested(lasting or temporary))


def reference_of(reference: ObservedRun, rank: int) -> ObservedLaunch | None:
    """Return the reference run's launch on a rank; None if the reference run has fewer ranks."""
    launches = [launch for launch in reference.of_launch(0) if launch.rank == rank]
    return launches[0] if launches else None


def lost_at(uninterrupted: ObservedLaunch, launch: ObservedLaunch, step: int) -> list[str]:
    """Return the paths of the values that a resumed launch has lost by the end of update `step`.

    Such a value has appeared or changed in the uninterrupted run since the run's first micro-batch,
    and the launch has a different value after the same update. If the uninterrupted run has no
    record after this update, the list is empty.
    """
    expected = uninterrupted.micro_batches.get((step, 0))
    resumed = launch.micro_batches[step, 0]
    if expected is None:
        return []
    initial_state = uninterrupted.of(MicroBatch)[0].state
    paths = []
    for path, digest in expected.state.items():
        has_changed = initial_state.get(path) != digest
        if has_changed and path in resumed.state and resumed.state[path] != digest:
            paths.append(path)
    return paths


def without_nested(described: Mapping[str, Description]) -> dict[str, Description]:
    """Leave out values that belong to another value, such as `ema.decay` if `ema` is there."""
    prefixes = tuple(f"{path}{separator}" for path in described for separator in (".", "["))
    outer = {}
    for path, description in described.items():
        if not path.startswith(prefixes):
            outer[path] = description
    return outer


def sorted_by_likelihood(described: Mapping[str, Description]) -> dict[str, Description]:
    """Sort values by how likely they are the cause; see `LIKELIEST`."""

    def position(item: tuple[str, Description]) -> int:
        value_type = item[1].type
        return LIKELIEST.index(value_type) if value_type in LIKELIEST else len(LIKELIEST)

    return dict(sorted(described.items(), key=position))


def cause_of_lost(path: str, description: Description) -> Cause:
    """Return the cause that a value is missing in checkpoints."""
    name = path.rpartition(".")[2]
    if not name.isidentifier():  # as in `items[0]`, so the user has to choose a name
        name = "name"
    expression = path
    if description.text.endswith(OF_RECIPE):
        expression = path.partition(".")[2]  # the recipe writes its variable without its own name
    return Cause(
        f"{path} ({description.text}) changes during training and is in no checkpoint",
        ADVICE_FOR_LOST[description.type].format(name=name, path=expression),
    )


def cause_of_part(name: str) -> Cause:
    """Return the cause that a kept part has a different state right after a resume."""
    return Cause(
        f"the part {name} had a different state after it was restored than when it was saved",
        f"have the state_dict of {name} return all that changes in training, and its "
        "load_state_dict restore it",
    )


def cause_of_generator(name: str, moment: str) -> Cause:
    """Return the cause that a random generator has a different state right after a resume."""
    return Cause(
        f"after a resume, the random generator {name} had a different state {moment} than in the "
        "uninterrupted run",
        "between run.start(...) and the loop, draw no random numbers and seed no generator",
    )


# Causes without a resume


def causes_of_repeat(
    reference: ObservedRun, other: ObservedRun, difference: Difference | None
) -> list[Cause]:
    """Return the causes for a difference between two runs of the same command."""
    causes = []
    for path, description in early_differences(reference, other, difference).items():
        causes.append(
            Cause(
                f"{path} ({description.text}) differs between two runs of the same command",
                "let it depend on config.seed alone, and on no clock, process id, hash of a text "
                "or order of a set",
            )
        )
    causes = causes[: MAX_CAUSES - 1]
    if difference is not None:
        causes.append(cause_of_difference(difference))
    return causes


def early_differences(
    reference: ObservedRun, other: ObservedRun, difference: Difference | None
) -> dict[str, Description]:
    """Return the reachable values in which two runs differ before their training does.

    Texts are left out, because the runs have different directories.

    Args:
        difference: the first difference of the training. Only values up to its update count. None:
            the training does not differ, so the values of all updates count.
    """
    described: dict[str, Description] = {}
    for launch, twin in zip(reference.launches, other.launches, strict=False):
        for position, record in launch.micro_batches.items():
            is_later = difference is not None and record.step > difference.step
            if position[1] != 0 or position not in twin.micro_batches or is_later:
                continue
            twin_state = twin.micro_batches[position].state
            for path in differing_keys(record.state, twin_state):
                description = launch.described.get(path, UNDESCRIBED)
                if description.type != "text":
                    described.setdefault(path, description)
    return sorted_by_likelihood(without_nested(described))


def cause_of_difference(difference: Difference) -> Cause:
    """Return the cause that follows from the first difference alone."""
    rank = f" on rank {difference.rank}" if difference.rank else ""
    sentence = (
        f"the first difference is {difference_in_words(difference)} {difference.moment}{rank}"
    )
    if difference.subject in EQUAL_BEFORE:
        sentence += f", {EQUAL_BEFORE[difference.subject]}"
    return Cause(sentence, ADVICE_FOR_DIFFERENCE[difference.subject])


def difference_in_words(difference: Difference) -> str:
    """Return a phrase for the values that differ, such as "the metric accuracy"."""
    names = ", ".join(difference.names)
    purpose = "evaluation" if isinstance(difference.record, EvaluationBatch) else "training"
    phrases: dict[Subject, str] = {
        "samples": "which samples the batch has",
        "generators": f"the state of the random generator {names}",
        "parts": f"the state of {names}",
        "batch": f"the contents of a {purpose} batch",
        "loss": "the loss",
        "metrics": f"the metric {names}",
        "learning_rates": "the learning rate",
        "figures": f"the figure {names}",
    }
    return phrases[difference.subject]
