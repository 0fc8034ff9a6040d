"""The peak rate of a device's arithmetic, by its name or as measured."""

import re
import timeit

import torch

from common.system.devices import device_name, is_accelerator, synchronize_stream

# TFLOP/s of dense matrix products in three precisions: fp16 or bf16 with fp32 sums, TF32 (or fp32
# if the GPU has no TF32), and fp32. The figures are from NVIDIA's data sheets and white papers.
# Names are regular expressions. The first name that matches whole words of the device's name
# counts.
PEAK_TFLOPS = {
    "GB200": (2500.0, 1250.0, 80.0),
    "B200": (2250.0, 1125.0, 75.0),
    "H200 NVL": (835.5, 417.5, 60.0),
    "G?H200": (989.4, 494.7, 66.9),
    "H100 PCIe": (756.0, 378.0, 51.2),
    "H100 NVL": (835.0, 417.5, 60.0),
    "H100": (989.4, 494.7, 66.9),
    "A100": (312.0, 156.0, 19.5),
    "A30": (165.0, 82.0, 10.3),
    "A10G": (70.0, 35.0, 31.5),
    "A10": (125.0, 62.5, 31.2),
    "L40S": (362.0, 183.0, 91.6),
    "L4": (121.0, 60.0, 30.3),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 3090": (71.0, 35.6, 35.6),
    "V100-PCIE": (112.0, 14.0, 14.0),
    "V100": (125.0, 15.7, 15.7),
    "T4": (65.0, 8.1, 8.1),
}
# Words in a device's name for a chip that only resembles the one in the table, or is a slice of it.
VARIANT = re.compile(r"\b(Ti|D|SUPER|Laptop|Max-Q|MIG)\b")

# The sizes of the square matrices that measure a rate, in rows.
MIN_PRODUCT_SIZE = 512
MAX_PRODUCT_SIZE = 8192
UNSTEADY_RATIO = 2.0  # of the longest to the shortest time, from which the times are unsteady
MOST_PRODUCT_SECONDS = 0.2  # for products with unsteady times
LONG_PRODUCT_SECONDS = 0.03  # a product that takes this long keeps the device busy


def peak_tflops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the most TFLOP/s that a device can do in matrix products, for the MFU.

    Args:
        dtype: the dtype of the products. For fp32, the rate is that of TF32 if torch may use TF32.

    Returns:
        The rate, and its source: "data sheet", "measured", or "unknown" with the rate 0.
    """
    name = device_name(device) if is_accelerator(device) else ""
    if dtype != torch.float32:
        column = 0
    elif torch.get_float32_matmul_precision() == "high":  # TF32
        column = 1
    else:
        column = 2
    for model_pattern, figures in PEAK_TFLOPS.items():
        if re.search(rf"\b{model_pattern}\b", name) and not VARIANT.search(name):
            return figures[column], "data sheet"
    try:
        return measured_tflops(device, dtype), "measured"
    except Exception:  # too little memory, or no such product: the figure must not stop the run
        return 0.0, "unknown"


def measured_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the measured TFLOP/s of products of square matrices.

    The matrices have 512 rows on a CPU. On an accelerator they grow, up to 8192 rows, until a
    product takes long enough to keep the device busy.
    """
    size = MIN_PRODUCT_SIZE
    seconds = product_seconds(size, device, dtype)
    while is_accelerator(device) and size < MAX_PRODUCT_SIZE and seconds < LONG_PRODUCT_SECONDS:
        size *= 2
        seconds = product_seconds(size, device, dtype)
    # A product takes size³ multiplications, and about as many additions.
    return 2 * size**3 / seconds / 1e12


def product_seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the shortest time, in seconds, of a product of two matrices with `size` rows."""
    left = torch.ones(size, size, device=device, dtype=dtype)
    right = torch.ones(size, size, device=device, dtype=dtype)

    def multiply() -> None:
        left @ right
        synchronize_stream(device)

    multiply()  # the first product also chooses its kernel, so it takes longer
    seconds = timeit.repeat(multiply, number=1, repeat=5)
    # If other programs use the same cores, look longer for a moment without them.
    while max(seconds) > UNSTEADY_RATIO * min(seconds) and sum(seconds) < MOST_PRODUCT_SECONDS:
        seconds += timeit.repeat(multiply, number=1, repeat=5)
    return min(seconds)
