"""What the five views have in common: they draw the board when told to, and say which keys do something now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.containers import Vertical

from dflash_console.core.board import Board
from dflash_console.widgets.row_list import RowList

if TYPE_CHECKING:
    from dflash_console.app import Dashboard

__all__ = ["KeyHint", "View"]


@dataclass(frozen=True)
class KeyHint:
    """One entry of the key bar. `why_not`: why the key cannot act just now; empty where it can."""

    key: str
    words: str
    why_not: str = ""


class View(Vertical):
    """One of the five views. Only the visible ones are told to draw."""

    NAME = ""

    @property
    def dashboard(self) -> Dashboard:
        """The app, which holds what is selected."""
        from dflash_console.app import Dashboard

        app = self.app
        assert isinstance(app, Dashboard)  # noqa: S101 # views live nowhere else
        return app

    @property
    def board(self) -> Board:
        """What is known."""
        return self.dashboard.source.board

    @property
    def main_list(self) -> RowList:
        """The list that gets the keyboard when the view is shown."""
        return self.query(RowList).first()

    def draw(self) -> None:
        """Show what the board knows now."""
        raise NotImplementedError

    def hints(self) -> list[KeyHint]:
        """The keys that do something here, besides those that work everywhere."""
        return []

    def open(self, key: tuple[str, ...]) -> None:
        """`enter` on a row of one of its lists."""
        self.dashboard.open_key(key)

    def back(self) -> bool:
        """`esc`; whether it was for something within the view."""
        return False
