"""Adversarial training: a second pass whose word embeddings were moved to increase the loss."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

SMALLEST_NORM = 1e-30  # of a gradient; keeps a gradient of zeros from becoming NaN


class EmbeddingAdversary:
    """Moves the word embeddings of each sample in the direction that increases its loss fastest.

    The method is the adversarial training of arXiv 1605.07725. There, embeddings are normalised, so
    that a distance means the same for each model. Here, the distance is a share of the norm of the
    sample's embeddings. A micro-batch makes two backward passes, and their gradients add up:

        loss, logits = compute_loss(model, batch)
        accelerator.backward(loss)
        with adversary.moving():
            moved_loss, _ = compute_loss(model, batch)
            accelerator.backward(moved_loss)

    The movement of a sample depends on no other sample, so that accumulation and several processes
    make the same updates. There is no state that a checkpoint would have to hold.
    """

    def __init__(self, embedding: nn.Module, share: float) -> None:
        """Observe the passes of a module.

        Args:
            embedding: the module that returns the word embeddings, [batch, tokens, width].
            share: the L2 norm of a sample's movement, as a share of the norm of its embeddings.
                Both norms are over all tokens but padding.
        """
        self.share = share
        self.embeddings: torch.Tensor | None = None  # of the last pass that was not moved
        self.movement: torch.Tensor | None = None  # [batch, tokens, width], while a pass is moved
        embedding.register_forward_hook(self.observe_or_move)

    def observe_or_move(
        self, embedding: nn.Module, inputs: object, embeddings: torch.Tensor
    ) -> torch.Tensor | None:
        """Keep the embeddings of a training pass, or return the moved ones, as a forward hook."""
        if not embedding.training or not torch.is_grad_enabled():
            return None
        if self.movement is not None:
            return embeddings + self.movement
        if not embeddings.requires_grad:  # frozen, as in LoRA
            embeddings.requires_grad_()
        embeddings.retain_grad()
        self.embeddings = embeddings
        return None

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Move the embeddings of the passes inside, by the gradient of the last backward pass.

        Raises:
            RuntimeError: there was no backward pass since the last movement.
        """
        if self.embeddings is None or self.embeddings.grad is None:
            raise RuntimeError("call accelerator.backward(loss) before adversary.moving()")
        gradient = self.embeddings.grad
        is_padding = (gradient == 0).all(dim=-1, keepdim=True)
        words = self.embeddings.detach().masked_fill(is_padding, 0.0)
        distance = self.share * norm_of_samples(words)
        self.movement = gradient * (distance / norm_of_samples(gradient).clamp_min(SMALLEST_NORM))
        self.embeddings = None
        try:
            yield
        finally:
            self.movement = None


def norm_of_samples(embeddings: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm of each sample of [batch, tokens, width], as [batch, 1, 1]."""
    return torch.linalg.vector_norm(embeddings, dim=(1, 2), keepdim=True)
