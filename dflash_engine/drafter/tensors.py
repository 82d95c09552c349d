"""Name and shape of every tensor that a drafter of a configuration has. Importable without torch."""

from __future__ import annotations

from dflash_engine.drafter.config import DrafterConfig

__all__ = ["D2T", "EMBEDDING", "HEAD", "OWN_TENSORS", "T2D", "expected_tensors"]

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
D2T = "d2t"
T2D = "t2d"
OWN_TENSORS = (EMBEDDING, HEAD, D2T, T2D)
"""What a drafter may own besides its body: an embedding, a head, and the id maps of a reduced vocabulary."""


def expected_tensors(config: DrafterConfig, own: frozenset[str] = frozenset()) -> dict[str, tuple[int, ...]]:
    """Name and shape of all tensors, and no others; `own` are those of OWN_TENSORS that this drafter holds.

    A reduced vocabulary implies its head and id maps. Names as z-lab publishes them; speculators has the same.
    """
    hidden, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * d, config.num_key_value_heads * d
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.fc_width),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_hidden_layers):
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (d,),
            "self_attn.k_norm": (d,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        tensors |= {f"layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
        if config.attention_bias:
            tensors |= {
                f"layers.{layer}.self_attn.{name}_proj.bias": (width,)
                for name, width in (("q", queries), ("k", keys), ("v", keys), ("o", hidden))
            }
        if config.dflash2:
            size, groups = config.dflash2.conv_kernel_size, hidden // config.dflash2.conv_group_size
            for part in ("attention", "mlp"):
                tensors[f"layers.{layer}.{part}_conv.base_kernel"] = (2, size, hidden)
                tensors[f"layers.{layer}.{part}_conv.kernel_projection.weight"] = (2 * size * groups, hidden)
    if config.dflash2:
        rank = config.dflash2.selector_rank
        tensors["candidate_selector.predecessor_codebook"] = (config.vocab_size, rank)
        tensors["candidate_selector.successor_codebook"] = (config.vocab_size, rank)
        tensors["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    if config.draft_vocab_size is not None:
        own = own | {HEAD, D2T, T2D}
    if EMBEDDING in own:
        tensors[EMBEDDING] = (config.vocab_size, hidden)
    if HEAD in own:
        tensors[HEAD] = (config.draft_vocab_size or config.vocab_size, hidden)
    if config.draft_vocab_size is not None:
        tensors[D2T] = (config.draft_vocab_size,)
        tensors[T2D] = (config.vocab_size,)
    return tensors
