"""Logs: what jobs told and what the console did, and the output of the job behind a line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rich.text import Text
from textual.app import ComposeResult

from dflash_console.core.board import LogLine
from dflash_console.core.errors import ConsoleError
from dflash_console.core.quoting import printable
from dflash_console.lines import event_text
from dflash_console.screens.view import KeyHint, View
from dflash_console.widgets.columns import wrap
from dflash_console.widgets.looks import DIM, EVALUATION, STRONG, TARGET, TROUBLE, WARN, plain
from dflash_console.widgets.row_list import Row, RowList

__all__ = ["LogsView", "log_rows"]

_OUTPUT_S = 2.0


def log_rows(lines: list[LogLine], wanted: str = "") -> list[Row]:
    """One line each, the latest last."""
    rows = []
    for index, entry in enumerate(lines):
        text = _words(entry)
        if text and wanted.lower() in f"{entry.host} {entry.job} {text}".lower():
            key = ("log", str(index), f"{entry.t}", entry.host, entry.job)
            rows.append(Row(key, _wrapper(_line(entry, text), 20)))
    if not rows:
        rows.append(Row.of(plain(" no line matches the filter" if wanted else " nothing yet", DIM)))
    return rows


def _wrapper(text: Text, indent: int) -> Callable[[int], Text]:
    return lambda width: wrap(text, width - 1, indent=indent)


def _words(entry: LogLine) -> str:
    if entry.event is None:
        return entry.text
    return printable(event_text(entry.event), 1000)


def _line(entry: LogLine, text: str) -> Text:
    level = entry.level
    if entry.event is not None and entry.event.type == "alert":
        level = "error" if entry.event.data.get("level") == "error" else "warning"
    style = {"error": TROUBLE, "warning": WARN}.get(level, "")
    clock = time.strftime("%H:%M:%S", time.localtime(entry.t))
    hue = EVALUATION if entry.job.startswith("eval") else TARGET if entry.job else STRONG
    who = entry.host or "console"
    return Text.assemble((f" {clock}  ", DIM), (f"{who:<8} ", hue), (text, style), no_wrap=True)


class LogsView(View):
    """All lines, or the output of one job."""

    NAME = "Logs"

    def __init__(self) -> None:
        super().__init__(id="logs")
        self._output_of: tuple[str, str] | None = None
        self._output: list[str] = []
        self._asked = 0.0
        self._asking: asyncio.Task[None] | None = None

    def compose(self) -> ComposeResult:
        yield RowList(id="log-list", follow=True)

    def draw(self) -> None:
        wanted = self.dashboard.filter_text(self)
        if self._output_of is None:
            self.main_list.show(log_rows(list(self.board.log), wanted))
            return
        self._ask()
        host, job = self._output_of
        head = Row.of(plain(f" output of {job} on {host}, its end; esc: back", DIM))
        found = [line for line in self._output if wanted.lower() in line.lower()]
        rows = [Row(("line", str(i)), _wrapper(plain(f" {line}"), 3)) for i, line in enumerate(found)]
        self.main_list.show([head, *rows])

    def show_output(self, host: str, job: str) -> None:
        """The output of a job, kept up to date while it is shown."""
        self._output_of, self._output, self._asked = (host, job), ["reading ..."], 0.0
        self.draw()

    def filter_host(self, host: str) -> None:
        """Only what concerns a host."""
        self._output_of = None
        self.dashboard.set_filter(self, host)

    def hints(self) -> list[KeyHint]:
        if self._output_of is not None:
            return []
        key = self.main_list.cursor
        if key and key[0] == "log" and key[4]:
            return [KeyHint("enter", f"output of {key[4]}")]
        return [KeyHint("enter", "output", "this line is not a job's")] if key else []

    def open(self, key: tuple[str, ...]) -> None:
        if key[0] == "log" and key[4]:
            self.show_output(key[3], key[4])

    def back(self) -> bool:
        if self._output_of is None:
            return False
        self._output_of = None
        self.draw()
        return True

    def _ask(self) -> None:
        """Read the output again, every two seconds; a slow host holds up nothing but its own answer."""
        busy = self._asking is not None and not self._asking.done()
        if self._output_of is None or busy or time.monotonic() - self._asked < _OUTPUT_S:
            return
        self._asked = time.monotonic()
        self._asking = asyncio.create_task(self._read(*self._output_of))

    async def _read(self, host: str, job: str) -> None:
        try:
            text = await self.dashboard.source.output(host, job)
        except ConsoleError as error:
            text = printable(str(error), 1000)
        if self._output_of == (host, job):
            self._output = text.splitlines() or ["it wrote nothing"]
            self.board.version += 1
