"""Some lines of text that are laid out for the width they get, and take the height that this needs."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text
from textual.geometry import Size
from textual.widget import Widget

from dflash_console.widgets.looks import drawable

__all__ = ["FlowText"]


class FlowText(Widget):
    """`show` takes a function of the width; what it makes is redrawn only where it differs."""

    DEFAULT_CSS = "FlowText { height: auto; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._draw: Callable[[int], Text] = lambda width: Text("")
        self._drawn: tuple[int, Text] = (0, Text(""))
        self.draws = 0

    def show(self, draw: Callable[[int], Text]) -> None:
        """Replace the text."""
        self._draw = draw
        width, before = self._drawn
        text = drawable(draw(width)) if width else Text("")
        if not width or text != before:
            self._drawn = (width, text)
            self.draws += 1
            self.refresh(layout=not width or _height(text) != _height(before))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """As many lines as the text has at this width."""
        return _height(self._at(width))

    def render(self) -> Text:
        return self._at(self.size.width)

    def _at(self, width: int) -> Text:
        if self._drawn[0] != width:
            self._drawn = (width, drawable(self._draw(width)))
        return self._drawn[1]


def _height(text: Text) -> int:
    return text.plain.count("\n") + 1
