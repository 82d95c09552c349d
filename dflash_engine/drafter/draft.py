"""What a drafter proposes for the slots of a block, and with which probability."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.drafter.sampling import GREEDY, Sampling
from dflash_engine.drafter.selector import CandidateSelector

__all__ = ["Proposal", "propose", "propose_slot"]


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens of one block."""

    tokens: Tensor
    """[k] int64, as the target counts them."""
    probabilities: Tensor | None
    """[k, V] over the target's vocabulary: from what each was drawn; None where greedy."""


def propose_slot(drafter: DFlashDrafter, hidden: Tensor, previous: Tensor, head: Tensor) -> Tensor:
    """Greedy tokens [n] of slots with states hidden [n, H] and tokens before them previous [n]; head [V, H]."""
    logits = drafter.logits(hidden, head)
    if drafter.candidate_selector is None:
        return drafter.target_ids(logits.argmax(-1))
    candidates, scores = drafter.candidate_selector(hidden, logits, previous)
    best: Tensor = candidates.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
    return best


def propose(
    drafter: DFlashDrafter,
    hidden: Tensor,
    anchor: Tensor,
    head: Tensor,
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
) -> Proposal:
    """The proposal for slots 1..k with states hidden [k, H] behind the anchor token [1].

    A DFlash 2 drafter samples among its candidates by temperature alone, as dflash 0.1.0 does; the rejection rule is
    exact for any distribution that is told.
    """
    if drafter.candidate_selector is not None:
        return _selected(drafter.candidate_selector, drafter.logits(hidden, head), hidden, anchor, sampling, generator)
    if sampling.greedy:
        return Proposal(propose_slot(drafter, hidden, anchor, head), None)
    chances = sampling.probabilities(drafter.logits(hidden, head))  # [k, R]
    rows = torch.multinomial(chances, 1, generator=generator)[:, 0]
    if drafter.d2t is None:
        return Proposal(rows, chances)
    ids = drafter.target_ids(torch.arange(chances.shape[1], device=rows.device))
    whole = torch.zeros(len(chances), len(head), device=chances.device)
    return Proposal(drafter.target_ids(rows), whole.index_copy(1, ids, chances))


def _selected(
    selector: CandidateSelector,
    logits: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> Proposal:
    by_temperature = Sampling(sampling.temperature)
    tokens, rows = [], []
    previous = anchor
    for slot in range(len(hidden)):
        candidates, scores = selector(hidden[slot, None], logits[slot, None], previous)
        if sampling.greedy:
            index = scores.argmax(-1, keepdim=True)
        else:
            chances = by_temperature.probabilities(scores)
            index = torch.multinomial(chances, 1, generator=generator)
            rows.append(torch.zeros_like(logits[slot, None], dtype=chances.dtype).scatter(1, candidates, chances))
        previous = candidates.gather(1, index)[:, 0]
        tokens.append(previous)
    return Proposal(torch.cat(tokens), torch.cat(rows) if rows else None)
