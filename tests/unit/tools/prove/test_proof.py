"""Flags, samples, interruptions, records and receipts of a proof."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common.config import TrainingConfig
from common.data import run_loaders
from common.data.order import Blocks, EvaluationOrder, TrainingOrder
from common.data.stored_samples import TensorSamples
from common.errors import UserError
from common.run_directory.code_tree import collect_tree
from common.run_directory.records import ATTEMPTS, PROVENANCE, Attempt, MetricsRow, Provenance
from common.storage.json_files import write_json
from common.tools.prove.checks import CHECKS
from common.tools.prove.checks.base import Check
from common.tools.prove.checks.resuming import missing_manners
from common.tools.prove.command import main, read_command_line
from common.tools.prove.observation.few_samples import (
    FewEvaluationSamples,
    FewTrainingSamples,
    limited_order,
    use_evaluation_batches_of,
)
from common.tools.prove.proof import (
    NOT_REPEATABLE,
    REPEAT_FIRST,
    chosen_checks,
    is_known_to_vary,
    run_check,
)
from common.tools.prove.proof_runs.interrupted_run import MANNERS, draw_interruptions
from common.tools.prove.proof_runs.recipe_flags import (
    ACCUMULATION,
    BATCH_SIZE,
    as_words,
    built_in_dataset,
    flag_words,
    merged,
    parse_flags,
    proof_flags,
)
from common.tools.prove.receipt import (
    FORMAT,
    CheckResult,
    ProofReceipt,
    read_receipt,
    write_receipt,
)
from common.tools.prove.receipt_making import (
    commit_of_file,
    has_passed,
    is_edited,
    proven_code,
)
from common.tools.prove.records.base import line_of
from common.tools.prove.records.observed_run import RECORD, read_processes
from common.tools.prove.report import readme_line, rows_of_checks, show_report
from common.tools.prove.verdicts import Verdict
from common.tools.rows import first_differing_row
from tests.git_repository import commit_all
from tests.launch import REPOSITORY
from tests.unit.tools.prove.made_up_records import evaluated, recorded, started
from tests.unit.tools.prove.made_up_training import UPDATES, launch, run, saved


def test_flags_of_the_user_have_precedence() -> None:
    given_flags = parse_flags(["--batch-size=8", "--hidden-sizes", "4", "5", "--no-compile"])
    flags = proof_flags(given_flags, TrainingConfig, "digits", 32)
    assert flags.values["--batch-size"] == ["8"]
    assert flags.values["--hidden-sizes"] == ["4", "5"]
    assert flags.values["--dataset"] == ["digits"]
    assert flags.batch_size == 8
    assert flags.accumulation == ACCUMULATION
    words = flag_words(flags.values)
    assert parse_flags(words) == flags.values


# The values of a flag, such as paths. A word that begins with "--" is another flag.
VALUES = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda v: not v.startswith("--"))


@given(dataset=VALUES, sizes=st.lists(st.integers()), compiles=st.booleans())
def test_a_value_stays_one_word(dataset: str, sizes: list[int], compiles: bool) -> None:
    """A path may have spaces, quotes and backslashes. A tuple has a word for each item."""
    words = as_words(dataset=dataset, tags=tuple(sizes), compile=compiles)
    assert parse_flags(words) == {
        "--dataset": [dataset],
        "--tags": [str(size) for size in sizes],
        "--compile" if compiles else "--no-compile": [],
    }


def test_an_effective_batch_becomes_accumulation() -> None:
    words = ["--effective-batch-size", "64", "--gradient-accumulation-steps", "3"]
    flags = proof_flags(parse_flags(words), TrainingConfig, None, 32)
    assert (flags.batch_size, flags.accumulation) == (BATCH_SIZE, 64 // BATCH_SIZE)
    assert flags.values["--gradient-accumulation-steps"] == [str(64 // BATCH_SIZE)]
    assert "--effective-batch-size" not in flags.values
    assert "--dataset" not in flags.values


@pytest.mark.parametrize("flag", ["--output-dir", "--resume", "--evaluate-only", "--config"])
def test_flags_that_a_proof_sets_are_refused(flag: str) -> None:
    with pytest.raises(UserError, match=f"can't pass {flag} to the recipe"):
        proof_flags(parse_flags([flag, "x"]), TrainingConfig, None, 32)


def test_a_switch_replaces_its_opposite() -> None:
    assert merged({"--compile": [], "--seed": ["1"]}, {"--no-compile": []}) == {
        "--seed": ["1"],
        "--no-compile": [],
    }


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        (["--seed", "1", "recipe.py"], "--seed stands before the recipe: put the recipe first"),
        (["recipe.py", "--updates", "3"], "--updates 3 is out of range: pass 8 or more"),
    ],
)
def test_mistakes_on_the_command_line_are_reported(words: list[str], mistake: str) -> None:
    with pytest.raises(UserError, match=mistake):
        read_command_line(words)


def test_an_unknown_check_is_reported() -> None:
    with pytest.raises(UserError, match="there is no check learnt: choose from learns, "):
        main([str(REPOSITORY / "recipes" / "mnist_mlp.py"), "--checks", "learnt"])


def test_checks_can_be_chosen_and_skipped() -> None:
    """`--skip` leaves checks out, of those that `--checks` names or of all that are usual."""
    usual = chosen_checks(None, None)
    assert "sharded" not in [check.name for check in usual]
    for check in usual:
        remaining = chosen_checks(None, check.name)
        assert remaining == [other for other in usual if other is not check]
    named = chosen_checks("sharded, learns,memory", "memory")
    assert [check.name for check in named] == ["learns", "sharded"]
    with pytest.raises(UserError, match=r"there is no check wait: choose from learns, "):
        chosen_checks(None, "waits,wait")
    with pytest.raises(UserError, match="--skip leaves no check to run: skip fewer checks"):
        chosen_checks("waits", "waits")


def test_built_in_data_of_the_recipes() -> None:
    recipes = REPOSITORY / "recipes"
    assert built_in_dataset(recipes / "mnist_mlp.py") == "digits"
    assert built_in_dataset(recipes / "bert.py") == "docstrings"
    assert built_in_dataset(REPOSITORY / "examples" / "regression.py") is None


@given(
    total=st.integers(20, 300),
    most=st.integers(8, 19),
    world_size=st.integers(1, 2),
    has_lengths=st.booleans(),
)
def test_few_samples_are_used_as_all_would_be(
    total: int, most: int, world_size: int, has_lengths: bool
) -> None:
    """Training uses each chosen sample at most once, and an evaluation uses each once."""
    lengths = np.arange(total) % 7 if has_lengths else None
    training = set()
    evaluation: list[int] = []
    for rank in range(world_size):
        order = limited_order(
            TrainingOrder(total, 2, 2, world_size, rank, 0, lengths), FewTrainingSamples, most
        )
        assert order.num_samples == most
        batches = order.micro_batches(1, 0)
        assert len(batches) == most // (4 * world_size) * 2
        training |= set(batches.flatten().tolist())
        other = limited_order(
            EvaluationOrder(total, 4, world_size, rank, lengths), FewEvaluationSamples, most
        )
        evaluation += [index for batch in other.batches() for index in batch.tolist()]
    assert len(training) == most // (4 * world_size) * 4 * world_size
    assert len(evaluation) == len(set(evaluation)) == most
    assert training <= set(evaluation) <= set(range(total))
    assert max(evaluation) - min(evaluation) >= total // 2  # spread over the split


@pytest.mark.parametrize("size", [2, 3, 64])
def test_evaluations_use_small_batches(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation still uses each sample once."""
    make_order = run_loaders.evaluation_order
    monkeypatch.setattr(run_loaders, "evaluation_order", make_order)  # restored after the test
    use_evaluation_batches_of(size)
    config = TrainingConfig(batch_size=16)
    accelerator: Any = SimpleNamespace(num_processes=1, process_index=0, mesh=None)
    samples = TensorSamples(rows=torch.ones(41, 2))
    batches = run_loaders.evaluation_order(config, accelerator, "test", samples).batches()
    assert max(map(len, batches)) == min(size, 41)
    assert torch.cat(batches).tolist() == [*range(41)]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    most=st.integers(8, 30),
    world_size=st.integers(1, 2),
)
def test_few_samples_of_blocks_are_used_as_all_would_be(
    sizes: list[int], most: int, world_size: int
) -> None:
    """With `--streaming`, samples are in blocks. A proof reads a few blocks, spread over the split.

    A resumed run uses the same samples.
    """
    total = sum(sizes)
    assume(total > most)
    blocks = Blocks(np.array(sizes), 4)
    training: list[int] = []
    evaluation: list[int] = []
    for rank in range(world_size):
        order = limited_order(
            TrainingOrder(total, 2, 2, world_size, rank, 0, None, blocks), FewTrainingSamples, most
        )
        assert order.num_samples == order.blocks.sizes.sum() == most
        batches = [batch.tolist() for batch in order.micro_batches(1, 0)]
        assert len(batches) == most // (4 * world_size) * 2
        assert [batch.tolist() for batch in order.micro_batches(1, 1)] == batches[2:]
        training += [index for batch in batches for index in batch]
        other = limited_order(
            EvaluationOrder(total, 4, world_size, rank, None, blocks), FewEvaluationSamples, most
        )
        evaluation += [index for batch in other.batches() for index in batch.tolist()]
    assert len(training) == len(set(training)) == most // (4 * world_size) * 4 * world_size
    assert len(evaluation) == len(set(evaluation)) == most
    assert set(training) <= set(evaluation) <= set(range(total))
    block_of_sample = np.searchsorted(np.cumsum(sizes), sorted(evaluation), side="right")
    used = np.unique(block_of_sample)
    assert len(used) <= max(8, 2 * most // min(sizes))
    if len(sizes) >= 8:
        assert len(used) >= 8


@given(st.integers(0, 1000))
def test_interruptions_are_of_each_manner_and_can_happen(seed: int) -> None:
    reference = run(launch(0))
    interruptions = draw_interruptions(random.Random(seed), reference)
    assert sorted(each.manner for each in interruptions) == sorted(MANNERS)
    for each in interruptions:
        assert 1 <= each.step <= UPDATES
        assert 0 <= each.share < 1


def test_interruptions_that_did_not_happen_are_named_in_words() -> None:
    """The words follow "the run ended before the proof could interrupt it"."""
    words = ["after an update", "in a save", "in an evaluation", "by SIGTERM"]
    assert missing_manners(run(launch(0))) == words


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    """A kill may come in the middle of a line. Any other damage is an error."""
    records = [started(), saved(3), evaluated({"accuracy": 0.5}, 3)]
    lines = b"".join(map(line_of, records))
    path = tmp_path / "launch-0-rank-0.jsonl"
    path.write_bytes(lines + line_of(saved(6))[:-9])
    (observed,) = read_processes(tmp_path)
    assert [*observed.records] == records
    path.write_bytes(b"{}\n" + lines)
    with pytest.raises(UserError, match=r"line 1 of .* is not a record"):
        read_processes(tmp_path)


@given(st.floats(), st.floats())
def test_any_number_of_a_record_is_read_as_it_was_written(loss: float, figure: float) -> None:
    """A loss of NaN is a result of a run, not damage."""
    written = [recorded(0, loss=loss), evaluated({"accuracy": figure})]
    for record in written:
        assert repr(RECORD.validate_json(line_of(record))) == repr(record)


def test_rows_are_compared_without_the_clock() -> None:
    row: MetricsRow = {
        "progress/global_step": 3,
        "train/loss": 0.5,
        "perf/samples_per_second": 10.0,
    }
    same: MetricsRow = {**row, "perf/samples_per_second": 20.0}
    assert first_differing_row([row], [same]) is None
    nan: MetricsRow = {**row, "train/loss": float("nan")}
    assert first_differing_row([nan], [{**nan, "train/loss": float("nan")}]) is None
    difference = first_differing_row([row], [{**row, "train/loss": 0.25}])
    assert difference == "the row of update 3 has train/loss 0.5 and 0.25"
    assert first_differing_row([row], []) == "the runs have 1 and 0 rows"
    difference = first_differing_row([{**row, "train/loss": None}], [{"progress/global_step": 3}])
    assert difference == "the row of update 3 has train/loss (NaN or infinite) and (missing)"


def receipt(*passed: bool | None) -> ProofReceipt:
    results = [
        CheckResult(
            name=f"check-{number}",
            question="Is it?",
            passed=value,
            compared="2 runs",
            causes=[] if value else ["a cause"],
            advice="",
            seconds=1.5,
        )
        for number, value in enumerate(passed)
    ]
    return ProofReceipt(
        format=FORMAT,
        passed=False not in passed,
        recipe="train.py",
        recipe_sha256="0123456789abcdef" * 4,
        recipe_commit="f" * 40,
        recipe_is_edited=True,
        code=[],
        command="recipes prove train.py",
        flags=["--epochs", "4"],
        seed=0,
        updates=32,
        processor="a processor",
        cores=2,
        environment=None,
        began="2026-01-02T03:04:05+00:00",
        seconds=3.0,
        checks=results,
    )


def test_a_receipt_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    written = receipt(True, False, None)
    write_receipt(path, written)
    assert read_receipt(path) == written


@pytest.mark.parametrize(
    "edit",
    [
        ('"passed": true', '"passed": "yes"'),
        ('"seed": 0', '"seed": "zero"'),
        ('"recipe_sha256": "0123', '"recipe_sha256": "xyz'),
        (f'"format": {FORMAT}', f'"format": {FORMAT + 1}'),
    ],
)
def test_a_damaged_receipt_is_refused(tmp_path: Path, edit: tuple[str, str]) -> None:
    path = tmp_path / "proof.json"
    write_receipt(path, receipt(True))
    text = path.read_text()
    assert edit[0] in text
    path.write_text(text.replace(*edit))
    with pytest.raises(UserError):
        read_receipt(path)


def test_the_commit_is_of_the_repository_that_the_recipe_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of git that name another repository, as in a git hook, do not matter."""
    own = tmp_path / "own"
    other = tmp_path / "other"
    commits = []
    for folder in (own, other):
        folder.mkdir()
        (folder / "train.py").write_text(f"# {folder.name}\n")
        commits.append(commit_all(folder))
    recipe = own / "train.py"
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert commit_of_file(recipe) == commits[0]
    assert is_edited(recipe) is False
    recipe.write_text("# edited\n")
    assert is_edited(recipe) is True
    alone = tmp_path / "alone.py"
    alone.write_text("")
    assert commit_of_file(alone) is None
    assert is_edited(alone) is None


def test_the_code_beside_a_recipe_changes_the_receipt(tmp_path: Path) -> None:
    """The recipe's file stays the same, while a module that it imports is edited."""
    (tmp_path / "train.py").write_text("import helper\n")
    helper = tmp_path / "helper.py"
    helper.write_text("SCALE = 1\n")
    commit = commit_all(tmp_path)
    codes = []
    for text in ("SCALE = 1\n", "SCALE = 2\n", "SCALE = 3\n"):
        helper.write_text(text)
        tree = collect_tree(tmp_path.resolve(), {helper.resolve()}).tree
        directory = tmp_path / f"run-{len(codes)}"
        (directory / PROVENANCE).mkdir(parents=True)
        attempt = Attempt(global_step=0, trees=[tree])
        write_json(directory / ATTEMPTS, Provenance(attempts=[attempt]).to_json())
        codes += proven_code([tmp_path / "nowhere", directory])
    assert {code.commit for code in codes} == {commit}
    assert codes[0].patch_sha256 is None
    assert len({code.patch_sha256 for code in codes}) == 3
    edited = receipt(True).model_copy(update={"code": codes[1:2]})
    digest = str(codes[1].patch_sha256)[:8]
    assert f"code with the patch {digest}" in readme_line(edited)
    outside_git = codes[1].model_copy(update={"commit": None})
    line = readme_line(receipt(True).model_copy(update={"code": [outside_git]}))
    assert f"code not in git, digest {digest}" in line
    assert "patch" not in line


def test_a_proof_in_which_no_check_applies_claims_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The proof does not pass, so the command exits with status 1, and the report says why."""
    empty = receipt(None, None)
    assert not has_passed(empty.checks)
    assert has_passed(receipt(None, True).checks)
    assert not has_passed(receipt(False, True).checks)
    assert readme_line(empty).startswith("– `recipes prove`: no check applies; ")
    show_report(empty, Path("proof.json"))
    assert "nothing is proven" in " ".join(capsys.readouterr().out.split())


def test_the_line_for_a_readme_counts_what_applies() -> None:
    line = readme_line(receipt(True, True, None))
    assert line.startswith("✓ `recipes prove`: 2 of 2 checks passed (check-0, check-1); ")
    assert "`train.py` 01234567; commit ffffffff, edited; 2026-01-02" in line
    assert readme_line(receipt(True, False)).startswith("✗ `recipes prove`: 1 of 2 checks passed")
    names = [row[0] for row in rows_of_checks(receipt(True, False, None).checks)]
    assert names == ["✓ check-0", "✗ check-1", "– check-2"]


@pytest.mark.parametrize("passed", [True, False, None])
@pytest.mark.parametrize("is_doubtful", [True, False])
def test_failure_says_first_that_runs_differ_anyway(passed: bool | None, is_doubtful: bool) -> None:
    """After a failure of `repeatable`, other failures may be consequences."""
    verdict = Verdict(passed, "10 rows", ("a cause",), "a change")
    check = Check("resumes", "it resumes", lambda bench: verdict, compares_runs=True)
    bench: Any = None
    result = run_check(check, bench, is_doubtful)
    if passed is False and is_doubtful:
        assert (result.causes, result.advice) == ([NOT_REPEATABLE, "a cause"], REPEAT_FIRST)
    else:
        assert (result.causes, result.advice) == (["a cause"], "a change")
    assert not is_known_to_vary([result])
    repeated = result.model_copy(update={"name": "repeatable"})
    assert is_known_to_vary([repeated]) == (passed is False)


def test_checks_that_compare_runs() -> None:
    """The others judge a single run, so their failures do not depend on its repetition."""
    independent = {check.name for check in CHECKS if not check.compares_runs}
    assert independent == {"learns", "repeatable", "waits", "memory"}


@pytest.mark.parametrize("output", ["folder", "file/proof.json"])
def test_a_receipt_that_cannot_be_written_is_reported_at_once(output: str, tmp_path: Path) -> None:
    """Otherwise, minutes of checks would be lost."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    receipt = tmp_path / output
    recipe = str(REPOSITORY / "recipes" / "mnist_mlp.py")
    with pytest.raises(UserError, match=f"--output {receipt} can't be made or written"):
        main([recipe, "--output", str(receipt), "--folder", str(tmp_path / "runs")])
    assert not (tmp_path / "runs").exists()
