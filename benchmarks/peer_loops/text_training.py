"""Fine-tunes a checkpoint on text, with an evaluation after each epoch, as two libraries document.

`train_accelerate` follows Accelerate's `examples/nlp_example.py`, `train_trainer` Transformers'
`run_glue.py`. Nothing is imported from the recipes' `common`, so that a fresh process can run them
alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.harness.isolation import default_device
from benchmarks.harness.precisions import ACCELERATE_PRECISIONS
from benchmarks.peer_loops.watch import Predictions, Watch, classification_figures

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer, TrainerCallback, TrainingArguments

NO_TEXT = ("label", "idx")  # columns
MULTIPLE_IN_LOW_PRECISION = 8  # of a batch's length in tokens, as nlp_example.py pads


@dataclass(frozen=True)
class TextSettings:
    """The settings of a fine-tuning on text."""

    framework: Literal["accelerate", "trainer"]
    learning_rate: float
    epochs: int
    batch_size: int
    evaluation_batch_size: int
    precision: str = "fp32"  # or bf16
    max_length: int | None = None  # tokens of a text; None: what the tokenizer allows
    is_padded: bool = False  # to `max_length`, instead of each batch to its longest text
    warmup_steps: int = 0


@dataclass(frozen=True)
class TextSplits:
    """The parquet files of a training, and the folder of the checkpoint with its tokenizer."""

    train: list[Path]
    evaluated: list[Path]
    checkpoint: str

    def tokenized(self, tokenizer: Any, settings: TextSettings) -> Any:
        """Return a `DatasetDict` of both splits with tokens and labels."""
        import datasets

        datasets.disable_progress_bars()
        files = {
            "train": [str(file) for file in self.train],
            "evaluated": [str(file) for file in self.evaluated],
        }
        splits = datasets.load_dataset("parquet", data_files=files)
        columns = splits["train"].column_names
        text_columns = [name for name in columns if name not in NO_TEXT]

        def tokenize(rows: dict[str, Any]) -> Any:
            return tokenizer(
                *(rows[name] for name in text_columns),
                truncation=True,
                max_length=settings.max_length,
                padding="max_length" if settings.is_padded else False,
            )

        unused = [name for name in columns if name != "label"]
        splits = splits.map(tokenize, batched=True, remove_columns=unused)
        return splits.rename_column("label", "labels")

    def build_model(self, classes: int) -> nn.Module:
        """Return the checkpoint's model in fp32 with a new head."""
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        return AutoModelForSequenceClassification.from_pretrained(
            self.checkpoint, num_labels=classes, dtype="float32", ignore_mismatched_sizes=True
        )


def train(settings: TextSettings, splits: TextSplits, seed: int, watch: Watch) -> nn.Module:
    """Train until the epochs are over or `watch` ends it; return the bare model."""
    loop = train_accelerate if settings.framework == "accelerate" else train_trainer
    return loop(settings, splits, seed, watch)


def count_of(batch: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return a batch's samples, tokens and squared tokens, with padding."""
    samples, length = batch["input_ids"].shape
    return samples, samples * length, samples * length**2


def train_accelerate(
    settings: TextSettings, splits: TextSplits, seed: int, watch: Watch
) -> nn.Module:
    """Fine-tune with a loop after Accelerate's `examples/nlp_example.py`."""
    from accelerate import Accelerator
    from transformers import get_linear_schedule_with_warmup, set_seed

    accelerator = Accelerator(
        cpu=default_device().type == "cpu",
        mixed_precision=ACCELERATE_PRECISIONS.get(settings.precision, settings.precision),
    )
    set_seed(seed)
    train_loader, evaluation_loader, classes = text_loaders(accelerator, settings, splits)
    model: Any = splits.build_model(classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    scheduler = get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=len(train_loader) * settings.epochs,
    )
    model, optimizer, train_loader, evaluation_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, evaluation_loader, scheduler
    )
    watch.begin(len(train_loader))
    for _ in range(settings.epochs):
        model.train()
        for batch in train_loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if not watch.update(*count_of(batch)):
                break
        watch.evaluation_begins()
        if not watch.evaluation_ended(figures_of(model, evaluation_loader, accelerator)):
            break
    return accelerator.unwrap_model(model)


def text_loaders(
    accelerator: Accelerator, settings: TextSettings, splits: TextSplits
) -> tuple[Any, Any, int]:
    """Return the loaders for training and evaluation, and the number of classes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(splits.checkpoint)
    data = splits.tokenized(tokenizer, settings)
    is_low_precision = accelerator.mixed_precision != "no"

    def collate(samples: list[dict[str, Any]]) -> Any:
        return tokenizer.pad(
            samples,
            padding="longest",
            pad_to_multiple_of=MULTIPLE_IN_LOW_PRECISION if is_low_precision else None,
            return_tensors="pt",
        )

    train_loader = DataLoader(
        data["train"], settings.batch_size, shuffle=True, collate_fn=collate, drop_last=True
    )
    evaluation_loader = DataLoader(
        data["evaluated"], settings.evaluation_batch_size, collate_fn=collate
    )
    return train_loader, evaluation_loader, max(data["train"]["labels"]) + 1


def figures_of(model: Any, loader: Any, accelerator: Accelerator) -> dict[str, float]:
    """Evaluate the prepared model on all batches of a prepared loader."""
    model.eval()
    predictions = Predictions()
    for batch in loader:
        with torch.no_grad():
            predicted = model(**batch).logits.argmax(-1)
        predictions.add(*accelerator.gather_for_metrics((predicted, batch["labels"])))
    return predictions.figures()


def train_trainer(settings: TextSettings, splits: TextSplits, seed: int, watch: Watch) -> nn.Module:
    """Fine-tune with Transformers' `Trainer` as `run_glue.py` does."""
    from transformers import AutoTokenizer, DataCollatorWithPadding, set_seed

    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(splits.checkpoint)
    data = splits.tokenized(tokenizer, settings)
    model = splits.build_model(max(data["train"]["labels"]) + 1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = counting_trainer()(
            model=model,
            args=training_arguments(settings, folder, seed),
            train_dataset=data["train"],
            eval_dataset=data["evaluated"],
            data_collator=DataCollatorWithPadding(tokenizer),
            processing_class=tokenizer,
            compute_metrics=trainer_figures,
        )
        trainer.add_callback(callback_for(watch, trainer))
        trainer.train()
    assert trainer.model is not None
    return trainer.model


def training_arguments(settings: TextSettings, folder: str, seed: int) -> TrainingArguments:
    """Return the Trainer's arguments; whatever is not stated keeps the library's default."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder,
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.evaluation_batch_size,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        bf16=settings.precision == "bf16",
        use_cpu=default_device().type == "cpu",
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )


def trainer_figures(prediction: Any) -> dict[str, float]:
    """Return the figures of an `EvalPrediction`."""
    return classification_figures(prediction.predictions.argmax(-1), prediction.label_ids)


def counting_trainer() -> type[Trainer]:
    """Return a class of Trainer that keeps the count of its last batch in `last_count`."""
    from transformers import Trainer

    class CountingTrainer(Trainer):
        last_count = (0, 0, 0)

        def training_step(self, model: Any, inputs: Any, *others: Any, **keywords: Any) -> Any:
            self.last_count = count_of(inputs)
            return super().training_step(model, inputs, *others, **keywords)

    return CountingTrainer


def callback_for(watch: Watch, trainer: Any) -> TrainerCallback:
    """Return a callback that reports the trainer's progress to `watch`."""
    from transformers import TrainerCallback

    class WatchCallback(TrainerCallback):
        def on_train_begin(self, *_: object, **keywords: Any) -> None:
            watch.begin(len(keywords["train_dataloader"]))

        def on_step_end(self, args: object, state: object, control: Any, **_: object) -> None:
            if not watch.update(*trainer.last_count):
                control.should_epoch_stop = True  # the evaluation decides about the next epoch

        def on_epoch_end(self, *_: object, **__: object) -> None:
            watch.evaluation_begins()  # the Trainer evaluates next

        def on_evaluate(self, args: object, state: object, control: Any, **keywords: Any) -> None:
            metrics: dict[str, float] = keywords["metrics"]
            names = ("accuracy", "f1")
            figures = {name: metrics[f"eval_{name}"] for name in names if f"eval_{name}" in metrics}
            if not watch.evaluation_ended(figures):
                control.should_training_stop = True

    return WatchCallback()
