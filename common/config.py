"""From a dataclass to the command line and back: shared flags, validation, `--config FILE`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from common.directory import refuse_to_resume
from common.errors import UserError, is_main_rank, let_main_rank_exit_first
from common.resume import from_json, resumed_config

# A password or token before a host: https://user:TOKEN@host, https://TOKEN@host, user:TOKEN@host.
CREDENTIALS = re.compile(r":(//)?[^/\s]*@")

ConfigType = TypeVar("ConfigType", bound="TrainingConfig")

# These say where and how one run is carried out, not what it computes: `--config` leaves them.
NOT_REPEATED = {"config", "evaluate_only", "output_dir", "resume", "run_name", "notes", "profile"}

# Least and most for the numbers of all recipes; not every recipe has every one.
LARGEST = 1e300
LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(["batch_size", "gradient_accumulation_steps", "log_every"], (1, LARGEST)),
    **dict.fromkeys(
        ["epochs", "max_steps", "eval_every", "hidden_sizes", "image_size"], (1, LARGEST)
    ),
    **dict.fromkeys(["learning_rate", "weight_decay", "warmup_steps"], (0, LARGEST)),
    **dict.fromkeys(["max_grad_norm", "num_workers"], (0, LARGEST)),
    **dict.fromkeys(["target_accuracy", "dropout", "label_smoothing"], (0, 1)),
    "validation_share": (0.001, 0.9),
    **dict.fromkeys(["checkpoint_every", "keep_checkpoints", "collective_timeout"], (1, LARGEST)),
    "max_length": (4, LARGEST),
    "vocabulary_size": (100, LARGEST),
    "seed": (0, 2**32 - 1),
}


@dataclass(kw_only=True)
class TrainingConfig:
    """The flags that every recipe has, with the same meaning in each."""

    dataset: str = "auto"  # Name, Hub id or local folder; auto: public if at hand, else built in.
    dataset_config: str | None = None  # Configuration of a Hub data set, such as sst2 of glue.
    label_column: str | None = None  # Column of the labels, where it can't be found by its type.
    validation_share: float | None = None  # Hold out of train if there is no validation split.
    init_from: str | None = None  # Run or model folder to take the initial weights from.

    epochs: int | None = None  # Passes over the training data (default: by data set).
    max_steps: int | None = None  # End after this many optimizer updates.
    batch_size: int = 128  # Samples per process and micro-batch.
    gradient_accumulation_steps: int = 1  # Micro-batches per optimizer update.
    auto_batch_size: bool = False  # Halve the batch until it fits, with more accumulation.
    learning_rate: float | None = None  # Peak learning rate (default: by recipe and data set).
    weight_decay: float = 0.01  # Decay of weight matrices; biases and norms have none.
    warmup_steps: int | None = None  # Updates of linear warm-up (default: a share of the run).
    max_grad_norm: float = 1.0  # Clip the gradient's global L2 norm to this; 0 turns it off.

    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"  # Precision of the arithmetic.
    compile: bool = False  # Compile the model with torch.compile.
    gradient_compression: Literal["no", "fp16", "bf16"] = "no"  # Gradients' type between processes.
    gradient_checkpointing: bool = False  # Recompute activations: less memory, more time.
    seed: int = 0  # Seed of initial weights, sample order, augmentation and dropout.
    deterministic: bool = False  # Only deterministic kernels: the same bits in every run.
    num_workers: int | None = None  # Loader processes where data does not live on the device.
    data_placement: Literal["auto", "device", "workers"] = "auto"  # Where batches are made.

    output_dir: str | None = None  # Directory of the run (default: runs/RECIPE-TIMESTAMP).
    checkpoint_every: int | None = None  # Updates between checkpoints, besides each epoch's end.
    keep_checkpoints: int = 2  # Newest checkpoints to keep.
    resume: str | None = None  # auto, a run or a checkpoint: go on where it stopped.
    log_every: int = 50  # Updates between log lines.
    eval_every: int | None = None  # Updates between evaluations (default: each epoch).
    collective_timeout: int = 180  # Seconds after which a rank that hangs ends the job.
    target_accuracy: float | None = None  # Exit with an error if the final accuracy is below.
    evaluate_only: bool = False  # Evaluate the model of --init-from, without training.

    tracker: Literal["wandb", "tensorboard", "none"] = "wandb"  # Where metrics go, besides files.
    project: str = "accelerate-recipes"  # Project of the run at the tracker.
    run_name: str | None = None  # Name of the run (default: that of its directory).
    group: str | None = None  # Group of the run at the tracker, such as one of seeds.
    tags: tuple[str, ...] = ()  # Tags of the run at the tracker, besides those it gets by itself.
    notes: str | None = None  # What this run is for, shown beside it at the tracker.
    log_model: bool = False  # Keep the final model at the tracker too, as an artifact.
    profile: bool = False  # Profile some updates: a trace, tables, a picture and a verdict.
    config: str | None = None  # A config.json of an earlier run to repeat; flags override it.

    def validate(self) -> None:
        """Reject impossible values before any data or model is loaded.

        Raises:
            UserError: naming the first flag whose value can't work, and what would.
        """
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name, None)
            for number in value if isinstance(value, tuple) else [value]:
                if isinstance(number, str):
                    raise UserError(f"--{name.replace('_', '-')} {number} can't work: no number")
                if number is not None and not least <= number <= most:
                    raise UserError(
                        f"--{name.replace('_', '-')} {number} can't work: give "
                        + (f"{least} or more" if most == LARGEST else f"{least} to {most}")
                    )
        if self.evaluate_only and self.init_from is None:
            raise UserError("--evaluate-only needs a model: add --init-from runs/NAME")


def parse_config(config_class: type[ConfigType], description: str | None = None) -> ConfigType:
    """Read the command line into `config_class`, over a `--config` file if one is given.

    Args:
        config_class: a dataclass whose fields are the flags.
        description: the recipe's docstring; its first paragraph heads `--help`.
    Raises:
        UserError: for an unreadable file or an impossible value, or one that holds a secret.
        SystemExit: from tyro, for an unknown flag (with the nearest match) or a wrong type.
    """
    refuse_credentials(sys.argv[1:])
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("config", "init-from", "resume", "output-dir"):
        early.add_argument(f"--{flag}", f"--{flag.replace('-', '_')}")
    early.add_argument("--evaluate-only", "--evaluate_only", action="store_true")
    try:
        given = early.parse_known_args()[0]
    except argparse.ArgumentError:  # a flag without its value: tyro says it better
        given = early.parse_args([])
    evaluated = Path(given.init_from or "", "config.json") if given.evaluate_only else Path()
    saved = None

    def parse(defaults: ConfigType | None) -> ConfigType:
        import tyro

        return tyro.cli(
            config_class,
            default=defaults or saved or config_class(),
            description=(description or "").split("\n\n")[0],
            console_outputs=is_main_rank(),
        )

    try:
        if given.config is not None or evaluated.is_file():
            saved = read_config(config_class, Path(given.config or evaluated))
        if given.resume is not None:
            recipe = Path(sys.argv[0]).stem
            config = resumed_config(parse, given.resume, given.output_dir, recipe)
        else:
            config = parse(None)
        config.validate()
    except SystemExit as end:
        if end.code:
            run = given.output_dir if given.resume == "auto" else given.resume
            if run is not None:
                refuse_to_resume(Path(run), getattr(end, "message", "a flag of another kind"))
            let_main_rank_exit_first()
        raise
    return config


def refuse_credentials(words: list[str]) -> None:
    """Refuse a command line with a secret in it, before any message or file can repeat it.

    Raises:
        UserError: naming the flag, not its value.
    """
    for before, word in zip(["", *words], words, strict=False):
        if CREDENTIALS.search(word):
            flag = word if word.startswith("--") else before
            raise UserError(
                f"{flag.split('=')[0]} holds a user's name or token: pass a name or a local "
                "folder, and the token in the environment, as HF_TOKEN"
            )


def read_config(config_class: type[ConfigType], path: Path) -> ConfigType:
    """Build a config from the `config.json` of an earlier run.

    Raises:
        UserError: when the file is missing, is not such a file, or belongs to another recipe.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        saved = json.loads(path.read_text())
        values: dict[str, Any] = saved["config"]
        assert isinstance(values, dict)
    except FileNotFoundError:
        raise UserError(f"--config {path} does not exist: pass a run's config.json") from None
    except (ValueError, KeyError, TypeError, AssertionError, OSError) as problem:
        raise UserError(
            f"{path} is not the config.json of a run ({type(problem).__name__}): "
            "pass one that a recipe wrote"
        ) from None
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise UserError(
            f"{path} has {', '.join(unknown)}, which this recipe has not: "
            "it belongs to another recipe or version"
        )
    recipe, missing = saved.get("recipe"), sorted(set(fields) - set(values))
    if missing and recipe not in (None, Path(sys.argv[0]).stem):
        raise UserError(f"{path} belongs to another recipe, {recipe}: it lacks {missing[0]}")
    kept = {name: value for name, value in values.items() if name not in NOT_REPEATED}
    return config_class(**from_json(kept))
