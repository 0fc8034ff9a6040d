"""Teach a deep Q-network to balance a pole on a cart, by reinforcement learning.

    python examples/dqn.py

A copy of recipes/mnist_mlp.py. It shows a loop that makes its own data: a simulated environment,
a replay buffer and a target network, which checkpoints hold. A training sample is one step.

Result: 500 of 500 steps without a fall, in all episodes of the test data.
One run with --num-threads 1: Python 3.11, torch 2.13, fp32, two cores of an AMD EPYC.
"""

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from common.config import TrainingConfig, parse_config
from common.data.dataset import Data
from common.data.loader import Loader
from common.data.stored_samples import TensorSamples
from common.flags import flag
from common.measure.sums import Sums
from common.models.compile import compile_model
from common.run import Run
from common.training.optim import decay_groups

# ------------------------------------------------------------------------------------- Config


@dataclass(kw_only=True)
class Config(TrainingConfig):
    mixed_precision: Literal["auto", "no", "tf32", "bf16", "fp16"] = "no"  # Precision; no: fp32.
    batch_size: int = 32  # Poles per process; each makes a step in each micro-batch.
    learning_rate: float = 3e-3  # Peak learning rate.
    weight_decay: float = 0.0  # Decay of weight matrices; biases have none.
    # Widths of the hidden layers.
    hidden_sizes: tuple[int, ...] = flag((64, 64), least=1, most=10**6, role="size")
    exploration: float = flag(0.1, least=0, most=1)  # Share of random pushes while training.
    discount: float = flag(0.98, least=0, most=1)  # Of the value that is one step away.
    buffer_size: int = flag(20_000, least=1, most=10**7, role="size")  # Steps, for each process.
    replayed: int = flag(128, least=1, most=10**6)  # Steps that a micro-batch draws from them.
    target_every: int = flag(10, least=1)  # Updates between two copies to the target network.


OBJECTIVE = "episode_return:max"
DEFAULT_EPOCHS = {"other": 3}
MOST_STEPS = 500  # of an episode

# --------------------------------------------------------------------------------------- Data


def load_data(config: Config, run: Run) -> Data:
    """Return the poles with which episodes begin; in training, there is one for each step."""
    sizes = {"train": 16_000, "validation": 64, "test": 256}
    draws = torch.rand(sum(sizes.values()), 2, generator=torch.Generator().manual_seed(0))
    parts = (0.2 * draws - 0.1).split([*sizes.values()])
    splits = {name: TensorSamples(poles=part) for name, part in zip(sizes, parts, strict=True)}
    return Data("poles", splits)


def step(poles: torch.Tensor, pushes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Push the carts of poles [n, 2] to the left (0) or right (1); also return which poles fell."""
    angle, speed = poles.unbind(1)  # radians from upright, and their change in a second
    push = (20 * pushes - 10 + 0.05 * speed**2 * angle.sin()) / 1.1
    turn = 9.8 * angle.sin() - push * angle.cos()
    change = torch.stack([speed, turn / (2 / 3 - 0.05 * angle.cos() ** 2 / 1.1)], 1)
    poles = poles + 0.02 * change  # after 0.02 s
    return poles, poles[:, 0].abs() > 0.21


class Replay(nn.Module):
    """The poles of a process and the steps that they made last, in buffers of a module."""

    def __init__(self, poles: int, size: int):
        super().__init__()
        self.poles = nn.Buffer(torch.zeros(poles, 2))
        self.steps = nn.Buffer(torch.zeros(size, 6))  # pole, push, next pole, whether it fell
        self.count = nn.Buffer(torch.zeros((), dtype=torch.long))  # of all steps so far

    @torch.no_grad()
    def play(self, model: nn.Module, starts: torch.Tensor, exploration: float) -> None:
        """Make a step with each pole. Where an episode ends, the next one begins with `starts`."""
        poles = self.poles[: len(starts)]
        chance = torch.rand(3, len(starts), device=starts.device)
        pushes = torch.where(chance[0] < exploration, chance[1] < 0.5, model(poles).argmax(1))
        next_poles, fell = step(poles, pushes)
        rows = (self.count + torch.arange(len(starts), device=starts.device)) % len(self.steps)
        self.steps[rows] = torch.cat([poles, pushes[:, None], next_poles, fell[:, None]], 1)
        self.count.add_(len(starts))
        ends = fell | (chance[2] < 1 / MOST_STEPS)
        self.poles[: len(starts)] = torch.where(ends[:, None], starts, next_poles)

    def draw(self, count: int) -> torch.Tensor:
        filled = self.count.clamp(max=len(self.steps))
        return self.steps[(torch.rand(count, device=filled.device) * filled).long()]


# -------------------------------------------------------------------------------------- Model


class MLP(nn.Sequential):
    """Linear layers with ReLU between: poles [batch, 2] to the value of each push [batch, 2]."""

    def __init__(self, sizes: list[int]):
        layers: list[nn.Module] = []
        for in_features, width in pairwise(sizes):
            layers += [nn.Linear(in_features, width), nn.ReLU()]
        super().__init__(*layers[:-1])


def build_model(config: Config) -> tuple[nn.Module, dict[str, Any]]:
    arguments = {"sizes": [2, *config.hidden_sizes, 2]}
    name = f"MLP {'-'.join(map(str, arguments['sizes']))}"
    return MLP(**arguments), {"name": name, "arguments": arguments}


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    groups = decay_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)


def compute_loss(
    model: nn.Module, target: nn.Module, steps: torch.Tensor, discount: float
) -> tuple[torch.Tensor, torch.Tensor]:
    poles, pushes, next_poles, fell = steps.split([2, 1, 2, 1], 1)
    values = model(poles).gather(1, pushes.long())  # from -1, for a fall, to 0, if none is near
    goals = torch.where(fell > 0, -1, discount * target(next_poles).amax(1, keepdim=True))
    return F.smooth_l1_loss(values, goals), values


def metrics(values: torch.Tensor, steps: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"value": values, "falls": steps[:, -1]}


# --------------------------------------------------------------------------------- Evaluation


def evaluate(run: Run, model: nn.Module, loader: Loader) -> dict[str, float]:
    sums = Sums(run.accelerator)
    with run.evaluating(model) as bare_model:
        for batch in loader:
            poles = batch["poles"]
            stands = torch.ones(len(poles), device=run.device)  # 0 after a fall
            returns = torch.zeros_like(stands)
            for _ in range(MOST_STEPS):
                poles, fell = step(poles, bare_model(poles).argmax(1))
                stands = stands * ~fell
                returns += stands  # the reward is 1 for each step without a fall
            sums.add(len(returns), episode_return=returns.sum())
    return sums.result()


# --------------------------------------------------------------------------------------- Main


def main(config: Config) -> None:
    with Run(config, __file__, OBJECTIVE) as run:
        accelerator = run.accelerator
        data = load_data(config, run)
        # No need to prepare the loaders: each yields its own process's samples, on its device.
        train_loader, validation_loader, test_loader = run.loaders(data)
        run.make_plan(train_loader, DEFAULT_EPOCHS)

        model, description = build_model(config)
        if config.compile:
            compile_model(model, config)
        optimizer = build_optimizer(model, config)
        scheduler = run.plan.schedule(optimizer, warmup_share=0.1)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        bare_model = accelerator.unwrap_model(model)
        target = copy.deepcopy(bare_model).requires_grad_(False)
        replay = Replay(config.batch_size, config.buffer_size).to(run.device)
        run.keep(
            model=model, optimizer=optimizer, scheduler=scheduler, target=target, replay=replay
        )
        run.start(description)  # resumes, opens the logs, shows the plan

        for batch in run.batches(train_loader):
            if run.should_evaluate:  # at the top: a resumed run repeats an interrupted evaluation
                run.log(evaluate(run, model, validation_loader))
            if run.should_stop:  # by --early-stopping
                break
            if run.progress.global_step % config.target_every == 0:
                target.load_state_dict(bare_model.state_dict())
            replay.play(bare_model, batch["poles"], config.exploration)
            steps = replay.draw(config.replayed)
            with accelerator.accumulate(model):
                loss, values = compute_loss(model, target, steps, config.discount)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    run.clip_grad_norm_(model, optimizer)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.record(loss, metrics(values, steps))
            if run.should_save:
                run.save()

        if run.should_evaluate:
            run.log(evaluate(run, model, validation_loader))
        run.load_best(model)  # unless --keep last
        run.finish(evaluate(run, model, test_loader))


if __name__ == "__main__":
    main(parse_config(Config, __doc__))
