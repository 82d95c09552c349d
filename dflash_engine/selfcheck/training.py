"""Training cases: who sees what, positions, hidden states, labels and the loss with its gradient norms.

SpecForge's cases take labels from the data and divide by the sum of weights; speculators' take them from the teacher
one position earlier and divide by the number of supervised slots. Losses other than cross-entropy with a fixed decay
are not this engine's yet: their hidden states and masks are checked, and the command names the cases whose loss is
not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_engine.drafter.config import FULL, SLIDING
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.drafter.visibility import LayerRule, Visibility
from dflash_engine.selfcheck.models import Reference
from dflash_engine.selfcheck.report import Report
from dflash_engine.training.loss import block_loss

__all__ = ["check_training", "unchecked_losses"]

_STATES = 5e-5
_LOSS, _NORMS, _GRADIENTS = 1e-5, 1e-4, 1e-4


def unchecked_losses(reference: Reference) -> list[str]:
    """Cases whose loss this engine does not have."""
    return [case["case"] for case in reference.index("training/index.json") if not _fixed_decay(case["options"])]


def check_training(reference: Reference, report: Report) -> None:
    """Every case of `training/index.json`."""
    for case in reference.index("training/index.json"):
        tensors = reference.tensors(f"training/{case['file']}")
        theirs = case["reference"].startswith("speculators")
        override = {"is_causal": False} if case["options"].get("sliding_window_non_causal") else {}
        drafter = reference.drafter(case["drafter"], override).train()
        hidden, visibility = _pass(reference, drafter, case["options"], tensors, case["target"], speculators=theirs)
        _masks(report, case, tensors, visibility, speculators=theirs)
        keep = _keep(tensors)
        shown = keep.repeat_interleave(case["options"]["block_size"], dim=1)
        expected = tensors["out.draft_hidden"]
        report.near(case["case"], "hidden", hidden[shown.to(hidden.device)], expected[shown], _STATES)
        if _fixed_decay(case["options"]):
            _loss(reference, report, case, tensors, drafter, hidden, speculators=theirs)


def _fixed_decay(options: dict[str, Any]) -> bool:
    return options.get("loss_type") == "dflash" or (
        options.get("loss_fn") == "ce" and options["weighting"] == "fixed-exp-decay"
    )


def _keep(tensors: dict[str, Tensor]) -> Tensor:
    """[b, N] bool: blocks that are no padding."""
    found = tensors.get("in.block_keep", tensors.get("in.anchor_valid"))
    if found is None:
        return torch.ones_like(_rows(tensors["in.anchors"]), dtype=torch.bool)
    return _rows(found.bool())


def _rows(given: Tensor) -> Tensor:
    """speculators' cases have one row and leave its dimension out."""
    return given if given.dim() == 2 else given[None]


def _pass(
    reference: Reference,
    drafter: DFlashDrafter,
    options: dict[str, Any],
    tensors: dict[str, Tensor],
    target: str,
    *,
    speculators: bool,
) -> tuple[Tensor, Visibility]:
    """(hidden [b, N * B, H], what was visible) of the blocks at the case's anchors."""
    device, size = reference.device, options["block_size"]
    ids = tensors["in.input_ids"].to(device)
    anchors = _rows(tensors["in.anchors"]).to(device)
    rows, length = ids.shape
    documents = tensors["in.document_ids"].to(device) if "in.document_ids" in tensors else None
    # Packed rows restart their positions with each document.
    positions = tensors.get("in.position_ids", torch.arange(length).expand(rows, -1)).to(device)
    block_positions = (positions.gather(1, anchors)[:, :, None] + torch.arange(size, device=device)).flatten(1)
    block_ids = torch.full((rows, anchors.shape[1], size), options["mask_token_id"], device=device)
    block_ids[:, :, 0] = ids.gather(1, anchors)
    visibility = Visibility(
        anchors, size, length, documents=documents, window_origin="anchor" if speculators else "row"
    )
    embedding, _ = reference.weights(target)
    features = drafter.context_features(tensors["in.hidden_states"].to(device, reference.dtype))
    context = drafter.context_kv(features, positions)
    embeds = drafter.embed(block_ids.flatten(1), embedding.detach())
    hidden: Tensor = drafter(embeds, block_positions, context, visibility)
    return hidden, visibility


def _masks(
    report: Report, case: dict[str, Any], tensors: dict[str, Tensor], visibility: Visibility, *, speculators: bool
) -> None:
    options = case["options"]
    open_block = bool(options.get("sliding_window_non_causal"))
    # A padding block of SpecForge sees nothing; here every row sees itself, and its loss is not counted.
    rows = _keep(tensors).repeat_interleave(options["block_size"], dim=1)[..., None]
    for kind, rule in ((FULL, LayerRule(False, None)), (SLIDING, LayerRule(not open_block, options["window"]))):
        name = "mask_full" if kind == FULL else "mask_sliding"
        if f"out.{name}" in tensors and (kind == FULL or options["window"] is not None):
            found, expected = visibility.dense(rule).cpu(), tensors[f"out.{name}"]
            report.same(case["case"], name, found if speculators else found & rows, expected)


def _loss(
    reference: Reference,
    report: Report,
    case: dict[str, Any],
    tensors: dict[str, Tensor],
    drafter: DFlashDrafter,
    hidden: Tensor,
    *,
    speculators: bool,
) -> None:
    options, name = case["options"], case["case"]
    device = reference.device
    _, head = reference.weights(case["target"])
    labels, counted = tensors["out.target_ids"].to(device), tensors["out.label_mask"].bool().to(device)
    if not speculators:
        at = tensors["in.anchors"][:, :, None] + torch.arange(options["block_size"])  # [b, N, B]
        own = tensors["in.input_ids"].gather(1, at.flatten(1).clamp(max=tensors["in.input_ids"].shape[1] - 1))
        here = counted.cpu()
        report.same(name, "labels", own.view(at.shape)[here], tensors["out.target_ids"][here])
    gamma = options["gamma"] if options["gamma"] is not None else float("inf")
    parts = block_loss(hidden.view(*labels.shape, -1), labels, counted, head.detach(), gamma)
    whole = tensors["out.label_mask"].sum() + 1e-5 if speculators else parts.weight
    loss = parts.numerator / whole.to(device)
    report.relative(name, "loss", float(loss.detach()), case["loss"], _LOSS)
    loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
    for parameter_name, parameter in drafter.named_parameters():
        if parameter.grad is None:
            continue
        expected = case["grad_norm_per_parameter"][parameter_name]
        report.relative(name, f"gradient norm of {parameter_name}", float(parameter.grad.norm()), expected, _NORMS)
        if f"grad.{parameter_name}" in tensors:
            given = tensors[f"grad.{parameter_name}"]
            off = float((parameter.grad.cpu() - given).norm() / given.norm())
            report.near(name, f"gradient of {parameter_name}", torch.tensor(off), torch.tensor(0.0), _GRADIENTS)
