"""Fine-tunes BERT with Hugging Face's `Trainer`, as its text classification guide shows.

Nothing is imported from the recipes' `common`, so that a fresh process can run this alone.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.clock import LoopClock
from benchmarks.harness.isolation import default_device
from benchmarks.harness.rounds import FinishedTraining

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerState, TrainingArguments


@dataclass
class TrainerTask:
    """A fine-tuning, the same for all Trainers of a suite but for padding and precision.

    Args:
        folder: has `train.parquet` with one column of text and one called ``label``.
        checkpoint: folder of the model and its tokenizer.
        padded: pad every sentence to `max_length`, instead of each batch to its longest sentence.
        precision: "fp32", "bf16" or "fp16".
    """

    folder: Path
    checkpoint: str
    padded: bool
    precision: str
    batch_size: int = 32
    max_length: int = 128
    learning_rate: float = 5e-5
    weight_decay: float = 0.01
    warmup_share: float = 0.1

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.checkpoint)

    @cached_property
    def dataset(self) -> Any:
        """The training split, tokenised before training, in the memory-mapped Arrow of `map`."""
        import datasets

        datasets.disable_progress_bars()
        files = {"train": str(self.folder / "train.parquet")}
        split = datasets.load_dataset("parquet", data_files=files, split="train")
        text = next(name for name in split.column_names if name not in ("label", "idx"))
        padding: Any = "max_length" if self.padded else False

        def tokenize(rows: dict[str, Any]) -> Any:
            return self.tokenizer(
                rows[text], truncation=True, max_length=self.max_length, padding=padding
            )

        return split.map(tokenize, batched=True)

    def train(self, updates: int, seed: int, untimed: int = 0) -> FinishedTraining:
        """Train for `untimed` updates, then for `updates` updates that are timed."""
        from transformers import (
            AutoModelForSequenceClassification,
            DataCollatorWithPadding,
            Trainer,
            set_seed,
        )
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        seconds: list[float] = []
        set_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(
            self.checkpoint,
            num_labels=self.dataset.features["label"].num_classes,
            dtype="float32",
            ignore_mismatched_sizes=True,
        )
        with tempfile.TemporaryDirectory() as output:
            trainer = Trainer(
                model=model,
                args=self.training_arguments(output, untimed + updates, seed),
                train_dataset=self.dataset,
                data_collator=DataCollatorWithPadding(self.tokenizer),
                processing_class=self.tokenizer,
                callbacks=[clock_callback(LoopClock(untimed), seconds)],
            )
            loss = trainer.train().training_loss
        return FinishedTraining(seconds[0], updates * self.batch_size, loss, trainer.model)

    def training_arguments(self, output: str, updates: int, seed: int) -> TrainingArguments:
        """Return the Trainer's arguments, without saving and reports."""
        from transformers import TrainingArguments

        return TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=self.batch_size,
            max_steps=updates,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            warmup_steps=int(self.warmup_share * updates),
            bf16=self.precision == "bf16",
            fp16=self.precision == "fp16",
            use_cpu=default_device().type == "cpu",
            logging_steps=50,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
        )


def clock_callback(clock: LoopClock, seconds: list[float]) -> TrainerCallback:
    """Return a callback that runs the clock, and puts its time into `seconds` at the end."""
    from transformers import TrainerCallback

    class ClockCallback(TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            clock.start()

        def on_step_end(
            self, args: object, state: TrainerState, control: object, **_: object
        ) -> None:
            clock.update()
            if state.global_step == state.max_steps:
                seconds.append(clock.stop())

    return ClockCallback()
