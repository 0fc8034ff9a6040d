"""Loss scales of fp16 for tests, and a check of how the scale follows overflows.

Tests on CPUs and on GPUs share this module, so it must not import `tests/conftest.py`, which hides
GPUs from the process.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.launch import REPOSITORY, Finished

SCRIPT = REPOSITORY / "tests" / "fp16_on_cpu.py"
# The initial scale, and after how many updates without an overflow it doubles. The first never
# overflows; the second overflows at once and grows soon; the third overflows in each of a few
# updates.
Scale = tuple[int, int]
STEADY = (1024, 10**6)
WILD = (2**24, 4)
OVERFLOWING = (2**110, 10**6)


def assert_scale_follows_overflows(run: Finished) -> None:
    """Check that each skipped update halved the scale, and four in a row without one doubled it."""
    scales = run.series("train/loss_scale")
    skipped_updates = run.series("train/skipped_updates")
    previous_scale = float(WILD[0])
    previous_skipped = 0.0
    updates_since_change = 0
    for step, scale in scales.items():
        was_skipped = skipped_updates[step] > previous_skipped
        updates_since_change = 0 if was_skipped else updates_since_change + 1
        grows = updates_since_change == WILD[1]
        factor = 1.0
        if was_skipped:
            factor = 0.5
        elif grows:
            factor = 2.0
        assert scale == previous_scale * factor, step
        previous_scale = scale
        previous_skipped = skipped_updates[step]
        updates_since_change = 0 if grows else updates_since_change
    assert 0 < previous_skipped < len(scales)


def assert_overflows_only_skip(run: Finished, without_overflows: Finished) -> None:
    """Check that overflows change the scale, and that the learning rate moves on all the same."""
    assert_scale_follows_overflows(run)
    assert run.series("train/learning_rate") == without_overflows.series("train/learning_rate")


def assert_skipped_updates_change_nothing(train: Callable[..., Finished]) -> None:
    """Check that the weights stay the same under a scale that always overflows.

    Args:
        train: makes a run from a loss scale, with the flags that it gets.
    """
    from safetensors.torch import load_file

    updates = 5
    flags = ("--max-steps", updates, "--checkpoint-every", 1, "--keep-checkpoints", updates)
    run = train(OVERFLOWING, *flags)
    assert run.summary["train/skipped_updates"] == updates
    checkpoints = run.directory / "checkpoints"
    first, last = (
        load_file(checkpoints / f"step-{step:08}" / "model.safetensors") for step in (1, updates)
    )
    assert first.keys() == last.keys() == run.weights().keys()
    assert all(values.equal(last[name]) for name, values in first.items())
