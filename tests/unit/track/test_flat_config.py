"""The flat form of a run's facts at W&B."""

from common.run_directory.records import RunConfig
from common.track.flat_config import flat, unflat
from tests.unit.saved_config import contents_with


def test_facts_survive_the_flat_form_of_wandb() -> None:
    """Flags stand at top level beside the groups. The stated flags are not sent."""
    contents = contents_with(config={"tags": []})
    columns = flat(RunConfig(**contents))
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
    assert unflat(columns) == contents
