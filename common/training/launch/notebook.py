"""What a run does inside another program, such as a notebook that goes on after the run."""

import os
import sys

import torch
from accelerate.state import AcceleratorState, GradientState


def is_embedded(recipe_file: str) -> bool:
    """Whether another program, such as a notebook, called the recipe's `main` in this process.

    The config is then the program's, and no command line was checked, so the run checks the config
    itself. The program goes on after the run, and may start another one. At its end, an embedded
    run therefore undoes its changes to the process, such as its signal handlers.

    A launcher is no such program, because it starts the recipe as the main script.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    return script is None or os.path.realpath(script) != os.path.realpath(recipe_file)


def set_ranks_of_debug_launcher() -> None:
    """Set RANK and similar variables under Accelerate's `debug_launcher`.

    That launcher tells only torch the rank, but recipes read the rank from these variables.
    """
    if "RANK" not in os.environ and torch.distributed.is_initialized():
        own_rank = str(torch.distributed.get_rank())
        processes = str(torch.distributed.get_world_size())
        os.environ |= {
            "RANK": own_rank,
            "LOCAL_RANK": own_rank,
            "WORLD_SIZE": processes,
            "LOCAL_WORLD_SIZE": processes,
        }


def forget_accelerator() -> None:
    """Reset Accelerate's global state, so that another run in this process can build its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
