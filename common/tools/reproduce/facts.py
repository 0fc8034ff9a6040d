"""The facts on which a run's bits depend, and how two runs differ in them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from common.flags import spelled
from common.run_directory.records import Attempt, CodeTree
from common.tools.compare.facts import is_compared
from common.tools.compare.words import value_text
from common.tools.reproduce.past_run import PastRun
from common.tools.reproduce.receipt import FactDifference

DIGITS = 8  # of a digest or a commit that a table shows
# Packages that compute, or that make the numbers that training reads. Another version of any other
# package changes no bits.
NUMERIC_PACKAGES = (
    *("torch", "accelerate", "numpy", "datasets", "transformers", "tokenizers", "pillow"),
    *("scikit-learn", "triton", "safetensors", "pyarrow", "mkl", "intel-openmp", "torchvision"),
)
NUMERIC_PREFIXES = ("nvidia-", "rocm-")
CORES = re.compile(r", \d+ cores?$")
# Another fact says the same, or the reproduction sets the flag itself.
FLAGS_OF_OTHER_FACTS = ("mixed_precision", "num_threads", "auto_batch_size", "init_from")


@dataclass(frozen=True)
class Fact:
    """A fact about a run, in the words of a table; None if the run did not record it."""

    value: str | None
    changes_bits: bool = True  # whether another value makes equal bits unlikely


Facts = dict[str, Fact]


def facts_of(run: PastRun) -> Facts:
    """Return the facts of a run by label, the likelier causes of a difference first."""
    config = run.config
    facts = {
        "config.json": Fact("edited" if run.is_edited else "as written"),
        "recipe": Fact(config.recipe),
    }
    facts |= facts_of_flags(run)
    facts |= facts_of_code(run)
    data = config.data
    facts |= {
        "data set": Fact(data.name),
        "data's fingerprint": Fact(data.fingerprint),
        "data's sizes": Fact(", ".join(f"{name} {size:,}" for name, size in data.sizes.items())),
        "initial weights": Fact(shortened(run.initial_digest) or "random"),
        "model": Fact(f"{config.architecture.name}, {config.architecture.parameters:,} parameters"),
        "updates planned": Fact(f"{config.plan.total_steps:,}"),
    }
    return facts | facts_of_machine(run)


def facts_of_flags(run: PastRun) -> Facts:
    """Return the flags on which results depend."""
    facts = {}
    for name, value in run.config.config.items():
        if is_compared(name, run.config) and name not in FLAGS_OF_OTHER_FACTS:
            facts[spelled(name)] = Fact(value_text(value))
    return facts


def facts_of_code(run: PastRun) -> Facts:
    """Return the commits and patches of the code, and the digest of the recipe's text."""
    facts = {"text of the recipe": Fact(shortened(run.config.source.sha256))}
    for tree, owner in zip(run.attempt.trees, ("", " of the library"), strict=False):
        facts[f"commit{owner}"] = Fact(shortened(tree.commit))
        facts[f"uncommitted changes{owner}"] = Fact(text_of_patch(tree))
    if not run.attempt.trees:
        facts["commit"] = Fact(shortened(run.config.environment.git_commit))
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
    device = environment.device
    if is_on_cpu:  # the name of a CPU ends with its number of cores, which changes no bits
        device = CORES.sub("", device)
    facts = {
        "processes": Fact(value_text(environment.world_size)),
        "machines": Fact(value_text(attempt.machines) if run.attempts else None),
        "sharding": Fact(environment.sharding),
        "effective batch": Fact(value_text(environment.effective_batch_size)),
        "precision": Fact(environment.mixed_precision),
        "device": Fact(device),
        "threads per process": Fact(text_or_none(environment.threads_per_process), is_on_cpu),
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
    return {f"version of {name}": Fact(value, is_numeric(name)) for name, value in versions.items()}


def is_numeric(package: str) -> bool:
    """Whether another version of a package may change bits."""
    return package in NUMERIC_PACKAGES or package.startswith(NUMERIC_PREFIXES)


def shortened(digest: str | None) -> str | None:
    return None if digest is None else digest[:DIGITS]


def text_or_none(value: object) -> str | None:
    return None if value is None else value_text(value)


def differences_of(before: PastRun, now: PastRun) -> list[FactDifference]:
    """Return the facts in which two runs differ. A fact that one of them lacks is not compared.

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
        differences.append(
            FactDifference(
                fact=label,
                before=first.value,
                now=second.value,
                changes_bits=first.changes_bits or second.changes_bits,
            )
        )
    return differences
