"""A script in a fork of the tests' template sees what it would see in a fresh interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.harness.ports import free_port
from tests.jobs import MLP, Job, final_weights, rows_without_clock
from tests.launch import (
    ACCELERATE,
    CONFIGS,
    LAUNCHES,
    SHARDED,
    Finished,
    Launcher,
    Runner,
    clean_environment,
    launch_command,
    staying_on_one_core,
)
from tests.template import OF_TWO

SEEN = """
import json, os, random, signal, sys
from dataclasses import dataclass
import torch

@dataclass
class Pickled:
    value: int

print(json.dumps({
    "words": sys.argv, "name": __name__, "file": __file__, "path": sys.path,
    "folder": os.getcwd(), "environment": dict(os.environ), "executable": sys.executable,
    "main": sys.modules["__main__"].Pickled is Pickled, "cores": len(os.sched_getaffinity(0)),
    "leads": os.getsid(0) == os.getpgid(0), "input": sys.stdin.read(), "flags": str(sys.flags),
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE)],
    "tasks": len(os.listdir("/proc/self/task")), "threads": torch.get_num_threads(),
}))
print("said", file=sys.stderr)
"""


def run_script(
    runner: Runner, folder: Path, text: str, launcher: Launcher, *words: str
) -> Finished:
    """Write a short script to `folder` and run it there."""
    script = folder / "script.py"
    script.write_text(text)
    return runner.run(
        script,
        *words,
        launcher=launcher,
        working_directory=folder,
        output_directory=False,
        succeeds=False,
        environment={"WANDB_DIR": str(folder)},
        timeout=60,
    )


@pytest.mark.slow
def test_script_sees_what_a_fresh_interpreter_shows(runner: Runner, tmp_path: Path) -> None:
    """A fork and a fresh interpreter show a script the same state.

    The state is its arguments, variables, folders, cores, signals, threads and `__main__`.
    """
    seen = []
    for launcher in ("fork", "plain python"):
        run = run_script(runner, tmp_path, SEEN, launcher, "--flag", "a value")
        assert run.returncode == 0, run.explain()
        assert run.errors == "said\n"
        seen.append(json.loads(run.output))
    assert seen[0] == seen[1]
    assert seen[0]["words"] == [str(tmp_path / "script.py"), "--flag", "a value"]
    assert seen[0]["path"][0] == str(tmp_path)


def command(runner: Runner, *words: object, **options: Any) -> subprocess.Popen[str]:
    """Start Python as a command, in a fork."""
    environment = clean_environment(runner.folder) | options.pop("environment", {})
    return subprocess.Popen(
        [str(runner.python), *map(str, words)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


# It prints whether it is a fork: only forks have torch imported at the beginning.
IS_FORK = "import sys; print('torch' in sys.modules, sys.argv[1:], sys.stdin.read())\n"


@pytest.mark.slow
@pytest.mark.parametrize("words", [("script.py", "-m", "a b"), ("-m", "script", "a")])
def test_command_sees_what_a_fresh_interpreter_shows(
    words: tuple[str, ...], runner: Runner, tmp_path: Path
) -> None:
    """The forking command shows a script the state of a fresh interpreter, except for its name.

    `sys.executable` is the forking command itself, so that processes which use it fork as well.
    """
    (tmp_path / "script.py").write_text(SEEN)
    seen = []
    core = staying_on_one_core()
    for python in (runner.python, sys.executable):
        run = subprocess.run(
            [python, *words],
            env=clean_environment(runner.folder) | {"RANK": "0", "ACCELERATE_USE_CPU": "yes"},
            cwd=tmp_path,
            input="typed",
            capture_output=True,
            text=True,
            start_new_session=True,
            preexec_fn=core,
            timeout=60,
        )
        assert (run.returncode, run.stderr) == (0, "said\n")
        seen.append(json.loads(run.stdout))
    assert seen[0].pop("executable") == str(runner.python)
    assert seen[1].pop("executable") == sys.executable
    assert seen[0] == seen[1]
    assert seen[0]["input"] == "typed"


def test_command_forks_unless_imports_would_differ(runner: Runner, tmp_path: Path) -> None:
    """The command starts a fresh interpreter if variables could change the imported libraries.

    Libraries read some variables only once, and the template has imported them already.
    """
    script = tmp_path / "script.py"
    script.write_text(IS_FORK)
    for variables, is_fork in (
        ({}, True),
        ({"OMP_NUM_THREADS": "1", "LOCAL_RANK": "1", "TMPDIR": "/tmp"}, True),
        ({"TORCH_COMPILE_DISABLE": "1"}, True),
        ({"TORCH_LOGS": "dynamo"}, False),
        ({"HF_HUB_OFFLINE": "0"}, False),
        ({"PYTHONPATH": "/tmp"}, False),
    ):
        with command(runner, script, environment=variables, stdin=subprocess.DEVNULL) as process:
            assert process.communicate(timeout=60) == (f"{is_fork} [] \n", ""), variables
    with command(runner, "-c", IS_FORK, "x", stdin=subprocess.DEVNULL) as process:
        assert process.communicate(timeout=60) == ("False ['x'] \n", "")


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(75)", 75),
        ("raise SystemExit('error: a sentence')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_command_ends_as_the_script_does(
    runner: Runner, tmp_path: Path, end: str, status: int
) -> None:
    """The command ends with the script's status or by the signal that ended the script."""
    script = tmp_path / "script.py"
    script.write_text(f"import os, signal, sys\n{end}")
    with command(runner, script) as process:
        assert process.wait(60) == status


# The handler writes without `print`: the signal may come while the last line is being printed.
WAIT = """
import os, signal, time
def note(number, frame):
    os.write(1, (signal.Signals(number).name + "\\n").encode())
    raise SystemExit(3)
signal.signal(signal.SIGTERM, note)
print(os.getpid(), signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN, flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_to_the_command_reach_the_script(
    runner: Runner, tmp_path: Path, number: signal.Signals
) -> None:
    """The script gets the command's signals, and dies with a killed command.

    A signal that the command ignores is ignored in the script as well.
    """
    script = tmp_path / "script.py"
    script.write_text(WAIT)

    def ignore() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    with command(runner, script, preexec_fn=ignore) as process:
        assert process.stdout is not None
        pid, is_ignored = process.stdout.readline().split()
        assert is_ignored == "True"
        fork = psutil.Process(int(pid))
        process.send_signal(signal.SIGUSR1)
        process.send_signal(number)
        was_told = number == signal.SIGTERM
        assert process.wait(30) == (3 if was_told else -number)
        assert process.stdout.read() == ("SIGTERM\n" if was_told else "")
        assert not psutil.wait_procs([fork], timeout=30)[1]


def test_launchers_run_and_start_ranks_as_forks(runner: Runner, tmp_path: Path) -> None:
    """The folder's `accelerate launch` and `torchrun` run their own code and start forks."""
    script = tmp_path / "script.py"
    # One write for each rank: `print` would write each word on its own, as launchers start Python
    # without buffers, and the words of two ranks would mix.
    words_of_rank = "{os.environ['RANK']} {'torch' in sys.modules} {sys.argv[1:]}"
    script.write_text(f'import os, sys\nsys.stdout.write(f"{words_of_rank}\\n")\n')
    multi_cpu = ("--config_file", CONFIGS / "multi_cpu.yaml", "--main_process_port", free_port())
    for name, words in (
        ("accelerate", ("launch", *multi_cpu)),
        ("torchrun", ("--nproc-per-node", 2, "--master-port", free_port())),
    ):
        run = subprocess.run(
            [str(runner.python.with_name(name)), *map(str, (*words, script, "--flag"))],
            env=clean_environment(runner.folder),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.returncode == 0, run.stderr
        lines = sorted(run.stdout.split("\n")[:-1])
        assert lines == [f"{n} True ['--flag']" for n in range(2)]


@pytest.mark.parametrize("launcher", ["fork", "plain python"])
def test_end_of_a_script_is_reported(runner: Runner, tmp_path: Path, launcher: Launcher) -> None:
    """A run reports the script's status, traceback and signal, and exit handlers run."""
    leave = "import atexit, os, sys\natexit.register(lambda: print('left'))\n"
    assert run_script(runner, tmp_path, leave + "sys.exit(75)", launcher).returncode == 75
    failed = run_script(runner, tmp_path, leave + "raise ValueError('wrong')", launcher)
    assert failed.returncode == 1
    assert failed.output == "left\n"
    assert failed.errors.endswith("ValueError: wrong\n")
    refuse = "raise SystemExit('error: a sentence')"
    refused = run_script(runner, tmp_path, leave + refuse, launcher)
    assert (refused.returncode, refused.errors) == (1, "error: a sentence\n")
    killed = run_script(runner, tmp_path, leave + "os.kill(os.getpid(), 9)", launcher)
    assert (killed.returncode, killed.output) == (-signal.SIGKILL, "")


def test_random_numbers_that_nobody_seeded_differ(runner: Runner, tmp_path: Path) -> None:
    """Two forks draw different unseeded random numbers.

    Otherwise a recipe that forgets to seed would seem repeatable.
    """
    text = "import random, numpy, torch\n"
    text += "print(random.random(), numpy.random.rand(), torch.rand(()).item())"
    drawn = [run_script(runner, tmp_path, text, "fork").output.split() for _ in range(2)]
    assert not set(drawn[0]) & set(drawn[1])


def test_two_ranks_are_started_as_by_the_launcher(runner: Runner, tmp_path: Path) -> None:
    """Two ranks get the variables that `accelerate launch` sets for `multi_cpu.yaml`."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", str(CONFIGS / "multi_cpu.yaml"), "script.py"]
    parsed, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    expected = differing(prepare_multi_gpu_env(parsed), os.environ)
    assert expected == OF_TWO
    text = "import json, os\nprint(json.dumps(dict(os.environ)) + '\\n', end='', flush=True)"
    run = run_script(runner, tmp_path, text, "two forks")
    assert run.returncode == 0
    ranks = sorted(map(json.loads, run.output.splitlines()), key=lambda seen: seen["RANK"])
    assert [(seen["RANK"], seen["LOCAL_RANK"]) for seen in ranks] == [("0", "0"), ("1", "1")]
    for seen in ranks:
        assert (seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert {name: seen[name] for name in OF_TWO} == OF_TWO


@pytest.mark.parametrize("launcher", ["two forks", "two shards", "four shards"])
def test_forks_are_started_as_by_the_command_that_they_stand_for(launcher: Launcher) -> None:
    """`accelerate launch` starts as many ranks, with the variables that the forks get."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    stands_for = launch_command(launcher)
    assert stands_for[1:4] == [*ACCELERATE]
    words = [*stands_for[4:], "script.py"]
    parsed, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    exported = prepare_multi_gpu_env(parsed)
    expected = {**OF_TWO, **(SHARDED if LAUNCHES[launcher].is_sharded else {})}
    assert {name: exported[name] for name in expected} == expected
    assert parsed.nproc_per_node == str(LAUNCHES[launcher].ranks)


def differing(variables: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose value differs from that in `others`."""
    return {name: value for name, value in variables.items() if others.get(name) != value}


def test_failure_of_one_rank_ends_the_other(runner: Runner, tmp_path: Path) -> None:
    """The failure of one rank ends the other by SIGTERM, as torchrun does."""
    text = "import os, time\nassert os.environ['RANK'] != '1', 'broken'\ntime.sleep(300)"
    run = run_script(runner, tmp_path, text, "two forks")
    assert run.returncode == 1
    assert run.errors.count("AssertionError: broken") == 1


@pytest.mark.slow
def test_timeout_ends_all_processes_of_a_script(runner: Runner, tmp_path: Path) -> None:
    """A timeout also ends the processes that the script started."""
    text = "import os, time\nif os.environ['RANK'] == '0': os.fork()\n"
    text += f"open(f'{tmp_path}/{{os.getpid()}}.pid', 'w')\ntime.sleep(300)"
    script = tmp_path / "script.py"
    script.write_text(text)
    with pytest.raises(AssertionError, match="took longer than 3 s"):
        runner.run(script, launcher="two forks", output_directory=False, timeout=3)
    started = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(started) == 3
    alive = [psutil.Process(pid) for pid in started if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(alive, timeout=20)[1]


def test_wait_behaves_like_that_of_popen(runner: Runner, tmp_path: Path) -> None:
    """A fork's `wait` and `poll` behave like those of `Popen`, so that a job can be either."""
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(300)")
    with (tmp_path / "said").open("w") as log:
        process = runner.start([str(script)], "fork", dict(os.environ), tmp_path, log, log)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == process.poll() == -signal.SIGTERM


@pytest.mark.slow
def test_fork_trains_as_a_fresh_interpreter_does(runner: Runner, unbroken: Finished) -> None:
    """A fork trains to the same bits as a fresh interpreter."""
    fresh = runner.run("mnist_mlp", *MLP, launcher="plain python")
    assert rows_without_clock(fresh.directory) == rows_without_clock(unbroken.directory)
    assert final_weights(fresh.directory) == final_weights(unbroken.directory)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["fork", "two forks"])
def test_run_that_does_not_end_shows_its_stacks(
    runner: Runner, tmp_path: Path, launcher: Launcher
) -> None:
    """A test that waits in vain for a run shows where each of its processes stands."""
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n\ndef wait_forever():\n    while True:\n        time.sleep(1)\n\n"
        'print("waiting", flush=True)\nwait_forever()\n'
    )
    job = Job(runner, script, directory=tmp_path / "run", launcher=launcher)
    job.wait_until(lambda: job.printed().count("waiting") == LAUNCHES[launcher].ranks)
    with pytest.raises(AssertionError, match="still running") as failure:
        job.end(0.1)
    assert str(failure.value).count("in wait_forever") == LAUNCHES[launcher].ranks
