"""The suites that need processes of their own: start-up, memory, two ranks."""

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
from typing import Any

from benchmarks.harness.contestants import BATCH_SIZE, decoded_folder, read_images
from benchmarks.harness.fresh_process import peak_mebibytes, run_fresh, seconds_to_marker
from benchmarks.harness.materials import (
    bert_checkpoint,
    describe_checkpoint,
    image_dataset,
    text_extract,
)
from benchmarks.harness.options import Options
from benchmarks.harness.recipe_side import REPOSITORY, load_recipe
from benchmarks.harness.rounds import Comparison, Contestant, Measurement, Round, Suite
from common.data.images import ImageData

TEXT_BATCH_SIZE = 32
TEXT_SAMPLES = 384
DATASET_OF = {"mnist_mlp": "mnist", "resnet": "cifar10"}


def fresh_contestant(
    command: Callable[[Path], list[str]], marker: str, measure: Callable[[Any], float]
) -> Contestant:
    """Make a contestant of a process started anew each round.

    Args:
        command: makes the command line, from a folder for what it writes.
        marker: in the line that says that the process has done what is measured.
    """

    def compete(asked: Round) -> Measurement:
        with tempfile.TemporaryDirectory() as folder:
            return Measurement(measure(run_fresh(command(Path(folder)), marker)))

    return compete


def recipe_command(recipe: str, options: Options, steps: int, **flags: object) -> Any:
    """Return a function that makes the command line of a recipe."""

    def command(folder: Path) -> list[str]:
        words = [sys.executable, str(REPOSITORY / "recipes" / f"{recipe}.py")]
        given = {"max_steps": steps, "tracker": options.tracker, "output_dir": folder / "run"}
        for name, value in {**given, **flags}.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        return words

    return command


def peer_command(work: str, **arguments: object) -> Any:
    """Return a function that makes the command line of `fresh_peer.py`."""
    words = [sys.executable, str(Path(__file__).with_name("fresh_peer.py")), work]
    return lambda folder: [*words, json.dumps(arguments, default=str)]


def model_arguments(recipe: str, data: ImageData) -> dict[str, Any]:
    """Return what `fresh_peer.py` needs to build a recipe's model."""
    module = load_recipe(recipe)
    model, description = module.build_model(module.Config(), data)
    path = REPOSITORY / "recipes" / f"{recipe}.py"
    return {"path": path, "class": type(model).__name__, "arguments": description["arguments"]}


def start(options: Options) -> Suite:
    """Time from a process's start to the end of the first update, on data cached before."""
    contestants: dict[str, Contestant] = {}
    comparisons = []
    folder = text_extract(options.data, TEXT_SAMPLES)
    checkpoint = bert_checkpoint(options.bert_checkpoint, large=options.on_gpu)
    marker = "step 1/1 "
    # The recipes' own choices on a CPU, with a goal; an update of CIFAR-10's first batch takes
    # longer than all imports, so it says little about the start.
    mnist, cifar10 = (image_dataset(options.data, name) for name in ("mnist", "cifar10"))
    data_sets: dict[str, tuple[str, float | None]] = {
        "mnist_mlp": (mnist, 1.5),
        "resnet": ("digits", 1.5),
    }
    if cifar10 != "digits":
        data_sets["resnet, CIFAR-10"] = (cifar10, None)
    for title, (dataset, goal) in data_sets.items():
        recipe = title.split(",")[0]
        command = recipe_command(recipe, options, 1, dataset=dataset)
        data = read_images(dataset)
        model = model_arguments(recipe, data)
        contestants[title] = fresh_contestant(command, marker, seconds_to_marker)
        theirs = f"import and build {title}"
        contestants[theirs] = fresh_contestant(
            peer_command("build", **model), "built", seconds_to_marker
        )
        comparisons.append(Comparison(f"start of {title} / {theirs}", title, theirs, at_most=goal))
        if options.on_gpu:
            continue
        shape = (BATCH_SIZE, data.channels, data.image_size, data.image_size)
        bare = f"the same and a bare update, {title}"
        contestants[bare] = fresh_contestant(
            peer_command("update", **model, input_shape=shape), "built", seconds_to_marker
        )
        comparisons.append(Comparison(f"start of {title} / {bare}", title, bare))
    command = recipe_command("bert", options, 1, dataset=folder, model=checkpoint)
    contestants["bert"] = fresh_contestant(command, marker, seconds_to_marker)
    contestants["import and load bert"] = fresh_contestant(
        peer_command("load", checkpoint=checkpoint), "built", seconds_to_marker
    )
    comparisons.append(
        Comparison("start of bert / import and load", "bert", "import and load bert")
    )
    return Suite(
        "start",
        "s",
        steps=1,
        workload={"tracker": options.tracker, "bert": describe_checkpoint(checkpoint)},
        contestants=contestants,
        comparisons=comparisons,
        notes=[
            "import and build: torch and accelerate are imported and the same model is built",
            "a bare update: plain torch on random numbers; the first step of any optimizer of "
            "torch 2.13 imports torch._dynamo",
        ],
        warmup_steps=1,
    )


def memory(options: Options) -> Suite:
    """Peak resident memory of a fresh process that trains, on data cached before."""
    chosen = options.precision
    contestants: dict[str, Contestant] = {}
    comparisons = []
    workload: dict[str, Any] = {}
    peers = dict.fromkeys((("accelerate", chosen), ("pytorch", chosen), ("accelerate", "fp32")))
    for recipe, name in DATASET_OF.items():
        dataset = image_dataset(options.data, name)
        data = read_images(dataset)
        images = data.splits["train"].images
        all_steps = len(images) // BATCH_SIZE
        steps = options.scaled(all_steps if recipe == "mnist_mlp" else min(all_steps, 4))
        workload[recipe] = {
            "data": data.source.name,
            "updates": steps,
            "data_set_mebibytes": images.nbytes / 2**20,
        }
        ours = f"{recipe} recipe"
        command = recipe_command(recipe, options, steps, dataset=dataset, batch_size=BATCH_SIZE)
        contestants[ours] = fresh_contestant(command, f"step {steps}/{steps} ", peak_mebibytes)
        for framework, precision in peers:
            theirs = f"{recipe} {framework} {precision}"
            command = peer_command(
                "textbook",
                **model_arguments(recipe, data),
                framework=framework,
                precision=precision,
                steps=steps,
                batch_size=BATCH_SIZE,
                folder=decoded_folder(data),
                crop_padding=data.image_size // 8 if recipe == "resnet" else 0,
            )
            contestants[theirs] = fresh_contestant(command, "trained", peak_mebibytes)
            comparisons.append(
                Comparison(f"peak memory: {ours} / {theirs}", ours, theirs, at_most=1.0)
            )
    folder = text_extract(options.data, TEXT_SAMPLES)
    checkpoint = bert_checkpoint(options.bert_checkpoint, large=options.on_gpu)
    steps = TEXT_SAMPLES // TEXT_BATCH_SIZE
    command = recipe_command(
        "bert", options, steps, dataset=folder, model=checkpoint, batch_size=TEXT_BATCH_SIZE
    )
    contestants["bert recipe"] = fresh_contestant(command, f"step {steps}/{steps} ", peak_mebibytes)
    theirs = f"bert HF Trainer dynamic {chosen}"
    task = {"folder": folder, "checkpoint": checkpoint, "padded": False, "precision": chosen}
    contestants[theirs] = fresh_contestant(
        peer_command("trainer", steps=steps, task=task), "trained", peak_mebibytes
    )
    comparisons.append(
        Comparison(f"peak memory: bert recipe / {theirs}", "bert recipe", theirs, at_most=1.0)
    )
    return Suite(
        "memory",
        "MiB",
        steps=1,
        workload=workload,
        contestants=contestants,
        comparisons=comparisons,
        notes=[
            "peak resident set of the whole process; the recipe maps its data set from disk, so "
            "what was not touched in a short run is not counted: at most data_set_mebibytes more",
        ],
    )


@dataclass
class DistributedSuite(Suite):
    """A suite whose rounds run in two processes, both contestants in one process group."""

    request: dict[str, Any] = field(default_factory=dict)  # see `benchmarks.suites.two_ranks`

    def run(self, rounds: int, announce: Callable[[str], None]) -> None:
        """Launch `two_ranks.py` with torchrun, and read what its first rank measured."""
        began = time.perf_counter()
        announce(f"{self.name}: {rounds} rounds in two processes")
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "measurements.json")
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            counts = {"steps": self.steps, "warmup_steps": self.warmup_steps}
            counts["rounds"] = rounds * self.rounds_for_one
            arguments = json.dumps({**self.request, **counts, "output": str(output)})
            subprocess.run(
                [sys.executable, *launcher, "-m", "benchmarks.suites.two_ranks", arguments],
                cwd=REPOSITORY,
                # What torchrun would set, with a warning; the contestants share the cores out.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=True,
            )
            measured = json.loads(output.read_text(encoding="utf-8"))
        self.measurements = {
            name: [Measurement(**one) for one in values] for name, values in measured.items()
        }
        self.seconds = time.perf_counter() - began


def ddp(options: Options) -> Suite:
    """Two gloo processes with accumulation 4 against a hand-written loop with `no_sync`."""
    dataset = image_dataset(options.data, "mnist")
    data = read_images(dataset)  # decoded here once, before two processes want it
    workload = {
        # An update takes batch × accumulation × processes samples, and the digits are few.
        "batch_size": BATCH_SIZE if dataset != "digits" else BATCH_SIZE // 4,
        "accumulation": 4,
        "precision": options.precision,
        "tracker": options.tracker,
    }
    return DistributedSuite(
        "ddp",
        "samples/s",
        steps=options.scaled(120),
        workload={"data": data.source.name, **workload},
        request={"dataset": dataset, **workload},
        contestants={},
        comparisons=[
            Comparison("two processes: recipe / DDP by hand", "recipe", "DDP by hand", 0.95)
        ],
        notes=["the loop by hand clips gradients and steps a schedule too"],
        warmup_steps=options.scaled(10),
        rounds_for_one=3,
    )


def measurements_as_json(suite: Suite) -> dict[str, list[dict[str, Any]]]:
    """Return a suite's measurements as plain values."""
    return {name: [asdict(one) for one in values] for name, values in suite.measurements.items()}
