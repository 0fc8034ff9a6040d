"""Mistakes as a user sees them, one launch for each kind. Other mistakes are in tests/unit."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.launch import (
    RECIPES,
    REPOSITORY,
    Finished,
    Runner,
    clean_environment,
    launch_command,
    plain,
)
from tests.local_data import write_image_folder


def message_of(run: Finished) -> str:
    """Return the one message of a failed run, after checking that it printed no other.

    The launcher's own report of a failed process may follow it.
    """
    assert run.returncode != 0, run.explain()
    assert str(REPOSITORY / "common") not in run.errors, run.explain()
    assert f'File "{REPOSITORY}' not in run.errors, run.explain()
    printed = run.printed()
    if "Unrecognized options" in printed:
        assert printed.count("Unrecognized options:") == 1, run.explain()
        return plain(printed)
    messages = re.findall(r"^error: .*$", printed, re.MULTILINE)
    assert len(messages) == 1, run.explain()
    assert len(messages[0]) < 500
    return messages[0]


def test_two_processes_report_a_mistyped_flag_once(runner: Runner) -> None:
    """A mistyped flag ends both processes with one message, which suggests the right flag.

    No run directory is made.
    """
    flags = ("--lerning-rate", 0.1)
    run = runner.run("mnist_mlp", *flags, launcher="two forks", succeeds=False, timeout=120)
    message = message_of(run)
    assert "--lerning-rate" in message
    assert "--learning-rate" in message
    assert not run.directory.exists()


def test_unsupported_precision_gives_one_line(runner: Runner) -> None:
    """A precision that the machine lacks ends the run with status 1 and one sentence."""
    flags = ("--mixed-precision", "fp16")
    run = runner.run("mnist_mlp", *flags, launcher="fork", succeeds=False)
    message = message_of(run)
    assert "fp16" in message
    assert "--mixed-precision" in message
    assert "Traceback" not in run.output + run.errors
    assert run.returncode == 1
    assert not (run.directory / "model").exists()


def test_mistake_that_only_rank_0_finds_ends_both_processes(runner: Runner) -> None:
    """A named data set that can't be read ends both processes; no other data replace it.

    The one message says which data set to pass without the Hub.
    """
    flags = ("--dataset", "mnist")
    run = runner.run("mnist_mlp", *flags, launcher="two forks", succeeds=False, timeout=120)
    message = message_of(run)
    assert "ylecun/mnist" in message
    assert "digits" in message
    assert run.status["status"] == "failed"
    assert not run.status["resumable"]
    assert "ylecun/mnist" in run.status["reason"]


BUSY_MACHINE = """
import os, runpy, signal, sys, time
from common.lifecycle.end import closing, error_report, releasing

error_report.SECONDS_TO_CLAIM = 0.5
before, after = ([float(seconds) for seconds in words.split(",")] for words in sys.argv[1:3])
rank = int(os.environ["RANK"])
close, release = closing.close, releasing.release

def close_late(*arguments, **named):
    time.sleep(before[rank])
    close(*arguments, **named)

def release_slowly(*arguments, **named):
    release(*arguments, **named)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher may be slow, too
    time.sleep(after[rank])

closing.close, releasing.release = close_late, release_slowly
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [("1,0", "0,0"), ("1,0", "0,1"), ("0,1", "1,0"), ("0.5,0", "1,1")],
    ids=["rank 0 is late", "rank 0 is late and rank 1 slow", "rank 0 is slow", "both at once"],
)
def test_ranks_that_meet_a_mistake_at_different_times_print_it_once(
    runner: Runner, tmp_path: Path, before: str, after: str
) -> None:
    """Whichever rank meets a mistake first, and whichever exits first, one message appears.

    Args:
        before: seconds by which each rank meets the mistake later.
        after: seconds between the end of the run and the end of the process, by rank.
    """
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog"], per_class=5)
    (folder / "train" / "cat" / "002.png").write_bytes(b"not an image")
    script = tmp_path / "busy_machine.py"
    script.write_text(BUSY_MACHINE)
    recipe = REPOSITORY / "recipes" / "mnist_mlp.py"
    flags = ("--dataset", folder, "--tracker", "none", "--output-dir", tmp_path / "run")
    run = runner.run(
        *(script, before, after, recipe, *flags),
        launcher="two forks",
        output_directory=False,
        succeeds=False,
        timeout=120,
    )
    assert "002.png" in message_of(run)


@pytest.mark.slow
def test_launcher_that_starts_too_few_processes_is_refused(runner: Runner, tmp_path: Path) -> None:
    """A launch with `--cpu --num_processes 2` is refused, because it starts one process only."""
    launch = launch_command("accelerate", runner.python)
    words = [*launch, "--cpu", "--num_processes", "2", "--num_machines", "1"]
    script = str(REPOSITORY / "recipes" / "mnist_mlp.py")
    run = subprocess.run([*words, script], env=clean_environment(runner.folder), cwd=tmp_path,
                         capture_output=True, text=True, timeout=120)  # fmt: skip
    assert run.returncode != 0
    assert run.stderr.count("error: the launcher started one process, although its command") == 1
    assert "multi_cpu.yaml" in run.stderr
    assert not (tmp_path / "runs").exists()


LOADED_BY_HELP = """
import json, runpy, sys
for recipe in sys.argv[1:]:
    sys.argv = [recipe, "--help"]
    try:
        runpy.run_path(recipe, run_name="__main__")
    except SystemExit as end:
        assert not end.code, end.code
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""


def test_help_is_quick(runner: Runner, tmp_path: Path) -> None:
    """`--help` imports no slow library, so that it and mistakes in flags are quick."""
    script = tmp_path / "help.py"
    script.write_text(LOADED_BY_HELP)
    recipes = [REPOSITORY / "recipes" / f"{recipe}.py" for recipe in RECIPES]
    run = runner.run(
        script, *recipes, launcher="plain python", output_directory=False, succeeds=False
    )
    assert run.returncode == 0, run.explain()
    text, loaded = run.output.rstrip().rsplit("\n", 1)
    assert text.count("Updates between log lines") == len(RECIPES)
    assert not {"transformers", "datasets", "wandb", "sklearn"} & set(json.loads(loaded))
