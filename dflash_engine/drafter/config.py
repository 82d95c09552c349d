"""The drafter's configuration, as `config.json` of the published DFlash checkpoints spells it.

The layout is z-lab's: the fields of a Qwen3 configuration, plus `block_size`, `num_target_layers` and
`dflash_config` with `mask_token_id` and `target_layer_ids`. Nothing is guessed: a missing layer id list or
block size is an error that names it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_engine.errors import CheckpointError

__all__ = ["DrafterConfig", "config_from_json", "config_to_json", "expected_tensors", "read_config"]

ARCHITECTURE = "DFlashDraftModel"


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
    num_target_layers: int
    target_hidden_size: int

    def __post_init__(self) -> None:
        """Refuse shapes that no drafter can have; raises CheckpointError naming the field."""
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "vocab_size",
            "num_target_layers",
            "target_hidden_size",
        ):
            if getattr(self, name) < 1:
                raise CheckpointError(f"drafter config: {name} is {getattr(self, name)}, expected at least 1")
        if self.block_size < 2:
            raise CheckpointError(f"drafter config: block_size is {self.block_size}, expected at least 2")
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"drafter config: {self.num_attention_heads} attention heads do not divide into "
                f"{self.num_key_value_heads} key/value heads"
            )
        if not self.target_layer_ids:
            raise CheckpointError("drafter config: target_layer_ids is empty; name the tapped target layers")
        outside = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if outside:
            raise CheckpointError(
                f"drafter config: target_layer_ids {outside} are outside 0..{self.num_target_layers - 1}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise CheckpointError(
                f"drafter config: mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}"
            )


def config_to_json(config: DrafterConfig) -> dict[str, Any]:
    """The document that SGLang and vLLM read: RoPE in both schemas, block size at both places readers look."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "dtype": "float32",
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": None,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def config_from_json(document: dict[str, Any]) -> DrafterConfig:
    """Read a drafter's `config.json`, nested keys first. Raises CheckpointError naming what is missing or unknown.

    What this engine cannot run yet (sliding layers, scaled RoPE, DFlash 2) is refused by name, never ignored.
    """
    architectures = document.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise CheckpointError(f"config.json: architectures is {architectures!r}, expected [{ARCHITECTURE!r}]")
    nested = document.get("dflash_config")
    if not isinstance(nested, dict):
        raise CheckpointError("config.json has no dflash_config; is this a DFlash drafter?")
    _refuse_unsupported(document, nested)
    hidden_size = _integer(document, "hidden_size")
    heads = _integer(document, "num_attention_heads")
    return DrafterConfig(
        hidden_size=hidden_size,
        intermediate_size=_integer(document, "intermediate_size"),
        num_hidden_layers=_integer(document, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=_integer(document, "num_key_value_heads"),
        head_dim=_integer(document, "head_dim"),
        rms_norm_eps=_real(document, "rms_norm_eps"),
        rope_theta=_rope_theta(document),
        max_position_embeddings=_integer(document, "max_position_embeddings"),
        vocab_size=_integer(document, "vocab_size"),
        block_size=_block_size(document, nested),
        mask_token_id=_integer(nested, "mask_token_id", where="dflash_config"),
        target_layer_ids=_layer_ids(nested),
        num_target_layers=_integer(document, "num_target_layers"),
        target_hidden_size=_integer(document, "target_hidden_size")
        if "target_hidden_size" in document
        else hidden_size,
    )


def read_config(folder: Path) -> DrafterConfig:
    """`config.json` of a checkpoint folder. Raises CheckpointError where it is missing or not a drafter's."""
    path = folder / "config.json"
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no config.json; expected a drafter checkpoint folder") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return config_from_json(document)


def expected_tensors(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this configuration holds, and no others."""
    hidden, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * d, config.num_key_value_heads * d
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * config.target_hidden_size),
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
    return tensors


def _refuse_unsupported(document: dict[str, Any], nested: dict[str, Any]) -> None:
    layer_types = document.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        raise CheckpointError(f"config.json: layer_types {layer_types} has layers other than full_attention")
    if layer_types and len(layer_types) != document.get("num_hidden_layers"):
        raise CheckpointError(
            f"config.json: {len(layer_types)} layer_types for {document.get('num_hidden_layers')} layers"
        )
    for key in ("is_causal", "causal"):
        if document.get(key) or nested.get(key):
            raise CheckpointError(f"config.json: {key} is set; this engine's blocks are bidirectional")
    for key in ("conv_kernel_size", "selector_rank", "output_multiplier", "final_logit_softcapping"):
        if document.get(key) is not None or nested.get(key) is not None:
            raise CheckpointError(f"config.json: {key} belongs to DFlash 2, which this engine does not run")


def _rope_theta(document: dict[str, Any]) -> float:
    nested = document.get("rope_parameters")
    scaling = nested if isinstance(nested, dict) else document.get("rope_scaling")
    if isinstance(scaling, dict):
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            raise CheckpointError(f"config.json: RoPE of type {kind!r}, this engine has 'default' only")
    if isinstance(nested, dict) and "rope_theta" in nested:
        theta = _real(nested, "rope_theta", where="rope_parameters")
        if "rope_theta" in document and _real(document, "rope_theta") != theta:
            raise CheckpointError(
                f"config.json: rope_theta is {document['rope_theta']} at the top and {theta} in rope_parameters"
            )
        return theta
    return _real(document, "rope_theta")


def _block_size(document: dict[str, Any], nested: dict[str, Any]) -> int:
    found = {
        name: _integer(d, "block_size") for name, d in (("nested", nested), ("top", document)) if "block_size" in d
    }
    if not found:
        raise CheckpointError("config.json: block_size is missing, at the top level and in dflash_config")
    if len(set(found.values())) > 1:
        raise CheckpointError(
            f"config.json: block_size is {found['top']} at the top and {found['nested']} in dflash_config"
        )
    return next(iter(found.values()))


def _layer_ids(nested: dict[str, Any]) -> tuple[int, ...]:
    ids = nested.get("target_layer_ids")
    if ids is None:
        raise CheckpointError("config.json: dflash_config has no target_layer_ids; they are never guessed")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise CheckpointError(f"config.json: target_layer_ids is {ids!r}, expected a list of integers")
    return tuple(ids)


def _integer(document: dict[str, Any], key: str, where: str = "config.json") -> int:
    value = document.get(key)
    if type(value) is not int:
        raise CheckpointError(f"{where}: {key} is {value!r}, expected an integer")
    return value


def _real(document: dict[str, Any], key: str, where: str = "config.json") -> float:
    value = document.get(key)
    if type(value) not in (int, float):
        raise CheckpointError(f"{where}: {key} is {value!r}, expected a number")
    return float(value)  # type: ignore[arg-type] # the line above proves it is a number
