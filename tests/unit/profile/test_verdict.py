"""Verdicts of profiles: categories of operations, parts of an update, and the flag to change."""

from types import SimpleNamespace
from typing import Any

import pytest

from common.config import TrainingConfig
from common.profile.verdict import (
    DATA,
    UpdateCost,
    cost_category,
    cost_of_update,
    cpu_kernel_milliseconds,
    gpu_kernel_milliseconds,
    judge,
)


@pytest.mark.parametrize(
    ("name", "category"),
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
        ("Torch-Compiled Region: 0/0", "memory"),
        ("AddmmBackward0", "launch"),
    ],
)
def test_operations_have_a_category(name: str, category: str) -> None:
    """Operations compute products, move data, or only launch and view."""
    assert cost_category(name) == category


def event(name: str, microseconds: float, parent: Any = None, **others: Any) -> Any:
    """Return a stand-in for an event of the profiler."""
    return SimpleNamespace(
        name=name,
        thread=others.get("thread", 1),
        self_cpu_time_total=microseconds,
        cpu_parent=parent,
        device_type=SimpleNamespace(name=others.get("device", "CPU")),
        is_user_annotation=others.get("annotation", False),
        time_range=SimpleNamespace(elapsed_us=lambda: microseconds),
    )


def test_cpu_time_covers_the_training_thread_only() -> None:
    """Other threads, making batches, and time between operations do not count."""
    step = event("ProfilerStep*", 500)
    waiting = event(DATA, 10, step)
    events = [
        step,
        waiting,
        event("aten::index", 7000, waiting),
        event("aten::mm", 3000, step),
        event("aten::add", 1000, step),
        event("aten::view", 400, step),
        event("AddmmBackward0", 300, step),
        event("aten::copy_", 9000, thread=2),
    ]
    assert cpu_kernel_milliseconds(events) == pytest.approx({"compute": 3, "memory": 1})


def test_gpu_time_covers_kernels_only() -> None:
    """GPU time counts kernels by category, without annotations and waiting for ranks."""
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
    """Kernels, idle time and waiting make an update. A GPU's kernels may overlap with waiting."""
    cost = cost_of_update({"memory": 2, "compute": 3}, 8, 4, is_asynchronous=False)
    assert cost == UpdateCost(data=4, launch=3, memory=2, compute=3)
    cost = cost_of_update({"memory": 2, "compute": 9}, 8, 4, is_asynchronous=True)
    assert cost == UpdateCost(data=1, launch=0, memory=2, compute=9)
    cost = cost_of_update({"memory": 10, "compute": 30}, 8, 2, is_asynchronous=False)
    assert cost == UpdateCost(data=2, launch=0, memory=2, compute=6)


@pytest.mark.parametrize(
    ("cost", "settings", "category", "flag"),
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
    cost: UpdateCost, settings: dict[str, Any], category: str, flag: str
) -> None:
    """The advice names a flag that reduces this part."""
    verdict = judge(
        cost, TrainingConfig(), **{"precision": "bf16", "placement": "device"} | settings
    )
    assert verdict["verdict"] == f"{category}-bound"
    assert "60%" in verdict["evidence"]
    assert flag in verdict["advice"]
    assert sum(verdict["shares"].values()) == pytest.approx(1)
    milliseconds = verdict["milliseconds_per_update"]
    assert milliseconds == pytest.approx({**cost._asdict(), "total": 10})
