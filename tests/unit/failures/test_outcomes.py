"""How a run ended: by the user's mistake, or by a request to stop."""

from __future__ import annotations

import pytest

from common.errors import Preempted, TrainingError, UserError
from common.failures.outcomes import Outcome, outcome_of


@pytest.mark.parametrize("error_class", [UserError, TrainingError])
def test_users_mistake_is_its_own_reason(error_class: type[UserError]) -> None:
    """It is the same on all ranks, so that neither rank nor type is added."""
    assert outcome_of(error_class("no such data"), rank=1) == Outcome(
        "failed", False, "no such data"
    )


def test_request_to_stop_is_no_failure() -> None:
    """Status 75 tells a shell to try again."""
    error = Preempted("stopped after update 3", is_by_ctrl_c=False)
    assert outcome_of(error, rank=1) == Outcome("preempted", True, "stopped after update 3")
    assert error.code == 75


def test_reason_leaves_out_the_middle_of_a_compilers_output() -> None:
    """A compiler prints thousands of warnings, and the error that matters last."""
    output = "\n".join(
        ["C++ compile error", *["warning: unused"] * 9000, "No space left on device"]
    )
    reason = outcome_of(RuntimeError(output), rank=0).reason
    assert reason is not None
    assert len(reason) < 2100
    assert reason.startswith("rank 0: RuntimeError: C++ compile error")
    assert reason.endswith("No space left on device")
    assert outcome_of(RuntimeError("short"), rank=0).reason == "rank 0: RuntimeError: short"
