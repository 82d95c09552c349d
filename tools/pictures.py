"""Pictures of every screen, from the recorded session: `python -m tools.pictures`.

Writes the snapshots that the tests compare with (`tests/snapshots/SCREEN-WIDTHxHEIGHT.svg`) and the README's
picture. Look at what changed before it is committed: `rsvg-convert X.svg -o X.png` makes a picture of one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from dflash_console.app import Dashboard
from dflash_console.core.replay import ReplaySource, recorded_demo

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOTS = ROOT / "tests" / "snapshots"
README_PICTURE = ROOT / "docs" / "dashboard.svg"
SIZES = ((80, 24), (120, 40), (200, 60))
WHILE_IT_RUNS_S = 45.0
"""A moment of the recorded session at which a training and an evaluation run."""
SCREENS: dict[str, tuple[float | None, tuple[str, ...]]] = {
    "overview": (WHILE_IT_RUNS_S, ()),
    "run": (WHILE_IT_RUNS_S, ("2",)),
    "checkpoints": (None, ("3",)),
    "evaluation-running": (WHILE_IT_RUNS_S, ("4",)),
    "evaluations": (None, ("4",)),
    "logs": (None, ("5",)),
    "help": (None, ("question_mark",)),
    "palette": (None, ("ctrl+p",)),
}
"""Name -> moment of the session (None: its end), and the keys that lead there."""


class Still(ReplaySource):
    """A recording that stands still at one moment."""

    def __init__(self, at: float | None) -> None:
        super().__init__(recorded_demo())
        self.play_until(self.seconds if at is None else at)

    async def run(self) -> None:
        """Nothing happens any more."""
        await asyncio.Event().wait()


async def picture(screen: str, size: tuple[int, int]) -> str:
    """The SVG of one screen."""
    at, keys = SCREENS[screen]
    app = Dashboard(Still(at))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        for key in keys:
            await pilot.press(key)
            await pilot.pause()
        if screen == "palette":
            await pilot.pause(1.0)  # its list comes from a worker of Textual's
        return app.export_screenshot(title="dflash-console")


def use_utc() -> None:
    """Clock times on the pictures are the same everywhere."""
    os.environ["TZ"] = "UTC"
    time.tzset()


def main() -> int:
    """Write all pictures."""
    use_utc()
    SNAPSHOTS.mkdir(exist_ok=True)
    README_PICTURE.parent.mkdir(exist_ok=True)
    for screen in SCREENS:
        for size in SIZES:
            svg = asyncio.run(picture(screen, size))
            (SNAPSHOTS / f"{screen}-{size[0]}x{size[1]}.svg").write_text(svg)
    README_PICTURE.write_text(asyncio.run(picture("overview", (120, 24))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
