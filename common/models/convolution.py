"""A convolution that is faster on a CPU for images with few pixels."""

import torch
from torch import nn
from torch.nn import functional as F

# For images of at most so many pixels, a matrix product is faster than oneDNN. OneDNN takes up to
# six times as long in fp32 (two cores of an AMD EPYC with AVX2), mostly for the weight's gradient.
# From four by four pixels on, oneDNN is at least as fast.
MAX_PIXELS = 4


class Convolution(nn.Conv2d):
    """A faster `nn.Conv2d`, whose results differ only in rounding.

    On a CPU, images of at most `MAX_PIXELS` pixels are computed as a product of matrices. This
    product assumes one group, no dilation, and zeros as the padding, whose width is stated in
    pixels. Do not pass other values of these options.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return [batch, channels out, rows, columns] from [batch, channels in, rows, columns]."""
        if images.device.type != "cpu" or images.shape[2:].numel() > MAX_PIXELS:
            return super().forward(images)
        rows_above, columns_left = map(int, self.padding)
        padding = (columns_left, columns_left, rows_above, rows_above)
        patches = F.pad(images, padding).permute(0, 2, 3, 1)
        for dimension, size, step in zip((1, 2), self.kernel_size, self.stride, strict=True):
            patches = patches.unfold(dimension, size, step)
        # Patches are now [batch, rows, columns, channels, kernel rows, kernel columns]. The last
        # three are flattened in the order in which the weight is stored, so that the weight is not
        # copied. The recipes store weights with their channels last; those of a sharded model have
        # their channels first.
        is_channels_last = self.weight.is_contiguous(memory_format=torch.channels_last)
        order = (2, 3, 1) if is_channels_last else (1, 2, 3)  # order of the weight's dimensions
        order_of_patches = [2 + dimension for dimension in order]
        patches = patches.permute(0, 1, 2, *order_of_patches).flatten(3)
        weight = self.weight.permute(0, *order).flatten(1)
        return F.linear(patches, weight, self.bias).permute(0, 3, 1, 2)
