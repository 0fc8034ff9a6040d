"""Runs a recipe as it is, and writes down when each of its evaluations ended.

python benchmarks/accuracy/recipe_run.py FOLDER BEGAN recipes/NAME.py FLAGS...

BEGAN is the time in seconds since 1970 just before this command was started. The recipe's file runs
unchanged. Three methods of its `Run` also take notes.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: let the package be found
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.accuracy.records import FIGURES, Evaluation, EvaluationLog, Facts
from common import run as run_module
from common.measure.flops import ComputeLoss
from common.run import Run


class WatchedRun(Run):
    """A run that writes its evaluations down, and at the end the cost of a forward pass."""

    folder: Path
    log_file: EvaluationLog
    compute_loss: ComputeLoss
    noted_step = -1  # the update after which an evaluation was written down last

    def start(self, description: Any, compute_loss: Any = None, **keywords: Any) -> None:
        """Keep the loss, to count its operations later."""
        self.compute_loss = compute_loss
        super().start(description, compute_loss, **keywords)

    def log(self, evaluation: Mapping[str, Any]) -> None:
        """Write an evaluation down, but no rehearsal of one."""
        if not self.evaluations.rehearsal.is_on:
            self.note(evaluation)
        super().log(evaluation)

    def finish(self, evaluation: Mapping[str, Any]) -> None:
        """Write the last evaluation down, and then the facts.

        If the last update has an evaluation already, this one may be of an earlier, best model.
        """
        if self.noted_step != self.progress.global_step:
            self.note(evaluation)
        super().finish(evaluation)
        # Counting imports a lot. Every time has been noted by now.
        from benchmarks.accuracy.operations import cost_of_recipe

        cost = cost_of_recipe(self.kept.bare_model, self.compute_loss, self.data.splits["train"])
        Facts(cost).write(self.folder)

    def note(self, evaluation: Mapping[str, Any]) -> None:
        """Write down the figures of an evaluation that has just ended."""
        seconds = self.log_file.elapsed()
        self.noted_step = self.progress.global_step
        position_figures = self.plan.position_figures(self.progress.global_step)
        samples = position_figures["progress/samples"]
        lengths = self.data.splits["train"].lengths
        tokens_per_sample = 0.0 if lengths is None else float(lengths.mean())
        squared_tokens_per_sample = 0.0
        if lengths is not None:
            squared_tokens_per_sample = float((lengths.astype(float) ** 2).mean())
        figures = {name: float(evaluation[name]) for name in FIGURES if name in evaluation}
        self.log_file.write(
            Evaluation(
                seconds=seconds,
                epoch=position_figures["progress/epoch"],
                samples=samples,
                figures=figures,
                tokens=samples * tokens_per_sample,
                squared_tokens=samples * squared_tokens_per_sample,
            )
        )


def main(folder: Path, began: float, recipe: str, flags: list[str]) -> None:
    """Run a recipe with the watched run instead of its own."""
    WatchedRun.folder = folder
    WatchedRun.log_file = EvaluationLog(folder, began)
    run_module.Run = WatchedRun  # type: ignore[misc]
    sys.argv = [recipe, *flags]
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:])
