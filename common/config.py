"""The flags that every recipe has: type, default, limits, role and help, each at its field.

The comment above or beside a field is the flag's help. `common.flags` describes limits and roles.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from common.command_line.freezing import Freezable
from common.command_line.parsing import parse_config
from common.errors import UserError
from common.flags import flag

__all__ = ["Precision", "RequestedPrecision", "TrainingConfig", "parse_config"]

Precision = Literal["no", "tf32", "bf16", "fp16"]  # no: fp32
RequestedPrecision = Literal["auto", Precision]

# Fields of flags that share a role or limits.
data = partial(flag, role="data")
pace = partial(flag, role="pace")
record = partial(flag, role="record")
once = partial(flag, role="once")
count = partial(flag, least=1, most=10**9)  # a larger number is a typing mistake


@dataclass(kw_only=True)
class TrainingConfig(Freezable):
    # Name, Hub id, folder or file; auto: the recipe's public data set if feasible, else built-in.
    dataset: str = data("auto")
    # Configuration of a Hub data set, such as sst2 of glue.
    dataset_config: str | None = data(None)
    label_column: str | None = data(None)  # Column of the labels, if it can't be inferred.
    # Share of train held out if validation is missing (default: 0.1 if train is the only split).
    validation_share: float | None = data(None, least=0, most=0.9)
    streaming: bool = data(False)  # Read parquet files while training, without a prepared copy.
    # Initial weights: a run, folder or safetensors file, or a Hub id such as timm/resnet18.a1_in1k.
    init_from: str | None = data(None)

    epochs: int | None = count(None)  # Passes over the training data (default: by data set).
    max_steps: int | None = count(None)  # End after this many optimizer updates.
    batch_size: int = count(128, role="pace")  # Samples per process and micro-batch.
    gradient_accumulation_steps: int = count(1, role="pace")  # Micro-batches per optimizer update.
    # Samples of an update over all processes; the accumulation follows from it.
    effective_batch_size: int | None = count(None, role="pace")
    # Choose the fastest micro-batch that fits into memory and makes the same updates.
    auto_batch_size: bool = False
    # Peak learning rate (default: by recipe and data set).
    learning_rate: float | None = flag(None, least=0)
    # Scale the learning rate with the samples of an update, relative to --base-batch-size.
    scale_learning_rate: Literal["no", "linear", "sqrt"] = "no"
    # Samples of an update that the learning rate is meant for (default: the recipe's batch size).
    base_batch_size: int | None = count(None)
    weight_decay: float = flag(0.01, least=0)  # Decay of weight matrices, not of biases and norms.
    # Updates of linear warm-up (default: a share of the run, by recipe).
    warmup_steps: int | None = count(None, least=0)
    # Shape of the learning rate after warm-up.
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    max_grad_norm: float = flag(1.0, least=0)  # Clip gradients' global L2 norm; 0 turns it off.

    # Precision of the arithmetic; no: fp32.
    mixed_precision: RequestedPrecision = "auto"
    compile: bool = False  # Compile the model with torch.compile.
    # Type in which gradients are sent between processes; no: not compressed.
    gradient_compression: Literal["no", "fp16", "bf16"] = "no"
    gradient_checkpointing: bool = False  # Recompute activations: less memory, more time.
    # Seed of weights, sample order, augmentation and dropout.
    seed: int = flag(0, least=0, most=2**32 - 1)
    deterministic: bool = False  # Only deterministic kernels: the same bits in every run.
    # Threads of a process on a CPU (default: its share of the cores).
    num_threads: int | None = pace(None, least=1, most=1024)
    # Worker processes that make batches, where samples are not in the device's memory (default: its
    # share of the cores, 8 at most).
    num_workers: int | None = pace(None, least=0, most=1024)
    # Make batches from samples in the device's memory, or in worker processes.
    data_placement: Literal["auto", "device", "workers"] = pace("auto")

    output_dir: str | None = once(None)  # Directory of the run (default: runs/RECIPE-TIMESTAMP).
    # Updates between checkpoints. An epoch also ends with a checkpoint if the last is 30 s old.
    checkpoint_every: int | None = count(None, role="pace")
    keep_checkpoints: int = count(2, role="record")  # Newest checkpoints to keep.
    # Run or checkpoint to continue; auto: the newest unfinished run, or a new one.
    resume: str | None = once(None)
    # Updates between log lines (default: by the run's length, at most 1,000 lines).
    log_every: int | None = count(None, role="pace")
    # Updates between evaluations (default: whole epochs, at most 20 evaluations in a run).
    eval_every: int | None = count(None, role="pace")
    # Seconds after which the job ends if a process hangs.
    collective_timeout: int = record(180, least=1, most=10**6)
    # Which model to export: that of the best evaluation, or that of the last update.
    keep: Literal["best", "last"] = "best"
    # Stop after this many evaluations in a row without an improvement.
    early_stopping: int | None = count(None)
    # End with an error if the final objective is worse than this.
    target: float | None = record(None)
    # Only evaluate the model of --init-from.
    evaluate_only: bool = flag(False, role="kind")

    # Where metrics go, besides the files of the run.
    tracker: Literal["wandb", "tensorboard", "trackio", "none"] = record("wandb")
    project: str = record("accelerate-recipes")  # Project of the run at the tracker.
    run_name: str | None = once(None)  # Name of the run (default: that of its directory).
    # Group of the run at the tracker, such as runs that differ only in their seed.
    group: str | None = record(None)
    tags: tuple[str, ...] = record(())  # Further tags of the run at the tracker.
    notes: str | None = once(None)  # What this run is for, shown beside it at the tracker.
    log_gradients: bool = record(False)  # Log the gradient norm of each layer, before clipping.
    log_model: bool = record(False)  # Upload the final model to the tracker, as an artifact.
    profile: bool = once(False)  # Profile some updates: a trace, tables, a picture and a verdict.
    # Like --profile, with a row for each shape of an operation's inputs.
    profile_shapes: bool = once(False)
    config: str | None = once(None)  # A config.json of an earlier run to repeat; flags override it.

    def validate(self) -> None:
        """Reject flags that contradict each other, before any data or model is loaded.

        `parse_config` calls this. A recipe's `Config` may override it to check its own flags too.

        Raises:
            UserError: two flags contradict each other.
        """
        if self.evaluate_only and self.init_from is None:
            raise UserError("--evaluate-only needs a model", advice="add --init-from runs/NAME")
