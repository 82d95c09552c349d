"""How much CPU `dflash-console --help` takes before a person sees an answer: `python -m benchmarks.startup`.

Median user CPU time of nine fresh processes, the bytecode cache warm, against a bar of 0.4 s; the interpreter
alone is printed beside it. The last line is JSON; the exit code is 0 when the bar holds.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys

BAR_S = 0.4
RUNS = 9


def user_seconds(code: str) -> float:
    """User CPU seconds of one fresh interpreter that runs this code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def main() -> int:
    """Measure and print; returns the exit code."""
    help_text = "import sys; sys.argv = ['dflash-console', '--help']; from dflash_console.cli import main; main()"
    user_seconds(help_text)  # writes the bytecode
    bare = statistics.median(user_seconds("pass") for _ in range(RUNS))
    times = [user_seconds(help_text) for _ in range(RUNS)]
    measured = statistics.median(times)
    print(f"interpreter alone {bare:.3f} s; --help {measured:.3f} s (from {min(times):.3f} to {max(times):.3f})")
    holds = measured < BAR_S
    record = {"name": "dflash-console --help", "measured": round(measured, 3), "unit": "s of user CPU", "bar": BAR_S}
    print(json.dumps([record | {"holds": holds}]))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
