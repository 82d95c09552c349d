"""Which key a row of a block may see: one rule, from which every attention backend takes its mask.

Columns are T context positions, then all blocks' slots in the order of the rows. A row is slot k of a block with
anchor a, so it stands at position a + k. It sees context strictly before a, because the target's states at a come
only with the next verification, and the slots of its own block: all of them, or up to itself in a causal layer.

A sliding layer with window W sees a context position c where (a + k) - c < W (dflash 0.1.0, SpecForge 0.2.0), and
of its block the slots less than W away. speculators 0.9.0 counts from the anchor instead: c >= a - W for every
slot, and no window inside the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dflash_engine.drafter.config import DrafterConfig

__all__ = ["LayerRule", "Visibility", "layer_rule"]


@dataclass(frozen=True)
class LayerRule:
    """What kind of layer looks."""

    causal: bool
    window: int | None


def layer_rule(config: DrafterConfig, layer: int) -> LayerRule:
    """The rule of this layer of a drafter."""
    return LayerRule(config.causal(layer), config.window(layer))


class Visibility:
    """Blocks of one forward pass against their context. Padding blocks are blocks like others, at any anchor."""

    def __init__(
        self,
        anchors: Tensor,
        block_size: int,
        context_length: int,
        *,
        sizes: Tensor | None = None,
        documents: Tensor | None = None,
        window_origin: Literal["row", "anchor"] = "row",
    ) -> None:
        """anchors [b, N] int64, absolute; context columns are positions 0 to context_length - 1.

        sizes [b, N] int64: slots that exist, where blocks are shrunk; a surplus slot is no key but its own, so that
        no row is empty. documents [b, T] int64, where rows are packed: a block sees context of its anchor's
        document only, and none where that is negative. window_origin: where a window counts from, as above.
        """
        self.anchors, self.block_size, self.context_length = anchors, block_size, context_length
        self._sizes, self._documents, self._origin = sizes, documents, window_origin
        self._dense: dict[LayerRule, Tensor] = {}
        self.flex_masks: dict[LayerRule, object] = {}
        """Block masks that the flex backend made of this, by rule."""

    @property
    def rows(self) -> int:
        """Q = N * block_size."""
        return self.anchors.shape[1] * self.block_size

    @property
    def columns(self) -> int:
        """T + Q."""
        return self.context_length + self.rows

    def visible(self, rule: LayerRule, batch: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Whether these rows see these columns; index tensors int64 of shapes that broadcast -> bool."""
        size, length = self.block_size, self.context_length
        block, slot = row // size, row % size
        anchor = self.anchors[batch, block]
        in_context = column < length
        # Clamped, so that a column of the other half indexes nothing outside; `in_context` decides.
        position = column.clamp(max=max(length - 1, 0))
        context = in_context & (position < anchor)
        if self._documents is not None and length:
            mine = self._documents[batch, anchor.clamp(0, length - 1)]
            context = context & (mine >= 0) & (self._documents[batch, position] == mine)
        other = (column - length).clamp(min=0)
        their_block, their_slot = other // size, other % size
        own = (~in_context) & (their_block == block)
        if rule.causal:
            own = own & (their_slot <= slot)
        if rule.window is not None and self._origin == "row":
            context = context & (anchor + slot - position < rule.window)
            own = own & ((their_slot - slot).abs() < rule.window)
        elif rule.window is not None:
            context = context & (position >= anchor - rule.window)
        if self._sizes is not None:
            own = own & ((their_slot < self._sizes[batch, block]) | (their_slot == slot))
        return context | own

    def dense(self, rule: LayerRule) -> Tensor:
        """The whole table, bool [b, Q, T + Q]; made once a rule."""
        if rule not in self._dense:
            device = self.anchors.device
            self._dense[rule] = self.visible(
                rule,
                torch.arange(self.anchors.shape[0], device=device)[:, None, None],
                torch.arange(self.rows, device=device)[:, None],
                torch.arange(self.columns, device=device),
            )
        return self._dense[rule]
