"""Time to accuracy: who has met a goal, when, with how many operations, and what is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score
from torch import nn

from benchmarks import time_to_accuracy
from benchmarks.accuracy import launch, materials, operations, picture
from benchmarks.accuracy.goals import Goal
from benchmarks.accuracy.launch import Conditions, digest_of_code, settings_of
from benchmarks.accuracy.peer_run import EvaluationRecorder, Request
from benchmarks.accuracy.records import Evaluation, EvaluationLog, ForwardCost, Trial
from benchmarks.accuracy.report import as_markdown, as_text, caption, rows_of, table_of
from benchmarks.accuracy.results import FinishedRun, Results
from benchmarks.accuracy.workloads import (
    CIFAR10,
    DIGITS,
    MNIST,
    MRPC,
    SST2,
    TRIAL_SKIPPED,
    TRIAL_UPDATES,
    WITH_VIEWS,
    WORKLOADS,
    Peer,
    SameEpochs,
)
from benchmarks.peer_loops.image_models import build_model
from benchmarks.peer_loops.watch import classification_figures
from tests.launch import REPOSITORY

WIDEST = 100  # columns of a terminal
VERSIONS = {"torch": "2", "accelerate": "1", "transformers": "5"}
MACHINE = {"hardware": {"processor": "a CPU"}, "versions": VERSIONS}
SHARES = st.floats(0, 1)
TRIAL = Trial(
    start_seconds=10.0,
    update_seconds=0.5,
    updates_per_epoch=100,
    samples_per_epoch=3200.0,
    tokens_per_epoch=0.0,
    squared_tokens_per_epoch=0.0,
    evaluation_seconds=7.0,
)


def evaluation(number: int, **figures: float) -> Evaluation:
    """Return the evaluation after epoch `number`, of 1,000 samples and 10 s each."""
    return Evaluation(
        seconds=10.0 * number, epoch=float(number), samples=1000.0 * number, figures=figures
    )


def finished(
    workload: str,
    contestant: str,
    accuracies: Sequence[float] = (),
    seed: int = 0,
    trial: Trial | None = None,
) -> FinishedRun:
    """Return a run with these accuracies after its epochs."""
    return FinishedRun(
        workload=workload,
        contestant=contestant,
        seed=seed,
        settings={},
        repeat=["python"],
        evaluations=[
            evaluation(number, accuracy=accuracy, f1=accuracy)
            for number, accuracy in enumerate(accuracies, start=1)
        ],
        forward=ForwardCost(per_sample=1e9),
        trial=trial,
        git_commit=None,
        measured_at="now",
        load_average_before=0.0,
    )


def results_of(*runs: FinishedRun) -> Results:
    """Return results with these runs."""
    return Results(Path("results.json"), MACHINE, {run.key: run for run in runs})


@given(st.lists(SHARES), SHARES)
def test_goal_is_met_by_the_first_evaluation_that_reaches_it(
    accuracies: list[float], least: float
) -> None:
    """A later fall does not matter."""
    entries = [evaluation(number, accuracy=value) for number, value in enumerate(accuracies)]
    reaching = [number for number, value in enumerate(accuracies) if value >= least]
    met = Goal("goal", {"accuracy": least}).first_met(entries)
    assert (met and met.epoch) == (float(reaching[0]) if reaching else None)


def test_all_figures_of_a_goal_must_be_met_by_one_evaluation() -> None:
    """Accuracy in one epoch and F1 in another are not enough."""
    (goal,) = MRPC.goals
    entries = [evaluation(1, accuracy=0.81, f1=0.85), evaluation(2, accuracy=0.79, f1=0.87)]
    assert goal.first_met(entries) is None
    assert goal.first_met([*entries, evaluation(3, accuracy=0.8, f1=0.86)]) is not None
    assert not goal.is_met({"accuracy": 0.9}), "F1 was not measured"


def test_views_count_only_where_the_goal_allows_them() -> None:
    """A side without test-time augmentation is judged by its plain accuracy."""
    with_views, without = CIFAR10.goals
    figures = {"accuracy": 0.931, "accuracy_tta": 0.9405}
    assert with_views.is_met(figures)
    assert not without.is_met(figures)
    assert with_views.is_met({"accuracy": 0.9401})
    assert not with_views.is_met({"accuracy": 0.9399})


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1))
def test_figures_of_peers_are_those_of_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    """F1 is that of the second class, and more classes have none."""
    predicted, labels = (np.array(column) for column in zip(*pairs, strict=True))
    figures = classification_figures(predicted, labels)
    assert figures["accuracy"] == pytest.approx((predicted == labels).mean())
    assert figures["f1"] == pytest.approx(f1_score(labels, predicted, zero_division=0.0))
    assert "f1" not in classification_figures(predicted, labels + 2)


# Multiply-adds of a sample's forward pass, by arithmetic on the layers' sizes.
MLP_MACS = 784 * 512 + 512 * 512 + 512 * 10
CNN_MACS = 26**2 * 32 * 9 + 24**2 * 64 * 288 + 9216 * 128 + 128 * 10
RESNET18_MACS = 555_422_720  # 555 M, as it is published
RESNET9_MACS = 380_008_448  # likewise 380 M


@pytest.mark.parametrize(
    ("name", "channels", "size", "multiply_adds"),
    [
        ("mlp", 1, 28, MLP_MACS),
        ("cnn", 1, 28, CNN_MACS),
        ("resnet9", 3, 32, RESNET9_MACS),
        ("resnet18", 3, 32, RESNET18_MACS),
    ],
)
def test_operations_of_a_forward_pass(
    name: str, channels: int, size: int, multiply_adds: int
) -> None:
    """A multiply-add counts as two operations, and the backward pass is left out."""
    model = build_model(name, channels, size, classes=10)
    shape = (channels, size, size)
    cost = operations.cost_of_peer(model, operations.image_loss, operations.image_batch(shape))
    assert cost == ForwardCost(2.0 * multiply_adds)
    trained = evaluation(2)
    assert cost.training_petaflop(trained) == pytest.approx(3 * 2 * multiply_adds * 2000 / 1e15)


def test_operations_of_texts_grow_with_their_tokens() -> None:
    """The cost is a parabola of the length; a table of vectors costs nothing."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(2, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            vectors = self.words(input_ids)
            mixed = (vectors @ vectors.mT) @ vectors
            logits = self.head(mixed.mean(1))
            return type("Output", (), {"logits": logits})

    cost = operations.cost_of_peer(Attention(), operations.text_loss, operations.text_batches())
    assert cost.per_sample == pytest.approx(2 * 4 * 2)
    assert cost.per_token == pytest.approx(0, abs=1e-6)
    assert cost.per_squared_token == pytest.approx(2 * 2 * 4)
    trained = replace(evaluation(1), tokens=7.0, squared_tokens=13.0)
    assert cost.training_petaflop(trained) == pytest.approx(3 * (16 * 1000 + 16 * 13) / 1e15)


# ------------------------------------------------------------------------------ Peers' runs


class Clock(EvaluationLog):
    """A log whose time the test sets."""

    now = 0.0

    def elapsed(self) -> float:
        """Return the time that was set."""
        return self.now


def recorder_in(folder: Path, **fields: Any) -> tuple[EvaluationRecorder, Clock]:
    """Return a recorder of MNIST's goals, and its clock."""
    request = {
        "folder": str(folder),
        "began": 0.0,
        "workload": "mnist",
        "contestant": MNIST.peers[0].name,
        "seed": 0,
        "is_trial": False,
        "to_the_end": False,
    }
    recorder = EvaluationRecorder(Request(**{**request, **fields}), MNIST.goals)
    recorder.log = clock = Clock(folder, 0.0)
    return recorder, clock


def test_peer_ends_when_it_has_met_all_goals(tmp_path: Path) -> None:
    """A peer ends when it has met all goals, each once; with --to-the-end it continues."""
    recorder, _ = recorder_in(tmp_path)
    recorder.begin(2)
    assert recorder.update(64)
    accuracies = (0.9, 0.981, 0.97, 0.988)
    assert [recorder.evaluation_ended({"accuracy": accuracy}) for accuracy in accuracies] == [
        True,
        True,
        True,
        False,
    ]
    recorder, _ = recorder_in(tmp_path, to_the_end=True)
    assert recorder.evaluation_ended({"accuracy": 0.999})


def test_trial_leaves_out_the_first_updates(tmp_path: Path) -> None:
    """The first updates are slow and large here; the rates are those of the others."""
    recorder, clock = recorder_in(tmp_path, is_trial=True)
    clock.now = 5.0
    recorder.begin(1000)
    goes_on = True
    updates = 0
    while goes_on:
        is_skipped = updates < TRIAL_SKIPPED
        clock.now += 100.0 if is_skipped else 2.0
        goes_on = recorder.update(999 if is_skipped else 32, 64, 128)
        updates += 1
    assert updates == TRIAL_UPDATES
    recorder.evaluation_begins()
    clock.now += 30.0
    assert not recorder.evaluation_ended({"accuracy": 1.0})
    trial = recorder.trial()
    assert trial is not None
    assert trial.start_seconds == 5.0
    assert trial.update_seconds == pytest.approx(2.0)
    assert trial.samples_per_epoch == pytest.approx(32_000)
    assert trial.tokens_per_epoch == pytest.approx(64_000)
    assert trial.evaluation_seconds == pytest.approx(30.0)
    computed = trial.after(3, {"accuracy": 0.5})
    assert computed.seconds == pytest.approx(5 + 3 * (1000 * 2 + 30))
    assert computed.samples == pytest.approx(96_000)
    assert not (tmp_path / "evaluations.jsonl").exists(), "a trial's model is not trained"


# ---------------------------------------------------------------------------------- Results


def test_contestants_have_names_of_their_own() -> None:
    """A computed peer takes its epochs from one that exists and trains."""
    for workload in WORKLOADS.values():
        names = [contestant.name for contestant in workload.contestants]
        assert len({*names}) == len(names)
        for peer in workload.peers:
            if isinstance(peer.epochs_from, SameEpochs):
                other = workload.contestant(peer.epochs_from.contestant)
                assert isinstance(other, Peer)
                assert other.epochs_from is None
                differing = {"precision": "", "is_padded": ""}
                assert asdict(other.settings) | differing == asdict(peer.settings) | differing
        titles = [goal.title for goal in workload.goals]
        assert {record.goal for record in workload.only_published} <= {*titles}


def test_rows_have_the_mean_over_the_seeds_that_met_the_goal() -> None:
    """Each row has the mean over the seeds that met the goal, and says how many did."""
    name = MNIST.recipes[0].name
    accuracies = ([0.97, 0.985], [0.981], [0.9, 0.91])
    runs = [finished("mnist", name, values, seed) for seed, values in enumerate(accuracies)]
    first_row, second_row = rows_of(results_of(*runs))
    assert first_row.seconds == [20.0, 10.0]
    assert first_row.petaflop == pytest.approx([3 * 2e12 / 1e15, 3 * 1e12 / 1e15])
    assert first_row.cells()[2:5] == ("15.0 ± 7.1 s", "0.0045", "2/3")
    assert second_row.cells()[2:5] == ("not met", "–", "0/3")
    assert second_row.to_json()["best_mean"] == pytest.approx((0.985 + 0.981 + 0.91) / 3)


def test_computed_rows_are_marked() -> None:
    """Published epochs give an upper bound; the epochs of a faster run need that run."""
    slow = finished("cifar10", CIFAR10.peers[0].name, trial=TRIAL)
    with_views, *_, without = [row for row in rows_of(results_of(slow)) if row.seeds]
    for row in (with_views, without):
        seconds = 10 + 200 * (100 * 0.5 + 7)
        assert row.seconds == [seconds]
        assert row.cells()[2] == f"≤ {seconds / 3600:.1f} h *"
    fast_peer, padded_peer = SST2.peers
    padded = finished("sst2", padded_peer.name, trial=TRIAL)
    assert rows_of(results_of(padded)) == []
    fast = finished("sst2", fast_peer.name, [0.9, 0.915, 0.92])
    goal = SST2.goals[-1].title
    rows = rows_of(results_of(padded, fast))
    assert [row.cells()[2] for row in rows if row.goal == goal] == ["20.0 s", "2.1 min *"]
    unmet = finished("sst2", fast_peer.name, [0.9])
    rows = rows_of(results_of(padded, unmet))
    assert [row.cells()[2] for row in rows if row.goal == goal] == ["not met", "not met *"]
    assert [row.cells()[4] for row in rows if row.goal == goal] == ["0/1", "–"]  # runs that met it
    resnet9 = CIFAR10.peers[-1].name  # its accuracy without augmentation is not published
    rows = rows_of(results_of(finished("cifar10", resnet9, trial=TRIAL)))
    assert [row.goal for row in rows if row.seeds] == [WITH_VIEWS]


def everything() -> Results:
    """Return results of all contestants of all data sets, with three seeds."""
    runs = []
    for workload in WORKLOADS.values():
        for contestant in workload.contestants:
            is_trial = isinstance(contestant, Peer) and contestant.epochs_from is not None
            for seed in range(3):
                values = () if is_trial else (0.5, 0.999 - seed / 1000)
                trial = TRIAL if is_trial else None
                runs.append(finished(workload.name, contestant.name, values, seed, trial))
    return results_of(*runs)


def test_table_fits_a_terminal() -> None:
    """The table has all contestants, the records that can't be run here, and a legend."""
    rows = rows_of(everything())
    text = as_text(rows)
    table, legend = text.split("\n* computed")
    assert max(map(len, table.splitlines())) <= WIDEST
    assert "≤" in legend
    (record, *_) = CIFAR10.only_published
    assert f"{record.name}" in table
    for goal in CIFAR10.goals:
        with_record = [row for row in rows if row.goal == goal.title and not row.seeds]
        assert bool(with_record) == (goal.title == WITH_VIEWS)
    markdown = as_markdown(rows)
    assert len([line for line in markdown.splitlines() if line.startswith("|")]) == len(rows) + 2
    assert "| **recipe mnist_mlp** |" in markdown


@pytest.mark.parametrize(
    "name",
    ["time-to-accuracy.json", "time-to-accuracy-text.json", "time-to-accuracy-mnist.json"],
)
def test_page_has_the_table_that_was_measured(name: str) -> None:
    """The page has the table and the caption that each file of results gives."""
    results = Results.read(time_to_accuracy.RESULTS.with_name(name))
    assert results is not None
    page = (REPOSITORY / "benchmarks" / "peers.md").read_text()
    assert as_markdown(rows_of(results)) in page
    assert caption(results) in page


def test_picture_has_a_chart_for_each_data_set(tmp_path: Path) -> None:
    """Contestants stand in the legends."""
    results = everything()
    del results.runs["cifar10", CIFAR10.peers[0].name, 0]
    drawn = [CIFAR10, MRPC]
    names = [workload.name for workload in drawn]
    results.runs = {key: run for key, run in results.runs.items() if key[0] in names}
    picture.draw(results, tmp_path / "picture.svg")
    drawing = (tmp_path / "picture.svg").read_text()
    for workload in drawn:
        assert workload.goals[0].title in drawing
        for contestant in workload.contestants:
            assert contestant.name in drawing


def test_results_survive_their_file(tmp_path: Path) -> None:
    """Results that are written and read again are the same."""
    results = replace(everything(), file=tmp_path / "results.json")
    results.write(table_of(results))
    read = Results.read(results.file)
    assert read is not None
    assert read.runs == results.runs
    assert json.loads(results.file.read_text())["table"][0]["seconds_mean"] == 20.0
    assert Results.read(tmp_path / "none.json") is None
    (tmp_path / "other.json").write_text('{"runs": [3]}')
    with pytest.raises(SystemExit, match="pass another --output"):
        Results.read(tmp_path / "other.json")


# --------------------------------------------------------------------------------- Commands


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Replace the runs by finished ones; return the list of those that are started."""
    names: list[tuple[str, int]] = []

    def run(workload: Any, contestant: Any, seed: int, _: Any, conditions: Any) -> FinishedRun:
        names.append((contestant.name, seed))
        if len(names) == 5:
            raise KeyboardInterrupt
        settings = json.loads(json.dumps(settings_of(workload, contestant, conditions)))
        return replace(finished(workload.name, contestant.name, [0.96], seed), settings=settings)

    monkeypatch.setattr(launch, "run_contestant", run)
    monkeypatch.setattr(materials, "make_materials", lambda *_: None)
    monkeypatch.setattr(picture, "draw", lambda results, file: file.write_text("drawn"))
    monkeypatch.setattr(time_to_accuracy, "use_own_cache", lambda: None)
    monkeypatch.setattr(time_to_accuracy, "measure_machine_apart", lambda: MACHINE)
    return names


def test_command_goes_on_where_it_was_cut_off(
    started: list[tuple[str, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Finished runs are kept, unless their settings have changed since."""
    options = time_to_accuracy.Options(
        datasets=("digits",),
        seeds=(0, 1),
        output=tmp_path / "results.json",
        picture=tmp_path / "picture.svg",
    )
    with pytest.raises(KeyboardInterrupt):
        time_to_accuracy.main(options)
    names = [contestant.name for contestant in DIGITS.contestants]
    everyone = [(name, seed) for seed in (0, 1) for name in names]
    assert started == everyone[:5]
    time_to_accuracy.main(options)
    assert started[5:] == everyone[4:]
    assert (tmp_path / "picture.svg").exists()
    assert "digits 95 %" in capsys.readouterr().out
    del started[:]
    time_to_accuracy.main(options)
    assert started == []
    monkeypatch.setattr(launch, "digest_of_code", lambda file: "another recipe")
    time_to_accuracy.main(options)
    assert started == [(DIGITS.recipes[0].name, seed) for seed in (0, 1)]
    elsewhere = {**MACHINE, "versions": {**VERSIONS, "torch": "3"}}
    monkeypatch.setattr(time_to_accuracy, "measure_machine_apart", lambda: elsewhere)
    with pytest.raises(SystemExit, match="another machine or of other versions"):
        time_to_accuracy.main(options)


NEW_MNIST = {"datasets": ("mnist",), "output": Path("none.json")}  # there is no such file


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"datasets": ("sst2",)}, "--bert-checkpoint FOLDER"),
        ({"datasets": ("mnist",), "updates": 3}, "pass another --output"),
        ({"datasets": ("mnist",), "picture": Path("picture.txt")}, "must end in .svg or .png"),
        (NEW_MNIST | {"contestants": ("nobody",)}, "pass one of recipe mnist_mlp"),
        (NEW_MNIST, "pass --data FOLDER"),
        (NEW_MNIST | {"data": Path(__file__).parent}, "has no folder mnist"),
        (NEW_MNIST | {"show": True}, "measure first"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(
    named: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is measured before."""
    monkeypatch.setattr(time_to_accuracy, "use_own_cache", lambda: None)
    monkeypatch.setattr(time_to_accuracy, "measure_machine_apart", lambda: MACHINE)
    with pytest.raises(SystemExit, match=message):
        time_to_accuracy.main(time_to_accuracy.Options(**named))


def test_recipe_evaluates_the_same_split_as_its_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's data lack a validation split that the peers do not evaluate."""
    monkeypatch.setattr(materials, "CACHE", tmp_path / "cache")
    for name in ("mrpc", "sst2"):
        (tmp_path / name / "data").mkdir(parents=True)
        for split in ("train", "validation", "test"):
            (tmp_path / name / "data" / f"{split}-00000-of-00001.parquet").write_text(split)
    mrpc = materials.make_materials(MRPC, tmp_path)
    splits = {file.name.partition("-")[0] for file in Path(mrpc.dataset).iterdir()}
    assert splits == {"train", "test"}
    assert Path(mrpc.dataset).name == "mrpc", "the recipe's epochs depend on the name"
    assert [Path(file).read_text() for file in mrpc.evaluated_files] == ["test"]
    sst2 = materials.make_materials(SST2, tmp_path)
    assert sst2.dataset == str(tmp_path / "sst2")
    assert [Path(file).read_text() for file in sst2.evaluated_files] == ["validation"]


def test_digest_of_a_recipe_ignores_its_words(tmp_path: Path) -> None:
    """A new docstring leaves a recipe's digest unchanged; a new default changes it."""
    texts = (
        '"""Old."""\nRATE = 1\n',
        '"""New."""\nRATE = 1  # of what\n',
        '"""Old."""\nRATE = 2\n',
    )
    digests = []
    for text in texts:
        file = tmp_path / "recipe.py"
        file.write_text(text)
        digests.append(digest_of_code(file))
    assert digests[0] == digests[1] != digests[2]


def test_commands_hold_no_path_of_this_machine(tmp_path: Path) -> None:
    """The file of results may be published."""
    conditions = Conditions(tmp_path / "checkpoint", None, False, None)
    for workload in WORKLOADS.values():
        for contestant in workload.contestants:
            commands = launch.repeating_commands(workload, contestant, seed=3)
            settings = json.dumps(settings_of(workload, contestant, conditions))
            assert str(tmp_path) not in settings + "".join(commands)
            assert "--seeds 3" in commands[0]
