"""The target's embedding and head alone: all that a drafter rank needs of the target's weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_engine.errors import TargetError

__all__ = ["load_embedding_and_head"]

_EMBEDDING_NAMES = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
_HEAD_NAME = "lm_head.weight"


def load_embedding_and_head(folder: Path, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(embedding [V, H], head [V, H]) on the CPU; one tensor twice where the target ties them.

    Raises TargetError where the folder has no safetensors weights or not these tensors.
    """
    where = _weight_files(folder)
    name = next((name for name in _EMBEDDING_NAMES if name in where), None)
    if name is None:
        raise TargetError(f"target {folder} has none of the tensors {', '.join(_EMBEDDING_NAMES)}")
    embedding = _read(where[name], name).to(dtype)
    head = _read(where[_HEAD_NAME], _HEAD_NAME).to(dtype) if _HEAD_NAME in where else embedding
    return embedding, head


def _weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file that holds it, for sharded and single-file models."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    try:
        if index.is_file():
            weight_map = json.loads(index.read_bytes())["weight_map"]
            return {name: folder / Path(file).name for name, file in weight_map.items()}
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise TargetError(
            f"target {folder}: model.safetensors cannot be read ({error}); "
            "expected a Hugging Face folder with safetensors weights"
        ) from error


def _read(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor
    except (OSError, SafetensorError) as error:
        raise TargetError(f"target: tensor {name} cannot be read from {path}: {error}") from error
