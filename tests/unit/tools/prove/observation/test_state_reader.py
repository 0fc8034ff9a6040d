"""The state that a proof reads from a run in progress."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from common.tools.prove.observation.state_reader import StateReader


class Empty:
    """A part that never changes."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_each_type_of_part_has_a_digest_that_changes_with_its_state() -> None:
    """A recipe may keep networks, optimizers, generators and other objects with a state."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    noise = torch.Generator().manual_seed(0)
    reader = StateReader()
    reader.keep({"model": model, "optimizer": optimizer, "noise": noise, "empty": Empty()})
    context: Any = SimpleNamespace(best=Empty())
    before = reader.digests_of_parts(context)
    assert reader.digests_of_parts(context) == before
    torch.rand(3, generator=noise)
    model(torch.ones(2)).backward()
    optimizer.step()
    after = reader.digests_of_parts(context)
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ["model", "optimizer", "noise"]
