"""Where `prove` kills a run that saves: at each operation of the save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.checkpoints.store import Contents
from common.tools.prove.observation.interrupting import Interrupter
from common.tools.prove.observation.launch_plan import PlannedInterruption
from tests.unit.checkpoint_store import checkpoints_in, newest_whole
from tests.unit.manifest_facts import identity_at

# The operations of the save below, each by a part of the text that names the place of the kill.
PLACES = (
    "while . was written",
    "while step-00000003.unfinished/rank-0.safetensors was written",
    "while step-00000003.unfinished/model.safetensors was written",
    "before step-00000003.unfinished/receipt-0.json was written",
    "before step-00000003.unfinished/manifest.json was written",
    "before step-00000003.unfinished got its final name",
)


class Killed(Exception):  # noqa: N818
    """Stands for the kill of the process, which would also end the tests."""


@pytest.mark.parametrize("number", range(len(PLACES)))
def test_a_save_is_killed_at_each_of_its_operations(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share of the plan chooses the operation, and no checkpoint is left by this save."""

    def wrap(owner: Any, name: str, wrapper: Callable[..., object]) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    def kill(interrupter: Interrupter, manner: str, place: str) -> None:
        raise Killed(place)

    monkeypatch.setattr(Interrupter, "kill", kill)
    session: Any = SimpleNamespace(rank=0, step=3, wrap=wrap)
    share = (number + 0.5) / len(PLACES)
    Interrupter(session, PlannedInterruption(manner="save", step=3, share=share))
    tensors = {"weight": torch.ones(3)}
    contents = Contents(
        files={"rank-0.safetensors": tensors, "model.safetensors": tensors},
        lasting_files={"frozen-model.safetensors": tensors},
    )
    checkpoints = checkpoints_in(tmp_path / "checkpoints")
    checkpoints.save(3, contents, identity_at(3))
    checkpoints.wait()
    assert checkpoints.failure is not None
    expected = PLACES[number].replace(" . ", " checkpoints/frozen-model.safetensors.unfinished ")
    assert checkpoints.failure.message == f"rank 0: {expected}"
    assert newest_whole(tmp_path / "checkpoints") == (None, [])
