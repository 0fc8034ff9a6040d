"""Copies of recipes with correct but unusual edits, which `recipes prove` must not fail."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness.edited_copies import (
    DROPOUT,
    EVALUATION,
    FORWARD,
    KEEP,
    LOOP,
    MLP,
    OBJECTIVE,
    RECORD,
    SUMS,
    TORCH,
    EditedCopy,
)


@dataclass(frozen=True, kw_only=True)
class Correct(EditedCopy):
    """A correct copy of a recipe."""

    checks: tuple[str, ...]  # the checks that the edits concern, all of which must pass
    skipped: tuple[str, ...] = ()  # checks that must find that they do not apply


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
                '            is_mirrored = (batch["labels"] > 4)[:, None, None, None]\n'
                '            images = batch["images"]\n'
                "            images = torch.where(is_mirrored, images.flip(-1), images)\n"
                '            batch = {**batch, "images": images}\n',
            ),
        ),
        checks=("samples", "figures"),
    ),
    Correct(
        "the loss printed after run.record, at log lines only",
        MLP,
        (
            (
                RECORD,
                f"{RECORD}"
                "            step = run.progress.global_step\n"
                "            if accelerator.sync_gradients and step % config.log_every == 0:\n"
                '                print(f"loss {loss.item():.3f}")\n',
            ),
        ),
        checks=("waits",),
    ),
    Correct(
        "evaluation that seeds torch's generator",
        MLP,
        ((SUMS, f"    torch.manual_seed(run.config.seed)\n{SUMS}"),),
        flags=DROPOUT,
        checks=("resumes",),
    ),
    Correct(
        "one_hot with the number of classes",
        MLP,
        (
            (
                FORWARD,
                f"{FORWARD}"
                '                targets = F.one_hot(batch["labels"], logits.shape[-1]).float()\n'
                "                loss = loss + (logits.softmax(-1) - targets).abs().mean()\n",
            ),
        ),
        checks=("waits",),
    ),
    Correct(
        "the last losses and predictions in a deque with a maxlen",
        MLP,
        (
            (TORCH, f"from collections import deque\n\n{TORCH}"),
            (LOOP, f"        recent: deque[object] = deque(maxlen=256)\n{LOOP}"),
            (
                RECORD,
                f"{RECORD}            kept_logits = logits.detach().repeat(1, 99)\n"
                "            recent.append((loss.detach(), kept_logits))\n",
            ),
        ),
        checks=("memory", "waits", "resumes"),
    ),
    Correct(
        "noise of a generator that each update seeds",
        MLP,
        (
            (
                FORWARD,
                "                noise_seed = config.seed * 1000003 + run.progress.global_step\n"
                "                generator = torch.Generator().manual_seed(noise_seed)\n"
                '                noise = torch.randn(batch["images"].shape, generator=generator)\n'
                '                noisy = batch["images"] + 0.01 * noise.to(batch["images"])\n'
                '                loss, logits = compute_loss(model, {**batch, "images": noisy})\n',
            ),
        ),
        checks=("processes",),
        skipped=("accumulation",),
    ),
    Correct(
        "noise of a generator that checkpoints hold",
        MLP,
        (
            (OBJECTIVE, f"NOISE = torch.Generator().manual_seed(0)\n{OBJECTIVE}"),
            (KEEP, KEEP.replace("model=model", "noise=NOISE, model=model")),
            (
                FORWARD,
                f"{FORWARD}                loss = loss * (1 + torch.rand((), generator=NOISE))\n",
            ),
        ),
        checks=("resumes", "samples"),
        skipped=("accumulation",),
    ),
    Correct(
        "evaluation that leaves out ignored labels",
        MLP,
        (
            (
                SUMS,
                """\
    sums = ClassificationSums(run.accelerator, run.data.class_names)
    with run.evaluating(model) as bare_model:
        for batch in loader:
            logits = bare_model(batch["images"])
            kept = batch["labels"] > 2
            if kept.any():
                labels = batch["labels"][kept]
                sums.add(F.cross_entropy(logits[kept], labels), logits[kept], labels)
    return sums.result()
""",
            ),
        ),
        checks=("samples",),
    ),
)
