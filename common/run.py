"""One training run: wires its parts, and does what happens around the recipe's loop."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from accelerate.utils import set_seed
from torch import nn

from common.agreement import gather_from_ranks, wait_for_ranks
from common.checkpoints import export
from common.checkpoints.kinds import RandomState
from common.checkpoints.state import Parts, restore_newest
from common.checkpoints.store import Checkpoints
from common.config import TrainingConfig
from common.console import DISPLAY, OF_THE_LAUNCHER, say, tell
from common.data.batch import Data, refuse_unread
from common.data.iterable import IterableSamples
from common.data.loader import Loader, make_loaders
from common.data.workers import kill_workers
from common.directory import CONFIG, RunDirectory, read_status, refuse_to_resume
from common.errors import (
    Outcome,
    Preempted,
    TrainingError,
    UserError,
    is_loss,
    is_out_of_memory,
    let_main_rank_exit_first,
    outcome_of,
)
from common.flag_uses import find_flag_uses
from common.flags import mark_read, record_reads, refuse_flag, role_of, spelled, unread_flags
from common.measure.flops import ComputeLoss
from common.measure.memory import lift_limit
from common.measure.memory_plan import MemoryPlan, MemoryRows
from common.measure.meters import Meters
from common.models.compile import compile_seconds
from common.objective import PREFIXES, Objective
from common.profile.profiler import Profiler
from common.recipe_source import RecipeSource
from common.records import Architecture, PeakRate, RunConfig, Source, read_record
from common.resume import was_finished_meanwhile
from common.track import facts, media, report
from common.track.card import model_card
from common.track.log import Log
from common.track.names import Facts
from common.training.accelerator import (
    build_accelerator,
    compute_dtype,
    forget_accelerator,
    is_called_by_a_program,
    left_out,
    note_ranks_of_debug_launcher,
)
from common.training.batch_size import (
    attempt,
    batch_norm_sentence,
    fit_batch_size,
    out_of_memory_advice,
    refuse_unfit_loss,
)
from common.training.drift import insist_on_equal_weights, networks_of
from common.training.evaluation import Best, Rehearsal, evaluation_mode, keep_buffers
from common.training.gathering import Gatherer
from common.training.guard import GradientGuard
from common.training.optim import leave_unfit_fused_path, start_momentum
from common.training.plan import Plan, Progress
from common.training.rates import learning_rates
from common.training.stop import StopAgreement, StopRequest


class Run:
    """Carries a recipe's loop: counts, times, logs and saves; the loop itself is the recipe's.

    Use it as a context manager: however the run ends, `status.json` says how.
    """

    def __init__(
        self,
        config: TrainingConfig,
        recipe_file: str,
        objective: str,
        *,
        ddp: Mapping[str, Any] | None = None,
        rehearse: bool = True,
    ) -> None:
        """Build the Accelerator and take the directory.

        Args:
            config: the flags.
            recipe_file: the recipe's ``__file__``.
            objective: what the best model is best in, such as ``"accuracy:max"``.
            ddp: options of DistributedDataParallel, such as ``{"find_unused_parameters": True}``.
            rehearse: whether to try the evaluation on one batch before the first update, so that
                a mistake in it ends the run there. Nothing of the rehearsal is kept. Turn it off
                for an evaluation that needs all data.

        Raises:
            UserError: a flag, the objective or an option of DDP can't work, or the directory can't
                be used.
        """
        note_ranks_of_debug_launcher()
        self.is_called_by_a_program = is_called_by_a_program(recipe_file)
        DISPLAY.begin("starting")
        record_reads(config)
        self.config = config
        self.given = dict(vars(config))  # the flags before anything resolves `auto`
        self.are_flags_checked = False  # becomes true after the first update
        self.recipe = Path(recipe_file).stem
        self.progress = Progress()
        self.recipe_file = Path(recipe_file)
        self.source = RecipeSource(self.recipe_file)
        self.build_accelerator_and_directory(objective, ddp)
        accelerator, path = self.accelerator, self.directory.path
        self.device = accelerator.device
        self.compute_dtype = compute_dtype(accelerator)
        self.checkpoints = self.make_checkpoints()
        request = StopRequest(heeded=not config.evaluate_only)
        self.agreement = StopAgreement(accelerator, path, lambda: self.checkpoints.failure, request)
        self.parts = Parts(accelerator.process_index, accelerator.mesh)
        self.random = RandomState(self.device)
        self.guard = GradientGuard(accelerator, config.max_grad_norm, config.log_gradients)
        self.meters = Meters(accelerator, config.gradient_accumulation_steps)
        self.logs = Log(accelerator, path, self.objective)
        self.all_loaders: dict[str, Loader] = {}  # by split
        self.evaluated_step = -1  # the update after which `self.evaluated` was evaluated last
        self.kept_step: int | None = None  # the update of the model to export, once it is known
        self.best = Best(self.objective, config.keep == "best")
        self.rehearsal = Rehearsal(is_wanted=rehearse and not config.evaluate_only)
        self.gather_rows = Gatherer(accelerator)
        DISPLAY.doing = "reading the data"

    # Before the loop

    def build_accelerator_and_directory(
        self, objective: str, ddp: Mapping[str, Any] | None
    ) -> None:
        """Parse the objective, build the Accelerator, and take the run directory.

        A mistake in any of them is noted in the directory of the run to resume.
        """
        config = self.config
        resumes = config.resume is not None
        try:
            self.objective = Objective.parse(objective)
            self.accelerator = build_accelerator(config, ddp)
            self.directory = RunDirectory(
                config.output_dir,
                self.recipe,
                resumes,
                config.collective_timeout / 2,
                lambda: was_finished_meanwhile(config, self.recipe),
            )
        except UserError as error:
            refuse_to_resume(config.output_dir, outcome_of(error), resumes)
            raise

    def make_checkpoints(self) -> Checkpoints:
        checkpoints = Checkpoints(
            self.directory.path / "checkpoints",
            self.accelerator.process_index,
            self.accelerator.num_processes,
            self.config.keep_checkpoints,
            self.config.collective_timeout,
            self.device,
        )
        checkpoints.run_id = self.directory.run_id
        checkpoints.insist_on_own = self.directory.insist_on_own
        return checkpoints

    def loaders(self, data: Data) -> tuple[Loader, Loader, Loader]:
        """Return the loaders for training, validation and test.

        Where the data have no validation split, the test loader is used for both, and the reverse.

        Raises:
            UserError: `--early-stopping` has no validation data to choose by.
        """
        refuse_unread(self.config, data)
        self.data: Any = data
        names = [name for name in PREFIXES if name in data.splits]
        self.validation_split, self.test_split = names[0], names[-1]
        if self.config.early_stopping and self.validation_split != "validation":
            raise UserError(
                "--early-stopping would choose by test data, because there are no validation data: "
                "hold some out, as with --validation-share 0.1"
            )
        self.all_loaders = loaders = make_loaders(self.config, self.accelerator, data.splits)
        for loader in loaders.values():
            loader.is_cut_short = self.agreement.is_announced
            loader.is_rehearsed = lambda: self.rehearsal.is_reading
            loader.workers.is_stopping = self.is_asked_to_stop
        return loaders["train"], loaders[self.validation_split], loaders[self.test_split]

    def is_asked_to_stop(self) -> bool:
        return self.agreement.request.reason is not None

    def make_plan(self, train_loader: Loader, default_epochs: Mapping[str, int]) -> None:
        """Settle the length of the run.

        Args:
            default_epochs: the number of epochs where no flag states one, by the name of the data
                set, with ``"other"`` for all other data sets.
        """
        self.plan = Plan(self.config, train_loader.order, self.data.name, default_epochs)
        DISPLAY.doing = "building the model"

    def keep(
        self, *, model: nn.Module, optimizer: Any, scheduler: Any = None, **others: Any
    ) -> None:
        """Name the parts that each checkpoint saves.

        Args:
            others: further parts with ``state_dict`` and ``load_state_dict``, such as a second
                network, its optimizer, or an average of the weights. A resume restores each under
                its name. Parts that are None, as a scheduler may be, are left out.

        Raises:
            UserError: the Accelerator prepared a part that is not named here.
        """
        self.model, self.optimizer = model, optimizer
        self.unwrapped = self.evaluated = self.accelerator.unwrap_model(model)
        all_parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **others}
        parts = {name: part for name, part in all_parts.items() if part is not None}
        self.optimizers = {
            name: part for name, part in parts.items() if hasattr(part, "param_groups")
        }
        for name, part in parts.items():
            bare_part = getattr(part, "optimizer", part)
            leave_unfit_fused_path(bare_part, self.accelerator.device)
            start_momentum(bare_part)
            self.parts.add(name, part)
        missing_part = left_out(self.accelerator, parts.values())
        if missing_part:
            raise UserError(
                f"{missing_part} was prepared but not passed to run.keep(), so a resume would lose "
                "it: pass it to run.keep() under a name"
            )

    def start(
        self,
        description: Facts,
        compute_loss: ComputeLoss | None = None,
        *,
        couples_samples: bool = False,
    ) -> None:
        """Restore the checkpoint of a resumed run, open the logs, and show the plan of the run.

        Args:
            description: the model's ``name``, and whatever else is needed to build it again.
            compute_loss: the recipe's loss, to count the operations of a sample and to try batch
                sizes.
            couples_samples: whether a sample's loss depends on the others of its micro-batch, as
                in contrastive learning. Then `--auto-batch-size` is refused.
        """
        self.description = description
        self.agreement.request.obey_at_once(False)
        if compute_loss is not None and not self.config.evaluate_only:
            if self.config.auto_batch_size:
                self.fit_batch_size(compute_loss, couples_samples)
            self.count_operations(compute_loss)
        if self.config.init_from is not None:
            directory, class_names = self.directory.path, self.data.class_names
            export.load_initial(self.unwrapped, self.config, directory, class_names)
        self.watch_memory_and_time()
        self.keep_own_parts()
        facts.resolve(self.config, self.data)
        saved = self.config_to_resume()
        self.saved_config = self.collect_facts(saved)
        random_states = None
        if saved is not None and self.config.resume is not None:
            random_states = self.restore(Path(self.config.resume), saved.objective)
        self.write_facts(saved)
        self.logs.start(self.config, self.saved_config, self.position)
        self.tell_unknown_contents()
        self.seed_generators(random_states)

    def seed_generators(self, random_states: dict[str, Any] | None) -> None:
        """Seed the random generators, or restore `random_states` where a resume has them.

        This is the last step before the loop, because any earlier step may draw random numbers.
        """
        step = self.progress.global_step
        rank = self.accelerator.process_index
        set_seed((self.config.seed + step + rank) % 2**32)
        if random_states is not None:
            self.random.load_state_dict(random_states)

    def fit_batch_size(self, compute_loss: ComputeLoss, couples_samples: bool) -> None:
        """Choose the fastest micro-batch size with the same updates, for `--auto-batch-size`."""
        config, model = self.config, self.unwrapped
        train_loader = self.all_loaders["train"]
        batch_size_before = config.batch_size
        world_size = self.accelerator.num_processes
        refuse_unfit_loss(model, train_loader, compute_loss, world_size, couples_samples)
        try_size = partial(attempt, model, self.optimizer, train_loader, compute_loss)
        fit_batch_size(try_size, self.all_loaders, config, self.accelerator)
        mark_read(config, "auto_batch_size")
        sentence = batch_norm_sentence(model, batch_size_before, config.batch_size)
        if sentence:
            say(sentence)
        self.meters.accumulate(config.gradient_accumulation_steps)

    def count_operations(self, compute_loss: ComputeLoss) -> None:
        """Count the operations of a sample, for `perf/mfu`."""
        samples = self.all_loaders["train"].samples
        bare_model = self.accelerator.bare(self.unwrapped)
        self.meters.find_flops(bare_model, compute_loss, samples, self.compute_dtype)

    def watch_memory_and_time(self) -> None:
        """Plan the memory of the run, and get the profiler ready."""
        train_loader = self.all_loaders["train"]
        self.memory_plan = MemoryPlan(self.accelerator, self.model, self.optimizer, train_loader)
        self.profiler = Profiler(
            self.config,
            self.directory.path / "profile",
            self.accelerator,
            self.meters.stopwatch,
            self.plan,
            self.logs.attach,
        )

    def keep_own_parts(self) -> None:
        """Add the run's own state to the parts that the recipe keeps."""
        shared = {"progress": self.progress, "log": self.logs, "best": self.best}
        if self.accelerator.scaler is not None:
            shared["scaler"] = self.accelerator.scaler
        for name, part in shared.items():
            self.parts.add(name, part)
        samples: Any = self.all_loaders["train"].samples
        if isinstance(samples, IterableSamples):
            self.parts.add("samples", samples, shared=False)
        parts_of_rank = {"meters": self.meters, "guard": self.guard, "random": self.random}
        for name, part in parts_of_rank.items():
            self.parts.add(name, part, shared=False)
        # Before the first update, because training may change an optimizer's options.
        self.parts.freeze_description()

    def config_to_resume(self) -> RunConfig | None:
        """Return the contents of `config.json` of the run to resume; None for a new run."""
        if self.config.resume is None:
            return None
        return read_record(self.directory.path / CONFIG, RunConfig)

    def collect_facts(self, saved: RunConfig | None) -> RunConfig:
        """Return the contents of `config.json`, except for the recipe's source.

        Args:
            saved: the file as an earlier attempt wrote it; None on a first start.
        """
        config = self.config
        placement = self.all_loaders["train"].placement
        parameters = sum(parameter.numel() for parameter in self.unwrapped.parameters())
        return facts.collect(
            self.recipe,
            config,
            self.given,
            saved,
            run_id=self.directory.run_id,
            environment=facts.environment(config, self.accelerator, placement),
            objective=str(self.objective),
            data=self.data.facts(),
            architecture=Architecture(name=self.description["name"], parameters=parameters),
            plan=self.plan.facts(),
            memory_plan=self.memory_plan.facts(),
            peak=PeakRate(tflops=self.meters.peak, source=self.meters.peak_source),
        )

    def write_facts(self, saved: RunConfig | None) -> None:
        """Write `config.json`, with the facts about the recipe's source, and `status.json`."""
        step = self.progress.global_step
        if read_status(self.directory.path).status == "running":  # no rank has failed
            self.directory.write_status("running", step)
        saved_source = Source() if saved is None else saved.source
        source = self.source.record(self.directory, saved_source, step)
        self.saved_config = self.saved_config.model_copy(update={"source": source})
        self.directory.write(CONFIG, self.saved_config.to_json())

    def tell_unknown_contents(self) -> None:
        """Name the splits whose data a resume can't compare with those of the first start."""
        for split in self.saved_config.data.unknown_contents or ():
            say(
                f"        the contents of split {split} have no fingerprint, so a resume would not "
                "notice changed data: pass one with Data(..., fingerprint=TEXT)"
            )

    # In the loop

    def batches(self, loader: Loader) -> Iterator[Any]:
        """Yield training batches from the present update to the end of the run."""
        if self.config.evaluate_only:
            return
        progress = self.progress
        total_steps = self.plan.total_steps
        self.model.train()
        self.meters.stopwatch.start()
        while progress.global_step < total_steps:
            epoch, step_in_epoch = divmod(progress.global_step, self.plan.updates_per_epoch)
            epoch_batches = loader.epoch(epoch, step_in_epoch)
            batches = self.profiler.watch(epoch_batches, loader, progress.global_step)
            while progress.global_step < total_steps:
                wait_began = time.perf_counter()
                item = next(batches, None)
                if item is None:
                    break
                batch, work = item
                self.counted = work, time.perf_counter() - wait_began
                if self.rehearsal.is_wanted:
                    self.rehearsal.begin(is_replaced=self.should_evaluate)
                with self.memory_plan.watching(work):
                    yield batch
                self.rehearsal.end()
                if self.agreement.stopping:
                    self.leave()
        self.meters.stopwatch.stop()

    def leave(self) -> None:
        """End this process by `Preempted`, once its last checkpoint is written."""
        self.meters.stopwatch.stop()
        self.checkpoints.wait()
        self.agreement.stop(self.progress.global_step)

    def clip_grad_norm_(self, model: nn.Module, optimizer: Any) -> None:
        """Clip the gradients' global norm in place, and skip the update if it is not finite."""
        if not self.are_flags_checked:
            mark_read(self.config, "max_grad_norm")
        self.guard.clip(model, optimizer)

    def record(self, loss: torch.Tensor | float, metrics: Mapping[str, Any] | None = None) -> None:
        """Record a micro-batch, and write a log line when an interval is over.

        Only a log line synchronises with the device.

        Args:
            loss: the mean loss of the micro-batch.
            metrics: by name, tensors of any shape or plain numbers. A log line has, under
                ``train/``, the mean over all elements of all micro-batches and ranks that recorded
                the metric.
        """
        self.rehearsal.end()
        is_update = self.accelerator.sync_gradients
        self.meters.count(loss, metrics, *self.counted, is_update)
        if is_update:
            self.logs.flush()
            self.progress.global_step = step = self.progress.global_step + 1
            if not self.are_flags_checked:
                self.are_flags_checked = True
                self.refuse_unread_flags()
            if self.plan.logs(step):
                self.log_training()
            if self.guard.is_due:
                self.guard.check(step)
            if step % self.agreement.every == 0:
                self.agreement.check(step)
            self.profiler.step()

    def refuse_unread_flags(self) -> None:
        """End the run for a flag that was stated and that nothing uses; called on all ranks.

        A flag that no rank has used yet is let pass where the source shows that it may be used
        later. That is said, as the line may never be reached.
        """
        unread_on_rank = unread_flags(self.config, self.saved_config.given)
        ranks = gather_from_ranks(self.accelerator, unread_on_rank)
        unread = [name for name in ranks[0] if all(name in names for names in ranks)]
        if not unread:
            return
        uses = find_flag_uses(self.recipe_file)
        for name in unread:
            place = uses.place_of(name)
            if place is None:
                refuse_flag(self.config, name, f"{self.recipe}.py")
            say(
                f"{spelled(name)} was set, and this process did not use it in the first update: "
                f"see that {place} is reached"
            )

    def log_images(
        self, name: str, images: torch.Tensor | Sequence[Any], captions: Sequence[str] | None = None
    ) -> None:
        """Log rank 0's images at this step, at the tracker and under ``media/``.

        Args:
            images: uint8 or float (0 is black, 1 is white) [images, channels, height, width], of 1,
                3 or 4 channels; or a list of Pillow's images. The first 64 are kept.
            captions: one for each image.
        """
        self.logs.media.images(name, images, captions, self.progress.global_step)

    def log_table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Log rank 0's table of numbers and texts, as `log_images` does images."""
        self.logs.media.table(name, columns, rows, self.progress.global_step)

    def log_histogram(self, name: str, values: Any) -> None:
        """Log a histogram of rank 0's values, a tensor of any shape, as `log_images` does images.

        Nothing waits for the device, and only the counts of 64 bins are kept.
        """
        self.logs.media.histogram(name, values, self.progress.global_step)

    @property
    def tracker(self) -> Any:
        """The tracker's own object on rank 0: W&B's run, TensorBoard's writer; None without one."""
        return None if self.logs.tracker is None else self.logs.tracker.native

    def log_training(self) -> None:
        self.directory.insist_on_own(max_age=1.0)
        values = self.meters.interval()
        self.guard.check(self.progress.global_step, values.get("train/loss", 0.0))
        own = {**self.guard.figures(), **learning_rates(self.optimizers)}
        if taken := sorted(values.keys() & own.keys()):
            raise UserError(
                f"run.record got the metric {taken[0].removeprefix('train/')!r}, and the run logs "
                f"its own {taken[0]}: choose another name"
            )
        self.logs.interval({**values, **own})

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the next update; after the last update, the last epoch."""
        return self.plan.epoch(self.progress.global_step)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks along dim 0, with gradients: [world_size × rows, …].

        All ranks must call it. One process alone gets its `rows` back.

        Each rank gets the gradient of all ranks' losses with respect to its own rows, so training
        minimises the mean of the ranks' losses. This mean must be the loss of the whole batch. It
        is if each rank computes the whole loss, or the mean over its own rows.

        Raises:
            UserError: the ranks' rows differ in shape.
        """
        return self.gather_rows(rows)

    def equal_batches(self, loader: Loader) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield an evaluation's batches, in equal number and size on all ranks, with a mask.

        The mask, bool [batch] on the device, is false for samples that only pad a batch. With the
        mask applied, each sample counts once.
        """
        return loader.equal_batches()

    @property
    def should_evaluate(self) -> bool:
        """Whether an evaluation is due at the present step and has not been made yet.

        The last model is also evaluated if it has to be compared with an earlier best one. If not,
        and if the final evaluation reads the same split, the final evaluation is enough.
        """
        if self.rehearsal.is_due:
            return True
        step = self.progress.global_step
        is_due = self.plan.evaluates(step)
        if self.plan.ends(step):
            is_compared = self.best.is_kept and self.best.value is not None
            is_due = is_compared or (is_due and self.validation_split != self.test_split)
        return is_due and self.evaluated_step != step

    @property
    def should_stop(self) -> bool:
        """Whether `--early-stopping` ends the run here."""
        if not self.are_flags_checked:
            mark_read(self.config, "early_stopping")
        patience = self.config.early_stopping
        return patience is not None and self.best.later >= patience

    @property
    def should_save(self) -> bool:
        """Whether a checkpoint is due, by the plan or because of a request to stop."""
        if not self.accelerator.sync_gradients:
            return False
        is_checkpoint_old = self.agreement.is_checkpoint_old
        is_planned = self.plan.saves(self.progress.global_step, is_checkpoint_old)
        return self.agreement.stopping or is_planned

    def save(self) -> None:
        """Save a checkpoint: copy the state now, and write it in the background."""
        step = self.progress.global_step
        DISPLAY.doing = "saving, then stopping" if self.agreement.stopping else "saving"
        with self.meters.stopwatch.stopped():
            # A checkpoint after a non-finite update would only end the resumed run again.
            self.guard.check(step)
            self.insist_on_equal_weights()
            self.checkpoints.save(step, self.parts.collect(), self.identity())
            self.agreement.note_checkpoint()
        DISPLAY.doing = ""

    def insist_on_equal_weights(self) -> None:
        """Raise a `TrainingError` if the weights differ between ranks."""
        insist_on_equal_weights(self.accelerator, networks_of(self.parts.shared))

    def identity(self) -> dict[str, Any]:
        """Return the facts by which a resume recognises its checkpoints.

        They become part of the manifest. A resume compares them with its own.
        """
        step = self.progress.global_step
        updates_in_epoch = step % self.plan.updates_per_epoch
        environment = self.saved_config.environment
        return {
            "run_id": self.directory.run_id,
            "recipe": self.recipe,
            "model": self.description["name"],
            "objective": str(self.objective),
            "flags": self.fixed_flags(),
            "parts_described": self.parts.description,
            "global_step": step,
            "global_sample_index": updates_in_epoch * self.plan.samples_per_update,
            "data": self.saved_config.data.to_json() | {"class_names": self.data.class_names},
            "effective_batch_size": environment.effective_batch_size,
            "world_size": environment.world_size,
            "mixed_precision": environment.mixed_precision,
            "versions": environment.versions,
        }

    def fixed_flags(self) -> dict[str, Any]:
        """Return the flags that a resume can't change, except those that it resolves again."""
        return {
            name: value
            for name, value in vars(self.config).items()
            if not role_of(type(self.config), name).free
            and name not in ("init_from", "mixed_precision")
        }

    def restore(self, resume_path: Path, saved_objective: str) -> dict[str, Any] | None:
        """Restore the newest whole checkpoint, up to the one that `--resume` names if it does.

        Returns:
            The random states to restore as the last step of the start. None where no checkpoint is
            whole, or where the number of processes has changed.
        """
        last_name = resume_path.name if resume_path.name.startswith("step-") else None
        manifest = restore_newest(
            self.checkpoints, last_name, self.parts, self.identity(), saved_objective
        )
        if manifest is None:
            return None
        self.agreement.note_checkpoint()
        if manifest["lost_best"]:
            no_best = Best(self.objective, self.best.is_kept)
            self.best.load_state_dict(no_best.state_dict())
        self.best.insist_on(self.checkpoints.once, self.directory.path)
        world_size_before = len(manifest["ranks"])
        world_size = self.accelerator.num_processes
        if world_size_before != world_size:
            say(
                f"{world_size} processes instead of {world_size_before}: each update still has the "
                f"same samples, with {self.config.gradient_accumulation_steps} batches accumulated"
            )
            return None
        return self.random.state_dict()

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the bare model in evaluation mode, with the clock of throughput stopped.

        DDP's wrapper is taken off, because ranks may have different numbers of batches. The model's
        buffers, such as batch norm's statistics, are averaged over ranks first. Random generators
        start from the run's seed and the rank, and get their earlier states back afterwards.
        A request to stop ends the evaluation without a trace, and the resumed run repeats it.
        """
        step = self.progress.global_step
        bare_model = self.accelerator.unwrap_model(model)
        mode = evaluation_mode(self.accelerator, bare_model, self.random, self.config.seed)
        DISPLAY.doing = "evaluating"
        if self.rehearsal.is_on:
            with self.rehearsing(bare_model), mode:
                yield bare_model
            return
        with self.meters.stopwatch.stopped():
            with mode as undo:
                yield bare_model
            self.agreement.check(step)
            if self.agreement.stopping:
                undo()
                self.save()
                self.leave()
        self.evaluated = bare_model
        self.evaluated_step = step
        DISPLAY.doing = ""

    @contextmanager
    def rehearsing(self, bare_model: nn.Module) -> Iterator[None]:
        """Let an evaluation read one batch, then restore the model's buffers."""
        put_buffers_back = keep_buffers(bare_model)
        self.rehearsal.enter()
        with self.meters.stopwatch.stopped():
            yield
        put_buffers_back()
        self.rehearsal.leave()
        DISPLAY.doing = ""

    def log(self, evaluation: Facts) -> None:
        """Log an evaluation that was due. If it is the best, save its model in the background."""
        if self.rehearsal.is_on:
            self.logs.rehearse(evaluation)
            self.rehearsal.is_due = self.rehearsal.is_unchecked = False
            return
        self.logs.evaluation(evaluation, self.validation_split, self.best)
        if self.best.step == self.progress.global_step and self.best.is_kept:
            with self.meters.stopwatch.stopped():
                self.insist_on_equal_weights()
                self.checkpoints.save_best(self.best.step, export.weights_of(self.evaluated))
        if self.should_stop:
            step = self.progress.global_step
            metric = self.objective.metric
            say(
                f"stopped early, after update {step}: "
                f"no better {metric} in {self.best.later} evaluations"
            )

    def position(self) -> dict[str, float]:
        seconds = self.meters.stopwatch.total.seconds
        return self.plan.position(self.progress.global_step) | {"time/train_seconds": seconds}

    # After the loop

    def load_best(self, model: nn.Module) -> None:
        """Load the weights that `model` had at its best evaluation.

        The model keeps its last weights with `--keep last`, or if there was no evaluation on
        validation data.
        """
        step = self.progress.global_step
        self.kept_step = step
        if not self.best.is_kept or self.best.step in (-1, step):
            return
        self.save()  # the last weights, which a run that stopped early needs to be resumed
        self.checkpoints.wait()
        self.agreement.check(step)  # all ranks wait for the one that writes
        self.kept_step = self.best.step
        path, weights = self.checkpoints.read_best(self.kept_step)
        export.put_weights(self.accelerator.unwrap_model(model), weights, path)

    def finish(self, evaluation: Facts) -> None:
        """Log the final evaluation, export the model that it evaluated, and show the summary.

        Raises:
            TrainingError: the final evaluation misses `--target`. The model is exported all the
                same.
        """
        step = self.progress.global_step
        split = self.test_split
        was_trained = not self.config.evaluate_only
        self.end_training(was_trained)
        kept_step = step if self.kept_step is None else self.kept_step
        position = self.plan.position(kept_step)
        final_figures = self.logs.evaluation(evaluation, split, self.best, position)
        DISPLAY.doing = "finishing"
        self.logs.flush()
        memory = self.memory_plan.finish() if was_trained else []
        summary = self.summarize(final_figures, kept_step, was_trained)
        wait_for_ranks(self.accelerator)  # no rank waits while rank 0 writes a whole model
        if was_trained:
            self.export_model(kept_step, summary)
        self.directory.write("summary.json", summary)
        if memory:
            rows = {
                part: {"planned_mib": planned, "measured_mib": measured}
                for part, planned, measured in memory
            }
            self.directory.write("memory.json", rows)
        self.attach_results(evaluation, memory, was_trained)
        commands = self.logs.finish(summary)
        path = self.directory.path
        report.show_summary(self.saved_config, summary, split, path, commands, memory)
        idle_sentence = self.meters.idle_sentence()
        if idle_sentence:
            say(idle_sentence)
        final_value = final_figures[f"{PREFIXES[split]}/{self.objective.metric}"]
        self.objective.require(final_value, self.config.target)
        self.directory.write_status("finished", step)

    def end_training(self, was_trained: bool) -> None:
        """Stop the clock, wait for the last checkpoint, and compare the ranks' weights."""
        stopwatch = self.meters.stopwatch
        stopwatch.stop()
        self.directory.insist_on_own()
        self.checkpoints.wait()
        self.agreement.check(self.progress.global_step)
        was_left_early = stopwatch.total.updates > stopwatch.marked.updates
        if was_left_early:
            self.log_training()
        if was_trained:
            self.insist_on_equal_weights()

    def summarize(self, final_figures: Facts, kept_step: int, was_trained: bool) -> dict[str, Any]:
        """Return the contents of `summary.json`."""
        summary = {**self.logs.latest, **final_figures}
        if was_trained:
            summary |= self.meters.whole_run()
        summary["perf/goodput"] = self.meters.goodput()
        summary["progress/kept_step"] = kept_step
        if self.best.value is not None:
            summary[self.objective.best_key] = self.best.value
        if self.config.compile:
            summary["time/compile_seconds"] = compile_seconds()
        summary["time/train_seconds"] = self.meters.stopwatch.total.seconds
        summary["time/total_seconds"] = self.progress.seconds
        return summary

    def export_model(self, kept_step: int, summary: Facts) -> None:
        """Write `model/`: rank 0 alone, or all ranks together if the model is sharded."""
        is_sharded = self.accelerator.mesh is not None
        if not is_sharded and not self.accelerator.is_main_process:
            return
        bare_model = self.accelerator.bare(self.evaluated)
        description = {
            "recipe": self.recipe,
            "class": type(bare_model).__name__,
            "update": kept_step,
            "run_id": self.directory.run_id,
            **self.description,
        }
        card = model_card(
            self.config, self.saved_config, description, self.data, self.test_split, summary
        )
        folder = self.directory.path / "model"
        skeleton = bare_model if is_sharded else None
        export.save_model(folder, self.evaluated, description, card, skeleton)
        if is_sharded:
            wait_for_ranks(self.accelerator)

    def attach_results(self, evaluation: Facts, memory: MemoryRows, was_trained: bool) -> None:
        """Send the tables, the misclassified samples and the model to the tracker."""
        split = self.test_split
        loader = self.all_loaders[split]
        self.logs.attach(media.results, evaluation, PREFIXES[split], loader, self.data, memory)
        if was_trained and self.config.log_model:
            self.logs.attach(media.artifact, self.directory.path / "model", "model")

    def __enter__(self) -> Self:
        try:
            self.agreement.request.obey_at_once(True)  # while data are prepared
        except Preempted as error:
            self.__exit__(Preempted, error, None)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Note in `status.json` and at the tracker how the run ended; leave the process group."""
        DISPLAY.close()
        if hasattr(self, "profiler"):
            self.profiler.stop()
        if error is not None:
            self.rehearsal.explain(error)
            self.close_after(error)
        for loader in self.all_loaders.values():
            loader.close()
        if isinstance(error, UserError):
            let_main_rank_exit_first()
            if self.agreement.request.reason is None:  # else rank 0 ended first, and told the user
                error.speak()
        all_ranks_end = error is None or isinstance(error, (UserError, Preempted))
        if torch.distributed.is_initialized() and all_ranks_end:
            torch.distributed.destroy_process_group()
        self.directory.release()
        if self.is_called_by_a_program:
            self.agreement.request.release()
            lift_limit()
            forget_accelerator()

    def close_after(self, error: BaseException) -> None:
        """Keep what an unfinished run has logged, and note how it ended.

        Raises:
            TrainingError: in place of `error`, if it is out of memory, or if the run was lost at
                the same update before. Its message says what to do.
            SystemExit: in place of `error`, if another rank was lost first.
        """
        lift_limit()
        kill_workers()
        step = self.progress.global_step or read_status(self.directory.path).global_step
        outcome = outcome_of(error, self.accelerator.process_index)
        if isinstance(error, Preempted):
            self.close_after_request(error, outcome, step)
            return
        if not isinstance(error, UserError):
            self.checkpoints.hurry()
        is_first = self.directory.write_failure(outcome, step, is_loss(error))
        status = read_status(self.directory.path)
        is_lost_again = is_first and outcome.resumable and status.resumable is False
        tell(f"{outcome.status}: {outcome.reason}")
        self.logs.finish(exit_code=1)
        self.directory.remove_if_unused()
        if is_lost_again:
            raise TrainingError(str(status.reason), every_rank=True) from None
        if outcome.resumable and not is_first and not isinstance(error, UserError):
            raise SystemExit(1) from None  # another rank was lost first, and says why
        if is_out_of_memory(error) and is_first:
            loaders = self.all_loaders.values()
            advice = out_of_memory_advice(self.config, self.directory.path, self.device, loaders)
            raise TrainingError(advice, every_rank=True) from None

    def close_after_request(self, error: Preempted, outcome: Outcome, step: int) -> None:
        """Close a run that was asked to stop."""
        say(error.message)
        if error.is_by_ctrl_c:
            say(OF_THE_LAUNCHER)
        self.logs.finish()
        self.directory.write_status(outcome.status, step, outcome.reason)
