"""The explanations of torch's errors about the values and the shapes of a batch."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau

from common.errors import UserError
from common.lifecycle.crossed_shapes import allow_crossed_shapes, refuse_crossed_shapes
from common.lifecycle.end.closing import add_notes
from common.lifecycle.tensor_errors import likely_cause_of
from common.training.evaluation.rehearsal import Rehearsal

SCORES = torch.zeros(8, 3)  # of 8 samples and 3 classes
FEATURES = torch.zeros(8, 5)


def integers(*values: int) -> torch.Tensor:
    """Return eight integers, which begin with these values."""
    return torch.tensor([*values, *[0] * (8 - len(values))])


LABEL = "a label is not one of the 3 classes of the loss, 0 to 2"
INDEX = "an index, such as a token or a label, is outside of what it selects from"
SHAPES = "the shapes or dtypes of the batch do not fit"
# Mistakes by name: a loss, the tensor of the batch that it does not suit, and words of the
# explanation.
MISTAKES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, str]] = {
    "label too large": (lambda x: F.cross_entropy(SCORES, x), integers(3), LABEL),
    "label below 0": (lambda x: F.cross_entropy(SCORES, x), integers(2, -1), LABEL),
    "label of nll": (lambda x: F.nll_loss(SCORES, x), integers(7), LABEL),
    "label in a module": (lambda x: nn.CrossEntropyLoss()(SCORES, x), integers(3), LABEL),
    "token": (lambda x: nn.Embedding(5, 1)(x).mean(), integers(9), INDEX),
    "one_hot": (lambda x: F.one_hot(x, 3).float().mean(), integers(3), INDEX),
    "gather": (lambda x: SCORES.gather(1, x[:, None]).mean(), integers(3), INDEX),
    "indexing": (lambda x: SCORES[:, x].mean(), integers(3), INDEX),
    "layer": (lambda x: nn.Linear(2, 3)(x).mean(), FEATURES, SHAPES),
    "dtype": (lambda x: nn.Linear(5, 3)(x).mean(), FEATURES.long(), SHAPES),
    "channels": (lambda x: nn.Conv1d(3, 3, 1)(x).mean(), FEATURES[:, None], SHAPES),
    "batch norm": (lambda x: nn.BatchNorm1d(4)(x).mean(), FEATURES, SHAPES),
    "layer norm": (lambda x: nn.LayerNorm(4)(x).mean(), FEATURES, SHAPES),
    "recurrent": (lambda x: nn.GRU(4, 4)(x)[0].mean(), FEATURES, SHAPES),
    "operator": (lambda x: (x @ FEATURES).mean(), FEATURES, SHAPES),
    "addition": (lambda x: (x + SCORES).mean(), FEATURES, SHAPES),
    "view": (lambda x: x.view(8, 6).mean(), FEATURES, SHAPES),
    "target size": (lambda x: F.cross_entropy(SCORES[None], x[None]), integers(1), SHAPES),
    "target dtype": (lambda x: F.cross_entropy(SCORES, x.float()), integers(1), SHAPES),
    "target of one column": (lambda x: F.cross_entropy(SCORES, x[:, None]), integers(1), SHAPES),
    "number of targets": (lambda x: F.cross_entropy(SCORES[:6], x), integers(1), SHAPES),
    "binary targets": (
        lambda x: F.binary_cross_entropy_with_logits(SCORES[:, :1], x),
        FEATURES[:, 0],
        SHAPES,
    ),
}


class OwnModel(nn.Module):
    """A network of the recipe, whose forward pass has no variable `batch`."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.function(values)


def raised_by(function: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011 (of any class)
        function()
    return raised.value


def error_in_loop(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Exception:
    """Return the error of a loop with a batch of these values."""
    model = OwnModel(function)

    def train() -> None:
        for batch in [{"values": values, "weights": torch.ones(8)}]:
            model(batch["values"])

    return raised_by(train)


@pytest.mark.parametrize("name", MISTAKES)
def test_error_about_a_batch_ends_with_its_likely_cause(name: str) -> None:
    """The traceback has the recipe's frames only, and then the values or shapes of the batch."""
    function, values, words = MISTAKES[name]
    error = error_in_loop(function, values)
    add_notes(error, Rehearsal(is_wanted=False))
    lines = "".join(traceback.format_exception(error)).splitlines()
    files = [line for line in lines if line.startswith("  File ")]
    assert files
    assert all(__file__ in line for line in files)
    assert lines[-1].startswith(f"Likely cause: {words}")
    if words == SHAPES:
        assert f"batch['values'] {str(values.dtype)[6:]} {[*values.shape]}" in lines[-1]
        assert "batch['weights'] float32 [8]" in lines[-1]
    else:
        lowest = int(values.min())
        highest = int(values.max())
        assert f"(batch['values'] from {lowest} to {highest})" in lines[-1]


@pytest.mark.parametrize("container", [list, tuple])
def test_batch_that_is_read_by_a_name_is_described(container: Any) -> None:
    """A data set that returns tuples makes such batches."""

    def train() -> None:
        for batch in [container([torch.ones(2, 3), torch.ones(2)])]:
            batch["images"].sum()  # type: ignore[call-overload]

    error = raised_by(train)
    add_notes(error, Rehearsal(is_wanted=False))
    (note,) = error.__notes__
    shapes = "batch[0] float32 [2, 3], batch[1] float32 [2]"
    assert note.startswith(
        f"Likely cause: the batch is a {container.__name__} of 2 values ({shapes})"
    )
    assert "return a dictionary from __getitem__" in note


@pytest.mark.usefixtures("own_accelerator")
@pytest.mark.parametrize("way", ["frozen", "detached", "no_grad"])
def test_loss_without_a_gradient_is_explained(way: str) -> None:
    """Torch names only an element of tensors."""
    model = nn.Linear(3, 1).requires_grad_(way != "frozen")

    def train() -> None:
        with torch.set_grad_enabled(way != "no_grad"):
            loss = model(torch.ones(2, 3)).mean()
        loss = loss.detach() if way == "detached" else loss
        Accelerator(cpu=True).backward(loss)

    assert "no parameter that is trained" in (likely_cause_of(raised_by(train)) or "")


@pytest.mark.parametrize(
    "mistake",
    [
        lambda model, there, here: there == here,
        lambda model, there, here: F.cross_entropy(there, here.argmax(1)),
        lambda model, there, here: model(there),
    ],
    ids=["operator", "loss", "network"],
)
def test_tensors_on_two_devices_are_explained(mistake: Any) -> None:
    """The meta device stands for a GPU. A loader's batches are on the device already."""
    model = nn.BatchNorm1d(3)
    here = torch.rand(2, 3)
    error = raised_by(lambda: mistake(model, here.to("meta"), here))
    assert "move the other tensors by .to(run.device)" in (likely_cause_of(error) or "")


@pytest.mark.parametrize(
    "text",
    [
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and",
        "indices should be either on cpu or on the same device as the indexed tensor (cuda:0)",
    ],
)
def test_texts_of_a_gpu_about_two_devices_are_explained(text: str) -> None:
    error = raised_by(lambda: fail(RuntimeError(text)))
    assert "move the other tensors by .to(run.device)" in (likely_cause_of(error) or "")


def test_step_of_a_plateau_without_a_metric_is_explained() -> None:
    """Such a scheduler needs a value of each evaluation."""
    parameters = nn.Linear(1, 1).parameters()
    step: Any = ReduceLROnPlateau(torch.optim.SGD(parameters, lr=0.1)).step

    def train() -> None:
        step()

    assert "call scheduler.step(figures[NAME])" in (likely_cause_of(raised_by(train)) or "")


def test_step_without_a_closure_is_explained() -> None:
    """LBFGS computes the loss several times in a step; other errors of its step are not meant."""
    step: Any = torch.optim.LBFGS(nn.Linear(1, 1).parameters()).step
    error = raised_by(lambda: step(None))  # as Accelerate's wrapper calls it
    assert "call optimizer.step(closure)" in (likely_cause_of(error) or "")
    none: Any = None
    assert likely_cause_of(raised_by(lambda: step(lambda: fail(TypeError("none"))))) is None
    assert likely_cause_of(raised_by(lambda: none())) is None


def fail(error: BaseException) -> None:
    raise error


def numpy_array(*sizes: int) -> Any:
    return np.zeros(sizes)


# Mistakes by name that are not torch's, or not about a batch.
OTHER_MISTAKES: dict[str, Callable[[], object]] = {
    "the recipe's own ValueError": lambda: fail(ValueError("the shape is wrong")),
    "the recipe's own RuntimeError": lambda: fail(RuntimeError("the shape is wrong")),
    "the recipe's own IndexError": lambda: fail(IndexError("Target 3 is out of bounds.")),
    "KeyError": lambda: fail(KeyError("size")),
    "memory": lambda: fail(RuntimeError("CUDA out of memory. Tried to allocate a size of 3 GiB")),
    "int": lambda: int("size"),
    "NumPy index": lambda: numpy_array(3)[5],
    "NumPy indices": lambda: numpy_array(3)[0, 0],
    "NumPy index array": lambda: numpy_array(3)[np.array([5])],
    "NumPy mask": lambda: numpy_array(3)[np.array([True, False])],
    "NumPy index shapes": lambda: numpy_array(5, 5)[np.arange(2), np.arange(3)],
    "NumPy concatenation": lambda: np.concatenate([numpy_array(2, 3), numpy_array(2, 4)]),
    "NumPy broadcasting": lambda: numpy_array(3) + numpy_array(4),
    "NumPy assignment": lambda: numpy_array(3).__setitem__(slice(None), numpy_array(4)),
    "NumPy product": lambda: numpy_array(2, 3) @ numpy_array(2, 3),
    "NumPy reshape": lambda: numpy_array(3).reshape(2, 2),
    "NumPy axis": lambda: numpy_array(3).sum(axis=4),
    "NumPy dtype": lambda: np.array(["size"]).astype(float),
}


@pytest.mark.parametrize("name", OTHER_MISTAKES)
def test_other_errors_are_left_as_they_are(name: str) -> None:
    assert likely_cause_of(raised_by(OTHER_MISTAKES[name])) is None


def test_error_of_the_user_is_left_as_it_is() -> None:
    with pytest.raises(UserError) as raised:
        fail(UserError("the size is wrong", advice="change it"))
    assert likely_cause_of(raised.value) is None


def test_without_a_batch_the_variables_are_described() -> None:
    """A loop may take its batch apart at once."""

    def train() -> None:
        for images, labels in [(FEATURES, integers(3))]:
            F.cross_entropy(images[:, :3], labels)

    assert "(labels from 0 to 3)" in str(likely_cause_of(raised_by(train)))


@pytest.mark.parametrize("state", ["reading", "over"])
@pytest.mark.parametrize("is_explained", [True, False])
def test_rehearsal_is_named_before_the_cause(state: Any, is_explained: bool) -> None:
    """The switch that turns rehearsals off stands at the end, and only for unknown causes."""
    rehearsal = Rehearsal(is_wanted=True)
    rehearsal.state = state
    function, values, _ = MISTAKES["label too large"]
    error = error_in_loop(function, values) if is_explained else KeyError("a")
    add_notes(error, rehearsal)
    notes = " ".join(getattr(error, "__notes__", []))
    assert ("came in the rehearsal of the evaluation" in notes) == (state == "reading")
    assert ("rehearse=False" in notes) == (state == "reading" and not is_explained)
    assert ("Likely cause" in notes) == is_explained
    if is_explained:
        assert notes.endswith("one output for each class.")


LOSSES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("is_target_longer", [True, False])
def test_loss_of_crossed_shapes_is_refused(loss: Any, is_target_longer: bool) -> None:
    """Predictions [n, 1] and targets [n] would be compared each with each."""
    tensors = [torch.zeros(8), torch.zeros(8, 1)]
    predictions, targets = tensors if is_target_longer else tensors[::-1]
    with warnings.catch_warnings():
        refuse_crossed_shapes()
        error = raised_by(lambda: loss(predictions, targets))
    likely_cause = str(likely_cause_of(error))
    assert "the loss compares each prediction with the targets of all samples" in likely_cause
    assert f"predictions of the loss float32 {[*predictions.shape]}" in likely_cause
    assert f"targets of the loss float32 {[*targets.shape]}" in likely_cause
    assert "predictions.squeeze(-1)" in likely_cause
    assert "expand both to one shape yourself" in likely_cause


def test_crossed_shapes_are_allowed_again_after_an_embedded_run() -> None:
    """The filters of the program that called the recipe stay."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using a target size")
        filters = [*warnings.filters]
        refuse_crossed_shapes()
        assert [*warnings.filters] != filters
        allow_crossed_shapes()
        assert [*warnings.filters] == filters
        assert F.l1_loss(torch.zeros(8, 1), torch.zeros(8)) == 0


@pytest.mark.parametrize(
    ("predictions", "targets"),
    [
        ((1, 1), (1,)),
        ((1,), (1, 1)),
        ((1, 1, 1), (1, 1)),
        ((1, 1), (1, 1, 1)),
        ((8, 2), (8, 1)),
        ((8, 2), ()),
    ],
)
def test_loss_of_other_shapes_is_not_refused(
    predictions: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    """One sample has the right loss, and a recipe may broadcast on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using a target size")
        refuse_crossed_shapes()
        assert F.mse_loss(torch.zeros(predictions), torch.zeros(targets)) == 0
