"""Checkpoints: which is the newest whole one, and where are copies."""

from __future__ import annotations

from textual.app import ComposeResult

from dflash_console.screens.checkpoint_rows import checkpoint_rows
from dflash_console.screens.view import KeyHint, View
from dflash_console.widgets.row_list import RowList

__all__ = ["CheckpointsView"]


class CheckpointsView(View):
    """All runs' checkpoints, a column for each host."""

    NAME = "Checkpoints"

    def __init__(self) -> None:
        super().__init__(id="checkpoints")

    def compose(self) -> ComposeResult:
        yield RowList(id="checkpoint-list")

    def draw(self) -> None:
        self.main_list.show(checkpoint_rows(self.board, self.board.run_names(), self.dashboard.filter_text(self)))

    def hints(self) -> list[KeyHint]:
        return self.dashboard.checkpoint_hints()
