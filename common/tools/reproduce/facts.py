"""The facts on which a run's bits depend.

Bits depend on more than the settings that `recipes compare` shows: for example, on all packages and
on environment variables, which may be others in each attempt of a run.
"""

from dataclasses import dataclass

from common.config import TrainingConfig
from common.flags import role_of, spelled
from common.run_directory.records import Attempt, CodeTree, RunConfig
from common.storage.digests import shown_digest
from common.tools.compare.setting_text import value_text
from common.tools.compare.settings import is_compared
from common.tools.reproduce.comparable_rows import LOG_EVERY
from common.tools.reproduce.compared_run import ComparedRun

# Packages that compute, or that produce the numbers that training reads. Packages that the recipe
# imports may do so, too. A different version of any other package should change no bits.
NUMERIC_PACKAGES = (
    "torch",
    "accelerate",
    "numpy",
    "datasets",
    "transformers",
    "tokenizers",
    "pillow",
    "scikit-learn",
    "triton",
    "safetensors",
    "pyarrow",
    "mkl",
    "intel-openmp",
    "torchvision",
)
NUMERIC_PREFIXES = ("nvidia-", "rocm-")
# Facts on where the data come from: the same data may be stored in several places.
FACTS_OF_LOCATION = ("--dataset", "--dataset-config", "data set")
FLAGS_OF_DATA = ("dataset", "dataset_config")  # a resume changes them if the data have moved
OTHER_VALUE = "another value"
VERSION_OF = "version of "  # the label of a package's version begins so
FACTS_OF_PROCESSES = ("processes", "machines", "threads per process")
FLAGS_OF_KERNELS = ("deterministic",)  # they change only the rounding
FLAGS_OF_ROWS = (LOG_EVERY,)  # they change which rows are logged, and no bit of what is learned
# Flags that another fact stands for, or that the reproduction sets itself.
FLAGS_OF_OTHER_FACTS = ("mixed_precision", "num_threads", "auto_batch_size", "init_from")


@dataclass(frozen=True)
class RecordedFact:
    """A fact about a run."""

    value: str | None  # as a table shows it; None if the run did not record it
    changes_bits: bool = True  # whether a different value makes equal bits unlikely
    defines_experiment: bool = False  # whether a different value makes a different experiment


def experiment_fact(value: str | None) -> RecordedFact:
    """Return a fact on which a run's figures depend by more than rounding."""
    return RecordedFact(value, defines_experiment=True)


RecordedFacts = dict[str, RecordedFact]  # by the label that a table shows


def facts_of(run: ComparedRun) -> RecordedFacts:
    """Return the facts of a run by label, the likelier causes of a difference first."""
    saved_config = run.saved_config
    facts = {
        "config.json": experiment_fact("edited" if run.is_edited else "as written"),
        "recipe": experiment_fact(saved_config.recipe),
    }
    facts |= facts_of_flags(run)
    facts |= facts_of_code(run)
    data = saved_config.data
    architecture = saved_config.architecture
    facts |= {
        "data set": experiment_fact(data.name),
        "data's fingerprint": experiment_fact(data.fingerprint),
        "data's sizes": experiment_fact(
            ", ".join(f"{name} {size:,}" for name, size in data.sizes.items())
        ),
        "initial weights": experiment_fact(digest_if_known(saved_config.initial_weights)),
        "weights of --init-from": experiment_fact(text_of_init_from(run)),
        "model": experiment_fact(f"{architecture.name}, {architecture.parameters:,} parameters"),
        "updates planned": experiment_fact(f"{saved_config.plan.total_steps:,}"),
    }
    return facts | facts_of_setup(run)


def text_of_init_from(run: ComparedRun) -> str | None:
    """Return the shown digest of the weights of `--init-from`; "none" without that flag.

    The result is None, which stands for unknown, if the run was published.
    """
    if run.is_published:  # a published run has no copy of the weights
        return None
    return digest_if_known(run.initial_digest) or "none"


def facts_of_flags(run: ComparedRun) -> RecordedFacts:
    """Return the flags on which results depend, without those that another fact stands for."""
    facts = {}
    for name, value in run.saved_config.flags.items():
        if is_compared(name, run.saved_config) and name not in FLAGS_OF_OTHER_FACTS:
            text = text_of_flag(value)
            facts[spelled(name)] = RecordedFact(
                text,
                changes_bits=name not in FLAGS_OF_ROWS,
                defines_experiment=changes_learning(name, run.saved_config),
            )
    return facts


def text_of_flag(value: object) -> str:
    """Return the value of a flag for a table, with all digits of a float."""
    return repr(value) if isinstance(value, float) else value_text(value)


def changes_learning(flag: str, run_config: RunConfig) -> bool:
    """Whether a different value of a flag changes what the model learns by more than rounding.

    A flag that is free, so that a resume may change it, changes nothing that is learned.
    """
    # `free_on_resume` lists only the flags for which the recipe overrides `TrainingConfig`.
    is_free = run_config.free_on_resume.get(flag, role_of(TrainingConfig, flag).free_on_resume)
    return not is_free and flag not in FLAGS_OF_KERNELS


def facts_of_code(run: ComparedRun) -> RecordedFacts:
    """Return the commits and patches of the code, and the digest of the recipe's text."""
    facts = {"text of the recipe": experiment_fact(digest_if_known(run.saved_config.source.sha256))}
    # The first tree has the recipe, and a second one has the library, if it has its own tree.
    for tree, owner in zip(run.attempt.trees, ("", " of the library"), strict=False):
        facts[f"commit{owner}"] = experiment_fact(digest_if_known(tree.commit))
        facts[f"uncommitted changes{owner}"] = experiment_fact(text_of_patch(tree))
    return facts


def text_of_patch(tree: CodeTree) -> str:
    """Return the text of a table's cell for the patch of a tree."""
    patch = digest_if_known(tree.patch_sha256) or "none"
    return f"{patch}, and others that are not saved" if tree.not_saved else patch


def facts_of_setup(run: ComparedRun) -> RecordedFacts:
    """Return how and where a run computed: processes, precision, device, kernels and versions.

    They are those of the last attempt where it recorded them, and otherwise those in `config.json`.
    """
    environment = run.saved_config.environment
    attempt = run.attempt
    is_on_cpu = environment.device_type == "cpu"
    threads = attempt.threads_per_process or environment.threads_per_process
    # `device` names a CPU less exactly, and includes the cores, which change no bits.
    device = environment.processor if is_on_cpu else environment.device
    facts = {
        "processes": RecordedFact(value_text(attempt.world_size or environment.world_size)),
        # Without a recorded attempt, `attempt` is a default one, whose 1 machine is a guess.
        "machines": RecordedFact(value_text(attempt.machines) if run.attempts else None),
        "sharding": RecordedFact(environment.sharding),
        "effective batch": experiment_fact(value_text(environment.effective_batch_size)),
        "precision": experiment_fact(attempt.mixed_precision or environment.mixed_precision),
        "device": RecordedFact(device),
        "threads per process": RecordedFact(text_if_known(threads), changes_bits=is_on_cpu),
        "deterministic kernels": RecordedFact(text_if_known(environment.deterministic)),
        "cuDNN benchmark": RecordedFact(
            text_if_known(environment.cudnn_benchmark), changes_bits=not is_on_cpu
        ),
    }
    facts |= {f"{name} of torch": RecordedFact(value) for name, value in attempt.libraries.items()}
    facts |= facts_of_variables(attempt)
    facts |= facts_of_versions(run)
    return facts | {
        "python": RecordedFact(environment.python),
        "cores": RecordedFact(text_if_known(attempt.cores), changes_bits=False),
        "system": RecordedFact(attempt.system, changes_bits=False),
    }


def facts_of_variables(attempt: Attempt) -> RecordedFacts:
    """Return the variables of the environment that choose kernels."""
    return {name: RecordedFact(value) for name, value in attempt.variables.items()}


def facts_of_versions(run: ComparedRun) -> RecordedFacts:
    """Return the versions of all packages.

    A different version may explain different bits only if the package computes, or if the user's
    own code imports it.
    """
    imported = run.attempt.imported or ()
    facts = {}
    for name, version in run.attempt.packages.items():
        changes_bits = is_numeric(name) or name in imported
        facts[f"{VERSION_OF}{name}"] = RecordedFact(version, changes_bits=changes_bits)
    return facts


def is_numeric(package: str) -> bool:
    """Whether a package is known to compute, so that a different version may change bits."""
    return package in NUMERIC_PACKAGES or package.startswith(NUMERIC_PREFIXES)


def digest_if_known(digest: str | None) -> str | None:
    return None if digest is None else shown_digest(digest)


def text_if_known(value: object) -> str | None:
    return None if value is None else value_text(value)
