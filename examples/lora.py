"""Fine-tune a frozen BERT with low-rank matrices added to its weights: LoRA (arXiv 2106.09685).

    python examples/lora.py

A copy of recipes/bert.py. Checkpoints hold the frozen weights only once. The exported model is a
plain BERT into which the matrices are merged. To continue from it, pass its folder as --model.

Result: 37.2 % test accuracy with a BERT of random weights, where the largest class has 31.9 %. To
learn more, pass a checkpoint as --model: from the model that recipes/bert.py had trained on the
same data (79.4 %), with a new head, 79.4 % after 2 epochs. One run each: torch 2.13, bf16, two
cores of an AMD EPYC; the number of threads was not noted.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from common.config import TrainingConfig, parse_config
from common.data.loader import Loader
from common.data.samples import Batch
from common.data.sources import choose_source
from common.data.text import TextData, load_text
from common.flags import flag
from common.measure.classification import ClassificationSums
from common.models.bert import choose_checkpoint, load_bert, small_bert
from common.models.compile import compile_layers
from common.models.packing import leave_out_padding, token_positions
from common.run import Run
from common.training.optim import decay_groups

# ------------------------------------------------------------------------------------- Config


@dataclass(kw_only=True)
class Config(TrainingConfig):
    batch_size: int = 32  # Samples per process and micro-batch.
    learning_rate: float = 1e-3  # Peak learning rate.
    # Rank of the matrices added to the weights.
    rank: int = flag(8, least=1, most=10**6, role="size")
    # Hub id or folder of a checkpoint; scratch: a small model that is not pretrained; auto:
    # BERT-base on a GPU if the Hub has it, otherwise scratch.
    model: str = "auto"
    # Tokens of a text, special ones included.
    max_length: int = flag(128, least=4, most=10**6, role="size")
    dropout: float = flag(0.1, least=0, most=1)  # Share of activations dropped while training.
    # Leave padding out of the computation; auto: on a CPU only.
    padding_free: Literal["auto", "no", "yes"] = "auto"
    # One or two columns of text (default: all that have text).
    text_columns: tuple[str, ...] = flag((), role="data")


OBJECTIVE = "accuracy:max"
DEFAULT_EPOCHS = {"sst2": 3, "mrpc": 5, "docstrings": 12, "other": 3}

# --------------------------------------------------------------------------------------- Data


def load_data(config: Config, run: Run) -> TextData:
    source = choose_source(
        config, run.accelerator, public="sst2", built_in="docstrings", public_on_cpu=False
    )
    config.model = choose_checkpoint(config, run.accelerator)
    on_cpu = run.device.type == "cpu"
    is_padding_free = on_cpu if config.padding_free == "auto" else config.padding_free == "yes"
    return load_text(
        source,
        checkpoint=config.model,
        max_length=config.max_length,
        text_columns=config.text_columns,
        label_column=config.label_column,
        token_positions=token_positions if is_padding_free else None,
    )


# -------------------------------------------------------------------------------------- Model


def build_model(config: Config, data: TextData) -> tuple[nn.Module, dict[str, Any]]:
    if config.model == "scratch":
        model = small_bert(data, config.dropout)
    else:
        model = load_bert(config.model, data, config.dropout)
    if not config.evaluate_only:  # what was exported is a plain BERT
        add_low_rank(model, config.rank)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if data.splits["train"].token_positions is not None:  # compute only real tokens
        leave_out_padding(model)
    return model, {"name": f"BERT ({Path(config.model).name})", **data.preprocessing()}


class LowRank(nn.Module):
    """Adds to a weight [outputs, inputs] the product of two thin matrices, which starts at 0."""

    def __init__(self, outputs: int, inputs: int, rank: int):
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


def add_low_rank(model: nn.Module, rank: int) -> None:
    """Freeze all but the head, and add matrices to each linear layer of the encoder."""
    model.get_submodule("bert").requires_grad_(False)
    for layer in model.get_submodule("bert.encoder").modules():
        if isinstance(layer, nn.Linear):
            added = LowRank(layer.out_features, layer.in_features, rank)
            parametrize.register_parametrization(layer, "weight", added)


def merged(model: nn.Module) -> nn.Module:
    """Return a plain BERT whose weights include the added matrices, for test and export."""
    plain = copy.deepcopy(model)
    for layer in plain.modules():
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight")
    return plain


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    groups = decay_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)


def compute_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    return F.cross_entropy(logits, batch["labels"]), logits


def metrics(logits: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    return {"accuracy": logits.argmax(-1) == batch["labels"]}


# --------------------------------------------------------------------------------- Evaluation


def evaluate(run: Run, model: nn.Module, loader: Loader) -> dict[str, float]:
    sums = ClassificationSums(run.accelerator, run.data.class_names)
    with run.evaluating(model) as bare_model:
        for batch in loader:
            loss, logits = compute_loss(bare_model, batch)
            sums.add(loss, logits, batch["labels"])
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
            compile_layers(model.get_submodule("bert.encoder.layer").children())
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
        run.finish(evaluate(run, merged(accelerator.unwrap_model(model)), test_loader))


if __name__ == "__main__":
    main(parse_config(Config, __doc__))
