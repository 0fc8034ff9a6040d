"""Trains timm's ResNet-50 under AMP with memory format channels last.

The loop is that of timm's `benchmark.py --bench train --amp --channels-last`. It also has a loss
scale, which fp16 needs and which timm's `train.py` has.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from benchmarks.harness.clock import LoopClock
from benchmarks.harness.isolation import default_device
from benchmarks.harness.precisions import AUTOCAST_TYPES
from benchmarks.harness.rounds import FinishedTraining


def train_timm_resnet50(
    updates: int,
    seed: int,
    untimed: int,
    *,
    batch_size: int,
    precision: str,
    classes: int,
    image_size: int = 224,
) -> FinishedTraining:
    """Train on one random batch that lies on the device.

    Raises:
        ImportError: when the package timm is missing.
    """
    import timm

    device = default_device()
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = True
    model = timm.create_model("resnet50", num_classes=classes).to(
        device, memory_format=torch.channels_last
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    images = torch.randn(batch_size, 3, image_size, image_size, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, classes, (batch_size,), device=device)
    model.train()
    clock = LoopClock(untimed)
    clock.start()
    for _ in range(untimed + updates):
        optimizer.zero_grad()
        with torch.autocast(device.type, AUTOCAST_TYPES[precision]):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        clock.update()
    return FinishedTraining(clock.stop(), updates * batch_size, loss.item())
