"""Trains with Accelerate as its checkpointing example does, or as its guide can be read.

python benchmarks/resume/loops/accelerate_loop.py FOLDER

Variants:
    example: the loop of examples/by_feature/checkpointing.py, with its default flags
    stateful: the same with its flag --use_stateful_dataloader
    guide: the same calls with what the guides add: a seedable sampler, `set_epoch`, and the
        position registered for checkpointing
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: let the package be found
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from benchmarks.resume.attempt import RUN_FOLDER
from benchmarks.resume.recorder import UpdateRecorder
from benchmarks.resume.schedule import BATCH, EPOCHS, SAVE_EVERY, SEED, WARMUP_UPDATES
from benchmarks.resume.task import LEARNING_RATE, Classifier, Digits

ROWS_FILE = "rows.jsonl"
LOADER_SETTINGS: dict[str, dict[str, Any]] = {
    "example": {},
    "stateful": {"use_stateful_dataloader": True},
    "guide": {"use_seedable_sampler": True, "data_seed": SEED},
}


class RowTracker(GeneralTracker):
    """A custom tracker, as Accelerate's guide to trackers describes it: it appends JSON lines."""

    name = "rows"
    requires_logging_directory = False

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    @property
    def tracker(self) -> Path:
        return self.file

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **unused: Any) -> None:
        """Append a row."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


class Position:
    """The epoch, the step in it and the number of updates, saved with the other states."""

    def __init__(self) -> None:
        self.epoch = 0
        self.step_in_epoch = 0
        self.updates = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


class AccelerateTraining:
    """What all variants share: the model with its data, an update, an evaluation, and the end."""

    def __init__(self, folder: Path) -> None:
        self.recorder = UpdateRecorder(folder)
        self.attempt = self.recorder.attempt
        self.run_folder = folder / RUN_FOLDER
        self.accelerator = Accelerator(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(**LOADER_SETTINGS[self.attempt.variant]),
            log_with=RowTracker(self.run_folder / ROWS_FILE),
        )
        self.accelerator.init_trackers("resume")
        set_seed(SEED)
        batch_size = BATCH // self.accelerator.num_processes
        train_loader = DataLoader(Digits(folder, "train"), shuffle=True, batch_size=batch_size)
        eval_loader = DataLoader(Digits(folder, "validation"), batch_size=batch_size)
        model = Classifier()
        optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
        # Accelerate steps the schedule once for each process, so its lengths count batches.
        processes = self.accelerator.num_processes
        scheduler = get_linear_schedule_with_warmup(
            optimizer,
            num_warmup_steps=WARMUP_UPDATES * processes,
            num_training_steps=len(train_loader) * EPOCHS,
        )
        prepared = self.accelerator.prepare(model, optimizer, train_loader, eval_loader, scheduler)
        self.model, self.optimizer, self.train_loader, self.eval_loader, self.scheduler = prepared

    def update(self, batch: dict[str, torch.Tensor], epoch: int, step: int) -> None:
        """Make an update, record its samples, and log its loss as row `step`."""
        loss = self.model(**batch)["loss"]
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.accelerator.log({"loss": loss.item()}, step=step)
        self.recorder.update(self.optimizer, batch["index"], epoch)

    def evaluate(self) -> None:
        """Compute the accuracy on the validation data, as the example does after each epoch."""
        self.model.eval()
        correct = 0
        for batch in self.eval_loader:
            with torch.no_grad():
                logits = self.model(**batch)["logits"]
            pair = (logits.argmax(-1), batch["labels"])
            predictions, labels = self.accelerator.gather_for_metrics(pair)
            correct += int((predictions == labels).sum())
        self.accelerator.print(f"{correct} correct")

    def finish(self) -> None:
        """Save the final weights, and end the process group."""
        self.recorder.finish(self.accelerator.unwrap_model(self.model))
        self.accelerator.end_training()


def train_as_example(training: AccelerateTraining) -> None:
    """Train with the bookkeeping of examples/by_feature/checkpointing.py.

    As there, the position follows from the checkpoint's name, `overall_step` grows by the skipped
    steps of the resumed epoch only, and checkpoints are named after it.
    """
    accelerator = training.accelerator
    attempt = training.attempt
    overall_step = 0
    first_epoch = 0
    resume_step = 0
    if attempt.checkpoint is not None:
        accelerator.load_state(attempt.checkpoint)
        saved_step = int(Path(attempt.checkpoint).name.removeprefix("step_"))
        first_epoch, resume_step = divmod(saved_step, len(training.train_loader))
    for epoch in range(first_epoch, EPOCHS):
        training.model.train()
        loader = training.train_loader
        if attempt.checkpoint is not None and epoch == first_epoch:
            if attempt.variant != "stateful":
                loader = accelerator.skip_first_batches(loader, resume_step)
            overall_step += resume_step
        for batch in loader:
            overall_step += 1
            training.update(batch, epoch, overall_step)
            if overall_step % SAVE_EVERY == 0:
                accelerator.save_state(str(training.run_folder / f"step_{overall_step}"))
        training.evaluate()
    training.finish()


def train_as_guide(training: AccelerateTraining) -> None:
    """Train with `save_state`, `load_state` and `skip_first_batches`, and an exact position."""
    accelerator = training.accelerator
    position = Position()
    accelerator.register_for_checkpointing(position)
    if training.attempt.checkpoint is not None:
        accelerator.load_state(training.attempt.checkpoint)
    for epoch in range(position.epoch, EPOCHS):
        training.model.train()
        training.train_loader.set_epoch(epoch)
        loader = training.train_loader
        if position.step_in_epoch > 0:
            loader = accelerator.skip_first_batches(loader, position.step_in_epoch)
        for batch in loader:
            position.updates += 1
            position.step_in_epoch += 1
            training.update(batch, epoch, position.updates)
            if position.updates % SAVE_EVERY == 0:
                accelerator.save_state(str(training.run_folder / f"step_{position.updates}"))
        position.epoch = epoch + 1
        position.step_in_epoch = 0
        training.evaluate()
    training.finish()


def main(folder: Path) -> None:
    """Train the variant that the attempt names."""
    training = AccelerateTraining(folder)
    if training.attempt.variant == "guide":
        train_as_guide(training)
    else:
        train_as_example(training)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
