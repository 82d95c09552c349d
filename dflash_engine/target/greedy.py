"""Greedy completions by the target: the reference that drafts are compared with.

Prompts are sorted by length. Each batch is prefilled in groups of nearly equal length, because on a CPU a
padded token costs as much as a real one; the groups' caches are then joined, left-padded, and decoded
together, because a decoding step reads all weights once whatever the number of rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from dflash_engine.errors import DataError, TargetError
from dflash_engine.target.load import Target

__all__ = ["Completion", "greedy_decode"]

_BATCH_ROWS = 64
_PADDING_LIMIT = 1.1
"""Padded over real tokens in a prefill group."""
_PREFILL_TOKENS = 1024
"""Padded tokens in a prefill group: bounds memory, and activations stay in the processor's caches."""
_KEPT_ROWS = 0.8
"""Finished rows leave the batch once so few of its rows are alive: leaving copies the cache."""


@dataclass(frozen=True)
class Completion:
    """What the target says to one prompt: new token ids, and why they end.

    `stop`: the last id is the first stop token. `length`: the limit was reached.
    """

    tokens: tuple[int, ...]
    finish: Literal["stop", "length"]


@torch.no_grad()
def greedy_decode(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    progress: Callable[[int, int], None],
) -> list[Completion]:
    """The greedy completion of each prompt (token ids), in the order given; equal logits go to the lowest id.

    `progress` is called after every step with tokens settled and tokens in all (prompts * max_new_tokens; a
    prompt that stops early settles its whole share). Raises DataError for a prompt that is empty, too long or
    outside the vocabulary, TargetError for a target that this cannot decode or whose logits are not finite.
    """
    _check(target, prompts, max_new_tokens)
    total = len(prompts) * max_new_tokens
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    completions: dict[int, Completion] = {}
    for start in range(0, len(order), _BATCH_ROWS):
        rows = order[start : start + _BATCH_ROWS]
        settled = len(completions) * max_new_tokens
        batch = _Batch(target, [prompts[i] for i in rows], max_new_tokens)
        with warnings.catch_warnings():
            # transformers 5.24 would rather have `cache`, which 5.8 does not know.
            warnings.filterwarnings("ignore", message=".*past_key_values.* is deprecated", category=FutureWarning)
            for tokens in batch.run():
                progress(settled + tokens, total)
        completions.update(zip(rows, batch.completions(), strict=True))
    return [completions[i] for i in range(len(prompts))]


class _Batch:
    """Prompts of similar length that are decoded in lockstep."""

    def __init__(self, target: Target, prompts: list[Sequence[int]], max_new_tokens: int) -> None:
        self._target = target
        self._prompts = prompts
        self._limit = max_new_tokens
        self._new: list[list[int]] = [[] for _ in prompts]
        self._alive = list(range(len(prompts)))

    def run(self) -> Iterator[int]:
        """Decode to the end; yields the settled tokens after each step."""
        cache, mask, next_ids = self._prefill()
        stop_ids = frozenset(self._target.stop_ids)
        while True:
            # Rows of the batch that stopped stay in it until `_compact`; what they go on to say is dropped.
            for row, token in zip(self._alive, next_ids.tolist(), strict=True):
                if not self._finished(row, stop_ids):
                    self._new[row].append(token)
            going = [i for i, row in enumerate(self._alive) if not self._finished(row, stop_ids)]
            yield sum(self._limit if self._finished(r, stop_ids) else len(n) for r, n in enumerate(self._new))
            if not going:
                return
            if len(going) <= _KEPT_ROWS * len(self._alive):
                keep = torch.tensor(going)
                cache.batch_select_indices(keep)
                mask, next_ids = mask[keep], next_ids[keep]
                self._alive = [self._alive[i] for i in going]
            mask = functional.pad(mask, (0, 1), value=1)  # [b, T + 1]
            next_ids = self._step(next_ids[:, None], mask, cache)

    def completions(self) -> list[Completion]:
        """After `run`: one for each prompt."""
        stop_ids = frozenset(self._target.stop_ids)
        return [Completion(tuple(new), "stop" if new[-1] in stop_ids else "length") for new in self._new]

    def _finished(self, row: int, stop_ids: frozenset[int]) -> bool:
        new = self._new[row]
        return len(new) == self._limit or (bool(new) and new[-1] in stop_ids)

    def _prefill(self) -> tuple[DynamicCache, Tensor, Tensor]:
        """(cache, attention mask [b, T] left-padded, first new ids [b]) of all prompts."""
        parts = []
        for group in _groups([len(prompt) for prompt in self._prompts]):
            ids, mask = _left_padded([self._prompts[i] for i in group])
            cache = DynamicCache()
            parts.append((cache, mask, self._step(ids, mask, cache)))
        width = max(mask.shape[1] for _, mask, _ in parts)
        joined = DynamicCache()
        for layer in range(self._target.num_layers):
            keys = [_pad_left(cache.layers[layer].keys, width) for cache, _, _ in parts]
            values = [_pad_left(cache.layers[layer].values, width) for cache, _, _ in parts]
            joined.update(torch.cat(keys), torch.cat(values), layer)  # each [b, kv, T, d]
        mask = torch.cat([functional.pad(mask, (width - mask.shape[1], 0)) for _, mask, _ in parts])
        return joined, mask, torch.cat([next_ids for _, _, next_ids in parts])

    def _step(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Run ids [b, S] behind the cache; mask [b, T + S] -> the greedy next ids [b]."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output: Any = self._target.model.get_decoder()(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        best, next_ids = self._target.greedy(output.last_hidden_state[:, -1])
        if not bool(torch.isfinite(best).all()):
            raise TargetError(f"target {self._target.folder}: its logits are not finite; its weights are damaged")
        return next_ids


def _check(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    other = set(getattr(target.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        # Left padding would enter a recurrent state.
        raise TargetError(
            f"target {target.folder} has {', '.join(sorted(other))} layers; only attention can be decoded"
        )
    if max_new_tokens < 1:
        raise DataError(f"at most {max_new_tokens} new tokens were asked for; expected at least 1")
    room = int(target.config.max_position_embeddings) - max_new_tokens
    for number, prompt in enumerate(prompts, start=1):
        if not 0 < len(prompt) <= room:
            raise DataError(
                f"prompt {number} has {len(prompt)} tokens; expected 1 to {room}, what the target's "
                f"{target.config.max_position_embeddings} positions leave beside {max_new_tokens} new ones"
            )
        if not 0 <= min(prompt) <= max(prompt) < target.config.vocab_size:
            raise DataError(f"prompt {number} has token ids outside the target's vocabulary")


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Cut ascending lengths into runs of indices within the limits of padding and size."""
    group: list[int] = []
    for i, length in enumerate(lengths):
        real = sum(lengths[j] for j in group) + length
        if group and length * (len(group) + 1) > min(_PADDING_LIMIT * real, _PREFILL_TOKENS):
            yield group
            group = []
        group.append(i)
    yield group


def _left_padded(prompts: list[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(ids [b, S] int64, mask [b, S] int64) with the prompts' ends aligned."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def _pad_left(states: Tensor, width: int) -> Tensor:
    return functional.pad(states, (0, 0, width - states.shape[2], 0))  # [b, kv, width, d]
