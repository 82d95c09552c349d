"""Keys and values of the context, kept between draft steps.

Our own, and not transformers' `Cache`, whose `crop` has meant "keep this many" and "drop this many" in turn. The
buffers are allocated once; a block's own keys and values are written right behind the context, where the next
step's context overwrites them, so nothing is copied and cropping is a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_engine.drafter.config import DrafterConfig

__all__ = ["ContextKV", "DraftCache", "LayerContext"]


@dataclass(frozen=True)
class LayerContext:
    """One layer's context."""

    keys: Tensor
    """[b, kv, T, d], after q/k norm and RoPE."""
    values: Tensor
    """[b, kv, T, d]."""

    def joined(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Context and a block's [b, kv, Q, d] side by side, each [b, kv, T + Q, d]."""
        return torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)


ContextKV = Sequence[LayerContext]
"""One a layer."""


class _CachedLayer(LayerContext):
    """A view of a cache's buffers."""

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().__init__(keys[:, :, :length], values[:, :, :length])
        object.__setattr__(self, "_whole", (keys, values))

    def joined(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As above, without copying the context: the block is written behind it."""
        length, end = self.keys.shape[2], self.keys.shape[2] + keys.shape[2]
        whole_keys, whole_values = self._whole  # type: ignore[attr-defined] # set in __init__, the class is frozen
        whole_keys[:, :, length:end] = keys
        whole_values[:, :, length:end] = values
        return whole_keys[:, :, :end], whole_values[:, :, :end]


class DraftCache:
    """Context of one sequence (b = 1), for inference only: no gradient flows through it."""

    def __init__(self, config: DrafterConfig, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        """capacity: positions of context and of the block behind it."""
        shape = (config.num_hidden_layers, 1, config.num_key_value_heads, capacity, config.head_dim)
        self._keys = torch.empty(shape, device=device, dtype=dtype)
        self._values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0
        """Positions of context held."""

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self._keys.shape[3]

    def append(self, context: ContextKV) -> None:
        """Add the next positions' keys and values. Raises ValueError where they do not fit."""
        end = self.length + context[0].keys.shape[2]
        if end > self.capacity:
            raise ValueError(f"{end} positions in a cache of {self.capacity}")
        for i, layer in enumerate(context):
            self._keys[i, :, :, self.length : end] = layer.keys
            self._values[i, :, :, self.length : end] = layer.values
        self.length = end

    def crop(self, length: int) -> None:
        """Keep the first `length` positions. Raises ValueError where there are fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} positions to {length}")
        self.length = length

    def context(self) -> ContextKV:
        """What is held, for a forward pass; valid until the next `append`."""
        return [_CachedLayer(k, v, self.length) for k, v in zip(self._keys, self._values, strict=True)]
