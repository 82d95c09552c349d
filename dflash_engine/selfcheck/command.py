"""`dflash-engine selfcheck --reference DIR`: every case of a reference folder, and whether it holds here.

The folder has the layout of the public reference data (`tests/data/reference/README.md`): other shapes, seeds and
options are welcome, parts that it does not have are said to be absent. Exit code 0 when all checks hold, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from dflash_engine.errors import EngineError
from dflash_engine.selfcheck.forward import check_forward
from dflash_engine.selfcheck.models import Reference
from dflash_engine.selfcheck.report import Report
from dflash_engine.selfcheck.tables import check_anchors, check_broken, check_formats, check_layer_table, check_sampling
from dflash_engine.selfcheck.traces import check_traces
from dflash_engine.selfcheck.training import check_training, unchecked_losses

__all__ = ["PARTS", "main", "selfcheck"]

PARTS: dict[str, Callable[[Reference, Report], None]] = {
    "forward/index.json": check_forward,
    "traces": check_traces,
    "formats/index.json": check_formats,
    "formats/broken/index.json": check_broken,
    "training/index.json": check_training,
    "training/anchor_eligibility.json": check_anchors,
    "target_layer_ids.json": check_layer_table,
    "sampling/index.json": check_sampling,
}
"""What is looked for in the folder, and who checks it."""

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_SHOWN = 20


def main(argv: list[str]) -> int:
    """Print the cases that do not hold, and a line a part."""
    parser = argparse.ArgumentParser(prog="dflash-engine selfcheck", description=__doc__)
    parser.add_argument("--reference", type=Path, required=True, help="folder of recorded outputs")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=sorted(_DTYPES))
    parser.add_argument("--json", action="store_true", help="one JSON document with every check")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("dflash-engine: error: torch sees no CUDA device here\n")
        return 4
    try:
        reference = Reference(arguments.reference, torch.device(arguments.device), _DTYPES[arguments.dtype])
        reports = selfcheck(reference)
        losses = unchecked_losses(reference) if "training/index.json" in reports else []
    except EngineError as error:
        sys.stderr.write(f"dflash-engine: error: {error}\n")
        return error.exit_code
    checks = [check for report in reports.values() for check in report.checks]
    if arguments.json:
        rows = [vars(check) | {"holds": check.holds} for check in checks]
        absent = [part for part in PARTS if part not in reports]
        sys.stdout.write(json.dumps({"checks": rows, "absent": absent, "losses_not_checked": losses}) + "\n")
    else:
        _print(reports)
        if losses:
            sys.stdout.write(f"losses that this engine does not have, not checked: {', '.join(losses)}\n")
    return 0 if checks and all(check.holds for check in checks) else 1


def selfcheck(reference: Reference) -> dict[str, Report]:
    """The report of every part that the folder has. Raises EngineError where a part cannot be read."""
    # TF32 rounds to ten bits: fine for training, not for comparing.
    torch.backends.cuda.matmul.allow_tf32 = False
    reports = {}
    for part, check in PARTS.items():
        if reference.has(part):
            reports[part] = Report()
            check(reference, reports[part])
    return reports


def _print(reports: dict[str, Report]) -> None:
    for part in PARTS:
        if part not in reports:
            sys.stdout.write(f"{part:<28} not in this folder\n")
            continue
        checks = reports[part].checks
        wrong = [check for check in checks if not check.holds]
        worst = max((c.error / c.tolerance for c in checks if c.tolerance), default=0.0)
        verdict = "all hold" if not wrong else f"{len(wrong)} DO NOT HOLD"
        sys.stdout.write(f"{part:<28} {len(checks):>5} checks, largest error {worst:.2f} of its tolerance: {verdict}\n")
        for check in wrong[:_SHOWN]:
            sys.stdout.write(
                f"  {check.case}, {check.quantity}: error {check.error:g}, tolerance {check.tolerance:g}\n"
            )
