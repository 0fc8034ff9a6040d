"""Checks sharded networks on two processes, as a copy of a recipe may use them. Not a test."""

import copy

import torch
from torch import nn
from torch.func import functional_call

from common.config import TrainingConfig
from common.errors import UserError
from common.training.accelerator import build_accelerator

accelerator = build_accelerator(TrainingConfig(mixed_precision="no"))
rank = accelerator.process_index
torch.manual_seed(rank)  # so that each rank draws its own weights
drawn = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2, bias=False))
whole = copy.deepcopy(drawn)
inputs = torch.ones(4, 3)
for tensor in whole.parameters():
    torch.distributed.broadcast(tensor.data, 0)
model = accelerator.prepare(drawn)

# The ranks have rank 0's weights, as under DDP; each holds rows of them.
torch.testing.assert_close(model(inputs), whole(inputs))
assert [len(p.to_local()) for p in model.parameters()] == [[3, 3, 1], [2, 2, 1]][rank]

# A sharded network refuses a call with other weights, because it would use its own instead.
try:
    functional_call(model, {"0.weight": torch.zeros(5, 3)}, inputs)
except UserError as error:
    print(error.message)

# A copy has memory of its own, and may be changed until it is called.
changed = copy.deepcopy(copy.deepcopy(model))
for network in (changed, whole):
    with torch.no_grad():
        network[2].weight *= 2
        network[0].bias.zero_()
    network[1] = nn.Tanh()
expected = model(inputs)
for _ in range(2):  # the first call shards the copy
    torch.testing.assert_close(changed(inputs), whole(inputs))
torch.testing.assert_close(model(inputs), expected)
assert not torch.allclose(expected, whole(inputs))
torch.testing.assert_close(copy.deepcopy(changed)(inputs), whole(inputs))
torch.distributed.destroy_process_group()
