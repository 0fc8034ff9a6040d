"""Turns dropout off, so that two ways of making the same updates can be compared.

Dropout draws one mask for each micro-batch. So two micro-batches get different masks from one batch
of the same samples, although both ways are correct.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from common.tools.prove.observation.session import Session

FUNCTIONS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)


def install(session: Session) -> None:
    """Replace torch's dropout functions, which its modules call."""
    for name in FUNCTIONS:
        session.wrap(functional, name, keep_all)
    session.wrap(functional, "scaled_dot_product_attention", attend_to_all)
    session.wrap(nn.RNNBase, "__init__", build_without_dropout)


def keep_all(
    original: Callable[..., torch.Tensor], input: torch.Tensor, *rest: object, **named: object
) -> torch.Tensor:
    """Return the input of a dropout, as in an evaluation."""
    return original(input, 0.0, training=False)


def attend_to_all(
    original: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    *rest: object,
    **named: object,
) -> torch.Tensor:
    """Compute attention without dropout."""
    return original(query, key, value, attn_mask, 0.0, *rest, **named)


def build_without_dropout(
    original: Callable[..., None], layers: nn.RNNBase, *positional: object, **named: object
) -> None:
    """Build recurrent layers, which pass their dropout to a kernel."""
    original(layers, *positional, **named)
    layers.dropout = 0.0
