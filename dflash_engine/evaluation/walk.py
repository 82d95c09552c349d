"""The drafter alone walks along the references: what a verification with the target would have accepted.

Under greedy decoding every accepted token is the target's own greedy token, so the path through a completion
is known: draft a block at the anchor, compare it with the reference, advance by accepted + 1. The context of
every step is the target's hidden states strictly before the anchor, which were captured once; each layer's
context keys and values are computed once for the whole path and masked to what the step may see. All prompts
of a batch advance in lockstep, so the drafter's weights are read once a step for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_engine.drafter.cache import ContextKV, LayerContext
from dflash_engine.drafter.draft import propose_slot
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.drafter.visibility import Visibility
from dflash_engine.evaluation.acceptance import PromptTrace, VerificationStep

__all__ = ["ReferencePath", "walk"]

_BATCH_BYTES = 256 << 20
"""Taps of one lockstep batch, padded."""


@dataclass(frozen=True)
class ReferencePath:
    """One prompt with its greedy completion and the target's states over both."""

    prompt_length: int
    tokens: Tensor
    """[S] int64: prompt and completion."""
    taps: Tensor
    """[S, K * H_target]: tapped states; the last position's are never needed."""
    max_new_tokens: int
    """The limit under which the completion was made: it shrinks the last blocks, a stop token does not."""

    @property
    def first_anchor(self) -> int:
        """Position of the prefill's token."""
        return self.prompt_length


@torch.no_grad()
def walk(
    drafter: DFlashDrafter,
    embedding: Tensor,
    head: Tensor,
    paths: Sequence[ReferencePath],
    *,
    block_size: int,
    progress: Callable[[int, int, float | None], None],
) -> list[PromptTrace]:
    """The verification steps of every path, in the order given.

    embedding and head [V, H] are the target's. The last block shrinks to the tokens still allowed + 1; a
    drafter does not know of a stop token ahead, so that one shrinks nothing, and slots behind it are judged by
    nobody. `progress` hears of tokens walked and in all, those of the prefill left out, and of the acceptance
    length so far.
    """
    total = sum(len(path.tokens) - 1 - path.first_anchor for path in paths)
    walked = steps = 0
    traces: dict[int, PromptTrace] = {}
    for chosen in _batches(paths):
        batch = _Lockstep(drafter, embedding, head, [paths[i] for i in chosen], block_size)
        while batch.advance():
            done = walked + batch.walked()
            progress(done, total, done / (steps + batch.steps()))
        walked += batch.walked()
        steps += batch.steps()
        traces.update(zip(chosen, batch.traces(), strict=True))
    return [traces[i] for i in range(len(paths))]


def _batches(paths: Sequence[ReferencePath]) -> list[list[int]]:
    """Indices of paths of similar length, each batch within the memory bound."""
    order = sorted(range(len(paths)), key=lambda i: len(paths[i].tokens))
    batches: list[list[int]] = []
    for i in order:
        width = len(paths[i].tokens) * paths[i].taps.shape[1] * paths[i].taps.element_size()
        if batches and (len(batches[-1]) + 1) * width <= _BATCH_BYTES:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


class _Lockstep:
    """Some paths, padded to one length, that draft together until the last is through."""

    def __init__(
        self, drafter: DFlashDrafter, embedding: Tensor, head: Tensor, paths: list[ReferencePath], block_size: int
    ) -> None:
        self._drafter, self._embedding, self._head = drafter, embedding, head
        self._block_size = block_size
        self._paths = paths
        self._ends = torch.tensor([len(path.tokens) for path in paths])
        self._anchors = torch.tensor([path.first_anchor for path in paths])
        self._limits = torch.tensor([path.prompt_length + path.max_new_tokens for path in paths])
        self._steps: list[list[VerificationStep]] = [[] for _ in paths]
        longest = int(self._ends.max())
        self._tokens = torch.zeros(len(paths), longest + block_size, dtype=torch.int64)  # [b, T + B]
        taps = torch.zeros(len(paths), longest, paths[0].taps.shape[1])
        for row, path in enumerate(paths):
            self._tokens[row, : len(path.tokens)] = path.tokens
            taps[row, : len(path.taps)] = path.taps
        positions = torch.arange(longest).expand(len(paths), -1)
        self._context: ContextKV = drafter.context_kv(drafter.context_features(taps), positions)

    def walked(self) -> int:
        """Completion tokens that are behind the anchors by now."""
        started = torch.tensor([path.first_anchor for path in self._paths])
        return int((self._anchors - started).sum())

    def steps(self) -> int:
        """Verification steps made by now."""
        return sum(len(steps) for steps in self._steps)

    def traces(self) -> list[PromptTrace]:
        """Every path's steps so far."""
        return [PromptTrace(tuple(steps)) for steps in self._steps]

    def advance(self) -> bool:
        """One verification step for each path that has tokens left; False when none has."""
        left = self._ends - 1 - self._anchors  # tokens of the reference behind the anchor
        rows = (left > 0).nonzero().flatten()
        if not len(rows):
            return False
        anchors, left = self._anchors[rows], left[rows]
        # Tokens still allowed + 1 is the limit less the anchor: the anchor itself is one of those counted.
        sizes = (self._limits[rows] - anchors).clamp(max=self._block_size)
        hidden = self._draft(rows, anchors, sizes)  # [r, B - 1, H]
        slots = torch.arange(1, self._block_size)
        wanted = self._tokens[rows[:, None], anchors[:, None] + slots]  # [r, B - 1]
        offered = torch.minimum(sizes - 1, left)
        drafted, matched = self._verify(hidden, self._tokens[rows, anchors], wanted, offered)
        emitted = torch.minimum(matched + 1, left)
        for row, anchor, slots_judged, good, new, guesses in zip(
            rows.tolist(),
            anchors.tolist(),
            offered.tolist(),
            matched.tolist(),
            emitted.tolist(),
            drafted.tolist(),
            strict=True,
        ):
            bonus = self._tokens[row, anchor + good + 1 : anchor + new + 1].tolist()
            self._steps[row].append(VerificationStep(slots_judged, good, (*guesses[:good], *bonus)))
        self._anchors[rows] += emitted
        return True

    def _draft(self, rows: Tensor, anchors: Tensor, sizes: Tensor) -> Tensor:
        """States [r, B - 1, H] of the drafted slots at anchors [r]; beyond a block's size they mean nothing."""
        block = self._block_size
        slots = torch.arange(block)
        ids = torch.full((len(rows), block), self._drafter.config.mask_token_id)
        ids[:, 0] = self._tokens[rows, anchors]
        positions = anchors[:, None] + slots  # [r, B]
        longest = int(anchors.max())
        context = [LayerContext(c.keys[rows, :, :longest], c.values[rows, :, :longest]) for c in self._context]
        # Surplus slots of a shrunken block are no keys, so the others see exactly a shorter block.
        visibility = Visibility(anchors[:, None], block, longest, sizes=sizes[:, None])
        states: Tensor = self._drafter(self._drafter.embed(ids, self._embedding), positions, context, visibility)
        return states[:, 1:]

    def _verify(self, hidden: Tensor, anchor_ids: Tensor, wanted: Tensor, offered: Tensor) -> tuple[Tensor, Tensor]:
        """(drafted ids [r, B - 1], matched [r]) of slot states [r, B - 1, H] against wanted ids [r, B - 1].

        The head is most of a step's arithmetic, so it is computed slot by slot and only for blocks that still
        match; slots behind a mismatch are never drafted and stay -1.
        """
        drafted = torch.full_like(wanted, -1)
        matched = torch.zeros_like(offered)
        going = torch.arange(len(hidden))
        for slot in range(self._block_size - 1):
            going = going[(matched[going] == slot) & (offered[going] > slot)]
            if not len(going):
                break
            previous = anchor_ids if slot == 0 else drafted[:, slot - 1]
            drafted[going, slot] = propose_slot(self._drafter, hidden[going, slot], previous[going], self._head)
            matched[going] += (drafted[going, slot] == wanted[going, slot]).long()
        return drafted, matched
