"""Whether a drafter and a target belong together, from their configurations alone. Importable without torch."""

from __future__ import annotations

from typing import Any

from dflash_engine.drafter.config import DrafterConfig

__all__ = ["fit_faults"]


def fit_faults(config: DrafterConfig, target: dict[str, Any]) -> list[str]:
    """What keeps this drafter from drafting for a target with this `config.json`, one sentence each.

    A target with a nested text model is read there.
    """
    text = target.get("text_config", target)
    faults = []
    layers = text.get("num_hidden_layers")
    if layers != config.num_target_layers:
        faults.append(f"the drafter was made for a target of {config.num_target_layers} layers, this one has {layers}")
    elif max(config.target_layer_ids) >= layers - 1:
        faults.append(f"target_layer_ids {list(config.target_layer_ids)} tap the target's last layer ({layers - 1})")
    if text.get("hidden_size") != config.target_hidden_size:
        faults.append(
            f"fc expects states of width {config.target_hidden_size}, the target's have {text.get('hidden_size')}"
        )
    if text.get("hidden_size") != config.hidden_size:
        faults.append(
            f"the drafter's hidden size is {config.hidden_size}, the target's embedding and head have "
            f"{text.get('hidden_size')}"
        )
    if text.get("vocab_size") != config.vocab_size:
        faults.append(f"the drafter's vocabulary is {config.vocab_size}, the target's {text.get('vocab_size')}")
    stop = text.get("eos_token_id")
    if config.mask_token_id in (stop if isinstance(stop, list) else [stop]):
        faults.append(f"mask_token_id {config.mask_token_id} is a stop token of the target")
    return faults
