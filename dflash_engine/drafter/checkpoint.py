"""A drafter's weights on disk: `config.json` and `model.safetensors`, names as published, no embedding, no head."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_engine import durable
from dflash_engine.drafter.config import config_to_json, read_config
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.errors import CheckpointError

__all__ = ["MODEL_FILES", "load_drafter", "save_drafter"]

MODEL_FILES = ("config.json", "model.safetensors")
"""The manifest's `model` set."""


def save_drafter(drafter: DFlashDrafter, folder: Path) -> None:
    """Write the `model` set into an existing folder, float32; the caller publishes the folder."""
    tensors = {
        name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in drafter.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes its files private; a checkpoint is read by servers of other users.
    (folder / "model.safetensors").chmod(0o644)
    durable.write_json(folder / "config.json", config_to_json(drafter.config))


def load_drafter(folder: Path) -> DFlashDrafter:
    """The drafter of a checkpoint folder, float32, on the CPU.

    Raises CheckpointError for a missing, extra, misshapen or non-finite tensor, naming it: a drafter that
    loads partly drafts badly and says nothing.
    """
    config = read_config(folder)
    path = folder / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no model.safetensors; expected a drafter checkpoint folder")
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    faults = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    faults += [f"{name} is not a tensor of this architecture" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        if tuple(found[name].shape) != expected[name]:
            faults.append(f"{name} has shape {tuple(found[name].shape)}, config.json implies {expected[name]}")
        elif not bool(torch.isfinite(found[name]).all()):
            faults.append(f"{name} holds NaN or Inf")
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise CheckpointError(f"{path}: {'; '.join(faults[:5])}{more}")
    drafter.load_state_dict({name: tensor.float() for name, tensor in found.items()}, assign=True)
    return drafter.eval()
