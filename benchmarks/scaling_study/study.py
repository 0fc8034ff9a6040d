"""Fits the model of an update's time to measured runs, checks it, and predicts clusters."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from benchmarks.scaling_study.options import Options
from benchmarks.scaling_study.runs import Measured, Result, ScalingRun
from benchmarks.scaling_study.step_time import (
    ASSUMPTIONS,
    BUCKET,
    STRATEGIES,
    Job,
    StepTime,
    buckets_of,
    error,
    fit,
)

Cluster = dict[str, dict[str, float]]  # efficiency by link and devices, then by strategy


@dataclass(frozen=True)
class PublishedTraining:
    """The speed of a training on one device, from NVIDIA's DeepLearningExamples."""

    samples_per_second: int
    batch: int
    parameters: int


PUBLISHED = {
    "ResNet-50, A100, AMP": PublishedTraining(2470, 256, 25_557_032),
    "BERT-large, A100, fp16, length 128": PublishedTraining(580, 64, 335_000_000),
}


@dataclass(frozen=True)
class CheckedRun:
    """A measured run and the model's prediction of it."""

    run: ScalingRun
    result: Result
    seconds: float  # measured, of an update
    predicted: float  # samples/s
    error: float  # of the predicted seconds, relative to the measured ones

    def as_json(self) -> dict[str, object]:
        """Return the run as it stands in `scaling.json`."""
        return {
            "name": self.run.name,
            **self.run._asdict(),
            "samples_per_second": self.result.samples_per_second,
            "rounds": self.result.rounds,
            **self.result.shares,
            "seconds": self.seconds,
            "predicted": self.predicted,
            "error": self.error,
        }


@dataclass(frozen=True)
class Study:
    """Everything that `scaling.py` reports."""

    workload: str
    link: str  # how the link was slowed, or why there was none
    links: tuple[str, ...]  # of the clusters, as in the flags
    model: StepTime
    runs: list[CheckedRun]
    clusters: dict[str, Cluster]  # by the title of the training

    @property
    def unseen_errors(self) -> list[float]:
        """Absolute relative errors of the runs that the model was not fitted to."""
        return [abs(checked.error) for checked in self.runs if not checked.run.is_fitted]

    @property
    def mean_unseen_error(self) -> float | None:
        """Mean of `unseen_errors`; None if there are none."""
        errors = self.unseen_errors
        return sum(errors) / len(errors) if errors else None

    @property
    def largest_unseen_error(self) -> float | None:
        """Largest of `unseen_errors`; None if there are none."""
        return max(self.unseen_errors, default=None)

    def as_json(self, machine: dict[str, object]) -> dict[str, object]:
        """Return the content of `scaling.json`."""
        return {
            "workload": self.workload,
            "machine": machine,
            "link": self.link,
            "links": self.links,
            "model": asdict(self.model),
            "assumptions": ASSUMPTIONS,
            "mean_unseen_error": self.mean_unseen_error,
            "largest_unseen_error": self.largest_unseen_error,
            "runs": [checked.as_json() for checked in self.runs],
            "clusters": self.clusters,
        }


def study(measured: Measured, options: Options) -> Study:
    """Fit the model, check it against each run, and predict clusters."""
    jobs = {run: job_of(run, measured.parameters) for run in measured.results}
    seconds = {
        run: run.processes * run.batch / result.samples_per_second
        for run, result in measured.results.items()
    }
    model = fit([(jobs[run], seconds[run]) for run in jobs if run.is_fitted])
    runs = [
        CheckedRun(
            run,
            result,
            seconds[run],
            predicted=run.processes * run.batch / model.update(jobs[run]),
            error=error(model, jobs[run], seconds[run]),
        )
        for run, result in measured.results.items()
    ]
    size = f"{options.recipe}, {sum(measured.parameters):,} parameters"
    return Study(
        workload=f"{size}, {options.updates} updates, {options.rounds} rounds; medians",
        link=measured.link,
        links=options.links,
        model=model,
        runs=runs,
        clusters=predict(model, next(iter(jobs.values())), options),
    )


def job_of(run: ScalingRun, parameters: list[int]) -> Job:
    """Return the facts of a run that the model depends on."""
    buckets, last_share = buckets_of(parameters)
    job = Job(run.processes, run.batch, sum(parameters), buckets, last_share, strategy=run.strategy)
    if run.link is None:
        return job
    megabits, milliseconds = run.link.split(":")
    return replace(job, rate=float(megabits) * 1e6 / 8, delay=float(milliseconds) / 1e3)


def predict(model: StepTime, job: Job, options: Options) -> dict[str, Cluster]:
    """Predict the efficiency of clusters, for the measured training and for published ones.

    Args:
        job: the measured training on one device.
    """
    # Of the fitted values, a cluster keeps the times of computing and the overlap.
    device = replace(
        model,
        efficiency=options.link_efficiency,
        software=math.inf,
        latency=0.0,
        window=math.inf,
        crowding=1.0,
    )
    predictions = {f"{options.recipe}, computing as fast as here": cluster(device, job, options)}
    for name, training in PUBLISHED.items():
        speed = training.samples_per_second
        published = replace(device, per_update=0.0, per_sample=1 / speed, overlap=options.overlap)
        buckets = math.ceil(4 * training.parameters / BUCKET)
        published_job = Job(1, training.batch, training.parameters, buckets, 1 / buckets)
        title = f"{name} ({speed:,} samples/s, batch {training.batch})"
        predictions[title] = cluster(published, published_job, options)
    return predictions


def cluster(model: StepTime, job: Job, options: Options) -> Cluster:
    """Return the efficiency of each strategy, by link and number of devices."""
    efficiencies: Cluster = {}
    for link in options.links:
        name, gigabytes, microseconds = link.rsplit(":", 2)
        for devices in options.devices:
            scaled_job = replace(
                job,
                processes=devices,
                rate=float(gigabytes) * 1e9,
                delay=float(microseconds) * 1e-6,
            )
            efficiencies[f"{name}, {devices:,} devices"] = {
                strategy: model.efficiency_of(replace(scaled_job, strategy=strategy))
                for strategy in STRATEGIES
            }
    return efficiencies
