"""The observer of a run, which records its batches, random states, losses, rates and weights.

The checks compare these records with those of another run, such as a resumed one.

It wraps the methods of the run that a recipe calls, and the loaders. It draws no random numbers and
changes no state, so an observed run trains with the same bits as any other. Only the rehearsal
differs: it reads all samples. The observer reads every tensor, which waits for the device, so runs
that measure speed or memory, or need only the results, leave these records out.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as tree

from common.checkpoints.adapters import RandomState
from common.checkpoints.part_states import Stateful
from common.data import loader as loader_module
from common.data.loader import Loader
from common.data.order import TrainingOrder
from common.data.samples import Batch, BatchesWithWork
from common.lifecycle import evaluations, saving
from common.lifecycle.stages import StartedRun
from common.measure.value_checks import Measured, Metrics
from common.run import Run
from common.storage.value_digests import digest_of_state
from common.tools.prove.observation.interrupting import Interrupter
from common.tools.prove.observation.session import Session
from common.tools.prove.observation.state_reader import StateChanges, StateReader
from common.tools.prove.reach.loop_variables import pass_of_loop
from common.tools.prove.records.base import Phase
from common.tools.prove.records.run_records import (
    EvaluationBatch,
    EvaluationFigures,
    MicroBatch,
    RecordedMicroBatch,
    RunEnd,
    RunStart,
    SavedState,
)

Loss = torch.Tensor | float
NUMERIC = (int, float, torch.Tensor, np.ndarray, np.number, np.bool_)


class RunObserver:
    """Observes the run in one process.

    Each method `around_x` is called in place of the method or function `x`, which it gets as
    `original`; see `Session.wrap`.
    """

    def __init__(self, session: Session, interrupter: Interrupter, reads_tensors: bool) -> None:
        """Prepare to observe.

        Args:
            reads_tensors: whether to write the records that read tensors. If not, the observer
                writes only the start, the figures of evaluations, an interruption and the end.
        """
        self.session = session
        self.interrupter = interrupter
        self.reads_tensors = reads_tensors
        self.state_reader = StateReader()
        self.has_loaded_best = False

    def install(self) -> None:
        """Wrap the methods of a run, its saves, and its loaders."""
        wrap = self.session.wrap
        wrap(Run, "__init__", self.around_init)
        wrap(Run, "keep", self.around_keep)
        wrap(Run, "start", self.around_start)
        wrap(Run, "batches", self.around_batches)
        wrap(Run, "record", self.around_record)
        wrap(Run, "evaluating", self.around_evaluating)
        wrap(Run, "log", self.around_log)
        wrap(Run, "load_best", self.around_load_best)
        wrap(Run, "finish", self.around_finish)
        # The loop saves with `Run.save`, which calls this function. So does a run that stops.
        wrap(saving, "save", self.around_save)
        wrap(Loader, "epoch", self.around_epoch)
        wrap(Loader, "evaluation_batches", self.around_evaluation_batches)
        # The rehearsal reads all samples, so that its figures are those before training. The run's
        # check for means needs the two batches of a usual rehearsal, so the check is off.
        wrap(loader_module, "rehearsal_batches", lambda original, batches, *options: [*batches])
        wrap(evaluations, "refuse_evident_mistakes", lambda original, *arguments: None)

    # Before the loop

    def around_init(
        self, original: Callable[..., None], run: Run, *arguments: object, **options: object
    ) -> None:
        original(run, *arguments, **options)
        self.session.begin_run(run)

    def around_keep(
        self, original: Callable[..., None], run: Run, **parts: Stateful | None
    ) -> None:
        original(run, **parts)
        self.state_reader.keep(parts)

    def around_start(
        self, original: Callable[..., None], run: Run, *arguments: object, **options: object
    ) -> None:
        original(run, *arguments, **options)
        self.state_reader.start(run)
        config = run.config
        split_sizes = {split: loader.order.num_samples for split, loader in run.all_loaders.items()}
        self.session.write(
            RunStart(
                step=self.session.step,
                world_size=run.accelerator.num_processes,
                total_steps=run.plan.total_steps,
                updates_per_epoch=run.plan.updates_per_epoch,
                samples_per_update=run.plan.samples_per_update,
                batch_size=config.batch_size,
                accumulation=config.gradient_accumulation_steps,
                device=str(run.device),
                precision=config.mixed_precision,
                split_sizes=split_sizes,
                validation_split=run.loaded.validation_split,
                test_split=run.loaded.test_split,
                worker_count=run.all_loaders["train"].num_workers,
                kept_part_names=[*self.state_reader.kept_parts],
            )
        )

    # In the loop

    def around_batches(
        self, original: Callable[[Run, Loader], Iterator[Batch]], run: Run, loader: Loader
    ) -> Iterator[Batch]:
        session = self.session
        session.begin_batches()
        for batch in original(run, loader):
            if not self.reads_tensors:
                yield batch
                continue
            # A generator's caller is the code that asks it for the next value. So the frame is that
            # of the function with the loop.
            self.write_micro_batch(run, batch, sys._getframe(1))
            step = session.step
            micro_batch = session.micro_batch
            yield batch
            ended_pass = pass_of_loop(sys._getframe(1), batch, step, micro_batch)
            if ended_pass is not None:
                session.write(ended_pass)

    def write_micro_batch(self, run: Run, batch: Batch, frame: FrameType) -> None:
        """Write a `MicroBatch` for a batch that the loop is about to use.

        Args:
            frame: the frame of the loop, whose variables are read.
        """
        session = self.session
        changes = StateChanges()
        # Checkpoints are saved only between updates, so a resume begins at the first micro-batch of
        # an update. It is enough to read the recipe's values and parts there.
        if session.micro_batch == 0:
            changes = self.state_reader.changes(run.context, frame)
        session.write(
            MicroBatch(
                step=session.step,
                micro_batch=session.micro_batch,
                epoch=run.epoch,
                sample_indices=session.sample_indices,
                batch_digest=digest_of_batch(batch),
                generator_digests=generator_digests(run.device),
                part_digests=changes.part_digests,
                value_digests=changes.value_digests,
                unreachable_paths=changes.unreachable_paths,
                descriptions=changes.descriptions,
            )
        )

    def around_record(
        self,
        original: Callable[[Run, Loss, Metrics | None], None],
        run: Run,
        loss: Loss,
        metrics: Metrics | None = None,
    ) -> None:
        """Record a micro-batch, write it, and interrupt the run if that is planned here."""
        session = self.session
        step_before = session.step  # `session.step` grows if `original` counts an update
        is_update = bool(run.accelerator.sync_gradients)
        # `original` comes first, because it refuses values that could not be written below.
        original(run, loss, metrics)
        if self.reads_tensors:
            self.write_recorded(run, step_before, is_update, loss, metrics or {})
        session.end_micro_batch(is_update=is_update)
        if is_update:
            self.interrupter.after_update(session.step, run.accelerator.num_processes)

    def write_recorded(
        self, run: Run, step: int, is_update: bool, loss: Loss, metrics: Metrics
    ) -> None:
        """Write a `RecordedMicroBatch` for a micro-batch that the loop has passed to `run.record`.

        Args:
            step: the number of updates before the micro-batch.
            is_update: whether the micro-batch is the last one of its update.
        """
        total, count = sum_and_count(loss)
        self.session.write(
            RecordedMicroBatch(
                step=step,
                micro_batch=self.session.micro_batch,
                is_update=is_update,
                loss=total / max(1, count),
                metrics={name: sum_and_count(value) for name, value in metrics.items()},
                generator_digests=generator_digests(run.device),
                learning_rates=self.state_reader.learning_rates(),
                clock_seconds=time.perf_counter(),
            )
        )

    def around_save(self, original: Callable[[StartedRun], None], started: StartedRun) -> None:
        if self.reads_tensors:
            session = self.session
            session.write(
                SavedState(
                    step=session.step,
                    part_digests=self.state_reader.digests_of_parts(started.context),
                    generator_digests=generator_digests(started.context.accelerator.device),
                )
            )
        original(started)

    def around_epoch(
        self,
        original: Callable[[Loader, int, int], BatchesWithWork],
        loader: Loader,
        epoch: int,
        first_update: int = 0,
    ) -> BatchesWithWork:
        """Yield the batches of an epoch, and note the samples of each before the loop gets it."""
        assert isinstance(loader.order, TrainingOrder)
        micro_batches = loader.order.micro_batches(epoch, first_update)
        batches = original(loader, epoch, first_update)
        for indices, batch_with_work in zip(micro_batches, batches, strict=True):
            self.session.note_samples(indices.tolist())
            yield batch_with_work

    # In evaluations

    @contextmanager
    def around_evaluating(
        self,
        original: Callable[[Run, nn.Module], AbstractContextManager[nn.Module]],
        run: Run,
        model: nn.Module,
    ) -> Iterator[nn.Module]:
        phase = self.phase_of(run)
        with self.session.in_evaluation(phase), original(run, model) as bare_model:
            yield bare_model

    def phase_of(self, run: Run) -> Phase:
        """Return the phase of the evaluation that is starting."""
        if run.evaluations.rehearsal.is_on:
            return "rehearsal"
        # After the last update, a validation may still be due. The final evaluation comes after it.
        is_training_over = self.session.step >= run.plan.total_steps and not run.should_evaluate
        # A recipe loads the best model for the final evaluation alone.
        return "final" if is_training_over or self.has_loaded_best else "validation"

    def around_log(
        self, original: Callable[[Run, Metrics], None], run: Run, evaluation: Metrics
    ) -> None:
        phase: Phase = "rehearsal" if run.evaluations.rehearsal.is_on else "validation"
        original(run, evaluation)  # first, because it refuses figures that can't be written below
        self.write_evaluation(run, phase, run.loaded.validation_split, evaluation)

    def write_evaluation(self, run: Run, phase: Phase, split: str, evaluation: Metrics) -> None:
        """Write the figures of an evaluation that are numbers."""
        figures = {}
        for name, value in evaluation.items():
            if isinstance(value, NUMERIC):
                figures[name] = float(value)
        self.session.write(
            EvaluationFigures(
                step=self.session.step,
                phase=phase,
                split=split,
                sample_count=run.all_loaders[split].order.num_samples,
                figures=figures,
            )
        )

    def around_evaluation_batches(
        self,
        original: Callable[[Loader, list[torch.Tensor]], BatchesWithWork],
        loader: Loader,
        micro_batches: list[torch.Tensor],
    ) -> BatchesWithWork:
        """Yield the batches of an evaluation, and record each before the recipe gets it.

        If it is planned, interrupt the run before a batch. Before `run.start`, record nothing.
        """
        batches = original(loader, micro_batches)
        count = len(micro_batches)
        for number, (batch, work) in enumerate(batches):
            if self.session.has_started:
                sample_indices = micro_batches[number].tolist()
                self.before_evaluation_batch(loader, sample_indices, batch, number, count)
            yield batch, work

    def before_evaluation_batch(
        self, loader: Loader, sample_indices: list[int], batch: Batch, number: int, count: int
    ) -> None:
        """Record a batch of an evaluation, or interrupt the run before the batch is used.

        Args:
            sample_indices: those of the batch, in its order.
            number: the number of the batch, from 0.
            count: the number of batches that the loader yields.
        """
        session = self.session
        phase = session.evaluation_phase
        # A resumed run may rehearse, but the interruption is planned for a real evaluation.
        if phase != "rehearsal":
            self.interrupter.before_evaluation_batch(number, count)
        if not self.reads_tensors:
            return
        run = session.run
        assert run is not None
        session.write(
            EvaluationBatch(
                step=session.step,
                phase=phase,
                split=session.split_of(loader),
                sample_indices=sample_indices,
                batch_digest=digest_of_batch(batch),
                generator_digests=generator_digests(run.device),
            )
        )

    # After the loop

    def around_load_best(
        self, original: Callable[[Run, nn.Module], None], run: Run, model: nn.Module
    ) -> None:
        original(run, model)
        self.has_loaded_best = True

    def around_finish(
        self, original: Callable[[Run, Metrics], None], run: Run, evaluation: Metrics
    ) -> None:
        original(run, evaluation)
        self.write_evaluation(run, "final", run.loaded.test_split, evaluation)
        parts: dict[str, str] = {}
        if self.reads_tensors:
            parts = self.state_reader.digests_of_parts(run.context)
        self.session.write(RunEnd(step=self.session.step, part_digests=parts))


def generator_digests(device: torch.device) -> dict[str, str]:
    """Return a digest of the state of each random generator of this process, by its name."""
    states = RandomState(device).state_dict()
    return {name: digest_of_state(state) for name, state in states.items()}


def digest_of_batch(batch: Batch) -> str:
    """Return a digest of all tensors and plain values of a batch, however nested."""
    return digest_of_state(tree.tree_flatten(batch)[0])


def sum_and_count(value: Measured) -> tuple[float, int]:
    """Return the sum, in float64, and the number of the elements of a loss or a metric."""
    if isinstance(value, torch.Tensor):
        return float(value.detach().cpu().double().sum()), value.numel()
    numbers = np.asarray(value, dtype=np.float64)
    return float(numbers.sum()), numbers.size
