"""Sampling and exact rejection sampling: the text has the target's own distribution, whatever the drafter.

Sources: dflash 0.1.0 for the order temperature, top-k, top-p; Leviathan et al. (arXiv 2211.17192) for the rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["GREEDY", "Sampling", "rejection", "residual"]


@dataclass(frozen=True)
class Sampling:
    """How a token is picked. Temperature 0 is greedy, and then the others mean nothing."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""

    def __post_init__(self) -> None:
        """Raise ValueError for values that mean nothing."""
        if not 0 <= self.temperature < float("inf") or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                f"temperature {self.temperature}, top_p {self.top_p}, top_k {self.top_k}: expected a temperature of "
                "at least 0, top_p above 0 and up to 1, top_k of at least 0"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """logits [..., V] -> probabilities [..., V] float32, temperature first, then top-k, then top-p over the kept.

        top-p keeps the tokens before which less than p has been gathered, so at least one. Not for greedy.
        """
        scores = logits.float() / self.temperature
        kept = None
        if 0 < self.top_k < scores.shape[-1]:
            scores, kept = scores.topk(self.top_k, dim=-1)
        probabilities = scores.softmax(-1)
        if self.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            ordered = ordered * (ordered.cumsum(-1) - ordered < self.top_p)
            probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        if kept is not None:
            whole = torch.zeros(logits.shape, dtype=probabilities.dtype, device=logits.device)
            probabilities = whole.scatter(-1, kept, probabilities)
        return probabilities


GREEDY = Sampling()


def rejection(drafted: Tensor, target: Tensor, draft: Tensor, uniform: Tensor) -> int:
    """How many drafted tokens stand: the leading run of u * q < p.

    drafted [k] int64, target [k + 1, V] and draft [k, V] probabilities, uniform [k] in [0, 1).
    """
    k = len(drafted)
    p = target[:k].gather(1, drafted[:, None])[:, 0]
    q = draft.gather(1, drafted[:, None])[:, 0]
    return int((uniform * q < p).int().cumprod(0).sum())


def residual(accepted: int, target: Tensor, draft: Tensor) -> Tensor:
    """Distribution [V] of the token after `accepted` drafted ones; shapes as in `rejection`.

    The normalised positive part of p - q at the first rejection, or the target's last row where all stand.
    """
    if accepted == len(draft):
        return target[accepted]
    left = (target[accepted] - draft[accepted]).clamp(min=0)
    total = left.sum()
    # Rounding alone can leave nothing where p and q are equal; then p itself is right.
    return left / total if total > 0 else target[accepted]
