"""The loaders of a run, and the splits that its evaluations read."""

from collections.abc import Callable

from common.data.dataset import Data
from common.data.loader import RunSignals
from common.data.run_loaders import make_loaders
from common.data.unused_flags import refuse_unused_data_flags
from common.lifecycle.misuse import require_data
from common.lifecycle.stages import Context, LoadedData
from common.objective import EVALUATED_SPLITS
from common.training.evaluation.early_stopping import EarlyStopping
from common.training.evaluation.rehearsal import Rehearsal


def load(
    context: Context, data: Data, rehearsal: Rehearsal, is_evaluating: Callable[[], bool]
) -> LoadedData:
    """Check the flags on data, make a loader for each split, and return both.

    If the data lack one of validation and test, the other split serves as both. Data without either
    are refused before.

    Args:
        rehearsal: the rehearsal of the run, in which evaluations read only a few batches.
        is_evaluating: whether the recipe evaluates now.

    Raises:
        UserError: `data` is no `Data`; a flag that was set has no effect on the data, or does not
            suit them; a split has too few samples; or `--early-stopping` is set without validation
            data.
    """
    require_data(data)
    refuse_unused_data_flags(context.config, data)
    # Validation comes before test.
    evaluated_splits = [split for split in EVALUATED_SPLITS if split in data.splits]
    validation_split = evaluated_splits[0]
    test_split = evaluated_splits[-1]  # the same one if there is no other
    early_stopping = EarlyStopping(context.config, context.best, validation_split)
    signals = RunSignals(
        is_asked_to_stop=lambda: context.decisions.request.reason is not None,
        is_stop_announced=context.decisions.is_stop_announced,
        is_evaluating=is_evaluating,
        is_rehearsing=lambda: rehearsal.is_reading,
        note_rehearsed=lambda samples: rehearsal.batch_sizes.append(samples),
    )
    loaders = make_loaders(context.config, context.accelerator, data.splits, signals)
    return LoadedData(data, loaders, validation_split, test_split, early_stopping)
