"""A copy of recipes/mnist_mlp.py on the benchmark's task, which records its updates.

    python benchmarks/resume/loops/recipe.py --output-dir FOLDER/run

The folder of the run's directory has the data and the attempt.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: let the package be found
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch
from torch import nn

from benchmarks.resume.recorder import UpdateRecorder
from benchmarks.resume.schedule import BATCH, EPOCHS, SAVE_EVERY, SEED, WARMUP_UPDATES
from benchmarks.resume.task import CLASSES, LEARNING_RATE, Classifier, Digits
from common.config import TrainingConfig, parse_config
from common.data.dataset import Data
from common.data.loader import Loader
from common.data.samples import Batch
from common.measure.classification import ClassificationSums
from common.run import Run
from common.training.optim import decay_groups

# ------------------------------------------------------------------------------------- Config


@dataclass(kw_only=True)
class Config(TrainingConfig):
    batch_size: int = BATCH  # Samples per process and micro-batch.
    learning_rate: float = LEARNING_RATE  # Peak learning rate.
    checkpoint_every: int = SAVE_EVERY  # Updates between checkpoints.
    warmup_steps: int = WARMUP_UPDATES  # Updates of linear warm-up.
    seed: int = SEED  # Seed of weights, sample order and dropout.


OBJECTIVE = "accuracy:max"
DEFAULT_EPOCHS = {"other": EPOCHS}

# --------------------------------------------------------------------------------------- Data


def load_data(folder: Path) -> Data:
    splits = {name: Digits(folder, name) for name in ("train", "validation")}
    return Data("digits", splits, class_names=[str(digit) for digit in range(CLASSES)])


# -------------------------------------------------------------------------------------- Model


def compute_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    output = model(batch["pixels"], batch["labels"])
    return output["loss"], output["logits"]


# --------------------------------------------------------------------------------- Evaluation


def metrics(logits: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    return {"accuracy": logits.argmax(-1) == batch["labels"]}


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
        folder = run.directory.path.parent
        recorder = UpdateRecorder(folder)
        data = load_data(folder)
        train_loader, validation_loader, test_loader = run.loaders(data)
        run.make_plan(train_loader, DEFAULT_EPOCHS)

        model: nn.Module = Classifier()
        description: dict[str, Any] = {"name": "Classifier", "arguments": {}}
        groups = decay_groups(model, config.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)
        scheduler = run.plan.schedule(optimizer, warmup_share=0.1)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        run.keep(model=model, optimizer=optimizer, scheduler=scheduler)  # what checkpoints save
        run.start(description, compute_loss)  # resumes, opens the logs, shows the plan

        for batch in run.batches(train_loader):
            if run.should_evaluate:
                run.log(evaluate(run, model, validation_loader))
            if run.should_stop:  # by --early-stopping
                break
            with accelerator.accumulate(model):
                loss, logits = compute_loss(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    run.clip_grad_norm_(model, optimizer)  # does not wait for the device
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            recorder.update(optimizer, batch["index"], run.epoch)
            run.record(loss, metrics(logits, batch))
            if run.should_save:
                run.save()

        if run.should_evaluate:
            run.log(evaluate(run, model, validation_loader))
        recorder.finish(accelerator.unwrap_model(model))
        run.load_best(model)  # unless --keep last
        run.finish(evaluate(run, model, test_loader))


if __name__ == "__main__":
    main(parse_config(Config, __doc__))
