"""Fine-tune BERT with adversarial training (arXiv 1605.07725).

    python examples/adversarial.py

A copy of recipes/bert.py. It trains twice on each micro-batch. The second time, the word embeddings
of each sample are moved in the direction that increases its loss.

Result: 80.4 % test accuracy from random weights. One run: torch 2.13, fp32, two cores of an AMD
EPYC without AVX512; recipes/bert.py reaches 78.6 ± 0.7 % (3 seeds, bf16). From pretrained weights,
with --model: 91.4 ± 0.4 % validation accuracy on SST-2, and 81.4 ± 0.8 % test accuracy on MRPC
with --distance 0.02 (3 seeds each; docs/results.md).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

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
from common.training.adversarial import EmbeddingAdversary
from common.training.optim import decay_groups

# ------------------------------------------------------------------------------------- Config


@dataclass(kw_only=True)
class Config(TrainingConfig):
    batch_size: int = 32  # Samples per process and micro-batch.
    # Peak learning rate (default: 1e-3 from scratch; pretrained: 5e-5 at BERT-base's width of 768,
    # and more for a narrower model).
    learning_rate: float | None = None
    # Hub id or folder of a checkpoint; scratch: a small model that is not pretrained; auto:
    # BERT-base on a GPU if the Hub has it, otherwise scratch.
    model: str = "auto"
    # Tokens of a text, special ones included.
    max_length: int = flag(128, least=4, most=10**6, role="size")
    dropout: float = flag(0.1, least=0, most=1)  # Share of activations dropped while training.
    # Leave padding out of the computation; auto: on a CPU only.
    padding_free: Literal["auto", "no", "yes"] = "auto"
    # Distance by which a sample's word embeddings move, as a share of their norm (default: 0.08;
    # 0.005 from scratch). MRPC, with pairs of similar sentences, needs 0.02.
    distance: float | None = flag(None, least=0)
    # One or two columns of text (default: all that have text).
    text_columns: tuple[str, ...] = flag((), role="data")


OBJECTIVE = "accuracy:max"
DEFAULT_EPOCHS = {"sst2": 3, "mrpc": 5, "docstrings": 4, "other": 3}

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
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if data.splits["train"].token_positions is not None:  # compute only real tokens
        leave_out_padding(model)
    return model, {"name": f"BERT ({Path(config.model).name})", **data.preprocessing()}


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    if config.learning_rate is None:
        width = model.get_parameter("classifier.weight").shape[1]
        # Adam's best rate is about inversely proportional to the width (arXiv 2203.03466).
        config.learning_rate = 1e-3 if config.model == "scratch" else 5e-5 * 768 / width
    groups = decay_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)


def build_adversary(model: nn.Module, config: Config) -> EmbeddingAdversary:
    if config.distance is None:
        # Random weights learn nothing with the distance that suits pretrained ones.
        config.distance = 0.005 if config.model == "scratch" else 0.08
    embedding = model.get_submodule("bert.embeddings.word_embeddings")
    return EmbeddingAdversary(embedding, config.distance)


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
        adversary = build_adversary(model, config)
        optimizer = build_optimizer(model, config)
        scheduler = run.plan.schedule(optimizer, warmup_share=0.1)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        run.keep(model=model, optimizer=optimizer, scheduler=scheduler)  # what checkpoints save
        run.start(description, compute_loss, passes=2)  # resumes, opens the logs, shows the plan

        for batch in run.batches(train_loader):
            if run.should_evaluate:  # at the top: a resumed run repeats an interrupted evaluation
                run.log(evaluate(run, model, validation_loader))
            if run.should_stop:  # by --early-stopping
                break
            with accelerator.accumulate(model):
                loss, logits = compute_loss(model, batch)
                accelerator.backward(loss)
                with adversary.moving():
                    moved_loss, _ = compute_loss(model, batch)
                    accelerator.backward(moved_loss)
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
