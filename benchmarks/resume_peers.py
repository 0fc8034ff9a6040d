"""Kill trainings of the recipe and of its peers at the same updates, resume them, and compare.

python benchmarks/resume_peers.py
python benchmarks/resume_peers.py --contestants "HF Trainer" --kills 29 24@0.50 --again
python benchmarks/resume_peers.py --show            # the tables of the results once more

Each contestant trains the same MLP with dropout, a schedule and shuffled data, and saves a
checkpoint every 8 updates. It is killed by SIGKILL, resumed as its documentation says, and run to
its end. An uninterrupted training of the same contestant is the reference.

The training process writes down the samples of each update through hooks that the framework
offers. For a kill in a save, the process is stopped when the update before the save is recorded.
Then it runs in slices of 0.3 ms until the wanted share of its checkpoint is on the disk.

If a training can't be resumed, its newest checkpoint is removed, as a user would do by hand, and it
is resumed from the one before.

`--kills` takes names of moments, for which kills are drawn, or kills: 29 (after update 29), 27+63
(twice), 24@0.50 (in the save after update 24, with half of its bytes written), none.

Each result is written into the file at once. The same command goes on with those that are missing.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # started as a file: make the package importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.resume.contestants import CONTESTANTS, Contestant
from benchmarks.resume.kills import MOMENTS, WITH_TWO_PROCESSES, Kill, drawn_kills

if TYPE_CHECKING:
    from benchmarks.resume.measuring import Reference
    from benchmarks.resume.results import Results

RESULTS = Path(__file__).resolve().parent / "results" / "resume-peers.json"


@dataclass(kw_only=True)
class Options:
    """Kill and resume trainings of the recipe and of its peers."""

    contestants: tuple[str, ...] = ()
    """Names of contestants as the table has them (default: all whose packages are installed)."""
    kills: tuple[str, ...] = ()
    """Names of moments, or kills such as 29, 27+63 or 24@0.50 (default: all moments)."""
    processes: tuple[int, ...] = (1, 2)
    """Numbers of processes. By default, two processes have four of the moments."""
    draws: int = 1
    """How many kills to draw for each moment."""
    seed: int = 0
    """Seed of the drawn kills."""
    output: Path = RESULTS
    """File of results; results in it are kept."""
    keep: Path | None = None
    """Folder in which to keep the files of all trainings."""
    again: bool = False
    """Measure also what is in the file."""
    show: bool = False
    """Measure nothing; print the tables of the results."""


def main(options: Options) -> None:
    """Measure what is missing, and show all results."""
    from benchmarks.resume.results import Results

    earlier = Results.read(options.output)
    if options.show:
        if earlier is None:
            raise SystemExit(f"error: there is no file {options.output}: measure first")
        show(earlier)
        return
    if os.name == "nt":
        raise SystemExit("error: this script needs SIGSTOP and SIGKILL: run it on Linux or macOS")
    contestants = chosen_contestants(options)
    kills = {processes: chosen_kills(options, processes) for processes in options.processes}

    results = Results(options.output, described_machine(), {})
    if earlier is not None:
        earlier.require_versions(results.machine)
        results.results = earlier.results
    for contestant in contestants:
        for processes in options.processes:
            measure(contestant, processes, kills[processes], options, results)
    show(results)


def described_machine() -> dict[str, Any]:
    """Return the machine's facts, with the version of torchdata where it is installed."""
    from benchmarks.harness.results import describe_machine

    facts = describe_machine({})
    if util.find_spec("torchdata") is not None:
        facts["versions"]["torchdata"] = metadata.version("torchdata")
    return facts


def chosen_contestants(options: Options) -> list[Contestant]:
    """Return the contestants to measure.

    Raises:
        SystemExit: a name is unknown, or a named contestant lacks a package.
    """
    by_name = {contestant.name: contestant for contestant in CONTESTANTS}
    chosen = []
    for name in options.contestants or by_name:
        if name not in by_name:
            raise SystemExit(f"error: --contestants {name!r}: pass one of {', '.join(by_name)}")
        missing = [package for package in by_name[name].packages if util.find_spec(package) is None]
        if not missing:
            chosen.append(by_name[name])
        elif options.contestants:
            raise SystemExit(
                f"error: {name} needs {', '.join(missing)}: pip install -r requirements-bench.txt"
            )
        else:
            print(f"{name}: left out, because {', '.join(missing)} is not installed")
    return chosen


def chosen_kills(options: Options, processes: int) -> list[Kill]:
    """Return the kills to try with a number of processes.

    Raises:
        SystemExit: a value of `--kills` is neither a moment nor a possible kill.
    """
    moments = MOMENTS if processes == 1 else WITH_TWO_PROCESSES
    kills: dict[Kill, None] = {}
    for value in options.kills or moments:
        if value in MOMENTS:
            kills.update(dict.fromkeys(drawn_kills(value, options.seed, options.draws)))
            continue
        try:
            kills[Kill.parse(value)] = None
        except ValueError as problem:
            raise SystemExit(
                f"error: --kills {value!r} ({problem}): pass a kill such as 29, 27+63 or 24@0.50, "
                f"or one of {', '.join(map(repr, MOMENTS))}"
            ) from None
    return list(kills)


def measure(
    contestant: Contestant, processes: int, kills: list[Kill], options: Options, results: Results
) -> None:
    """Kill and resume a contestant; keep results of the same code that are in the file."""
    from benchmarks.resume.measuring import Reference, code_of, compare
    from benchmarks.resume.report import HEADINGS, detail_row
    from benchmarks.resume.training import train

    code = code_of(contestant)
    reference: Reference | None = None
    for kill in kills:
        title = f"{contestant.name}, processes {processes}, kill {kill.label}"
        earlier = results.results.get((contestant.name, processes, kill.label))
        if earlier is not None and earlier.code == code and not options.again:
            print(f"{title}: kept", flush=True)
            continue
        print(f"{title} ...", flush=True)
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.keep or Path(temporary)
            if reference is None:
                whole = train(contestant, Kill(), processes, new_folder(folder, title, "whole"))
                reference = Reference.of(whole)
            outcome = train(contestant, kill, processes, new_folder(folder, title, "killed"))
            result = compare(contestant, kill, processes, outcome, reference)
        results.results[result.key] = result
        results.write()
        cells = zip(HEADINGS[3:], detail_row(result)[3:], strict=True)
        print(f"  {', '.join(f'{name}: {cell}' for name, cell in cells if cell)}", flush=True)


def new_folder(parent: Path, title: str, part: str) -> Path:
    """Make an empty folder for a training, with an absolute path.

    Raises:
        SystemExit: `--keep` has it already.
    """
    words = "".join(letter if letter.isalnum() else "-" for letter in title)
    folder = (parent / words / part).resolve()
    if folder.exists():
        raise SystemExit(f"error: --keep: {folder} exists already: pass another folder")
    folder.mkdir(parents=True)
    return folder


def show(results: Results) -> None:
    """Print both tables for a terminal, and both in Markdown."""
    from benchmarks.resume import report

    print()
    print(report.as_text(report.HEADINGS, report.detail_rows(results)))
    print()
    print(report.as_text(report.SUMMARY_HEADINGS, report.summary_rows(results)))
    print(report.caption(results))
    print()
    print(report.detail_markdown(results))
    print()
    print(report.summary_markdown(results))
    commands = report.oddities(results)
    if commands:
        print("\nTo repeat what left a trace:")
        print("\n".join(commands))


if __name__ == "__main__":
    import tyro

    try:
        main(tyro.cli(Options))
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on with the results that are missing")
