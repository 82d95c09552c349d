"""The bottom lines: where one can go, what the keys do now in the words of the thing, and why one cannot act."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual import events
from textual.widget import Widget

from dflash_console.screens.view import KeyHint
from dflash_console.widgets.looks import DIM, STRONG, TROUBLE, WARN, drawable, glyph

__all__ = ["KeyBar"]

_NAMES = {"enter": "⏎"}


class KeyBar(Widget):
    """A rule, the views, and the keys; a notice stands in the rule for a while."""

    def __init__(self) -> None:
        super().__init__(id="keys")
        self._shown: tuple[object, ...] = ()
        self._text = Text("")
        self._spots: list[tuple[int, int, int, str]] = []

    def show(
        self, views: Sequence[str], current: int, hints: Sequence[KeyHint], notice: tuple[str, str] | None
    ) -> None:
        """Redraw where anything changed; `notice` is (level, words)."""
        width = self.app.size.width
        shown = (tuple(views), current, tuple(hints), notice, width)
        if shown == self._shown:
            return
        self._shown = shown
        self._spots = []
        places = self._places(views, current, width)
        rule = Text(glyph("rule") * width, style=DIM) if notice is None else _notice(notice, width)
        self._text = Text("\n").join([rule, places, self._keys(hints, width)])
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        """A click on a key presses it."""
        for y, begin, end, key in self._spots:
            if event.y == y and begin <= event.x < end:
                self.app.simulate_key(key)

    def render(self) -> Text:
        return drawable(self._text)

    def _places(self, views: Sequence[str], current: int, width: int) -> Text:
        text = Text(" ", no_wrap=True)
        wide = sum(len(name) + 4 for name in views) + 34 <= width
        for index, name in enumerate(views):
            words = name if wide or index == current else name[:5]
            begin = text.cell_len
            text.append(f"{index + 1} ", STRONG if index == current else DIM)
            text.append(words, STRONG + " underline" if index == current else DIM)
            self._spots.append((1, begin, text.cell_len, str(index + 1)))
            text.append("  ")
        always = [
            ("/", "slash", "filter"),
            ("?", "question_mark", "help"),
            ("^p", "ctrl+p", "palette"),
            ("q", "q", "quit"),
        ]
        if not wide:
            always = [("/", "slash", "filter"), ("?", "question_mark", "help"), ("q", "q", "quit")]
        tail = sum(len(key) + len(words) + 3 for key, _, words in always)
        text.append(" " * max(0, width - text.cell_len - tail))
        for key, name, words in always:
            begin = text.cell_len
            text.append(key, STRONG)
            text.append(f" {words}", DIM)
            self._spots.append((1, begin, text.cell_len, name))
            text.append("  ")
        return text

    def _keys(self, hints: Sequence[KeyHint], width: int) -> Text:
        text = Text(" ", no_wrap=True, overflow="ellipsis")
        for hint in hints:
            words = f" {hint.why_not}" if hint.why_not else f" {hint.words}"
            if text.cell_len + len(hint.key) + len(words) + 3 > width:
                break
            begin = text.cell_len
            text.append(_NAMES.get(hint.key, hint.key), DIM if hint.why_not else STRONG)
            text.append(words, DIM + " italic" if hint.why_not else "")
            if not hint.why_not:
                self._spots.append((2, begin, text.cell_len, hint.key))
            text.append("   ")
        return text


def _notice(notice: tuple[str, str], width: int) -> Text:
    level, words = notice
    style = {"error": TROUBLE, "warning": WARN}.get(level, STRONG)
    text = Text(f"{words} ", style=style, no_wrap=True)
    text.truncate(max(1, width - 4), overflow="ellipsis")
    line = Text.assemble((f"{glyph('rule') * 2} ", DIM), text)
    return line + Text(glyph("rule") * max(0, width - line.cell_len), style=DIM)
