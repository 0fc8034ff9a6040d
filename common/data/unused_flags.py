"""Refuses flags on data that have no effect on the data of a run.

Otherwise, the user would believe in an effect that a flag does not have. Each flag on data has the
role "data" in its definition, and a data set lists those that it uses in `Data.reads`.

`common.lifecycle.unread_flags` refuses other flags, and says why these are checked apart.
"""

from dataclasses import fields

from common.command_line.flag_reads import is_read
from common.config import TrainingConfig
from common.console import warn
from common.data.dataset import Data
from common.errors import UserError
from common.flags import advice_to_omit, as_typed, stated_metadata


def refuse_unused_data_flags(config: TrainingConfig, data: Data) -> None:
    """Raise a `UserError` for a flag of role "data" that was set and has no effect on the data."""
    # The recipe reads `--init-from` for its model, so it has an effect with any data.
    flags_in_effect = {"init_from", *data.reads}
    # Without a validation split, a share of 0 is true: nothing is held out. With one, a search may
    # have set the flag, so the run goes on.
    is_share_read = is_read(config, "validation_share")  # by the recipe, for its own splits
    if "validation" in data.splits or config.validation_share == 0:
        if not is_share_read and "validation_share" not in flags_in_effect:
            warn_of_unused_share(config, data)
        flags_in_effect.add("validation_share")
    for field in fields(config):
        # Other flags are not read here, because reading a flag counts as using it.
        role = stated_metadata(type(config), field.name)["role"]
        if role != "data" or field.name in flags_in_effect:
            continue
        value = getattr(config, field.name)
        if value != field.default:
            typed_flag = as_typed(type(config), field.name, value)
            raise UserError(
                (
                    f"{typed_flag} has no effect, because the recipe's data set {data.name} does "
                    "not use it"
                ),
                advice=advice_to_omit(config, field.name),
            )


def warn_of_unused_share(config: TrainingConfig, data: Data) -> None:
    """Warn if `--validation-share` was set and the recipe's own validation split ignores it."""
    share = config.validation_share
    default = {field.name: field.default for field in fields(config)}["validation_share"]
    if not share or share == default:
        return
    warn(
        f"{as_typed(type(config), 'validation_share', share)} has no effect, because the recipe's "
        f"data set {data.name} has a validation split of its own: "
        f"{advice_to_omit(config, 'validation_share')}"
    )
