"""Report on variants: a table of means over seeds, verdicts, a picture, and model cards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.console import say
from common.errors import UserError
from common.output.tables import Row, markdown_table, print_table
from common.run_directory.records import MODEL_FOLDER
from common.storage.files import write_text
from common.system.platforms.commands import shown_path
from common.tools.compare.comparison import Comparison, compare
from common.tools.compare.group_table import group_cells, has_repetitions
from common.tools.compare.groups import SEED_FLAG, SEED_LABEL
from common.tools.compare.readers.run_record import RunRecord
from common.tools.compare.readers.sources import read_runs
from common.tools.compare.run_table import transposed_if_wide
from common.tools.compare.setting_text import value_text
from common.tools.compare.verdict_lines import correction_note, verdict_lines
from common.tools.compare.verdicts import GroupVerdict, verdicts_of
from common.tools.compare.warnings_and_notes import (
    LabelledWarning,
    labelled_warnings,
    unfair_warnings,
)

# Files in the directory of the variants.
TABLE = "table.md"
PICTURE = "picture.png"
# The heading of the section of a model card that `add_to_cards` writes.
CARD_HEADING = "\n## The same with other seeds\n"


@dataclass(frozen=True)
class VariantsReport:
    """The text on the variants. The terminal and `table.md` show it in their own forms."""

    title: str
    warnings: list[LabelledWarning]
    rows: list[list[str]]  # the table of means over seeds, with the row of headings first
    verdicts: list[GroupVerdict]  # on pairs of variants
    remarks: list[str]  # on the limits of the verdicts

    def show(self) -> None:
        """Print the warnings, the table, the verdicts on some pairs, and the remarks."""
        for label, warning in self.warnings:
            say(f"{label}: {warning}")
        print_table(self.rows, title=self.title)
        for line in [*verdict_lines(self.verdicts, source_of_all=TABLE), *self.remarks]:
            say(line)

    def markdown(self) -> str:
        """Return the contents of `table.md`, which has the verdicts on all pairs."""
        quoted_warnings = [f"> **{label}** {warning}" for label, warning in self.warnings]
        table = "\n".join(markdown_table(self.rows))
        lines = [*verdict_lines(self.verdicts, most_pairs=None), *self.remarks]
        paragraphs = [self.title, *quoted_warnings, table, *(line.strip() for line in lines)]
        return "\n\n".join(paragraphs) + "\n"


def report_on_variants(
    directory: Path,
    finished: Mapping[str, Sequence[str]],
    seed_count: int,
    *,
    sets_seed: bool = False,
) -> None:
    """Show means over seeds with their standard deviations, and verdicts on pairs of variants.

    They are also written to `table.md`, and a picture to `picture.png`. If any variant has several
    runs, the model card of each run gets the means of its variant.

    Args:
        directory: the folder for `table.md` and `picture.png`.
        finished: directories of the finished runs, by the variant's title and in the order of their
            seeds. A variant without finished runs is left out.
        seed_count: how many runs each variant should have.
        sets_seed: whether the recipe's flags have a --seed of their own.

    Raises:
        UserError: there is no finished run.
    """
    from common.tools.compare.plot import plot_comparison

    if not finished:
        raise UserError(
            "no variant finished, so there is nothing to compare",
            advice="correct the causes that are printed above, and repeat the command",
        )
    comparison = compare_variants(finished)
    report = compose_report(comparison, finished, seed_count, sets_seed)
    report.show()
    write_text(directory / TABLE, report.markdown())
    if has_repetitions(comparison):
        add_means_to_cards(finished, group_cells(comparison, relative=False))
    plot_comparison(comparison, directory / PICTURE)
    say(f"table: {shown_path(directory / TABLE)}, with {PICTURE} beside it")


def compose_report(
    comparison: Comparison,
    finished: Mapping[str, Sequence[str]],
    seed_count: int,
    sets_seed: bool,
) -> VariantsReport:
    """Return the text on the variants. `remarks_on_verdicts` explains the arguments."""
    unfair_texts = [
        *unfair_warnings(one_run_each(comparison)),
        *warnings_within_groups(comparison),
    ]
    verdicts = verdicts_of(comparison, in_training=has_validation_data(comparison))
    return VariantsReport(
        title=title_of(comparison.runs[0]),
        warnings=labelled_warnings(comparison, unfair_texts),
        rows=transposed_if_wide(group_cells(comparison)),
        verdicts=verdicts,
        remarks=remarks_on_verdicts(comparison, verdicts, finished, seed_count, sets_seed),
    )


def compare_variants(finished: Mapping[str, Sequence[str]]) -> Comparison:
    """Compare all runs; the runs of a variant are one group, whatever flags vary.

    Without labels, `compare` would take variants that differ only in --seed for one group.

    Each run is named by its variant and seed, as in the tables. The names of the folders are made
    of values without their flags.
    """
    directories = [directory for runs in finished.values() for directory in runs]
    titles = [title for title, runs in finished.items() for _ in runs]
    named_runs = []
    for title, run in zip(titles, read_runs(directories), strict=True):
        seed = run.flags.get(SEED_FLAG)
        is_repeated = len(finished[title]) > 1 and seed is not None
        named_runs.append(replace(run, name=f"{title}, seed {seed}" if is_repeated else title))
    return compare(named_runs, labels=titles)


def one_run_each(comparison: Comparison) -> Comparison:
    """Return a comparison of the first run of each variant, which gets the variant's title as name.

    In a comparison of all runs, a warning on a variant would be repeated for each of its seeds.
    """
    runs = [
        replace(comparison.runs[group.run_indices[0]], name=group.label)
        for group in comparison.groups
    ]
    return compare(runs, labels=[run.name for run in runs])


def title_of(run: RunRecord) -> str:
    """Return the table's title: the recipe, the data, and the split by which variants rank."""
    data = run.saved_config.data
    sizes = ", ".join(f"{split} {size:,}" for split, size in data.sizes.items())
    return f"{run.saved_config.recipe} on {data.name} ({sizes}), compared on {run.splits[0]} data"


def warnings_within_groups(comparison: Comparison) -> list[str]:
    """Return a sentence for each variant whose runs differ in more than the seed.

    The runs of a variant may be from different days, because a repeated command keeps finished runs
    and adds others. Code or versions may have changed in between.
    """
    sentences = []
    for group in comparison.groups:
        runs = [comparison.runs[index] for index in group.run_indices]
        differences = compare(runs).differences
        differences.pop(SEED_LABEL, None)
        texts = [f"{label} {values_text(values)}" for label, values in differences.items()]
        if texts:
            sentences.append(
                f"the runs of {group.label} differ in more than the seed: {'; '.join(texts)}"
            )
    return sentences


def values_text(values: Sequence[object]) -> str:
    """Return the different values of a setting, such as ``2.13.0 and 2.14.0``."""
    return " and ".join(dict.fromkeys(value_text(value) for value in values))


def has_validation_data(comparison: Comparison) -> bool:
    """Return whether the runs were evaluated on validation data in training."""
    return comparison.runs[0].splits[0] == "validation"


def remarks_on_verdicts(
    comparison: Comparison,
    verdicts: Sequence[GroupVerdict],
    finished: Mapping[str, Sequence[str]],
    seed_count: int,
    sets_seed: bool,
) -> list[str]:
    """Return sentences on the limits of the verdicts, and advice on how to overcome them.

    Args:
        comparison: all finished runs, in a group for each variant.
        verdicts: the verdicts on pairs of variants.
        finished: directories of the finished runs, by the variant's title.
        seed_count: how many runs each variant should have.
        sets_seed: whether the recipe's flags have a --seed of their own.
    """
    lines: list[str] = []
    correction = correction_note(verdicts)
    if correction is not None:
        lines.append(correction)
    if len(comparison.groups) > 1 and not has_validation_data(comparison):
        lines.append(
            "there is no validation data, so these are test figures: they describe the variants, "
            f"but to choose one by them would overrate it; to choose, {way_to_validate(comparison)}"
        )
    if len(comparison.groups) > 1 and seed_count == 1:
        lines.append(advice_on_seeds(sets_seed))
    for title, runs in finished.items():
        if len(runs) < seed_count:
            lines.append(
                f"{title}: {len(runs)} of {seed_count} runs finished, and only these count"
            )
    return lines


def way_to_validate(comparison: Comparison) -> str:
    """Return how to get validation data, for runs that have none.

    A folder of variants belongs to one command, so a command with other flags needs another folder.
    """
    share = comparison.runs[0].flags.get("validation_share")
    if share is None:
        return "add --validation-share 0.1"
    if share:  # the recipe ignored the share, because the runs would have validation data otherwise
        return "add a validation split to the data"
    return "pass --validation-share 0.1 instead of 0; if you pass --output-dir, name another folder"


def advice_on_seeds(sets_seed: bool) -> str:
    """Return the advice to train with several seeds.

    Args:
        sets_seed: whether the recipe's flags have a --seed of their own, which --seeds excludes.
            A command without it is another command, which needs another folder.
    """
    way_on = "the same command with --seeds 3 keeps these runs and adds others"
    if sets_seed:
        way_on = "pass --seeds 3 instead of --seed; if you pass --output-dir, name another folder"
    return f"one seed does not tell a difference from chance: {way_on}"


def add_means_to_cards(finished: Mapping[str, Sequence[str]], rows: Sequence[Row]) -> None:
    """Write the means of each variant into the model cards of its runs.

    Args:
        finished: directories of the finished runs, by variant.
        rows: the table of means. The first column has the headings, and each variant has a column.
    """
    for column, runs in enumerate(finished.values(), start=1):
        table = markdown_table([[row[0], row[column]] for row in rows])
        add_to_cards(runs, "\n".join(table))


def add_to_cards(runs: Sequence[str], table: str) -> None:
    """Write a table into the model cards of one variant's runs: how figures vary with the seed.

    The table replaces that of an earlier report.
    """
    for run in runs:
        card = Path(run, MODEL_FOLDER, "README.md")
        if card.exists():
            text, _, _ = card.read_text(encoding="utf-8").partition(CARD_HEADING)
            write_text(card, f"{text}{CARD_HEADING}\n{table}\n")
