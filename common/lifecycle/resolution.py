"""A run's flags, as given and as resolved: the only code in `common` that changes a config.

Until `run.start` has resolved all flags, a config can change: a recipe resolves its own flags by
assigning to them. Code in `common` computes a resolved value and returns it, and the run hands the
value to `ConfigResolution.resolve`. From then on, the config is frozen.
"""

from collections.abc import Mapping

from common.config import TrainingConfig
from common.run_directory.records import Flags


class ConfigResolution:
    """Replaces flags that were left open, such as `auto`, by the values that were chosen."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        # The flags before `resolve` sets any: on a first start, as the command line gave them. On a
        # resume, `config.json` keeps those of the first start: see
        # `run_config.flags_at_first_start`.
        self.given_flags: Flags = dict(vars(config))

    def resolve(self, **values: object) -> None:
        """Set flags, which are given as keyword arguments.

        Raises:
            AttributeError: the config has no such flag.
        """
        flags = vars(self.config)  # reading an attribute would count as a use of the flag
        for name, value in values.items():
            if name not in flags:
                raise AttributeError(f"{type(self.config).__name__} has no flag {name}")
            if flags[name] != value:
                setattr(self.config, name, value)

    def settle(self, flag_values: Mapping[str, object]) -> None:
        """Replace the values that a program gave by equal ones in the form of flags."""
        for name, value in flag_values.items():
            setattr(self.config, name, value)
        self.given_flags = dict(vars(self.config))

    def freeze(self) -> None:
        """Freeze the config until the run is over. No flag changes any more."""
        self.config.freeze()
