"""The suite on text: BERT against Hugging Face's Trainer."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.contestants import contestant, recipe_contestant
from benchmarks.harness.judging import Judge
from benchmarks.harness.materials import bert_checkpoint, describe_checkpoint, text_extract
from benchmarks.harness.options import Options
from benchmarks.harness.recipe_side import load_recipe
from benchmarks.harness.rounds import Comparison, Contestant, Suite
from benchmarks.peer_loops.hf_trainer import TrainerTask
from common.data.sources import find_named
from common.data.text import load_text

BATCH_SIZE = 32
MAX_LENGTH = 128
WARMUP = 0.1  # share of the updates, as in the recipe's `main`


def recipe_task(options: Options, steps: int) -> dict[str, Any]:
    """Return what the recipe is to train, and on which text: as many samples as `steps` take."""
    return {
        "dataset": str(text_extract(options.data, (options.untimed + steps) * BATCH_SIZE)),
        "model": str(bert_checkpoint(options.bert_checkpoint, large=options.on_gpu)),
        "batch_size": BATCH_SIZE,
        "max_length": MAX_LENGTH,
    }


def recipe_contestant_in(precision: str, options: Options, steps: int) -> Contestant:
    """Make a contestant of the BERT recipe in another precision than its default."""
    settings = recipe_task(options, steps) | {"mixed_precision": precision}
    return recipe_contestant("bert", options, WARMUP, None, **settings)


def bert(options: Options) -> Suite:
    """The BERT recipe against HF Trainer, each over the same samples once."""
    steps = options.scaled(256 if options.on_gpu else 12)
    kinds = [("dynamic", options.precision, 2.0)]
    if not options.on_gpu:
        kinds = [("padded", "fp32", 9.0), ("dynamic", "fp32", 2.6), ("dynamic", "bf16", 1.8)]
    if not options.has_goals:
        kinds = [("padded", "fp32", 0.0), ("dynamic", "fp32", 0.0)]
    return compare_bert(options, "bert", steps, kinds)


def bert_quality(options: Options) -> Suite:
    """The BERT recipe against HF Trainer over more samples, for accuracy's sake."""
    return compare_bert(
        options, "quality: bert", options.scaled(100), [("dynamic", options.precision, 0.0)]
    )


def compare_bert(
    options: Options, name: str, steps: int, kinds: list[tuple[str, str, float]]
) -> Suite:
    """Build a suite of the recipe and Trainers.

    Args:
        kinds: padding, precision and goal of each Trainer; a goal of 0 is none.
    """
    folder = text_extract(options.data, (options.untimed + steps) * BATCH_SIZE)
    checkpoint = bert_checkpoint(options.bert_checkpoint, large=options.on_gpu)
    recipe = load_recipe("bert")
    config = recipe.Config(batch_size=BATCH_SIZE, max_length=MAX_LENGTH)
    data = load_text(
        find_named(str(folder), None),
        checkpoint=str(checkpoint),
        max_length=MAX_LENGTH,
        text_columns=(),
        label_column=None,
    )
    judge = Judge(recipe, data.splits["validation"], options.precision, limit=1024)
    contestants = {
        "recipe": recipe_contestant("bert", options, WARMUP, judge, **recipe_task(options, steps))
    }
    comparisons = []
    for padding, precision, goal in kinds:
        task = TrainerTask(
            folder,
            str(checkpoint),
            padded=padding == "padded",
            precision=precision,
            batch_size=BATCH_SIZE,
            max_length=MAX_LENGTH,
            weight_decay=config.weight_decay,
            warmup_share=WARMUP,
        )
        title = f"HF Trainer {padding} {precision}"
        contestants[title] = contestant(task.train, judge)
        comparisons.append(
            Comparison(f"BERT: recipe / {title}", "recipe", title, at_least=goal or None)
        )
    lengths = data.splits["train"].lengths
    return Suite(
        name,
        "samples/s",
        steps=steps,
        untimed_steps=options.untimed,
        workload={
            "data": data.source.name,
            "model": describe_checkpoint(checkpoint),
            "samples": len(lengths),
            "mean_tokens": float(lengths.mean()),
            "longest_tokens": int(lengths.max()),
            "batch_size": BATCH_SIZE,
            "max_length": MAX_LENGTH,
            "recipe": f"default settings ({options.precision})",
        },
        contestants=contestants,
        comparisons=comparisons,
        quoted={}
        if options.on_gpu or "sst2" not in data.source.name or name != "bert"
        else {
            "HF Trainer padded fp32": 14.7,
            "HF Trainer dynamic fp32": 50,
            "HF Trainer dynamic bf16": 74,
        },
        notes=["every contestant sees each sample of the extract once"],
        warmup_steps=2,
    )
