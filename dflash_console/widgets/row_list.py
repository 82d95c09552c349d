"""A list of lines with a cursor: the one list of the dashboard, cheap to redraw and never longer than it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from dflash_console.widgets.looks import drawable

__all__ = ["Row", "RowList"]

_CURSOR = Style(bgcolor="#2d333b")
_CURSOR_AWAY = Style(bgcolor="#22272e")


@dataclass(frozen=True)
class Row:
    """One line, or a few. `draw` makes it for a width; `key` says what it is about, None where it cannot be chosen."""

    key: tuple[str, ...] | None
    draw: Callable[[int], Text]

    @classmethod
    def of(cls, text: Text, key: tuple[str, ...] | None = None) -> Row:
        """A line that is the same at any width."""
        return cls(key, lambda width: text)


class RowList(ScrollView, can_focus=True):
    """Lines of which one is chosen. Rows are replaced as a whole; the cursor stays on its key."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "end(-1)", show=False),
        Binding("end,G", "end(1)", show=False),
        Binding("enter", "open", show=False),
    ]

    cursor: reactive[tuple[str, ...] | None] = reactive(None, repaint=False)

    @dataclass
    class Chosen(Message):
        """The cursor came to rest on a row."""

        row_list: RowList
        key: tuple[str, ...] | None

        @property
        def control(self) -> RowList:
            """The list."""
            return self.row_list

    @dataclass
    class Opened(Message):
        """`enter`, or a click on the row that was chosen already."""

        row_list: RowList
        key: tuple[str, ...]

        @property
        def control(self) -> RowList:
            """The list."""
            return self.row_list

    def __init__(self, *, id: str | None = None, follow: bool = False) -> None:
        """`follow`: the cursor stays on the last row until it is moved away from there."""
        super().__init__(id=id)
        self._rows: list[Row] = []
        self._drawn: list[Text] = []
        self._lines: list[Text] = []
        self._owners: list[int] = []
        self._strips: dict[int, Strip] = {}
        self._follow = follow
        self._at_end = follow
        self._pen = Console(width=10_000, color_system="truecolor", force_terminal=True, no_color=False)
        self.touched = False
        """Whether somebody has moved the cursor."""
        self.draws = 0
        """How often the list was redrawn because of new rows."""

    @property
    def keys(self) -> list[tuple[str, ...]]:
        """The keys of the rows that can be chosen."""
        return [row.key for row in self._rows if row.key is not None]

    def show(self, rows: Sequence[Row]) -> None:
        """Replace the rows; redraws only where a line changed."""
        self._rows = list(rows)
        width = self._line_width()
        drawn = [drawable(row.draw(width)) for row in self._rows]
        keys = self.keys
        if self._at_end and keys:
            self._choose(keys[-1])
        elif self.cursor not in keys:
            self._choose(keys[0] if keys else None)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        self._lines, self._owners = [], []
        for index, text in enumerate(drawn):
            parts = list(text.split("\n", allow_blank=True)) if "\n" in text.plain else [text]
            self._lines += parts
            self._owners += [index] * len(parts)
        self._strips.clear()
        self.virtual_size = Size(width, len(self._lines))
        self.draws += 1
        self.refresh()
        if self._at_end:
            self._show_cursor()

    def choose(self, key: tuple[str, ...]) -> None:
        """Put the cursor on a key, if it is there."""
        if key in self.keys:
            self._choose(key)
            self._show_cursor()

    def on_resize(self, event: events.Resize) -> None:
        """Lines are drawn for a width."""
        self._drawn = []
        self.show(self._rows)
        self._show_cursor()

    def on_focus(self) -> None:
        """The cursor's look changes."""
        self._strips.clear()
        self.refresh()

    def on_blur(self) -> None:
        """The cursor's look changes."""
        self._strips.clear()
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        """A click chooses, a second one opens."""
        at = event.y + self.scroll_offset.y
        if 0 <= at < len(self._owners) and (key := self._rows[self._owners[at]].key) is not None:
            if key == self.cursor:
                self.post_message(self.Opened(self, key))
            self._move_to(key)

    def action_move(self, by: int) -> None:
        """Next or previous row that can be chosen."""
        self._step(by)

    def action_page(self, way: int) -> None:
        """A page up or down."""
        self._step(way * max(1, self.size.height - 1))

    def action_end(self, way: int) -> None:
        """First or last row."""
        self._step(way * len(self._rows))

    def action_open(self) -> None:
        """Open the chosen row."""
        if self.cursor is not None:
            self.post_message(self.Opened(self, self.cursor))

    def render_line(self, y: int) -> Strip:
        """One line of the visible part."""
        index = y + self.scroll_offset.y
        width = self.size.width
        base = self.rich_style
        if not 0 <= index < len(self._lines):
            return Strip.blank(width, base)
        strip = self._strips.get(index)
        if strip is None:
            key = self._rows[self._owners[index]].key
            chosen = key is not None and key == self.cursor
            strip = self._strip(self._lines[index], width, base, chosen=chosen)
            self._strips[index] = strip
        return strip

    def _strip(self, text: Text, width: int, base: Style, *, chosen: bool) -> Strip:
        segments = [segment for segment in text.render(self._pen) if segment.text != "\n"]
        strip = Strip(Segment(s.text, s.style) for s in segments).adjust_cell_length(width)
        if chosen:
            return strip.apply_style(base + (_CURSOR if self.has_focus else _CURSOR_AWAY))
        return strip.apply_style(base)

    def _step(self, by: int) -> None:
        keys = self.keys
        if not keys:
            return
        at = keys.index(self.cursor) if self.cursor in keys else 0
        self._move_to(keys[max(0, min(len(keys) - 1, at + by))])

    def _move_to(self, key: tuple[str, ...]) -> None:
        self.touched = True
        self._at_end = self._follow and key == self.keys[-1]
        self._choose(key)
        self._show_cursor()

    def _choose(self, key: tuple[str, ...] | None) -> None:
        if key == self.cursor:
            return
        self.cursor = key
        self._strips.clear()
        self.refresh()
        self.post_message(self.Chosen(self, key))

    def _show_cursor(self) -> None:
        for index, row in enumerate(self._rows):
            if row.key is not None and row.key == self.cursor:
                lines = [at for at, owner in enumerate(self._owners) if owner == index] or [0]
                # The titles above the first row come into view with it.
                top = 0 if not any(r.key for r in self._rows[:index]) else lines[0]
                self.scroll_to_region(Region(0, top, 1, lines[-1] - top + 1), animate=False, force=True)
                return

    def _line_width(self) -> int:
        return max(20, self.size.width)
