"""The drafter's configuration. How the layouts spell it is in `documents.py`; here is what it means.

Nothing is guessed: what a configuration does not say is an error that names it. Importable without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_engine.drafter.faults import Fault

__all__ = ["FULL", "SLIDING", "DFlash2Config", "DrafterConfig", "config_faults", "default_layer_ids"]

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class DFlash2Config:
    """What DFlash 2 adds: a convolution over the block around attention and MLP, and a selector of candidates."""

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int


@dataclass(frozen=True)
class DrafterConfig:
    """Shapes and constants of one drafter. Layer ids are 0-based outputs of the target's block i."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    """None where the layout does not say it; then ids are checked against the target only."""
    target_hidden_size: int
    rope_scaling: tuple[tuple[str, Any], ...] = ()
    """The keys of a scaled RoPE, sorted, `rope_type` among them; empty for the default one."""
    layer_types: tuple[str, ...] = ()
    """One of FULL and SLIDING a layer; given empty, it becomes FULL for each."""
    sliding_window: int | None = None
    """Keys that a sliding layer's row sees, itself counted."""
    is_causal: bool | None = None
    """Set, it holds for every layer; None means that sliding layers are causal and full ones are not."""
    attention_bias: bool = False
    draft_vocab_size: int | None = None
    """Rows of the drafter's own head where it has a reduced one."""
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    dflash2: DFlash2Config | None = None

    def __post_init__(self) -> None:
        """One spelling for one meaning, so that equal drafters have equal configurations."""
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_hidden_layers)
        if SLIDING not in self.layer_types:
            object.__setattr__(self, "sliding_window", None)

    def sliding(self, layer: int) -> bool:
        """Whether this layer has a window."""
        return self.layer_types[layer] == SLIDING

    def causal(self, layer: int) -> bool:
        """Whether a slot of this layer sees only slots up to itself."""
        return self.sliding(layer) if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int | None:
        """The window of this layer, None where it has none."""
        return self.sliding_window if self.sliding(layer) else None

    @property
    def fc_width(self) -> int:
        """Columns of `fc`: features of all tapped layers side by side."""
        return len(self.target_layer_ids) * self.target_hidden_size


def default_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """The published default taps: one in the middle, or evenly from 1 to N - 3, rounded half to even.

    For new drafters only: a checkpoint's taps are always read, never computed. Source: z-lab/dflash 44947fb.
    """
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers)]


_POSITIVE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "vocab_size", "target_hidden_size", "num_target_layers", "draft_vocab_size",
)  # fmt: skip


def config_faults(config: DrafterConfig) -> list[Fault]:
    """What cannot be in a configuration, whatever the weights and the target."""
    faults = [
        Fault("config_value", f"{name} is {value}, expected at least 1", name)
        for name in _POSITIVE
        if (value := getattr(config, name)) is not None and value < 1
    ]
    if config.block_size < 2:
        faults.append(Fault("config_value", f"block_size is {config.block_size}, expected at least 2", "block_size"))
    if config.num_key_value_heads > 0 and config.num_attention_heads % config.num_key_value_heads:
        faults.append(
            Fault(
                "config_value",
                f"{config.num_attention_heads} attention heads do not divide into "
                f"{config.num_key_value_heads} key/value heads",
                "num_key_value_heads",
            )
        )
    if config.head_dim % 2:
        faults.append(Fault("config_value", f"head_dim is {config.head_dim}, RoPE needs an even one", "head_dim"))
    faults += _layer_id_faults(config) + _layer_type_faults(config) + _dflash2_faults(config)
    if not 0 <= config.mask_token_id < config.vocab_size:
        faults.append(
            Fault(
                "mask_id_outside_vocab",
                f"mask_token_id {config.mask_token_id} is outside the vocabulary of {config.vocab_size}",
                "mask_token_id",
            )
        )
    if config.draft_vocab_size is not None and config.draft_vocab_size > config.vocab_size:
        faults.append(
            Fault(
                "config_value",
                f"draft_vocab_size is {config.draft_vocab_size}, more than the vocabulary of {config.vocab_size}",
                "draft_vocab_size",
            )
        )
    return faults


def _layer_id_faults(config: DrafterConfig) -> list[Fault]:
    ids, where = config.target_layer_ids, "target_layer_ids"
    if not ids:
        return [Fault("layer_ids_empty", "target_layer_ids is empty; name the tapped target layers", where)]
    faults = []
    last = None if config.num_target_layers is None else config.num_target_layers - 1
    outside = [i for i in ids if i < 0 or (last is not None and i > last)]
    if outside:
        faults.append(Fault("layer_id_out_of_range", f"target_layer_ids {outside} are outside 0..{last}", where))
    if len(set(ids)) < len(ids):
        faults.append(Fault("layer_ids_duplicate", f"target_layer_ids {list(ids)} name a layer twice", where))
    elif list(ids) != sorted(ids):
        faults.append(Fault("layer_ids_unsorted", f"target_layer_ids {list(ids)} are not ascending", where))
    return faults


def _layer_type_faults(config: DrafterConfig) -> list[Fault]:
    types, where = config.layer_types, "layer_types"
    faults = []
    if types and len(types) != config.num_hidden_layers:
        message = f"{len(types)} layer_types for {config.num_hidden_layers} layers"
        faults.append(Fault("layer_types_count", message, where))
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        message = f"layer_types has {', '.join(unknown)}, expected {FULL} and {SLIDING}"
        faults.append(Fault("layer_type_unknown", message, where))
    if SLIDING in types and (config.sliding_window is None or config.sliding_window < 1):
        message = f"layer_types has sliding layers, sliding_window is {config.sliding_window}"
        faults.append(Fault("window_missing", message, "sliding_window"))
    return faults


def _dflash2_faults(config: DrafterConfig) -> list[Fault]:
    more = config.dflash2
    if more is None:
        return []
    faults = [
        Fault("config_value", f"{name} is {value}, expected at least 1", name)
        for name, value in vars(more).items()
        if value < 1
    ]
    if not faults and config.hidden_size % more.conv_group_size:
        message = f"hidden_size {config.hidden_size} does not divide into groups of {more.conv_group_size}"
        faults.append(Fault("config_value", message, "conv_group_size"))
    return faults
