"""Train a recurrent language model on characters: the documentation of the Python language.

    python examples/character_model.py

A copy of recipes/mnist_mlp.py. It shows sequences of integers as data, two layers that share one
weight, and perplexity as an objective to minimise.

Result: perplexity 4.34 per character on test data.
One run with --num-threads 1: torch 2.13, fp32, two cores of an AMD EPYC.
"""

from dataclasses import dataclass
from pydoc_data.topics import topics  # the texts that `help` shows
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from common.config import TrainingConfig, parse_config
from common.data.dataset import Data
from common.data.loader import Loader
from common.data.samples import Batch
from common.data.stored_samples import TensorSamples
from common.flags import flag
from common.measure.sums import Sums, Totals
from common.models.compile import compile_model
from common.models.recompute import recompute
from common.run import Run
from common.training.optim import decay_groups

# ------------------------------------------------------------------------------------- Config


@dataclass(kw_only=True)
class Config(TrainingConfig):
    # Precision; no: fp32, in which a GRU is five times as fast on a CPU as in bf16.
    mixed_precision: Literal["auto", "no", "tf32", "bf16", "fp16"] = "no"
    batch_size: int = 32  # Samples per process and micro-batch.
    learning_rate: float = 1e-2  # Peak learning rate.
    weight_decay: float = 0.0  # Decay of weight matrices; biases have none.
    # Size of the embeddings and the recurrent layers.
    width: int = flag(128, least=1, most=10**6, role="size")
    layers: int = flag(1, least=1, most=1000, role="size")  # Number of recurrent layers.
    length: int = flag(32, least=1, most=10**5, role="size")  # Characters of a sample.
    dropout: float = flag(0.0, least=0, most=1)  # Share of activations dropped while training.


OBJECTIVE = "perplexity:min"
DEFAULT_EPOCHS = {"other": 2}

# --------------------------------------------------------------------------------------- Data


def load_data(config: Config, run: Run) -> Data:
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    characters = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    # Windows overlap by one character, so each character is a target once.
    windows = characters.unfold(0, config.length + 1, config.length)
    held_out = len(windows) // 10
    parts = windows.split([len(windows) - 2 * held_out, held_out, held_out])
    names = ("train", "validation", "test")
    splits = {name: TensorSamples(text=part) for name, part in zip(names, parts, strict=True)}
    return Data("python-docs", splits)


# -------------------------------------------------------------------------------------- Model


class CharacterModel(nn.Module):
    """Recurrent layers and tied embeddings: [batch, length] to [batch, length, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.body = nn.GRU(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embedding.weight  # tied
        self.gradient_checkpointing = False  # recompute the body in the backward pass

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        features = self.embedding(characters)
        if self.gradient_checkpointing and self.training:
            features, _ = recompute(self.body, features)
        else:
            features, _ = self.body(features)
        return self.head(self.dropout(features))


def build_model(config: Config, data: Data) -> tuple[nn.Module, dict[str, Any]]:
    arguments: dict[str, Any] = {
        "vocabulary": 128,  # of ASCII
        "width": config.width,
        "layers": config.layers,
        "dropout": config.dropout,
    }
    model = CharacterModel(**arguments)
    model.gradient_checkpointing = config.gradient_checkpointing
    name = f"GRU {config.layers}×{config.width}"
    return model, {"name": name, "arguments": arguments, "encoding": "ascii"}


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    groups = decay_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)


def compute_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(batch["text"][:, :-1])
    return F.cross_entropy(logits.mT, batch["text"][:, 1:]), logits  # .mT: classes in dim 1


def metrics(logits: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    return {"accuracy": logits.argmax(-1) == batch["text"][:, 1:]}


def figures(totals: Totals) -> dict[str, Any]:
    loss = totals["loss"] / totals["count"]
    return {"loss": loss, "perplexity": loss.exp()}


# --------------------------------------------------------------------------------- Evaluation


def evaluate(run: Run, model: nn.Module, loader: Loader) -> dict[str, float]:
    sums = Sums(run.accelerator, figures)
    with run.evaluating(model) as bare_model:
        for batch in loader:
            loss, _ = compute_loss(bare_model, batch)
            sums.add(len(batch["text"]), loss=loss * len(batch["text"]))
    return sums.result()


# --------------------------------------------------------------------------------------- Main


def main(config: Config) -> None:
    with Run(config, __file__, OBJECTIVE) as run:
        accelerator = run.accelerator
        data = load_data(config, run)
        # No need to prepare the loaders: each yields its own process's samples, on its device.
        train_loader, validation_loader, test_loader = run.loaders(data)
        run.make_plan(train_loader, DEFAULT_EPOCHS)

        model, description = build_model(config, data)
        if config.compile:
            compile_model(model, config)
        optimizer = build_optimizer(model, config)
        scheduler = run.plan.schedule(optimizer, warmup_share=0.1)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        run.keep(model=model, optimizer=optimizer, scheduler=scheduler)  # what checkpoints save
        run.start(description, compute_loss)  # resumes, opens the logs, shows the plan

        for batch in run.batches(train_loader):
            if run.should_evaluate:  # at the top: a resumed run repeats an interrupted evaluation
                run.log(evaluate(run, model, validation_loader))
            if run.should_stop:  # by --early-stopping
                break
            with accelerator.accumulate(model):
                loss, logits = compute_loss(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    run.clip_grad_norm_(model, optimizer)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.record(loss, metrics(logits, batch))
            if run.should_save:
                run.save()

        if run.should_evaluate:
            run.log(evaluate(run, model, validation_loader))
        run.load_best(model)  # unless --keep last
        run.finish(evaluate(run, model, test_loader))


if __name__ == "__main__":
    main(parse_config(Config, __doc__))
