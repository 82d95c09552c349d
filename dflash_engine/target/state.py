"""A causal model's cache that can be taken back to the middle of what it was just given.

Verification runs the target over a whole block of which only a beginning is kept. transformers' `Cache.crop` is not
used: it has meant "keep this many" and "drop this many" in turn, sliding layers refuse it once their window is
full, and on recurrent layers it can succeed and leave the rejected tokens in the state. Here full-attention layers
are cut by slicing their tensors; every other kind is copied before a block and put back, and the kept tokens are
run again (`DynamicLayer` by its exact type, everything else counts as other).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dflash_engine.target.capture import check_layer_ids, keep_output

__all__ = ["TargetState"]


class TargetState:
    """Cache, logits and taps of one sequence through any Hugging Face causal language model."""

    def __init__(self, model: Any, layer_ids: Sequence[int], *, last_is_normed: bool = False) -> None:
        """layer_ids: tapped 0-based blocks. The last block is refused unless `last_is_normed` asks for its output
        after the final norm, as the public references take it.
        """
        self._model, self._ids = model, tuple(layer_ids)
        decoder = model.get_decoder()
        blocks = decoder.layers
        self._normed = len(blocks) - 1 if last_is_normed and len(blocks) - 1 in self._ids else None
        # The guard refuses the last block; where its normed output is asked for, it may be named.
        check_layer_ids(layer_ids, len(blocks) + last_is_normed)
        self._tapped: dict[int, nn.Module] = {
            i: decoder.norm if i == self._normed else blocks[i] for i in sorted(set(layer_ids))
        }
        self._cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        self.length = 0
        """Positions held."""
        self._before: list[dict[str, Any] | None] = []
        self._block: Tensor | None = None

    @torch.no_grad()
    def extend(self, ids: Tensor, *, logits_to_keep: int = 0) -> tuple[Tensor, Tensor]:
        """Run ids [1, S] behind what is held -> logits [S', V] (the last `logits_to_keep`, 0 for all), taps [S, K * H].

        `keep` decides how many of them stay; without it all do.
        """
        self._before = [None if type(layer) is DynamicLayer else _copy(vars(layer)) for layer in self._cache.layers]
        self._block = ids
        return self._run(ids, logits_to_keep)

    def keep(self, count: int) -> None:
        """Keep the first `count` positions of the last `extend`. Raises ValueError where it had fewer."""
        if self._block is None or not 0 < count <= self._block.shape[1]:
            raise ValueError(f"cannot keep {count} positions of the last block")
        if count == self._block.shape[1]:
            return
        start = self.length - self._block.shape[1]
        others = any(before is not None for before in self._before)
        self._cut(start if others else start + count)
        if others:
            self._run(self._block[:, :count], 1)
        self._block = None

    def _cut(self, length: int) -> None:
        for layer, before in zip(self._cache.layers, self._before, strict=True):
            if before is None:
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
            else:
                vars(layer).clear()
                vars(layer).update(before)
        self.length = length

    def _run(self, ids: Tensor, logits_to_keep: int) -> tuple[Tensor, Tensor]:
        found: dict[int, Tensor] = {}
        handles = [module.register_forward_hook(keep_output(found, i)) for i, module in self._tapped.items()]
        positions = torch.arange(self.length, self.length + ids.shape[1], device=ids.device)[None]
        try:
            with warnings.catch_warnings():
                # transformers 5.24 would rather have `cache`, which 5.8 does not know.
                warnings.filterwarnings("ignore", message=".*past_key_values.* is deprecated", category=FutureWarning)
                output = self._model(
                    input_ids=ids,
                    position_ids=positions,
                    past_key_values=self._cache,
                    use_cache=True,
                    logits_to_keep=logits_to_keep,
                )
        finally:
            for handle in handles:
                handle.remove()
        self.length += ids.shape[1]
        return output.logits[0], torch.cat([found[i] for i in self._ids], dim=-1)[0]


def _copy(value: Any) -> Any:
    """A copy of a cache layer's attributes whose tensors nothing else writes into."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copy(inner) for inner in value]
    return value
