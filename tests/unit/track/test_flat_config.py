"""The flat form of a run's facts at W&B."""

import pytest

from common.run_directory.records import RunConfig
from common.track.flat_config import FACT_NAMES, flat_columns, nested_facts
from tests.unit.saved_config import contents_with


def test_facts_survive_the_flat_form_of_wandb() -> None:
    """Flags stand at top level beside the groups. The stated flags are not sent."""
    contents = contents_with(config={"tags": []})
    columns = flat_columns(RunConfig(**contents))
    expected = {
        "seed": 0,
        "tags": [],
        "recipe": "tiny",
        "objective": "accuracy:max",
        "environment/world_size": 1,
        "environment/versions/torch": "2",
    }
    assert {name: columns[name] for name in expected} == expected
    assert not [name for name in columns if name.startswith("given")]
    del contents["given"]
    assert nested_facts(columns) == contents


@pytest.mark.parametrize("name", FACT_NAMES)
def test_flag_with_the_name_of_a_group_survives_the_flat_form(name: str) -> None:
    """A copy may have a flag such as `--source`."""
    contents = contents_with(config={name: "mine", "seed": 3})
    del contents["given"]
    columns = flat_columns(RunConfig(**contents))
    assert columns[f"config/{name}"] == "mine"
    assert nested_facts(columns) == contents
