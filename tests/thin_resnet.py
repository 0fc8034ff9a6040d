"""A copy of the ResNet recipe with an eighth of the channels, for tests that need no accuracy.

A short run of the full ResNet spends most of its time on making, saving and hashing 11 million
parameters.
"""

from __future__ import annotations

from pathlib import Path

from tests.edited_copies import edited

# Texts of the recipe, and the same with an eighth of the channels.
CHANGES = (
    ("conv_bn(channels, 64, kernel", "conv_bn(channels, 8, kernel"),
    ("        in_channels = 64\n", "        in_channels = 8\n"),
    ("WIDTHS = (64, 128, 256, 512)", "WIDTHS = (8, 16, 32, 64)"),
)


def write_thin_resnet(folder: Path) -> Path:
    """Write the copy as `resnet.py` in a folder; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    return edited("resnet", folder, *CHANGES)
