"""The dashboard against its bars: `python -m benchmarks.dashboard`; 20 seconds.

- From the command `dflash-console demo --replay` to a whole first screen, in a pseudo-terminal (bar: 2 s; median
  of five).
- The longest time that one callback holds the loop while the recorded session plays at 20 times its speed and
  somebody walks through all views (bar: 50 ms).
- Redraws a second of the busiest widget meanwhile (bar: 4).
- Share of one core that the replay takes (no bar of the issue; 0.5 is ours).
"""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from typing import Any

from dflash_console.app import Dashboard
from dflash_console.core.replay import ReplaySource, recorded_demo
from dflash_console.dashboard import settle_memory
from dflash_console.widgets.row_list import RowList
from tests.loop_stalls import measured_stalls

START_BAR_S = 2.0
STALL_BAR_MS = 50.0
REDRAWS_BAR = 4.0
CPU_BAR = 0.5
_TRIES = 5
_SHOWN = b"quit"
"""The last words of a first screen."""


def start_s() -> float:
    """Seconds from the command to its first whole screen."""
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    began = time.perf_counter()
    code = "from dflash_console.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "demo", "--replay"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(follower)
    seen = b""
    try:
        while _SHOWN not in seen and time.perf_counter() - began < 20:
            if select.select([leader], [], [], 0.05)[0]:
                seen += os.read(leader, 1 << 16)
        took = time.perf_counter() - began
        if _SHOWN not in seen:
            raise SystemExit(f"no screen within 20 s: {seen[-500:]!r}")
        os.write(leader, b"q")
        process.wait(10)
    finally:
        process.kill()
        os.close(leader)
    return took


async def play() -> dict[str, float]:
    """Play the recording through an app without a terminal, walking through the views."""
    app = Dashboard(ReplaySource(recorded_demo()))
    with measured_stalls() as stalls:
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.pause()
            settle_memory()
            await pilot.pause()
            widgets: list[Any] = [*app.query("Chart"), *app.query("FlowText"), *app.query(RowList)]
            stalls.begin()
            began, cpu = time.perf_counter(), time.process_time()
            busiest = 0.0
            for key in "1234512345":
                await pilot.press(key)
                await pilot.pause(0.1)  # the first drawing of a view is no update
                before = {widget: widget.draws for widget in widgets}
                start = time.perf_counter()
                await pilot.pause(1.0)
                seconds = time.perf_counter() - start
                busiest = max(busiest, *((w.draws - before[w]) / seconds for w in widgets))
            share = (time.process_time() - cpu) / (time.perf_counter() - began)
            longest = stalls.longest_s
    return {"stall_ms": longest * 1000, "redraws": busiest, "cpu": share}


def main() -> int:
    """Measure and print; returns the exit code."""
    starts = sorted(start_s() for _ in range(_TRIES))
    print(f"first screen: {', '.join(f'{s:.2f}' for s in starts)} s (load {os.getloadavg()[0]:.1f})")
    found = asyncio.run(play())
    records = [
        ("replay on screen", round(statistics.median(starts), 3), "s", START_BAR_S),
        ("longest stall of the loop", round(found["stall_ms"], 1), "ms", STALL_BAR_MS),
        ("redraws of the busiest widget", round(found["redraws"], 2), "1/s", REDRAWS_BAR),
        ("CPU of a replay", round(found["cpu"], 3), "cores", CPU_BAR),
    ]
    listed = [
        {"name": name, "measured": measured, "unit": unit, "bar": bar, "holds": measured <= bar}
        for name, measured, unit, bar in records
    ]
    print(json.dumps(listed))
    return 0 if all(record["holds"] for record in listed) else 1


if __name__ == "__main__":
    sys.exit(main())
