"""Speculative decoding with a drafter and any Hugging Face target: the loop that a server runs, in its plain form.

At temperature 0 the tokens are the target's own greedy ones, whatever the drafter; above it they have the target's
own distribution, by exact rejection sampling. The counting is that of dflash 0.1.0: the first token comes from the
prefill and belongs to no step; a step yields the accepted drafts and one token of the target's, cut at the first
stop token and at the limit before it is counted; the last block shrinks to min(B, tokens still allowed + 1).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dflash_engine.drafter.cache import DraftCache
from dflash_engine.drafter.draft import Proposal, propose
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.drafter.sampling import GREEDY, Sampling, rejection, residual
from dflash_engine.drafter.visibility import Visibility
from dflash_engine.errors import DataError, TargetError
from dflash_engine.target.state import TargetState

__all__ = ["DecodingStep", "Generation", "generate"]


@dataclass(frozen=True)
class DecodingStep:
    """One verification step."""

    anchor: int
    """Position of the known token."""
    block: tuple[int, ...]
    """Anchor token and drafts."""
    verified: tuple[int, ...]
    """The target's own token behind each slot: its argmax; when sampling, of the one row that was sampled."""
    matched: int
    """Drafts that stood."""
    emitted: tuple[int, ...]
    """Tokens added, at least one."""


@dataclass(frozen=True)
class Generation:
    """What was said, and how."""

    tokens: tuple[int, ...]
    """New ids, the stop token included."""
    finish: Literal["stop", "length"]
    steps: tuple[DecodingStep, ...]

    @property
    def acceptance_lengths(self) -> list[int]:
        """Tokens a step; 1 + their sum is the number of tokens."""
        return [len(step.emitted) for step in self.steps]


@torch.no_grad()
def generate(
    drafter: DFlashDrafter,
    target: Any,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    block_size: int | None = None,
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
    last_is_normed: bool = False,
) -> Generation:
    """Complete a prompt. `target`: a causal language model of transformers, on the drafter's device.

    block_size: the drafter's own unless given (more than it was trained with collapses all positions); 1 is plain
    decoding. generator: on the
    device; without one torch's own. Raises DataError for a prompt or limit that cannot be, TargetError for layers
    that cannot be tapped and for logits that are not finite.
    """
    size = drafter.config.block_size if block_size is None else block_size
    vocabulary = target.get_input_embeddings().weight.shape[0]
    if not prompt or max_new_tokens < 1 or not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise DataError(
            f"a prompt of {len(prompt)} tokens and at most {max_new_tokens} new ones: expected at least one of each, "
            f"and ids within the vocabulary of {vocabulary}"
        )
    if size < 1:
        raise DataError(f"block size {size}; expected at least 1")
    loop = _Loop(drafter, target, list(prompt), max_new_tokens, frozenset(stop_ids), sampling, generator, size)
    loop.prefill(last_is_normed=last_is_normed)
    steps = []
    while not loop.finished():
        steps.append(loop.step(size))
    new = loop.ids[len(prompt) :]
    return Generation(tuple(new), "stop" if new[-1] in loop.stop_ids else "length", tuple(steps))


class _Loop:
    """One sequence. `ids` ends with the anchor: a token that the target has not seen yet."""

    def __init__(
        self,
        drafter: DFlashDrafter,
        target: Any,
        prompt: list[int],
        max_new_tokens: int,
        stop_ids: frozenset[int],
        sampling: Sampling,
        generator: torch.Generator | None,
        size: int,
    ) -> None:
        self._drafter, self._target, self.stop_ids = drafter, target, stop_ids
        self._sampling, self._generator = sampling, generator
        self.ids = prompt
        self._limit = len(prompt) + max_new_tokens
        self._embedding = target.get_input_embeddings().weight
        self._head = target.get_output_embeddings().weight
        self._device = self._embedding.device
        dtype = drafter.fc.weight.dtype
        self._cache = DraftCache(drafter.config, self._limit + size, self._device, dtype)
        self._taps = torch.empty(0)  # [S, K * H]: those of the positions that the drafter has not seen yet

    def prefill(self, *, last_is_normed: bool) -> None:
        ids = torch.tensor([self.ids], device=self._device)
        self._state = TargetState(self._target, self._drafter.config.target_layer_ids, last_is_normed=last_is_normed)
        logits, self._taps = self._state.extend(ids, logits_to_keep=1)
        self.ids = [*self.ids, int(self._pick(_finite(logits))[0])]

    def finished(self) -> bool:
        return self.ids[-1] in self.stop_ids or len(self.ids) >= self._limit

    def step(self, block_size: int) -> DecodingStep:
        anchor = len(self.ids) - 1
        size = min(block_size, self._limit - anchor)
        proposal = self._draft(anchor, size) if size > 1 else Proposal(torch.empty(0, dtype=torch.int64), None)
        block = [self.ids[-1], *proposal.tokens.tolist()]
        logits, taps = self._state.extend(torch.tensor([block], device=self._device))
        matched, verified = self._verify(_finite(logits), proposal)
        emitted = [*block[1 : matched + 1], verified[min(matched, len(verified) - 1)]]
        emitted = emitted[: self._limit - len(self.ids)]
        stops = [i for i, token in enumerate(emitted) if token in self.stop_ids]
        emitted = emitted[: stops[0] + 1] if stops else emitted
        self._state.keep(len(emitted))
        self._taps = taps[: len(emitted)]
        self.ids = [*self.ids, *emitted]
        return DecodingStep(anchor, tuple(block), tuple(verified), matched, tuple(emitted))

    def _draft(self, anchor: int, size: int) -> Proposal:
        drafter, config = self._drafter, self._drafter.config
        # Everything before the anchor that the drafter does not have; with block size 1 steps in between, much.
        positions = torch.arange(anchor - len(self._taps), anchor, device=self._device)[None]
        features = drafter.context_features(self._taps[None].to(drafter.fc.weight.dtype))
        self._cache.append(drafter.context_kv(features, positions))
        ids = torch.full((1, size), config.mask_token_id, device=self._device)
        ids[0, 0] = self.ids[-1]
        hidden = drafter(
            drafter.embed(ids, self._embedding).to(features.dtype),
            torch.arange(anchor, anchor + size, device=self._device)[None],
            self._cache.context(),
            Visibility(torch.tensor([[anchor]], device=self._device), size, anchor),
        )
        return propose(drafter, hidden[0, 1:], ids[0, :1], self._head, self._sampling, self._generator)

    def _verify(self, logits: Tensor, proposal: Proposal) -> tuple[int, list[int]]:
        """(drafts that stand, the target's tokens) from logits [size, V]."""
        drafted = proposal.tokens
        if self._sampling.greedy:
            own = logits.argmax(-1)
            return int((own[: len(drafted)] == drafted).int().cumprod(0).sum()), own.tolist()
        chances = self._sampling.probabilities(logits)
        if not len(drafted) or proposal.probabilities is None:
            return 0, [int(self._draw(chances[:1])[0])]
        uniform = torch.rand(len(drafted), device=self._device, generator=self._generator)
        matched = rejection(drafted, chances, proposal.probabilities, uniform)
        return matched, [int(self._draw(residual(matched, chances, proposal.probabilities)[None])[0])]

    def _pick(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1) if self._sampling.greedy else self._draw(self._sampling.probabilities(logits))

    def _draw(self, chances: Tensor) -> Tensor:
        return torch.multinomial(chances, 1, generator=self._generator)[:, 0]


def _finite(logits: Tensor) -> Tensor:
    if not bool(torch.isfinite(logits).all()):
        raise TargetError("the target's logits are not finite; its weights are damaged, or its dtype is too narrow")
    return logits
