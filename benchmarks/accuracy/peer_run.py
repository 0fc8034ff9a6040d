"""Trains one peer in this process, and writes down its evaluations.

python benchmarks/accuracy/peer_run.py '{"folder": "...", ...}'

The argument has the fields of `Request`. Until the training is over, nothing is imported from the
recipes' `common`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # started as a file: let the package be found
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from torch import nn

from benchmarks.accuracy.goals import Goal
from benchmarks.accuracy.records import Evaluation, EvaluationLog, Facts, ForwardCost, Trial
from benchmarks.accuracy.workloads import TRIAL_SKIPPED, TRIAL_UPDATES, WORKLOADS, Peer
from benchmarks.peer_loops import image_training, text_training
from benchmarks.peer_loops.image_training import ImageSettings, ImageSplits
from benchmarks.peer_loops.text_training import TextSplits


@dataclass(frozen=True)
class Request:
    """The training, its data, and the folder of its results."""

    folder: str  # receives the files of `records`
    began: float  # `time.time()` just before this process was started
    workload: str
    contestant: str
    seed: int
    is_trial: bool  # a few updates and one evaluation, to measure the rates
    to_the_end: bool  # go on after the goals are met
    arrays: str = ""  # folder of images
    train_files: tuple[str, ...] = ()  # of texts
    evaluated_files: tuple[str, ...] = ()
    checkpoint: str = ""
    most_updates: int | None = None  # to try the script out: so many, and one evaluation


class EvaluationRecorder:
    """Counts updates, writes evaluations down, and ends the training once it has seen enough."""

    def __init__(self, request: Request, goals: tuple[Goal, ...]) -> None:
        self.request = request
        self.log = EvaluationLog(Path(request.folder), request.began)
        self.unmet_goals = list(goals)
        self.updates = 0
        self.updates_per_epoch = 1
        self.counts = (0, 0, 0)  # samples, tokens and squared tokens so far
        self.counts_in_trial = (0, 0, 0)  # in the trial's timed updates
        self.seconds_in_trial = 0.0  # in the same updates
        self.start_seconds = 0.0
        self.batch_requested = 0.0  # when the current update began
        self.evaluation_began = 0.0
        self.evaluation_seconds = 0.0

    def begin(self, updates_per_epoch: int) -> None:
        """Note that the first batch is requested now."""
        self.updates_per_epoch = updates_per_epoch
        self.start_seconds = self.batch_requested = self.log.elapsed()

    def update(self, samples: int, tokens: int = 0, squared_tokens: int = 0) -> bool:
        """Note an update; return whether the epoch goes on."""
        count = (samples, tokens, squared_tokens)
        self.counts = added(self.counts, count)
        self.updates += 1
        if self.request.is_trial:
            return self.update_of_trial(count)
        most_updates = self.request.most_updates
        return most_updates is None or self.updates < most_updates

    def update_of_trial(self, count: tuple[int, int, int]) -> bool:
        """Add an update's time, unless it is one of the first; return whether the epoch goes on."""
        now = self.log.elapsed()
        if self.updates > TRIAL_SKIPPED:
            self.counts_in_trial = added(self.counts_in_trial, count)
            self.seconds_in_trial += now - self.batch_requested
        self.batch_requested = now
        return self.updates < TRIAL_UPDATES

    def evaluation_begins(self) -> None:
        """Note that an evaluation begins now."""
        self.evaluation_began = self.log.elapsed()

    def evaluation_ended(self, figures: Mapping[str, float]) -> bool:
        """Note an evaluation that has just ended; return whether to go on."""
        seconds = self.log.elapsed()
        self.evaluation_seconds = seconds - self.evaluation_began
        if self.request.is_trial:
            self.batch_requested = seconds
            return self.updates < TRIAL_UPDATES
        samples, tokens, squared_tokens = self.counts
        self.log.write(
            Evaluation(
                seconds=seconds,
                epoch=self.updates / self.updates_per_epoch,
                samples=samples,
                figures=dict(figures),
                tokens=tokens,
                squared_tokens=squared_tokens,
            )
        )
        if self.request.most_updates is not None:
            return False
        self.unmet_goals = [goal for goal in self.unmet_goals if not goal.is_met(figures)]
        return bool(self.unmet_goals) or self.request.to_the_end

    def trial(self) -> Trial | None:
        """Return the rates of a trial; None if this is no trial.

        Raises:
            SystemExit: the data set is so small that no update was timed.
        """
        if not self.request.is_trial:
            return None
        timed_updates = self.updates - TRIAL_SKIPPED
        if timed_updates < 1:
            raise SystemExit(
                f"error: {self.updates} updates are too few to measure the speed of "
                f"{self.request.contestant}: use a larger data set"
            )
        epochs = timed_updates / self.updates_per_epoch
        samples, tokens, squared_tokens = self.counts_in_trial
        return Trial(
            start_seconds=self.start_seconds,
            update_seconds=self.seconds_in_trial / timed_updates,
            updates_per_epoch=self.updates_per_epoch,
            samples_per_epoch=samples / epochs,
            tokens_per_epoch=tokens / epochs,
            squared_tokens_per_epoch=squared_tokens / epochs,
            evaluation_seconds=self.evaluation_seconds,
        )


def added(left: tuple[int, int, int], right: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the sums of both counts."""
    return left[0] + right[0], left[1] + right[1], left[2] + right[2]


def train(request: Request, peer: Peer, recorder: EvaluationRecorder) -> ForwardCost:
    """Train a peer; return the cost of its forward pass, counted afterwards."""
    settings = peer.settings
    model: nn.Module
    if isinstance(settings, ImageSettings):
        splits = ImageSplits.read(Path(request.arrays))
        model = image_training.train(settings, splits, request.seed, recorder)
        from benchmarks.accuracy.operations import cost_of_peer, image_batch, image_loss

        _, channels, height, width = splits.train.images.shape
        batches = image_batch((channels, height, width))
        return cost_of_peer(model.cpu(), image_loss, batches)
    texts = TextSplits(
        [Path(file) for file in request.train_files],
        [Path(file) for file in request.evaluated_files],
        request.checkpoint,
    )
    model = text_training.train(settings, texts, request.seed, recorder)
    from benchmarks.accuracy.operations import cost_of_peer, text_batches, text_loss

    return cost_of_peer(model.cpu(), text_loss, text_batches())


def main(request: Request) -> None:
    """Train the peer that is asked for, and write the facts."""
    workload = WORKLOADS[request.workload]
    peer = workload.contestant(request.contestant)
    assert isinstance(peer, Peer)
    recorder = EvaluationRecorder(request, workload.goals)
    cost = train(request, peer, recorder)
    Facts(cost, recorder.trial()).write(Path(request.folder))


if __name__ == "__main__":
    main(Request(**json.loads(sys.argv[1])))
