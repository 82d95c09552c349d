"""Where a checkpoint's tensors lie: names, shapes and byte ranges from headers alone. Importable without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_engine.drafter.faults import Fault
from dflash_engine.drafter.tensors import OWN_TENSORS
from dflash_engine.errors import CheckpointError, TargetError
from dflash_engine.fingerprint import read_header

__all__ = ["DTYPE_BYTES", "DTYPE_NAMES", "DamagedFileError", "StoredTensor", "StoredWeights", "damaged", "read_weights"]

DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Of the dtypes that are read, as safetensors names them."""

DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""Floating dtypes as configurations name them."""

_PREFIXES = ("module.", "_orig_mod.", "drafter.", "draft_model.", "model.")
"""What wrappers put before a drafter's names: DDP, torch.compile, a trainer's own module, vLLM."""

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


class DamagedFileError(CheckpointError):
    """A file of a checkpoint that cannot be read; `fault` says why."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


@dataclass(frozen=True)
class StoredTensor:
    """One tensor's bytes: contiguous, little-endian."""

    dtype: str
    """As safetensors names it: F32, BF16, F16, I64, BOOL, ..."""
    shape: tuple[int, ...]
    path: Path
    begin: int
    end: int

    @property
    def elements(self) -> int:
        """Values in it."""
        return math.prod(self.shape)


@dataclass
class StoredWeights:
    """All tensors of a checkpoint under their published names."""

    container: str
    """What the files are: `safetensors`, `safetensors, N shards`, or a torch file's name and the key inside it."""
    prefix: str
    """What stood before every name."""
    tensors: dict[str, StoredTensor]
    beside: list[str] = field(default_factory=list)
    """Names of tensors in the same place that are not the drafter's (other prefixes)."""

    @property
    def own(self) -> frozenset[str]:
        """Which of `tensors.OWN_TENSORS` the drafter holds."""
        return frozenset(OWN_TENSORS) & self.tensors.keys()


def read_weights(folder: Path) -> StoredWeights:
    """The weights of a checkpoint folder, whatever they are stored in. Raises DamagedFileError.

    safetensors before torch files; of those `training_state.pt` first (SpecForge), then the only one there is.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.is_file() and index.is_file():
        raise damaged("layout_unknown", f"{folder.name} has both model.safetensors and shards; which are its weights?")
    if index.is_file():
        return _sharded(folder, index)
    if single.is_file():
        return _named(_safetensors(single), "safetensors")
    files = (
        sorted(p for p in folder.iterdir() if p.suffix in _TORCH_SUFFIXES and p.is_file()) if folder.is_dir() else []
    )
    state = [path for path in files if path.name == "training_state.pt"]
    chosen = state or [p for p in files if not p.name.startswith(("optimizer", "scheduler", "rng", "scaler"))]
    if not chosen:
        raise damaged("file_missing", f"{folder} has no model.safetensors, no shards and no torch.save file")
    if len(chosen) > 1:
        names = ", ".join(path.name for path in chosen)
        raise damaged("layout_unknown", f"{folder.name} has several torch files ({names}); which are its weights?")
    return _torch_weights(chosen[0])


def damaged(code: str, message: str, where: str = "") -> DamagedFileError:
    """The error of that fault."""
    return DamagedFileError(Fault(code, message, where))


def _safetensors(path: Path) -> dict[str, StoredTensor]:
    try:
        header = read_header(path)
    except TargetError as error:
        raise damaged("file_damaged", str(error), path.name) from error
    return {name: StoredTensor(i.dtype, tuple(i.shape), path, i.begin, i.end) for name, i in header.items()}


def _sharded(folder: Path, index: Path) -> StoredWeights:
    try:
        places = json.loads(index.read_bytes())["weight_map"]
        shards = sorted(set(places.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged("file_damaged", f"{index.name} cannot be read: {error}", index.name) from error
    found: dict[str, StoredTensor] = {}
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or not (folder / shard).is_file():
            raise damaged("file_missing", f"{index.name} names {shard!r}, which is not in the folder", index.name)
        for name, tensor in _safetensors(folder / shard).items():
            if places.get(name) != shard:
                raise damaged("file_damaged", f"{shard} holds {name}, the index says otherwise", index.name)
            found[name] = tensor
    lost = sorted(places.keys() - found.keys())
    if lost:
        raise damaged("file_damaged", f"the index names {lost[0]}, which is in no shard", index.name)
    return _named(found, f"safetensors, {len(shards)} shard{'s' * (len(shards) > 1)}")


def _torch_weights(path: Path) -> StoredWeights:
    from dflash_engine.drafter.torch_file import read_torch_file

    found = list(_state_dicts(read_torch_file(path), ""))
    preferred = [item for item in found if item[0].endswith("draft_state_dict")] or found
    if not preferred:
        raise damaged(
            "layout_unknown", f"{path.name} holds no drafter: no dictionary in it has an fc.weight", path.name
        )
    if len(preferred) > 1:
        keys = ", ".join(key or "the whole file" for key, _ in preferred)
        raise damaged(
            "layout_unknown", f"{path.name} holds several drafters ({keys}); save the one that counts", path.name
        )
    key, tensors = preferred[0]
    return _named(tensors, f"{path.name}{key and f', {key}'}")


def _state_dicts(value: dict[Any, Any], key: str, depth: int = 0) -> Iterator[tuple[str, dict[str, StoredTensor]]]:
    """Dictionaries, at most three levels down, that have a drafter's fc.weight, with where they stand."""
    tensors = {name: t for name, t in value.items() if isinstance(name, str) and isinstance(t, StoredTensor)}
    if any(_bare(name)[1] == "fc.weight" for name in tensors):
        yield key, tensors
        return
    for name, inner in value.items():
        if isinstance(inner, dict) and depth < 3:
            yield from _state_dicts(inner, f"{key}.{name}" if key else str(name), depth + 1)


def _bare(name: str) -> tuple[str, str]:
    """(prefix, the rest): every known prefix taken off, in whatever order they were put on."""
    rest = name
    while True:
        found = next((p for p in _PREFIXES if rest.startswith(p)), None)
        if found is None:
            return name[: len(name) - len(rest)], rest
        rest = rest[len(found) :]


def _named(tensors: dict[str, StoredTensor], container: str) -> StoredWeights:
    prefix = next((_bare(name)[0] for name in tensors if _bare(name)[1] == "fc.weight"), "")
    if not prefix:
        return StoredWeights(container, "", dict(tensors))
    mine = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    # Servers keep the head outside of the module that has the prefix.
    mine |= {name: tensor for name, tensor in tensors.items() if name in OWN_TENSORS and name not in mine}
    beside = sorted(name for name in tensors if not name.startswith(prefix) and name not in OWN_TENSORS)
    return StoredWeights(container, prefix, mine, beside)
