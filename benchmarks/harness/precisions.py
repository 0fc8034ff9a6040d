"""What torch and the peers' libraries call the precisions fp32, bf16 and fp16."""

from typing import Literal

import torch

AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = {"fp32": torch.float32, **AUTOCAST_TYPES}
ACCELERATE_PRECISIONS = {"fp32": "no"}  # other precisions keep their names
LIGHTNING_PRECISIONS: dict[str, Literal["32-true", "bf16-mixed", "16-mixed"]] = {
    "fp32": "32-true",
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
}
