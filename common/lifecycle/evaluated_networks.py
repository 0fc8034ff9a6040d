"""Which network a recipe evaluated, saved as the best, and exports, if it evaluates several."""

from weakref import WeakSet, ref

from accelerate import Accelerator
from torch import nn
from torch.optim.swa_utils import AveragedModel

from common.lifecycle.misuse import (
    other_best_model_error,
    other_exported_model_error,
    say_which_is_saved_as_best,
)


def network_to_evaluate(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return a network without Accelerate's wrapper, and without an `AveragedModel` around it.

    The exported weights then have the names of the model that is trained, which `--init-from` and
    `recipes predict` need. An `AveragedModel` with a forward pass of its own stays.
    """
    bare_model: nn.Module = accelerator.unwrap_model(model)
    is_plain_average = isinstance(bare_model, AveragedModel) and (
        type(bare_model).forward is AveragedModel.forward
    )
    if is_plain_average:
        bare_model = accelerator.unwrap_model(bare_model.module)
    return bare_model


class EvaluatedNetworks:
    """The bare networks that a recipe has evaluated, such as raw weights and their average.

    References to earlier networks are weak, because a recipe may make a new copy for each
    evaluation.
    """

    def __init__(self) -> None:
        self.last: nn.Module | None = None  # evaluated last, which the run exports
        self.evaluated: WeakSet[nn.Module] = WeakSet()  # those of rehearsals, too
        self.rehearsed: set[nn.Module] = set()  # since the last call of `run.log`
        self.saved_as_best: ref[nn.Module] | None = None
        self.given_to_load_best: nn.Module | None = None
        self.evaluated_before_load_best: WeakSet[nn.Module] = WeakSet()

    def note_evaluated(self, network: nn.Module) -> None:
        """Note a network whose evaluation begins."""
        self.evaluated.add(network)

    def note_rehearsed(self, network: nn.Module) -> None:
        """Note a network whose rehearsal begins."""
        self.rehearsed.add(network)

    def end_rehearsal(self) -> None:
        """Tell the user which network is saved as the best, if the recipe rehearsed several."""
        say_which_is_saved_as_best(len(self.rehearsed))
        self.rehearsed.clear()

    def note_saved_as_best(self, network: nn.Module) -> None:
        """Note the network whose weights were saved as the best."""
        self.saved_as_best = ref(network)

    def note_given_to_load_best(self, network: nn.Module) -> None:
        """Note the network that `run.load_best` got.

        Raises:
            UserError: the recipe evaluated this network, but saved another one as the best. After
                a resume, this goes unnoticed until the recipe has evaluated again.
        """
        is_other_one = self.saved_as_best is not None and network is not self.saved_as_best()
        if is_other_one and network in self.evaluated:
            raise other_best_model_error()
        self.given_to_load_best = network
        self.evaluated_before_load_best = WeakSet(self.evaluated)

    def require_best_last(self) -> None:
        """Raise a `UserError` if the network to export is not the one that `load_best` got.

        The figures and the update in `model.json` would be those of another network. A network that
        is evaluated for the first time now was made of the best one, for example by merging
        adapters into it.
        """
        if self.last is None or self.given_to_load_best is None:
            return
        if self.last is self.given_to_load_best:
            return
        if self.last in self.evaluated_before_load_best:
            raise other_exported_model_error()
