"""The suites whose contestants run in fresh processes: start-up, memory, two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import REPOSITORY
from benchmarks.harness.contestants import (
    BATCH_SIZE,
    cached_split,
    decoded_folder,
    read_images,
)
from benchmarks.harness.fresh_process import (
    FreshProcess,
    peak_mebibytes,
    run_fresh,
    seconds_to_marker,
)
from benchmarks.harness.materials import (
    bert_checkpoint,
    describe_checkpoint,
    image_dataset,
    text_extract,
)
from benchmarks.harness.options import Options
from benchmarks.harness.recipe_side import load_recipe
from benchmarks.harness.rounds import Comparison, Contestant, Measurement, Round, Suite
from common.data.images import ImageData

TEXT_BATCH_SIZE = 32
TEXT_SAMPLES = 384
FIRST_STEP = "step 1/1 "  # what a recipe prints after its only update
DATASET_OF = {"mnist_mlp": "mnist", "resnet": "cifar10"}
CommandMaker = Callable[[Path], list[str]]  # from a folder for the files that the command writes


def fresh_contestant(
    command: CommandMaker, marker: str, measure: Callable[[FreshProcess], float]
) -> Contestant:
    """Make a contestant of a process that is started anew each round.

    Args:
        marker: part of the line that the process prints when it has done the measured work.
        measure: returns the figure of the finished process.
    """

    def compete(turn: Round) -> Measurement:
        with tempfile.TemporaryDirectory() as folder:
            return Measurement(measure(run_fresh(command(Path(folder)), marker)))

    return compete


def recipe_command(recipe: str, options: Options, updates: int, **flags: object) -> CommandMaker:
    """Return a function that makes the command line of a recipe."""

    def command(folder: Path) -> list[str]:
        words = [sys.executable, str(REPOSITORY / "recipes" / f"{recipe}.py")]
        own_flags = {"max_steps": updates, "tracker": options.tracker, "output_dir": folder / "run"}
        for name, value in {**own_flags, **flags}.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        return words

    return command


def peer_command(work: str, **arguments: object) -> CommandMaker:
    """Return a function that makes the command line of `fresh_peer.py`."""
    words = [sys.executable, str(Path(__file__).with_name("fresh_peer.py")), work]
    return lambda folder: [*words, json.dumps(arguments, default=str)]


def model_arguments(recipe: str, data: ImageData) -> dict[str, object]:
    """Return the arguments with which `fresh_peer.py` builds a recipe's model."""
    module = load_recipe(recipe)
    model, description = module.build_model(module.Config(), data)
    path = REPOSITORY / "recipes" / f"{recipe}.py"
    return {"path": path, "class": type(model).__name__, "arguments": description["arguments"]}


@dataclass
class Pairs:
    """Contestants and their comparisons, collected pair by pair."""

    contestants: dict[str, Contestant] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)

    def add(
        self, title: str, ours: str, theirs: str, contestant: Contestant, goal: float | None = None
    ) -> None:
        """Add the contestant `theirs`, and its comparison with `ours`."""
        self.contestants[theirs] = contestant
        self.comparisons.append(Comparison(title, ours, theirs, at_most=goal))


def start_suite(options: Options) -> Suite:
    """Time from a process's start to the end of the first update, on data cached before."""
    checkpoint = bert_checkpoint(options.bert_checkpoint, large=options.on_gpu)
    pairs = Pairs()
    mnist = image_dataset(options.data, "mnist")
    add_image_starts(pairs, options, "mnist_mlp", "mnist_mlp", mnist, goal=1.5)
    add_image_starts(pairs, options, "resnet", "resnet", "digits", goal=1.5)
    cifar10 = image_dataset(options.data, "cifar10")
    if cifar10 != "digits":
        # An update of CIFAR-10's first batch takes longer than all imports, so that it says little
        # about the start; there is no goal.
        add_image_starts(pairs, options, "resnet, CIFAR-10", "resnet", cifar10, goal=None)
    add_bert_start(pairs, options, checkpoint)
    return Suite(
        "start",
        "s",
        updates=1,
        workload={"tracker": options.tracker, "bert": describe_checkpoint(checkpoint)},
        contestants=pairs.contestants,
        comparisons=pairs.comparisons,
        notes=[
            "import and build: torch and accelerate are imported and the same model is built",
            "a bare update: plain torch on random numbers; the first step of any optimizer of "
            "torch 2.13 imports torch._dynamo",
        ],
        warmup_updates=1,
    )


def add_image_starts(
    pairs: Pairs, options: Options, title: str, recipe: str, dataset: str, goal: float | None
) -> None:
    """Add an image recipe's start, and the starts that it is compared with.

    Args:
        goal: for the ratio to importing the libraries and building the model.
    """
    data = read_images(dataset)
    model = model_arguments(recipe, data)
    command = recipe_command(recipe, options, 1, dataset=dataset)
    pairs.contestants[title] = fresh_contestant(command, FIRST_STEP, seconds_to_marker)
    build = f"import and build {title}"
    command = peer_command("build", **model)
    contestant = fresh_contestant(command, "built", seconds_to_marker)
    pairs.add(f"start of {title} / {build}", title, build, contestant, goal)
    if options.on_gpu:  # the bare update runs on the CPU
        return
    shape = (BATCH_SIZE, data.channels, data.image_size, data.image_size)
    update = f"the same and a bare update, {title}"
    command = peer_command("update", **model, input_shape=shape)
    contestant = fresh_contestant(command, "built", seconds_to_marker)
    pairs.add(f"start of {title} / {update}", title, update, contestant)


def add_bert_start(pairs: Pairs, options: Options, checkpoint: Path) -> None:
    """Add the BERT recipe's start, and that of loading the checkpoint alone."""
    folder = text_extract(options.data, TEXT_SAMPLES)
    command = recipe_command("bert", options, 1, dataset=folder, model=checkpoint)
    pairs.contestants["bert"] = fresh_contestant(command, FIRST_STEP, seconds_to_marker)
    command = peer_command("load", checkpoint=checkpoint)
    contestant = fresh_contestant(command, "built", seconds_to_marker)
    pairs.add("start of bert / import and load", "bert", "import and load bert", contestant)


def memory_suite(options: Options) -> Suite:
    """Peak resident memory of a fresh process that trains, on data cached before."""
    pairs = Pairs()
    workload = {recipe: add_image_memory(pairs, options, recipe) for recipe in DATASET_OF}
    add_bert_memory(pairs, options)
    return Suite(
        "memory",
        "MiB",
        updates=1,
        workload=workload,
        contestants=pairs.contestants,
        comparisons=pairs.comparisons,
        notes=[
            "peak resident set of the whole process; the recipe maps its data set from disk, so "
            "that a short run does not count what it did not touch: at most the whole "
            "data set (`data_set_mebibytes`)",
        ],
    )


def add_image_memory(pairs: Pairs, options: Options, recipe: str) -> dict[str, object]:
    """Add an image recipe's memory and that of textbook loops; return the recipe's workload."""
    dataset = image_dataset(options.data, DATASET_OF[recipe])
    data = read_images(dataset)
    images = cached_split(data, "train").images
    epoch = len(images) // BATCH_SIZE
    updates = options.scaled(epoch if recipe == "mnist_mlp" else min(epoch, 4))
    ours = f"{recipe} recipe"
    command = recipe_command(recipe, options, updates, dataset=dataset, batch_size=BATCH_SIZE)
    last_step = f"step {updates}/{updates} "
    pairs.contestants[ours] = fresh_contestant(command, last_step, peak_mebibytes)
    precision = options.precision
    # Without duplicates: the chosen precision may be fp32.
    peers = dict.fromkeys(
        (("accelerate", precision), ("pytorch", precision), ("accelerate", "fp32"))
    )
    for framework, peer_precision in peers:
        theirs = f"{recipe} {framework} {peer_precision}"
        command = peer_command(
            "textbook",
            **model_arguments(recipe, data),
            framework=framework,
            precision=peer_precision,
            updates=updates,
            batch_size=BATCH_SIZE,
            folder=decoded_folder(data),
            crop_padding=data.image_size // 8 if recipe == "resnet" else 0,
        )
        contestant = fresh_contestant(command, "trained", peak_mebibytes)
        pairs.add(f"peak memory: {ours} / {theirs}", ours, theirs, contestant, goal=1.0)
    return {
        "data": data.source.name,
        "updates": updates,
        "data_set_mebibytes": images.nbytes / 2**20,
    }


def add_bert_memory(pairs: Pairs, options: Options) -> None:
    """Add the BERT recipe's memory and that of HF Trainer."""
    folder = text_extract(options.data, TEXT_SAMPLES)
    checkpoint = bert_checkpoint(options.bert_checkpoint, large=options.on_gpu)
    updates = TEXT_SAMPLES // TEXT_BATCH_SIZE
    ours = "bert recipe"
    command = recipe_command(
        "bert", options, updates, dataset=folder, model=checkpoint, batch_size=TEXT_BATCH_SIZE
    )
    last_step = f"step {updates}/{updates} "
    pairs.contestants[ours] = fresh_contestant(command, last_step, peak_mebibytes)
    precision = options.precision
    theirs = f"bert HF Trainer dynamic {precision}"
    task = {"folder": folder, "checkpoint": checkpoint, "padded": False, "precision": precision}
    command = peer_command("trainer", updates=updates, task=task)
    contestant = fresh_contestant(command, "trained", peak_mebibytes)
    pairs.add(f"peak memory: {ours} / {theirs}", ours, theirs, contestant, goal=1.0)


@dataclass
class DistributedSuite(Suite):
    """A suite whose rounds run in two processes, both contestants in one process group."""

    request: dict[str, object] = field(default_factory=dict)  # see `two_ranks.Request`

    def run(self, rounds: int, announce: Callable[[str], None]) -> None:
        """Launch `two_ranks.py` with torchrun, and read the measurements of its first rank."""
        began = time.perf_counter()
        announce(f"{self.name}: {rounds} rounds in two processes")
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "measurements.json")
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            counts = {"updates": self.updates, "warmup_updates": self.warmup_updates}
            counts["rounds"] = rounds * self.rounds_for_one
            arguments = json.dumps({**self.request, **counts, "output": str(output)})
            subprocess.run(
                [sys.executable, *launcher, "-m", "benchmarks.suites.two_ranks", arguments],
                cwd=REPOSITORY,
                # torchrun would set this with a warning; the contestants then choose their threads.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=True,
            )
            measured = json.loads(output.read_text(encoding="utf-8"))
        self.measurements = {
            name: [Measurement(**figures) for figures in rounds]
            for name, rounds in measured.items()
        }
        self.seconds = time.perf_counter() - began


def ddp_suite(options: Options) -> Suite:
    """Compare the recipe in two gloo processes with a loop by hand, both with accumulation 4."""
    dataset = image_dataset(options.data, "mnist")
    data = read_images(dataset)  # decodes the images before two processes need them
    workload = {
        # An update takes batch × accumulation × processes samples, and there are few digits.
        "batch_size": BATCH_SIZE if dataset != "digits" else BATCH_SIZE // 4,
        "accumulation": 4,
        "precision": options.precision,
        "tracker": options.tracker,
    }
    return DistributedSuite(
        "ddp",
        "samples/s",
        updates=options.scaled(120),
        workload={"data": data.source.name, **workload},
        request={"dataset": dataset, **workload},
        contestants={},
        comparisons=[
            Comparison("two processes: recipe / DDP by hand", "recipe", "DDP by hand", 0.95)
        ],
        notes=["the loop by hand clips gradients and steps a schedule too"],
        warmup_updates=options.scaled(10),
        rounds_for_one=3,
    )


def measurements_as_json(suite: Suite) -> dict[str, list[dict[str, float | None]]]:
    """Return a suite's measurements as plain values."""
    return {
        name: [asdict(measurement) for measurement in rounds]
        for name, rounds in suite.measurements.items()
    }
