"""The model of a run that only evaluates: its classes, its images, and its training data."""

from dataclasses import dataclass

from common.data.evaluated_model.training_data import TrainedOn, training_history
from common.run_directory.init_from import initial_facts
from common.run_directory.model_records import FULL_SCALE, InitialFacts, RequestedFormat


@dataclass(frozen=True)
class EvaluatedModel:
    """The model of a run that only evaluates."""

    model: str  # as `--init-from` names it
    class_names: list[str] | None  # in the order of the model's outputs; None: not known
    requested_format: RequestedFormat  # the images that it takes; all None for a model of texts
    # The run of the model comes first, then the run of its initial weights, and so on.
    trained_on: tuple[TrainedOn, ...]


def read_evaluated_model(model: str) -> EvaluatedModel:
    """Read what is known about the model that `--init-from` names.

    Nothing is known of a single file of weights. Of a model of the Hub, neither the classes nor the
    data are known.

    Raises:
        UserError: there is no such model, or its files can't be read.
    """
    facts = initial_facts(model)
    class_names = None
    if isinstance(facts.class_names, list):
        class_names = [str(name) for name in facts.class_names]
    return EvaluatedModel(model, class_names, format_of(facts), tuple(training_history(model)))


def format_of(facts: InitialFacts) -> RequestedFormat:
    """Return the format that the facts about a model state.

    A fact that is not an integer is left out: a user's copy of a recipe may state anything there.
    """
    stated = RequestedFormat(
        integer_or_none(facts.image_size),
        integer_or_none(facts.channels),
        integer_or_none(facts.white_level),
    )
    is_of_images = stated != RequestedFormat()
    if is_of_images and stated.white_level is None:
        # `recipes predict` uses the same default for a model that states no white level.
        return stated._replace(white_level=FULL_SCALE)
    return stated


def integer_or_none(fact: object) -> int | None:
    """Return a fact that is an integer; None for a fact of another type."""
    return fact if isinstance(fact, int) and not isinstance(fact, bool) else None
