"""The whole demo against its two bars: `python -m benchmarks.demo [SEED ...]` (default: seed 0).

Wall time of one `dflash-console demo`, the target converted before (bar: 360 s on 2 otherwise idle cores), and
what the training adds to the acceptance length on held-out prompts (bar: 0.4). One seed takes about 5 minutes,
so three are run as three commands. The last line is JSON; the exit code is 0 when all bars hold.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dflash_console.core.demo_target import ensure_target

TIME_BAR_S = 360.0
GAIN_BAR = 0.4


def run(seed: int) -> dict[str, Any]:
    """One demo in a folder of its own; returns its summary."""
    with tempfile.TemporaryDirectory(prefix="dflash-demo-") as root:
        code = "from dflash_console.cli import main; main()"
        command = [sys.executable, "-c", code, "demo", "--json"]
        command += ["--root", str(Path(root, "demo")), "--seed", str(seed)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def main(seeds: list[int]) -> int:
    """Measure and print; returns the exit code."""
    asyncio.run(ensure_target(print))
    records = []
    for seed in seeds:
        load = os.getloadavg()[0]
        summary = run(seed)
        print(
            f"seed {seed}: {summary['seconds']:.0f} s (load before {load:.1f}), "
            f"tau {summary['untrained']['tau']:.3f} -> {summary['trained']['tau']:.3f}, "
            f"{summary['tokens_per_s']:.0f} tokens/s"
        )
        seconds, gain = round(summary["seconds"], 1), round(summary["gain"], 3)
        for name, measured, unit, bar, holds in (
            ("demo", seconds, "s", TIME_BAR_S, seconds <= TIME_BAR_S),
            ("gain in tau", gain, "tokens per step", GAIN_BAR, gain >= GAIN_BAR),
        ):
            records.append(
                {"name": f"{name}, seed {seed}", "measured": measured, "unit": unit, "bar": bar, "holds": holds}
            )
    print(json.dumps(records))
    return 0 if all(record["holds"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main([int(argument) for argument in sys.argv[1:]] or [0]))
