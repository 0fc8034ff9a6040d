"""Writes a case as a recipe file, as a user would write a copy."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.generated.grammar import BATCHES, OPTIMIZERS, RANKS, TOTALS, VALUES, Case, Metric

# A line that ends in "#? name" is part of the copy only if the case has the option of this name. So
# are the lines between "#? begin name" and "#? end".
OPTION = re.compile(r"  #\? (.+)$")
BLOCK_MARK = re.compile(r"#\? (?:begin (.+)|end)$")

TEMPLATE = '''\
"""A generated copy of a recipe."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from common.config import TrainingConfig, parse_config
from common.data.dataset import Data
from common.data.stored_samples import TensorSamples
from common.measure.sums import Sums
from common.run import Run
from tests.generated.notes import Notes


@dataclass(kw_only=True)
class Config(TrainingConfig):
$CONFIG$


OBJECTIVE = "$OBJECTIVE$"


def load_data(config):
    random = np.random.default_rng(0)
    splits = {}
    for name, size in $SIZES$.items():
        inputs = random.normal(size=(size, 6)).astype("float32")
        labels = np.digitize(inputs[:, 0] + inputs[:, 1], [-0.7, 0.7])
        splits[name] = TensorSamples(inputs=inputs, labels=labels)
    return Data("drawn", splits)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 5),
            nn.BatchNorm1d(5),  #? batch norm
            nn.Tanh(),
            nn.Dropout(0.2),  #? dropout
        )
        self.first = nn.Linear(5, 3)
        self.second = nn.Linear(5, 3)  #? heads

#? begin heads
    def forward(self, inputs, turn=0):
        head = self.second if turn else self.first
        return head(self.body(inputs))
#? end
    def forward(self, inputs):  #? one head
        return self.first(self.body(inputs))  #? one head


#? begin own optimizer
class SignDescent(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad.sign())


#? end
#? begin own scheduler
class Halving:
    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5 if self.steps % 2 == 0 else 1.0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


#? end
#? begin own state
class Fading:
    """A weight in the loss that each update makes smaller."""

    weight = 1.0

    def state_dict(self):
        return {"weight": self.weight}

    def load_state_dict(self, state):
        self.weight = state["weight"]


#? end
def compute_loss(model, batch):
    logits = model(batch["inputs"])
    return F.cross_entropy(logits, batch["labels"]), logits


#? begin finish
def finish(totals):
    count = totals["count"]
    return {name: total.sum() / count for name, total in totals.items()}


#? end
def evaluate(run, model, loader, notes, purpose):
    rank, ranks = run.accelerator.process_index, run.accelerator.num_processes
    sums = Sums(run.accelerator, finish)  #? finish
    sums = Sums(run.accelerator)  #? no finish
    torch.rand(7)  #? draws
    with run.evaluating(model) as bare_model:
        for number, batch in enumerate(loader):
            labels = batch["labels"]
            count = len(labels)
            loss, logits = compute_loss(bare_model, batch)
            added = {"loss": loss * count}  #? sums.add
            added = {}  #? sums.record
$TOTALS$
            added["drawn"] = torch.rand(count).sum()  #? draws
            sums.add(count, **added)  #? sums.add
            notes.evaluated(purpose, run.progress.global_step, count, totals=added)  #? sums.add
#? begin sums.record
            sums.record(loss, added, count)
            step = run.progress.global_step
            notes.evaluated(purpose, step, count, loss=loss, metrics=added)
#? end
    return sums.result()


def main(config):
    with Run(config, __file__, OBJECTIVE) as run:  #? one head
    with Run(config, __file__, OBJECTIVE, ddp={"find_unused_parameters": True}) as run:  #? heads
        accelerator = run.accelerator
        rank, ranks = accelerator.process_index, accelerator.num_processes
        notes = Notes(rank)
        data = load_data(config)
        train_loader, validation_loader, test_loader = run.loaders(data)
        run.make_plan(train_loader, {"other": $EPOCHS$})

        model = Network()
        teacher = Network().eval().requires_grad_(False)  #? teacher that is not kept
        model.body.requires_grad_(False)  #? frozen before prepare
        parameters = model.parameters()
        optimizer = $OPTIMIZER$
        scheduler = run.plan.schedule(optimizer, warmup_share=0.2)  #? scheduler warm-up
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  #? scheduler StepLR
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)  #? prepared
        model, optimizer = accelerator.prepare(model, optimizer)  #? not prepared
        scheduler = Halving(optimizer)  #? own scheduler
        scheduler = None  #? scheduler by hand
        bare = accelerator.unwrap_model(model)
        forgotten = accelerator.prepare(nn.Linear(2, 2))  #? mistake forgotten part
        bare.body.requires_grad_(False)  #? frozen after prepare
        fading = Fading()  #? own state
        average = AveragedModel(bare, multi_avg_fn=get_ema_multi_avg_fn(0.5))  #? average
        evaluated = average.module  #? average
        evaluated = model  #? no average
        run.keep(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,  #? keeps scheduler
            average=average,  #? average
            fading=fading,  #? own state
        )
        run.start({"name": "network"}, compute_loss)  #? counts FLOPs
        run.start({"name": "network"})  #? counts no FLOPs
        if average.n_averaged == 0:  #? average
            average.update_parameters(model)  #? average

        first = run.progress.global_step * config.gradient_accumulation_steps
        for number, batch in enumerate(run.batches(train_loader), first):
            if run.should_evaluate:
                run.log(evaluate(run, evaluated, validation_loader, notes, "validation"))
            if run.should_stop:
                break
            notes.reached(number, "batch")
            update = run.progress.global_step + 1
            bare.body.requires_grad_(update > $UNFROZEN$)  #? until an update
            bare.body.requires_grad_(run.epoch == 1)  #? by epoch
            labels = batch["labels"]
            with accelerator.accumulate(model):
                turn = update % 2  #? loss heads in turns
                turn = (number + rank) % 2  #? loss heads by rank
                logits = model(batch["inputs"], turn)  #? heads
                logits = model(batch["inputs"])  #? one head
                loss = F.cross_entropy(logits, (labels + turn) % 3)  #? heads
                loss = F.cross_entropy(logits, labels)  #? loss plain
#? begin loss gathered
                everything = run.gather(logits)
                spread = everything.mean(0).square().sum()
                loss = F.cross_entropy(logits, labels) + spread
#? end
#? begin loss own collective
                counts = torch.bincount(labels, minlength=3).float()
                counts = accelerator.reduce(counts, "sum")
                weight = 1 / (1 + counts)
                loss = F.cross_entropy(logits, labels, weight=weight)
#? end
                wanted = teacher(batch["inputs"])  #? teacher that is not kept
                loss = loss + F.mse_loss(logits, wanted)  #? teacher that is not kept
                loss = loss * (1 + fading.weight)  #? own state
                accelerator.backward(loss)
                notes.reached(number, "backward")
                if accelerator.sync_gradients:
                    run.clip_grad_norm_(model, optimizer)
                    notes.clipped(update, model)
#? begin gradient noise
                    noise = torch.Generator().manual_seed(update)
                    for parameter in bare.parameters():
                        if parameter.grad is not None:
                            drawn = torch.randn(parameter.shape, generator=noise)
                            parameter.grad.add_(drawn, alpha=0.1)
#? end
                    for group in optimizer.param_groups:  #? scheduler by hand
                        group["lr"] = config.learning_rate / update  #? scheduler by hand
                    notes.reached(number, "step")
                optimizer.step()
                scheduler.step()  #? prepared
                if accelerator.sync_gradients:  #? own scheduler
                    scheduler.step()  #? own scheduler
                optimizer.zero_grad()
                if accelerator.sync_gradients:  #? average
                    average.update_parameters(model)  #? average
                if accelerator.sync_gradients:  #? own state
                    fading.weight *= 0.9  #? own state
            recorded = {}
$METRICS$
            loss = float(loss)  #? the loss is a number
            notes.recorded(update, loss, recorded)
            run.record(loss, recorded)
            notes.reached(number, "record")
            if run.should_save:
                run.save()
            notes.reached(number, "save")

        if run.should_evaluate:
            run.log(evaluate(run, evaluated, validation_loader, notes, "validation"))
        notes.ended(model=bare)  #? no average
        notes.ended(model=bare, average=average.module)  #? average
        run.load_best(evaluated)
        run.finish(evaluate(run, evaluated, test_loader, notes, "final"))


if __name__ == "__main__":
    main(parse_config(Config, __doc__))
'''


def recipe_of(case: Case) -> str:
    """Return the source of a case's copy."""
    blocks = {
        "CONFIG": [f"    {line}" for line in config_lines(case)],
        "TOTALS": recorded_lines(case.totals, TOTALS, "added"),
        "METRICS": recorded_lines(case.metrics, VALUES, "recorded"),
    }
    words = {
        "OBJECTIVE": "f1:max" if case.mistake == "unknown objective" else "loss:min",
        "SIZES": repr(split_sizes(case)),
        "EPOCHS": str(case.epochs),
        "OPTIMIZER": OPTIMIZERS[case.optimizer],
        "UNFROZEN": str(case.updates_per_epoch),
    }
    names = options(case)
    lines: list[str] = []
    block_option: str | None = None  # the option of the lines between two marks
    for line in TEMPLATE.splitlines():
        mark = BLOCK_MARK.match(line)
        if mark is not None:
            block_option = mark[1]  # None at the end of a block
            continue
        if block_option is not None and block_option not in names:
            continue
        block = blocks.get(line.strip("$"))
        if block is not None:
            lines += block
            continue
        option = OPTION.search(line)
        if option is None or option[1] in names:
            lines.append(OPTION.sub("", line).rstrip())
    text = "\n".join(lines) + "\n"
    for name, value in words.items():
        text = text.replace(f"${name}$", value)
    return text


def options(case: Case) -> set[str]:
    """Return the names of the template's lines that a case has."""
    has_heads = case.loss.startswith("heads")
    has_vectors = any(total.values[0] == "by class" for total in case.totals)
    finishes = has_vectors and not case.evaluation_records
    is_prepared = case.scheduler in ("warm-up", "StepLR")
    choices = {
        "batch norm": case.batch_norm,
        "dropout": case.dropout,
        "own optimizer": case.optimizer == "own",
        "own scheduler": case.scheduler == "own",
        "prepared": is_prepared,
        "not prepared": not is_prepared,
        # A scheduler that is None is named, and one that a copy never made is not.
        "keeps scheduler": case.scheduler != "none",
        "no average": "average" not in case.parts,
        "finish": finishes,
        "no finish": not finishes,
        "sums.add": not case.evaluation_records,
        "sums.record": case.evaluation_records,
        "draws": case.evaluation_draws,
        "frozen before prepare": case.freezing.startswith("before prepare"),
        "frozen after prepare": case.freezing.startswith("after prepare"),
        "until an update": case.freezing.endswith("until an update"),
        "by epoch": case.freezing == "by epoch",
        "counts FLOPs": case.counts_flops,
        "counts no FLOPs": not case.counts_flops,
        "gradient noise": case.gradient_noise,
        "the loss is a number": case.loss_is_number,
        "heads": has_heads,
        "one head": not has_heads,
        f"scheduler {case.scheduler}": True,
        f"loss {case.loss}": True,
        f"mistake {case.mistake}": True,
    }
    return {name for name, is_chosen in choices.items() if is_chosen} | {*case.parts}


def split_sizes(case: Case) -> dict[str, int]:
    """Return the number of samples of each split."""
    per_update = case.batch_size * case.accumulation * case.processes
    sizes = {"train": case.updates_per_epoch * per_update + case.spare_samples % per_update}
    others = {"validation": case.validation, "test": case.test}
    return sizes | {name: size for name, size in others.items() if size is not None}


def config_lines(case: Case) -> Iterator[str]:
    """Yield the flags' defaults of a case's copy."""
    yield f"batch_size: int = {case.batch_size}"
    yield f"gradient_accumulation_steps: int = {case.accumulation}"
    yield "learning_rate: float = 0.03"
    yield f"max_grad_norm: float = {case.max_grad_norm}"
    yield f"seed: int = {case.seed}"
    yield f"log_every: int | None = {case.log_every}"
    yield f"eval_every: int | None = {case.eval_every}"
    yield f"checkpoint_every: int | None = {case.checkpoint_every}"
    yield f'keep: str = "{case.keep}"'
    yield f"early_stopping: int | None = {case.early_stopping}"
    yield 'mixed_precision: str = "no"'
    yield "num_threads: int | None = 1"
    yield 'tracker: str = "none"'


def recorded_lines(metrics: tuple[Metric, ...], choices: dict[str, str], into: str) -> list[str]:
    """Return the lines that fill the dictionary `into`."""
    lines = []
    for metric in metrics:
        conditions = [RANKS[metric.ranks], BATCHES[metric.batches]]
        condition = " and ".join(filter(None, conditions))
        values = [choices[name] for name in metric.values]
        value = values[0]
        if len(values) > 1:
            value = f"{values[1]} if number % 2 else {values[0]}"
        line = f'{into}["{metric.name}"] = {value}'
        if condition:
            lines.append(f"            if {condition}:")
            line = f"    {line}"
        lines.append(f"            {line}")
    return lines
