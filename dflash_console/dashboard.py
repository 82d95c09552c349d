"""Opening the dashboard on a profile, on the demo or on a recording, and what is said once it is closed."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_console.terminal import data_folder, fail, report_fault, say

if TYPE_CHECKING:
    from dflash_console.core.operations import DemoRequest
    from dflash_console.core.profiles import Profile
    from dflash_console.core.source import Source

__all__ = ["is_terminal", "open_demo", "open_profile", "open_replay", "open_wizard", "settle_memory"]


def is_terminal() -> bool:
    """Whether a person sits there: standard input, output and error are a terminal."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def open_profile(profile: Profile) -> int:
    """The dashboard on a profile's hosts, until it is quit; returns the exit code."""
    from dflash_console.core.live import LiveSource
    from dflash_console.core.operations import Operations

    return _run(LiveSource(profile, Operations(data_folder() / "operations")))


def open_demo(request: DemoRequest, *, keep: bool) -> int:
    """The demo on the dashboard; after it the table, as without a dashboard. Returns the exit code."""
    from dflash_console.core.demo import DemoSummary
    from dflash_console.core.demo_hosts import stop_demo_hosts
    from dflash_console.core.errors import JobFailedError
    from dflash_console.core.live import DemoSource
    from dflash_console.core.operations import Operations
    from dflash_console.lines import demo_table

    source = DemoSource(request, Operations(data_folder() / "operations"))
    code = _run(source)
    if code:
        return code
    if source.failure is not None:
        say("the demo hosts may still be up; `demo` goes on with what runs there, `demo --stop` ends them")
        error = JobFailedError(str(source.failure.data.get("message")))
        fail(error)
        return int(source.failure.data.get("code") or error.exit_code)
    if source.summary is None:
        say("the demo goes on without a dashboard; `dflash-console demo` shows it again, `demo --stop` ends its hosts")
        return 0
    busy = source.is_busy
    if not (keep or busy):
        asyncio.run(stop_demo_hosts(Path(request.root)))
    summary = DemoSummary.from_builtins(source.summary)
    for line in demo_table(summary, keep=keep or busy):
        sys.stdout.write(line + "\n")
    return 0


def open_replay(path: Path | None = None, speed: float = 20.0) -> int:
    """A recorded session; the one that ships unless another is named. Returns the exit code."""
    from dflash_console.core.replay import ReplaySource, recorded_demo

    return _run(ReplaySource(path or recorded_demo(), speed))


def open_wizard() -> Path | None:
    """Ask for the first host and write a profile; its path, or None where nothing was written."""
    from textual.app import App

    from dflash_console.screens.wizard import WizardScreen
    from dflash_console.theme import THEME

    class Wizard(App[Path | None]):
        def on_mount(self) -> None:
            self.register_theme(THEME)
            self.theme = THEME.name
            self.push_screen(WizardScreen(), self.exit)

    _log_to_file()
    return Wizard().run()


def _run(source: Source) -> int:
    from dflash_console.app import Dashboard

    _log_to_file()
    app = Dashboard(source)
    settle_memory()
    app.run()
    if app.fault is not None:
        return report_fault(app.fault)
    return app.return_code or 0


def settle_memory() -> None:
    """Take what is loaded by now out of the garbage collector's sight.

    A full collection looks at every object there is, and the loop stands still meanwhile.
    """
    gc.collect()
    gc.freeze()


def _log_to_file() -> None:
    """Libraries that log would write over the screen."""
    folder = data_folder()
    folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=folder / "dashboard.log", level=logging.WARNING, format="%(asctime)s %(name)s %(message)s", force=True
    )
