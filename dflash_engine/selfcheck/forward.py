"""Forward cases: features, context, one block layer by layer, and drafting along a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dflash_engine.drafter.cache import DraftCache
from dflash_engine.drafter.draft import propose
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.drafter.visibility import Visibility, layer_rule
from dflash_engine.selfcheck.models import Reference
from dflash_engine.selfcheck.report import Report
from dflash_engine.target.state import TargetState

__all__ = ["check_forward"]

_STATES, _LOGITS = 5e-5, 2e-4


@torch.no_grad()
def check_forward(reference: Reference, report: Report) -> None:
    """Every case of `forward/index.json`."""
    for case in reference.index("forward/index.json"):
        tensors = reference.tensors(f"forward/{case['file']}")
        drafter = reference.drafter(case["drafter"], case["config_override"])
        _one_block(reference, report, case, drafter, tensors)
        _cached(reference, report, case, drafter, tensors)


def _one_block(
    reference: Reference, report: Report, case: dict[str, Any], drafter: DFlashDrafter, tensors: dict[str, Tensor]
) -> None:
    name, size = case["case"], case["block_size"]
    given = {k.removeprefix("one_block."): t for k, t in tensors.items() if k.startswith("one_block.")}
    embedding, head = reference.weights(case["target"])
    device = reference.device
    state = TargetState(reference.target(case["target"]), drafter.config.target_layer_ids, last_is_normed=True)
    _, taps = state.extend(given["prompt_ids"].to(device))
    report.near(name, "features", taps[None], given["context_feature"], _STATES)
    feature = given["context_feature"].to(device, reference.dtype)
    report.near(name, "fc", drafter.fc(feature), given["context_fc"], _STATES)
    context_features = drafter.context_features(feature)
    report.near(name, "context", context_features, given["context_normed"], _STATES)
    positions = given["position_ids"].to(device)
    length = positions.shape[1] - size
    embeds = drafter.embed(given["noise_ids"].to(device), embedding)
    report.near(name, "block input", embeds, given["noise_embedding"], _STATES)
    cos, sin = drafter.rope_tables(positions, reference.dtype)
    report.near(name, "RoPE", torch.stack([cos[:, 0], sin[:, 0]]),
                torch.stack([given["rope_cos"], given["rope_sin"]]), _STATES)  # fmt: skip
    visibility = Visibility(positions[:, length : length + 1], size, length)
    for layer in range(drafter.config.num_hidden_layers):
        mask = visibility.dense(layer_rule(drafter.config, layer))[0]
        report.same(name, f"mask of layer {layer}", mask, given[f"layer{layer}_mask"])
    seen: dict[str, Tensor] = {}
    parts: dict[str, nn.Module] = {}
    for layer in range(drafter.config.num_hidden_layers):
        parts[f"layer{layer}_attn_out"] = drafter.get_submodule(f"layers.{layer}.self_attn")
        parts[f"layer{layer}_out"] = drafter.get_submodule(f"layers.{layer}")
    handles = [
        module.register_forward_hook(lambda _m, _a, output, key=key: seen.__setitem__(key, output))
        for key, module in parts.items()
    ]
    context = drafter.context_kv(context_features, positions[:, :length])
    hidden = drafter(embeds, positions[:, length:], context, visibility)
    for handle in handles:
        handle.remove()
    for key, output in seen.items():
        report.near(name, key, output, given[key], _STATES)
    _outputs(report, name, drafter, hidden, head, given)


def _outputs(
    report: Report, name: str, drafter: DFlashDrafter, hidden: Tensor, head: Tensor, given: dict[str, Tensor]
) -> None:
    report.near(name, "hidden", hidden, given["draft_hidden"], _STATES)
    logits = drafter.logits(hidden[0, 1:], head)
    report.near(name, "logits", logits[None], given["draft_logits"], _LOGITS)
    report.same(name, "argmax", logits.argmax(-1)[None], given["draft_argmax"])
    if drafter.candidate_selector is None:
        return
    anchor = given["noise_ids"][0, :1].to(hidden.device)
    path = propose(drafter, hidden[0, 1:], anchor, head).tokens
    report.same(name, "selector path", path[None], given["selector_path"])
    previous = torch.cat([anchor, path[:-1]])
    candidates, scores = drafter.candidate_selector(hidden[0, 1:], logits, previous)
    order = given["candidates_sorted"][0].to(hidden.device)
    report.same(name, "candidates", candidates.sort(-1).values, order.cpu().sort(-1).values)
    whole = torch.full_like(logits, float("nan")).scatter(1, candidates, scores)
    report.near(name, "candidate scores", whole.gather(1, order)[None], given["candidate_scores"], _LOGITS)
    report.near(name, "candidate logits", logits.gather(1, order)[None], given["candidate_unary"], _LOGITS)


def _cached(
    reference: Reference, report: Report, case: dict[str, Any], drafter: DFlashDrafter, tensors: dict[str, Tensor]
) -> None:
    name, size, device = case["case"], case["block_size"], reference.device
    embedding, head = reference.weights(case["target"])
    features = tensors["cached.all_features"].to(device, reference.dtype)
    cache = DraftCache(drafter.config, features.shape[1] + size, device, reference.dtype)
    for step in case["steps"]:
        prefix = f"cached.step{step['step']}."
        given = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        begin, end = step["context_rows"]
        positions = torch.arange(begin, end + size, device=device)[None]
        report.same(name, f"step {step['step']} positions", positions, given["position_ids"])
        context = drafter.context_features(features[:, begin:end])
        cache.append(drafter.context_kv(context, positions[:, : end - begin]))
        embeds = drafter.embed(given["noise_ids"].to(device), embedding)
        visibility = Visibility(torch.tensor([[end]], device=device), size, end)
        hidden = drafter(embeds, positions[:, end - begin :], cache.context(), visibility)
        _outputs(report, f"{name}, step {step['step']}", drafter, hidden, head, given)
        for layer, held in enumerate(cache.context()):
            for what, found in (("key", held.keys), ("value", held.values)):
                expected = given.get(f"cache_{what}{layer}")
                if expected is not None:
                    # A sliding layer of the reference keeps the last rows of its window only.
                    kept = found[:, :, found.shape[2] - expected.shape[2] :]
                    report.near(name, f"step {step['step']} cached {what}s {layer}", kept, expected, _STATES)
