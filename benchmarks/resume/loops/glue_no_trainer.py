"""Trains with the loop of transformers' `run_glue_no_trainer.py` and its flags.

python benchmarks/resume/loops/glue_no_trainer.py FOLDER

The flags are --seed, --checkpointing_steps 8, --with_tracking and, when it is resumed,
--resume_from_checkpoint. It logs once an epoch, as the script does. Unlike the checkpointing
example, it continues the number of updates after a resume.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a file: let the package be found
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import get_scheduler

from benchmarks.resume.attempt import RUN_FOLDER, Attempt
from benchmarks.resume.loops.accelerate_loop import ROWS_FILE, RowTracker
from benchmarks.resume.recorder import UpdateRecorder
from benchmarks.resume.schedule import BATCH, EPOCHS, SAVE_EVERY, SEED, UPDATES, WARMUP_UPDATES
from benchmarks.resume.task import LEARNING_RATE, Classifier, Digits


def start_position(attempt: Attempt, batches_per_epoch: int) -> tuple[int, int, int]:
    """Return the epoch to begin with, the batches to skip in it, and the updates so far."""
    if attempt.checkpoint is None:
        return 0, 0, 0
    name = Path(attempt.checkpoint).name
    completed_steps = int(name.removeprefix("step_"))
    epoch, skipped = divmod(completed_steps, batches_per_epoch)
    return epoch, skipped, completed_steps


def evaluate(
    accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader[dict[str, torch.Tensor]]
) -> float:
    """Return the accuracy on the validation data, without repeated samples of the last batch."""
    model.eval()
    correct = 0
    count = 0
    for batch in loader:
        with torch.no_grad():
            predictions = model(**batch)["logits"].argmax(-1)
        gathered, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
        correct += int((gathered == labels).sum())
        count += len(labels)
    return correct / count


def main(folder: Path) -> None:
    """Train, and resume where the attempt says so."""
    recorder = UpdateRecorder(folder)
    attempt = recorder.attempt
    run_folder = folder / RUN_FOLDER
    accelerator = Accelerator(cpu=True, log_with=RowTracker(run_folder / ROWS_FILE))
    set_seed(SEED)
    batch_size = BATCH // accelerator.num_processes
    train_loader = DataLoader(Digits(folder, "train"), shuffle=True, batch_size=batch_size)
    eval_loader = DataLoader(Digits(folder, "validation"), batch_size=batch_size)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = get_scheduler(
        name="linear",
        optimizer=optimizer,
        num_warmup_steps=WARMUP_UPDATES * accelerator.num_processes,
        num_training_steps=EPOCHS * len(train_loader),
    )
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    accelerator.init_trackers("glue_no_trainer")
    first_epoch, skipped, completed_steps = start_position(attempt, len(train_loader))
    if attempt.checkpoint is not None:
        accelerator.load_state(attempt.checkpoint)
    for epoch in range(first_epoch, math.ceil(UPDATES / len(train_loader))):
        model.train()
        total_loss = torch.zeros(())
        active_loader = train_loader
        if attempt.checkpoint is not None and epoch == first_epoch:
            active_loader = accelerator.skip_first_batches(train_loader, skipped)
        for batch in active_loader:
            loss = model(**batch)["loss"]
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            completed_steps += 1
            recorder.update(optimizer, batch["index"], epoch)
            if completed_steps % SAVE_EVERY == 0:
                accelerator.save_state(str(run_folder / f"step_{completed_steps}"))
            if completed_steps >= UPDATES:
                break
        row = {
            "accuracy": evaluate(accelerator, model, eval_loader),
            "train_loss": total_loss.item() / len(train_loader),
            "epoch": epoch,
        }
        accelerator.log(row, step=completed_steps)
    recorder.finish(accelerator.unwrap_model(model))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
