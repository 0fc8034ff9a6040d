"""The facts on which a run's bits depend, and how two runs differ in them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from common.config import TrainingConfig
from common.flags import role_of, spelled
from common.run_directory.records import Attempt, CodeTree
from common.tools.compare.facts import is_compared
from common.tools.compare.words import value_text
from common.tools.reproduce.past_run import PastRun
from common.tools.reproduce.receipt import FactDifference

DIGITS = 8  # of a digest or a commit that a table shows
# Packages that compute, or that make the numbers that training reads. Those that the recipe imports
# may do so, too. Another version of any other package should change no bits.
NUMERIC_PACKAGES = (
    *("torch", "accelerate", "numpy", "datasets", "transformers", "tokenizers", "pillow"),
    *("scikit-learn", "triton", "safetensors", "pyarrow", "mkl", "intel-openmp", "torchvision"),
)
NUMERIC_PREFIXES = ("nvidia-", "rocm-")
CORES = re.compile(r", \d+ cores?$")
FACTS_OF_PLACE = ("--dataset", "--dataset-config", "data set")  # the same data may have several
FLAGS_OF_DATA = ("dataset", "dataset_config")  # a resume changes them where the data have moved
OTHER = "another value"
FACTS_OF_PROCESSES = ("processes", "machines", "threads per process")
FLAGS_OF_KERNELS = ("deterministic",)  # they change the rounding alone
# Another fact says the same, or the reproduction sets the flag itself.
FLAGS_OF_OTHER_FACTS = ("mixed_precision", "num_threads", "auto_batch_size", "init_from")


@dataclass(frozen=True)
class Fact:
    """A fact about a run, in the words of a table; None if the run did not record it."""

    value: str | None
    changes_bits: bool = True  # whether another value makes equal bits unlikely
    defines_experiment: bool = False  # whether a run with another value is another experiment


def of_experiment(value: str | None) -> Fact:
    """Return a fact on which a run's figures depend by more than rounding."""
    return Fact(value, defines_experiment=True)


Facts = dict[str, Fact]


def facts_of(run: PastRun) -> Facts:
    """Return the facts of a run by label, the likelier causes of a difference first."""
    config = run.config
    facts = {
        "config.json": of_experiment("edited" if run.is_edited else "as written"),
        "recipe": of_experiment(config.recipe),
    }
    facts |= facts_of_flags(run)
    facts |= facts_of_code(run)
    data = config.data
    facts |= {
        "data set": of_experiment(data.name),
        "data's fingerprint": of_experiment(data.fingerprint),
        "data's sizes": of_experiment(
            ", ".join(f"{name} {size:,}" for name, size in data.sizes.items())
        ),
        "initial weights": of_experiment(shortened(config.initial_weights)),
        "weights of --init-from": of_experiment(initial_file(run)),
        "model": of_experiment(
            f"{config.architecture.name}, {config.architecture.parameters:,} parameters"
        ),
        "updates planned": of_experiment(f"{config.plan.total_steps:,}"),
    }
    return facts | facts_of_machine(run)


def initial_file(run: PastRun) -> str | None:
    """Return the digest of the weights of `--init-from`; "none" without that flag."""
    if run.is_published:  # it has no copy of them
        return None
    return shortened(run.initial_digest) or "none"


def facts_of_flags(run: PastRun) -> Facts:
    """Return the flags on which results depend."""
    facts = {}
    for name, value in run.config.config.items():
        if is_compared(name, run.config) and name not in FLAGS_OF_OTHER_FACTS:
            text = text_of_flag(value)
            facts[spelled(name)] = Fact(text, defines_experiment=changes_learning(name))
    return facts


def text_of_flag(value: object) -> str:
    """Return the value of a flag for a table, with all digits of a float."""
    return repr(value) if isinstance(value, float) else value_text(value)


def changes_learning(flag: str) -> bool:
    """Whether another value of a flag changes what the model learns by more than rounding."""
    return not role_of(TrainingConfig, flag).free and flag not in FLAGS_OF_KERNELS


def facts_of_code(run: PastRun) -> Facts:
    """Return the commits and patches of the code, and the digest of the recipe's text."""
    facts = {"text of the recipe": of_experiment(shortened(run.config.source.sha256))}
    for tree, owner in zip(run.attempt.trees, ("", " of the library"), strict=False):
        facts[f"commit{owner}"] = of_experiment(shortened(tree.commit))
        facts[f"uncommitted changes{owner}"] = of_experiment(text_of_patch(tree))
    if not run.attempt.trees:
        facts["commit"] = of_experiment(shortened(run.config.environment.git_commit))
    return facts


def text_of_patch(tree: CodeTree) -> str:
    """Return a table's words for the patch of a tree."""
    patch = shortened(tree.patch_sha256) or "none"
    return f"{patch}, and others that are not saved" if tree.not_saved else patch


def facts_of_machine(run: PastRun) -> Facts:
    """Return the processes, the hardware and the versions of a run."""
    environment = run.config.environment
    attempt = run.attempt
    is_on_cpu = environment.device_type == "cpu"
    threads = attempt.threads_per_process or environment.threads_per_process
    device = environment.device
    if is_on_cpu:  # the name of a CPU ends with its number of cores, which changes no bits
        device = CORES.sub("", device)
    facts = {
        "processes": Fact(value_text(attempt.world_size or environment.world_size)),
        "machines": Fact(value_text(attempt.machines) if run.attempts else None),
        "sharding": Fact(environment.sharding),
        "effective batch": of_experiment(value_text(environment.effective_batch_size)),
        "precision": of_experiment(attempt.mixed_precision or environment.mixed_precision),
        "device": Fact(device),
        "threads per process": Fact(text_or_none(threads), is_on_cpu),
        "deterministic kernels": Fact(text_or_none(environment.deterministic)),
        "cuDNN benchmark": Fact(text_or_none(environment.cudnn_benchmark), not is_on_cpu),
    }
    facts |= {f"{name} of torch": Fact(value) for name, value in attempt.libraries.items()}
    facts |= facts_of_variables(attempt)
    facts |= facts_of_versions(run)
    return facts | {
        "python": Fact(environment.python),
        "cores": Fact(text_or_none(attempt.cores), False),
        "system": Fact(attempt.system, False),
    }


def facts_of_variables(attempt: Attempt) -> Facts:
    """Return the variables of the environment that choose kernels."""
    return {name: Fact(value) for name, value in attempt.variables.items()}


def facts_of_versions(run: PastRun) -> Facts:
    """Return the versions of packages; of an older run, those of the main ones."""
    versions: Mapping[str, str] = run.attempt.packages or run.config.environment.versions
    imported = run.attempt.imported or ()
    return {
        f"version of {name}": Fact(value, is_numeric(name) or name in imported)
        for name, value in versions.items()
    }


def is_numeric(package: str) -> bool:
    """Whether another version of a package may change bits."""
    return package in NUMERIC_PACKAGES or package.startswith(NUMERIC_PREFIXES)


def shortened(digest: str | None) -> str | None:
    return None if digest is None else digest[:DIGITS]


def text_or_none(value: object) -> str | None:
    return None if value is None else value_text(value)


def differences_of(before: PastRun, now: PastRun) -> list[FactDifference]:
    """Return the facts in which two runs differ. A fact that one of them lacks is not compared.

    Earlier attempts of the old run that differ from its last one count as well, because the new run
    is trained like the last one from its start.
    """
    return [*differences_at_end(before, now), *differences_of_attempts(before)]


def differences_of_attempts(run: PastRun) -> list[FactDifference]:
    """Return how the earlier attempts of a run differ from its last one."""
    differences = []
    last = replace(run, attempts=run.attempts[-1:])
    for attempt, following in pairwise(run.attempts):
        until = f" until update {following.global_step}"
        earlier = replace(run, attempts=[attempt])
        for difference in differences_at_end(earlier, last):
            label = f"{difference.fact}{until}"
            differences.append(difference.model_copy(update={"fact": label}))
        # A resume can change only flags that do not matter for what the model learns, and those
        # that it adapts to the number of processes.
        for name, value in following.changed_flags.items():
            if name not in (*FLAGS_OF_OTHER_FACTS, *FLAGS_OF_DATA):
                label = f"{spelled(name)}{until}"
                text = text_of_flag(value)
                differences.append(
                    FactDifference(fact=label, before=OTHER, now=text, changes_bits=True)
                )
    return differences


def differences_at_end(before: PastRun, now: PastRun) -> list[FactDifference]:
    """Return the facts in which the last attempts of two runs differ.

    Packages and variables are lists, so one that is missing in a list is a difference.
    """
    facts_before = facts_of(before)
    facts_now = facts_of(now)
    are_lists_known = bool(before.attempts and now.attempts)
    differences = []
    for label in dict.fromkeys([*facts_before, *facts_now]):
        first = facts_before.get(label)
        second = facts_now.get(label)
        if first is None or second is None:
            if not are_lists_known:
                continue
            first = first or Fact("none", second is None or second.changes_bits)
            second = second or Fact("none", first.changes_bits)
        if first.value is None or second.value is None or first.value == second.value:
            continue
        if (
            before.is_published
            and label.startswith("--")
            and first.value == Path(second.value).name
        ):
            continue  # publishing cut the path
        differences.append(
            FactDifference(
                fact=label,
                before=first.value,
                now=second.value,
                changes_bits=first.changes_bits or second.changes_bits,
                defines_experiment=first.defines_experiment or second.defines_experiment,
            )
        )
    facts_to_ignore = FACTS_OF_PLACE if is_data_equal(before, now) else ()
    is_other_machine = any(may_change_initialization(difference) for difference in differences)
    return [
        difference.model_copy(update={"defines_experiment": False})
        if difference.fact == "initial weights" and is_other_machine
        else difference
        for difference in differences
        if difference.fact not in facts_to_ignore
    ]


def may_change_initialization(difference: FactDifference) -> bool:
    """Whether a differing fact may change the last bits of weights that are drawn at random."""
    is_of_machine = difference.changes_bits and not difference.defines_experiment
    return is_of_machine and difference.fact not in FACTS_OF_PROCESSES


def is_data_equal(before: PastRun, now: PastRun) -> bool:
    """Whether two runs read the same data by their fingerprints, from whichever place."""
    fingerprint = before.config.data.fingerprint
    return fingerprint is not None and fingerprint == now.config.data.fingerprint
