"""Adversarial training: how word embeddings are moved, and that samples stay independent."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from common.training.adversarial import EmbeddingAdversary

WORDS = 20
WIDTH = 6
CLASSES = 3
CASES = [(1, 4, 0.01, 0), (5, 3, 0.3, 1), (8, 9, 2.0, 2)]  # samples, tokens, share, seed


class Classifier(nn.Module):
    """The mean of nonlinear features of the words of a sample; word 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        features = torch.tanh(self.hidden(self.embedding(words)))
        is_word = (words > 0).float()[..., None]
        return self.head((features * is_word).sum(1) / is_word.sum(1))


def batch_of(samples: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words and labels; about a third of the words behind the first one is padding."""
    words = torch.randint(1, WORDS, (samples, tokens))
    words[:, 1:][torch.rand(samples, tokens - 1) < 0.3] = 0
    return words, torch.randint(CLASSES, (samples,))


def loss_of(model: nn.Module, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(words), labels)


def moved_losses(
    model: Classifier, adversary: EmbeddingAdversary, words: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each sample with moved embeddings, and the movements."""
    loss_of(model, words, labels).backward()
    with adversary.moving():
        movement = adversary.movement
        losses = F.cross_entropy(model(words), labels, reduction="none")
    assert movement is not None
    return losses, movement


@pytest.mark.parametrize(("samples", "tokens", "share", "seed"), CASES)
def test_each_sample_moves_by_the_share_against_its_loss(
    samples: int, tokens: int, share: float, seed: int
) -> None:
    """Padding does not move, and a small movement increases the loss of each sample."""
    torch.manual_seed(seed)
    model = Classifier()
    words, labels = batch_of(samples, tokens)
    before = F.cross_entropy(model(words), labels, reduction="none")
    adversary = EmbeddingAdversary(model.embedding, share)
    after, movement = moved_losses(model, adversary, words, labels)
    assert movement.shape == (samples, tokens, WIDTH)
    for sample in range(samples):
        embeddings = model.embedding(words[sample][words[sample] > 0])
        assert torch.allclose(movement[sample].norm(), share * embeddings.norm())
    assert not movement[words == 0].any()
    if share < 0.1:
        assert (after > before).all()


@pytest.mark.parametrize(("samples", "tokens", "share", "seed"), CASES)
def test_movement_depends_on_no_other_sample(
    samples: int, tokens: int, share: float, seed: int
) -> None:
    """Nor on padding. So n micro-batches make the same update as one that is n times as large."""
    torch.manual_seed(seed)
    model = Classifier().double()
    words, labels = batch_of(samples, tokens)
    adversary = EmbeddingAdversary(model.embedding, share)
    together, _ = moved_losses(model, adversary, words, labels)
    for number in range(samples):
        own_words = words[number][words[number] > 0][None]  # without padding
        own_label = labels[number : number + 1]
        alone, _ = moved_losses(model, adversary, own_words, own_label)
        assert torch.allclose(alone, together[number])


def test_other_passes_are_not_moved() -> None:
    """Neither evaluations nor later passes are; the gradients of both passes add up."""
    torch.manual_seed(0)
    model = Classifier().double()
    words, labels = batch_of(4, 5)
    logits = model(words)
    adversary = EmbeddingAdversary(model.embedding, 0.5)
    loss_of(model, words, labels).backward()
    first_gradient = gradient_of_head(model)
    with adversary.moving():
        model.eval()
        assert torch.equal(model(words), logits)
        model.train()
        moved_loss = loss_of(model, words, labels)
    assert torch.equal(model(words), logits)
    (moved_gradient,) = torch.autograd.grad(moved_loss, [model.head.weight], retain_graph=True)
    assert not torch.allclose(moved_gradient, first_gradient)
    moved_loss.backward()
    assert torch.allclose(gradient_of_head(model), first_gradient + moved_gradient)


def gradient_of_head(model: Classifier) -> torch.Tensor:
    assert model.head.weight.grad is not None
    return model.head.weight.grad.clone()


def test_frozen_embeddings_move_too() -> None:
    """As in LoRA, where only other weights are trained."""
    torch.manual_seed(0)
    model = Classifier()
    model.embedding.requires_grad_(False)
    words, labels = batch_of(4, 5)
    _, movement = moved_losses(model, EmbeddingAdversary(model.embedding, 0.1), words, labels)
    assert movement.any()
    assert model.embedding.weight.grad is None


def test_loss_without_a_gradient_moves_nothing() -> None:
    """A norm of 0 must not make the embeddings NaN."""
    model = Classifier()
    nn.init.zeros_(model.head.weight)
    words, labels = batch_of(4, 5)
    losses, movement = moved_losses(model, EmbeddingAdversary(model.embedding, 0.1), words, labels)
    assert not movement.any()
    assert losses.isfinite().all()


def test_moving_needs_a_backward_pass() -> None:
    """The message says which call is missing, also in the second micro-batch."""
    model = Classifier()
    words, labels = batch_of(4, 5)
    adversary = EmbeddingAdversary(model.embedding, 0.1)
    for _ in range(2):
        loss = loss_of(model, words, labels)
        refused = pytest.raises(RuntimeError, match=r"call accelerator.backward\(loss\)")
        with refused, adversary.moving():
            pass
        loss.backward()
        with adversary.moving():
            pass
