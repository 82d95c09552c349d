"""A drafter on disk: read from every layout that people have, written in the two that are served."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_engine import durable
from dflash_engine.drafter.config import DrafterConfig
from dflash_engine.drafter.documents import read_config, zlab_document
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.drafter.soundness import tensor_faults
from dflash_engine.drafter.stored import StoredTensor, StoredWeights, read_weights
from dflash_engine.errors import CheckpointError

__all__ = ["MODEL_FILES", "load_drafter", "read_tensor", "save_drafter", "write_weights"]

MODEL_FILES = ("config.json", "model.safetensors")
"""The manifest's `model` set."""

_TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def save_drafter(drafter: DFlashDrafter, folder: Path) -> None:
    """Write the `model` set into an existing folder, float32; the caller publishes the folder."""
    tensors = {
        name: tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in drafter.state_dict().items()
    }
    write_weights(tensors, folder)
    durable.write_json(folder / "config.json", zlab_document(drafter.config, "float32"))


def write_weights(tensors: dict[str, Tensor], folder: Path) -> None:
    """`model.safetensors` of these tensors in an existing folder."""
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    # safetensors makes its files private; a checkpoint is read by servers of other users.
    path.chmod(0o644)


def load_drafter(folder: Path) -> DFlashDrafter:
    """The drafter of a checkpoint folder of any layout, float32, on the CPU.

    Raises CheckpointError for a missing, extra, misshapen or non-finite tensor, naming it: a drafter that
    loads partly drafts badly and says nothing.
    """
    return drafter_of(read_config(folder), read_weights(folder), folder)


def drafter_of(config: DrafterConfig, weights: StoredWeights, folder: Path) -> DFlashDrafter:
    """The same of parts that were read already."""
    faults = [str(fault) for fault in tensor_faults(config, weights)]
    found: dict[str, Tensor] = {}
    if not faults:
        found = {name: read_tensor(tensor) for name, tensor in weights.tensors.items()}
        faults = [f"{n} holds NaN or Inf" for n, t in found.items() if not bool(torch.isfinite(t).all())]
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise CheckpointError(f"{folder}: {'; '.join(faults[:5])}{more}")
    with torch.device("meta"):
        drafter = DFlashDrafter(config, weights.own)
    state = {n: t.float() if t.is_floating_point() else t for n, t in found.items()}
    drafter.load_state_dict(state, assign=True)
    return drafter.eval()


def read_tensor(stored: StoredTensor) -> Tensor:
    """One tensor, as it is stored. Raises CheckpointError where the file ends before it."""
    with stored.path.open("rb") as file:
        file.seek(stored.begin)
        raw = bytearray(file.read(stored.end - stored.begin))
    if len(raw) != stored.end - stored.begin:
        raise CheckpointError(f"{stored.path} ends inside a tensor")
    if not raw:
        return torch.empty(stored.shape, dtype=_TORCH_DTYPES[stored.dtype])
    return torch.frombuffer(raw, dtype=_TORCH_DTYPES[stored.dtype]).view(stored.shape)
