"""The DFlash draft model (arXiv 2602.06036): a few Qwen3-style layers that fill a whole block in one pass.

What makes it DFlash: features tapped from the target's layers are projected once, `hidden_norm(fc(concat))`,
and every layer attends to them by its own key and value projections, next to the block itself. The context
never passes a layer norm or an MLP of a layer, so its keys and values can be computed once and kept. The
block is `[anchor, mask, mask, ...]`: slot k predicts the token at anchor + k, all slots see each other.
Embedding and head are the target's and not part of the model.

Shapes: b batch, T context length, Q query rows (one block, or all blocks of a training row), H drafter
hidden size, K tapped layers, n heads, kv key/value heads, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_engine.drafter.config import DrafterConfig

__all__ = ["ContextKV", "DFlashDrafter"]

ContextKV = list[tuple[Tensor, Tensor]]
"""One (key, value) pair a layer, each [b, kv, T, d]; keys after q/k norm and RoPE."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, as in Qwen3; the weight starts at one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class DFlashAttention(nn.Module):
    """Attention of a block over the context features and itself."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, d
        self.q_proj = nn.Linear(config.hidden_size, heads * d, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * d, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * d, bias=False)
        self.o_proj = nn.Linear(heads * d, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of rows x [b, S, H] at the positions of `rope`, each [b, kv, S, d]."""
        keys = self._split(self.k_proj(x), self.kv_heads)
        values = self._split(self.v_proj(x), self.kv_heads)
        return _rotate(self.k_norm(keys), rope), values

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """x [b, Q, H], context keys/values [b, kv, T, d], mask bool [b, 1, Q, T + Q] -> [b, Q, H]."""
        queries = _rotate(self.q_norm(self._split(self.q_proj(x), self.heads)), rope)  # [b, n, Q, d]
        block_keys, block_values = self.keys_values(x, rope)
        keys = torch.cat([context[0], block_keys], dim=2)  # [b, kv, T + Q, d]
        values = torch.cat([context[1], block_values], dim=2)
        groups = self.heads // self.kv_heads
        attended = functional.scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(groups, dim=1),
            values.repeat_interleave(groups, dim=1),
            attn_mask=mask,
        )  # [b, n, Q, d]
        merged: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))  # [b, Q, n * d] -> [b, Q, H]
        return merged

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.head_dim).transpose(1, 2)  # [b, heads, S, d]


class DFlashMLP(nn.Module):
    """SwiGLU, as in Qwen3."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DFlashLayer(nn.Module):
    """Pre-norm attention and MLP with residuals; the norm touches the block only, never the context."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DFlashAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DFlashMLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """[b, Q, H] -> [b, Q, H]; arguments as in DFlashAttention."""
        x = x + self.self_attn(self.input_layernorm(x), rope, context, mask)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class DFlashDrafter(nn.Module):
    """The whole draft model; its state dict has exactly the published tensor names."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([DFlashLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Fresh weights: matrices normal with this standard deviation, norms at one."""
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, std, generator=generator)

    def context_features(self, taps: Tensor) -> Tensor:
        """Concatenated target features [b, T, K * H_target] -> context [b, T, H], shared by all layers."""
        out: Tensor = self.hidden_norm(self.fc(taps))
        return out

    def context_kv(self, features: Tensor, positions: Tensor) -> ContextKV:
        """Every layer's keys and values of context [b, T, H] at absolute positions [b, T] (int64)."""
        rope = self._rope(positions, features.dtype)
        return [layer.self_attn.keys_values(features, rope) for layer in self._layers()]

    def forward(self, block_embeds: Tensor, positions: Tensor, context: ContextKV, mask: Tensor) -> Tensor:
        """Hidden states after the final norm; the target's head gives the logits.

        block_embeds [b, Q, H]: the target's embedding of anchors and masks; positions [b, Q] int64, absolute;
        context: from `context_kv`; mask bool [b, 1, Q, T + Q], True where a row may attend.
        Every row must see at least one key: its own. Returns [b, Q, H].
        """
        rope = self._rope(positions, block_embeds.dtype)
        x = block_embeds
        for layer, layer_context in zip(self._layers(), context, strict=True):
            x = layer(x, rope, layer_context, mask)
        out: Tensor = self.norm(x)
        return out

    def _layers(self) -> list[DFlashLayer]:
        return [layer for layer in self.layers if isinstance(layer, DFlashLayer)]

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        d = self.config.head_dim
        exponents = torch.arange(0, d, 2, dtype=torch.float32, device=positions.device) / d
        frequencies = 1.0 / (self.config.rope_theta**exponents)  # [d / 2]
        angles = positions[..., None].float() * frequencies  # [b, S, d / 2]
        angles = torch.cat([angles, angles], dim=-1)[:, None]  # [b, 1, S, d]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
