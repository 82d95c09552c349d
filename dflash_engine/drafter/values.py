"""Looking at a checkpoint's values: NaN and Inf, norms that never moved, the id map of a reduced vocabulary.

Reads byte ranges in slices of bounded size; numpy alone, so that a host without torch can do it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
from numpy.typing import NDArray

from dflash_engine.drafter.config import DrafterConfig
from dflash_engine.drafter.faults import Fault
from dflash_engine.drafter.stored import StoredTensor, StoredWeights
from dflash_engine.drafter.tensors import D2T, T2D

__all__ = ["value_faults", "value_warnings"]

_SLICE_BYTES = 16 << 20
_SMALL = 1 << 16
"""Elements up to which a tensor is looked at even where only structure is asked for: all norms are."""

# Exponent bits, all of which are set in NaN and Inf, and the unsigned type of the same size.
_EXPONENTS = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80 << 16),
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
}
_ONES = {"F64": 0x3FF0 << 48, "F32": 0x3F80 << 16, "BF16": 0x3F80, "F16": 0x3C00}


def value_faults(config: DrafterConfig, weights: StoredWeights, *, deep: bool) -> list[Fault]:
    """NaN or Inf, in norms and other small tensors, or with `deep` in all of them; and an id map that is none."""
    faults = []
    for name, tensor in sorted(weights.tensors.items()):
        if tensor.dtype not in _EXPONENTS or not (deep or tensor.elements <= _SMALL):
            continue
        kind, mask = _EXPONENTS[tensor.dtype]
        bad = sum(int(((part & mask) == mask).sum()) for part in _parts(tensor, kind))
        if bad:
            message = f"tensor {name} holds NaN or Inf in {bad} of {tensor.elements} values"
            faults.append(Fault("not_finite", message, name))
    return faults + _map_faults(config, weights)


def value_warnings(weights: StoredWeights) -> list[Fault]:
    """Norm weights that are all exactly one: trained in bf16 without a float32 master they never move."""
    norms = [name for name in weights.tensors if name.split(".")[-2:-1] and "norm" in name.split(".")[-2]]
    for name in norms:
        tensor = weights.tensors[name]
        if tensor.dtype not in _EXPONENTS:
            return []
        kind = _EXPONENTS[tensor.dtype][0]
        if any(bool((part != _ONES[tensor.dtype]).any()) for part in _parts(tensor, kind)):
            return []
    if not norms:
        return []
    message = f"all {len(norms)} norm weights are exactly one: an untrained drafter, or bf16 weights that never moved"
    return [Fault("frozen_norms", message, "norm.weight")]


def _map_faults(config: DrafterConfig, weights: StoredWeights) -> list[Fault]:
    """d2t must lead to as many ids of the target as there are rows, and t2d must mark those."""
    if config.draft_vocab_size is None or not {D2T, T2D} <= weights.tensors.keys():
        return []
    kinds = [weights.tensors[name].dtype for name in (D2T, T2D)]
    if kinds != ["I64", "BOOL"]:
        return []  # said with the dtypes
    offsets = numpy.concatenate([*_parts(weights.tensors[D2T], "<i8")])
    marks = numpy.concatenate([*_parts(weights.tensors[T2D], "u1")]).astype(bool)
    ids = offsets + numpy.arange(len(offsets))
    if len(ids) and not (ids.min() >= 0 and ids.max() < config.vocab_size):
        return [
            Fault("vocab_map", f"d2t leads to ids {ids.min()}..{ids.max()}, the vocabulary is {config.vocab_size}", D2T)
        ]
    if len(set(ids.tolist())) < len(ids):
        return [Fault("vocab_map", "d2t leads two rows to one token", D2T)]
    if len(marks) == config.vocab_size and set(numpy.flatnonzero(marks).tolist()) != set(ids.tolist()):
        return [Fault("vocab_map", f"t2d marks {int(marks.sum())} tokens that are not those that d2t leads to", T2D)]
    return []


def _parts(tensor: StoredTensor, kind: str) -> Iterator[NDArray[Any]]:
    with tensor.path.open("rb") as file:
        file.seek(tensor.begin)
        left = tensor.end - tensor.begin
        while left:
            raw = file.read(min(left, _SLICE_BYTES))
            if not raw:
                return  # the header accounted for these bytes: it shrank just now, and is refused when it is loaded
            left -= len(raw)
            yield numpy.frombuffer(raw, dtype=kind)
