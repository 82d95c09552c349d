"""What needs no forward pass: default layers, sampling, checkpoint layouts, broken checkpoints."""

from __future__ import annotations

import torch

from dflash_engine.drafter.checkpoint import load_drafter, read_tensor
from dflash_engine.drafter.config import default_layer_ids
from dflash_engine.drafter.documents import read_config
from dflash_engine.drafter.sampling import Sampling, rejection, residual
from dflash_engine.drafter.stored import read_weights
from dflash_engine.inspection import inspect_checkpoint
from dflash_engine.selfcheck.models import Reference
from dflash_engine.selfcheck.report import Report
from dflash_engine.training.anchors import eligible_anchors

__all__ = ["check_anchors", "check_broken", "check_formats", "check_layer_table", "check_sampling"]

_PROBABILITIES = 1e-6


def check_layer_table(reference: Reference, report: Report) -> None:
    """`target_layer_ids.json`: the default rule at every pair of depths."""
    for row in reference.index("target_layer_ids.json")["table"]:
        depths = row["num_target_layers"], row["num_draft_layers"]
        report.same(
            "default layers", f"{depths[1]} of {depths[0]}", default_layer_ids(*depths), row["target_layer_ids"]
        )


def check_anchors(reference: Reference, report: Report) -> None:
    """`training/anchor_eligibility.json`: where a block may start, by SpecForge's rule, which is this engine's."""
    for row in reference.index("training/anchor_eligibility.json"):
        found = eligible_anchors(torch.tensor(row["loss_mask"]).bool()).tolist()
        report.same("anchors", f"{row['name']}, block {row['block_size']}", found, row["specforge"])


def check_sampling(reference: Reference, report: Report) -> None:
    """`sampling/`: probabilities, accepted tokens and the distribution of the bonus token."""
    cases = reference.tensors("sampling/cases.safetensors")
    for row in reference.index("sampling/index.json"):
        found = Sampling(row["temperature"], row["top_p"], row["top_k"]).probabilities(cases["logits"])
        report.near("sampling", row["name"], found, cases[row["name"]], _PROBABILITIES)
    for i, drafted in enumerate(cases["draft_tokens"]):
        target, draft = cases["target_probs"][i], cases["draft_probs"][i]
        accepted = rejection(drafted, target, draft, cases["uniform"][i])
        report.same("rejection", f"accepted {i}", accepted, int(cases["accepted"][i]))
        bonus = residual(accepted, target, draft)
        report.near("rejection", f"bonus {i}", bonus, cases["bonus_distribution"][i], _PROBABILITIES)


def check_formats(reference: Reference, report: Report) -> None:
    """`formats/`: every layout reads as its source drafter, its tensors to the bit."""
    for row in reference.index("formats/index.json"):
        name, folder = f"format {row['directory']}", reference.folder / "formats" / row["directory"]
        source = reference.folder / "models" / row["source_drafter"]
        config = read_config(folder)
        ids = [i - row.get("offset_to_z_lab", 0) for i in row["layer_ids"]]
        report.same(name, "layer ids", list(config.target_layer_ids), ids)
        report.same(name, "block and mask", (config.block_size, config.mask_token_id),
                    (row["block_size"], row["mask_token_id"]))  # fmt: skip
        weights, wanted = read_weights(folder).tensors, read_weights(source).tensors
        report.same(name, "own tensors", sorted(weights.keys() - wanted.keys()), sorted(row["tensors_beyond_z_lab"]))
        different = sum(not torch.equal(read_tensor(weights[n]), read_tensor(t)) for n, t in wanted.items())
        report.same(name, "body, bit for bit", different, 0)
        report.same(name, "loads", load_drafter(folder).config, config)
        faults = [fault["code"] for fault in inspect_checkpoint(folder, None, deep=True)["faults"]]
        report.same(name, "faults", faults, [])


def check_broken(reference: Reference, report: Report) -> None:
    """`formats/broken/`: each is refused for its one fault."""
    for row in reference.index("formats/broken/index.json"):
        folder = reference.folder / "formats" / "broken" / row["directory"]
        faults = [fault["code"] for fault in inspect_checkpoint(folder, None)["faults"]]
        report.same(f"broken {row['directory']}", "fault", faults, [row["kind"]])
