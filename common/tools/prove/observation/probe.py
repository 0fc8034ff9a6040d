"""Runs a recipe under observation: `python .../prove/observation/probe.py RECIPE FLAGS...`.

The recipe is not edited. `RunObserver` wraps the methods of its run, in this process only. The
bench starts this script, and passes the plan in an environment variable.
"""

import os
import runpy
import sys
from importlib import import_module
from pathlib import Path

from common.system.launch_variables import rank
from common.tools.prove.observation.few_samples import limit_samples, use_evaluation_batches_of
from common.tools.prove.observation.interrupting import Interrupter
from common.tools.prove.observation.launch_plan import ProbePlan, plan_of_this_process
from common.tools.prove.observation.run_observer import RunObserver
from common.tools.prove.observation.session import Session


def observe(plan: ProbePlan) -> None:
    """Limit the samples, and install the observer and the instruments, as a plan says."""
    session = Session(plan.path, plan.launch, rank())
    # A planned kill ends all ranks, and the bench ends any that remain. Both read the process ids.
    process_file = plan.path / f"launch-{plan.launch}-rank-{session.rank}.pid"
    process_file.write_text(str(os.getpid()), encoding="utf-8")
    limit_samples(plan.training_samples, plan.evaluation_samples)
    if plan.evaluation_batch_size is not None:
        use_evaluation_batches_of(plan.evaluation_batch_size)
    RunObserver(session, Interrupter(session, plan.interruption), plan.reads_tensors).install()
    for instrument in plan.instruments:
        import_module(instrument).install(session)


def run_recipe(words: list[str]) -> None:
    """Run a recipe as if Python had been started with it.

    Args:
        words: the recipe's file and its flags.
    """
    recipe = Path(words[0])
    sys.argv = words
    # As in a usual launch, the recipe can import modules from its own folder. It can't import
    # modules from the folder of this script.
    probe_folder = str(Path(__file__).resolve().parent)
    sys.path[:] = [folder for folder in sys.path if folder != probe_folder]
    sys.path.insert(0, str(recipe.resolve().parent))
    runpy.run_path(str(recipe), run_name="__main__")


def main(words: list[str]) -> None:
    """Run a recipe under observation.

    Args:
        words: the recipe's file and its flags.
    """
    observe(plan_of_this_process())
    run_recipe(words)


if __name__ == "__main__":
    main(sys.argv[1:])
