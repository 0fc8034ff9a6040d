"""One training run: the calls that a recipe makes, in the order in which it makes them.

Each call delegates to a function of `common/lifecycle/`, whose module `stages` says what a run has
at each stage. `docs/reference.md` explains the calls to users.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from PIL.Image import Image
from torch import nn
from torch.optim import Optimizer

from common.checkpoints.part_states import Stateful
from common.command_line.flag_reads import record_reads
from common.config import TrainingConfig
from common.console.display import DISPLAY
from common.data.dataset import Data
from common.data.loader import Loader
from common.data.samples import Batch
from common.errors import Preempted
from common.lifecycle import keeping, loading, saving
from common.lifecycle.end import closing, finishing
from common.lifecycle.evaluations import Evaluations
from common.lifecycle.misuse import require_name, training_order_of, unfinished_error
from common.lifecycle.setup import set_up
from common.lifecycle.stages import KeptParts, LoadedData, Stages, StartedRun, reached
from common.lifecycle.start import starting
from common.lifecycle.training_loop import TrainingLoop
from common.lifecycle.trying_loss import try_loss
from common.measure.flops import ComputeLoss
from common.measure.value_checks import Metrics
from common.track.recorded_media import Values
from common.training.gradients.gathering import Gatherer
from common.training.launch.notebook import is_embedded, set_ranks_of_debug_launcher
from common.training.plan import Plan
from common.training.precision import compute_dtype


class Run:
    """Counts, times, logs and saves one training run, whose loop is in the recipe.

    Use it as a context manager, so that `status.json` says how the run ended. A recipe that leaves
    out a call gets a `UserError` from the first later call that needs it.
    """

    def __init__(
        self,
        config: TrainingConfig,
        recipe_file: str,
        objective: str,
        *,
        ddp: Mapping[str, object] | None = None,
        rehearse: bool = True,
    ) -> None:
        """Build the Accelerator, and take the run directory, so that no other job writes to it.

        Args:
            config: the flags.
            recipe_file: the recipe's ``__file__``.
            objective: what the best model is best in, such as ``"accuracy:max"``.
            ddp: options of DistributedDataParallel, such as ``{"find_unused_parameters": True}``.
            rehearse: whether to try the evaluation on a few samples before the first update, so
                that a mistake in the evaluation ends the run there. Nothing of the rehearsal is
                kept. Pass False for an evaluation that needs all data.

        Raises:
            UserError: a flag, the objective or an option of DDP can't work, or the directory can't
                be used.
            SystemExit: with status 0, if the run to resume is finished.
        """
        set_ranks_of_debug_launcher()
        self._is_embedded = is_embedded(recipe_file)
        DISPLAY.begin("starting")
        record_reads(config)
        context = set_up(config, Path(recipe_file), objective, ddp, self._is_embedded)
        self.config = config
        self.accelerator = context.accelerator
        self.directory = context.directory
        self.progress = context.progress
        self.device = context.accelerator.device
        self.compute_dtype = compute_dtype(context.accelerator)
        # These are not for recipes. `recipes prove` and the benchmarks read them.
        self.context = context
        self.evaluations = Evaluations(context, rehearse)
        self.stages = Stages()  # filled in by the calls below
        self._loop = TrainingLoop(context, self.evaluations)
        self._gather_rows = Gatherer(context.accelerator)
        self._is_finish_called = False
        DISPLAY.show_activity("reading the data")

    # Before the loop

    def loaders(self, data: Data) -> tuple[Loader, Loader, Loader]:
        """Return the loaders for training, validation and test.

        If the data lack a validation split, the test loader takes its place, and vice versa.

        Raises:
            UserError: a flag that was set has no effect on the data, or does not suit them; a split
                has too few samples; or `--early-stopping` has no validation data to choose by.
        """
        evaluations = self.evaluations
        loaded = loading.load(
            self.context, data, evaluations.rehearsal, lambda: evaluations.is_evaluating
        )
        self.stages.loaded = loaded
        loaders = loaded.loaders
        return loaders["train"], loaders[loaded.validation_split], loaders[loaded.test_split]

    def make_plan(self, train_loader: Loader, default_epochs: Mapping[str, int]) -> None:
        """Settle the length of the run, and when it logs, evaluates and saves.

        The result is `run.plan`. The recipe needs it for its learning-rate schedule.

        Args:
            default_epochs: the number of epochs where no flag states one, by the name of the data
                set, with ``"other"`` for all other data sets.

        Raises:
            UserError: the loader is one of an evaluation, or neither a flag nor `default_epochs`
                states the epochs.
        """
        order = training_order_of(train_loader, "run.make_plan(train_loader, DEFAULT_EPOCHS)")
        plan = Plan(self.config, order, self.data.name, default_epochs)
        # If no flag sets the epochs, they are the default.
        self.context.flag_resolution.resolve(epochs=plan.epochs)
        self.stages.plan = plan
        DISPLAY.show_activity("building the model")

    @property
    def plan(self) -> Plan:
        """The length of the run, and its intervals."""
        return reached(self.stages.plan, "run.make_plan(train_loader, DEFAULT_EPOCHS)")

    def keep(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        **others: Stateful | None,
    ) -> None:
        """Name the parts that each checkpoint saves.

        This also prepares the optimizers to skip updates with non-finite gradients.

        Args:
            model: the network that is trained. It is required.
            optimizer: its optimizer. It is required.
            others: further parts with ``state_dict`` and ``load_state_dict``, such as a second
                network, its optimizer, or an average of the weights. A resume restores each part by
                its name. Parts that are None, as a scheduler may be, are left out.

        Raises:
            UserError: the model or the optimizer is missing or not prepared, or the Accelerator
                prepared a part that is not named here.
        """
        all_parts: dict[str, Stateful | None] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            **others,
        }
        parts = {name: part for name, part in all_parts.items() if part is not None}
        self.stages.kept = keeping.keep(self.context, model, optimizer, parts)

    def start(
        self,
        description: Mapping[str, object],
        compute_loss: ComputeLoss | None = None,
        *,
        couples_samples: bool = False,
        passes: int = 1,
    ) -> None:
        """Load weights, restore the checkpoint of a resumed run, open the logs, and show the plan.

        This is the last call before the loop. The weights are those of `--init-from`. From now on,
        no flag can change.

        Args:
            description: the model's ``name``, and whatever else is needed to build it again.
            compute_loss: the recipe's loss, to count the operations of a sample for ``perf/mfu``,
                and to try batch sizes for `--auto-batch-size`.
            couples_samples: whether a sample's loss depends on the other samples of its
                micro-batch, as in contrastive learning. Then `--auto-batch-size` is refused.
            passes: how many forward and backward passes the loop makes with each micro-batch. It
                multiplies the operations that ``perf/mfu`` counts.

        Raises:
            UserError: the description has no name, `--auto-batch-size` does not suit the loss, or
                the initial weights or the checkpoint do not fit this run.
            TrainingError: with `--auto-batch-size`, not even one sample fits into memory.
        """
        require_name(description)
        loaded = self.loaded
        kept = self.kept
        # From now on, a request to stop waits for a save.
        self.context.decisions.request.save_first()
        if compute_loss is not None and not self.config.evaluate_only:
            try_loss(self.context, loaded, kept, compute_loss, couples_samples, passes)
        started = starting.start(self.context, loaded, self.plan, kept, description)
        self.evaluations.replaced_weights = started.replaced_weights
        self.stages.started = started

    # In the loop

    def batches(self, loader: Loader) -> Iterator[Batch]:
        """Yield training batches from the current update to the end of the run.

        With `--evaluate-only`, there are no batches. If a rank was asked to stop, this method saves
        a checkpoint after an update and ends the process.

        Raises:
            UserError: the loader is one of an evaluation, or the loop recorded no update in a whole
                epoch.
            Preempted: a rank was asked to stop, and everything is saved.
        """
        training_order_of(loader, "run.batches(train_loader)")
        if self.config.evaluate_only:
            return
        yield from self._loop.batches(self._started, loader)

    @property
    def should_evaluate(self) -> bool:
        """Whether an evaluation, or its rehearsal, is due now and has not been made yet."""
        self.evaluations.keep_states_before_rehearsal()
        return self.evaluations.is_due(self.plan, self.loaded)

    def evaluating(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """Return a context with the bare model in evaluation mode; the throughput clock is stopped.

        DDP's wrapper is taken off, because ranks may have different numbers of batches. The model's
        buffers, such as batch norm's statistics, are averaged over ranks first. Random generators
        start from the run's seed and the rank, and get their earlier states back afterwards.
        A request to stop ends the evaluation. Nothing of it is kept, and the resumed run repeats
        it. The network in an `AveragedModel` is evaluated without it.

        Raises:
            UserError: with `--evaluate-only`, the network has weights from before `--init-from`.
        """
        return self.evaluations.evaluating(model, lambda: saving.save_and_leave(self._started))

    def log(self, evaluation: Metrics) -> None:
        """Log an evaluation that was due. If it is the best, save its model in the background.

        With `--keep last`, no model is saved here. The figures of a rehearsal are only checked.

        Raises:
            UserError: the figures are not a dictionary, or lack the objective; or in a rehearsal,
                a figure is a mean where the recipe should have passed a total.
            TrainingError: the weights to save differ between ranks.
        """
        self.evaluations.log(evaluation, self.loaded.validation_split, self.kept)

    @property
    def should_stop(self) -> bool:
        """Whether `--early-stopping` ends the run here; the first time, this is also printed."""
        return self.loaded.early_stopping.decide(self.progress.global_step)

    def clip_grad_norm_(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Clip the gradients' global norm in place; skip the update if the norm is not finite.

        Such an update would ruin the weights. One call is enough for a network with several
        optimizers: all of them skip the update. With several networks, call this for each.

        Raises:
            UserError: a parameter was unfrozen, and no optimizer updates it; or in fp16, an
                optimizer of the network has made its step since the backward pass.
        """
        self._loop.clip(model, optimizer)

    def record(self, loss: torch.Tensor | float, metrics: Metrics | None = None) -> None:
        """Record a micro-batch. After the last one of an update, count the update.

        When a log interval is over, this also writes a log line. About once a second, all ranks
        agree on whether to stop. Most calls do not wait for the device. A log line does, and so do
        the checks that are due from time to time.

        Args:
            loss: the mean loss of the micro-batch.
            metrics: tensors of any shape or plain numbers, by name. A log line has, under
                ``train/``, the mean over all elements of all micro-batches and ranks that recorded
                the metric.

        Raises:
            UserError: a metric is not a number, or has the name of one that the run logs itself; or
                after the first update, no code uses a flag that was set, or there were no gradients
                to clip.
            TrainingError: an update had non-finite gradients, or a rank could not write its
                checkpoint.
        """
        self._loop.count_micro_batch(loss, metrics)
        if self.accelerator.sync_gradients:
            self._loop.end_update(self._started)

    @property
    def should_save(self) -> bool:
        """Whether a checkpoint is due, by the plan or because of a request to stop.

        None is due between the micro-batches of an update.
        """
        return saving.is_due(self.context, self.plan)

    def save(self) -> None:
        """Save a checkpoint: copy the state now, and write it in the background.

        A second call after the same update saves nothing.

        Raises:
            TrainingError: an update had non-finite gradients, or the weights differ between ranks.
        """
        saving.save(self._started)

    # After the loop

    def load_best(self, model: nn.Module) -> None:
        """Load the weights that `model` had at its best evaluation.

        The model keeps its last weights with `--keep last`, or if there was no evaluation on
        validation data. Before other weights replace the last ones, a checkpoint saves those for a
        resume.

        Raises:
            UserError: the best weights are those of another network, because that one was evaluated
                last before `log`.
        """
        self.evaluations.load_best(model, self.save)

    def finish(self, evaluation: Metrics) -> None:
        """Log the final evaluation, export the model that it evaluated, and show the summary.

        With `--evaluate-only`, no model is exported.

        Raises:
            UserError: no update has trained anything, or the network that was evaluated last is
                not the one that `load_best` got.
            TrainingError: a rank could not write its checkpoint, or the weights differ between
                ranks; nothing is exported then. Or the final evaluation misses `--target`; the
                model is exported all the same.
        """
        self._is_finish_called = True
        self._loop.watch.require_training(self._started)
        finishing.finish(self._started, self.evaluations, evaluation)

    # Optional

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the next update; after the last update, the last epoch."""
        return self.plan.epoch(self.progress.global_step)

    @property
    def data(self) -> Any:
        """The data set that `loaders` was given, of the type that the recipe made."""
        return self.loaded.data

    @property
    def all_loaders(self) -> Mapping[str, Loader]:
        """The loaders by split, also of the recipe's own splits, which `loaders` leaves out."""
        return self.loaded.loaders

    def log_images(
        self,
        name: str,
        images: torch.Tensor | Sequence[Image],
        captions: Sequence[str] | None = None,
    ) -> None:
        """Log rank 0's images at this step, at the tracker and under ``media/``.

        If they can't be logged, this only warns.

        Args:
            images: a tensor [images, channels, height, width] with 1, 3 or 4 channels, of uint8 (0
                to 255) or of floats (0 to 1); or a list of Pillow's images. The first 64 are kept.
            captions: one for each of all images.
        """
        self.context.logs.media.images(name, images, captions, self.progress.global_step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Iterable[Sequence[object]]
    ) -> None:
        """Log rank 0's table of numbers and texts, at the tracker and under ``media/``."""
        self.context.logs.media.table(name, columns, rows, self.progress.global_step)

    def log_histogram(self, name: str, values: Values) -> None:
        """Log a histogram of rank 0's values at this step, at the tracker and under ``media/``.

        Nothing waits for the device, and only the counts of 64 bins are kept.

        Args:
            values: a tensor of any shape.
        """
        self.context.logs.media.histogram(name, values, self.progress.global_step)

    @property
    def tracker(self) -> Any:
        """The tracker's own object on rank 0: W&B's or trackio's run, or TensorBoard's writer.

        It is None on other ranks, before `start`, without a tracker, and after the tracker failed.
        """
        return None if self.context.logs.tracker is None else self.context.logs.tracker.native

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks along dim 0, with gradients: [world_size × rows, …].

        All ranks must call this method. One process alone gets its `rows` back.

        Each rank gets the gradient of all ranks' losses with respect to its own rows, so training
        minimises the mean of the ranks' losses. This mean must be the loss of the whole batch,
        which holds if each rank computes the whole loss, or the mean over its own rows.

        Raises:
            UserError: the ranks' rows differ in shape or dtype, or `rows` has no dimensions.
        """
        return self._gather_rows(rows)

    def equal_batches(self, loader: Loader) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Yield an evaluation's batches, in equal number and size on all ranks, with a mask.

        The mask, bool [batch] on the device, is false for samples that only pad a batch. With the
        mask applied, each sample counts once.
        """
        return loader.equal_batches()

    # The `with` block

    def __enter__(self) -> Self:
        try:
            # Until `start`, there is nothing to save, so a request to stop may end the process.
            self.context.decisions.request.end_at_once()
        except Preempted as error:
            # Python does not call `__exit__` if `__enter__` fails, but the end must be noted.
            self.__exit__(Preempted, error, None)
            raise
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release what the run used; if it is unfinished, note in `status.json` how it ended.

        The log and the tracker are closed then, too. In a notebook, this also undoes the run's
        changes to the process, such as signal handlers.

        Raises:
            UserError: the recipe started a run and did not finish it.
            TrainingError, SystemExit: instead of `error`; see `closing.error_to_raise`.
        """
        unfinished = None
        if error is None and self.stages.started is not None and not self._is_finish_called:
            unfinished = unfinished_error(self.directory.path)
        closing.close(
            self.context,
            self.stages,
            self.evaluations.rehearsal,
            unfinished or error,
            is_embedded=self._is_embedded,
        )
        if unfinished is not None:
            raise unfinished

    # The stages that the run has reached, for the calls above, `recipes prove` and the benchmarks

    @property
    def loaded(self) -> LoadedData:
        """The data set and its loaders."""
        return reached(self.stages.loaded, "run.loaders(data)")

    @property
    def kept(self) -> KeptParts:
        """The model, optimizer and other parts that `keep` was given."""
        return reached(self.stages.kept, "run.keep(model=model, optimizer=optimizer, ...)")

    @property
    def _started(self) -> StartedRun:
        """All that the run has once `start` has returned."""
        return reached(self.stages.started, "run.start(description, compute_loss)")
