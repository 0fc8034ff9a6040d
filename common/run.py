"""One training run: wires its parts, and does what happens around the recipe's loop."""

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from accelerate.utils import set_seed
from torch import nn

from common.checkpoints import export
from common.checkpoints.kinds import RandomState
from common.checkpoints.state import Parts, restore_newest
from common.checkpoints.store import Checkpoints, step_folders
from common.config import TrainingConfig
from common.console import DISPLAY, OF_THE_LAUNCHER, say, tell
from common.data.batch import Data, refuse_unread
from common.data.iterable import IterableSamples
from common.data.loader import Loader, kill_workers, make_loaders
from common.directory import RunDirectory, read_status, refuse_to_resume
from common.errors import (
    Preempted,
    TrainingError,
    UserError,
    is_out_of_memory,
    let_main_rank_exit_first,
    outcome_of,
)
from common.files import read_json
from common.measure.flops import ComputeLoss
from common.measure.memory import MEBIBYTE, lift_limit, memory_used
from common.measure.memory_plan import MemoryPlan
from common.measure.meters import Meters
from common.models.compile import as_written, compile_seconds
from common.objective import PREFIXES, Best, Objective
from common.profile.profiler import Profiler
from common.track import facts, media, report
from common.track.card import flags_given, model_card
from common.track.log import Log
from common.training.accelerator import (
    average_buffers,
    build_accelerator,
    compute_dtype,
    running_precision,
)
from common.training.batch_size import fit_batch_size, out_of_memory_advice
from common.training.guard import GradientGuard
from common.training.optim import start_momentum
from common.training.plan import Plan, Progress
from common.training.stop import Agreement, end_collectives


class Run:
    """Carries a recipe's loop: counts, times, logs and saves; the loop itself is the recipe's.

    Use it as a context manager: however the run ends, `status.json` says how.
    """

    def __init__(self, config: TrainingConfig, recipe_file: str, objective: str) -> None:
        """Build the Accelerator, and take the run's directory.

        `objective` is a metric of the evaluation, and whether more or less of it is better, as in
        ``"accuracy:max"``.
        """
        DISPLAY.begin("starting")
        self.config, self.given = config, dict(vars(config))
        self.recipe, self.progress = Path(recipe_file).stem, Progress()
        try:
            self.objective = Objective.parse(objective)
            self.accelerator = accelerator = build_accelerator(config)
            self.directory = RunDirectory(
                *(config.output_dir, self.recipe, config.resume is not None),
                patience=config.collective_timeout / 2,
            )
        except UserError as error:
            refuse_to_resume(config.output_dir, outcome_of(error), config.resume is not None)
            raise
        self.device, self.compute_dtype = accelerator.device, compute_dtype(accelerator)
        self.precision = running_precision(accelerator)
        path, rank = self.directory.path, accelerator.process_index
        folder, ranks = path / "checkpoints", accelerator.num_processes
        self.checkpoints = Checkpoints(
            *(folder, rank, ranks, config.keep_checkpoints, config.collective_timeout),
            device=self.device,
        )
        self.agreement = Agreement(
            accelerator, path, lambda: self.checkpoints.failure, not config.evaluate_only
        )
        self.parts = Parts(rank, accelerator.mesh)
        self.random = RandomState(self.device)
        self.guard = GradientGuard(accelerator, config.max_grad_norm, config.log_gradients)
        self.meters = Meters(accelerator, config.gradient_accumulation_steps)
        self.logs = Log(accelerator, path, self.objective)
        self.all_loaders: dict[str, Loader] = {}  # by split
        self.facts: dict[str, Any] = {}  # what `config.json` holds
        self.evaluated: nn.Module | None = None  # the model of the last evaluation
        self.evaluated_step = -1
        self.kept_step: int | None = None  # of the model that is kept, once that is settled
        self.best = Best(self.objective)
        DISPLAY.doing = "reading the data"

    # Before the loop

    def loaders(self, data: Data) -> tuple[Loader, Loader, Loader]:
        """Return the loaders for training, evaluation during it, and the final evaluation.

        The second reads the validation split, the third the test split; each stands in for the
        other where there is only one.
        """
        refuse_unread(self.config, data)
        self.data: Any = data
        names = [name for name in PREFIXES if name in data.splits]
        self.validation_split, self.test_split = names[0], names[-1]
        if self.config.early_stopping and self.validation_split != "validation":
            advice = "hold some out, as with --validation-share 0.1"
            raise UserError(f"--early-stopping would choose by test data, the only ones: {advice}")
        self.all_loaders = loaders = make_loaders(self.config, self.accelerator, data.splits)
        if not self.config.evaluate_only:
            for loader in loaders.values():
                loader.is_cut_short = self.agreement.is_announced
        return loaders["train"], loaders[self.validation_split], loaders[self.test_split]

    def make_plan(self, train_loader: Loader, default_epochs: Mapping[str, int]) -> None:
        """Settle how long the run is, by default in epochs by name of the data set or "other"."""
        self.plan = Plan(self.config, train_loader.order, self.data.name, default_epochs)
        DISPLAY.doing = "building the model"

    def keep(self, *, model: nn.Module, optimizer: Any, scheduler: Any, **others: Any) -> None:
        """Name what a checkpoint holds.

        Others are whatever has ``state_dict`` and ``load_state_dict``: a second network, its
        optimizer, an average of the weights. Each is put back under its name.

        Raises:
            UserError: when what the Accelerator has prepared is left out, and would begin anew.
        """
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.unwrapped = self.accelerator.unwrap_model(model)
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **others}
        for name, part in named.items():
            start_momentum(getattr(part, "optimizer", part))
            self.parts.add(name, part)
        bare = {id(getattr(part, "module", part)) for part in named.values()}
        prepared: Any = self.accelerator
        for part in (*prepared._models, *prepared._optimizers, *prepared._schedulers):
            if id(getattr(part, "module", part)) not in bare:
                kind = type(getattr(part, "module", getattr(part, "optimizer", part))).__name__
                raise UserError(
                    f"{self.recipe} prepares another {kind} than run.keep(...) names: name it "
                    "there, or a run that is resumed begins it anew"
                )

    def start(
        self, description: Mapping[str, Any], compute_loss: ComputeLoss | None = None
    ) -> None:
        """Go on from a checkpoint if asked to, then open the logs and show what will run.

        The description is of the model: its ``name``, and what else is needed to use it again.
        Without `compute_loss`, it is not counted what a sample costs.
        """
        config, accelerator, self.description = self.config, self.accelerator, description
        self.agreement.request.obey_at_once(False)
        model = self.unwrapped
        if compute_loss is not None and not config.evaluate_only:
            if config.auto_batch_size:
                self.fit_batch_size(compute_loss)
            samples = self.data.splits["train"]
            bare = accelerator.bare(model)
            self.meters.find_flops(bare, compute_loss, samples, self.compute_dtype)
        if config.init_from is not None:
            export.load_initial(model, config, self.directory.path, self.data.class_names)
        train_loader = self.all_loaders["train"]
        self.memory_plan = MemoryPlan(accelerator, self.model, self.optimizer, train_loader)
        folder, stopwatch = self.directory.path / "profile", self.meters.stopwatch
        self.profiler = Profiler(
            config, folder, accelerator, stopwatch, self.plan, self.logs.attach
        )
        parameters = sum(p.numel() for p in model.parameters())
        scaler = {} if accelerator.scaler is None else {"scaler": accelerator.scaler}
        named = {"progress": self.progress, "log": self.logs, "best": self.best, **scaler}
        for name, part in named.items():
            self.parts.add(name, part)
        if isinstance(samples := self.data.splits["train"], IterableSamples):
            self.parts.add("samples", samples, shared=False)
        for name in ("meters", "guard", "random"):
            self.parts.add(name, getattr(self, name), shared=False)
        self.facts = {
            "recipe": self.recipe,
            "objective": str(self.objective),
            "config": facts.resolved(config, self.data),
            "given": self.given,
            # Chosen before anything is tracked: a run that is killed at once keeps it all the same.
            "wandb_run_id": secrets.token_hex(4),
            "environment": facts.environment(
                accelerator, config, self.precision, train_loader.placement
            ),
            "data": self.data.facts(),
            "architecture": {"name": description["name"], "parameters": parameters},
            "plan": self.plan.facts(),
            "memory_plan": self.memory_plan.facts(),
            # What `perf/mfu` is a share of, for each device.
            "peak": {"tflops": self.meters.peak, "source": self.meters.peak_source},
        }
        random = self.restore(Path(config.resume)) if config.resume is not None else None
        flags = flags_given(config, self.facts["given"], all_of_them=True)
        self.facts["command"] = f"{self.recipe}.py {flags}"
        step = self.progress.global_step
        if read_status(self.directory.path).get("status") == "running":  # on the other ranks too
            self.directory.write_status("running", step)
        self.directory.write("config.json", self.facts)
        self.logs.start(config, self.facts, self.position)
        # As the last thing before the loop: whatever came before may have drawn.
        set_seed((config.seed + step + accelerator.process_index) % 2**32)
        if random is not None:
            self.random.load_state_dict(random)

    def fit_batch_size(self, compute_loss: ComputeLoss) -> None:
        config, loader = self.config, self.all_loaders["train"]
        size = fit_batch_size(
            self.unwrapped, self.optimizer, loader, compute_loss, config, self.accelerator.gather
        )
        if size != config.batch_size:
            accumulation = config.batch_size * config.gradient_accumulation_steps // size
            why = "does not fit" if size < config.batch_size else "is slower"
            say(f"batch {config.batch_size} {why}: {size} × {accumulation} accumulated")
            config.batch_size, config.gradient_accumulation_steps = size, accumulation
            self.accelerator.gradient_accumulation_steps = accumulation
            for loader in self.all_loaders.values():
                loader.cut_into(size, accumulation)
            self.meters = Meters(self.accelerator, accumulation)

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
                with self.memory_plan.watching(work):
                    yield batch
                if self.agreement.stopping:
                    self.leave()
        self.meters.stopwatch.stop()

    def leave(self) -> None:
        self.meters.stopwatch.stop()
        self.checkpoints.wait()
        self.agreement.stop(self.progress.global_step)

    def clip_grad_norm_(self, model: nn.Module, optimizer: Any) -> None:
        """Clip the gradients' global norm, and see that non-finite ones are not applied."""
        self.guard.clip(model, optimizer)

    def record(self, loss: torch.Tensor, metrics: Mapping[str, torch.Tensor] | None = None) -> None:
        """Take note of a micro-batch's mean loss; log when an interval is over.

        Of each metric, a tensor of any shape, the mean over all elements, of all micro-batches and
        ranks, is logged under ``train/``. There is no other synchronisation.
        """
        is_update = self.accelerator.sync_gradients
        self.meters.count(loss, metrics, *self.counted, is_update)
        if is_update:
            self.logs.flush()
            self.progress.global_step = step = self.progress.global_step + 1
            if self.plan.logs(step):
                self.log_training()
            if self.guard.is_due:
                self.guard.check(step)
            if step % self.agreement.every == 0:
                self.agreement.check(step)
            self.profiler.step()

    def log_training(self) -> None:
        values = self.meters.interval()
        self.guard.check(self.progress.global_step, values.get("train/loss", 0.0))
        rate = self.optimizer.param_groups[0]["lr"]
        self.logs.interval({**values, **self.guard.figures(), "train/learning_rate": rate})

    @property
    def should_evaluate(self) -> bool:
        """Whether an evaluation of the present step is due, and was not made yet.

        The last model is evaluated, too, if it may not be the best. Otherwise the final evaluation
        stands for it, if it reads the same split.
        """
        step = self.progress.global_step
        is_due = self.plan.evaluates(step)
        if self.plan.ends(step):
            is_compared = self.config.keep == "best" and self.best.value is not None
            is_due = is_compared or (is_due and self.validation_split != self.test_split)
        return is_due and self.evaluated_step != step and not self.config.evaluate_only

    @property
    def should_stop(self) -> bool:
        """Whether `--early-stopping` ends the run here."""
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
            self.checkpoints.save(step, self.parts.collect(), self.identity())
        DISPLAY.doing = ""

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint and the run that goes on from it must share, and are told by."""
        step = self.progress.global_step
        return {
            "recipe": self.recipe,
            "model": self.description["name"],
            "global_step": step,
            "global_sample_index": self.plan.sample_in_epoch(step),
            "effective_batch_size": self.plan.samples_per_update,
            "world_size": self.accelerator.num_processes,
            "mixed_precision": self.precision,
            "data": self.facts["data"] | {"class_names": self.data.class_names},
            "versions": self.facts["environment"]["versions"],
        }

    def restore(self, asked: Path) -> dict[str, Any] | None:
        """Put the run back to its newest whole checkpoint, if there is one.

        What is returned is the state of the random generators, to be put back last.
        """
        saved = read_json(self.directory.path / "config.json")
        self.facts["given"] = {n: v for n, v in saved["given"].items() if n in self.given}
        self.facts["wandb_run_id"] = saved.get("wandb_run_id", self.facts["wandb_run_id"])
        named = asked.name if asked.name.startswith("step-") else None
        manifest = restore_newest(self.checkpoints, named, self.parts, self.identity())
        if manifest is None:
            return None
        best = f"best-{self.best.step:08d}"
        is_held = any(name.startswith(best) for name in self.checkpoints.once)
        if self.config.keep == "best" and self.best.step != -1 and not is_held:
            raise UserError(f"{self.directory.path} is damaged: its checkpoint names no {best}")
        before, now = len(manifest["ranks"]), self.accelerator.num_processes
        if not (same := before == now):
            kept = f"{self.config.gradient_accumulation_steps} batches accumulated"
            say(f"processes {now} instead of {before}: {kept}, the updates have the same samples")
        return self.random.state_dict() if same else None

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[nn.Module]:
        """Give the bare model in evaluation mode, with throughput's clock stopped.

        It is bare, because ranks may have different numbers of batches, and its buffers, such as
        batch norm's statistics, are averaged first. Random generators are left as they were. A
        request to stop cuts it short without a trace, for the resumption to make it again.
        """
        step, bare_model = self.progress.global_step, self.accelerator.unwrap_model(model)
        DISPLAY.doing = "evaluating"
        with self.meters.stopwatch.stopped():
            random, training = self.random.state_dict(), bare_model.training
            undo = average_buffers(self.accelerator, bare_model)
            bare_model.eval()
            # What FSDP2 keeps of a forward pass, the next one must be able to train with.
            sharded = self.accelerator.mesh is not None
            with torch.no_grad() if sharded else torch.inference_mode(), as_written(bare_model):
                yield bare_model
            bare_model.train(training)
            self.random.load_state_dict(random)
            if not self.config.evaluate_only:
                self.agreement.check(step)
            if self.agreement.stopping:
                undo()
                self.save()
                self.leave()
        self.evaluated, self.evaluated_step, DISPLAY.doing = bare_model, step, ""

    def log(self, evaluation: Mapping[str, Any]) -> None:
        """Log an evaluation on the split that `should_evaluate` is about, and keep the best model.

        It is written at once, in the background, for the checkpoints from now on to name.
        """
        self.logs.evaluation(evaluation, self.validation_split, self.best)
        if self.best.step == self.progress.global_step and self.config.keep == "best":
            with self.meters.stopwatch.stopped():
                weights = export.weights_of(self.evaluated or self.unwrapped)
                self.checkpoints.save_best(self.best.step, weights)
        if self.should_stop:
            none = f"no better {self.objective.metric} in {self.best.later} evaluations"
            say(f"stopped early, after update {self.progress.global_step}: {none}")

    def position(self) -> dict[str, float]:
        seconds = self.meters.stopwatch.train_seconds
        return self.plan.position(self.progress.global_step) | {"time/train_seconds": seconds}

    # After the loop

    def load_best(self, model: nn.Module) -> None:
        """Give `model`, which was evaluated, the weights that it had when it was the best.

        They are the last where there was no evaluation on validation data, or `--keep last`.
        """
        self.kept_step = step = self.progress.global_step
        if self.config.keep == "last" or self.best.step in (-1, step):
            return
        self.save()  # what a resume goes on with, where the run was left before its plan's end
        self.checkpoints.wait()
        self.agreement.check(step)  # all ranks wait for the one that writes
        self.kept_step = self.best.step
        path, weights = self.checkpoints.read_best(self.kept_step)
        export.put_weights(self.accelerator.unwrap_model(model), weights, path)

    def finish(self, evaluation: Mapping[str, Any]) -> None:
        """Export the model that was evaluated last, write and show the summary, check the target.

        Raises:
            TrainingError: when the objective's value is worse than `--target`.
        """
        config, directory, stopwatch = self.config, self.directory, self.meters.stopwatch
        step, trained = self.progress.global_step, not config.evaluate_only
        stopwatch.stop()
        self.checkpoints.wait()
        self.agreement.check(step)
        if stopwatch.total.updates > stopwatch.marked.updates:  # the loop was left before its end
            self.log_training()
        kept = step if self.kept_step is None else self.kept_step
        at = self.plan.position(kept)
        final = self.logs.evaluation(evaluation, self.test_split, self.best, at)
        DISPLAY.doing = "finishing"
        self.logs.flush()
        memory = self.memory_plan.finish() if trained else []
        summary = self.summarize(final) | {"progress/kept_step": kept}
        model, sharded = self.evaluated or self.unwrapped, self.accelerator.mesh is not None

        def save_model() -> None:
            bare = self.accelerator.bare(model)
            described = {"recipe": self.recipe, "class": type(bare).__name__, "update": kept}
            described |= self.description
            card = model_card(config, self.facts, described, self.data, self.test_split, summary)
            written = directory.path / "model", model, described, card
            export.save_model(*written, bare if sharded else None)

        if trained and sharded:
            save_model()
        end_collectives(self.accelerator)
        if trained and not sharded and self.accelerator.is_main_process:
            save_model()
        directory.write("summary.json", summary)
        if memory:
            named = {p: {"planned_mib": plan, "measured_mib": taken} for p, plan, taken in memory}
            directory.write("memory.json", named)
        prefix, loader = PREFIXES[self.test_split], self.all_loaders[self.test_split]
        self.logs.attach(media.results, evaluation, prefix, loader, self.data, memory)
        if trained and config.log_model:
            self.logs.attach(media.artifact, directory.path / "model", "model")
        commands = self.logs.finish(summary)
        report.show_summary(self.facts, summary, self.test_split, directory.path, commands, memory)
        if sentence := self.meters.idle_sentence():
            say(sentence)
        metric, target = self.objective.metric, config.target
        value = final[f"{prefix}/{metric}"]
        if target is not None and not self.objective.reaches(value, target):
            raise TrainingError(f"the final {metric} {value:.4f} is worse than --target {target}")
        directory.write_status("finished", step)

    def summarize(self, final: Mapping[str, float]) -> dict[str, Any]:
        summary = {**self.logs.latest, **final}
        if not self.config.evaluate_only:
            summary |= self.meters.whole_run()
        if self.best.value is not None:
            summary[self.objective.best_key] = self.best.value
        if self.config.compile:
            summary["time/compile_seconds"] = compile_seconds()
        return summary | {
            "perf/goodput": self.meters.goodput(),
            "time/train_seconds": self.meters.stopwatch.train_seconds,
            "time/total_seconds": self.progress.seconds,
        }

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

    def close_after(self, error: BaseException) -> None:
        """Keep what an unfinished run has logged, and write its status.

        Raises:
            TrainingError: in place of an out-of-memory error, with the command that needs less.
        """
        lift_limit()
        kill_workers()
        step = self.progress.global_step or read_status(self.directory.path).get("global_step", 0)
        outcome = outcome_of(error, self.accelerator.process_index)
        if isinstance(error, Preempted):
            say(error.message)
            if "SIGINT" in error.message:
                say(OF_THE_LAUNCHER)
            self.logs.flush()
            self.logs.finish(self.logs.latest)
            self.directory.write_status(outcome.status, step, outcome.reason)
            return
        if not isinstance(error, UserError):
            self.checkpoints.hurry()
        first = self.directory.write_failure(outcome, step)
        tell(f"{outcome.status}: {outcome.reason}")
        with contextlib.suppress(TrainingError):  # the disk may be full
            self.logs.flush()
        self.logs.finish(self.logs.latest, exit_code=1)
        self.directory.remove_if_unused()
        if outcome.resumable and not first and not isinstance(error, UserError):
            raise SystemExit(1) from None  # another rank was lost, and says why
        if is_out_of_memory(error) and first:
            resume = (
                str(self.directory.path) if any(step_folders(self.checkpoints.folder)) else None
            )
            peak = report.peak_memory(memory_used(self.device))
            # On a CPU they are mapped from a file, or in its memory anyway.
            on_gpu = self.all_loaders.values() if self.device.type == "cuda" else ()
            data = sum(loader.placed_bytes for loader in on_gpu) / MEBIBYTE
            advice = out_of_memory_advice(self.config, resume, peak, data)
            raise TrainingError(advice, every_rank=True) from None
