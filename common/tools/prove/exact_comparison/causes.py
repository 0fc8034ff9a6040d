"""Finds the causes of a difference between two observed runs, with advice for the recipe."""

from collections.abc import Mapping

from common.tools.prove.exact_comparison.lost_values import (
    UNDESCRIBED,
    lost_values,
    recovered_values,
    targets_begun_anew,
)
from common.tools.prove.exact_comparison.merged_values import (
    merged_values,
    sorted_by_likelihood,
    without_nested,
)
from common.tools.prove.exact_comparison.record_differences import ComparedField, Difference
from common.tools.prove.records.observed_run import ObservedRun, differing_common_keys
from common.tools.prove.records.run_records import (
    OF_RECIPE,
    EvaluationBatch,
    MicroBatch,
    SavedState,
    ValueDescription,
    ValueType,
)
from common.tools.prove.verdicts import Cause

MAX_CAUSES = 4  # the most causes that a check names
# Advice for values that checkpoints lack. `name` and `path` are filled in.
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
    "iterator": (
        "no checkpoint can hold an iterator, so choose the samples from run.progress.global_step "
        "instead, such as samples[run.progress.global_step % len(samples)]"
    ),
    "buffer": "register it without persistent=False",
    "setting": (
        "set it in each pass of the loop from run.progress.global_step or run.epoch with >=, such "
        "as layer.requires_grad_(run.epoch >= 2), and not once, because a resumed run does not "
        "repeat that update"
    ),
    "network": KEEP,
    "stateful": KEEP,
    "file": (
        "read by sample index in the data set's __getitem__, so that no position has to be restored"
    ),
    "attribute": (
        "let the state_dict of its class return it and load_state_dict restore it (an optimizer "
        "can hold it in self.state[parameter] instead), or compute it from run.progress.global_step"
    ),
    "target": (
        "compute it, or choose the sample, from run.progress.global_step, because the iterators of "
        "a for statement begin anew in a resumed run"
    ),
    "text": COMPUTE,
    "other": COMPUTE,
}
WITH_STATE_DICT: tuple[ValueType, ...] = ("network", "stateful")
DEPEND_ON = "compute it from nothing but the weights, the batches and the number of the update"
LOOK_FOR = (
    "in the code that computes it, look for a clock, a random generator that the recipe made, a "
    "file, or a value that an earlier update left behind"
)
# The advice for a first difference, by the field that differs.
ADVICE_FOR_DIFFERENCE: dict[ComparedField, str] = {
    "sample_indices": "let run.batches(loader) and run.loaders(data) choose the samples",
    "generator_digests": (
        "do not seed a generator with a clock or a process id, and draw the same number of random "
        "numbers in each pass of the loop"
    ),
    "part_digests": (
        "build and change it with nothing but config, the batches and the seeded generators"
    ),
    "batch_digest": (
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
EQUAL_BEFORE: dict[ComparedField, str] = {
    "batch_digest": "although its samples are the same",
    "loss": SAME_BEFORE,
    "metrics": SAME_BEFORE,
}


# Causes after a resume


def causes_after_resume(
    reference: ObservedRun, other: ObservedRun, difference: Difference | None
) -> list[Cause]:
    """Return the causes why a resumed run differs from the uninterrupted run.

    The causes are the values that checkpoints lack. If none is found, or only variables of the
    loop's `for` statement, the first difference shows the cause. Without such values and without a
    first difference, the list is empty.

    Args:
        reference: the uninterrupted run.
        other: the resumed run.
        difference: the first difference; None if only the results differ.
    """
    lost = lost_values(reference, other)
    targets = targets_begun_anew(reference, other, difference)
    lasting = lost.lasting | targets
    causes = causes_of_lost_values(lasting or lost.temporary)
    has_only_targets = bool(targets) and not lost.lasting
    if has_only_targets and difference is not None:
        # A variable of the `for` statement does no harm if the loop only prints it.
        return [*causes[: MAX_CAUSES - 1], cause_of_difference(difference)]
    if causes:
        return causes
    if difference is None:
        return []
    # The first micro-batch after a resume shows the state that the checkpoint restored. Launch 0 is
    # the first start, which resumed nothing.
    is_resumed = difference.launch > 0
    is_in_restored_state = is_resumed and is_in_first_micro_batch(other, difference)
    if is_in_restored_state and difference.field == "part_digests":
        return [cause_of_part(name) for name in difference.names]
    if is_in_restored_state and difference.field == "generator_digests":
        return [cause_of_generator(name, difference.moment) for name in difference.names]
    return [cause_of_difference(difference)]


def causes_in_workers(reference: ObservedRun, other: ObservedRun) -> list[Cause]:
    """Return the values of a data set that change while samples are read, at most `MAX_CAUSES`.

    They explain a batch that differs after a resume although its samples are the same. The proof
    can't look into worker processes, which hold copies of the data set. So both runs here repeat
    those of the check without workers, where the observed process reads the samples itself.

    Args:
        reference: the uninterrupted run.
        other: the resumed run.
    """
    lost = lost_values(reference, other)
    return [
        Cause(
            f"{cause.sentence}, and each worker has its own copy",
            ADVICE_FOR_DIFFERENCE["batch_digest"],
        )
        for cause in causes_of_lost_values(lost.lasting or lost.temporary)
    ]


def is_in_first_micro_batch(run: ObservedRun, difference: Difference) -> bool:
    """Whether a difference is in the first micro-batch of its launch."""
    record = difference.record
    if not isinstance(record, MicroBatch):
        return False
    for process in run.processes_of_rank(difference.rank):
        if process.launch == difference.launch:
            first = process.of(MicroBatch)[0]
            return (record.step, record.micro_batch) == (first.step, first.micro_batch)
    return False


def unrestored_in_words(reference: ObservedRun, other: ObservedRun) -> str:
    """Return a phrase about plain values that a resume did not restore; empty if there are none.

    No compared result depends on them in this proof. One may in another run: for example, the best
    weights that a recipe keeps by hand matter only if the best evaluation came before the kill.
    """
    descriptions = merged_values(lost_values(reference, other).lasting)
    if not descriptions:
        return ""
    names = [f"{path} ({description.text})" for path, description in descriptions.items()]
    return f"a resume does not restore {', '.join(names[:MAX_CAUSES])}, which changed no result"


def causes_of_lost_state(reference: ObservedRun, other: ObservedRun) -> list[Cause]:
    """Return the objects with state that a resume lost, also if no result depends on them.

    An average of the weights that is only saved after training is an example. Plain values are left
    out: a clock or a counter may well begin anew. Objects that the recipe makes again, such as a
    copy of the model for each evaluation, are left out too.
    """
    lasting = lost_values(reference, other).lasting
    recovered = recovered_values(reference, other)
    lost = {}
    for path, description in lasting.items():
        if description.type in WITH_STATE_DICT and path not in recovered:
            lost[path] = description
    return causes_of_lost_values(lost)


def causes_of_lost_values(lost: Mapping[str, ValueDescription]) -> list[Cause]:
    """Return a cause for each lost value, the likeliest first, at most `MAX_CAUSES`."""
    descriptions = merged_values(lost)
    causes = [cause_of_lost_value(path, description) for path, description in descriptions.items()]
    return causes[:MAX_CAUSES]


def cause_of_lost_value(path: str, description: ValueDescription) -> Cause:
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


def causes_of_restored_parts(run: ObservedRun) -> list[Cause]:
    """Return a cause for each kept part that a resume has restored to another state than was saved.

    The number of processes may have changed between the save and the resume.
    """
    saved_parts: dict[int, Mapping[str, str]] = {}  # by the number of updates before the save
    names: list[str] = []
    for process in run.processes_of_rank(0):
        micro_batches = process.of(MicroBatch)
        if process.launch > 0 and micro_batches:
            restored = micro_batches[0]
            names += differing_common_keys(
                saved_parts.get(restored.step, {}), restored.part_digests
            )
        saved_parts |= {record.step: record.part_digests for record in process.of(SavedState)}
    kept_names = [name for name in dict.fromkeys(names) if name in run.start_record.kept_part_names]
    return [cause_of_part(name) for name in kept_names]


def cause_of_part(name: str) -> Cause:
    """Return the cause that a kept part has a different state right after a resume."""
    return Cause(
        f"the part {name} had a different state after it was restored than when it was saved",
        f"have the state_dict of {name} return all that changes in training, and its "
        "load_state_dict restore it; do not change it between run.start(...) and the loop",
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
    causes = causes[: MAX_CAUSES - 1]  # the first difference gets the last place
    if difference is not None:
        causes.append(cause_of_difference(difference))
    return causes


def early_differences(
    reference: ObservedRun, other: ObservedRun, difference: Difference | None
) -> dict[str, ValueDescription]:
    """Return the reachable values in which two runs differ no later than their training does.

    Texts are left out, because many contain the path of the run's directory.

    Args:
        difference: the first difference of the training. Values after its update are ignored. None:
            the training does not differ, so no value is ignored.
    """
    descriptions: dict[str, ValueDescription] = {}
    for process, twin in zip(reference.processes, other.processes, strict=False):
        for position, record in process.micro_batches.items():
            # The values are read only at the first micro-batch of an update.
            if record.micro_batch != 0:
                continue
            is_after_difference = difference is not None and record.step > difference.step
            twin_record = twin.micro_batches.get(position)
            if is_after_difference or twin_record is None:
                continue
            for path in differing_common_keys(record.value_digests, twin_record.value_digests):
                description = process.descriptions.get(path, UNDESCRIBED)
                if description.type != "text":
                    descriptions.setdefault(path, description)
    return sorted_by_likelihood(without_nested(descriptions))


def cause_of_difference(difference: Difference) -> Cause:
    """Return the first difference as a cause, for want of a better one, and where to look."""
    rank = f" on rank {difference.rank}" if difference.rank else ""
    sentence = (
        f"the first difference is {difference_in_words(difference)} {difference.moment}{rank}"
    )
    if difference.field in EQUAL_BEFORE:
        sentence += f", {EQUAL_BEFORE[difference.field]}"
    return Cause(sentence, ADVICE_FOR_DIFFERENCE[difference.field])


def difference_in_words(difference: Difference) -> str:
    """Return a phrase for the values that differ, such as "the metric accuracy"."""
    names = ", ".join(difference.names)
    purpose = "evaluation" if isinstance(difference.record, EvaluationBatch) else "training"
    phrases: dict[ComparedField, str] = {
        "sample_indices": "which samples the batch has",
        "generator_digests": f"the state of the random generator {names}",
        "part_digests": f"the state of {names}",
        "batch_digest": f"the contents of a {purpose} batch",
        "loss": "the loss",
        "metrics": f"the metric {names}",
        "learning_rates": "the learning rate",
        "figures": f"the figure {names}",
    }
    return phrases[difference.field]
