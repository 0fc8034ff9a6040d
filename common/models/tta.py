"""Test-time augmentation: a model that looks at shifted and mirrored views of each image."""

import torch
from torch import nn
from torch.nn import functional as F

SHIFTS = ((0, 0), (-1, -1), (1, 1))  # in pixels, down and to the right
WEIGHTS = (0.5, 0.25, 0.25)


class Views(nn.Module):
    """The mean logits of a model over six views: three shifts, each also mirrored.

    The unshifted image has the same weight as the two shifted ones together, as in arXiv
    2404.00498, section 3.5. An evaluation takes six times as long.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, classes] for images [batch, channels, height, width]."""
        height, width = images.shape[2:]
        padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
        logits = torch.zeros((), device=images.device)
        for (down, right), weight in zip(SHIFTS, WEIGHTS, strict=True):
            view = padded[:, :, 1 - down : 1 - down + height, 1 - right : 1 - right + width]
            # The view and its mirror image share the weight.
            logits = logits + weight / 2 * (self.model(view) + self.model(view.flip(3)))
        return logits
