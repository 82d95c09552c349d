"""Where the public packages' outputs lie, and how they are read."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

REFERENCE = Path(__file__).parent / "data" / "reference"
DRAFTER = REFERENCE / "models" / "drafter_qwen3_small"
TARGET = REFERENCE / "models" / "target_qwen3"


def tensors(case: str) -> dict[str, Tensor]:
    """The tensors of one case, such as `forward/qwen3_small`."""
    return load_file(REFERENCE / f"{case}.safetensors")
