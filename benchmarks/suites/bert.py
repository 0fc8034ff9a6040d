"""The suites on text: the BERT recipe against Hugging Face's Trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.contestants import contestant, recipe_contestant
from benchmarks.harness.judging import Judge
from benchmarks.harness.materials import bert_checkpoint, describe_checkpoint, text_extract
from benchmarks.harness.options import Options
from benchmarks.harness.recipe_side import load_recipe
from benchmarks.harness.rounds import Comparison, Suite
from benchmarks.peer_loops.hf_trainer import TrainerTask
from common.data.sources import find_named
from common.data.text import TextData, load_text

BATCH_SIZE = 32
MAX_LENGTH = 128
WARMUP = 0.1  # share of the updates, as in the recipe's `main`


@dataclass(frozen=True)
class TrainerVariant:
    """A way of training with HF Trainer, and the goal for the recipe's ratio to it."""

    padding: str  # "padded": to the maximum length; "dynamic": to the longest of a batch
    precision: str
    goal: float | None = None

    @property
    def title(self) -> str:
        """The name of the contestant."""
        return f"HF Trainer {self.padding} {self.precision}"


def extract_for(options: Options, updates: int) -> Path:
    """Return the folder of a text data set with as many samples as the updates take."""
    return text_extract(options.data, (options.untimed + updates) * BATCH_SIZE)


def recipe_settings(options: Options, updates: int) -> dict[str, object]:
    """Return the recipe's settings: its data, model and batches."""
    return {
        "dataset": str(extract_for(options, updates)),
        "model": str(bert_checkpoint(options.bert_checkpoint, large=options.on_gpu)),
        "batch_size": BATCH_SIZE,
        "max_length": MAX_LENGTH,
    }


def bert_suite(options: Options) -> Suite:
    """Compare the BERT recipe with HF Trainer, each over the same samples once."""
    updates = options.scaled(256 if options.on_gpu else 12)
    if not options.has_goals:
        variants = [TrainerVariant("padded", "fp32"), TrainerVariant("dynamic", "fp32")]
    elif options.on_gpu:
        variants = [TrainerVariant("dynamic", options.precision, goal=2.0)]
    else:
        variants = [
            TrainerVariant("padded", "fp32", goal=9.0),
            TrainerVariant("dynamic", "fp32", goal=2.6),
            TrainerVariant("dynamic", "bf16", goal=1.8),
        ]
    is_quoted = not options.on_gpu and "sst2" in extract_for(options, updates).name
    quoted = {
        "HF Trainer padded fp32": 14.7,
        "HF Trainer dynamic fp32": 50,
        "HF Trainer dynamic bf16": 74,
    }
    return suite_with_trainers("bert", options, updates, variants, quoted if is_quoted else {})


def bert_quality_suite(options: Options) -> Suite:
    """Compare the BERT recipe with HF Trainer over more samples, to compare accuracies."""
    variants = [TrainerVariant("dynamic", options.precision)]
    return suite_with_trainers("quality: bert", options, options.scaled(100), variants, {})


def suite_with_trainers(
    name: str,
    options: Options,
    updates: int,
    variants: list[TrainerVariant],
    quoted: dict[str, float],
) -> Suite:
    """Build a suite of the recipe and Trainers.

    Args:
        quoted: rates that the Trainers should reach; see `Suite.quoted`.
    """
    folder = extract_for(options, updates)
    checkpoint = bert_checkpoint(options.bert_checkpoint, large=options.on_gpu)
    data = load_text(
        find_named(str(folder), None),
        checkpoint=str(checkpoint),
        max_length=MAX_LENGTH,
        text_columns=(),
        label_column=None,
    )
    judge = Judge(load_recipe("bert"), data.splits["validation"], options.precision, limit=1024)
    settings = recipe_settings(options, updates)
    contestants = {"recipe": recipe_contestant("bert", options, WARMUP, judge, **settings)}
    comparisons = []
    for variant in variants:
        task = trainer_task(variant, folder, checkpoint)
        contestants[variant.title] = contestant(task.train, judge)
        title = f"BERT: recipe / {variant.title}"
        comparisons.append(Comparison(title, "recipe", variant.title, at_least=variant.goal))
    return Suite(
        name,
        "samples/s",
        updates=updates,
        untimed_updates=options.untimed,
        workload=workload_of(data, checkpoint, options.precision),
        contestants=contestants,
        comparisons=comparisons,
        quoted=quoted,
        notes=["every contestant sees each sample of the extract once"],
        warmup_updates=2,
    )


def workload_of(data: TextData, checkpoint: Path, precision: str) -> dict[str, object]:
    """Return what every contestant trains on, and how the recipe trains."""
    lengths = data.splits["train"].lengths
    assert lengths is not None  # the texts are not streamed
    return {
        "data": data.source.name,
        "model": describe_checkpoint(checkpoint),
        "samples": len(lengths),
        "mean_tokens": float(lengths.mean()),
        "longest_tokens": int(lengths.max()),
        "batch_size": BATCH_SIZE,
        "max_length": MAX_LENGTH,
        "recipe": f"default settings ({precision})",
    }


def trainer_task(variant: TrainerVariant, folder: Path, checkpoint: Path) -> TrainerTask:
    """Return the task of a Trainer, with the recipe's weight decay."""
    config = load_recipe("bert").Config(batch_size=BATCH_SIZE, max_length=MAX_LENGTH)
    return TrainerTask(
        folder,
        str(checkpoint),
        padded=variant.padding == "padded",
        precision=variant.precision,
        batch_size=BATCH_SIZE,
        max_length=MAX_LENGTH,
        weight_decay=config.weight_decay,
        warmup_share=WARMUP,
    )
