"""Whether a drafter and a target belong together, from their configurations alone. Importable without torch."""

from __future__ import annotations

from typing import Any

from dflash_engine.drafter.config import DrafterConfig
from dflash_engine.drafter.documents import rope_of
from dflash_engine.drafter.faults import Fault
from dflash_engine.drafter.tensors import EMBEDDING, HEAD

__all__ = ["fit_faults", "fit_warnings"]


def fit_faults(
    config: DrafterConfig,
    target: dict[str, Any],
    stop_ids: frozenset[int] = frozenset(),
    own: frozenset[str] = frozenset(),
) -> list[Fault]:
    """What keeps this drafter from drafting for a target with this `config.json`.

    A target with a nested text model is read there. `stop_ids` are those named elsewhere (generation_config.json);
    `own` are the tensors of `tensors.OWN_TENSORS` that the drafter holds.
    """
    text = target.get("text_config", target)
    faults = []
    layers, width, vocab = text.get("num_hidden_layers"), text.get("hidden_size"), text.get("vocab_size")
    ids = list(config.target_layer_ids)
    if config.num_target_layers is not None and layers != config.num_target_layers:
        message = f"the drafter was made for a target of {config.num_target_layers} layers, this one has {layers}"
        faults.append(Fault("target_layers", message, "num_target_layers"))
    elif isinstance(layers, int) and max(ids) > layers - 1:
        outside = [i for i in ids if i > layers - 1]
        message = f"target_layer_ids {outside} are outside 0..{layers - 1} of the target"
        faults.append(Fault("layer_id_out_of_range", message, "target_layer_ids"))
    elif isinstance(layers, int) and max(ids) == layers - 1:
        message = f"target_layer_ids {ids} tap the target's last layer ({layers - 1})"
        faults.append(Fault("layer_id_last", message, "target_layer_ids"))
    if width != config.target_hidden_size:
        message = f"fc expects states of width {config.target_hidden_size}, the target's have {width}"
        faults.append(Fault("target_width", message, "target_hidden_size"))
    if width != config.hidden_size and not {EMBEDDING, HEAD} <= own:
        message = f"the drafter's hidden size is {config.hidden_size}, the target's embedding and head have {width}"
        faults.append(Fault("target_width", message, "hidden_size"))
    if vocab != config.vocab_size:
        message = f"the drafter's vocabulary is {config.vocab_size}, the target's {vocab}"
        faults.append(Fault("target_vocab", message, "vocab_size"))
    reserved = set(stop_ids)
    for key in ("eos_token_id", "pad_token_id"):
        value = text.get(key, target.get(key))
        reserved |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
    if config.mask_token_id in reserved:
        message = f"mask_token_id {config.mask_token_id} is a stop token or the padding token of the target"
        faults.append(Fault("mask_id_is_stop", message, "mask_token_id"))
    return faults


def fit_warnings(config: DrafterConfig, target: dict[str, Any]) -> list[Fault]:
    """What may be meant, but is more often a default that slipped in: RoPE unlike the target's."""
    theta, scaling = rope_of(target.get("text_config", target))
    warnings = []
    if theta is not None and theta != config.rope_theta:
        message = f"its rope_theta is {config.rope_theta:g}, the target's {theta:g}; was it trained so?"
        warnings.append(Fault("rope_unlike_target", message, "rope_theta"))
    mine = dict(config.rope_scaling)
    if theta is not None and mine != scaling:
        message = f"its RoPE scaling is {mine or 'none'}, the target's {scaling or 'none'}; was it trained so?"
        warnings.append(Fault("rope_unlike_target", message, "rope_parameters"))
    return warnings
