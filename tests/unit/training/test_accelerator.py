"""Arguments of the Accelerator: device, effective precision, threads and processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.commands import launch
from accelerate.utils.environment import parse_flag_from_env
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from benchmarks.harness.ports import free_port
from common.config import TrainingConfig
from common.errors import UserError
from common.system.devices import is_cpu_asked_for
from common.system.launch_variables import FALSE_WORDS, TRUE_WORDS
from common.training import accelerator
from common.training.launch import checks as launcher_checks
from common.training.precision import running_precision, set_kernels
from common.training.sharding.accelerator import ShardingAccelerator


class Built(Exception):  # noqa: N818
    """Raised instead of building the Accelerator, with the arguments."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments


def arguments_of_accelerator(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the arguments with which `build_accelerator` builds the Accelerator."""

    def refuse(**arguments: Any) -> None:
        raise Built(**arguments)

    monkeypatch.setattr(accelerator, "ShardingAccelerator", refuse)
    with pytest.raises(Built) as built:
        accelerator.build_accelerator(TrainingConfig(mixed_precision="no"))
    return built.value.arguments


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, False), ("False", False), ("false", False), ("true", True), ("True", True)],
)
def test_launcher_decides_between_gpu_and_cpu(
    variable: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU, only "true" selects the CPU. The launcher exports "False" otherwise."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    if variable is None:
        monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    else:
        monkeypatch.setenv("ACCELERATE_USE_CPU", variable)
    assert arguments_of_accelerator(monkeypatch)["cpu"] is expected


def test_accelerator_is_told_to_use_the_cpu_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being told to use the CPU, Accelerate would start no gloo group."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert arguments_of_accelerator(monkeypatch)["cpu"] is True


def test_process_group_times_out_within_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that hangs ends the job long before the default half hour."""
    handlers = arguments_of_accelerator(monkeypatch)["kwargs_handlers"]
    (timeout,) = [handler.timeout for handler in handlers if hasattr(handler, "timeout")]
    assert 0 < timeout.total_seconds() <= 600


def test_processes_that_do_not_see_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher started more processes than the Accelerator sees."""
    alone = SimpleNamespace(num_processes=1)
    monkeypatch.setattr(accelerator, "ShardingAccelerator", lambda **_: alone)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError) as error:
        accelerator.build_accelerator(TrainingConfig(mixed_precision="no"))
    assert "multi_cpu.yaml" in error.value.message


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("precision", "expected"), [("no", "no"), ("tf32", "no"), ("bf16", "bf16")]
)
def test_torch_settings_follow_the_precision(
    precision: Any, expected: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier settings do not matter. Accelerate gets "no" for TF32."""
    precisions = []

    def build(mixed_precision: str, **_: Any) -> SimpleNamespace:
        torch.set_float32_matmul_precision(
            "high"
        )  # Accelerate does so if the launcher's file compiles
        precisions.append(mixed_precision)
        return SimpleNamespace(num_processes=1, mixed_precision=mixed_precision)

    monkeypatch.setattr(accelerator, "ShardingAccelerator", build)
    monkeypatch.setattr("common.training.precision.is_offered", lambda precision, use_cpu: True)
    before = torch.backends.cudnn.benchmark
    config = TrainingConfig(mixed_precision=precision, deterministic=deterministic)
    try:
        built: Any = accelerator.build_accelerator(config)
        is_tf32 = precision == "tf32"
        assert precisions == [expected]
        assert running_precision(built) == precision
        assert torch.get_float32_matmul_precision() == ("high" if is_tf32 else "highest")
        # Both raise where the old and the new settings contradict each other.
        assert torch.backends.cuda.matmul.allow_tf32 is is_tf32
        assert torch.backends.cudnn.allow_tf32 is is_tf32
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        set_kernels("no", deterministic=False)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = before


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize("has_bf16", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_emulated_bf16_is_warned_of(
    precision: Any, has_bf16: bool, resume: str | None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It is correct but very slow. A resumed run gets no warning, as it cannot change."""
    alone = SimpleNamespace(num_processes=1, mixed_precision=precision)
    monkeypatch.setattr(accelerator, "ShardingAccelerator", lambda **_: alone)
    monkeypatch.setattr("common.training.precision.cpu_has_bf16", lambda: has_bf16)
    accelerator.build_accelerator(TrainingConfig(mixed_precision=precision, resume=resume))
    is_slow = precision == "bf16" and not has_bf16 and resume is None
    assert ("emulates bf16" in capsys.readouterr().out) == is_slow


@pytest.mark.parametrize(
    ("resume", "advice"),
    [
        (None, "pass --gradient-compression fp16, or leave the flag out"),
        ("runs/mine", "resume this run on GPUs, or start a new run without this flag"),
    ],
)
def test_compression_that_a_cpu_lacks_is_refused(
    resume: str | None, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume can't change the flag, so it gets other advice."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    config = TrainingConfig(mixed_precision="no", gradient_compression="bf16", resume=resume)
    with pytest.raises(UserError) as refused:
        accelerator.build_accelerator(config)
    assert refused.value.advice == advice


@pytest.mark.parametrize(
    ("resume", "advice"),
    [(None, "pass --no-auto-batch-size, and"), ("runs/mine", "resume this run without FSDP")],
)
def test_sharded_model_has_no_automatic_batch_size(resume: str | None, advice: str) -> None:
    """A run that was begun without FSDP keeps the flag when it is resumed."""
    config = TrainingConfig(auto_batch_size=True, resume=resume)
    built: Any = SimpleNamespace()
    with pytest.raises(UserError, match=f"can't be used with a sharded model, .*: {advice}"):
        accelerator.shard(built, config)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """More processes than GPUs are refused before CUDA reports an "invalid device ordinal"."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UserError, match="4 processes on this machine, but they see only 2 GPUs"):
        accelerator.build_accelerator(TrainingConfig(mixed_precision="no"))


@pytest.mark.parametrize("asked_for_more", [True, False])
def test_single_process_in_place_of_several_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked_for_more: bool
) -> None:
    """`accelerate launch --cpu --num_processes 2` exports an address, but starts one process."""
    alone = SimpleNamespace(num_processes=1, scaler=None)
    monkeypatch.setattr(accelerator, "ShardingAccelerator", lambda **_: alone)
    words = ["--cpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    words += ["--num_processes", "2" if asked_for_more else "1", "train.py"]
    parsed, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    _, exported = prepare_simple_launcher_cmd_env(parsed)
    for name in exported.keys() - os.environ.keys():
        monkeypatch.setenv(name, exported[name])
    if asked_for_more:
        with pytest.raises(UserError, match=r"started one process, although.*multi_cpu\.yaml"):
            accelerator.build_accelerator(TrainingConfig(mixed_precision="no"))
    else:
        assert accelerator.build_accelerator(TrainingConfig(mixed_precision="no")) is alone


BUILD = (
    "from common.config import TrainingConfig\n"
    "from common.training.accelerator import build_accelerator\n"
    "build_accelerator(TrainingConfig(mixed_precision='no', collective_timeout=1))\n"
)


def launch_one_of_two(**variables: str) -> str:
    """Start the second of two processes, where no first one answers; return its last line."""
    environment = os.environ | {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"} | variables
    process = subprocess.run(
        [sys.executable, "-c", BUILD], capture_output=True, text=True, env=environment
    )
    assert process.returncode == 1
    return process.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_unreachable_process_is_no_mistake_of_the_launch() -> None:
    """The message names what the user can check: the address, the port and the network."""
    message = launch_one_of_two(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    expected = (
        r"error: the launched processes could not reach each other \(DistNetworkError: .*\): "
        "check MASTER_ADDR, MASTER_PORT and the network between the machines"
    )
    assert re.fullmatch(expected, message)


@pytest.mark.slow
def test_malformed_port_is_a_mistake_of_the_launch() -> None:
    """The message names the launcher's settings to use."""
    message = launch_one_of_two(MASTER_ADDR="127.0.0.1", MASTER_PORT="x")
    assert message.startswith("error: the launched processes can't start (ValueError: ")
    assert message.endswith(launcher_checks.LAUNCH_ADVICE)


@pytest.mark.parametrize("backend", ["INDUCTOR", "inductor", "EAGER"])
def test_launchers_compiler_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names `--compile`. A launcher without a compiler exports "NO"."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
    with pytest.raises(UserError, match="pass --compile"):
        accelerator.build_accelerator(TrainingConfig(mixed_precision="no"))
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    arguments_of_accelerator(monkeypatch)


@pytest.mark.parametrize("setting", ["DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_other_ways_to_train_are_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher's setting that recipes do not support is named."""
    monkeypatch.setenv(f"ACCELERATE_USE_{setting}", "false")
    launcher_checks.refuse_unsupported_backends()
    monkeypatch.setenv(f"ACCELERATE_USE_{setting}", "true")
    with pytest.raises(UserError, match=rf"asks for .* \(ACCELERATE_USE_{setting}=true\)"):
        accelerator.build_accelerator(TrainingConfig())


@pytest.mark.parametrize("variable", launcher_checks.YES_OR_NO)
@pytest.mark.parametrize("value", ["junk", "", "2"])
def test_malformed_yes_or_no_is_named(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    expected = f"{variable} is {value!r}, .*: set {variable} to true or false, or unset it$"
    with pytest.raises(UserError, match=expected):
        accelerator.build_accelerator(TrainingConfig())


@pytest.mark.parametrize("value", [*TRUE_WORDS, *FALSE_WORDS, "True", "FALSE"])
def test_words_for_yes_and_no_are_those_of_accelerate(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run and Accelerate read the same device from the variable."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", value)
    launcher_checks.refuse_malformed_variables()
    assert is_cpu_asked_for() is parse_flag_from_env("ACCELERATE_USE_CPU")


@pytest.mark.parametrize("processes", [1, 2])
def test_gathering_for_metrics_is_refused_on_several_processes(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's loaders do not make it work; on one process, it returns its argument."""
    gathering = ShardingAccelerator(cpu=True)
    monkeypatch.setattr(ShardingAccelerator, "num_processes", processes)
    scores = torch.arange(3)
    if processes == 1:
        assert torch.equal(gathering.gather_for_metrics(scores), scores)
    else:
        with pytest.raises(UserError, match=r"sums\.collect"):
            gathering.gather_for_metrics(scores)
