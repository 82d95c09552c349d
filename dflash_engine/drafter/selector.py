"""DFlash 2's candidate selector: the proposal is picked left to right among each slot's best candidates.

score(candidate) = logit + sum over r of predecessor[previous]_r * (hidden_projection h)_r * successor[candidate]_r,
over the slot's top-k logits; `previous` starts at the anchor. Source: z-lab's dflash 0.1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_engine.drafter.config import DFlash2Config, DrafterConfig

__all__ = ["CandidateSelector"]


class CandidateSelector(nn.Module):
    """Scores of one slot's candidates given the token before it."""

    def __init__(self, config: DrafterConfig, more: DFlash2Config) -> None:
        super().__init__()
        self.top_k = more.selector_top_k
        # Bare parameters, not embeddings: that is how they are named in published files.
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, more.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, more.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, more.selector_rank, bias=False)

    def forward(self, hidden: Tensor, logits: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [n, H], logits [n, V], previous [n] int64 -> candidate ids [n, k] and their scores [n, k].

        Candidates come by falling logit, equal ones in no given order.
        """
        unary, candidates = logits.topk(self.top_k, dim=-1)  # [n, k]
        gate = functional.embedding(previous, self.predecessor_codebook) * self.hidden_projection(hidden)  # [n, r]
        transition = torch.einsum("nr,nkr->nk", gate, functional.embedding(candidates, self.successor_codebook))
        return candidates, unary + transition
