"""The contestants that are killed and resumed: the recipe, and peers as documented.

This module imports no library.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import REPOSITORY
from benchmarks.resume.attempt import RUN_FOLDER, Attempt
from benchmarks.resume.schedule import BATCH

LOOPS = Path(__file__).resolve().parent / "loops"
CONFIGURATION = REPOSITORY / "accelerate_configs" / "multi_cpu.yaml"
Command = list[str]


@dataclass(frozen=True)
class Contestant:
    """A framework with its settings.

    Attributes:
        script: in the folder `loops`.
        variant: of the script's settings.
        pages: addresses of the documentation that it follows, with "{package}" for a version.
        measured_packages: those whose versions are under test.
        packages: names as they are imported; without them the contestant can't run.
        needs_path: whether a resumed training is given the path of a checkpoint.
        newest_checkpoint: returns the checkpoint in a run's folder that its user would resume from.
        logged_steps: returns the steps of the rows that the training left in its folder.
    """

    name: str
    script: str
    source: str
    settings: str
    newest_checkpoint: Callable[[Path], Path | None]
    logged_steps: Callable[[Path], list[int]]
    pages: tuple[str, ...] = ()
    measured_packages: tuple[str, ...] = ()
    variant: str = "default"
    packages: tuple[str, ...] = ()
    needs_path: bool = False
    is_ours: bool = False
    starts_its_processes: bool = False

    def pages_of(self, versions: Mapping[str, str]) -> list[str]:
        """Return the addresses of the documentation for the versions of installed packages."""
        missing = set(self.measured_packages) - versions.keys()
        known = {**versions, **dict.fromkeys(missing, "main")}
        # torchdata's pages have no patch number.
        known["torchdata_minor"] = known.get("torchdata", "main").rpartition(".")[0]
        return [page.format_map(known) for page in self.pages]

    def command(self, folder: Path, attempt: Attempt, processes: int, port: int) -> Command:
        """Return the command of an attempt.

        Args:
            port: a free one, for the processes to meet.
        """
        script = str(LOOPS / self.script)
        if self.is_ours:
            return recipe_command(script, folder, attempt, processes, port)
        words = [script, str(folder)]
        if self.starts_its_processes:
            return [sys.executable, *words, str(processes)]
        if processes == 1:
            return [sys.executable, *words]
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        return [sys.executable, *torchrun, "--master-port", str(port), *words]


def recipe_command(
    script: str, folder: Path, attempt: Attempt, processes: int, port: int
) -> Command:
    """Return the command of the recipe; `--resume` repeats the other flags."""
    directory = str(folder / RUN_FOLDER)
    words = [sys.executable]
    if processes > 1:
        words += ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGURATION)]
        words += ["--num_processes", str(processes), "--main_process_port", str(port)]
    words.append(script)
    if attempt.is_resumed:
        return [*words, "--resume", attempt.checkpoint or directory]
    flags = {
        "--output-dir": directory,
        "--batch-size": str(BATCH // processes),
        "--log-every": "1",
        "--mixed-precision": "no",
        "--num-workers": "0",
        "--tracker": "none",
    }
    return [*words, *(word for pair in flags.items() for word in pair)]


# ------------------------------------------------------------------- Checkpoints of each format


def newest_by_time(folder: Path) -> Path | None:
    """Return the folder step_* that changed last, as Accelerate's example sorts them."""
    checkpoints = list(folder.glob("step_*"))
    return max(checkpoints, key=lambda path: path.stat().st_ctime_ns, default=None)


def newest_by_number(folder: Path) -> Path | None:
    """Return the folder step_* with the greatest number."""
    return max(folder.glob("step_*"), key=lambda path: int(path.name[5:]), default=None)


def newest_of_trainer(folder: Path) -> Path | None:
    """Return the newest checkpoint of HF Trainer."""
    checkpoints = folder.glob("checkpoint-*")
    return max(checkpoints, key=lambda path: int(path.name.partition("-")[2]), default=None)


def newest_of_lightning(folder: Path) -> Path | None:
    """Return the file of Lightning that changed last; `last.ckpt` if it is as new as another."""
    checkpoints = (folder / "checkpoints").glob("*.ckpt")
    return max(
        checkpoints,
        key=lambda path: (path.stat().st_mtime_ns, path.name.startswith("last")),
        default=None,
    )


def newest_of_recipe(folder: Path) -> Path | None:
    """Return the newest checkpoint of the recipe that has its final name."""
    checkpoints = (folder / "checkpoints").glob("step-*")
    complete = [path for path in checkpoints if path.name[5:].isdigit()]
    return max(complete, key=lambda path: int(path.name[5:]), default=None)


# ------------------------------------------------------------------------------ Logged rows


def steps_of_tracker(folder: Path) -> list[int]:
    """Return the steps in the JSON lines of the tracker for Accelerate."""
    return [row["step"] for row in json_lines(folder / "rows.jsonl")]


def steps_of_trainer(folder: Path) -> list[int]:
    """Return the steps of the losses in the log history of HF Trainer."""
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    return [row["step"] for row in state["log_history"] if "loss" in row]


def steps_of_lightning(folder: Path) -> list[int]:
    """Return the steps of the training losses in all versions of the CSV log."""
    steps = []
    for path in sorted((folder / "lightning_logs").glob("version_*/metrics.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            steps += [int(row["step"]) for row in csv.DictReader(file) if row.get("train_loss")]
    return steps


def steps_of_recipe(folder: Path) -> list[int]:
    """Return the steps of the training losses in `metrics.jsonl`."""
    rows = json_lines(folder / "metrics.jsonl")
    return [row["progress/global_step"] for row in rows if "train/loss" in row]


def json_lines(path: Path) -> list[dict[str, int]]:
    """Return the objects of a file with one on each line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# -------------------------------------------------------------------------------- Everyone

ACCELERATE = "https://github.com/huggingface/accelerate/blob/v{accelerate}"
ACCELERATE_GUIDES = "https://huggingface.co/docs/accelerate/v{accelerate}"
TRANSFORMERS = "https://github.com/huggingface/transformers/blob/v{transformers}"
TRANSFORMERS_GUIDES = "https://huggingface.co/docs/transformers/v{transformers}"
LIGHTNING_GUIDES = "https://lightning.ai/docs/pytorch/{lightning}"
EXAMPLE = "huggingface/accelerate, examples/by_feature/checkpointing.py"
EXAMPLE_PAGES = (f"{ACCELERATE}/examples/by_feature/checkpointing.py",)
GUIDE_PAGES = (
    f"{ACCELERATE_GUIDES}/usage_guides/checkpoint",
    f"{ACCELERATE_GUIDES}/package_reference/utilities",
)
GLUE_PAGES = (f"{TRANSFORMERS}/examples/pytorch/text-classification/run_glue_no_trainer.py",)
TRAINER_PAGES = (f"{TRANSFORMERS_GUIDES}/main_classes/trainer",)
LIGHTNING_ADDRESSES = (
    f"{LIGHTNING_GUIDES}/common/checkpointing_basic.html",
    f"{LIGHTNING_GUIDES}/common/checkpointing_intermediate.html",
)
STATEFUL_PAGE = "https://docs.pytorch.org/data/{torchdata_minor}/torchdata.stateful_dataloader.html"
GUIDES = (
    "huggingface/accelerate, docs/source/usage_guides/checkpoint.md and the docstring of "
    "DataLoaderConfiguration"
)
LIGHTNING_PAGES = (
    "lightning.ai/docs: Saving and loading checkpoints (basic), Customize checkpointing behavior "
    "(intermediate), ModelCheckpoint, seed_everything"
)
CONTESTANTS = (
    Contestant(
        name="recipe",
        script="recipe.py",
        source="this repository, recipes/mnist_mlp.py",
        settings="default flags, and --resume",
        newest_checkpoint=newest_of_recipe,
        logged_steps=steps_of_recipe,
        is_ours=True,
    ),
    Contestant(
        name="Accelerate, checkpointing.py",
        script="accelerate_loop.py",
        variant="example",
        source=EXAMPLE,
        pages=EXAMPLE_PAGES,
        measured_packages=("accelerate",),
        settings="set_seed; --checkpointing_steps 8, --resume_from_checkpoint with the folder that "
        "changed last, as the example sorts them; skip_first_batches",
        newest_checkpoint=newest_by_time,
        logged_steps=steps_of_tracker,
        needs_path=True,
    ),
    Contestant(
        name="Accelerate, stateful loader",
        script="accelerate_loop.py",
        variant="stateful",
        source=EXAMPLE,
        pages=(*EXAMPLE_PAGES, STATEFUL_PAGE),
        measured_packages=("accelerate", "torchdata"),
        settings="as checkpointing.py, with its flag --use_stateful_dataloader",
        newest_checkpoint=newest_by_time,
        logged_steps=steps_of_tracker,
        packages=("torchdata",),
        needs_path=True,
    ),
    Contestant(
        name="Accelerate, guide",
        script="accelerate_loop.py",
        variant="guide",
        source=GUIDES,
        pages=GUIDE_PAGES,
        measured_packages=("accelerate",),
        settings="set_seed; use_seedable_sampler with data_seed; set_epoch in each epoch; the "
        "position saved by register_for_checkpointing; skip_first_batches; the folder with the "
        "greatest number",
        newest_checkpoint=newest_by_number,
        logged_steps=steps_of_tracker,
        needs_path=True,
    ),
    Contestant(
        name="run_glue_no_trainer.py",
        script="glue_no_trainer.py",
        source="huggingface/transformers, examples/pytorch/text-classification/"
        "run_glue_no_trainer.py",
        pages=GLUE_PAGES,
        measured_packages=("accelerate", "transformers"),
        settings="--seed, --checkpointing_steps 8, --with_tracking (a row an epoch), "
        "--resume_from_checkpoint with the folder that changed last",
        newest_checkpoint=newest_by_time,
        logged_steps=steps_of_tracker,
        needs_path=True,
    ),
    Contestant(
        name="HF Trainer",
        script="hf_trainer.py",
        source="huggingface/transformers, docstrings of TrainingArguments and Trainer.train",
        pages=TRAINER_PAGES,
        measured_packages=("transformers", "accelerate"),
        settings="set_seed before the model is made; seed, data_seed; save_steps; the seedable "
        "sampler is its default; resume_from_checkpoint=True",
        newest_checkpoint=newest_of_trainer,
        logged_steps=steps_of_trainer,
        packages=("transformers",),
    ),
    Contestant(
        name="Lightning",
        script="lightning_trainer.py",
        source=LIGHTNING_PAGES,
        pages=LIGHTNING_ADDRESSES,
        measured_packages=("lightning",),
        settings="seed_everything(workers=True), deterministic=True; ModelCheckpoint("
        "every_n_train_steps, save_last=True, save_top_k=-1); CSVLogger that writes each row at "
        'once; ckpt_path="last"',
        newest_checkpoint=newest_of_lightning,
        logged_steps=steps_of_lightning,
        packages=("lightning",),
        starts_its_processes=True,
    ),
    Contestant(
        name="Lightning, stateful loader",
        script="lightning_trainer.py",
        variant="stateful",
        source=f"{LIGHTNING_PAGES}; docs.pytorch.org/data: StatefulDataLoader",
        pages=(*LIGHTNING_ADDRESSES, STATEFUL_PAGE),
        measured_packages=("lightning", "torchdata"),
        settings="as Lightning, with torchdata's StatefulDataLoader",
        newest_checkpoint=newest_of_lightning,
        logged_steps=steps_of_lightning,
        packages=("lightning", "torchdata"),
        starts_its_processes=True,
    ),
)
