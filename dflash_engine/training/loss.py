"""The drafter's loss: cross-entropy of every counted slot, weighted by its place in the block.

w_k = exp(-(k - 1) / gamma) for slot k >= 1 (arXiv 2602.06036, section on training): an error early in the
block ends the accepted run, so early slots weigh more. Numerator and denominator are returned apart, because
an optimizer step divides by the sum over all of its micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["LossParts", "block_loss", "slot_weights"]


@dataclass(frozen=True)
class LossParts:
    """What a micro-batch adds to its optimizer step's loss and accuracy."""

    numerator: Tensor
    """Scalar, sum of w * CE; carries the gradient."""
    weight: Tensor
    """Scalar, sum of w."""
    correct: Tensor
    """Scalar, counted slots whose most likely id is the label."""
    slots: Tensor
    """Scalar, counted slots."""


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """[B] float32: 0 for the anchor, then exp(-(k - 1) / gamma)."""
    weights = torch.exp(-(torch.arange(block_size, dtype=torch.float32) - 1) / gamma)
    weights[0] = 0.0
    return weights


def block_loss(hidden: Tensor, labels: Tensor, counted: Tensor, head: Tensor, gamma: float) -> LossParts:
    """Loss of hidden [b, N, B, H] against labels [b, N, B] int64 (row numbers of `head`).

    head [V, H]: the target's, frozen; counted [b, N, B] bool. Only counted slots are computed: a slot outside
    the loss is left out by indexing, so whatever stands there cannot poison the sum.
    """
    if labels.shape != counted.shape or hidden.shape[:-1] != labels.shape:
        raise ValueError(f"hidden {tuple(hidden.shape)}, labels {tuple(labels.shape)}, counted {tuple(counted.shape)}")
    weights = slot_weights(labels.shape[2], gamma).to(hidden.device).expand(labels.shape)[counted]  # [n]
    logits = (hidden[counted] @ head.T).float()  # [n, V]
    wanted = labels[counted]
    losses = functional.cross_entropy(logits, wanted, reduction="none")
    return LossParts(
        numerator=(losses * weights).sum(),
        weight=weights.sum(),
        correct=(logits.detach().argmax(dim=1) == wanted).sum(),
        slots=counted.sum(),
    )
