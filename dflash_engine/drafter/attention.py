"""Attention of blocks over context and themselves: one function, three backends that agree.

`sdpa` runs everywhere; `flex` (CUDA) skips whole tiles that no row sees, which is most of a training row's table;
`loop` goes row by row and is what tests compare the others with. The choice is automatic and belongs to the
machine: nothing of it is ever written into a checkpoint.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from dflash_engine.drafter.visibility import LayerRule, Visibility

__all__ = ["Backend", "attend", "choose_backend"]

Backend = Literal["sdpa", "flex", "loop"]

_LOG = logging.getLogger(__name__)
_FLEX_MIN_ROWS = 128
"""flex works in tiles of 128 rows: below one tile (a block that is drafted) sdpa is faster."""


def choose_backend(device: torch.device, rows: int) -> Backend:
    """The backend for this many rows on this device; each choice is said in the log once."""
    backend: Backend = "flex" if device.type == "cuda" and rows >= _FLEX_MIN_ROWS else "sdpa"
    _say(backend, device.type)
    return backend


@functools.cache
def _say(backend: str, device: str) -> None:
    _LOG.info("attention backend on %s: %s", device, backend)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, visibility: Visibility, rule: LayerRule, backend: Backend
) -> Tensor:
    """queries [b, n, Q, d], keys and values [b, kv, T + Q, d] -> [b, n, Q, d]; scale d^-0.5, heads grouped n / kv.

    A row that sees nothing is a caller's mistake: every row sees at least itself.
    """
    expected = (visibility.rows, visibility.columns)
    if (queries.shape[2], keys.shape[2]) != expected:
        raise ValueError(f"{queries.shape[2]} rows and {keys.shape[2]} keys, the blocks have {expected}")
    if backend == "flex":
        return _flex(queries, keys, values, visibility, rule)
    mask = visibility.dense(rule)
    if backend == "loop":
        return _loop(queries, keys, values, mask)
    groups = queries.shape[1] // keys.shape[1]
    if queries.device.type == "cpu":
        # Repeated heads are faster here than `enable_gqa`, whose CPU path copies more.
        return functional.scaled_dot_product_attention(
            queries, keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1), mask[:, None]
        )
    return functional.scaled_dot_product_attention(queries, keys, values, mask[:, None], enable_gqa=groups > 1)


def _loop(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    groups = queries.shape[1] // keys.shape[1]
    rows = []
    for b in range(queries.shape[0]):
        for head in range(queries.shape[1]):
            for row in range(queries.shape[2]):
                seen = mask[b, row].nonzero().flatten()
                scores = keys[b, head // groups, seen] @ queries[b, head, row] / math.sqrt(queries.shape[-1])
                rows.append(scores.softmax(0) @ values[b, head // groups, seen])
    return torch.stack(rows).view(queries.shape)


def _flex(queries: Tensor, keys: Tensor, values: Tensor, visibility: Visibility, rule: LayerRule) -> Tensor:
    if rule not in visibility.flex_masks:
        visibility.flex_masks[rule] = _block_mask_maker(queries.device.type)(
            lambda b, h, row, column: visibility.visible(rule, b, row, column),
            queries.shape[0],
            None,
            visibility.rows,
            visibility.columns,
            device=queries.device,
        )
    out: Tensor = _flex_kernel(queries.device.type)(
        queries, keys, values, block_mask=visibility.flex_masks[rule], enable_gqa=queries.shape[1] != keys.shape[1]
    )
    return out


@functools.cache
def _flex_kernel(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # a second of import that sdpa never needs

    # On a CPU it runs uncompiled: slow, but the same mathematics, which is what the tests there want.
    plain: Any = flex_attention
    kernel: Callable[..., Any] = torch.compile(plain, dynamic=True) if device == "cuda" else plain
    return kernel


@functools.cache
def _block_mask_maker(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    # Uncompiled it materialises the whole table, and takes longer than a step of a large training row.
    made: Any = create_block_mask
    compiled: Callable[..., Any] = torch.compile(made, dynamic=True) if device == "cuda" else made
    return compiled
