"""What surrounds an evaluation during a run: the bare model, the clock, and requests to stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from common.compilation import as_written

if TYPE_CHECKING:
    from common.run import Run


@contextmanager
def evaluating(run: Run, model: nn.Module) -> Iterator[nn.Module]:
    """Give the bare model in evaluation mode, with throughput's clock stopped.

    Buffers such as batch norm's statistics differ between ranks, and are averaged first. The bare
    model is used, because ranks may have different numbers of batches. A request to stop cuts the
    evaluation short: the run is saved and left, and its resumption makes it again.
    """
    stopwatch, agreement = run.meters.stopwatch, run.agreement
    running = stopwatch.started is not None
    stopwatch.stop()
    bare_model = run.accelerator.unwrap_model(model)
    if run.accelerator.num_processes > 1 and not run.owes_evaluation:
        for buffer in bare_model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(run.accelerator.reduce(buffer, "mean"))
    bare_model.eval()
    with torch.inference_mode(), as_written(bare_model):
        yield bare_model
    bare_model.train()
    if not run.config.evaluate_only:
        agreement.check(run.global_step)
        if agreement.stopping:
            # The loop saves after its evaluation, and before the final one.
            run.owes_evaluation |= run.checkpoints.last_step < run.global_step
            run.save()
            run.leave()
        run.owes_evaluation = False
    if running:
        stopwatch.start()
