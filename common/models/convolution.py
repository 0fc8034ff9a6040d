"""Convolutions of images with few pixels, which on a CPU are faster as products of matrices."""

import torch
from torch import nn
from torch.nn import functional as F

# Up to here oneDNN takes up to six times as long in fp32 (two cores of an AMD EPYC with AVX2), most
# of it for the weight's gradient; from four by four on it is as fast, or faster.
MOST_PIXELS = 4


class Convolution(nn.Conv2d):
    """`nn.Conv2d` of one group, with zeros for padding: the same, but for rounding."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.device.type != "cpu" or images.shape[2:].numel() > MOST_PIXELS:
            return super().forward(images)
        above, left = map(int, self.padding)
        patches = F.pad(images, (left, left, above, above)).permute(0, 2, 3, 1)
        for dimension, size, step in zip((1, 2), self.kernel_size, self.stride, strict=True):
            patches = patches.unfold(dimension, size, step)
        # As the weight lies in memory, so that it is not copied: in shards its channels come first.
        is_last = self.weight.is_contiguous(memory_format=torch.channels_last)
        order = (2, 3, 1) if is_last else (1, 2, 3)
        patches = patches.permute(0, 1, 2, *(2 + place for place in order)).flatten(3)
        weight = self.weight.permute(0, *order).flatten(1)
        return F.linear(patches, weight, self.bias).permute(0, 3, 1, 2)
