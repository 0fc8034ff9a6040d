"""Which networks of a recipe get the weights of `--init-from` with the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from common.checkpoints.initial_copies import (
    checksums_of_matrices,
    copies_of,
    give_weights,
    refusing_replaced_weights,
)
from common.errors import UserError


class WithExtraState(nn.Linear):
    """A layer whose state is not only tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_copies_of_the_model_follow_it() -> None:
    """A copy and an average get the model's new weights; other networks are left alone."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    networks = {
        "model": model,
        "copy": copy.deepcopy(model),
        "average": AveragedModel(model),
        "average of a wrapped model": AveragedModel(nn.ModuleDict({"module": model})),
        "in float64": copy.deepcopy(model).double(),
        "with extra state": WithExtraState(3, 2),
        "other": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
        "larger": nn.Linear(4, 4),
        "empty": nn.ReLU(),
    }
    copies = copies_of(model, networks)
    assert [*copies] == ["copy", "average", "average of a wrapped model", "in float64"]
    other = copy.deepcopy(networks["other"].state_dict())
    with torch.no_grad():
        model[0].weight.fill_(7)
        model[1].running_mean.fill_(8)
    give_weights(model, copies.values())
    for network in copies.values():
        for name, value in network.state_dict().items():
            assert torch.equal(value, model.state_dict()[name].to(value.dtype))
    for name, value in networks["other"].state_dict().items():
        assert torch.equal(value, other[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("moment", ["before the block", "in the block"])
def test_weights_that_were_replaced_are_refused(dtype: torch.dtype, moment: str) -> None:
    """A network must not be evaluated with weights of the model that `--init-from` replaced."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    average = copy.deepcopy(model).to(dtype)
    before = checksums_of_matrices(model)
    nn.init.ones_(model[0].weight)
    replaced = before - checksums_of_matrices(model)

    def evaluate(has_average: bool) -> None:
        if has_average and moment == "before the block":
            model.load_state_dict(average.state_dict())
        with refusing_replaced_weights(model, replaced):
            if has_average:
                model.load_state_dict(average.state_dict())
            for _ in range(2):
                model(torch.randn(4, 3))

    evaluate(has_average=False)
    with pytest.raises(UserError, match="weights that the model had before --init-from"):
        evaluate(has_average=True)
    assert not model._forward_pre_hooks
