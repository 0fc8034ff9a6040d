"""`--profile`: which updates are looked at, what is written, and what the verdict is."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config import TrainingConfig
from common.kernel_time import DATA, cpu_kernel_milliseconds, gpu_kernel_milliseconds, kind_of
from common.profile_window import Window, choose_window
from common.stopwatch import FIRST_UPDATES, Stopwatch, Work
from common.verdict import UpdateCost, cost_of_update, judge
from tests.launch import REPOSITORY, Finished, Runner
from tests.wandb_file import records

# The window.


@pytest.mark.parametrize("every", [7, 11, 25, 60, 1000])
@pytest.mark.parametrize("first", [0, 5, 44])
def test_window_lies_between_evaluations(first: int, every: int) -> None:
    """No evaluation falls among the profiled updates, which follow timed ones."""
    window = choose_window(first, first + 200, lambda step: step % every == 0)
    assert window is not None
    assert FIRST_UPDATES == window.timed < window.warm_up < window.record < window.end <= 200
    assert not [n for n in range(window.warm_up + 1, window.end) if (first + n) % every == 0]


def test_window_is_as_large_as_the_run_allows() -> None:
    """Ten updates timed and ten profiled; fewer in a short run; none where there is no room."""
    assert choose_window(0, 1000, lambda _: False) == Window(3, 13, 15, 25)
    assert choose_window(0, 16, lambda _: False) == Window(3, 8, 10, 15)
    assert choose_window(0, 6, lambda _: False) == Window(3, 4, 5, 6)
    assert choose_window(0, 5, lambda _: False) is None
    assert choose_window(100, 105, lambda _: False) is None


def test_window_of_a_run_that_evaluates_after_each_update() -> None:
    """Where it can't be avoided, an evaluation is profiled too."""
    assert choose_window(0, 100, lambda _: True) is not None


def test_paused_stopwatch_counts_nothing() -> None:
    """What is profiled has neither time nor samples, and an evaluation can't end the pause."""
    now = [0.0]
    stopwatch = Stopwatch(lambda: None, lambda: now[0])

    def train(updates: int, seconds: float) -> None:
        for _ in range(updates):
            now[0] += seconds
            stopwatch.count(Work(8), 0.1 * seconds, True)

    stopwatch.start()
    train(FIRST_UPDATES + 5, 1)
    stopwatch.pause()
    train(4, 50)
    stopwatch.stop()
    stopwatch.start()  # as around an evaluation
    train(4, 50)
    assert stopwatch.lap().updates == 5
    train(1, 50)
    assert stopwatch.lap().updates == 0
    stopwatch.resume()
    train(5, 1)
    assert stopwatch.lap().updates == 5
    whole = stopwatch.whole_run
    assert (whole.updates, whole.samples, whole.seconds) == (10, 80, 10)


# The verdict.


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((f"aten::{name}", "compute") for name in ("mm", "addmm", "bmm", "_addmm_activation")),
        *((f"aten::{name}", "compute") for name in ("mkldnn_convolution", "convolution_backward")),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "compute"),
        *((f"aten::{name}", "memory") for name in ("add_", "native_batch_norm", "copy_", "sum")),
        *(
            (f"aten::{name}", "memory")
            for name in ("_fused_adamw_", "_softmax", "comma", "embedding")
        ),
        *((f"aten::{name}", "launch") for name in ("view", "t", "empty", "as_strided", "linear")),
        ("aten::upsample_bilinear2d", "memory"),
    ],
)
def test_operations_are_of_a_kind(name: str, kind: str) -> None:
    """Matrix products, operations that move data, and those that only look."""
    assert kind_of(name) == kind


def event(name: str, microseconds: float, parent: Any = None, **others: Any) -> Any:
    """Return what stands for an event of the profiler."""
    return SimpleNamespace(
        name=name,
        thread=others.get("thread", 1),
        self_cpu_time_total=microseconds,
        cpu_parent=parent,
        device_type=SimpleNamespace(name=others.get("device", "CPU")),
        is_user_annotation=others.get("annotation", False),
        time_range=SimpleNamespace(elapsed_us=lambda: microseconds),
    )


def test_time_on_a_cpu_is_of_the_training_thread() -> None:
    """Other threads, the making of batches and what lies between operations don't count."""
    step = event("ProfilerStep*", 500)
    waiting = event(DATA, 10, step)
    events = [
        *(step, waiting, event("aten::index", 7000, waiting), event("aten::mm", 3000, step)),
        *(event("aten::add", 1000, step), event("aten::view", 400, step)),
        *(event("AddmmBackward0", 300, step), event("aten::copy_", 9000, thread=2)),
    ]
    assert cpu_kernel_milliseconds(events) == pytest.approx({"compute": 3, "memory": 1})


def test_time_on_a_gpu_is_of_kernels() -> None:
    """Kernels are told apart by their names; annotations and waiting for ranks don't count."""
    kernels = {
        "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc": 1000,
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NTN": 1000,
        "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_32x6_tn": 1000,
        "void pytorch_flash::flash_fwd_kernel<...>": 1000,
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<...>": 300,
        "void at::native::vectorized_elementwise_kernel<4, ...>": 200,
        "Memcpy DtoD (Device -> Device)": 100,
        "triton_poi_fused_add_relu_3": 400,
    }
    events = [event(name, time, device="CUDA") for name, time in kernels.items()]
    events += [
        event("ProfilerStep#3", 9000, device="CUDA", annotation=True),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 9000, device="CUDA"),
        event("aten::mm", 9000),
    ]
    assert gpu_kernel_milliseconds(events) == pytest.approx({"compute": 4, "memory": 1})


def test_parts_of_an_update_add_up() -> None:
    """Kernels, idle time and waiting are the update; on a GPU, kernels may run while one waits."""
    cost = cost_of_update({"memory": 2, "compute": 3}, 8, 4, is_asynchronous=False)
    assert cost == UpdateCost(data=4, launch=3, memory=2, compute=3)
    cost = cost_of_update({"memory": 2, "compute": 9}, 8, 4, is_asynchronous=True)
    assert cost == UpdateCost(data=1, launch=0, memory=2, compute=9)
    cost = cost_of_update({"memory": 10, "compute": 30}, 8, 2, is_asynchronous=False)
    assert cost == UpdateCost(data=2, launch=0, memory=2, compute=6)


@pytest.mark.parametrize(
    ("cost", "settings", "kind", "flag"),
    [
        (UpdateCost(6, 1, 1, 2), {"placement": "device"}, "data", "--data-placement workers"),
        (UpdateCost(6, 1, 1, 2), {"placement": "workers"}, "data", "--num-workers"),
        (UpdateCost(1, 6, 1, 2), {}, "launch", "--batch-size 256"),
        (UpdateCost(1, 1, 6, 2), {}, "memory", "--compile"),
        (UpdateCost(1, 1, 6, 2), {"precision": "no"}, "memory", "--mixed-precision"),
        (UpdateCost(1, 1, 2, 6), {"precision": "no"}, "compute", "--mixed-precision"),
        (UpdateCost(1, 1, 2, 6), {}, "compute", "No flag"),
    ],
)
def test_verdict_is_the_largest_part(
    cost: UpdateCost, settings: dict[str, Any], kind: str, flag: str
) -> None:
    """What takes most of an update bounds it; the flag is one that changes it."""
    verdict = judge(
        cost, TrainingConfig(), **{"precision": "bf16", "placement": "device"} | settings
    )
    assert verdict.kind == f"{kind}-bound"
    assert "60%" in verdict.evidence
    assert flag in verdict.advice
    assert sum(verdict.facts()["shares"].values()) == pytest.approx(1)


@pytest.mark.slow
def test_a_profile_on_two_processes_slows_no_other_update(runner: Runner) -> None:
    """One process looks; the other waits for it outside of the time that is counted."""
    flags = ("--dataset", "digits", "--batch-size", 32, "--max-steps", 33, "--log-every", 1)
    run = runner.run("mnist_mlp", *flags, "--profile", "--tracker", "none", launcher="two")
    times = run.series("perf/step_milliseconds")
    left_out = sorted(set(range(1, 34)) - set(times))
    assert left_out
    after = [times[step] for step in times if step > left_out[-1]]
    before = [times[step] for step in times if FIRST_UPDATES < step < left_out[0]]
    # Writing the files takes a hundred times as long as an update.
    assert max(after) < 10 * max(before)
    assert (run.directory / "profile" / "verdict.json").is_file()


# Real runs.


@pytest.fixture(scope="module")
def data_bound(runner: Runner) -> Finished:
    """An MLP whose images take a millisecond each to transform."""
    script = REPOSITORY / "tests" / "slow_data.py"
    flags = ("--dataset", "digits", "--batch-size", 32, "--max-steps", 30, "--log-every", 1)
    return runner.run(
        *(script, 1, REPOSITORY / "recipes" / "mnist_mlp.py", *flags, "--profile"),
        launcher="python",
    )


@pytest.fixture(scope="module")
def compute_bound(runner: Runner) -> Finished:
    """ResNet-18 on random images that are there."""
    flags = ("--dataset", "synthetic", "--image-size", 32, "--batch-size", 16, "--max-steps", 12)
    flags = (*flags, "--mixed-precision", "no", "--tracker", "none", "--profile")
    return runner.run("resnet", *flags, launcher="python")


@pytest.mark.slow
def test_slow_transform_is_data_bound(data_bound: Finished) -> None:
    """The verdict says so, with the share of time, and the flag that helps."""
    verdict = data_bound.read("profile/verdict.json")
    assert verdict["verdict"] == "data-bound"
    assert verdict["shares"]["data"] > 0.6
    # 32 samples at a millisecond each, and what the sleep adds.
    assert 32 < verdict["milliseconds_per_update"]["data"] < 60
    assert "profile data-bound: of" in data_bound.output
    assert "--num-workers" in data_bound.output


@pytest.mark.slow
def test_resnet_is_compute_bound(compute_bound: Finished) -> None:
    """Convolutions take most of an update."""
    verdict = compute_bound.read("profile/verdict.json")
    assert verdict["verdict"] == "compute-bound"
    assert verdict["shares"]["compute"] > 0.5
    assert "profile compute-bound: of" in compute_bound.output


@pytest.mark.slow
def test_profile_files_can_be_read(data_bound: Finished, compute_bound: Finished) -> None:
    """The trace is one of Chrome's, the tables name operations, the picture is one."""
    from PIL import Image

    for run, operation in ((data_bound, "aten::addmm"), (compute_bound, "aten::convolution")):
        folder = run.directory / "profile"
        with gzip.open(folder / "trace.json.gz", "rt") as file:
            trace = json.load(file)["traceEvents"]
        names = [item.get("name") for item in trace]
        assert operation in names
        assert DATA in names
        # The updates that were kept, and none of those that warm the profiler up.
        steps = [n for n in names if n and n.startswith("ProfilerStep")]
        assert len(set(steps)) in (1, 2, 5, 10)
        with (folder / "top_operations.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert operation in {row["name"] for row in rows}
        times = [float(row["self_cpu_microseconds"]) for row in rows]
        assert times == sorted(times, reverse=True)
        assert operation in (folder / "top_operations.txt").read_text()
        with Image.open(folder / "memory.png") as picture:
            assert picture.size == (1200, 480)
            assert len(set(picture.convert("L").resize((60, 24)).tobytes())) > 5


@pytest.mark.slow
def test_profiled_updates_are_not_in_the_figures(data_bound: Finished) -> None:
    """They have no speed in the log, the run says which they are, and the others go on."""
    speeds = data_bound.series("perf/samples_per_second")
    assert set(data_bound.series("train/loss")) == set(range(1, 31))
    assert set(range(1, 31)) - set(speeds) == set(range(14, 26))
    assert "updates 14 to 25 are left out of perf/" in data_bound.output
    assert data_bound.output.count("profiling") == 12


@pytest.mark.slow
def test_profile_is_kept_at_wandb(data_bound: Finished) -> None:
    """The files are an artifact of the W&B run, the picture a panel, the verdict in its summary."""
    found = records(data_bound)
    (artifact,) = found["artifact"]["profile"]
    names = {entry["path"] for entry in artifact["manifest"]["contents"]}
    files = {"trace.json.gz", "top_operations.txt", "top_operations.csv", "memory.png"}
    assert names == files | {"verdict.json"}
    assert any("profile/memory._type" in row for row in found["history"])
    assert found["summary"]["profile/verdict"] == "data-bound"
    # Nothing else was lost to it.
    steps = [row["progress/global_step"] for row in found["history"] if "train/loss" in row]
    assert steps == list(range(1, 31))


def test_short_run_says_that_it_is_not_profiled(runner: Runner, odd_images: Path) -> None:
    """A run without room for it trains as it would without the flag."""
    flags = (
        "--dataset",
        odd_images,
        "--batch-size",
        64,
        "--max-steps",
        2,
        "--profile",
        "--tracker",
        "none",
    )
    run = runner.run("mnist_mlp", *flags, launcher="python")
    assert "--profile needs 6 updates" in run.output
    assert not (run.directory / "profile").exists()


def test_failing_profile_never_stops_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """An error of the profiler is said, and is the end of profiling alone."""
    from common.profiling import Profile

    def fail() -> None:
        raise RuntimeError("no such device")

    accelerator = SimpleNamespace(is_main_process=True)
    run: Any = SimpleNamespace(directory=SimpleNamespace(path=Path("x")), accelerator=accelerator)
    profile = Profile(run)
    profile.profiler = object()
    profile.guarded(fail)
    assert profile.profiler is None
    assert "no such device" in capsys.readouterr().out
