"""Accelerate reads each file in accelerate_configs/ and starts the launch that it describes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.jobs import SAMPLE_RECORDER, Job, newest_step, recorded_samples
from tests.launch import CONFIGS, REPOSITORY, SHARDED, Finished, Runner
from tests.local_data import IMAGE_SIZES

FILES = sorted(CONFIGS.glob("*.yaml"))
EXPECTED: dict[str, dict[str, Any]] = {
    "cpu": {"num_processes": 1, "mixed_precision": "no", "gpu": False},
    "multi_cpu": {"num_processes": 2, "mixed_precision": "no", "gpu": False},
    "single_gpu_fp16": {"num_processes": 1, "mixed_precision": "fp16", "gpu": True},
    "multi_gpu_fp16": {"num_processes": 4, "mixed_precision": "fp16", "gpu": True},
    "multi_node": {"num_processes": 8, "mixed_precision": "no", "gpu": True},
    "multi_gpu_bf16": {"num_processes": 4, "mixed_precision": "bf16", "gpu": True},
    "fsdp2_bf16": {"num_processes": 4, "mixed_precision": "bf16", "gpu": True},
    "fsdp2_fp16": {"num_processes": 4, "mixed_precision": "fp16", "gpu": True},
}


def test_all_files_are_known() -> None:
    """Each launch config that these tests describe exists."""
    assert {path.stem for path in FILES} >= set(EXPECTED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_the_file(path: Path) -> None:
    """Accelerate's own loader takes the file, and no key in it is unknown or misspelt."""
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(path))
    written = yaml.safe_load(path.read_text())
    for name in ("num_processes", "num_machines", "mixed_precision", "use_cpu"):
        assert getattr(loaded, name) == written[name], name
    assert loaded.distributed_type.value == written["distributed_type"]
    expected = EXPECTED.get(path.stem)
    if expected is not None:
        assert loaded.num_processes == expected["num_processes"]
        assert loaded.mixed_precision == expected["mixed_precision"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_is_commented_line_by_line(path: Path) -> None:
    """Each setting is explained on its line, and the head says how to launch with the file."""
    lines = path.read_text().splitlines()
    for line in lines:
        assert line.startswith("#") or "  # " in line, line
        assert len(line) <= 100
    assert f"--config_file accelerate_configs/{path.name}" in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_becomes_a_launch_command(path: Path) -> None:
    """The launcher turns the file into a command with its processes, precision and device."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    script = str(REPOSITORY / "recipes" / "resnet.py")
    words = ["--config_file", str(path), script, "--epochs", "2"]
    parsed, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    if parsed.num_processes == 1:
        assert not parsed.multi_gpu
        command, environment = prepare_simple_launcher_cmd_env(parsed)
        assert command[1:] == [script, "--epochs", "2"]
        use_cpu = environment["ACCELERATE_USE_CPU"].lower() == "true"
        assert use_cpu == (not EXPECTED[path.stem]["gpu"])
    else:
        shards = path.stem.startswith("fsdp2")
        assert parsed.use_fsdp if shards else parsed.multi_gpu
        environment = prepare_multi_gpu_env(parsed)
        if shards:
            assert SHARDED.items() <= environment.items()
        machines = int(parsed.num_machines)
        assert parsed.nproc_per_node == str(parsed.num_processes // machines)
        assert machines == (2 if path.stem == "multi_node" else 1)
        assert parsed.training_script == script
        assert parsed.training_script_args == ["--epochs", "2"]
    assert environment["ACCELERATE_MIXED_PRECISION"] == parsed.mixed_precision
    if path.stem in EXPECTED:
        assert parsed.num_processes == EXPECTED[path.stem]["num_processes"]
        assert parsed.mixed_precision == EXPECTED[path.stem]["mixed_precision"]


@pytest.mark.slow
def test_cpu_file_gives_one_process_on_all_cores(runner: Runner, odd_images: Path) -> None:
    """`cpu.yaml` starts one process on the CPU that uses each core it may use."""
    from common.system.platforms.limits import usable_cores

    flags = ("--dataset", odd_images, "--max-steps", 1, "--batch-size", 16, "--tracker", "none")
    run = runner.run("mnist_mlp", *flags, launcher="cpu", all_cores=True)
    environment = run.config["environment"]
    assert environment["world_size"] == 1
    assert environment["device_type"] == "cpu"
    assert environment["threads_per_process"] == usable_cores()


def test_bare_launch_uses_all_cores(learned_mlp: Finished) -> None:
    """A bare `accelerate launch` exports one thread; the recipe uses all cores all the same."""
    from common.system.platforms.limits import usable_cores

    assert learned_mlp.config["environment"]["threads_per_process"] == usable_cores()


def test_configuration_names_the_kind_of_processor(learned_mlp: Finished) -> None:
    """The name alone may stand for processors with different kernels."""
    import torch

    from common.system.processor import processor_kind

    capability = torch.backends.cpu.get_cpu_capability()
    assert learned_mlp.config["environment"]["processor"] == processor_kind(capability)


@pytest.mark.slow
def test_multi_cpu_file_gives_two_processes_that_end_together(
    runner: Runner, odd_images: Path, tmp_path: Path
) -> None:
    """The two processes of `multi_cpu.yaml` share each epoch without overlap.

    Both save and end when the launcher gets SIGTERM.
    """
    from common.system.platforms.limits import usable_cores

    directory = tmp_path / "run"
    folder = tmp_path / "recorded"
    recipe = REPOSITORY / "recipes" / "mnist_mlp.py"
    updates = IMAGE_SIZES["train"] // 32
    flags = ("--dataset", odd_images, "--batch-size", 16, "--epochs", 2000, "--tracker", "none")
    flags += ("--checkpoint-every", updates, "--output-dir", directory)
    job = Job(
        runner,
        SAMPLE_RECORDER,
        folder,
        recipe,
        *flags,
        directory=directory,
        launcher="multi_cpu",
        forking=True,
    )
    job.wait_for_step(2 * updates)
    job.process.send_signal(signal.SIGTERM)
    job.end(60)
    status = job.read("status.json")
    assert status["status"] == "preempted", job.printed()[-4000:]
    assert status["resumable"]
    assert newest_step(directory) == status["global_step"]
    environment = job.read("config.json")["environment"]
    assert environment["world_size"] == 2
    assert environment["threads_per_process"] == max(1, usable_cores() // 2)
    samples = recorded_samples(folder)[0]
    epochs = [
        [[s for u in range(updates) for s in samples[epoch, u, 0, rank]] for rank in range(2)]
        for epoch in range(2)
    ]
    for first, second in epochs:
        assert len(first) == len(second) == 16 * updates
        assert len({*first, *second}) == 32 * updates
    assert epochs[0] != epochs[1]
