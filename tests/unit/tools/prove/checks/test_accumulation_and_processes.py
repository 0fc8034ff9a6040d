"""The checks of accumulation and of processes, on made-up observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.tools.prove.checks import accumulation, processes
from common.tools.prove.instruments.updates import (
    FIRST_BUFFERS,
    FIRST_WEIGHTS,
    LATER_BUFFERS,
    LATER_WEIGHTS,
)
from common.tools.prove.layouts import process_runs
from common.tools.prove.layouts.compared_runs import UpdateLayout
from common.tools.prove.layouts.comparison import differing_figure, updates_of
from common.tools.prove.layouts.pairs import RunPair
from common.tools.prove.proof_runs.bench import RunFailedError
from common.tools.prove.records.base import ObservedRecord, Phase
from common.tools.prove.records.instrument_records import (
    CollateDraw,
    GradientChange,
    MixingModule,
    OwnDraw,
    SampleMixing,
)
from common.tools.prove.records.observed_run import ObservedRun
from common.tools.prove.records.run_records import MicroBatch
from tests.unit.tools.prove.made_up_records import (
    evaluated,
    micro_batch,
    optimizer_step,
    recorded,
    run_with,
    sample_mixing,
    started,
)
from tests.unit.tools.prove.made_up_records import (
    evaluation_batch as evaluation_batch_record,
)

COUPLED = sample_mixing(couples_samples=True)
WHOLE = UpdateLayout(8, 1)
DIVIDED = UpdateLayout(4, 2)
DISTRIBUTED = UpdateLayout(4, 1, processes=2)


def run_with_layout(
    way: UpdateLayout,
    folder: Path,
    *,
    losses: Sequence[float] = (3.0, 2.0, 1.0),
    norms: Sequence[float] = (0.5, 0.4, 0.3),
    rates: Sequence[float] = (0.1, 0.2, 0.1),
    weights: float = 2.0,
    buffer: float | None = None,
    accuracy: float = 0.5,
    accuracy_at_start: float = 0.2,
    mixing: SampleMixing | None = None,
    mixing_module: str | None = None,
    draws: bool = False,
    evaluation_batch: int = 0,
    collate_draws: bool = False,
) -> ObservedRun:
    """Return a run of three updates that moved its weights from 1 to `weights`.

    If there is a buffer, it moved from 0 to `buffer`.
    """
    directory = folder / str(way)
    directory.mkdir()
    save_file({"model.weight": torch.ones(2)}, directory / FIRST_WEIGHTS)
    save_file({"model.weight": torch.full((2,), weights)}, directory / LATER_WEIGHTS)
    if buffer is not None:
        save_file({"center.mean": torch.zeros(2)}, directory / FIRST_BUFFERS)
        save_file({"center.mean": torch.full((2,), buffer)}, directory / LATER_BUFFERS)
    ranks = []
    for _ in range(way.processes):
        records: list[ObservedRecord] = [
            started(accumulation=way.accumulation),
            mixing or sample_mixing(),
        ]
        records.append(evaluated({"accuracy": accuracy_at_start}, step=0))
        if evaluation_batch:
            records.append(evaluation_batch_record(range(evaluation_batch), step=0))
        if collate_draws:
            records.append(CollateDraw(step=0, generators=["torch"]))
        if mixing_module is not None:
            records.append(MixingModule(step=0, module_class=mixing_module))
        for step, loss in enumerate(losses):
            for number in range(way.accumulation):
                after = {"torch": "drawn"} if draws else {"torch": "t"}
                is_update = number == way.accumulation - 1
                records.append(micro_batch(step, number))
                if is_update:
                    records.append(optimizer_step(step, norms[step], rates[step]))
                records.append(recorded(step, number, loss, is_update=is_update, generators=after))
        ranks.append([*records, evaluated({"accuracy": accuracy}, step=3)])  # without a count
    return run_with(*ranks, directory=directory)


def pair_of(
    variant_layout: UpdateLayout,
    folder: Path,
    baseline_buffer: float | None = None,
    **changes: object,
) -> RunPair:
    """Return a pair of a correct run and one with changes."""
    baseline_layout = WHOLE if variant_layout == DIVIDED else DIVIDED
    baseline = run_with_layout(baseline_layout, folder, buffer=baseline_buffer)
    variant = run_with_layout(variant_layout, folder, **changes)  # type: ignore[arg-type]
    return RunPair(baseline, variant, baseline_layout, variant_layout)


VERDICTS = {DIVIDED: accumulation.verdict_of, DISTRIBUTED: processes.verdict_of}
EACH_WAY = pytest.mark.parametrize("way", VERDICTS, ids=str)


@EACH_WAY
def test_equal_updates_pass(way: UpdateLayout, tmp_path: Path) -> None:
    verdict = VERDICTS[way](pair_of(way, tmp_path))
    assert verdict.passed is True
    assert "3 updates" in verdict.compared
    assert str(way) in verdict.compared


@EACH_WAY
def test_rounding_passes(way: UpdateLayout, tmp_path: Path) -> None:
    """Differences within the tolerances do not count."""
    pair = pair_of(
        way,
        tmp_path,
        losses=(3.0003, 2.0002, 1.0001),
        norms=(0.5001, 0.4001, 0.3001),
        weights=2.001,
        accuracy=0.51,
    )
    assert VERDICTS[way](pair).passed is True


@EACH_WAY
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rates": (0.1, 0.1, 0.1)}, "the learning rate of update 2 is 0.1 with"),
        ({"losses": (6.0, 2.0, 1.0)}, "the loss of update 1 is 6 with"),
        ({"losses": (3.0, 2.0, 1.1)}, "the loss of update 3 is 1.1 with"),
        ({"norms": (0.6, 0.4, 0.3)}, "the gradients of update 1 have the norm 0.6 with"),
        (
            {"weights": 2.1},
            "the weights after update 3 differ by 10.0% of the distance that they moved",
        ),
        ({"accuracy": 0.56}, "accuracy of the validation evaluation after update 3 is 0.56"),
    ],
)
def test_first_difference_is_named(
    way: UpdateLayout, changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    verdict = VERDICTS[way](pair_of(way, tmp_path, **changes))
    assert verdict.passed is False
    (cause,) = verdict.causes
    assert words in cause
    assert verdict.advice


@EACH_WAY
@pytest.mark.parametrize(
    ("baseline", "variant", "note"),
    [
        (1.0, 0.5, "the buffer center.mean differs by 50% of its change up to update 3"),
        (0.0, 0.5, "the buffer center.mean has changed in only one of the runs"),
        (1.0, 0.99, ""),
        (0.0, 0.0, ""),
        (None, 0.5, ""),
    ],
)
def test_buffer_that_differs_is_noted(
    way: UpdateLayout, baseline: float | None, variant: float, note: str, tmp_path: Path
) -> None:
    """It fails no check, because a process may count its own samples, for example."""
    verdict = VERDICTS[way](pair_of(way, tmp_path, baseline_buffer=baseline, buffer=variant))
    assert verdict.passed is True
    assert verdict.compared.partition("; ")[2].partition(",")[0] == note


@EACH_WAY
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"losses": (3.0, 2.1, 1.0)}, True),
        ({"accuracy": 0.9}, True),
        ({"accuracy_at_start": 0.9}, False),  # no update has changed the buffer yet
        ({"norms": (1.0, 0.8, 0.6)}, False),  # the ratio has another cause
    ],
    ids=["loss", "figure", "first figure", "gradients"],
)
def test_buffer_that_differs_is_a_cause(
    way: UpdateLayout, changes: dict[str, Any], named: bool, tmp_path: Path
) -> None:
    """A centre or a normalisation that each process or micro-batch changes enters the loss."""
    verdict = VERDICTS[way](pair_of(way, tmp_path, baseline_buffer=1.0, buffer=0.5, **changes))
    assert verdict.passed is False
    assert ("; the buffer center.mean differs by 50%" in verdict.causes[0]) is named
    assert ("run.gather(rows)" in verdict.advice) is named


def test_buffer_that_changes_with_each_micro_batch_is_a_cause_in_the_first_update(
    tmp_path: Path,
) -> None:
    changes: dict[str, Any] = {"losses": (3.1, 2.0, 1.0), "buffer": 0.5}
    verdict = accumulation.verdict_of(pair_of(DIVIDED, tmp_path, baseline_buffer=1.0, **changes))
    assert "the loss of update 1 is" in verdict.causes[0]
    assert "the buffer center.mean differs by 50%" in verdict.causes[0]


def test_figure_that_changes_with_the_batch_size_is_named(tmp_path: Path) -> None:
    """The two runs evaluate the same weights in batches of different sizes."""
    baseline = run_with_layout(WHOLE, tmp_path, evaluation_batch=2)
    variant = run_with_layout(DIVIDED, tmp_path, evaluation_batch=16, accuracy_at_start=0.9)
    verdict = accumulation.verdict_of(RunPair(baseline, variant, WHOLE, DIVIDED))
    (cause,) = verdict.causes
    assert "is 0.9 in batches of 16 and 0.2 in batches of 2, for the same weights" in cause
    assert "it changes with the batch size, as a mean over batches does" in cause
    assert "pass totals to sums.add(...)" in verdict.advice
    assert "sums.collect(...)" in verdict.advice


@pytest.mark.parametrize(
    ("differences", "losses", "is_named"),
    [
        ([0.0, 0.0, 0.0], [3.0, 2.0, 2.0], False),
        # A sample that rounding has put into another class, in evaluations of the same weights.
        ([0.0, 0.012, 0.012], [3.0, 2.0, 2.0], False),
        ([0.012, 0.0, 0.0], [3.0, 2.0, 2.0], False),
        # A mean over batches differs in each evaluation.
        ([0.012, 0.0, 0.012], [3.0, 2.0, 2.0], True),
        ([-0.012, 0.012, 0.0], [3.0, 2.0, 2.0], True),
        # The weights differ by more than rounding.
        ([0.012, 0.012, 0.012], [3.0, 2.001, 2.001], False),
    ],
)
def test_figure_that_differs_slightly_in_each_evaluation_is_found(
    differences: list[float], losses: list[float], is_named: bool
) -> None:
    """The tolerance of two samples in 100 would hide it."""
    phases: list[tuple[int, Phase]] = [(0, "rehearsal"), (6, "validation"), (6, "final")]
    expected = []
    observed = []
    for (step, phase), difference, loss, expected_loss in zip(
        phases, differences, losses, [3.0, 2.0, 2.0], strict=True
    ):
        expected.append(evaluated({"loss": expected_loss, "mean_iou": 0.3}, step, phase))
        observed.append(evaluated({"loss": loss, "mean_iou": 0.3 + difference}, step, phase))
    difference_found = differing_figure(run_with(expected), run_with(observed))
    assert (difference_found is not None) == is_named


@EACH_WAY
@pytest.mark.parametrize(
    ("changes", "is_wrong"),
    [
        ({}, False),
        ({"losses": (6.0, 2.0, 1.0)}, True),
        ({"norms": (0.6, 0.4, 0.3)}, True),
        ({"accuracy_at_start": 0.9}, True),
    ],
)
def test_collate_function_that_draws_explains_a_difference(
    way: UpdateLayout, changes: dict[str, object], is_wrong: bool, tmp_path: Path
) -> None:
    """Without a difference, there is nothing to explain, and the check passes."""
    verdict = VERDICTS[way](pair_of(way, tmp_path, collate_draws=True, **changes))
    assert verdict.passed is not is_wrong
    if is_wrong:
        (cause,) = verdict.causes
        assert cause.startswith("collate_fn draws random numbers (generator torch)")
        assert "draw them in __getitem__" in verdict.advice


WRONG_UPDATES: dict[str, dict[str, object]] = {
    "the loss of update 1": {"losses": (6.0, 2.0, 1.0)},
    "the learning rate of update 2": {"rates": (0.1, 0.1, 0.1)},
    "the gradients of update 3": {"norms": (0.5, 0.4, 0.6)},
    "the weights after update 3": {"weights": 2.1},
}


@EACH_WAY
@pytest.mark.parametrize("words", WRONG_UPDATES)
def test_wrong_update_hides_no_wrong_figure(way: UpdateLayout, words: str, tmp_path: Path) -> None:
    """A figure that was wrong before the updates differed has a cause and advice of its own.

    The figure after the last update follows from the wrong updates, so it is not named.
    """
    changes = WRONG_UPDATES[words]
    pair = pair_of(way, tmp_path, **changes, accuracy=0.9, accuracy_at_start=0.4)
    verdict = VERDICTS[way](pair)
    if "rate" in words and way == DIVIDED:  # the check ends there
        assert len(verdict.causes) == 1
        return
    update_cause, figure_cause = verdict.causes
    assert words in update_cause
    assert "accuracy of the validation evaluation after update 0 is 0.4" in figure_cause
    assert "; for the evaluation, add up over samples" in verdict.advice
    assert "sums.collect(...)" in verdict.advice


@EACH_WAY
@pytest.mark.parametrize("words", WRONG_UPDATES)
def test_figure_that_follows_from_wrong_updates_is_not_named(
    way: UpdateLayout, words: str, tmp_path: Path
) -> None:
    (cause,) = VERDICTS[way](pair_of(way, tmp_path, **WRONG_UPDATES[words], accuracy=0.9)).causes
    assert words in cause


def test_loss_that_is_not_divided_is_named(tmp_path: Path) -> None:
    verdict = accumulation.verdict_of(pair_of(DIVIDED, tmp_path, norms=(1.0, 0.4, 0.3)))
    assert "2.00 times as large: the loss is not divided by the number" in verdict.causes[0]


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        ((0.25, 0.4, 0.3), "half as large: on one process, the loss is not divided"),
        ((1.0, 0.4, 0.3), "twice as large: the gradients of the processes are added up"),
    ],
)
def test_ratio_of_processes_is_explained(
    norms: tuple[float, ...], words: str, tmp_path: Path
) -> None:
    verdict = processes.verdict_of(pair_of(DISTRIBUTED, tmp_path, norms=norms))
    assert words in verdict.causes[0]


def test_update_of_each_micro_batch_is_named(tmp_path: Path) -> None:
    """Each micro-batch makes an update of its own, so an update has only one."""
    first = run_with_layout(WHOLE, tmp_path)
    second = run_with_layout(UpdateLayout(4, 1), tmp_path)
    verdict = accumulation.verdict_of(RunPair(first, second, WHOLE, DIVIDED))
    assert "update 1 used 1 micro-batch(es) of 4" in verdict.causes[0]


def test_two_steps_of_an_optimizer_in_an_update_are_named(tmp_path: Path) -> None:
    pair = pair_of(DIVIDED, tmp_path)
    process = pair.variant.processes[0]
    run = run_with([*process.records, optimizer_step(1)], directory=pair.variant.directory)
    verdict = accumulation.verdict_of(RunPair(pair.baseline, run, WHOLE, DIVIDED))
    assert (
        "the optimizers' steps in update 2 are 2 with 2 × 4 and 1 with 1 × 8" in verdict.causes[0]
    )


def test_batch_norm_is_reported(tmp_path: Path) -> None:
    """Batch norm depends on how samples are divided into micro-batches, but not on processes."""
    pair = pair_of(DIVIDED, tmp_path, mixing=sample_mixing("BatchNorm2d"), losses=(9.0, 9.0, 9.0))
    verdict = accumulation.verdict_of(pair)
    assert verdict.passed is None
    assert "BatchNorm2d mixes the samples of a micro-batch" in verdict.compared


def test_batch_norm_on_processes_leaves_out_evaluations(tmp_path: Path) -> None:
    changes = {"mixing": sample_mixing("BatchNorm2d"), "accuracy": 0.9}
    verdict = processes.verdict_of(pair_of(DISTRIBUTED, tmp_path, **changes))
    assert verdict.passed is True
    assert "BatchNorm2d averages its statistics over processes" in verdict.compared


def test_batch_norm_with_coupled_samples_is_not_compared(tmp_path: Path) -> None:
    """The larger batch that one process needs has other statistics than each of the two."""
    mixing = sample_mixing("BatchNorm2d", couples_samples=True)
    verdict = processes.verdict_of(pair_of(DISTRIBUTED, tmp_path, mixing=mixing, losses=(9, 9, 9)))
    assert verdict.passed is None
    assert "in which BatchNorm2d has other statistics" in verdict.compared


class Runs:
    """Stands in for `run_with_layout`: runs of a model with batch norm, some of which fail."""

    def __init__(self, folder: Path, failing: dict[str, tuple[bool, ...]]) -> None:
        """Prepare runs.

        Args:
            failing: by name, the precisions in which a run fails, True for float64.
        """
        self.folder = folder
        self.failing = failing
        self.finished: dict[tuple[str, bool], ObservedRun] = {}

    def __call__(
        self,
        bench: object,
        name: str,
        way: UpdateLayout,
        in_float64: bool = False,
        **options: object,
    ) -> ObservedRun:
        """Return a run, which is made only once."""
        if in_float64 in self.failing.get(name, ()):
            raise RunFailedError(f"{name} failed: expected Float")
        key = (name, in_float64)
        if key not in self.finished:
            folder = self.folder / f"{name} {in_float64}"
            folder.mkdir()
            # In fp32, the updates would not count as equal.
            last_loss = 1.0 if in_float64 else 1.5 + len(self.finished)
            mixing = sample_mixing("BatchNorm2d")
            self.finished[key] = run_with_layout(
                way, folder, losses=(3.0, 2.0, last_loss), mixing=mixing
            )
        return self.finished[key]


RUNS_IN_FLOAT64 = ("two-processes", "divided", "from-one-to-two", "from-two-to-one")


def test_batch_norm_is_compared_in_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All compared runs are in float64, and only the first one is launched in fp32, too."""
    runs = Runs(tmp_path, {})
    monkeypatch.setattr(process_runs, "run_with_layout", runs)
    bench: Any = SimpleNamespace(batch_size=4, accumulation=2)
    verdict = processes.judge_processes(bench)
    assert verdict.passed is True
    assert "in float64, as BatchNorm2d amplifies rounding" in verdict.compared
    in_fp32 = [name for name, in_float64 in runs.finished if not in_float64]
    assert in_fp32 == ["two-processes"]
    assert {name for name, in_float64 in runs.finished if in_float64} == {*RUNS_IN_FLOAT64}


@pytest.mark.parametrize("name", RUNS_IN_FLOAT64)
def test_a_run_that_fails_in_float64_alone_is_not_compared(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_runs, "run_with_layout", Runs(tmp_path, {name: (True,)}))
    bench: Any = SimpleNamespace(batch_size=4, accumulation=2)
    verdict = processes.judge_processes(bench)
    assert verdict.passed is None
    assert f"in float64, in which the recipe fails: {name} failed" in verdict.compared


@pytest.mark.parametrize("name", RUNS_IN_FLOAT64)
def test_a_run_that_fails_in_fp32_too_fails_the_check(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check raises the error, and the proof reports it."""
    monkeypatch.setattr(process_runs, "run_with_layout", Runs(tmp_path, {name: (True, False)}))
    bench: Any = SimpleNamespace(batch_size=4, accumulation=2)
    with pytest.raises(RunFailedError, match=f"{name} failed: expected Float"):
        processes.judge_processes(bench)


def test_a_module_that_mixes_samples_explains_a_difference(tmp_path: Path) -> None:
    """Without a difference, there is nothing to explain, and the check passes."""
    pair = pair_of(DIVIDED, tmp_path, mixing_module="Centre", losses=(9.0, 9.0, 9.0))
    verdict = accumulation.verdict_of(pair)
    assert verdict.passed is None
    assert "Centre mixes the samples of a micro-batch" in verdict.compared


def test_a_module_that_mixes_samples_does_not_fail_equal_updates(tmp_path: Path) -> None:
    assert accumulation.verdict_of(pair_of(DIVIDED, tmp_path, mixing_module="Centre")).passed


def test_a_module_that_mixes_samples_leaves_out_evaluations(tmp_path: Path) -> None:
    pair = pair_of(DISTRIBUTED, tmp_path, mixing_module="Centre", accuracy=0.9)
    verdict = processes.verdict_of(pair)
    assert verdict.passed is True
    assert "Centre may also mix the samples of an evaluation's batch" in verdict.compared


@pytest.mark.parametrize("wrong", [None, "from-one-to-two", "from-two-to-one"])
def test_runs_that_change_the_number_of_processes_are_compared(
    wrong: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs change from one to two and from two to one. A difference names the direction."""
    resumed_processes: dict[str, object] = {}

    def run_for(bench: object, name: str, way: UpdateLayout, **options: object) -> ObservedRun:
        resumed_processes[name] = options.get("resumed_processes")
        folder = tmp_path / name
        folder.mkdir()
        losses = (3.0, 2.0, 1.5 if name == wrong else 1.0)
        return run_with_layout(way, folder, losses=losses)

    monkeypatch.setattr(process_runs, "run_with_layout", run_for)
    bench: Any = SimpleNamespace(batch_size=4, accumulation=2)
    verdict = processes.judge_processes(bench)
    assert verdict.passed is (wrong is None)
    if wrong is None:
        assert resumed_processes["from-one-to-two"] == 2
        assert resumed_processes["from-two-to-one"] == 1
        assert "killed on two processes after update 5 and resumed on one" in verdict.compared
    else:
        words = "stopped on one" if wrong == "from-one-to-two" else "killed on two"
        assert words in verdict.causes[0]


def test_a_resume_that_is_not_compared_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process makes an update of a coupled loss as a single batch."""
    runs = {
        way: run_with_layout(way, tmp_path, mixing=COUPLED) for way in (WHOLE, DIVIDED, DISTRIBUTED)
    }
    monkeypatch.setattr(
        process_runs, "run_with_layout", lambda bench, name, way, **options: runs[way]
    )
    bench: Any = SimpleNamespace(batch_size=4, accumulation=2)
    verdict = processes.judge_processes(bench)
    assert verdict.passed is True
    assert "no resume on another number of processes was compared" in verdict.compared


def test_batch_norm_does_not_excuse_a_wrong_schedule(tmp_path: Path) -> None:
    pair = pair_of(DIVIDED, tmp_path, mixing=sample_mixing("BatchNorm2d"), rates=(0.2, 0.2, 0.1))
    assert accumulation.verdict_of(pair).passed is False


def test_coupled_samples_are_reported(tmp_path: Path) -> None:
    pair = pair_of(DIVIDED, tmp_path, mixing=sample_mixing(couples_samples=True), losses=(9, 9, 9))
    verdict = accumulation.verdict_of(pair)
    assert verdict.passed is None
    assert "couples_samples=True" in verdict.compared


@EACH_WAY
def test_draws_for_each_micro_batch_are_reported(way: UpdateLayout, tmp_path: Path) -> None:
    """A loop that draws noise for each micro-batch makes different updates, so they don't count."""
    verdict = VERDICTS[way](pair_of(way, tmp_path, draws=True, losses=(9.0, 9.0, 9.0)))
    assert verdict.passed is None
    assert "draws random numbers" in verdict.compared
    assert "generator torch" in verdict.compared


def with_record(pair: RunPair, record: ObservedRecord) -> RunPair:
    """Return a pair whose variant has one more record."""
    variant = pair.variant
    records = [*variant.processes[0].records, record]
    others = [process.records for process in variant.processes[1:]]
    changed = run_with(records, *others, directory=variant.directory)
    return replace(pair, variant=changed)


@EACH_WAY
def test_draws_from_a_generator_of_the_loop_are_reported(way: UpdateLayout, tmp_path: Path) -> None:
    pair = pair_of(way, tmp_path, losses=(9.0, 9.0, 9.0))
    verdict = VERDICTS[way](with_record(pair, OwnDraw(step=0, operation="randn")))
    assert verdict.passed is None
    assert "(generator that it passes to randn)" in verdict.compared


def test_gradients_that_change_before_the_end_of_an_update_are_named(tmp_path: Path) -> None:
    change = GradientChange(
        step=0, micro_batch=0, norm_before=2.0, norm_after=0.0, clipping_file="", clipping_line=0
    )
    verdict = accumulation.verdict_of(
        with_record(pair_of(DIVIDED, tmp_path, losses=(3.0, 2.0, 1.1)), change)
    )
    assert "the gradients are cleared between micro-batches 1 and 2" in verdict.causes[0]


@EACH_WAY
def test_gradients_that_differ_by_more_than_rounding_are_not_said_to_agree(
    way: UpdateLayout, tmp_path: Path
) -> None:
    """They are within the tolerance, but the loss is the likelier cause."""
    pair = pair_of(way, tmp_path, losses=(3.0, 2.1, 1.0), norms=(0.504, 0.4, 0.3))
    (cause,) = VERDICTS[way](pair).causes
    assert (
        "after gradients whose norms differed by up to 0.80%, which is more than rounding" in cause
    )


def test_other_contents_of_the_same_samples_are_named(tmp_path: Path) -> None:
    """The loss differs as well, but for this reason."""
    pair = pair_of(DISTRIBUTED, tmp_path, losses=(9.0, 2.0, 1.0))
    ranks = []
    for process in pair.variant.processes:
        records: list[ObservedRecord] = []
        for record in process.records:
            is_batch = isinstance(record, MicroBatch)
            records.append(record.model_copy(update={"batch_digest": "c"}) if is_batch else record)
        ranks.append(records)
    variant = run_with(*ranks, directory=pair.variant.directory)
    (cause,) = processes.verdict_of(replace(pair, variant=variant)).causes
    assert "the contents of a training batch of update 1 differ between 1 × 4 on 2" in cause


@pytest.mark.parametrize("is_whole_wrong", [True, False])
@pytest.mark.parametrize("wrong_figures_of", ["none", "two processes", "micro-batches"])
def test_processes_leave_a_mistake_to_accumulation(
    is_whole_wrong: bool, wrong_figures_of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one process already makes other updates with micro-batches, two are not to blame.

    A figure that is wrong is named once in any case.
    """
    wrong = {"accuracy_at_start": 0.4}
    distributed: Any = wrong if wrong_figures_of == "two processes" else {}
    whole: Any = wrong if wrong_figures_of == "micro-batches" and is_whole_wrong else {}
    norms_of_whole = (1.0, 0.8, 0.6) if is_whole_wrong else (0.5, 0.4, 0.3)
    runs = {
        WHOLE: run_with_layout(WHOLE, tmp_path, norms=norms_of_whole, **whole),
        DIVIDED: run_with_layout(DIVIDED, tmp_path),
        DISTRIBUTED: run_with_layout(DISTRIBUTED, tmp_path, norms=(1.0, 0.8, 0.6), **distributed),
    }
    monkeypatch.setattr(
        process_runs, "run_with_layout", lambda bench, name, way, **options: runs[way]
    )
    monkeypatch.setattr(process_runs, "run_of_whole_batches", lambda bench: runs[WHOLE])
    bench: Any = SimpleNamespace(batch_size=4, accumulation=2)
    verdict = processes.judge_processes(bench)
    assert verdict.passed is False
    cause, *figure_causes = verdict.causes
    assert len(figure_causes) == bool(distributed or whole)
    assert all("accuracy of the validation evaluation" in words for words in figure_causes)
    if is_whole_wrong:
        assert cause.startswith("on one process already, as the check `accumulation` compares it")
        assert "the loss is divided twice by the number of micro-batches" in cause
    else:
        assert "the gradients of the processes are added up" in cause


def test_updates_made_again_count_once(tmp_path: Path) -> None:
    """If a resumed run repeats an update, the last execution counts."""
    first = [started(), recorded(0, loss=1.0), optimizer_step(0), recorded(1, loss=5.0)]
    later = [recorded(1, loss=7.0), optimizer_step(1, norm=3.0), recorded(2, loss=8.0)]
    updates = updates_of(run_with(first, later=[later], directory=tmp_path))
    assert {number: update.loss for number, update in updates.items()} == {1: 1.0, 2: 7.0, 3: 8.0}
    assert updates[2].gradient_norms == (3.0,)


def test_loss_is_the_mean_over_ranks_and_micro_batches(tmp_path: Path) -> None:
    first = [recorded(0, 0, 1.0, is_update=False), recorded(0, 1, 2.0)]
    second = [recorded(0, 0, 3.0, is_update=False), recorded(0, 1, 6.0)]
    updates = updates_of(run_with(first, second, directory=tmp_path))
    assert updates[1].loss == 3.0
    assert updates[1].micro_batches == 2
