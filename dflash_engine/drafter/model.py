"""The DFlash draft model (arXiv 2602.06036): a few Qwen3-style layers that fill a whole block in one pass.

What makes it DFlash: features tapped from the target's layers are projected once, `hidden_norm(fc(concat))`,
and every layer attends to them by its own key and value projections, next to the block itself. The context
never passes a layer norm or an MLP of a layer, so its keys and values can be computed once and kept. The
block is `[anchor, mask, mask, ...]`: slot k predicts the token at anchor + k. Embedding and head are the
target's, unless the drafter owns one.

DFlash 2 is the same model with a convolution over the block around each attention and MLP (`convolution.py`) and a
selector that picks the proposal among each slot's best candidates (`selector.py`).

Shapes: b batch, T context length, Q query rows (one block, or all blocks of a training row), H drafter
hidden size, K tapped layers, n heads, kv key/value heads, d head dimension, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_engine.drafter.attention import Backend, attend, choose_backend
from dflash_engine.drafter.cache import ContextKV, LayerContext
from dflash_engine.drafter.config import DrafterConfig
from dflash_engine.drafter.convolution import BlockConvolution
from dflash_engine.drafter.rope import Rope, rotate
from dflash_engine.drafter.selector import CandidateSelector
from dflash_engine.drafter.tensors import EMBEDDING, HEAD
from dflash_engine.drafter.visibility import LayerRule, Visibility, layer_rule

__all__ = ["DFlashDrafter"]

_RopeTables = tuple[Tensor, Tensor]


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
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, heads * d, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * d, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * d, bias=bias)
        self.o_proj = nn.Linear(heads * d, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: _RopeTables) -> LayerContext:
        """Keys and values of rows x [b, S, H] at the positions of `rope`, each [b, kv, S, d]."""
        keys = self._split(self.k_proj(x), self.kv_heads)
        values = self._split(self.v_proj(x), self.kv_heads)
        return LayerContext(rotate(self.k_norm(keys), rope), values)

    def forward(
        self,
        x: Tensor,
        rope: _RopeTables,
        context: LayerContext,
        visibility: Visibility,
        rule: LayerRule,
        backend: Backend,
    ) -> Tensor:
        """x [b, Q, H] -> [b, Q, H]; what a row sees is `visibility` under this layer's rule."""
        queries = rotate(self.q_norm(self._split(self.q_proj(x), self.heads)), rope)  # [b, n, Q, d]
        block = self.keys_values(x, rope)
        keys, values = context.joined(block.keys, block.values)  # [b, kv, T + Q, d]
        attended = attend(queries, keys, values, visibility, rule, backend)  # [b, n, Q, d]
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
        self.attention_conv = BlockConvolution(config.hidden_size, config.dflash2) if config.dflash2 else None
        self.mlp_conv = BlockConvolution(config.hidden_size, config.dflash2) if config.dflash2 else None

    def forward(
        self,
        x: Tensor,
        rope: _RopeTables,
        context: LayerContext,
        visibility: Visibility,
        rule: LayerRule,
        backend: Backend,
    ) -> Tensor:
        """[b, Q, H] -> [b, Q, H]; arguments as in DFlashAttention."""
        block = visibility.block_size
        inner = self.input_layernorm(x)
        if self.attention_conv is not None:
            inner, kernels = self.attention_conv.prepare(inner, block)
            inner = self.self_attn(inner, rope, context, visibility, rule, backend)
            x = x + self.attention_conv.finish(inner, kernels, block)
        else:
            x = x + self.self_attn(inner, rope, context, visibility, rule, backend)
        inner = self.post_attention_layernorm(x)
        if self.mlp_conv is not None:
            inner, kernels = self.mlp_conv.prepare(inner, block)
            return x + self.mlp_conv.finish(self.mlp(inner), kernels, block)
        out: Tensor = x + self.mlp(inner)
        return out


class DFlashDrafter(nn.Module):
    """The whole draft model; its state dict has exactly the published tensor names."""

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, config: DrafterConfig, own: frozenset[str] = frozenset()) -> None:
        """`own`: which of `tensors.OWN_TENSORS` it has; a reduced vocabulary implies its head and id maps."""
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.fc_width, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([DFlashLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.candidate_selector = CandidateSelector(config, config.dflash2) if config.dflash2 else None
        reduced = config.draft_vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if EMBEDDING in own else None
        self.lm_head = (
            nn.Linear(config.hidden_size, reduced or config.vocab_size, bias=False) if reduced or HEAD in own else None
        )
        self.register_buffer("d2t", torch.zeros(reduced, dtype=torch.int64) if reduced else None)
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool) if reduced else None)
        self._rope = Rope(config)
        self._rules = [layer_rule(config, layer) for layer in range(config.num_hidden_layers)]

    @torch.no_grad()
    def initialise(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Fresh weights: matrices normal with this standard deviation, norms at one, convolutions close to identity.

        A convolution's base kernel is one at offset 0, so that a fresh DFlash 2 is a fresh DFlash.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1 and not name.endswith("bias"):
                parameter.fill_(1.0)
            elif name.endswith("base_kernel"):
                parameter.zero_()
                parameter[:, 0] = 1.0
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, std, generator=generator)

    def embed(self, ids: Tensor, target_embedding: Tensor) -> Tensor:
        """ids [...] int64 -> block input [..., H]: its own embedding, else the target's [V, H], scaled."""
        own = target_embedding if self.embed_tokens is None else self.embed_tokens.weight
        rows = functional.embedding(ids, own)
        return rows if self.config.input_embedding_scale == 1.0 else rows * self.config.input_embedding_scale

    def logits(self, hidden: Tensor, target_head: Tensor) -> Tensor:
        """Hidden states [n, H] after the final norm -> logits [n, R]: R draft ids, V or the reduced vocabulary.

        softcap * tanh(multiplier * head(h) / softcap), as dflash 0.1.0.
        """
        head = target_head if self.lm_head is None else self.lm_head.weight
        # Weights times states: with few rows on a CPU almost twice as fast as states times weights.
        logits = (head @ hidden.T).T
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids as the target counts them, int64: row r of a reduced head is token r + d2t[r] (speculators)."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def rope_tables(self, positions: Tensor, dtype: torch.dtype) -> _RopeTables:
        """Cosines and sines at absolute positions [b, S], each [b, 1, S, d]."""
        return self._rope.tables(positions, dtype)

    def context_features(self, taps: Tensor) -> Tensor:
        """Concatenated target features [b, T, K * H_target] -> context [b, T, H], shared by all layers."""
        out: Tensor = self.hidden_norm(self.fc(taps))
        return out

    def context_kv(self, features: Tensor, positions: Tensor) -> ContextKV:
        """Every layer's keys and values of context [b, T, H] at absolute positions [b, T] (int64)."""
        rope = self.rope_tables(positions, features.dtype)
        return [layer.self_attn.keys_values(features, rope) for layer in self._layers()]

    def forward(
        self,
        block_embeds: Tensor,
        positions: Tensor,
        context: ContextKV,
        visibility: Visibility,
        backend: Backend | None = None,
    ) -> Tensor:
        """Hidden states after the final norm; `logits` makes something of them.

        block_embeds [b, Q, H]: from `embed`, of anchors and masks; positions [b, Q] int64, absolute; context: from
        `context_kv` or a cache, T positions; visibility: of Q rows over T + Q columns; backend: chosen where None.
        Returns [b, Q, H].
        """
        backend = backend or choose_backend(block_embeds.device, visibility.rows)
        rope = self.rope_tables(positions, block_embeds.dtype)
        x = block_embeds
        for layer, layer_context, rule in zip(self._layers(), context, self._rules, strict=True):
            x = layer(x, rope, layer_context, visibility, rule, backend)
        out: Tensor = self.norm(x)
        return out

    def _layers(self) -> list[DFlashLayer]:
        return [layer for layer in self.layers if isinstance(layer, DFlashLayer)]
