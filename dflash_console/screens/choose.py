"""Choose one of a few things: a dialog for a choice that has no sensible default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from dflash_console.widgets.looks import DIM, plain
from dflash_console.widgets.row_list import Row, RowList

__all__ = ["ChooseScreen"]


class ChooseScreen(ModalScreen[str | None]):
    """A question with its answers; dismissed with the chosen one, or None."""

    CSS_PATH = "choose.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss(None)", show=False)]

    def __init__(self, question: str, answers: Sequence[tuple[str, str]]) -> None:
        """`answers` are (value, words)."""
        super().__init__()
        self._question = question
        self._answers = answers

    def compose(self) -> ComposeResult:
        with Vertical(id="choose-box"):
            yield Static(plain(self._question), markup=False)
            yield RowList(id="choose-list")
            yield Static(plain("enter: choose   esc: none", DIM), markup=False)

    def on_mount(self) -> None:
        rows = self.query_one(RowList)
        rows.styles.height = len(self._answers)
        rows.show([Row.of(plain(f" {words}"), ("answer", value)) for value, words in self._answers])
        rows.focus()

    def on_row_list_opened(self, message: RowList.Opened) -> None:
        message.stop()
        self.dismiss(message.key[1])
