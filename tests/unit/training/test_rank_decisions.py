"""How ranks agree to stop or on a failed checkpoint, and what ends a run."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.checkpoints.save_failure import OtherRankError, SaveFailure
from common.errors import Preempted, ReplacedDirectoryError, TrainingError
from common.system.platforms.signals import STOP_SIGNALS
from common.training import rank_decisions
from common.training.rank_decisions import RankDecisions
from common.training.stop_request import StopRequest


def no_request() -> StopRequest:
    """Return the requests of a process that no signal has asked to stop; it handles no signals."""
    request = StopRequest(acts_on_signals=True)
    request.release()
    return request


def test_ranks_agree_about_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds from the second check on, even if the duration of updates changes."""
    clock = 0.0
    monkeypatch.setattr(
        "common.training.rank_decisions.time", SimpleNamespace(perf_counter=lambda: clock)
    )
    ranks: Any = SimpleNamespace(
        num_processes=2, device=torch.device("cpu"), reduce=lambda mine, _: 2 * mine
    )
    decisions = RankDecisions(ranks, Path(), lambda: None, no_request())
    check_times = []
    for global_step in range(1, 2001):
        clock += 0.01 if global_step <= 1000 else 0.1
        if global_step % decisions.check_every == 0:
            check_times.append(clock)
            decisions.check(global_step)
    assert check_times[:2] == pytest.approx([0.01, 0.02])
    gaps = [after - before for before, after in itertools.pairwise(check_times[2:])]
    assert sum(gap > 1.5 for gap in gaps) <= 1, "but for the one in which updates get slower"
    assert min(gaps) > 0.1
    assert max(gaps) < 10
    assert not decisions.stopping


def test_ranks_agree_on_the_age_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of rank 0 decides, in the row that ranks exchange anyway."""
    clock = 0.0
    sent: list[torch.Tensor] = []  # the row of rank 0
    monkeypatch.setattr(rank_decisions, "time", SimpleNamespace(perf_counter=lambda: clock))

    def reduce_on_rank_zero(row: torch.Tensor, reduction: str) -> torch.Tensor:
        sent[:] = [row]
        return row

    def reduce_on_rank_one(row: torch.Tensor, reduction: str) -> torch.Tensor:
        return sent[0] + row

    ranks = [
        RankDecisions(
            SimpleNamespace(num_processes=2, device=torch.device("cpu"), reduce=reduce),  # type: ignore[arg-type]
            Path(),
            find_failure=lambda: None,
            request=no_request(),
        )
        for reduce in (reduce_on_rank_zero, reduce_on_rank_one)
    ]

    def check(step: int) -> list[bool]:
        for rank, decisions in enumerate(ranks):
            monkeypatch.setattr(rank_decisions, "is_main_rank", lambda rank=rank: rank == 0)
            decisions.check(step)
        return [decisions.is_checkpoint_old for decisions in ranks]

    assert check(1) == [True, True]
    for decisions in ranks:
        decisions.note_checkpoint()
    ranks[1].saved_at = -1000.0  # another clock
    assert check(2) == [False, False]
    clock = rank_decisions.CHECKPOINT_SECONDS - 1
    assert check(3) == [False, False]
    clock += 2
    assert check(4) == [True, True]


@pytest.mark.parametrize(
    ("number", "advice", "resumable"),
    [
        (errno.ENOSPC, "free some space", True),
        (errno.EDQUOT, "free some space", True),
        (errno.EIO, "free some space", True),
        (errno.EACCES, "right to write", False),
        (errno.EROFS, "make this file system writable", False),
        (errno.EEXIST, "already there", False),
        (errno.ENOTEMPTY, "already there", False),
        (errno.ENOTDIR, "already there", False),
        (errno.EFBIG, "ulimit -f", False),
        (errno.ENAMETOOLONG, "choose a shorter name", False),
        (errno.EBUSY, "check this path and its disk", False),
    ],
    ids=lambda value: str(value),
)
def test_failed_save_is_explained(number: int, advice: str, resumable: bool) -> None:
    """Only a full or failing disk makes the run resumable."""
    failure = SaveFailure.of(OSError(number, os.strerror(number), "runs/a/checkpoints"), rank=0)
    alone: Any = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
    with pytest.raises(TrainingError) as error:
        RankDecisions(alone, Path("runs/a"), lambda: failure, no_request()).check(7)
    assert "a checkpoint of runs/a could not be written" in error.value.message
    assert os.strerror(number) in error.value.message
    assert advice in error.value.message
    assert "--resume runs/a" in error.value.message
    assert error.value.resumable is resumable
    assert ("space" in error.value.message.split("):")[1]) == resumable


@pytest.mark.parametrize(
    ("folders", "place"),
    [
        ((), "start again from the beginning with"),
        (("checkpoints",), "start again from the beginning with"),
        (("checkpoints/step-00000010.unfinished",), "start again from the beginning with"),
        (("checkpoints/of-another-run/step-00000010",), "start again from the beginning with"),
        (("checkpoints/step-00000010",), "continue from the checkpoint before it with"),
    ],
)
def test_advice_says_from_where_a_resume_trains_on(
    folders: tuple[str, ...], place: str, tmp_path: Path
) -> None:
    """The checkpoint that failed may have been the first one."""
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    alone: Any = SimpleNamespace(num_processes=1)
    decisions = RankDecisions(alone, tmp_path, lambda: None, no_request())
    with pytest.raises(TrainingError) as error:
        decisions.raise_failure(SaveFailure.of(OSError(errno.EFBIG, "too large"), rank=0))
    assert f"shrink the model, then {place} --resume {tmp_path}" in error.value.message


def test_rank_that_failed_names_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 only knows that another rank failed. That rank knows why."""
    waiting = SaveFailure.of(OtherRankError("rank 1 is at fault"), rank=0)
    cause = SaveFailure.of(OSError(errno.ENOSPC, "could not write its part"), rank=1)
    monkeypatch.setattr(
        rank_decisions, "gather_from_ranks", lambda accelerator, failure: [failure, cause]
    )
    two: Any = SimpleNamespace(num_processes=2)
    with pytest.raises(TrainingError, match=r"rank 1: .*could not write its part") as error:
        RankDecisions(two, Path("runs/a"), lambda: None, no_request()).raise_failure(waiting)
    assert error.value.resumable


def test_replaced_directory_cannot_be_resumed() -> None:
    """The type of the error decides, not the words of its message."""
    alone: Any = SimpleNamespace(num_processes=1)
    decisions = RankDecisions(alone, Path("runs/a"), lambda: None, no_request())
    with pytest.raises(TrainingError) as error:
        decisions.raise_failure(SaveFailure.of(ReplacedDirectoryError("runs/a"), rank=0))
    assert "--resume" not in error.value.message
    words = "was removed, moved or replaced while the run wrote to it"
    with pytest.raises(TrainingError, match="--resume runs/a"):
        decisions.raise_failure(SaveFailure.of(OSError(words), rank=0))


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_only_sigint_counts_as_ctrl_c(number: int) -> None:
    """The run's folder may be called SIGINT, and another signal stop the run."""
    alone: Any = SimpleNamespace(num_processes=1)
    request = StopRequest(acts_on_signals=True)
    request.release()
    request.receive(number, None)
    decisions = RankDecisions(alone, Path("SIGINT"), lambda: None, request)
    with pytest.raises(Preempted) as stopped:
        decisions.stop(3)
    assert stopped.value.is_by_ctrl_c == (number == signal.SIGINT)
