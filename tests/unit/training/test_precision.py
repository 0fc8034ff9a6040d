"""The precision that a run takes: by the flag, the launcher and the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.errors import UserError
from common.system.devices import trials
from common.training.precision import best_precision, choose_precision


def pretend_accelerator(
    monkeypatch: pytest.MonkeyPatch,
    device_type: str,
    *,
    has_fp16: bool = True,
    has_bf16: bool = True,
    has_tf32: bool = False,
    has_loss_scaling: bool = True,
) -> None:
    """Pretend that torch has an accelerator of this type, with these capabilities."""
    device = torch.device(device_type, 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda *_: torch.device(device_type)
    )
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    answers = {
        ("has_autocast", device, torch.float16): has_fp16,
        ("has_autocast", device, torch.bfloat16): has_bf16,
        ("has_loss_scaling", device): has_loss_scaling,
    }
    for question, answer in answers.items():
        monkeypatch.setitem(trials.ANSWERS, question, answer)
    module = torch.get_device_module(device)
    monkeypatch.setattr(module, "is_tf32_supported", lambda: has_tf32, raising=False)


@pytest.mark.parametrize(
    ("device_type", "lacks", "auto", "refused"),
    [
        ("cuda", {}, "fp16", ["tf32"]),
        ("cuda", {"has_tf32": True}, "fp16", []),
        ("xpu", {"has_loss_scaling": False}, "bf16", ["fp16", "tf32"]),
        ("xpu", {"has_bf16": False}, "no", ["bf16", "tf32"]),
        ("mps", {}, "no", ["tf32"]),
        ("mps", {"has_bf16": False}, "no", ["bf16", "tf32"]),
    ],
)
def test_auto_precision_fits_each_accelerator(
    device_type: str, lacks: Any, auto: str, refused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` takes a fast one, and an unsupported one is refused instead of emulated."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    pretend_accelerator(monkeypatch, device_type, **lacks)
    assert choose_precision("auto", use_cpu=False) == auto
    for precision in ("no", "fp16", "bf16", "tf32"):
        if precision in refused:
            with pytest.raises(UserError, match=f"pass --mixed-precision {auto}"):
                choose_precision(precision, use_cpu=False)
        else:
            assert choose_precision(precision, use_cpu=False) == precision


@pytest.mark.parametrize(
    ("requested", "launcher", "has_cuda", "cpu_bf16", "expected"),
    [
        ("auto", "no", True, False, "fp16"),
        ("auto", "no", False, True, "bf16"),
        ("auto", "no", False, False, "no"),
        ("auto", "bf16", True, False, "bf16"),
        ("auto", "fp16", True, False, "fp16"),
        ("no", "fp16", True, False, "no"),
        ("bf16", "no", False, False, "bf16"),
        ("bf16", "fp16", True, True, "bf16"),
        ("fp16", "no", True, True, "fp16"),
        ("fp16", "no", False, True, "--mixed-precision bf16"),
        ("fp16", "no", False, False, "--mixed-precision no"),
        ("auto", "fp16", False, True, "--mixed-precision bf16"),
        ("tf32", "fp16", True, True, "tf32"),
        ("tf32", "no", False, True, "--mixed-precision bf16"),
        ("tf32", "no", False, False, "--mixed-precision no"),
    ],
)
def test_precision_follows_flag_launcher_and_hardware(
    requested: str,
    launcher: str,
    has_cuda: bool,
    cpu_bf16: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without CUDA, fp16 is refused with the flag to pass."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    if has_cuda:
        pretend_accelerator(monkeypatch, "cuda", has_bf16=True, has_tf32=True)
    monkeypatch.setattr("common.training.precision.cpu_has_bf16", lambda: cpu_bf16)
    if expected.startswith("--"):
        with pytest.raises(UserError, match=expected):
            choose_precision(requested, use_cpu=not has_cuda)
    else:
        assert choose_precision(requested, use_cpu=not has_cuda) == expected


def test_resumed_run_is_not_told_to_change_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume refuses another precision, so the flag is for a new run."""
    monkeypatch.setattr("common.training.precision.cpu_has_bf16", lambda: False)
    with pytest.raises(UserError) as refused:
        choose_precision("fp16", use_cpu=True, is_resumed=True)
    assert refused.value.problem == "--mixed-precision fp16 can't be used on a CPU"
    assert refused.value.advice == (
        "resume this run on a machine that supports this precision, or start a new run with "
        "--mixed-precision no"
    )


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_older_gpu_has_neither_bf16_nor_tf32(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names fp16, because torch would only emulate bf16 there."""
    pretend_accelerator(monkeypatch, "cuda", has_bf16=False, has_tf32=False)
    with pytest.raises(UserError, match=r"GPU.*: pass --mixed-precision fp16"):
        choose_precision(precision, use_cpu=False)
    assert choose_precision("auto", use_cpu=False) == "fp16"


@pytest.mark.parametrize("value", ["junk", "fp8", "fp32"])
def test_unknown_precision_of_the_launcher_is_named(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` would follow it; a precision that the command line states replaces it."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", value)
    with pytest.raises(UserError, match=f"ACCELERATE_MIXED_PRECISION is '{value}', .*: set"):
        choose_precision("auto", use_cpu=True)
    assert choose_precision("no", use_cpu=True) == "no"


@pytest.mark.parametrize("value", ["", "no", "NO"])
def test_no_precision_of_the_launcher_leaves_the_choice(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", value)
    best = best_precision(use_cpu=True)
    assert choose_precision("auto", use_cpu=True) == best
