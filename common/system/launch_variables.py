"""Environment variables: those that a launcher sets for a rank, and the words for yes and no.

Those of a launcher are known before the ranks are connected. Without them, the process counts as
the only one of its job.
"""

import os

# Words for yes in the environment, which Accelerate reads in the same way.
TRUE_WORDS = ("1", "true", "yes", "on", "y", "t")
FALSE_WORDS = ("0", "false", "no", "off", "n", "f")


def count_of(name: str, default: int) -> int:
    """Return an integer from the environment, or the default if it is missing or malformed.

    Its range is not checked.
    """
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        return default


def rank() -> int:
    return count_of("RANK", 0)


def is_main_rank() -> bool:
    """Whether this process is rank 0, which prints and writes for the whole job."""
    return rank() == 0


def is_launched() -> bool:
    """Whether `accelerate launch` or torchrun has started this process."""
    return "ACCELERATE_DYNAMO_BACKEND" in os.environ or "RANK" in os.environ


def world_size() -> int:
    return count_of("WORLD_SIZE", 1)


def local_world_size() -> int:
    return max(1, count_of("LOCAL_WORLD_SIZE", 1))


def several_machines() -> bool:
    return world_size() > local_world_size()
