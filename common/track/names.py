"""How metrics are shown: label, unit, direction, panel, and what each means."""

from dataclasses import KW_ONLY, dataclass, replace

from common.metric_names import (
    ALLOCATED,
    COMPILE_SECONDS,
    DATA_WAIT,
    EPOCH,
    EXPORTED_STEP,
    GOODPUT,
    GPU_POWER,
    GPU_UTILIZATION,
    GRADIENT_NORM,
    HOST_MEMORY,
    JOULES_PER_SAMPLE,
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

PEAK = "memory/peak_mib"  # the device's peak if known, else the host's; for comparing runs
EFFICIENCY = "scaling_efficiency"  # the ratio of throughputs over the ratio of processes
SPLITS = ("train", "val", "test")
UNKNOWN = "–"


@dataclass(frozen=True)
class Metric:
    """How tables, charts and the terminal show a metric."""

    label: str
    _: KW_ONLY
    panel: str = "Learning"  # the section of a chart page; "" for no chart
    unit: str = ""  # for "s", `text` chooses seconds, minutes or hours and writes the unit
    better: Mode | None = None  # None if neither direction is good
    form: str = ".4f"  # a format specification
    meaning: str = ""  # of a metric that the library itself logs, for `docs/metrics.md`

    @property
    def heading(self) -> str:
        """The label with its unit, unless the label begins with it, or `text` writes it."""
        if self.unit in ("", "s") or self.label.startswith(self.unit):
            return self.label
        return f"{self.label}, {self.unit}"

    def text(self, value: float | None) -> str:
        """Return a value in the metric's form; a dash for None, which is an unknown value."""
        if value is None:
            return UNKNOWN
        return duration(value) if self.unit == "s" else format(value, self.form)


# Metrics by full name. A metric that several splits share stands here without a prefix.
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
    LEARNING_RATE: Metric(
        "learning rate",
        form=".3g",
        meaning=(
            "the learning rate of the first parameter group after the update, which is the rate of "
            "the next one"
        ),
    ),
    GRADIENT_NORM: Metric(
        "gradient norm", meaning="the norm of all gradients of the last update, before clipping"
    ),
    LOSS_SCALE: Metric("loss scale", form="g", meaning="the factor of the loss, with fp16 only"),
    SKIPPED_UPDATES: Metric(
        "skipped updates",
        form="g",
        meaning="updates so far that were left out, because a gradient was not finite",
    ),
    THROUGHPUT: Metric(
        "throughput",
        panel="Speed",
        unit="samples/s",
        better="max",
        form=",.0f",
        meaning="samples that all processes train on in a second",
    ),
    THROUGHPUT_PER_DEVICE: Metric(
        "throughput per device",
        panel="Speed",
        unit="samples/s",
        better="max",
        form=",.0f",
        meaning="samples that one process trains on in a second, on average",
    ),
    TOKEN_THROUGHPUT: Metric(
        "throughput",
        panel="Speed",
        unit="tokens/s",
        better="max",
        form=",.0f",
        meaning="tokens that all processes train on in a second, for text only",
    ),
    STEP_MILLISECONDS: Metric(
        "time per update",
        panel="Speed",
        unit="ms",
        better="min",
        form=",.1f",
        meaning="the time of an update",
    ),
    DATA_WAIT: Metric(
        "share waiting for data",
        panel="Speed",
        better="min",
        form=".1%",
        meaning="the share of the time in which the loop waits for its next batch",
    ),
    TFLOPS_PER_DEVICE: Metric(
        "TFLOP/s per device",
        panel="Speed",
        unit="TFLOP/s",
        better="max",
        form=",.2f",
        meaning="the model's floating-point operations on a device in a second",
    ),
    MFU: Metric(
        "MFU",
        panel="Speed",
        better="max",
        form=".1%",
        meaning="the share of the device's peak rate that the model's operations reach",
    ),
    GOODPUT: Metric(
        "goodput",
        panel="Speed",
        better="max",
        form=".1%",
        meaning="the share of the time since the run began that its updates took",
    ),
    OTHER_CPU: Metric(
        "CPU used by other programs",
        panel="",
        better="min",
        form=".0%",
        meaning="the share of CPU time that other programs used; at the end of the run",
    ),
    JOULES_PER_SAMPLE: Metric(
        "energy",
        panel="Energy",
        unit="J/sample",
        better="min",
        form=".3g",
        meaning="the energy that the GPUs draw for a sample",
    ),
    PEAK: Metric("peak memory", panel="", unit="MiB", better="min", form=",.0f"),
    PEAK_ALLOCATED: Metric(
        "peak memory",
        panel="Memory",
        unit="MiB",
        better="min",
        form=",.0f",
        meaning="the most memory of a device that tensors have used at one time",
    ),
    ALLOCATED: Metric(
        "memory in use",
        panel="Memory",
        unit="MiB",
        better="min",
        form=",.0f",
        meaning="the memory that tensors use now, on a device that keeps no peak",
    ),
    PEAK_RESERVED: Metric(
        "peak memory reserved",
        panel="Memory",
        unit="MiB",
        better="min",
        form=",.0f",
        meaning="the most memory of a device that torch has reserved for tensors",
    ),
    HOST_MEMORY: Metric(
        "host memory",
        panel="Memory",
        unit="MiB",
        better="min",
        form=",.0f",
        meaning="the resident memory of a process; at the end of the run, its peak",
    ),
    GPU_UTILIZATION: Metric(
        "GPU utilisation",
        panel="Energy",
        better="max",
        form=".1%",
        meaning="the share of the time in which the GPUs compute",
    ),
    MIN_GPU_UTILIZATION: Metric(
        "least utilised GPU",
        panel="Energy",
        better="max",
        form=".1%",
        meaning="the share of the time in which the least busy GPU computes",
    ),
    GPU_POWER: Metric(
        "GPU power",
        panel="Energy",
        unit="W",
        form=",.0f",
        meaning="the mean power since the last log line, of the GPU that draws most",
    ),
    EFFICIENCY: Metric("efficiency over processes", panel="", better="max", form=".0%"),
    TRAINING_SECONDS: Metric(
        "training time",
        panel="",
        unit="s",
        better="min",
        form=",.1f",
        meaning="the time of all updates so far, without evaluations and saving",
    ),
    TOTAL_SECONDS: Metric(
        "total time",
        panel="",
        unit="s",
        better="min",
        form=",.1f",
        meaning="the time of the whole run; at its end",
    ),
    COMPILE_SECONDS: Metric(
        "compiling",
        panel="",
        unit="s",
        better="min",
        form=",.1f",
        meaning="the time that `--compile` took; at the end of the run",
    ),
}

# The meanings of all metrics that the library itself logs, for the table in `docs/metrics.md`.
# Those without an entry in `METRICS` are shown like a recipe's own metric.
MEANINGS = {
    TRAINING_LOSS: "the mean loss since the last log line",
    **{name: metric.meaning for name, metric in METRICS.items() if metric.meaning},
    STEP: "updates so far; the x-axis of charts",
    EPOCH: "passes over the training data so far",
    SAMPLES: "samples that all processes have trained on so far",
    EXPORTED_STEP: "the update that the exported model is from; at the end of the run",
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
    if name in METRICS:
        return METRICS[name]
    if bare in METRICS:  # a metric that splits share
        return METRICS[bare]
    has_chart = prefix in ("", *SPLITS)
    return Metric(bare.replace("_", " "), panel="Learning" if has_chart else "")


def is_proportion(name: str) -> bool:
    """Return whether a metric's name says that it is the share of samples with some property.

    Names such as ``accuracy`` and ``top5_accuracy`` say this. A balanced accuracy is no such share.
    The tools compute the error of a share from the number of samples, and show differences of
    shares in percentage points.
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
