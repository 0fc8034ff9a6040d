"""The causes that a proof names, for values that a resume loses and for other differences."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tools.prove.exact_comparison.causes import (
    cause_of_lost_value,
    causes_after_resume,
    causes_of_lost_state,
    causes_of_lost_values,
    causes_of_repeat,
    causes_of_restored_parts,
    unrestored_in_words,
)
from common.tools.prove.exact_comparison.record_differences import first_difference
from common.tools.prove.records.observed_run import AnyObservedRecord, ObservedProcess
from common.tools.prove.records.run_records import (
    OF_RECIPE,
    LoopPass,
    MicroBatch,
    ValueDescription,
    ValueType,
)
from tests.launch import REPOSITORY
from tests.unit.tools.prove.made_up_training import UPDATES, changed, launch, parts_at, run

DESCRIPTIONS = {
    "ema": ValueDescription(
        type="stateful", text="Average with state_dict, local variable of main()"
    ),
    "ema.decay": ValueDescription(type="other", text="float, local variable of main()"),
    "noise": ValueDescription(
        type="generator", text="random generator torch.Generator, local variable of main()"
    ),
    "train.COUNT": ValueDescription(type="other", text="int, global variable of train.py"),
    "began": ValueDescription(type="other", text="float, local variable of main()"),
    "loss": ValueDescription(type="other", text="torch.Tensor, local variable of main()"),
}


def with_state(source: ObservedProcess, states: dict[int, dict[str, str]]) -> ObservedProcess:
    """Return a launch whose micro-batches have the state of their update."""
    records = []
    for record in source.records:
        if isinstance(record, MicroBatch):
            state = states[record.step]
            descriptions = {path: DESCRIPTIONS[path] for path in state}
            record = record.model_copy(
                update={"value_digests": state, "descriptions": descriptions}
            )
        records.append(record)
    return replace(source, records=tuple(records))


def states(lost: set[str], first: int, is_resumed: bool) -> dict[int, dict[str, str]]:
    """Return the states of a launch that begins at an update. Lost values are reset there.

    Two values are never a cause: a time that does not change in training, and the loss, which the
    loop computes again in each pass.
    """
    by_step = {}
    for step in range(first, UPDATES):
        state = {"began": "second start" if is_resumed else "first start"}
        for path in ("ema", "ema.decay", "noise", "train.COUNT"):
            count = step - first if path in lost and is_resumed else step
            state[path] = f"{path} after {count}"
        if step > first:
            state["loss"] = f"loss of {step - 1}"
        by_step[step] = state
    return by_step


@given(
    lost=st.sets(st.sampled_from(["ema", "noise", "train.COUNT"]), min_size=1),
    first=st.integers(1, UPDATES - 2),
)
def test_each_value_that_no_checkpoint_has_is_named(lost: set[str], first: int) -> None:
    """Nothing else is named, not even a value that belongs to a lost value."""
    lost_paths = lost | ({"ema.decay"} if "ema" in lost else set())
    reference = run(with_state(launch(0), states(lost_paths, 0, is_resumed=False)))
    interrupted = with_state(launch(0, 0, first), states(lost_paths, 0, is_resumed=False))
    resumed = with_state(launch(1, first), states(lost_paths, first, is_resumed=True))
    causes = causes_after_resume(reference, run(interrupted, resumed), None)
    assert {cause.sentence.partition(" ")[0] for cause in causes} == lost
    for cause in causes:
        assert "is in no checkpoint" in cause.sentence
    advice = {cause.sentence.partition(" ")[0]: cause.advice for cause in causes}
    if "ema" in lost:
        assert "run.keep(..., ema=ema)" in advice["ema"]
    if "noise" in lost:
        assert causes[0].sentence.startswith("noise")  # the likeliest cause
        assert "global generator" in advice["noise"]
    if "train.COUNT" in lost:
        assert "run.progress.global_step" in advice["train.COUNT"]


def test_page_shows_a_cause_as_it_is_printed() -> None:
    text = "network torch.AveragedModel, local variable of main()"
    cause = cause_of_lost_value("average", ValueDescription(type="network", text=text))
    page = (REPOSITORY / "docs" / "prove.md").read_text()
    assert f"    {cause.sentence}\n    to change: {cause.advice}\n" in page


@given(
    lost=st.sets(st.sampled_from(["ema", "noise", "train.COUNT"])),
    first=st.integers(1, UPDATES - 2),
)
def test_lost_objects_with_state_are_named_even_without_a_difference(
    lost: set[str], first: int
) -> None:
    """Plain values and generators may begin anew, if no result depends on them; all are told."""
    reference = run(with_state(launch(0), states(lost, 0, is_resumed=False)))
    interrupted = with_state(launch(0, 0, first), states(lost, 0, is_resumed=False))
    resumed = with_state(launch(1, first), states(lost, first, is_resumed=True))
    causes = causes_of_lost_state(reference, run(interrupted, resumed))
    assert [cause.sentence.partition(" ")[0] for cause in causes] == sorted(lost & {"ema"})
    phrase = unrestored_in_words(reference, run(interrupted, resumed))
    assert {name for name in ("ema", "noise", "train.COUNT") if f"{name} (" in phrase} == lost
    assert bool(phrase) == bool(lost)


@pytest.mark.parametrize("wrong_steps", [(3,), (3, 4)])
def test_a_lost_object_that_the_recipe_makes_again_is_no_loss(wrong_steps: tuple[int, ...]) -> None:
    """An object with state that is right again later does no harm."""
    reference = run(with_state(launch(0), states(set(), 0, is_resumed=False)))
    resumed_states = states(set(), 3, is_resumed=True)
    for step in wrong_steps:
        resumed_states[step]["ema"] = "something else"
    resumed = with_state(launch(1, 3), resumed_states)
    assert causes_of_lost_state(reference, run(launch(0, 0, 3), resumed)) == []


def test_a_value_that_the_loop_sets_again_is_not_a_cause() -> None:
    """Such a value differs only at the first batch after a resume."""
    reference = run(with_state(launch(0), states(set(), 0, is_resumed=False)))
    resumed_states = states(set(), 3, is_resumed=True)
    resumed_states[3]["train.COUNT"] = "something else"
    for step in (3, 4, 5):
        resumed_states[step]["noise"] = "lost"
    resumed = with_state(launch(1, 3), resumed_states)
    causes = causes_after_resume(reference, run(launch(0, 0, 3), resumed), None)
    assert [cause.sentence.partition(" ")[0] for cause in causes] == ["noise"]


def with_passes(source: ObservedProcess, carried: list[str], begins_anew: bool) -> ObservedProcess:
    """Return a launch with a record of each pass of its loop, which has the target `step`.

    Args:
        begins_anew: whether the target counts from the start of the launch.
    """
    records: list[AnyObservedRecord] = []
    first: int | None = None
    for record in source.records:
        records.append(record)
        if isinstance(record, MicroBatch):
            first = record.step if first is None else first
            count = record.step - first if begins_anew else record.step
            description = ValueDescription(type="target", text="int, loop variable of main()")
            ended_pass = LoopPass(
                step=record.step,
                micro_batch=0,
                target_digests={"step": f"{count}"},
                descriptions={"step": description},
                carried_variables=carried,
            )
            records.append(ended_pass)
    return replace(source, records=tuple(records))


def test_a_variable_that_the_loop_carries_is_named() -> None:
    """It does not exist right after a resume, as `loss` does not, and has a wrong value later."""
    reference_states = states(set(), 0, is_resumed=False)
    resumed_states = states(set(), 3, is_resumed=True)
    for step in range(1, UPDATES):
        reference_states[step]["ema"] = f"mean of {step}"
    for step in range(4, UPDATES):
        resumed_states[step] |= {"loss": f"wrong {step}", "ema": f"wrong {step}"}
    del resumed_states[3]["ema"], reference_states[0]["ema"]
    for carried, names in ((["ema"], ["ema"]), ([], [])):
        reference = run(with_passes(with_state(launch(0), reference_states), carried, False))
        resumed = with_passes(with_state(launch(1, 3), resumed_states), carried, False)
        causes = causes_after_resume(reference, run(launch(0, 0, 3), resumed), None)
        assert [cause.sentence.partition(" ")[0] for cause in causes] == names


@pytest.mark.parametrize(
    ("position", "changes", "name"),
    [
        (1, {}, "step"),  # no record differs, but the results do
        (2, {"loss": 9.0}, "step"),
        (1, {"generator_digests": {"torch": "other", "numpy": "numpy"}}, "after"),
        (1, {"part_digests": {"model": "other", "optimizer": "optimizer-3"}}, "the"),
    ],
)
def test_a_variable_of_the_for_statement_is_named_if_it_differs_first(
    position: int, changes: dict[str, object], name: str
) -> None:
    """An iterator may draw random numbers or use the weights, so it may differ as they do."""
    reference = run(with_passes(launch(0), [], begins_anew=True))
    other, _ = changed(launch(1, 3), position, **changes)
    resumed = run(launch(0, 0, 3), with_passes(other, [], begins_anew=True))
    difference = first_difference(reference, resumed)
    first, *others = causes_after_resume(reference, resumed, difference)
    assert first.sentence.partition(" ")[0] == name
    is_target_of_difference = name == "step" and difference is not None
    expected = ["the first difference is the loss in update 4"] if is_target_of_difference else []
    assert [cause.sentence.partition(",")[0] for cause in others] == expected


def test_a_variable_of_the_for_statement_that_a_resume_restores_is_not_named() -> None:
    reference = run(with_passes(launch(0), [], begins_anew=False))
    other, _ = changed(launch(1, 3), 2, loss=9.0)
    resumed = run(launch(0, 0, 3), with_passes(other, [], begins_anew=False))
    (cause,) = causes_after_resume(reference, resumed, first_difference(reference, resumed))
    assert "the loss in update 4" in cause.sentence


def test_several_items_of_a_container_are_one_cause() -> None:
    description = ValueDescription(type="attribute", text="torch.Tensor, local variable of main()")
    paths = ["optimizer.slow[Parameter 0]", "optimizer.slow[Parameter 1]", "means[0]", "count"]
    causes = causes_of_lost_values(dict.fromkeys(paths, description))
    beginnings = [cause.sentence.partition(" changes")[0] for cause in causes]
    assert beginnings == [
        "optimizer.slow (2 items, each a torch.Tensor, local variable of main())",
        "means[0] (torch.Tensor, local variable of main())",
        "count (torch.Tensor, local variable of main())",
    ]
    assert "let the state_dict of its class return it" in causes[0].advice


def test_networks_in_a_container_are_named_one_by_one() -> None:
    """A list of networks can't be passed to `run.keep`."""
    description = ValueDescription(
        type="network", text="network torch.Linear, local variable of main()"
    )
    causes = causes_of_lost_values(dict.fromkeys(["critics[0]", "critics[1]"], description))
    assert [cause.sentence.partition(" ")[0] for cause in causes] == ["critics[0]", "critics[1]"]


@pytest.mark.parametrize(
    ("changes", "beginning"),
    [
        (
            {"part_digests": {"model": "model-3", "optimizer": "other"}},
            "the part optimizer had a different state after it was restored",
        ),
        (
            {"generator_digests": {"torch": "torch-3", "numpy": "drawn"}},
            "after a resume, the random generator numpy had a different state before update 4",
        ),
    ],
)
def test_a_state_that_differs_right_after_a_resume_is_named(
    changes: dict[str, dict[str, str]], beginning: str
) -> None:
    """A part was restored wrongly, or the recipe drew from a generator after the start."""
    reference = run(launch(0))
    other, _ = changed(launch(1, 3), 1, **changes)
    resumed = run(launch(0, 0, 3), other)
    (cause,) = causes_after_resume(reference, resumed, first_difference(reference, resumed))
    assert cause.sentence.startswith(beginning)


@pytest.mark.parametrize("wrong", [[], ["model"], ["model", "optimizer"]])
@pytest.mark.parametrize("first", [3, 4])
def test_parts_that_a_resume_restored_wrongly_are_named(wrong: list[str], first: int) -> None:
    """Each part is compared with the save at the update of the resume; there is one after 3."""
    before, _ = changed(launch(0, 0, 5), 0, kept_part_names=["model", "optimizer"])
    parts = parts_at(first) | dict.fromkeys(wrong, "other") | {"best evaluation": "other"}
    after, _ = changed(launch(1, first), 1, part_digests=parts)
    causes = causes_of_restored_parts(run(before, after))
    named = [cause.sentence.split()[2] for cause in causes]
    assert named == (wrong if first == 3 else [])


def test_a_generator_that_differs_between_two_runs_is_named_first() -> None:
    """The generator differs before the first update, and the loss differs later."""
    reference_states = states(set(), 0, is_resumed=False)
    reference = run(with_state(launch(0), reference_states))
    repeated_states = {}
    for step, state in reference_states.items():
        repeated_states[step] = {**state, "noise": f"other {step}"}
    repeated_launch, _ = changed(with_state(launch(0), repeated_states), 4, loss=9.0)
    repeated = run(repeated_launch)
    causes = causes_of_repeat(reference, repeated, first_difference(reference, repeated))
    assert causes[0].sentence.startswith("noise (random generator")
    assert "the loss in update 2" in causes[-1].sentence
    assert "a clock" in causes[-1].advice


@pytest.mark.parametrize(
    ("value_type", "words"),
    [
        ("generator", "draw from the global generator"),
        ("buffer", "register it without persistent=False"),
        ("network", "run.keep(..., value=value)"),
        ("stateful", "run.keep(..., value=value)"),
        ("file", "read by sample index"),
        ("iterator", "choose the samples from run.progress.global_step"),
        ("setting", "set it in each pass of the loop"),
        ("attribute", "let the state_dict of its class return it"),
        ("target", "compute it, or choose the sample, from run.progress.global_step"),
        ("other", "compute it from run.progress.global_step"),
    ],
)
def test_advice_follows_the_type_of_a_value(value_type: ValueType, words: str) -> None:
    """The name of a function in the text does not matter, even if it sounds like another type."""
    text = "int, local variable of network_with_state_dict()"
    cause = cause_of_lost_value("value", ValueDescription(type=value_type, text=text))
    assert words in cause.advice
    assert text in cause.sentence


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["model.body[0].training"], ["model.body[0].training"]),
        (["model.body[1].training", "model.body[10].training"], ["model.body.training"]),
        (["model.body[1].training", "model.bodies[1].training"], ["model.training"]),
        (["model.training", "model.head.training"], ["model.training"]),
        (
            ["model.head.training", "critic[0].training"],
            ["model.head.training", "critic[0].training"],
        ),
        (
            ["model[0].training", "model[0].requires_grad"],
            ["model[0].training", "model[0].requires_grad"],
        ),
    ],
)
def test_settings_of_several_layers_are_one_cause(paths: list[str], names: list[str]) -> None:
    """A frozen network of many layers leaves room for other causes."""
    description = ValueDescription(type="setting", text="setting, local variable of main()")
    causes = causes_of_lost_values(dict.fromkeys(paths, description))
    assert [cause.sentence.partition(" ")[0] for cause in causes] == names


def test_a_batch_whose_contents_differ_is_named() -> None:
    reference = run(launch(0))
    other, _ = changed(launch(0), 3, batch_digest="other")
    (cause,) = causes_of_repeat(reference, run(other), first_difference(reference, run(other)))
    assert "the contents of a training batch before update 2" in cause.sentence
    assert "__getitem__" in cause.advice


@pytest.mark.parametrize(
    ("variable", "argument"),
    [(OF_RECIPE, "ema=ema"), ("global variable of train.py", "ema=train.ema")],
)
def test_advice_names_a_global_variable_as_the_recipe_does(variable: str, argument: str) -> None:
    """The recipe's own variables have no module in front of them, those of other modules have."""
    text = f"Average with state_dict, {variable}"
    cause = cause_of_lost_value("train.ema", ValueDescription(type="stateful", text=text))
    assert cause.sentence.startswith("train.ema (Average")
    assert f"run.keep(..., {argument})" in cause.advice
