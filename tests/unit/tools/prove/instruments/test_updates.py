"""The buffers that the instrument of updates saves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from common.tools.prove.instruments.updates import FIRST_BUFFERS, UpdateObserver


class Counter(nn.Module):
    """Buffers that can be compared, and others that can't."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.arange(2))
        self.register_buffer("mean", torch.ones(3).expand(2, 3), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("indices", torch.eye(2).to_sparse())
        self.register_buffer("phase", torch.zeros(1, dtype=torch.complex64))


def test_buffers_of_kept_networks_are_saved_except_for_batch_norms(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(Counter()))
    parts = {"model": model, "center": Counter(), "progress": object()}
    context: Any = SimpleNamespace(
        parts=SimpleNamespace(shared=parts), directory=SimpleNamespace(path=tmp_path)
    )
    session: Any = SimpleNamespace(rank=0)
    UpdateObserver(session).save_buffers(context, FIRST_BUFFERS)
    saved = load_file(tmp_path / FIRST_BUFFERS)
    assert sorted(saved) == ["center.counts", "center.mean", "model.1.0.counts", "model.1.0.mean"]
    assert saved["center.counts"].tolist() == [0, 1]
