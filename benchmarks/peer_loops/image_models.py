"""The peers' models of images, in plain PyTorch with its default initial weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))  # of a ResNet-18: width, and stride of the first
MLP_WIDTH = 512
MLP_DROPOUT = 0.2


def build_model(name: str, channels: int, image_size: int, classes: int) -> nn.Module:
    """Return a model that maps [batch, channels, image_size, image_size] to [batch, classes].

    Args:
        name: "mlp", "cnn", "resnet9" or "resnet18"; "resnet9" takes images of 32×32.
    """
    if name == "mlp":
        return mlp(channels * image_size**2, classes)
    if name == "cnn":
        return cnn(channels, image_size, classes)
    if name == "resnet9":
        return resnet9(channels, classes)
    return resnet18(channels, classes)


def mlp(in_features: int, classes: int) -> nn.Module:
    """Return two hidden layers of `MLP_WIDTH` with dropout."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_features, MLP_WIDTH),
        nn.ReLU(),
        nn.Dropout(MLP_DROPOUT),
        nn.Linear(MLP_WIDTH, MLP_WIDTH),
        nn.ReLU(),
        nn.Dropout(MLP_DROPOUT),
        nn.Linear(MLP_WIDTH, classes),
    )


def cnn(channels: int, image_size: int, classes: int) -> nn.Module:
    """Return the network that PyTorch's MNIST example describes: two convolutions, two layers."""
    pooled_size = (image_size - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=3),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * pooled_size**2, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )


def resnet9(channels: int, classes: int) -> nn.Module:
    """Return the network of 99991/cifar10-fast-simple, without ghost batch norm."""
    patch_size = channels * 3 * 3  # as many whitening filters
    return nn.Sequential(
        nn.Conv2d(channels, patch_size, kernel_size=3, padding=1, bias=False),
        normalized(patch_size, 64, kernel_size=1),
        normalized(64, 128, is_pooled=True),
        Residual(nn.Sequential(normalized(128, 128), normalized(128, 128))),
        normalized(128, 256, is_pooled=True),
        normalized(256, 512, is_pooled=True),
        Residual(nn.Sequential(normalized(512, 512), normalized(512, 512))),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(512, classes, bias=False),
    )


def normalized(
    width_in: int, width: int, kernel_size: int = 3, is_pooled: bool = False
) -> nn.Module:
    """Return a convolution with batch norm and CELU; pooling halves the image."""
    return nn.Sequential(
        nn.Conv2d(width_in, width, kernel_size, padding=kernel_size // 2, bias=False),
        nn.MaxPool2d(2) if is_pooled else nn.Identity(),
        nn.BatchNorm2d(width),
        nn.CELU(alpha=0.3),
    )


class Residual(nn.Module):
    """Adds a branch to its input."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the shape of the input."""
        return images + self.branch(images)


def resnet18(channels: int, classes: int) -> nn.Module:
    """Return a ResNet-18 for small images: a first convolution of 3×3, and no pooling after it."""
    width_in = STAGES[0][0]
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width_in, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(width_in),
        nn.ReLU(),
    ]
    for width, stride in STAGES:
        layers += [ResidualBlock(width_in, width, stride), ResidualBlock(width, width, 1)]
        width_in = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, classes)]
    return nn.Sequential(*layers)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with batch norm, beside a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width_in, width, kernel_size=3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(width),
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return [batch, width, height / stride, width / stride]."""
        return F.relu(self.branch(images) + self.shortcut(images))
