"""Which networks of a recipe get the weights of `--init-from` with the model."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from common.checkpoints.initial_copies import copies_of, give_weights


def test_copies_of_the_model_follow_it() -> None:
    """A copy and an average get the model's new weights; other networks are left alone."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    networks = {
        "model": model,
        "copy": copy.deepcopy(model),
        "average": AveragedModel(model),
        "other": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
        "larger": nn.Linear(4, 4),
        "empty": nn.ReLU(),
    }
    copies = copies_of(model, networks)
    assert [*copies] == ["copy", "average"]
    other = copy.deepcopy(networks["other"].state_dict())
    with torch.no_grad():
        model[0].weight.fill_(7)
        model[1].running_mean.fill_(8)
    give_weights(model, copies.values())
    average = networks["average"]
    assert isinstance(average, AveragedModel)
    for network in (networks["copy"], average.module):
        for name, value in network.state_dict().items():
            assert torch.equal(value, model.state_dict()[name])
    for name, value in networks["other"].state_dict().items():
        assert torch.equal(value, other[name])
