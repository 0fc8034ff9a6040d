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
    Preempted,
    TrainingError,
    UserError,
    is_loss,
    is_out_of_memory,
    let_main_rank_exit_first,
    outcome_of,
)
from common.files import read_json
from common.flags import mark_read, record_reads, refuse_unread_flags, role_of
from common.measure.flops import ComputeLoss
from common.measure.memory import lift_limit
from common.measure.memory_plan import MemoryPlan
from common.measure.meters import Meters
from common.models.compile import compile_seconds
from common.objective import PREFIXES, Objective
from common.profile.profiler import Profiler
from common.recipe_source import RecipeSource
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
from common.training.optim import start_momentum
from common.training.plan import Plan, Progress
from common.training.rates import learning_rates
from common.training.stop import Agreement, StopRequest, end_collectives


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
        """
        note_ranks_of_debug_launcher()
        self.is_called_by_a_program = is_called_by_a_program(recipe_file)
        DISPLAY.begin("starting")
        record_reads(config)
        self.config, self.given = config, dict(vars(config))
        self.are_flags_checked = False  # once, after the first update
        self.recipe, self.progress = Path(recipe_file).stem, Progress()
        self.source = RecipeSource(Path(recipe_file))
        resumes, patience = config.resume is not None, config.collective_timeout
        try:
            self.objective = Objective.parse(objective)
            self.accelerator = accelerator = build_accelerator(config, ddp)
            self.directory = RunDirectory(
                config.output_dir,
                self.recipe,
                resumes,
                patience / 2,
                lambda: was_finished_meanwhile(config, self.recipe),
            )
        except UserError as error:
            refuse_to_resume(config.output_dir, outcome_of(error), resumes)
            raise
        self.device, self.compute_dtype = accelerator.device, compute_dtype(accelerator)
        path, rank = self.directory.path, accelerator.process_index
        folder, ranks = path / "checkpoints", accelerator.num_processes
        kept = config.keep_checkpoints
        self.checkpoints = Checkpoints(folder, rank, ranks, kept, patience, self.device)
        self.checkpoints.run_id = self.directory.run_id
        self.checkpoints.insist_on_own = self.directory.insist_on_own
        request = StopRequest(heeded=not config.evaluate_only)
        self.agreement = Agreement(accelerator, path, lambda: self.checkpoints.failure, request)
        self.parts = Parts(rank, accelerator.mesh)
        self.random = RandomState(self.device)
        self.guard = GradientGuard(accelerator, config.max_grad_norm, config.log_gradients)
        self.meters = Meters(accelerator, config.gradient_accumulation_steps)
        self.logs = Log(accelerator, path, self.objective)
        self.all_loaders: dict[str, Loader] = {}  # by split
        self.facts: Facts = {}  # what `config.json` holds
        self.evaluated_step = -1  # of the last evaluation, of `self.evaluated`
        self.kept_step: int | None = None  # of the model that is kept, once that is settled
        self.best = Best(self.objective, config.keep == "best")
        self.rehearsal = Rehearsal(is_wanted=rehearse and not config.evaluate_only)
        self.gather_rows = Gatherer(accelerator)
        DISPLAY.doing = "reading the data"

    # Before the loop

    def loaders(self, data: Data) -> tuple[Loader, Loader, Loader]:
        """Return loaders: for training, validation and test; one may stand in for the other."""
        refuse_unread(self.config, data)
        self.data: Any = data
        names = [name for name in PREFIXES if name in data.splits]
        self.validation_split, self.test_split = names[0], names[-1]
        if self.config.early_stopping and self.validation_split != "validation":
            advice = "hold some out, as with --validation-share 0.1"
            raise UserError(f"--early-stopping would choose by test data, the only ones: {advice}")
        self.all_loaders = loaders = make_loaders(self.config, self.accelerator, data.splits)
        for loader in loaders.values():
            loader.is_cut_short = self.agreement.is_announced
            loader.is_rehearsed = lambda: self.rehearsal.is_reading
            loader.workers.is_stopping = self.is_asked_to_stop
        return loaders["train"], loaders[self.validation_split], loaders[self.test_split]

    def is_asked_to_stop(self) -> bool:
        return self.agreement.request.reason is not None

    def make_plan(self, train_loader: Loader, default_epochs: Mapping[str, int]) -> None:
        """Settle how long the run is, by default in epochs by name of the data set or "other"."""
        self.plan = Plan(self.config, train_loader.order, self.data.name, default_epochs)
        DISPLAY.doing = "building the model"

    def keep(
        self, *, model: nn.Module, optimizer: Any, scheduler: Any = None, **others: Any
    ) -> None:
        """Name what a checkpoint holds; a `UserError` if not all that the Accelerator prepared.

        Others are whatever has ``state_dict`` and ``load_state_dict``: a second network, its
        optimizer, an average of the weights. Each is put back under its name. What is None, as a
        scheduler may be, is left out.
        """
        self.model, self.optimizer = model, optimizer
        self.unwrapped = self.evaluated = self.accelerator.unwrap_model(model)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **others}
        named = {name: part for name, part in parts.items() if part is not None}
        self.optimizers = {n: part for n, part in named.items() if hasattr(part, "param_groups")}
        for name, part in named.items():
            start_momentum(getattr(part, "optimizer", part))
            self.parts.add(name, part)
        if left_out_kind := left_out(self.accelerator, named.values()):
            raise UserError(
                f"{left_out_kind} was prepared but not passed to run.keep(); it would be lost on "
                "resume: name it there"
            )

    def start(
        self,
        description: Facts,
        compute_loss: ComputeLoss | None = None,
        *,
        couples_samples: bool = False,
    ) -> None:
        """Go on from a checkpoint if asked to, then open the logs and show what will run.

        Args:
            description: of the model: its ``name``, and what else is needed to use it again.
            compute_loss: without it, it is not counted what a sample costs.
            couples_samples: whether a sample's loss depends on the others of its micro-batch, as
                in contrastive learning. Then `--auto-batch-size` is refused.
        """
        config, accelerator, self.description = self.config, self.accelerator, description
        self.agreement.request.obey_at_once(False)
        model, train_loader = self.unwrapped, self.all_loaders["train"]
        samples: Any = train_loader.samples
        if compute_loss is not None and not config.evaluate_only:
            if config.auto_batch_size:
                before = config.batch_size
                checked = (model, train_loader, compute_loss)
                refuse_unfit_loss(*checked, accelerator.num_processes, couples_samples)
                try_size = partial(attempt, model, self.optimizer, train_loader, compute_loss)
                fit_batch_size(try_size, self.all_loaders, config, accelerator)
                mark_read(config, "auto_batch_size")
                if sentence := batch_norm_sentence(model, before, config.batch_size):
                    say(sentence)
                self.meters.accumulate(config.gradient_accumulation_steps)
            bare = accelerator.bare(model)
            self.meters.find_flops(bare, compute_loss, samples, self.compute_dtype)
        if config.init_from is not None:
            export.load_initial(model, config, self.directory.path, self.data.class_names)
        self.memory_plan = MemoryPlan(accelerator, self.model, self.optimizer, train_loader)
        folder, stopwatch = self.directory.path / "profile", self.meters.stopwatch
        self.profiler = Profiler(
            config, folder, accelerator, stopwatch, self.plan, self.logs.attach
        )
        scaler = {} if accelerator.scaler is None else {"scaler": accelerator.scaler}
        shared = {"progress": self.progress, "log": self.logs, "best": self.best, **scaler}
        for name, part in shared.items():
            self.parts.add(name, part)
        own: dict[str, Any] = {"samples": samples} if isinstance(samples, IterableSamples) else {}
        own |= {"meters": self.meters, "guard": self.guard, "random": self.random}
        for name, part in own.items():
            self.parts.add(name, part, shared=False)
        facts.resolve(config, self.data)
        saved = {} if config.resume is None else read_json(self.directory.path / CONFIG)
        _ = self.parts.description  # now: training may change an optimizer's options
        parameters = sum(p.numel() for p in model.parameters())
        self.facts = facts.collect(
            *(self.recipe, config, self.given, saved),
            run_id=self.directory.run_id,
            environment=facts.environment(config, accelerator, train_loader.placement),
            objective=str(self.objective),
            data=self.data.facts(),
            architecture={"name": description["name"], "parameters": parameters},
            plan=self.plan.facts(),
            memory_plan=self.memory_plan.facts(),
            # What `perf/mfu` is a share of, for each device.
            peak={"tflops": self.meters.peak, "source": self.meters.peak_source},
        )
        random = None if config.resume is None else self.restore(Path(config.resume))
        step = self.progress.global_step
        if read_status(self.directory.path).get("status") == "running":  # on the other ranks too
            self.directory.write_status("running", step)
        earlier = saved.get("source")
        self.facts["source"] = self.source.facts(
            self.directory, earlier if isinstance(earlier, dict) else {}, step
        )
        self.directory.write(CONFIG, self.facts)
        self.logs.start(config, self.facts, self.position)
        for split in self.facts["data"].get("unknown_contents", ()):
            say(
                f"        the contents of split {split} can't be told: a resume would not notice "
                "other ones; Data(..., fingerprint=TEXT) names them"
            )
        # As the last thing before the loop: whatever came before may have drawn.
        set_seed((config.seed + step + accelerator.process_index) % 2**32)
        if random is not None:
            self.random.load_state_dict(random)

    # In the loop

    def batches(self, loader: Loader) -> Iterator[Any]:
        """Yield training batches to the end of the run, from where it stands."""
        if self.config.evaluate_only:
            return
        progress, total = self.progress, self.plan.total_steps
        self.model.train()
        self.meters.stopwatch.start()
        while progress.global_step < total:
            made = loader.epoch(*divmod(progress.global_step, self.plan.updates_per_epoch))
            batches = self.profiler.watch(made, loader, progress.global_step)
            while progress.global_step < total:
                waited = time.perf_counter()
                item = next(batches, None)
                if item is None:
                    break
                batch, work = item
                self.counted = work, time.perf_counter() - waited
                if self.rehearsal.is_wanted:
                    self.rehearsal.begin(is_replaced=self.should_evaluate)
                with self.memory_plan.watching(work):
                    yield batch
                self.rehearsal.end()
                if self.agreement.stopping:
                    self.leave()
        self.meters.stopwatch.stop()

    def leave(self) -> None:
        self.meters.stopwatch.stop()
        self.checkpoints.wait()
        self.agreement.stop(self.progress.global_step)

    def clip_grad_norm_(self, model: nn.Module, optimizer: Any) -> None:
        """Clip the gradients' global norm, and see that non-finite ones are not applied.

        The gradients are clipped when this returns.
        """
        if not self.are_flags_checked:
            mark_read(self.config, "max_grad_norm")
        self.guard.clip(model, optimizer)

    def record(self, loss: torch.Tensor | float, metrics: Mapping[str, Any] | None = None) -> None:
        """Take note of a micro-batch's mean loss; log when an interval is over.

        Of each metric, a tensor of any shape or a plain number, the mean over all elements, of all
        micro-batches and ranks that recorded it, is logged under ``train/``. There is no other
        synchronisation.
        """
        self.rehearsal.end()
        is_update = self.accelerator.sync_gradients
        self.meters.count(loss, metrics, *self.counted, is_update)
        if is_update:
            self.logs.flush()
            self.progress.global_step = step = self.progress.global_step + 1
            if not self.are_flags_checked:
                self.are_flags_checked = True
                refuse_unread_flags(self.config, self.facts["given"], f"{self.recipe}.py")
            if self.plan.logs(step):
                self.log_training()
            if self.guard.is_due:
                self.guard.check(step)
            if step % self.agreement.every == 0:
                self.agreement.check(step)
            self.profiler.step()

    def log_images(
        self, name: str, images: torch.Tensor | Sequence[Any], captions: Sequence[str] | None = None
    ) -> None:
        """Log rank 0's images with the row of this step, at the tracker and under ``media/``.

        Args:
            images: uint8 or float (0 is black, 1 is white) [images, channels, height, width], of 1,
                3 or 4 channels; or a list of Pillow's images. The first 64 are kept.
            captions: one an image.
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
        self.directory.insist_on_own()
        values = self.meters.interval()
        self.guard.check(self.progress.global_step, values.get("train/loss", 0.0))
        rates = learning_rates(self.optimizers)
        self.logs.interval({**values, **self.guard.figures(), **rates})

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the next update; after the last update, the last epoch."""
        return self.plan.epoch(self.progress.global_step)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks along dim 0, with gradients: [world_size × rows, …].

        Each rank gets the gradient of all ranks' losses with respect to its own rows. So training
        follows the mean of the ranks' losses: form them such that this mean is the loss of the
        whole batch. Both the whole loss on each rank, and each rank's mean over its own rows, are.
        All ranks must call it, with rows of one shape, else it raises a `UserError`. On one process
        it returns `rows`.
        """
        return self.gather_rows(rows)

    def equal_batches(self, loader: Loader) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield an evaluation's batches, as many and of one size on all ranks, with a mask.

        The mask, bool [batch] on the device, is false for samples that only fill a batch up: each
        sample counts once where the mask is applied.
        """
        return loader.equal_batches()

    @property
    def should_evaluate(self) -> bool:
        """Whether an evaluation of the present step is due, and was not made yet.

        The last model is evaluated, too, if it may not be the best. Otherwise the final evaluation
        stands for it, if it reads the same split.
        """
        if self.rehearsal.is_due:
            return True
        step, is_due = self.progress.global_step, self.plan.evaluates(self.progress.global_step)
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
        """Whether a checkpoint is due: by the plan, or because of a signal."""
        return self.accelerator.sync_gradients and (
            self.agreement.stopping or self.plan.saves(self.progress.global_step)
        )

    def save(self) -> None:
        """Save a checkpoint: copies the state now, and writes it in the background."""
        step = self.progress.global_step
        DISPLAY.doing = "saving, then stopping" if self.agreement.stopping else "saving"
        with self.meters.stopwatch.stopped():
            # An update that was not finite would only end the run again, once it is resumed.
            self.guard.check(step)
            self.insist_on_equal_weights()
            self.checkpoints.save(step, self.parts.collect(), self.identity())
        DISPLAY.doing = ""

    def insist_on_equal_weights(self) -> None:
        """Raise a `TrainingError` where ranks have other weights than each other."""
        insist_on_equal_weights(self.accelerator, networks_of(self.parts.shared))

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint and the run that goes on from it must share, and are told by."""
        step, plan, told = self.progress.global_step, self.plan, self.facts["environment"]
        named = ("effective_batch_size", "world_size", "mixed_precision", "versions")
        return {
            "run_id": self.directory.run_id,
            "recipe": self.recipe,
            "model": self.description["name"],
            "objective": str(self.objective),
            "flags": self.fixed_flags(),
            "parts_described": self.parts.description,
            "global_step": step,
            "global_sample_index": step % plan.updates_per_epoch * plan.samples_per_update,
            "data": self.facts["data"] | {"class_names": self.data.class_names},
            **{name: told[name] for name in named},
        }

    def fixed_flags(self) -> dict[str, Any]:
        """Return the flags that a resume can't change, but for those that it resolves anew."""
        return {
            name: value
            for name, value in vars(self.config).items()
            if not role_of(type(self.config), name).free
            and name not in ("init_from", "mixed_precision")
        }

    def restore(self, asked: Path) -> dict[str, Any] | None:
        """Put the run back to its newest whole checkpoint; return random states for the end."""
        named = asked.name if asked.name.startswith("step-") else None
        manifest = restore_newest(self.checkpoints, named, self.parts, self.identity())
        if manifest is None:
            return None
        if manifest["lost_best"]:
            nothing = Best(self.objective, self.best.is_kept)
            self.best.load_state_dict(nothing.state_dict())
        self.best.insist_on(self.checkpoints.once, self.directory.path)
        before, now = len(manifest["ranks"]), self.accelerator.num_processes
        if not (same := before == now):
            kept = f"{self.config.gradient_accumulation_steps} batches accumulated"
            say(f"processes {now} instead of {before}: {kept}, the updates have the same samples")
        return self.random.state_dict() if same else None

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[nn.Module]:
        """Give the bare model in evaluation mode, with throughput's clock stopped.

        It is bare, because ranks may have different numbers of batches, and its buffers, such as
        batch norm's statistics, are averaged first. Random generators start from the run's seed and
        the rank, and are left as they were. A request to stop cuts it short without a trace, for
        the resumption to make it again.
        """
        step, bare_model = self.progress.global_step, self.accelerator.unwrap_model(model)
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
        self.evaluated, self.evaluated_step, DISPLAY.doing = bare_model, step, ""

    @contextmanager
    def rehearsing(self, bare_model: nn.Module) -> Iterator[None]:
        """Let an evaluation read one batch, and undo what it did to the model."""
        put_buffers_back = keep_buffers(bare_model)
        self.rehearsal.enter()
        with self.meters.stopwatch.stopped():
            yield
        put_buffers_back()
        self.rehearsal.leave()
        DISPLAY.doing = ""

    def log(self, evaluation: Facts) -> None:
        """Log an evaluation that was due; if it is the best, write the model in the background."""
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
            none = f"no better {self.objective.metric} in {self.best.later} evaluations"
            say(f"stopped early, after update {self.progress.global_step}: {none}")

    def position(self) -> dict[str, float]:
        seconds = self.meters.stopwatch.total.seconds
        return self.plan.position(self.progress.global_step) | {"time/train_seconds": seconds}

    # After the loop

    def load_best(self, model: nn.Module) -> None:
        """Give `model`, which was evaluated, the weights that it had when it was the best.

        They are the last where there was no evaluation on validation data, or `--keep last`.
        """
        self.kept_step = step = self.progress.global_step
        if not self.best.is_kept or self.best.step in (-1, step):
            return
        self.save()  # what a resume goes on with, where the run was left before its plan's end
        self.checkpoints.wait()
        self.agreement.check(step)  # all ranks wait for the one that writes
        self.kept_step = self.best.step
        path, weights = self.checkpoints.read_best(self.kept_step)
        export.put_weights(self.accelerator.unwrap_model(model), weights, path)

    def finish(self, evaluation: Facts) -> None:
        """Export the model evaluated last, show the summary; a TrainingError: `--target` missed."""
        config, directory, step = self.config, self.directory, self.progress.global_step
        trained, sharded = not config.evaluate_only, self.accelerator.mesh is not None
        stopwatch, split = self.meters.stopwatch, self.test_split
        stopwatch.stop()
        self.directory.insist_on_own()
        self.checkpoints.wait()
        self.agreement.check(step)
        if stopwatch.total.updates > stopwatch.marked.updates:  # the loop was left before its end
            self.log_training()
        if trained:
            self.insist_on_equal_weights()
        kept = step if self.kept_step is None else self.kept_step
        final = self.logs.evaluation(evaluation, split, self.best, self.plan.position(kept))
        DISPLAY.doing = "finishing"
        self.logs.flush()
        memory = self.memory_plan.finish() if trained else []
        summary = {**self.logs.latest, **final, **(self.meters.whole_run() if trained else {})}
        summary |= {"perf/goodput": self.meters.goodput(), "progress/kept_step": kept}
        if self.best.value is not None:
            summary[self.objective.best_key] = self.best.value
        if config.compile:
            summary["time/compile_seconds"] = compile_seconds()
        summary["time/train_seconds"] = stopwatch.total.seconds
        summary["time/total_seconds"] = self.progress.seconds
        end_collectives(self.accelerator)  # no rank waits while rank 0 writes a whole model
        if trained and (sharded or self.accelerator.is_main_process):
            bare = self.accelerator.bare(self.evaluated)
            described = {"recipe": self.recipe, "class": type(bare).__name__, "update": kept}
            described["run_id"] = self.directory.run_id
            described |= self.description
            card = model_card(config, self.facts, described, self.data, split, summary)
            written = directory.path / "model", self.evaluated, described, card
            export.save_model(*written, bare if sharded else None)
        if sharded:
            end_collectives(self.accelerator)
        directory.write("summary.json", summary)
        if memory:
            named = {p: {"planned_mib": plan, "measured_mib": taken} for p, plan, taken in memory}
            directory.write("memory.json", named)
        prefix, loader = PREFIXES[split], self.all_loaders[split]
        self.logs.attach(media.results, evaluation, prefix, loader, self.data, memory)
        if trained and config.log_model:
            self.logs.attach(media.artifact, directory.path / "model", "model")
        commands = self.logs.finish(summary)
        report.show_summary(self.facts, summary, split, directory.path, commands, memory)
        if sentence := self.meters.idle_sentence():
            say(sentence)
        self.objective.require(final[f"{prefix}/{self.objective.metric}"], config.target)
        directory.write_status("finished", step)

    def __enter__(self) -> Self:
        try:
            self.agreement.request.obey_at_once(True)  # while data are prepared
        except Preempted as error:
            self.__exit__(Preempted, error, None)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Say in `status.json` and to the tracker how the run ended; leave the process group."""
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
            if self.agreement.request.reason is None:  # no launcher says that rank 0 has ended
                error.speak()
        together = error is None or isinstance(error, (UserError, Preempted))
        if torch.distributed.is_initialized() and together:
            torch.distributed.destroy_process_group()
        self.directory.release()
        if self.is_called_by_a_program:
            self.agreement.request.release()
            lift_limit()
            forget_accelerator()

    def close_after(self, error: BaseException) -> None:
        """Keep what an unfinished run has logged; raise advice in place of out-of-memory errors."""
        lift_limit()
        kill_workers()
        step = self.progress.global_step or read_status(self.directory.path).get("global_step", 0)
        outcome = outcome_of(error, self.accelerator.process_index)
        if isinstance(error, Preempted):
            say(error.message)
            if "SIGINT" in error.message:
                say(OF_THE_LAUNCHER)
            self.logs.finish()
            self.directory.write_status(outcome.status, step, outcome.reason)
            return
        if not isinstance(error, UserError):
            self.checkpoints.hurry()
        first = self.directory.write_failure(outcome, step, is_loss(error))
        now = read_status(self.directory.path)
        is_lost_again = first and outcome.resumable and now.get("resumable") is False
        tell(f"{outcome.status}: {outcome.reason}")
        self.logs.finish(exit_code=1)
        self.directory.remove_if_unused()
        if is_lost_again:
            raise TrainingError(str(now["reason"]), every_rank=True) from None
        if outcome.resumable and not first and not isinstance(error, UserError):
            raise SystemExit(1) from None  # another rank was lost, and says why
        if is_out_of_memory(error) and first:
            loaders = self.all_loaders.values()
            advice = out_of_memory_advice(self.config, self.directory.path, self.device, loaders)
            raise TrainingError(advice, every_rank=True) from None
