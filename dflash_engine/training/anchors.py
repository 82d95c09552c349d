"""Anchors: where a training row's blocks start, and which context and labels each block has.

A block at anchor a is what a verification step at inference looks like: the token at a is known, slots 1..B-1
predict a+1..a+B-1, and the target's states exist strictly before a (the state at a comes with the next
verification). Eligible is an anchor whose own token and next token are both supervised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Blocks", "build_blocks", "draw_anchors", "eligible_anchors"]


@dataclass(frozen=True)
class Blocks:
    """The blocks of b rows with N anchors each and block size B."""

    anchors: Tensor
    """[b, N] int64, ascending; padding anchors are 0."""
    valid: Tensor
    """[b, N] bool, False for padding."""
    input_ids: Tensor
    """[b, N * B] int64: anchor token, then masks."""
    positions: Tensor
    """[b, N * B] int64: a + k."""
    labels: Tensor
    """[b, N, B] int64: the token at a + k; 0 where there is none."""
    counted: Tensor
    """[b, N, B] bool: slots with a loss. Never slot 0; nothing past the document or outside supervision."""


def eligible_anchors(supervised: Tensor) -> Tensor:
    """supervised [S] bool -> ascending positions a with a and a+1 supervised, [n] int64."""
    both = supervised[:-1] & supervised[1:]
    return both.nonzero(as_tuple=True)[0]


def draw_anchors(supervised: Tensor, count: int, seed: int) -> Tensor:
    """Up to `count` distinct eligible anchors, uniform without replacement, ascending, [n] int64."""
    eligible = eligible_anchors(supervised)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(eligible), generator=generator)[:count]
    return eligible[chosen].sort().values


def build_blocks(
    input_ids: Tensor, supervised: Tensor, anchors: list[Tensor], *, count: int, block_size: int, mask_id: int
) -> Blocks:
    """Blocks of a micro-batch, padded to `count` anchors a row (fixed shapes whatever the documents).

    input_ids [b, S] int64 right-padded; supervised [b, S] bool, False on padding; anchors: one [n_i] a row.
    A slot is counted only if every label from a+1 up to its own is supervised: an unsupervised hole ends the
    block, because at inference the run of accepted tokens would have ended there too.
    """
    rows, length = input_ids.shape
    padded = torch.zeros(rows, count, dtype=torch.int64)
    valid = torch.zeros(rows, count, dtype=torch.bool)
    for row, drawn in enumerate(anchors):
        padded[row, : len(drawn)] = drawn
        valid[row, : len(drawn)] = True
    positions = padded[:, :, None] + torch.arange(block_size)  # [b, N, B]
    inside = positions < length
    at = positions.clamp(max=length - 1).flatten(1)  # [b, N * B]
    labels = input_ids.gather(1, at).view(rows, count, block_size)
    labelled = supervised.gather(1, at).view(rows, count, block_size) & inside
    labelled[:, :, 0] = valid  # the anchor is known; it starts the run
    counted = labelled.cumprod(dim=2).bool()
    counted[:, :, 0] = False
    block_ids = torch.full((rows, count, block_size), mask_id, dtype=torch.int64)
    block_ids[:, :, 0] = labels[:, :, 0]
    return Blocks(
        anchors=padded,
        valid=valid,
        input_ids=block_ids.flatten(1),
        positions=positions.flatten(1),
        labels=labels * counted,
        counted=counted,
    )
