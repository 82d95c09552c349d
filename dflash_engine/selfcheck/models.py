"""Models of a reference folder, with the changes that a case asks for."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from dflash_engine.drafter.checkpoint import drafter_of
from dflash_engine.drafter.documents import config_from_json, read_json
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.drafter.stored import read_weights
from dflash_engine.errors import DataError

__all__ = ["Reference"]

_DELETE = "__delete__"


@dataclass(frozen=True, eq=False)
class Reference:
    """A folder with the layout of the public reference data, on one device."""

    folder: Path
    device: torch.device
    dtype: torch.dtype = torch.float32

    def has(self, part: str) -> bool:
        """Whether this folder has it."""
        return (self.folder / part).exists()

    def index(self, part: str) -> Any:
        """A JSON document. Raises DataError where it cannot be read."""
        try:
            return json.loads((self.folder / part).read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{self.folder / part} cannot be read: {error}") from error

    def tensors(self, part: str) -> dict[str, Tensor]:
        """The tensors of one file, on the CPU."""
        found: dict[str, Tensor] = load_file(self.folder / part)
        return found

    def drafter(self, name: str, override: dict[str, Any]) -> DFlashDrafter:
        """A drafter with some keys of its configuration changed (dotted names; `__delete__` removes one)."""
        folder = self.folder / "models" / name
        config = config_from_json(overridden(read_json(folder / "config.json"), override))
        drafter = drafter_of(config, read_weights(folder), folder)
        return drafter.to(self.device, self.dtype)

    @functools.cache  # noqa: B019 # a handful of tiny models that live as long as the check
    def target(self, name: str) -> Any:
        """A target model."""
        model = AutoModelForCausalLM.from_pretrained(self.folder / "models" / name, dtype=self.dtype)
        return model.to(self.device).eval()

    def weights(self, name: str) -> tuple[Tensor, Tensor]:
        """(embedding, head), each [V, H], of a target."""
        model = self.target(name)
        return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def overridden(document: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """A copy with these keys changed."""
    changed = copy.deepcopy(document)
    for dotted, value in override.items():
        *path, last = dotted.split(".")
        inner = changed
        for key in path:
            inner = inner.setdefault(key, {})
        if value == _DELETE:
            inner.pop(last, None)
        else:
            inner[last] = value
    return changed
