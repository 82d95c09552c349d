"""Drafter configurations as files spell them: z-lab (and SpecForge's export), speculators; read and written.

z-lab's `config.json` has the fields of a Qwen3 configuration plus `dflash_config`; newer ones nest `block_size`
there. speculators' nests the Qwen3 fields in `transformer_layer_config` and names taps by the index into
`hidden_states`, which is the layer's id + 1. RoPE stands in `rope_parameters` (transformers 5) or in `rope_theta`
and `rope_scaling` (transformers 4): both are read, the nested one first, and both are written.
Importable without torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflash_engine.drafter.config import FULL, SLIDING, DFlash2Config, DrafterConfig, config_faults
from dflash_engine.drafter.faults import Fault
from dflash_engine.errors import CheckpointError

__all__ = [
    "Layout",
    "ReadConfig",
    "config_from_json",
    "read_config",
    "read_document",
    "read_json",
    "rope_of",
    "speculators_document",
    "zlab_document",
]

Layout = Literal["z-lab", "speculators"]

_ARCHITECTURES = {"DFlashDraftModel": False, "DFlash2DraftModel": True}
_ROPE_KINDS = ("default", "linear", "yarn", "llama3")
_MISSING = object()


@dataclass
class ReadConfig:
    """What a document says, with everything that is wrong in it."""

    layout: Layout
    dtype: str | None
    config: DrafterConfig | None = None
    faults: list[Fault] = field(default_factory=list)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError where there is none."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} has no {path.name}; expected a drafter checkpoint folder") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return document


def read_config(folder: Path) -> DrafterConfig:
    """`config.json` of a checkpoint folder. Raises CheckpointError where it is missing or not sound."""
    return config_from_json(read_json(folder / "config.json"))


def config_from_json(document: dict[str, Any]) -> DrafterConfig:
    """The configuration that a document of any layout spells. Raises CheckpointError with everything wrong in it."""
    found = read_document(document)
    if found.faults or found.config is None:
        raise CheckpointError(f"config.json: {'; '.join(map(str, found.faults))}")
    return found.config


def read_document(document: dict[str, Any]) -> ReadConfig:
    """Read a `config.json` of either layout; faults are collected, so that all of them are seen at once."""
    if "speculators_model_type" in document:
        return _read_speculators(document)
    return _read_zlab(document)


class _Reader:
    """Takes typed values out of documents and keeps what is wrong with them."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def say(self, code: str, message: str, where: str = "config.json") -> None:
        self.faults.append(Fault(code, message, where))

    def integer(self, document: dict[str, Any], key: str, default: Any = _MISSING) -> int:
        value = document.get(key, default)
        if value is _MISSING:
            self.say("config_missing", f"{key} is missing", key)
            return 1
        if value is None and default is None:
            return None  # type: ignore[return-value] # an optional key
        if type(value) is not int:
            self.say("config_value", f"{key} is {value!r}, expected an integer", key)
            return 1
        return value

    def real(self, document: dict[str, Any], key: str, default: float | None = None) -> float:
        value = document.get(key, default)
        if value is None:
            self.say("config_missing", f"{key} is missing", key)
            return 1.0
        if type(value) not in (int, float):
            self.say("config_value", f"{key} is {value!r}, expected a number", key)
            return 1.0
        return float(value)

    def flag(self, document: dict[str, Any], key: str) -> bool | None:
        value = document.get(key)
        if value is not None and type(value) is not bool:
            self.say("config_value", f"{key} is {value!r}, expected true or false", key)
            return None
        return value

    def ids(self, document: dict[str, Any], key: str, where: str) -> tuple[int, ...] | None:
        value = document.get(key)
        if value is None:
            self.say("layer_ids_missing", f"{where} has no {key}; they are never guessed", key)
            return None
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            self.say("config_value", f"{key} is {value!r}, expected a list of integers", key)
            return None
        return tuple(value)


def _read_zlab(document: dict[str, Any]) -> ReadConfig:
    reader = _Reader()
    found = ReadConfig("z-lab", _dtype(document), faults=reader.faults)
    second = _architecture(reader, document)
    nested = document.get("dflash_config")
    if not isinstance(nested, dict):
        reader.say("config_missing", "there is no dflash_config; is this a DFlash drafter?", "dflash_config")
        return found
    if second is None:
        return found
    body = _qwen3_body(reader, document)
    ids = reader.ids(nested | ({} if "target_layer_ids" in nested else _only(document, "target_layer_ids")),
                     "target_layer_ids", "dflash_config")  # fmt: skip
    mask = reader.integer(nested if "mask_token_id" in nested else document, "mask_token_id")
    block = _block_size(reader, document, nested)
    causal = reader.flag(document, "is_causal")
    if causal is None:
        causal = reader.flag(nested, "causal")
    if nested.get("sample_from_anchor") or document.get("sample_from_anchor"):
        reader.say(
            "architecture_unknown",
            "sample_from_anchor is on: every slot predicts (DSpark), this engine's blocks start with a known anchor",
        )
    for key in ("projector_type", "attention_sink_bias", "attention_value_scale"):
        if nested.get(key) or document.get(key):
            reader.say("architecture_unknown", f"{key} is set, which this engine does not run", key)
    softcap = nested.get("final_logit_softcapping", document.get("final_logit_softcapping"))
    hidden = int(body["hidden_size"])
    config = DrafterConfig(
        **body,
        block_size=block,
        mask_token_id=mask,
        target_layer_ids=ids or (),
        num_target_layers=reader.integer(
            nested if "num_target_layers" in nested else document, "num_target_layers", None
        ),
        target_hidden_size=reader.integer(document, "target_hidden_size", None) or hidden,
        is_causal=causal,
        draft_vocab_size=_draft_vocab(reader, document, int(body["vocab_size"])),
        input_embedding_scale=_scale(reader, document, nested, "input_embedding_scale"),
        output_multiplier=_scale(reader, document, nested, "output_multiplier"),
        final_logit_softcapping=_softcap(reader, softcap),
        dflash2=_dflash2(reader, document | nested) if second else None,
    )
    return _finish(found, config, ids is not None)


def _read_speculators(document: dict[str, Any]) -> ReadConfig:
    reader = _Reader()
    found = ReadConfig("speculators", _dtype(document), faults=reader.faults)
    kind = document.get("speculators_model_type")
    if kind not in ("dflash", "dflash2"):
        reader.say("architecture_unknown", f"speculators_model_type is {kind!r}, expected 'dflash' or 'dflash2'")
        return found
    inner = document.get("transformer_layer_config")
    if not isinstance(inner, dict):
        reader.say("config_missing", "there is no transformer_layer_config", "transformer_layer_config")
        return found
    if document.get("sample_from_anchor"):
        reader.say(
            "architecture_unknown",
            "sample_from_anchor is on: every slot predicts (DSpark), this engine's blocks start with a known anchor",
        )
    body = _qwen3_body(reader, inner)
    aux = reader.ids(document, "aux_hidden_state_layer_ids", "config.json")
    sliding = SLIDING in body["layer_types"]
    # A window that is open on both sides, for sliding layers only; full layers see everything anyway.
    open_window = document.get("sliding_window_non_causal", False)
    hidden = int(body["hidden_size"])
    config = DrafterConfig(
        **body,
        block_size=reader.integer(document, "block_size"),
        mask_token_id=reader.integer(document, "mask_token_id"),
        target_layer_ids=tuple(i - 1 for i in aux or ()),
        num_target_layers=None,
        target_hidden_size=reader.integer(document, "target_hidden_size", None) or hidden,
        is_causal=False if sliding and open_window else None,
        draft_vocab_size=_draft_vocab(reader, document, int(body["vocab_size"])),
        dflash2=_dflash2(reader, document) if kind == "dflash2" else None,
    )
    return _finish(found, config, aux is not None)


def _finish(found: ReadConfig, config: DrafterConfig, has_ids: bool) -> ReadConfig:
    # Values that could not be read stand in the configuration as ones: its own faults mean nothing then.
    if not any(fault.code in ("config_missing", "config_value") for fault in found.faults):
        found.faults += [f for f in config_faults(config) if has_ids or not f.code.startswith("layer_ids")]
    unreadable = {"config_missing", "config_value", "layer_ids_missing", "block_size_missing", "architecture_unknown",
                  "rope_unknown", "rope_conflict"}  # fmt: skip
    if not any(fault.code in unreadable for fault in found.faults):
        found.config = config
    return found


def _qwen3_body(reader: _Reader, document: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Qwen3 configuration that a drafter has."""
    kind = document.get("model_type")
    if kind is not None and kind != "qwen3":
        reader.say("architecture_unknown", f"model_type is {kind!r}, expected 'qwen3'", "model_type")
    act = document.get("hidden_act", "silu")
    if act != "silu":
        reader.say("architecture_unknown", f"hidden_act is {act!r}, expected 'silu'", "hidden_act")
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "head_dim", "max_position_embeddings", "vocab_size")  # fmt: skip
    body: dict[str, Any] = {name: reader.integer(document, name) for name in names}
    body["rms_norm_eps"] = reader.real(document, "rms_norm_eps")
    body["attention_bias"] = bool(reader.flag(document, "attention_bias"))
    theta, scaling = _rope(reader, document)
    body["rope_theta"], body["rope_scaling"] = theta, scaling
    body["layer_types"], body["sliding_window"] = _layer_types(reader, document, body["num_hidden_layers"])
    return body


def _layer_types(reader: _Reader, document: dict[str, Any], layers: int) -> tuple[tuple[str, ...], int | None]:
    types = document.get("layer_types")
    window = reader.integer(document, "sliding_window", None)
    used = document.get("use_sliding_window", False)
    if types is None and used and window is not None:
        # As transformers' Qwen3Config fills it in.
        first = reader.integer(document, "max_window_layers", layers)
        types = [SLIDING if i >= first else FULL for i in range(layers)]
    if types is None:
        return (FULL,) * layers, None
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        reader.say("config_value", f"layer_types is {types!r}, expected a list of names", "layer_types")
        return (FULL,) * layers, None
    if SLIDING in types and window is not None and not used:
        reader.say(
            "window_nulled",
            f"layer_types has sliding layers and sliding_window is {window}, but use_sliding_window is "
            f"{json.dumps(used)}: transformers' Qwen3Config then drops the window",
            "use_sliding_window",
        )
    return tuple(types), window if SLIDING in types else None


def rope_of(document: dict[str, Any]) -> tuple[float | None, dict[str, Any]]:
    """(base, scaling keys) of any model's configuration, the nested schema first; base None where none is named.

    The default kind has no scaling keys. `rope_parameters` by layer type (Gemma, some hybrids) is read at its
    full-attention entry, which is what a drafter's context comes closest to.
    """
    nested = document.get("rope_parameters")
    if isinstance(nested, dict) and isinstance(nested.get(FULL), dict):
        nested = nested[FULL]
    flat = document.get("rope_scaling")
    theta = document.get("rope_theta")
    scaling: dict[str, Any] = {}
    if isinstance(nested, dict):
        scaling = dict(nested)
    elif isinstance(flat, dict):
        scaling = dict(flat)
    theta = scaling.pop("rope_theta", theta)
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    if kind == "default":
        return theta, {}
    return theta, {"rope_type": kind} | scaling


def _rope(reader: _Reader, document: dict[str, Any]) -> tuple[float, tuple[tuple[str, Any], ...]]:
    theta, scaling = rope_of(document)
    if theta is None:
        reader.say("config_missing", "rope_theta is missing, at the top level and in rope_parameters", "rope_theta")
        return 1.0, ()
    if type(theta) not in (int, float) or theta <= 0:
        reader.say("config_value", f"rope_theta is {theta!r}, expected a positive number", "rope_theta")
        return 1.0, ()
    top = document.get("rope_theta")
    if top is not None and top != theta:
        reader.say("rope_conflict", f"rope_theta is {top} at the top and {theta} in rope_parameters", "rope_theta")
    flat = document.get("rope_scaling")
    if isinstance(flat, dict) and isinstance(document.get("rope_parameters"), dict):
        other = rope_of({"rope_scaling": flat})[1]
        if other != scaling:
            reader.say("rope_conflict", f"rope_scaling is {other}, rope_parameters says {scaling}", "rope_scaling")
    kind = scaling.get("rope_type", "default")
    if kind not in _ROPE_KINDS:
        reader.say(
            "rope_unknown", f"RoPE of type {kind!r}, this engine has {', '.join(_ROPE_KINDS)}", "rope_parameters"
        )
        return float(theta), ()
    needed = {
        "linear": ("factor",),
        "yarn": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    for key in needed.get(kind, ()):
        if type(scaling.get(key)) not in (int, float):
            reader.say("config_value", f"{key} of {kind} RoPE is {scaling.get(key)!r}, expected a number", key)
    return float(theta), tuple(sorted(scaling.items()))


def _architecture(reader: _Reader, document: dict[str, Any]) -> bool | None:
    """Whether it is DFlash 2; None where it is no drafter of ours."""
    found = document.get("architectures")
    if isinstance(found, list) and len(found) == 1 and found[0] in _ARCHITECTURES:
        return _ARCHITECTURES[found[0]]
    reader.say("architecture_unknown", f"architectures is {found!r}, expected one of {list(_ARCHITECTURES)}",
               "architectures")  # fmt: skip
    return None


def _block_size(reader: _Reader, document: dict[str, Any], nested: dict[str, Any]) -> int:
    found = {
        name: reader.integer(d, "block_size")
        for name, d in (("nested", nested), ("top", document))
        if d.get("block_size") is not None
    }
    if not found:
        reader.say("block_size_missing", "block_size is missing, at the top level and in dflash_config", "block_size")
        return 2
    if len(set(found.values())) > 1:
        reader.say(
            "block_size_conflict",
            f"block_size is {found['top']} at the top and {found['nested']} in dflash_config",
            "block_size",
        )
    return next(iter(found.values()))


def _dflash2(reader: _Reader, document: dict[str, Any]) -> DFlash2Config:
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return DFlash2Config(**{name: reader.integer(document, name) for name in names})


def _draft_vocab(reader: _Reader, document: dict[str, Any], vocab: int) -> int | None:
    size = reader.integer(document, "draft_vocab_size", None)
    return None if size is None or size == vocab else size


def _scale(reader: _Reader, document: dict[str, Any], nested: dict[str, Any], key: str) -> float:
    return reader.real(nested if nested.get(key) is not None else _only(document, key), key, 1.0)


def _softcap(reader: _Reader, value: Any) -> float | None:
    if value is None:
        return None
    cap = reader.real({"final_logit_softcapping": value}, "final_logit_softcapping")
    return cap if cap > 0 else None


def _only(document: dict[str, Any], key: str) -> dict[str, Any]:
    return {key: document[key]} if document.get(key) is not None else {}


def _dtype(document: dict[str, Any]) -> str | None:
    found = document.get("dtype", document.get("torch_dtype"))
    return found.removeprefix("torch.") if isinstance(found, str) else None


def _qwen3_fields(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """The Qwen3 part, in both RoPE schemas, and nothing of the target's."""
    scaling = dict(config.rope_scaling)
    types = list(config.layer_types)
    return {
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": types,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_hidden_layers,
        "model_type": "qwen3",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default"} | scaling | {"rope_theta": config.rope_theta},
        "rope_scaling": scaling or None,
        "rope_theta": config.rope_theta,
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": SLIDING in types,
        "vocab_size": config.vocab_size,
    }


def zlab_document(config: DrafterConfig, dtype: str = "float32") -> dict[str, Any]:
    """The document that dflash, SGLang and vLLM read: RoPE in both schemas, block size where either looks."""
    nested: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    document = _qwen3_fields(config, dtype) | {
        "architectures": ["DFlash2DraftModel" if config.dflash2 else "DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": nested,
        "target_hidden_size": config.target_hidden_size,
    }
    if config.num_target_layers is not None:
        document["num_target_layers"] = config.num_target_layers
    if config.is_causal is not None:
        document["is_causal"] = config.is_causal
    if config.draft_vocab_size is not None:
        document["draft_vocab_size"] = config.draft_vocab_size
    if config.dflash2:
        nested |= vars(config.dflash2)
    if config.input_embedding_scale != 1.0:
        nested["input_embedding_scale"] = config.input_embedding_scale
    if config.output_multiplier != 1.0:
        nested["output_multiplier"] = config.output_multiplier
    if config.final_logit_softcapping is not None:
        nested["final_logit_softcapping"] = config.final_logit_softcapping
    return document


def speculators_document(config: DrafterConfig, dtype: str, verifier: str, architectures: list[str]) -> dict[str, Any]:
    """The document of speculators 0.9.0; `verifier` names the target, `architectures` are the target's.

    Raises CheckpointError where that layout has no place for something that this drafter needs.
    """
    lost = [
        name
        for name, default in (("input_embedding_scale", 1.0), ("output_multiplier", 1.0),
                              ("final_logit_softcapping", None))
        if getattr(config, name) != default
    ]  # fmt: skip
    sliding = SLIDING in config.layer_types
    full = len(set(config.layer_types)) != 1 or not sliding
    if config.is_causal and full:
        lost.append("is_causal on full layers")
    if lost:
        raise CheckpointError(f"the speculators layout has no place for {', '.join(lost)} of this drafter")
    kind = "dflash2" if config.dflash2 else "dflash"
    document: dict[str, Any] = {
        "architectures": ["DFlash2DraftModel" if config.dflash2 else "DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "dtype": dtype,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        # vLLM makes every layer causal where this is false, so it says so only where layers are.
        "sliding_window_non_causal": config.is_causal is False or not sliding,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size - 1,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": architectures, "name_or_path": verifier},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": _qwen3_fields(config, dtype),
    }
    if config.dflash2:
        document |= vars(config.dflash2)
    return document
