"""Trains with the Trainer of transformers.

python benchmarks/resume/loops/hf_trainer.py FOLDER

It saves by `save_steps`, and resumes with `resume_from_checkpoint=True`, or from the path of the
attempt. A callback records the updates. The model's `forward` keeps the samples of its batch.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: let the package be found
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from benchmarks.resume.attempt import RUN_FOLDER
from benchmarks.resume.recorder import UpdateRecorder
from benchmarks.resume.schedule import BATCH, EPOCHS, SAVE_EVERY, SEED, WARMUP_UPDATES
from benchmarks.resume.task import LEARNING_RATE, Classifier, Digits


class Recording(TrainerCallback):
    """Records each update when it is done, before the Trainer logs and saves."""

    def __init__(self, recorder: UpdateRecorder, model: Classifier) -> None:
        self.recorder = recorder
        self.model = model

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **parts: Any,
    ) -> None:
        """Record the samples that `forward` has seen last."""
        assert self.model.last_index is not None
        assert state.epoch is not None
        epoch = math.ceil(state.epoch) - 1  # a fraction after the first update, 1.0 at the end
        self.recorder.update(parts["optimizer"], self.model.last_index, epoch)


def main(folder: Path) -> None:
    """Train, and resume where the attempt says so."""
    recorder = UpdateRecorder(folder)
    attempt = recorder.attempt
    set_seed(SEED)  # before the model is made, as the documentation of `seed` asks
    model = Classifier()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = TrainingArguments(
        output_dir=str(folder / RUN_FOLDER),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH // processes,
        per_device_eval_batch_size=BATCH // processes,
        learning_rate=LEARNING_RATE,
        warmup_steps=WARMUP_UPDATES,
        lr_scheduler_type="linear",
        eval_strategy="epoch",
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        logging_steps=1,
        seed=SEED,
        data_seed=SEED,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Digits(folder, "train"),
        eval_dataset=Digits(folder, "validation"),
        callbacks=[Recording(recorder, model)],
    )
    trainer.train(resume_from_checkpoint=attempt.checkpoint or attempt.is_resumed)
    trainer.save_state()
    recorder.finish(model)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
