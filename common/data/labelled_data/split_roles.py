"""The roles of splits: which splits of a data set are read, and as what."""

from collections.abc import Iterable

from common.data.sources import DataSource
from common.errors import UserError

# The names of the splits that are read besides train, and the role of each.
SPLIT_ROLES = {
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "validation_matched": "validation",
    "test": "test",
}


def choose_splits(names: Iterable[str], source: DataSource) -> list[tuple[str, str]]:
    """Choose which splits of a data set are read.

    A run that trains reads train and all splits for evaluation (`SPLIT_ROLES`). If no split is
    named train, the first split with an unknown name takes its place.

    A run that evaluates data which the model was not trained on reads a single split: test, or else
    validation, or else train, which then has the role test.

    Returns:
        The role (train, validation or test) and the name of each split; train comes first. Several
        splits may have the same role, in the order of `names`.

    Raises:
        UserError: there is no split to train on.
    """
    split_names = [str(name) for name in names]  # the library may have objects as names
    first_by_role: dict[str, str] = {}
    for name in split_names:
        if name in SPLIT_ROLES:
            first_by_role.setdefault(SPLIT_ROLES[name], name)
    training_names = [name for name in split_names if name not in SPLIT_ROLES]
    train = "train" if "train" in training_names else next(iter(training_names), None)
    if source.is_whole:
        for role in ("test", "validation"):
            if role in first_by_role:
                return [(role, first_by_role[role])]
        # A data set has at least one split, and this one has none for evaluation.
        assert train is not None
        return [("test", train)]
    if train is None:
        raise UserError(
            f"data set {source.name} has no split train, only {' and '.join(split_names)}",
            advice=(
                "add a split train, or evaluate a model with --evaluate-only --init-from runs/NAME"
            ),
        )
    evaluated = [(SPLIT_ROLES[name], name) for name in split_names if name in SPLIT_ROLES]
    return [("train", train), *evaluated]
