"""A run's `config.json` as one flat table, the form in which W&B and trackio keep it."""

from collections.abc import Mapping

from pydantic import JsonValue

from common.run_directory.records import RunConfig
from common.storage.json_files import JsonObject

# The entries of `config.json` that keep their names in the flat table: single facts, and groups of
# facts. Every other name in the table is a flag.
FACT_NAMES = (
    "recipe",
    "run_id",
    "source",
    "objective",
    "command",
    "compared",
    "free_on_resume",
    "environment",
    "data",
    "architecture",
    "plan",
    "memory_plan",
    "peak",
)


def flat_columns(run_config: RunConfig) -> dict[str, JsonValue]:
    """Return a run's facts as one flat table, because W&B sorts and filters runs by its columns.

    A flag's column has the flag's name. Every other fact's column is ``group/name``. A recipe's own
    flag may have the name of a group, and its column is then ``config/name``.
    """
    facts = run_config.to_json()
    columns: dict[str, JsonValue] = {}
    for name, value in run_config.flags.items():
        columns[f"config/{name}" if name in FACT_NAMES else name] = value
    for name in FACT_NAMES:
        if name in facts:
            columns |= columns_of(name, facts[name])
    return columns


def columns_of(name: str, value: JsonValue) -> dict[str, JsonValue]:
    """Return one column for a single fact, or one column for each fact in a (nested) group."""
    if not isinstance(value, dict):
        return {name: value}
    columns: dict[str, JsonValue] = {}
    for inner_name, inner_value in value.items():
        columns |= columns_of(f"{name}/{inner_name}", inner_value)
    return columns


def nested_facts(config: Mapping[str, object]) -> JsonObject:
    """Undo `flat_columns`: return the nested facts of a run that was read back from W&B.

    The entries of `config.json` that `flat_columns` leaves out are missing.
    """
    facts: JsonObject = {"config": {}}
    for column, value in config.items():
        *groups, name = column.split("/")
        # A column without a group is a single fact of `config.json`, or else a flag.
        parent = facts if groups or name in FACT_NAMES else facts["config"]
        for group in groups:
            parent = parent.setdefault(group, {})
        parent[name] = value
    return facts
