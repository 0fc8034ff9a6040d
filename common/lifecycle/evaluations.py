"""Evaluations of a run: decides when one is due, prepares the model, and logs the figures."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from common.checkpoints import model_weights
from common.checkpoints.adapters import State
from common.checkpoints.initial_copies import refusing_replaced_weights
from common.console import warn
from common.console.display import DISPLAY
from common.lifecycle.evaluated_networks import EvaluatedNetworks, network_to_evaluate
from common.lifecycle.evaluation_figures import checked_figures, refuse_evident_mistakes
from common.lifecycle.misuse import nan_warning, refuse_rehearsed_steps
from common.lifecycle.saving import compare_weights_of_ranks
from common.lifecycle.stages import Context, KeptParts, LoadedData
from common.measure.value_checks import Metrics
from common.objective import PREFIXES, Split
from common.training.evaluation.mode import evaluation_mode, keep_buffers
from common.training.evaluation.rehearsal import Rehearsal
from common.training.plan import Plan


class Evaluations:
    """The evaluations of one run, and the model that is exported at its end."""

    def __init__(self, context: Context, rehearse: bool) -> None:
        """Begin with no evaluation made.

        Args:
            rehearse: whether to try the evaluation on a few samples before the first update, so
                that a mistake in it ends the run there. With `--evaluate-only`, there is no
                rehearsal.
        """
        self.context = context
        self.rehearsal = Rehearsal(is_wanted=rehearse and not context.config.evaluate_only)
        self.is_evaluating = False  # whether a block of `evaluating` runs now
        self.has_warned_of_nan = False  # whether a warning told of an objective that is NaN
        self.states_before_rehearsal: State | None = None  # of the random generators
        self.networks = EvaluatedNetworks()
        self.evaluated_step: int | None = None  # the update after which a network was evaluated
        self.exported_step: int | None = None  # the update of the model to export, once it is known
        # The model's weights that `--init-from` replaced, as `checksums_of_matrices` returns them.
        self.replaced_weights: frozenset[int] = frozenset()

    def is_due(self, plan: Plan, loaded: LoadedData) -> bool:
        """Whether an evaluation, or the rehearsal, is due and has not been made yet."""
        return self.rehearsal.is_due or self.is_real_one_due(plan, loaded)

    def is_real_one_due(self, plan: Plan, loaded: LoadedData) -> bool:
        """Whether an evaluation that is no rehearsal is due and has not been made yet.

        After the last update, the final evaluation usually makes another one unnecessary. One is
        still due in two cases:

        - The last model has to be compared with an earlier best one.
        - An evaluation is due by the interval, and the final evaluation reads another split.
        """
        step = self.context.progress.global_step
        if self.evaluated_step == step:
            return False
        is_planned = plan.evaluates(step)
        if not plan.ends(step):
            return is_planned
        best = self.context.best
        has_earlier_best = best.is_kept and best.value is not None
        final_reads_another_split = loaded.validation_split != loaded.test_split
        return has_earlier_best or (is_planned and final_reads_another_split)

    def keep_states_before_rehearsal(self) -> None:
        """Keep the states of the random generators if the rehearsal is due; `log` restores them.

        Before the first backward pass, the recipe's plateau schedulers must not have made a step.

        `run.should_evaluate` calls this. `evaluating` would be too late, because a recipe may draw
        or seed before it calls that.
        """
        if self.rehearsal.is_due:
            self.states_before_rehearsal = self.context.random.state_dict()
            steps = {part: part.last_epoch for part in self.plateaus()}
            self.context.accelerator.before_backward = lambda: refuse_rehearsed_steps(steps)

    def plateaus(self) -> list[ReduceLROnPlateau]:
        """Return the kept schedulers that make a step for each evaluation."""
        parts = self.context.parts.shared.values()
        return [part for part in parts if isinstance(part, ReduceLROnPlateau)]

    @contextmanager
    def evaluating(
        self, model: nn.Module, save_and_leave: Callable[[], None]
    ) -> Iterator[nn.Module]:
        """Yield the bare model in evaluation mode, and note that it was evaluated at this step.

        `is_real_one_due` and `model_to_export` need this note. A rehearsal is not noted. The time
        of the block does not count as training time.

        Args:
            save_and_leave: saves a checkpoint and ends this process. It is called after the block
                if a rank was asked to stop.

        Raises:
            UserError: with `--evaluate-only`, the network has weights from before `--init-from`.
        """
        context = self.context
        step = context.progress.global_step
        bare_model = network_to_evaluate(context.accelerator, model)
        self.networks.note_evaluated(bare_model)
        seed = context.config.seed
        mode = evaluation_mode(context.accelerator, bare_model, context.random, seed)
        if self.rehearsal.is_on:
            with self.noting_evaluation(), self.rehearsing(bare_model), mode:
                yield bare_model
            return
        with self.noting_evaluation(), context.meters.stopwatch.stopped():
            with self.checking_weights(bare_model), mode as restore_buffers:
                yield bare_model
            context.decisions.check(step)
            if context.decisions.stopping:
                # The ranks may not have read all data, so this evaluation does not count. The
                # resumed run repeats it.
                restore_buffers()
                save_and_leave()
        self.networks.last = bare_model
        self.evaluated_step = step

    def checking_weights(self, bare_model: nn.Module) -> AbstractContextManager[None]:
        """Return a context that refuses weights from before `--init-from`, with `--evaluate-only`.

        In training, updates have changed them.
        """
        if self.context.config.evaluate_only:
            return refusing_replaced_weights(bare_model, self.replaced_weights)
        return nullcontext()

    @contextmanager
    def noting_evaluation(self) -> Iterator[None]:
        """Show and note that the recipe evaluates while the block runs."""
        self.is_evaluating = True
        try:
            with DISPLAY.showing_activity("evaluating"):
                yield
        finally:
            self.is_evaluating = False

    @contextmanager
    def rehearsing(self, bare_model: nn.Module) -> Iterator[None]:
        """Let an evaluation read two batches at most, then restore the model's buffers."""
        self.networks.note_rehearsed(bare_model)
        restore_buffers = keep_buffers(bare_model)
        self.rehearsal.begin_evaluation()
        with self.context.meters.stopwatch.stopped():
            yield
        restore_buffers()
        self.rehearsal.end_evaluation()

    def model_to_export(self, kept: KeptParts) -> nn.Module:
        """Return the bare model that was evaluated last, such as an average of the weights.

        Without an evaluation, return the model that is trained.
        """
        return kept.bare_model if self.networks.last is None else self.networks.last

    def log(self, figures: Metrics, split: Split, kept: KeptParts) -> None:
        """Log an evaluation that was due. If it is the best one, save its model in the background.

        The figures of a rehearsal are only checked, and the random generators get the states that
        they had before it.

        Args:
            split: the split that was evaluated.
        """
        context = self.context
        logs = context.logs
        values = checked_figures(figures, context.objective, context.accelerator)
        if self.rehearsal.is_on:
            refuse_evident_mistakes(figures, self.rehearsal.batch_sizes, context.accelerator)
            self.networks.end_rehearsal()
            self.rehearsal.accept_figures()
            if self.states_before_rehearsal is not None:
                context.random.load_state_dict(self.states_before_rehearsal)
            return
        is_best = self.record_if_validation(values, split)
        logs.add_evaluation(values, split, is_best)
        if is_best and context.best.is_kept:
            with context.meters.stopwatch.stopped():
                compare_weights_of_ranks(context)
                best_model = self.model_to_export(kept)
                self.networks.note_saved_as_best(best_model)
                weights = model_weights.weights_of(best_model)
                context.checkpoints.save_best(context.progress.global_step, weights)

    def log_final(
        self, figures: Metrics, split: Split, model_position: Mapping[str, float]
    ) -> dict[str, float]:
        """Log the final evaluation, and return its figures by their full names.

        If it is on validation data, it is compared with the best evaluation.

        Args:
            model_position: the step, epoch and samples up to which the evaluated model was
                trained. They are earlier than the current ones if `load_best` loaded an earlier
                model.
        """
        context = self.context
        logs = context.logs
        values = checked_figures(figures, context.objective, context.accelerator)
        is_best = self.record_if_validation(values, split)
        logs.add_evaluation(values, split, is_best, model_position)
        return {f"{PREFIXES[split]}/{name}": value for name, value in values.items()}

    def record_if_validation(self, values: Mapping[str, float], split: Split) -> bool:
        """Record an evaluation of validation data; return whether its model is the best so far.

        Evaluations of test data are not recorded, because they must not select a model.
        """
        context = self.context
        if split != "validation":
            return False
        value = values[context.objective.metric]
        if math.isnan(value) and not self.has_warned_of_nan:
            self.has_warned_of_nan = True
            warn(nan_warning(context.objective.metric))
        return context.best.consider(value, context.progress.global_step, values.get("loss"))

    def load_best(self, model: nn.Module, save: Callable[[], None]) -> None:
        """Load the weights that `model` had at its best evaluation.

        Nothing is loaded with `--keep last`, if there was no validation, or if the last weights are
        the best. Afterwards, `exported_step` is the update of the weights that `model` has.

        Args:
            save: saves a checkpoint with the last weights, which a resume needs. With
                `--early-stopping`, the last update may have none yet.

        Raises:
            UserError: the recipe evaluated this network, but saved another one as the best. After
                a resume, this goes unnoticed until the recipe has evaluated again.
        """
        context = self.context
        step = context.progress.global_step
        best_step = context.best.step  # None: there was no evaluation on validation data
        self.exported_step = step
        if not context.best.is_kept or best_step is None:
            return
        bare_model = network_to_evaluate(context.accelerator, model)
        self.networks.note_given_to_load_best(bare_model)
        if best_step == step:
            return
        save()
        context.checkpoints.wait()
        # All ranks take part in `check`, so no rank goes on before all have written the best model.
        context.decisions.check(step)
        self.exported_step = best_step
        path, weights = context.checkpoints.read_best(best_step)
        model_weights.put_weights(bare_model, weights, path)
