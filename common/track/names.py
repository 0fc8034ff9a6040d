"""What a run tells: each metric's label, unit, better direction and place; groups of facts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

Facts = Mapping[str, Any]  # by name: of a run, or figures
STEP = "progress/global_step"
RATE = "train/learning_rate"  # of further groups of parameters, followed by their names
PEAK = "memory/peak_mib"  # of the device or the host, where runs stand side by side
EFFICIENCY = "scaling_efficiency"  # the ratio of throughputs over that of processes
SPLITS = ("train", "val", "test")
UNKNOWN = "–"
# Of `config.json`; at W&B, what is no group is a flag.
GROUPS = (
    *("recipe", "run_id", "source", "objective", "command", "compared"),
    *("environment", "data", "architecture", "plan", "memory_plan", "peak"),
)


@dataclass(frozen=True)
class Metric:
    label: str
    panel: str = "Learning"  # the section of a view in which it is drawn; none if empty
    unit: str = ""  # where it is s, `text` writes it with the value, as a person would
    better: str | None = None  # max or min, where it has a good direction
    form: str = ".4f"

    @property
    def heading(self) -> str:
        return self.label if self.unit in ("", "s") else f"{self.label}, {self.unit}"

    def text(self, value: float | None) -> str:
        if value is None:
            return UNKNOWN
        return duration(value) if self.unit == "s" else format(value, self.form)


# By full name; those of a split (`SPLITS`) by what follows its name.
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
    RATE: Metric("learning rate", form=".3g"),
    "train/grad_norm": Metric("gradient norm"),
    "train/loss_scale": Metric("loss scale", form="g"),
    "train/skipped_updates": Metric("skipped updates", form="g"),
    "perf/samples_per_second": Metric("throughput", "Speed", "samples/s", "max", ",.0f"),
    "perf/samples_per_second_per_device": Metric(
        "throughput a device", "Speed", "samples/s", "max", ",.0f"
    ),
    "perf/tokens_per_second": Metric("throughput", "Speed", "tokens/s", "max", ",.0f"),
    "perf/step_milliseconds": Metric("update", "Speed", "ms", "min", ",.1f"),
    "perf/data_wait_fraction": Metric("share waiting for data", "Speed", "", "min", ".1%"),
    "perf/tflops_per_device": Metric("arithmetic a device", "Speed", "TFLOP/s", "max", ",.2f"),
    "perf/mfu": Metric("MFU", "Speed", "", "max", ".1%"),
    "perf/goodput": Metric("goodput", "Speed", "", "max", ".1%"),
    "perf/joules_per_sample": Metric("energy", "Energy", "J/sample", "min", ".3g"),
    PEAK: Metric("peak memory", "", "MiB", "min", ",.0f"),
    "memory/peak_allocated_mib": Metric("peak memory", "Memory", "MiB", "min", ",.0f"),
    "memory/allocated_mib": Metric("memory in use", "Memory", "MiB", "min", ",.0f"),
    "memory/peak_reserved_mib": Metric("peak memory reserved", "Memory", "MiB", "min", ",.0f"),
    "memory/host_rss_mib": Metric("host memory", "Memory", "MiB", "min", ",.0f"),
    "gpu/utilization": Metric("GPU utilisation", "Energy", "", "max", ".1%"),
    "gpu/utilization_min": Metric("least utilised GPU", "Energy", "", "max", ".1%"),
    "gpu/power_watts": Metric("GPU power", "Energy", "W", None, ",.0f"),
    EFFICIENCY: Metric("efficiency over processes", "", "", "max", ".0%"),
    "time/train_seconds": Metric("training time", "", "s", "min", ",.1f"),
    "time/total_seconds": Metric("total time", "", "s", "min", ",.1f"),
    "time/compile_seconds": Metric("compiling", "", "s", "min", ",.1f"),
}


def describe(name: str) -> Metric:
    """Return how a metric is shown; one that a recipe brings, by its own name."""
    prefix, _, bare = name.rpartition("/")
    if name.startswith(f"{RATE}/"):
        group = name.removeprefix(f"{RATE}/")
        return replace(METRICS[RATE], label=f"{METRICS[RATE].label}, {group}")
    if bare.startswith("best_"):
        metric = describe(bare.removeprefix("best_"))
        return replace(metric, label=f"best {metric.label}")
    own = Metric(bare.replace("_", " "), "Learning" if prefix in ("", *SPLITS) else "")
    return METRICS.get(name) or METRICS.get(bare, own)


def duration(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 10 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def precision_name(mixed_precision: Any) -> Any:
    return "fp32" if mixed_precision == "no" else mixed_precision


def flat(facts: Facts) -> dict[str, Any]:
    """Return a run's facts for W&B's table, one a column: flags by name, ``group/name``."""
    found, groups = dict(facts["config"]), [(n, facts[n]) for n in GROUPS if n in facts]
    for name, value in groups:  # it grows
        if isinstance(value, Mapping):
            groups += [(f"{name}/{inner}", kept) for inner, kept in value.items()]
        else:
            found[name] = value
    return found


def unflat(config: Facts) -> dict[str, Any]:
    """Return the facts that `flat` was given, without what it leaves out."""
    facts: dict[str, Any] = {"config": {}}
    for path, value in config.items():
        *groups, name = path.split("/")
        place = facts if groups or name in GROUPS else facts["config"]
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = value
    return facts
