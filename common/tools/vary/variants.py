"""Run the variants of a recipe: every combination of the values that vary, for each seed."""

import itertools
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from optuna.distributions import CategoricalDistribution

from common.console import say
from common.console.messages import CONSOLE
from common.errors import UserError
from common.flags import check_number
from common.run_directory.status import current_status
from common.storage.digests import sha256_of_bytes
from common.storage.files import LOCK
from common.system.platforms.commands import command_line, shown_path
from common.system.wording import counted
from common.tools.launching.command import command_of_run, options_for
from common.tools.launching.folder import locked_folder_of_runs
from common.tools.launching.launched_run import LaunchedRun
from common.tools.launching.validation_share import with_validation_share
from common.tools.recipe import load_recipe
from common.tools.tune.space import Space, command_words, parse_space
from common.tools.vary.records import read_command, write_command
from common.tools.vary.report import report_on_variants

MAX_NAME_LENGTH = 120  # characters of a variant's directory; file systems allow 255 bytes


@dataclass(frozen=True)
class Variant:
    """One combination of the values that vary. A variant is trained once for each seed."""

    name: str  # the name of its directory
    title: str  # its name in tables and pictures
    processes: str  # the number of processes, as typed
    flags: list[str]  # the command-line words of this variant's values

    def command(self, recipe: str, shared: Sequence[str], seed: int, directory: Path) -> list[str]:
        """Return the command that starts this variant's run with a seed, or resumes it."""
        flags = [*self.flags, *shared]
        # Seed 0 is the default. Without `--seeds`, it is also the only one here, and a --seed that
        # the user passed to the recipe must not be overridden.
        if seed:
            flags += ["--seed", str(seed)]
        return command_of_run(options_for(int(self.processes)), recipe, flags, directory)

    def directory(self, parent: Path, seed: int) -> Path:
        """Return the directory of the run with a seed.

        The name for seed 0 is the same with one seed as with several, so that a repetition with a
        larger ``--seeds`` finds the earlier run.
        """
        return parent / (f"{self.name}-seed-{seed}" if seed else self.name)


def run_variants(
    recipe: str, flags: list[str], *, seeds: int, num_processes: str, output_dir: str | None
) -> None:
    """Run all variants that have not finished, and report on the finished variants.

    Args:
        recipe: the recipe's file.
        flags: the words of the recipe's flags, with choices a,b,c for the flags that vary.
        seeds: runs of each variant, with the seeds 0 to `seeds` - 1.
        num_processes: numbers of processes, separated by commas.
        output_dir: where the runs go; None stands for a name made from the command.

    Raises:
        UserError: the command line is wrong, in which case nothing has run; or some runs failed.
    """
    # No flag needs to vary, because several seeds of a single variant are useful, too.
    space, shared = parse_space(flags, load_recipe(Path(recipe)), least_searched=0)
    refuse_ranges(space)
    sets_seed = "seed" in space or "--seed" in shared
    check_seeds(seeds, sets_seed=sets_seed)
    process_counts = read_process_counts(num_processes)
    variants = list_variants(space, process_counts)
    if len(variants) > 1:
        shared = add_validation_share(shared)
    command = [recipe, *flags, "--num-processes", num_processes]
    directory = Path(output_dir or default_directory(command)).resolve()
    with locked_folder_of_runs(directory, "--output-dir", "the same command"):
        claim_folder(directory, command)
        seeds_text = counted(seeds, "seed")
        say(f"variants: {len(variants)}, with {seeds_text} each, in {shown_path(directory)}")
        finished = train_all(variants, recipe, shared, seeds, directory)
    report_on_variants(directory, finished, seeds, sets_seed=sets_seed)
    failed_count = len(variants) * seeds - sum(map(len, finished.values()))
    if failed_count:
        raise UserError(
            f"{counted(failed_count, 'run')} failed, for reasons that are printed above",
            advice="correct the causes, and repeat the command: it skips finished runs",
        )


def train_all(
    variants: Sequence[Variant], recipe: str, shared: Sequence[str], seeds: int, directory: Path
) -> dict[str, list[str]]:
    """Train each variant with each seed; return the directories of finished runs by title.

    All variants train with one seed before the next seed, so an interrupted command leaves them
    with about equally many runs. The result has the variants in their order, in which the baseline
    comes first. A variant without a finished run is left out.
    """
    finished: dict[str, list[str]] = {variant.title: [] for variant in variants}
    for seed, variant in itertools.product(range(seeds), variants):
        run_directory = variant.directory(directory, seed)
        if train_to_end(variant.command(recipe, shared, seed, run_directory), run_directory):
            finished[variant.title].append(str(run_directory))
    return {title: runs for title, runs in finished.items() if runs}


def add_validation_share(shared: list[str]) -> list[str]:
    """Add `--validation-share` to the flags of all variants if it is missing, and say so."""
    flags = with_validation_share(shared)
    if flags != shared:
        say(
            "variants are chosen on validation data: 10 % of train serves as validation data "
            "where the data has no validation split (pass --validation-share for another share)"
        )
    return flags


def refuse_ranges(space: Space) -> None:
    """Raise a UserError if a flag has a range instead of choices."""
    for name, distribution in space.items():
        if not isinstance(distribution, CategoricalDistribution):
            raise UserError(
                f"--{name} has a range of values, which only `recipes tune` can search",
                advice="pass single values with commas between, such as 0.1,0.01",
            )


def check_seeds(seeds: int, *, sets_seed: bool) -> None:
    """Raise a UserError if `--seeds` is out of range or contradicts `--seed`.

    Args:
        seeds: the value of `--seeds`.
        sets_seed: whether the recipe's flags have a --seed of their own.
    """
    if seeds > 1 and sets_seed:
        raise UserError(
            f"--seeds {seeds} already sets --seed (0 to {seeds - 1})", advice="leave --seed out"
        )
    check_number("seeds", seeds, least=1)


def read_process_counts(num_processes: str) -> list[str]:
    """Return each number of `--num-processes` once; raise a UserError if one is not a number."""
    process_counts = list(dict.fromkeys(num_processes.split(",")))
    if not all(re.fullmatch("[1-9][0-9]{0,3}", count) for count in process_counts):
        raise UserError(
            f"--num-processes {num_processes:.99} is not a list of numbers from 1 to 9999",
            advice="pass such numbers with commas between, as in 1,2",
        )
    return process_counts


def list_variants(space: Space, process_counts: Sequence[str]) -> list[Variant]:
    """Return all combinations of values and numbers of processes.

    Args:
        space: the flags that vary, with choices alone.
        process_counts: the numbers of processes, as typed.

    Raises:
        UserError: two variants would have the same name, and so the same directory.
    """
    choices: list[list[str]] = []
    for distribution in space.values():
        assert isinstance(distribution, CategoricalDistribution)  # the caller refused ranges
        choices.append([str(choice) for choice in distribution.choices])
    combinations = list(itertools.product(process_counts, *choices))
    variants = {}
    for processes, *chosen_values in combinations:
        values = dict(zip(space, chosen_values, strict=True))
        varied_processes = processes if len(process_counts) > 1 else ""
        title = variant_title(varied_processes, values)
        name = directory_name(title)
        variants[name] = Variant(name, title, processes, command_words(space, values))
    # Variants with the same name have replaced each other in the dictionary.
    if len(variants) < len(combinations):
        raise UserError(
            "two variants would have the same folder, because their values differ only in "
            "characters that are left out of the names of folders",
            advice="choose values that differ in a letter or a digit",
        )
    return list(variants.values())


def variant_title(varied_processes: str, values: dict[str, str]) -> str:
    """Return a variant's name in tables: its flags with their values, such as ``dropout=0.1``.

    Args:
        varied_processes: the number of processes; empty if all variants have the same number.
        values: the variant's values, by flag. If there are none, the title is ``these flags``.
    """
    parts = [f"{flag}={value}" for flag, value in values.items()]
    if varied_processes:
        parts.append(f"processes={varied_processes}")
    return ", ".join(parts) or "these flags"


def directory_name(title: str) -> str:
    """Return the name of a variant's directory, such as ``dropout=0.1_batch-size=64``.

    All characters of the title become dashes except letters, digits and a few signs. The rest of a
    very long name, which file systems may refuse, becomes a digest.
    """
    name = re.sub(r"[^\w.+=-]+", "-", title.replace(", ", "_"))
    if len(name) <= MAX_NAME_LENGTH:
        return name
    return f"{name[:MAX_NAME_LENGTH]}-{sha256_of_bytes(name.encode())[:8]}"


def default_directory(command: list[str]) -> str:
    """Return a directory for a command, so that the same command finds its runs again."""
    digest = sha256_of_bytes(shlex.join(command).encode())[:6]
    return f"runs/vary-{Path(command[0]).stem}-{digest}"


def claim_folder(directory: Path, command: list[str]) -> None:
    """Note in a directory to which command it belongs, so that only this command continues in it.

    Raises:
        UserError: the directory belongs to another command, or has other or damaged files.
    """
    # `locked_folder_of_runs` has made the lock already.
    is_empty = not set(os.listdir(directory)) - {LOCK}
    saved_command = read_command(directory)
    if saved_command is None and not is_empty:
        raise UserError(
            f"{directory} contains files, but no variants to continue",
            advice="pass a new or empty folder with --output-dir",
        )
    if saved_command is not None and saved_command != command:
        shown = command_line(["recipes", "vary", *saved_command])
        raise UserError(
            f"{directory} contains the variants of another command: {shown}",
            advice="pass another --output-dir, or repeat that command with this --output-dir",
        )
    write_command(directory, command)


def train_to_end(command: list[str], directory: Path) -> bool:
    """Train a variant with one seed, or finish its training, and return whether it finished.

    A failure is printed and not raised, so that the other variants still train.
    """
    with (
        CONSOLE.status(directory.name) as progress,
        closing(LaunchedRun(command, directory)) as run,
    ):
        for record in run.follow():
            steps = f"{record.last_step} of {record.saved_config.plan.total_steps} updates"
            progress.update(f"{directory.name}  {steps}")
    status = current_status(directory).status
    if status == "finished":
        say(f"{directory.name}  finished")
        return True
    # The process has ended. If it could not write its status, it failed.
    outcome = "failed" if status in ("running", "unknown") else status
    say(f"{directory.name}  {outcome}: {run.reason()}")
    return False
