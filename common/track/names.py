"""How metrics are shown (label, unit, direction, panel), and how facts are named at W&B."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import JsonValue

from common.metric_names import (
    ALLOCATED,
    COMPILE_SECONDS,
    DATA_WAIT,
    EPOCH,
    GOODPUT,
    GPU_POWER,
    GPU_UTILIZATION,
    GRADIENT_NORM,
    HOST_MEMORY,
    JOULES_PER_SAMPLE,
    KEPT_STEP,
    LEARNING_RATE,
    LOSS_SCALE,
    MFU,
    MIN_GPU_UTILIZATION,
    OTHER_CPU,
    PEAK_ALLOCATED,
    PEAK_RESERVED,
    SAMPLES,
    SKIPPED_UPDATES,
    STEP,
    STEP_MILLISECONDS,
    TFLOPS_PER_DEVICE,
    THROUGHPUT,
    THROUGHPUT_PER_DEVICE,
    TOKEN_THROUGHPUT,
    TOTAL_SECONDS,
    TRAINING_LOSS,
    TRAINING_SECONDS,
)
from common.objective import Mode
from common.run_directory.records import RunConfig
from common.storage.json_files import JsonObject

PEAK = "memory/peak_mib"  # the device's peak if known, else the host's; for comparing runs
EFFICIENCY = "scaling_efficiency"  # the ratio of throughputs over the ratio of processes
SPLITS = ("train", "val", "test")
UNKNOWN = "–"
# The entries of `config.json` that keep their names in W&B's flat table. Every other name in that
# table is a flag.
GROUPS = (
    "recipe",
    "run_id",
    "source",
    "objective",
    "command",
    "compared",
    "free_on_resume",
    "environment",
    "data",
    "architecture",
    "plan",
    "memory_plan",
    "peak",
)


@dataclass(frozen=True)
class Metric:
    """How tables, charts and the terminal show a metric."""

    label: str
    panel: str = "Learning"  # the section of a chart page; "" for no chart
    unit: str = ""  # for "s", `text` chooses seconds, minutes or hours and writes the unit
    better: Mode | None = None  # None if neither direction is good
    form: str = ".4f"  # a format specification

    @property
    def heading(self) -> str:
        """The label with its unit, unless `text` writes the unit."""
        return self.label if self.unit in ("", "s") else f"{self.label}, {self.unit}"

    def text(self, value: float | None) -> str:
        """Return a value in the metric's form; a dash for None, which is an unknown value."""
        if value is None:
            return UNKNOWN
        return duration(value) if self.unit == "s" else format(value, self.form)


# Metrics by full name. A metric that several splits share stands here without a prefix. The values
# without a name are, in this order: label, panel, unit, better and form.
METRICS = {
    "loss": Metric("loss", better="min"),
    "accuracy": Metric("accuracy", better="max"),
    "f1": Metric("F1", better="max"),
    "macro_f1": Metric("macro F1", better="max"),
    "rmse": Metric("RMSE", better="min"),
    "r2": Metric("R²", better="max"),
    "psnr": Metric("PSNR", unit="dB", better="max", form=".2f"),
    "perplexity": Metric("perplexity", better="min", form=".3f"),
    "count": Metric("samples", panel="", form=",.0f"),
    LEARNING_RATE: Metric("learning rate", form=".3g"),
    GRADIENT_NORM: Metric("gradient norm"),
    LOSS_SCALE: Metric("loss scale", form="g"),
    SKIPPED_UPDATES: Metric("skipped updates", form="g"),
    THROUGHPUT: Metric("throughput", "Speed", "samples/s", "max", ",.0f"),
    THROUGHPUT_PER_DEVICE: Metric("throughput a device", "Speed", "samples/s", "max", ",.0f"),
    TOKEN_THROUGHPUT: Metric("throughput", "Speed", "tokens/s", "max", ",.0f"),
    STEP_MILLISECONDS: Metric("update", "Speed", "ms", "min", ",.1f"),
    DATA_WAIT: Metric("share waiting for data", "Speed", "", "min", ".1%"),
    TFLOPS_PER_DEVICE: Metric("arithmetic a device", "Speed", "TFLOP/s", "max", ",.2f"),
    MFU: Metric("MFU", "Speed", "", "max", ".1%"),
    GOODPUT: Metric("goodput", "Speed", "", "max", ".1%"),
    OTHER_CPU: Metric("CPU used by other programs", "", "", "min", ".0%"),
    JOULES_PER_SAMPLE: Metric("energy", "Energy", "J/sample", "min", ".3g"),
    PEAK: Metric("peak memory", "", "MiB", "min", ",.0f"),
    PEAK_ALLOCATED: Metric("peak memory", "Memory", "MiB", "min", ",.0f"),
    ALLOCATED: Metric("memory in use", "Memory", "MiB", "min", ",.0f"),
    PEAK_RESERVED: Metric("peak memory reserved", "Memory", "MiB", "min", ",.0f"),
    HOST_MEMORY: Metric("host memory", "Memory", "MiB", "min", ",.0f"),
    GPU_UTILIZATION: Metric("GPU utilisation", "Energy", "", "max", ".1%"),
    MIN_GPU_UTILIZATION: Metric("least utilised GPU", "Energy", "", "max", ".1%"),
    GPU_POWER: Metric("GPU power", "Energy", "W", None, ",.0f"),
    EFFICIENCY: Metric("efficiency over processes", "", "", "max", ".0%"),
    TRAINING_SECONDS: Metric("training time", "", "s", "min", ",.1f"),
    TOTAL_SECONDS: Metric("total time", "", "s", "min", ",.1f"),
    COMPILE_SECONDS: Metric("compiling", "", "s", "min", ",.1f"),
}

# The meanings of the metrics that the library itself logs, by full name, for the table in
# `docs/metrics.md`. Recipes add their own names under `train/`, `val/` and `test/`.
MEANINGS = {
    TRAINING_LOSS: "the mean loss since the last log line",
    LEARNING_RATE: "the learning rate of the first parameter group",
    GRADIENT_NORM: "the norm of all gradients of the last update, before clipping",
    LOSS_SCALE: "the factor of the loss, with fp16 only",
    SKIPPED_UPDATES: "updates so far that were left out, because a gradient was not finite",
    THROUGHPUT: "samples that all processes train on in a second",
    THROUGHPUT_PER_DEVICE: "the same, divided by the number of processes",
    TOKEN_THROUGHPUT: "tokens that all processes train on in a second, for text only",
    STEP_MILLISECONDS: "the time of an update",
    DATA_WAIT: "the share of the time in which the loop waits for its next batch",
    TFLOPS_PER_DEVICE: "the model's floating-point operations on a device in a second",
    MFU: "their share of the device's peak speed",
    GOODPUT: "the share of the time since the run began that its updates took",
    OTHER_CPU: "the share of CPU time that other programs used; at the end of the run",
    JOULES_PER_SAMPLE: "the energy that the GPUs draw for a sample",
    PEAK_ALLOCATED: "the most memory of a device that tensors have used at one time",
    ALLOCATED: "the memory that tensors use now, on a device that keeps no peak",
    PEAK_RESERVED: "the most memory of a device that torch has reserved for tensors",
    HOST_MEMORY: "the resident memory of a process; at the end of the run, its peak",
    GPU_UTILIZATION: "the share of the time in which the GPUs compute",
    MIN_GPU_UTILIZATION: "the same, of the GPU that computes least",
    GPU_POWER: "the mean power since the last log line, of the GPU that draws most",
    TRAINING_SECONDS: "the time of all updates so far, without evaluations and saving",
    TOTAL_SECONDS: "the time of the whole run; at its end",
    COMPILE_SECONDS: "the time that `--compile` took; at the end of the run",
    STEP: "updates so far; the x-axis of charts",
    EPOCH: "passes over the training data so far",
    SAMPLES: "samples that all processes have trained on so far",
    KEPT_STEP: "the update that the exported model is from; at the end of the run",
}


def metric_named(name: str) -> Metric:
    """Return how to show the metric with a full name such as "val/accuracy".

    A metric that is not in `METRICS` is the recipe's own. Its name is its label, and it has a chart
    if it belongs to a split.
    """
    prefix, _, bare = name.rpartition("/")
    if name.startswith(f"{LEARNING_RATE}/"):
        group = name.removeprefix(f"{LEARNING_RATE}/")
        return replace(METRICS[LEARNING_RATE], label=f"{METRICS[LEARNING_RATE].label}, {group}")
    if bare.startswith("best_"):
        metric = metric_named(bare.removeprefix("best_"))
        return replace(metric, label=f"best {metric.label}")
    has_chart = prefix in ("", *SPLITS)
    recipe_metric = Metric(bare.replace("_", " "), panel="Learning" if has_chart else "")
    return METRICS.get(name) or METRICS.get(bare, recipe_metric)


def is_proportion(name: str) -> bool:
    """Return whether a metric's name says that it is the share of samples with some property.

    Names such as ``accuracy`` and ``top5_accuracy`` say this. A balanced accuracy is no such share.
    """
    words = name.rpartition("/")[2].split("_")
    return "accuracy" in words and "balanced" not in words


def duration(seconds: float) -> str:
    """Return a time in hours or minutes if it has at least ten of that unit, else in seconds."""
    for unit, unit_seconds in (("h", 3600), ("min", 60)):
        if seconds >= 10 * unit_seconds:
            return f"{seconds / unit_seconds:.1f} {unit}"
    return f"{seconds:.1f} s"


def precision_name(mixed_precision: str) -> str:
    """Return a readable name of a precision: Accelerate calls fp32 "no" mixed precision."""
    return "fp32" if mixed_precision == "no" else mixed_precision


def flat(run_config: RunConfig) -> dict[str, JsonValue]:
    """Return a run's facts as one flat table, because W&B sorts and filters runs by its columns.

    A flag's column has the flag's name. Every other fact's column is ``group/name``.
    """
    facts = run_config.to_json()
    columns = dict(run_config.flags)
    for name in GROUPS:
        if name in facts:
            columns |= columns_of(name, facts[name])
    return columns


def columns_of(name: str, value: JsonValue) -> dict[str, JsonValue]:
    """Return one column for a single fact, or one column for each fact in a (nested) group."""
    if not isinstance(value, dict):
        return {name: value}
    columns: dict[str, JsonValue] = {}
    for inner_name, inner_value in value.items():
        columns |= columns_of(f"{name}/{inner_name}", inner_value)
    return columns


def unflat(config: Mapping[str, object]) -> JsonObject:
    """Undo `flat`: return the nested facts of a run that was read back from W&B.

    The entries of `config.json` that `flat` leaves out are missing.
    """
    facts: JsonObject = {"config": {}}
    for column, value in config.items():
        *groups, name = column.split("/")
        # A column without a group is a single fact of `config.json`, or else a flag.
        parent = facts if groups or name in GROUPS else facts["config"]
        for group in groups:
            parent = parent.setdefault(group, {})
        parent[name] = value
    return facts
