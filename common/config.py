"""The flags that every recipe has: type, default, limits, role and help, each at its field."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from common.command_line import parse_config
from common.errors import UserError
from common.flags import flag

__all__ = ["TrainingConfig", "parse_config"]

data = partial(flag, role="data")
pace = partial(flag, role="pace")
record = partial(flag, role="record")
once = partial(flag, role="once")
count = partial(flag, least=1, most=10**9)  # more is a slip of the hand


@dataclass(kw_only=True)
class TrainingConfig:
    # Name, Hub id, folder or file; auto: public if at hand, else built in.
    dataset: str = data("auto")
    dataset_config: str | None = data(None)  # Configuration of a Hub data set, as sst2 of glue.
    label_column: str | None = data(None)  # Column of the labels, if its type does not tell.
    # Hold out of train if there is no validation split; 0: nothing (default: 0.1 of train alone).
    validation_share: float | None = data(None, least=0, most=0.9)
    streaming: bool = data(False)  # Read parquet files while training, without a prepared copy.
    # Initial weights: a run, a folder or safetensors file, a Hub id as timm/resnet18.a1_in1k.
    init_from: str | None = data(None)

    epochs: int | None = count(None)  # Passes over the training data (default: by data set).
    max_steps: int | None = count(None)  # End after this many optimizer updates.
    batch_size: int = count(128, role="pace")  # Samples per process and micro-batch.
    gradient_accumulation_steps: int = count(1, role="pace")  # Micro-batches per optimizer update.
    # Samples of an update over all processes: sets the accumulation.
    effective_batch_size: int | None = count(None, role="pace")
    auto_batch_size: bool = False  # Try micro-batches: what fits and is fastest, updates the same.
    learning_rate: float | None = flag(None, least=0)  # Its peak (default: by recipe and data set).
    # Have the rate grow with the samples of an update, from --base-batch-size.
    scale_learning_rate: Literal["no", "linear", "sqrt"] = "no"
    base_batch_size: int | None = count(None)  # What the rate is for (default: the recipe's batch).
    weight_decay: float = flag(0.01, least=0)  # Decay of weight matrices, not of biases and norms.
    warmup_steps: int | None = count(None, least=0)  # Linear warm-up (default: a share of the run).
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # Of the rate, after warm-up.
    max_grad_norm: float = flag(1.0, least=0)  # Clip gradients' global L2 norm; 0 turns it off.

    # Precision of the arithmetic; no: fp32.
    mixed_precision: Literal["auto", "no", "tf32", "bf16", "fp16"] = "auto"
    compile: bool = False  # Compile the model with torch.compile.
    gradient_compression: Literal["no", "fp16", "bf16"] = "no"  # Gradients' type between processes.
    gradient_checkpointing: bool = False  # Recompute activations: less memory, more time.
    seed: int = flag(0, least=0, most=2**32 - 1)  # Of weights, sample order, augmentation, dropout.
    deterministic: bool = False  # Only deterministic kernels: the same bits in every run.
    # Threads of a process on a CPU (default: its share of the cores).
    num_threads: int | None = pace(None, least=1, most=1024)
    # Loader processes where data does not live on the device.
    num_workers: int | None = pace(None, least=0, most=1024)
    data_placement: Literal["auto", "device", "workers"] = pace("auto")  # Where batches are made.

    output_dir: str | None = once(None)  # Directory of the run (default: runs/RECIPE-TIMESTAMP).
    # Updates between checkpoints, besides the ends of epochs (not more often than every 30 s).
    checkpoint_every: int | None = count(None, role="pace")
    keep_checkpoints: int = count(2, role="record")  # Newest checkpoints to keep.
    resume: str | None = once(None)  # auto, a run or a checkpoint: go on where it stopped.
    # Updates between log lines (default: by the run's length, at most 1,000 lines).
    log_every: int | None = count(None, role="pace")
    # Updates between evaluations (default: whole epochs, at most 20 a run).
    eval_every: int | None = count(None, role="pace")
    # Seconds after which a rank that hangs ends the job.
    collective_timeout: int = record(180, least=1, most=10**6)
    keep: Literal["best", "last"] = "best"  # Model: the best of the evaluations, or the last.
    # End after so many evaluations without a better one.
    early_stopping: int | None = count(None)
    target: float | None = record(None)  # Exit with an error if the objective ends up worse.
    evaluate_only: bool = flag(False, role="kind")  # Evaluate --init-from's model, train nothing.

    tracker: Literal["wandb", "tensorboard", "none"] = record("wandb")  # Where metrics go as well.
    project: str = record("accelerate-recipes")  # Project of the run at the tracker.
    run_name: str | None = once(None)  # Name of the run (default: that of its directory).
    group: str | None = record(None)  # Group of the run at the tracker, such as one of seeds.
    tags: tuple[str, ...] = record(())  # Tags of the run there, besides those it gets by itself.
    notes: str | None = once(None)  # What this run is for, shown beside it at the tracker.
    log_gradients: bool = record(False)  # Log the gradient norm of each layer, before clipping.
    log_model: bool = record(False)  # Keep the final model at the tracker too, as an artifact.
    profile: bool = once(False)  # Profile some updates: a trace, tables, a picture and a verdict.
    profile_shapes: bool = once(False)  # The same, operations told apart by their inputs' shapes.
    config: str | None = once(None)  # A config.json of an earlier run to repeat; flags override it.

    def validate(self) -> None:
        """Reject what no flag's own limits show, before any data or model is loaded."""
        if self.evaluate_only and self.init_from is None:
            raise UserError("--evaluate-only needs a model", advice="add --init-from runs/NAME")
