"""Run variants of a recipe, each value of some flags with each of the others, and compare them:

python -m common.vary recipes/resnet.py --mixed-precision no,bf16 --batch-size 64,128 --seeds 3

Flags with choices `a,b,c` vary, and `--num-processes 1,2`; all others are shared. Each variant is a
normal run for each seed, in one directory and one W&B group; the first is the baseline. The same
command goes on where it was stopped, keeps what is finished, and adds what `--seeds` asks for.
"""

import argparse
import hashlib
import itertools
import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import mean, stdev

from optuna.distributions import CategoricalDistribution

from common.command_line import tool_parser
from common.compare.comparison import compare
from common.compare.readers import read_runs
from common.compare.table import arranged, markdown_table, print_table, shown, warnings
from common.console import CONSOLE, say, spare_output
from common.errors import UserError
from common.files import read_json_if_there, write_json, write_text
from common.platforms import shown_path
from common.recipe import load_recipe
from common.standing import present_status
from common.track.names import precision_name
from common.tune.space import command_words, parse_space
from common.tune.trial import TrialRun, launched, working_in


def main(words: Sequence[str] | None = None) -> None:
    given, flags = read_command_line(list(sys.argv[1:] if words is None else words))
    space, shared = parse_space(flags, load_recipe(Path(given.recipe)), least=0)
    for name, asked in space.items():
        if not isinstance(asked, CategoricalDistribution):
            raise UserError(f"--{name}: give choices a,b,c: a range is for python -m common.tune")
    if given.seeds > 1 and ("seed" in space or "--seed" in shared):
        raise UserError(f"leave --seed out: --seeds {given.seeds} gives 0 to {given.seeds - 1}")
    processes = dict.fromkeys(given.num_processes.split(","))
    if given.seeds < 1 or not all(re.fullmatch("[1-9][0-9]{0,3}", n) for n in processes):
        raise UserError("--seeds takes 1 or more, and --num-processes numbers such as 1,2")
    all_words = [given.recipe, *flags, "--num-processes", given.num_processes]
    digest = hashlib.sha256(shlex.join(all_words).encode()).hexdigest()[:6]
    default = f"runs/vary-{Path(given.recipe).stem}-{digest}"
    directory = Path(given.output_dir or default).resolve()
    choices = [[(name, one) for one in asked.choices] for name, asked in space.items()]  # type: ignore[union-attr]
    grid = {
        name_of(count if len(processes) > 1 else "", dict(chosen)): (count, dict(chosen))
        for count, *chosen in itertools.product(processes, *choices)
    }
    if len(grid) < math.prod(map(len, (processes, *choices))):
        raise UserError("two variants would have one name: give values that differ in letters")
    done: dict[str, list[str]] = {}
    with working_in(directory, "--output-dir", "the same command"):
        kept = read_json_if_there(directory / "vary.json")
        if kept != {"asked": all_words} and {*os.listdir(directory)} - {".lock"}:
            raise UserError(f"{directory} holds something else: name another --output-dir")
        write_json(directory / "vary.json", {"asked": all_words})
        say(f"variants: {len(grid)}, of each {given.seeds} seeds, in {shown_path(directory)}")
        for seed, (name, (count, chosen)) in itertools.product(range(given.seeds), grid.items()):
            place = directory / (f"{name}-seed-{seed}" if seed else name)
            variant = [*command_words(space, chosen), *shared]
            variant += ["--seed", str(seed)] if seed else []
            several = ["--multi_gpu", "--num_processes", count, "--main_process_port", "0"]
            options = several if count != "1" else []
            command = launched(options, given.recipe, variant, place)
            with CONSOLE.status(place.name) as shown, closing(TrialRun(command, place)) as run:
                for one in run.follow():
                    steps = f"{one.last_step} of {one.fact('plan.total_steps')} updates"
                    shown.update(f"{place.name}  {steps}")
            status = present_status(place).get("status", "failed")
            is_finished = status == "finished"
            ended = "failed" if status == "running" else status
            say(f"{place.name}  {'finished' if is_finished else f'{ended}: {run.reason()}'}")
            if is_finished:
                done.setdefault(name, []).append(str(place))
    report(directory, done)
    if missing := len(grid) * given.seeds - sum(map(len, done.values())):
        raise UserError(f"{missing} runs failed, as said above: the same command tries them again")


def read_command_line(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    usage = "%(prog)s RECIPE [--FLAG VALUE | a,b,c ...] [options]"
    parser = tool_parser("common.vary", __doc__, usage)
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each variant")
    parser.add_argument("--num-processes", default="1", metavar="N,M", help="of accelerate launch")
    parser.add_argument("--output-dir", metavar="DIR", help="default: runs/vary-RECIPE-…")
    given, flags = parser.parse_known_args(words)
    if flags and words.index(flags[0]) < words.index(given.recipe):
        raise UserError("name the recipe before its flags, such as recipes/resnet.py")
    return given, flags


def name_of(count: str, chosen: dict[str, str]) -> str:
    """Return a variant's name: its values, with the flag where the value says nothing."""
    said = {"true": "{}", "false": "no-{}", "no": "{}-no", "yes": "{}", "auto": "{}-auto"}
    parts = [
        precision_name(value) if flag == "mixed-precision" else said.get(value, value).format(flag)
        for flag, value in chosen.items()
    ]
    parts += [f"{count}-processes"] if count else []
    return re.sub(r"[^\w.+-]+", "-", "_".join(parts)) or "alone"


def report(directory: Path, done: dict[str, list[str]]) -> None:
    """Show means over seeds, their standard deviations, and ratios to the first variant."""
    from common.compare.plot import plot_comparison

    seeds = max(map(len, done.values()), default=0)
    whole = {name: places for name, places in done.items() if len(places) == seeds}
    if not whole:
        raise UserError("no variant finished: nothing to compare")
    comparisons = [compare(read_runs(places)) for places in zip(*whole.values(), strict=True)]
    rows = [["" if seeds == 1 else f"mean ± deviation of {seeds} seeds", *whole]]
    for same in zip(*map(shown, comparisons), strict=True):
        (metric, _, _, ratio), cells = same[0], list[str]()
        by_variant = zip(*(values for _, values, _, _ in same), strict=True)
        known = [[value for value in values if value is not None] for values in by_variant]
        means = [mean(values) if values else None for values in known]
        for values, middle in zip(known, means, strict=True):
            spread = f" ± {metric.text(stdev(values))}" if len(values) > 1 else ""
            compares = cells and (ratio or metric.panel == "Energy")
            times = f" ({middle / means[0]:.2f}×)" if compares and middle and means[0] else ""
            cells.append(metric.text(middle) + spread + times)
        if any(cell != metric.text(None) for cell in cells):
            rows.append([metric.heading, *cells])
    for warning in warnings(comparisons[0]):
        say(f"to be compared with care: {warning}")
    print_table(arranged(rows))
    write_text(directory / "table.md", "\n".join(markdown_table(arranged(rows))) + "\n")
    for column, places in enumerate(whole.values() if seeds > 1 else (), start=1):
        own = [[row[0], row[column].partition(" (")[0]] for row in rows]
        add_to_cards(places, "\n".join(markdown_table(own)))
    plot_comparison(comparisons[0], directory / "picture.png")
    say(f"table: {shown_path(directory / 'table.md')}, with picture.png beside it")


def add_to_cards(places: list[str], table: str) -> None:
    """Have the model cards of one variant's runs say how much the figures vary with the seed."""
    heading = "\n## The same with other seeds\n"
    for card in (Path(place, "model", "README.md") for place in places):
        if card.exists():
            own, _, _ = card.read_text(encoding="utf-8").partition(heading)
            write_text(card, f"{own}{heading}\n{table}\n")


if __name__ == "__main__":
    spare_output()  # the variants outlive the terminal
    main()
