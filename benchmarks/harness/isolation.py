"""Isolates the contestants of a process: Accelerate's singletons and torch's global settings."""

from __future__ import annotations

import contextlib
import gc
import io
import warnings
from collections.abc import Iterator

import accelerate.optimizer
import torch
from accelerate.state import AcceleratorState, GradientState

# Objects and attributes that a contestant may set for the whole process.
SETTINGS: list[tuple[object, str]] = [
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (accelerate.optimizer, "is_lomo_available"),
]


@contextlib.contextmanager
def isolated(threads: int) -> Iterator[None]:
    """Run one contestant with fresh Accelerate singletons, and restore torch's settings after it.

    The settings of a contestant must neither help nor harm another. Nothing is printed. All share
    the allocator and the caches of compiled and tuned kernels, which are part of the machine's
    state.

    Args:
        threads: of torch in this process, the same for all contestants.
    """
    torch.set_num_threads(threads)
    saved = [(owner, name, getattr(owner, name)) for owner, name in SETTINGS]
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    reset_accelerate()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        reset_accelerate()
        torch.set_float32_matmul_precision(precision)
        # A signature that one contestant cached would save others a look-up.
        vars(torch.optim.Optimizer.zero_grad).pop("__signature__", None)
        for owner, name, value in saved:
            setattr(owner, name, value)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def reset_accelerate() -> None:
    """Let the next Accelerator choose its device and precision again."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def default_device() -> torch.device:
    """Return the accelerator's device if there is one, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def synchronize() -> None:
    """Wait until the accelerator, if there is one, has finished its work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def turn_off_cudnn_attention() -> None:
    """Turn cuDNN's attention off for all contestants of this process.

    On Hopper GPUs torch 2.11 prefers it. It builds a plan for each new batch size and length, which
    takes about half a second, and that time would be measured instead of attention.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
