"""The top line: whose board this is, how much of it lives, and the time that its ages count from."""

from __future__ import annotations

import time

from rich.text import Text
from textual.widget import Widget

from dflash_console.core.board import Board
from dflash_console.widgets.looks import DIM, STRONG, TROUBLE, drawable

__all__ = ["StatusBar", "status_line"]


def status_line(board: Board, title: str, width: int, *, replay: bool) -> Text:
    """Title on the left, counts in the middle, clock on the right; the middle gives way first."""
    up = sum(host.state == "up" for host in board.hosts.values())
    runs = sum(run.is_live for run in board.runs.values())
    evaluations = sum(e.job.is_live for e in board.evaluations.values())
    transfers = sum(t.state == "running" for t in board.transfers.values())
    left = Text(" dflash  ", style=STRONG)
    left.append(title, "bold black on #e8c15a" if replay else STRONG)
    middle = Text(style=DIM)
    hosts = _plural(len(board.hosts), "host")
    middle.append(f"{up} of {hosts} up" if up < len(board.hosts) else hosts, TROUBLE if up < len(board.hosts) else "")
    for count, word in ((runs, "run"), (evaluations, "evaluation"), (transfers, "transfer")):
        middle.append(f" · {_plural(count, word)}" if count else "")
    right = Text(time.strftime("%H:%M:%S ", time.localtime(board.clock())), style=DIM)
    room = width - left.cell_len - right.cell_len
    if middle.cell_len + 2 > room:
        middle = Text("")
    gap = max(0, room - middle.cell_len)
    return left + Text(" " * (gap - gap // 2)) + middle + Text(" " * (gap // 2)) + right


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


class StatusBar(Widget):
    """One line at the top."""

    def __init__(self) -> None:
        super().__init__(id="status")
        self._line = Text("")

    def show(self, board: Board, title: str, *, replay: bool) -> None:
        """Redraw where anything in it changed."""
        line = status_line(board, title, self.app.size.width, replay=replay)
        if line != self._line:
            self._line = line
            self.refresh()

    def render(self) -> Text:
        return drawable(self._line)
