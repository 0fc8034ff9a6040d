"""Refuses flags on data that have no effect on the data of a run.

Otherwise, the user would believe in an effect that a flag does not have. Each flag on data has the
role "data" in its definition, and a data set lists those that it uses in `Data.reads`.

`common.lifecycle.unread_flags` refuses other flags, and says why these are checked apart.
"""

from dataclasses import fields

from common.config import TrainingConfig
from common.data.dataset import Data
from common.errors import UserError
from common.flags import advice_to_omit, as_typed, stated_metadata


def refuse_unused_data_flags(config: TrainingConfig, data: Data) -> None:
    """Raise a `UserError` for a flag of role "data" that was set and has no effect on the data."""
    # The recipe reads `--init-from` for its model, so it has an effect with any data.
    flags_in_effect = {"init_from", *data.reads}
    # A recipe that splits its own data may take the share of its validation split from the flag.
    # Without a validation split, a share of 0 is true: nothing is held out.
    if "validation" in data.splits or config.validation_share == 0:
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
