"""Searches: which values they try, how they prune, resume after a kill, and what they leave."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import create_study
from optuna.trial import FrozenTrial, TrialState
from PIL import Image

from common.errors import UserError
from common.objective import Objective
from common.tools.recipe import load_recipe
from common.tools.tune.command import main, read_command_line
from common.tools.tune.records import read_settings, write_settings
from common.tools.tune.report import report_on_search
from common.tools.tune.search import Search
from common.tools.tune.settings import SearchSettings
from common.tools.tune.space import Distribution, command_words, parse_space
from common.tools.tune.study import finished_trials, open_study
from tests.launch import CONFIGS, REPOSITORY

STUB = Path(__file__).with_name("stub_recipe.py")
RATES = ("--learning-rate", "0.0001:0.1:log")

pytestmark = pytest.mark.usefixtures("forking_python", "restored_sigterm")  # for the trials


def space(*arguments: str) -> tuple[dict[str, Distribution], list[str]]:
    """Return the search space of flags for the stub, and the flags that all trials share."""
    return parse_space(arguments, load_recipe(STUB))


def trials_of(study: Path, objective: str = "accuracy:max") -> list[FrozenTrial]:
    """Return the trials of a study, by number."""
    search = read_settings(study)
    assert search is not None
    distributions, _ = space(*search.flags)
    return open_study(study, Objective.parse(objective), prune=True, space=distributions).trials


def states(study: Path) -> list[str]:
    """Return how the trials of a study ended, by number."""
    return [trial.state.name for trial in trials_of(study)]


def read(path: Path) -> dict[str, Any]:
    """Return a JSON file."""
    return json.loads(path.read_text())


# The search space


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--learning-rate", "0.01:1:log"], FloatDistribution(0.01, 1, log=True)),
        (["--learning-rate=0.01:1"], FloatDistribution(0.01, 1)),
        (["--warmup-steps", "0:50"], IntDistribution(0, 50)),
        (["--batch_size", "8:512:log"], IntDistribution(8, 512, log=True)),
        (["--batch-size", "64,128"], CategoricalDistribution(("64", "128"))),
        (["--hidden-sizes", "8,16 16"], CategoricalDistribution(("8", "16 16"))),
        (["--compile", "true,false"], CategoricalDistribution(("true", "false"))),
    ],
)
def test_ranges_and_choices(arguments: list[str], expected: Distribution) -> None:
    """A flag's value is a range of integers or real numbers, or a list of choices."""
    name = arguments[0].partition("=")[0].removeprefix("--").replace("_", "-")
    assert space(*arguments, "--seed", "3", "--no-test-only") == (
        {name: expected},
        ["--seed", "3", "--no-test-only"],
    )


def test_names_are_not_searched() -> None:
    """Commas and colons in names and paths have no special meaning."""
    arguments = ["--dataset", "a,b:c", "--hidden-sizes", "8", "16", *RATES]
    distributions, shared = space(*arguments)
    assert list(distributions) == ["learning-rate"]
    assert shared == arguments[:-2]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--learning-rate", "0.1"], "no flag has several values to try: pass a range"),
        (
            ["--learning-rate", "1:0.1"],
            "): write low:high, two numbers with low below high, or",
        ),
        (["--learning-rate", "0:1:log"], "or low:high:log with low above 0"),
        (["--learning-rate", "a:b"], "could not convert string to float: 'a'"),
        (["--learning-rate", "0.1:1:linear"], "low:high:log"),
        (["--batch-size", "0.5:2"], "invalid literal for int"),
        (["--batch-size", "64,"], "empty"),
        (["--batch-size", "0:64"], "--batch-size 0 is out of range"),
        (["--output-dir", "here", *RATES], "leave --output-dir out"),
        (["--resume", "auto", *RATES], "leave --resume out"),
        (["stray", *RATES], "stray is a value without a flag"),
        ([*RATES, *RATES], "is given twice"),
    ],
)
def test_mistakes_are_found_before_any_trial(arguments: list[str], sentence: str) -> None:
    """One sentence says what the recipe would refuse or what cannot be searched."""
    with pytest.raises(UserError) as refused:
        space(*arguments)
    assert sentence in refused.value.message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--batch-size", "64,many"], "many"), (["--learning-rat", "0.1:1"], "--learning-rate FLOAT")],
)
def test_recipes_parser_refuses_values_and_flags(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value may have the wrong type, or a flag be unknown."""
    with pytest.raises(SystemExit) as refused:
        space(*arguments)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_arguments_of_a_trial() -> None:
    """Values are rounded for people to read, and stay within their range."""
    distributions, _ = space("--learning-rate", "0.01:0.99999", "--batch-size", "8:64")
    words = command_words(distributions, {"learning-rate": 0.123456, "batch-size": 32})
    assert words == ["--learning-rate", "0.1235", "--batch-size", "32"]
    edge = command_words(distributions, {"learning-rate": 0.99999, "batch-size": 8})
    assert edge[:2] == ["--learning-rate", "0.99999"]
    sizes, _ = space("--hidden-sizes", "8,16 16", "--compile", "true,false")
    assert command_words(sizes, {"hidden-sizes": "16 16", "compile": "false"}) == [
        *("--hidden-sizes", "16", "16", "--no-compile")
    ]


@pytest.mark.parametrize("name", ["missing.py", "test_search.py"])
def test_file_that_is_no_recipe_is_refused(name: str) -> None:
    """The file may be missing or have no `Config`, and the message names it."""
    with pytest.raises(UserError, match=name):
        load_recipe(STUB.with_name(name))


def test_recipe_that_fails_when_it_is_loaded_names_the_line(tmp_path: Path) -> None:
    """The line is in the recipe, or in a module that it imports from its own folder."""
    recipe = tmp_path / "broken.py"
    check = f"correct the file, and check it with python {recipe} --help"
    recipe.write_text("import json\n\nfoo\n")
    with pytest.raises(UserError) as refused:
        load_recipe(recipe)
    cause = "broken.py, line 3: NameError: name 'foo' is not defined"
    assert refused.value.message == f"{recipe} fails when Python loads it ({cause}): {check}"
    recipe.write_text("import no_such_package\n")
    with pytest.raises(UserError, match="install the package that has no_such_package, or correct"):
        load_recipe(recipe)
    recipe.write_text("x = (\n")
    with pytest.raises(UserError, match=r"SyntaxError: .*broken\.py, line 1"):
        load_recipe(recipe)
    (tmp_path / "helper_of_broken.py").write_text("import json\njson.loads('{')\n")
    recipe.write_text("import helper_of_broken\n")
    with pytest.raises(UserError, match=r"\(helper_of_broken\.py, line 2: JSONDecodeError: "):
        load_recipe(recipe)


def test_recipe_must_state_a_valid_objective(tmp_path: Path) -> None:
    """Otherwise there is nothing to search for."""
    script = tmp_path / "aimless.py"
    script.write_text(STUB.read_text().replace('OBJECTIVE = "accuracy:max"', 'OBJECTIVE = "best"'))
    with pytest.raises(UserError, match="objective 'best'"):
        load_recipe(script)
    script.write_text(STUB.read_text().replace("OBJECTIVE", "GOAL"))
    with pytest.raises(UserError, match="add OBJECTIVE"):
        load_recipe(script)


@pytest.mark.parametrize(("mode", "ranked"), [("max", [1, 0, 2]), ("min", [2, 0, 1])])
def test_best_trial_follows_the_direction(mode: str, ranked: list[int], tmp_path: Path) -> None:
    """Zero and negative values count. A search for another objective is refused."""
    objective = Objective("score", mode)
    study = open_study(tmp_path, objective, prune=True, space={})
    for value in (0.0, 2.0, -3.0):
        study.tell(study.ask(), value)
    assert [trial.number for trial in finished_trials(study, objective)] == ranked
    with pytest.raises(UserError, match=f"objective score:{mode}, but .* OBJECTIVE is rmse:min"):
        open_study(tmp_path, Objective("rmse", "min"), prune=True, space={})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            TrialState.FAIL,
            "no trial of the search finished (2 trials failed; the last reason is: no such data): "
            "correct the cause of the failures, and start a new search",
        ),
        (TrialState.COMPLETE, "were removed, or have no config.json: put them back, or run more"),
    ],
)
def test_search_without_results_says_why(state: TrialState, message: str, tmp_path: Path) -> None:
    """The trials failed, or their directories are gone."""
    objective = Objective("accuracy", "max")
    study = open_study(tmp_path, objective, prune=True, space={})
    for reason in (None, "no such data"):
        trial = study.ask()
        if reason is not None:
            trial.set_user_attr("reason", reason)
        study.tell(trial, 0.5 if state == TrialState.COMPLETE else None, state)
    settings: Any = None
    search = Search(tmp_path, settings, {}, (), objective, study)
    with pytest.raises(UserError) as refused:
        report_on_search(search, load_recipe(STUB))
    assert message in refused.value.message
    assert ("--trials 5" in refused.value.message) == (state == TrialState.COMPLETE)


# A whole search


def test_search_can_minimise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Zero and negative values count, and the picture is drawn."""
    script = tmp_path / "less.py"
    script.write_text(STUB.read_text().replace('"accuracy:max"', '"rmse:min"'))
    study = tmp_path / "study"
    rates = ["--learning-rate", "0.1,0.00001", "--epochs", "1"]
    main([str(script), *rates, "--trials", "2", "--study", str(study)])
    trials = trials_of(study, "rmse:min")
    score_by_rate = {"0.1": -1.0, "0.00001": 0.0}
    for trial in trials:
        assert trial.value == score_by_rate[trial.params["learning-rate"]]
    assert {trial.value for trial in trials} == {-1.0, 0.0}
    output = capsys.readouterr().out
    assert re.search(r"best: trial-\d+, validation RMSE -1.0000\n", output)
    assert "--learning-rate 0.1 --epochs 1" in output.splitlines()[-1]
    with Image.open(study / "search.png") as image:
        assert min(image.size) > 400


@pytest.mark.slow
def test_search_ranks_settings_over_their_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trials that differ in the seed alone are one group in the report."""
    flags = ["--learning-rate", "0.1,0.00001", "--seed", "0,1", "--epochs", "1"]
    main([str(STUB), *flags, "--trials", "6", "--study", str(tmp_path / "study")])
    output = " ".join(capsys.readouterr().out.split())
    assert re.search(r"best: trial-\d+ and \d more with these settings, mean validation", output)
    assert re.search(r"trial-\d+ and \d more \(.+=.+\) against trial-\d+", output)


@pytest.mark.slow
def test_search_prunes_and_finds_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trial has a run directory, bad trials stop early, and the best command is printed."""
    monkeypatch.chdir(tmp_path)
    flags = ["--batch-size", "64,128", "--epochs", "4", "--epoch-seconds", "0.3"]
    main([str(STUB), *RATES, *flags, "--trials", "9"])
    output = capsys.readouterr().out
    (study,) = (tmp_path / "runs").glob("tune-stub_recipe-*")
    trial_states = states(study)
    assert len(trial_states) == 9
    assert {"COMPLETE", "PRUNED"} == set(trial_states)
    assert trial_states[:5] == ["COMPLETE"] * 5
    trials = trials_of(study)
    for trial in trials:
        status = read(study / f"trial-{trial.number:03d}" / "status.json")
        stopped = trial.state == TrialState.PRUNED
        assert status["status"] == ("preempted" if stopped else "finished")
        # Intermediate values are numbered in hundredths of epochs.
        assert max(trial.intermediate_values) == 10 * status["global_step"]
        assert not stopped or 10 < status["global_step"] < 40
    best = max(trials, key=lambda trial: trial.value if trial.state == TrialState.COMPLETE else 0)
    assert f"best: trial-{best.number:03d}, validation accuracy {best.value:.4f}" in output
    rate = float(f"{best.params['learning-rate']:.4g}")
    batch = best.params["batch-size"]
    assert output.splitlines()[-1] == (
        f"python {STUB} --learning-rate {rate} --batch-size {batch} "
        "--epochs 4 --epoch-seconds 0.3 --validation-share 0.1 --mixed-precision no"
    )
    assert f"trial-{best.number:03d} (baseline)" in output
    config = read(study / f"trial-{best.number:03d}" / "config.json")["config"]
    assert config["validation_share"] == 0.1
    assert config["keep_checkpoints"] == 1
    with Image.open(study / "search.png") as image:
        assert min(image.size) > 600


@pytest.mark.slow
def test_killed_search_can_be_resumed(tmp_path: Path) -> None:
    """After kill -9 of the search, its trial stops, resumes later where it was, and counts once."""
    study = tmp_path / "study"
    command = search_command(study, "--trials", "3", "--epochs", "3", "--epoch-seconds", "0.5")
    search = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    second = study / "trial-001"
    wait_until(lambda: (second / "metrics.jsonl").exists())
    search.kill()
    search.wait()
    wait_until(lambda: not trial_processes(study))
    assert read(second / "status.json")["status"] == "preempted"
    assert states(study) == ["COMPLETE", "RUNNING"]
    before = (second / "metrics.jsonl").read_text()
    main(["--study", str(study)])
    assert states(study) == ["COMPLETE"] * 3
    assert (second / "metrics.jsonl").read_text().startswith(before)
    log = (study / "trial-001.log").read_text()
    assert re.findall(r"begins after step (\d+)", log) == ["0", str(10 * before.count("\n"))]
    assert sorted(path.name for path in study.glob("trial-???")) == [
        "trial-000",
        "trial-001",
        "trial-002",
    ]
    main(["--study", str(study), "--trials", "4"])
    assert states(study) == ["COMPLETE"] * 4


def search_command(study: Path, *flags: str) -> list[str]:
    """Return the command of a search in a process of its own."""
    tune = [sys.executable, "-m", "common.tools", "tune"]
    return [*tune, str(STUB), *RATES, "--study", str(study), *flags]


def trial_processes(study: Path) -> list[psutil.Process]:
    """Return the processes of a study's trials."""
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(f"{study}/trial-" in word for word in words):
            processes.append(process)
    return processes


def wait_until(condition: Callable[[], bool], timeout: float = 60) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_interrupted_search_says_how_to_resume(tmp_path: Path) -> None:
    """Ctrl-C lets the trial save. Until then, no other process may search there."""
    study = tmp_path / "study"
    command = search_command(study, "--epochs", "40", "--epoch-seconds", "0.5")
    search = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: (study / "trial-000" / "metrics.jsonl").exists())
    with pytest.raises(UserError, match=r"another job is writing to .* another --study$"):
        main(["--study", str(study)])
    search.send_signal(signal.SIGINT)
    output, _ = search.communicate(timeout=60)
    assert search.returncode == 130
    assert "continue with recipes tune --study study" in output
    assert read(study / "trial-000" / "status.json")["status"] == "preempted"
    assert not trial_processes(study)


@pytest.mark.slow
def test_failed_trials_do_not_end_a_search(tmp_path: Path) -> None:
    """A failed trial keeps its reason, and the search continues."""
    study = tmp_path / "study"
    flags = ["--learning-rate", "0.05,0.5", "--fail-above", "0.1", "--epochs", "1"]
    main([str(STUB), *flags, "--trials", "3", "--study", str(study)])
    trials = trials_of(study)
    assert {trial.state.name for trial in trials} == {"COMPLETE", "FAIL"}
    for trial in trials:
        failed = trial.params["learning-rate"] == "0.5"
        assert (trial.state == TrialState.FAIL) == failed
        if failed:
            assert trial.user_attrs["reason"] == "learning rate 0.5 is too high"


@pytest.mark.slow
def test_search_whose_first_trials_all_fail_stops(tmp_path: Path) -> None:
    """Three failures at the start mean that the command is wrong, and its reason is shown."""
    study = tmp_path / "study"
    advice = "continue with recipes tune --study .*, or start a new search with other values$"
    with pytest.raises(
        UserError, match=rf"all trials so far failed; .*rate .* is too high.*{advice}"
    ):
        main([str(STUB), *RATES, "--fail-above", "1e-9", "--study", str(study)])
    assert states(study) == ["FAIL"] * 3


def test_trial_that_is_killed_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the signal and the last line that the trial printed."""
    script = tmp_path / "dying.py"
    dying = "    print('about to die', flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    source = STUB.read_text()
    place = source.index("    if config.learning_rate > config.fail_above")
    script.write_text(source[:place] + dying + source[place:])
    monkeypatch.chdir(tmp_path)
    reason = "all trials so far failed; .*SIGKILL: about to die"
    with pytest.raises(UserError, match=rf"{reason} .*, and start a new search$"):
        main([str(script), *RATES, "--trials", "1"])


def test_search_on_test_data_is_refused(tmp_path: Path) -> None:
    """A recipe that evaluates on test data cannot be searched, and its trial ends."""
    study = tmp_path / "study"
    with pytest.raises(UserError, match="must not choose trials: add a validation split"):
        main([str(STUB), *RATES, "--test-only", "--epoch-seconds", "0.2", "--study", str(study)])
    assert states(study) == ["FAIL"]
    assert not trial_processes(study)


@pytest.mark.parametrize(
    ("share", "advice"),
    [
        ([], "add a validation split to its data"),
        (
            ["--validation-share", "0"],
            "start a new search without --validation-share, or add a validation split to its data",
        ),
    ],
)
def test_advice_for_a_search_on_test_data(share: list[str], advice: str, tmp_path: Path) -> None:
    """A share of 0 leaves no validation data, so it may be the reason."""
    settings = SearchSettings(str(STUB), (*RATES, *share), None)
    study = create_study()
    search = Search(tmp_path, settings, {}, share, Objective.parse("accuracy:max"), study)
    flags = {"validation_share": 0.0 if share else 0.1}
    record = SimpleNamespace(splits=("test", "test"), flags=flags)
    with pytest.raises(UserError) as refused:
        search.require_validation_data(study.ask(), record)  # type: ignore[arg-type]
    assert refused.value.advice == advice


def test_trial_without_evaluation_is_refused(tmp_path: Path) -> None:
    """A run that ends before its first evaluation has no score. The message names the flag."""
    script = tmp_path / "blind.py"
    script.write_text(STUB.read_text().replace('f"val/', 'f"other/'))
    study = tmp_path / "study"
    with pytest.raises(UserError, match="start a new search with --eval-every"):
        main([str(script), *RATES, "--study", str(study)])
    assert states(study) == ["FAIL"]


def test_preempted_trial_is_left_for_later(tmp_path: Path) -> None:
    """A preempted trial ends the search, which can resume with this trial."""
    script = tmp_path / "preempted.py"
    script.write_text(
        STUB.read_text().replace(
            'say("running")\n    signal',
            (
                "say('running')\n    stop(15, None) if step == 0 and not config.resume else None\n"
                "    signal"
            ),
        )
    )
    study = tmp_path / "study"
    with pytest.raises(UserError, match="was stopped by a signal"):
        main([str(script), *RATES, "--trials", "1", "--study", str(study)])
    assert states(study) == ["RUNNING"]


def test_search_is_not_mixed_with_another(tmp_path: Path) -> None:
    """A study keeps its recipe and flags, and a folder with other contents is left alone."""
    study = tmp_path / "study"
    main([str(STUB), *RATES, "--epochs", "1", "--trials", "1", "--study", str(study)])
    for words in (
        [str(STUB), "--learning-rate", "0.1:1"],
        ["recipes/resnet.py"],
        ["--config-file", str(CONFIGS / "cpu.yaml")],
    ):
        with pytest.raises(UserError, match="leave the recipe, its flags and --config-file out"):
            read_command_line([*words, "--study", str(study)])
    directory, settings = read_command_line(
        [str(STUB), *RATES, "--epochs", "1", "--study", str(study)]
    )
    assert (directory, settings.trials) == (study, 1)
    for words in ([str(STUB)], []):
        with pytest.raises(UserError, match="contains files, but no search to continue"):
            read_command_line([*words, "--study", str(study / "trial-000")])
    with pytest.raises(UserError, match="correct --study, or pass a recipe first, such as"):
        read_command_line(["--study", str(tmp_path / "none")])
    with pytest.raises(UserError, match="the recipe is missing: pass a recipe first"):
        read_command_line([])
    with pytest.raises(UserError, match="1 or more"):
        read_command_line([str(STUB), "--trials", "0"])
    with pytest.raises(UserError, match=r"none\.yaml does not exist"):
        read_command_line([str(STUB), "--config-file", "none.yaml"])


@pytest.mark.parametrize(
    ("recipe", "config_file", "missing"),
    [
        ("none.py", None, r"the recipe none\.py"),
        (str(STUB), "none.yaml", r"the --config-file none\.yaml"),
    ],
)
def test_continued_search_needs_its_files(
    recipe: str, config_file: str | None, missing: str, tmp_path: Path
) -> None:
    """Other files would be a different search, so the advice is to go where they are."""
    write_settings(tmp_path, SearchSettings(recipe, tuple(RATES), config_file))
    with pytest.raises(UserError, match=f"{missing}, .*: repeat the command in the folder"):
        read_command_line(["--study", str(tmp_path)])


@pytest.mark.slow
def test_recipe_imports_no_library_of_the_tools() -> None:
    """Otherwise every training run would load Optuna and matplotlib."""
    code = (
        "import sys, recipes.mnist_mlp\n"
        "print({'optuna', 'matplotlib', 'sqlalchemy', 'wandb_workspaces'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert answer.stdout.strip() == "set()"
