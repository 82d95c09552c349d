"""Rotary tables at absolute positions: the default kind, and linear, YaRN and llama3 scaling.

The scaled kinds' frequencies come from transformers, so that they are the target's to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_engine.drafter.config import DrafterConfig

__all__ = ["Rope", "rotate"]


class Rope:
    """Cosines and sines of one drafter."""

    def __init__(self, config: DrafterConfig) -> None:
        self._frequencies, self._factor = _frequencies(config)
        self._on: dict[torch.device, Tensor] = {}

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [b, S] int64 -> cosines and sines, each [b, 1, S, d], computed in float32."""
        frequencies = self._on.get(positions.device)
        if frequencies is None:
            frequencies = self._on[positions.device] = self._frequencies.to(positions.device)
        angles = positions[..., None].float() * frequencies  # [b, S, d / 2]
        angles = torch.cat([angles, angles], dim=-1)[:, None]  # [b, 1, S, d]
        return (angles.cos() * self._factor).to(dtype), (angles.sin() * self._factor).to(dtype)


def _frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    """([d / 2] float32, the factor on cosines and sines, which only YaRN has). Made on the CPU, always."""
    with torch.device("cpu"):
        if not config.rope_scaling:
            exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
            return 1.0 / (config.rope_theta**exponents), 1.0
        parameters = dict(config.rope_scaling)
        qwen3 = Qwen3Config(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=parameters | {"rope_theta": config.rope_theta},
        )
        found, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](qwen3, torch.device("cpu"))
        return found.float(), float(factor)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """x [b, heads, S, d] turned by `Rope.tables`, halves paired as in Llama and Qwen3."""
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
