"""Kill trainings of the recipe and of its peers at the same updates, resume them, and compare.

python benchmarks/resume_peers.py
python benchmarks/resume_peers.py --contestants "HF Trainer" --kills 29 24@0.50 --again
python benchmarks/resume_peers.py --show            # the tables of the results once more

Each contestant trains the same MLP with dropout, a schedule and shuffled data, and saves a
checkpoint every 8 updates. It is killed by SIGKILL, resumed as its documentation says, and run to
its end. An uninterrupted training of the same contestant is the reference.

The training process writes down the samples of each update through hooks that the framework
offers. For a kill in a save, the process counts the bytes that it writes after the update before
the save, and stops itself in the write that reaches the wanted share of its checkpoint (see
`resume/stop_in_write.c`). If another share is on the disk nevertheless, the training is repeated,
three times at most, and the table says that the kill missed.

If a training can't be resumed, the same command is repeated once. If that fails, too, its newest
checkpoint is removed, as a user would do by hand, and it is resumed from the one before.

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
from benchmarks.resume.stopping import compiler

if TYPE_CHECKING:
    from benchmarks.resume.measuring import Reference
    from benchmarks.resume.results import Results
    from benchmarks.resume.training import Outcome

RESULTS = Path(__file__).resolve().parent / "results" / "resume-peers.json"
TRIES_FOR_A_SHARE = 3
FACTS_OF_EACH_RESULT = ("git_commit", "measured_at")


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
    refuse_saves_without_compiler([kill for chosen in kills.values() for kill in chosen])

    results = Results(options.output, lasting_machine_facts(), {})
    if earlier is not None:
        earlier.require_versions(results.machine)
        results.results = earlier.results
    for contestant in contestants:
        for processes in options.processes:
            measure(contestant, processes, kills[processes], options, results)
    show(results)


def lasting_machine_facts() -> dict[str, Any]:
    """Return the machine's facts, with the version of torchdata where it is installed.

    Commit and time are those of each result.
    """
    from benchmarks.harness.results import describe_machine

    facts = describe_machine()
    for name in FACTS_OF_EACH_RESULT:
        del facts[name]
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


def refuse_saves_without_compiler(kills: list[Kill]) -> None:
    """Refuse kills in a save where a process can't be stopped in one.

    Raises:
        SystemExit: there is such a kill, and no Linux or no C compiler.
    """
    in_saves = [kill.label for kill in kills if kill.share is not None]
    if in_saves and compiler() is None:
        raise SystemExit(
            f"error: the kill {in_saves[0]} needs Linux and a C compiler: install gcc, or pass "
            "other --kills"
        )


def measure(
    contestant: Contestant, processes: int, kills: list[Kill], options: Options, results: Results
) -> None:
    """Kill and resume a contestant; keep results of the same code that are in the file."""
    from benchmarks.resume.digest import digest_of_measurement
    from benchmarks.resume.measuring import Reference, compare
    from benchmarks.resume.report import HEADINGS, detail_row
    from benchmarks.resume.training import train

    code = digest_of_measurement(contestant)
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
            outcome = train_with_kill(contestant, kill, processes, folder, title)
            result = compare(contestant, kill, processes, outcome, reference)
        results.results[result.key] = result
        results.write()
        cells = zip(HEADINGS[3:], detail_row(result)[3:], strict=True)
        print(f"  {', '.join(f'{name}: {cell}' for name, cell in cells if cell)}", flush=True)


def train_with_kill(
    contestant: Contestant, kill: Kill, processes: int, folder: Path, title: str
) -> Outcome:
    """Kill and resume a training; repeat it if the kill missed its share of a checkpoint."""
    from benchmarks.resume.training import train

    number = 1
    outcome = train(contestant, kill, processes, new_folder(folder, title, "killed"))
    while kill.missed(outcome.written_shares) and number < TRIES_FOR_A_SHARE:
        number += 1
        print(f"  missed, with {outcome.written_shares} written: once more", flush=True)
        outcome = train(contestant, kill, processes, new_folder(folder, title, f"killed-{number}"))
    return outcome


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
    """Print both tables for a terminal, and all parts of the page in Markdown."""
    from benchmarks.resume import page, report

    print()
    print(report.as_text(report.HEADINGS, report.detail_rows(results)))
    print()
    print(report.as_text(report.SUMMARY_HEADINGS, report.summary_rows(results)))
    print(report.caption(results))
    print(page.provenance(results))
    print()
    print(report.detail_markdown(results))
    print()
    print(report.summary_markdown(results))
    print()
    print(page.peers_markdown(results))
    print()
    print(page.oddities_markdown(results))
    commands = report.commands_of_odd_kills(results)
    if commands:
        print("\nTo repeat what left a trace:")
        print("\n".join(commands))


if __name__ == "__main__":
    import tyro

    try:
        main(tyro.cli(Options))
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on with the results that are missing")
