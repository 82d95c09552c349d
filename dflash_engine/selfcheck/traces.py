"""Generation traces: every block, every verification and every acceptance length, to the token."""

from __future__ import annotations

import json

from dflash_engine.generate import generate
from dflash_engine.selfcheck.models import Reference
from dflash_engine.selfcheck.report import Report

__all__ = ["check_traces"]


def check_traces(reference: Reference, report: Report) -> None:
    """Every line of `traces/*.jsonl`."""
    for path in sorted((reference.folder / "traces").glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines()):
            row = json.loads(line)
            name = f"{path.stem}[{number}] {row['case']}"
            drafter = reference.drafter(row["drafter"], row["config_override"])
            made = generate(
                drafter,
                reference.target(row["target"]),
                row["prompt_ids"],
                max_new_tokens=row["max_new_tokens"],
                stop_ids=row["stop_token_ids"] or (),
                block_size=row["block_size"],
                last_is_normed=True,
            )
            report.same(name, "tokens", list(made.tokens), row["output_ids"])
            report.same(name, "greedy tokens", list(made.tokens), row["greedy_output_ids"])
            report.same(name, "acceptance lengths", made.acceptance_lengths, row["acceptance_lengths"])
            report.same(name, "blocks", [list(s.block) for s in made.steps], [s["block"] for s in row["steps"]])
            report.same(
                name, "verified", [list(s.verified) for s in made.steps], [s["target_argmax"] for s in row["steps"]]
            )
            report.same(name, "matched", [s.matched for s in made.steps], [s["matched"] for s in row["steps"]])
