"""Copies of recipes with correct but unusual edits, which `recipes prove` must not fail."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness.edited_copies import (
    EVALUATION,
    MLP,
    SUMS,
    EditedCopy,
)


@dataclass(frozen=True, kw_only=True)
class Correct(EditedCopy):
    """A correct copy of a recipe."""

    checks: tuple[str, ...]  # the checks that the edits concern, all of which must pass


CORRECT: tuple[Correct, ...] = (
    Correct(
        "model called on one half of a batch after the other",
        MLP,
        (
            (
                '    logits = model(batch["images"])\n',
                '    logits = torch.cat([model(half) for half in batch["images"].chunk(2)])\n',
            ),
        ),
        checks=("samples", "accumulation"),
    ),
    Correct(
        "accuracy of two views of each image",
        MLP,
        (
            (
                SUMS,
                """\
    sums = ClassificationSums(run.accelerator, run.data.class_names)
    with run.evaluating(model) as bare_model:
        for batch in loader:
            loss, logits = compute_loss(bare_model, batch)
            shifted_logits = bare_model(batch["images"].roll(1, -1))
            shares = logits.softmax(-1) + shifted_logits.softmax(-1)
            sums.add(loss, shares, batch["labels"])
    return sums.result()
""",
            ),
        ),
        checks=("samples", "figures"),
    ),
    Correct(
        "evaluation that reads all batches first",
        MLP,
        ((EVALUATION, "        for batch in [*loader]:\n"),),
        checks=("samples", "figures"),
    ),
    Correct(
        "evaluation on changed values",
        MLP,
        (
            (
                EVALUATION,
                f"{EVALUATION}"
                '            batch = {**batch, "images": batch["images"].clamp(-3, 3)}\n',
            ),
        ),
        checks=("samples", "figures"),
    ),
)

BY_DEFAULT = 3  # the number of copies that CI tests by default
