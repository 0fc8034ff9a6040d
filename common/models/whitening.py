"""Filters that whiten the patches of images: a first layer that need not be trained."""

import torch

ADDED_VARIANCE = 5e-4  # added to each variance, so that noise is not amplified


def whitening_filters(images: torch.Tensor, kernel_size: int) -> torch.Tensor:
    """Return filters whose outputs, over all patches, are uncorrelated and have a variance near 1.

    They are the principal directions of the patches, each divided by its standard deviation. In
    directions with little variance, `ADDED_VARIANCE` keeps the outputs smaller. The negative of
    each filter is added, because an activation such as ReLU cuts off one of the two signs (arXiv
    2404.00498, section 3.1).

    Args:
        images: [samples, channels, height, width], scaled to mean 0.
        kernel_size: height and width of a patch.

    Returns:
        fp32 [2 × channels × kernel_size², channels, kernel_size, kernel_size].
    """
    channels = images.shape[1]
    patches = images.float().unfold(2, kernel_size, 1).unfold(3, kernel_size, 1)
    patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, channels * kernel_size**2)
    covariance = (patches.T @ patches).double() / len(patches)
    variances, directions = torch.linalg.eigh(covariance)
    filters = (directions / (variances + ADDED_VARIANCE).sqrt()).T
    filters = filters.reshape(-1, channels, kernel_size, kernel_size)
    return torch.cat([filters, -filters]).float()
