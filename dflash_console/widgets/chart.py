"""A line chart in braille dots: as many points as there are, never more work than there are columns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from rich.text import Text
from textual.widget import Widget

from dflash_console.widgets.looks import DIM, STRONG, dash, is_ascii

__all__ = ["Chart", "draw_chart"]

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of the dot at [row][column] of a braille cell (Unicode block Braille Patterns)."""


def draw_chart(
    xs: Sequence[float], ys: Sequence[float], width: int, height: int, *, log: bool = False, ascii_only: bool = False
) -> list[str]:
    """`height` lines of `width` characters; gaps where a value is not finite (or not positive, on a log scale).

    Each column of dots shows the lowest to the highest value of its points: a single spike stays visible.
    """
    across = width if ascii_only else 2 * width
    down = height if ascii_only else 4 * height
    spans = _spans(xs, ys, across, log=log)
    found = [value for span in spans if span is not None for value in span]
    blank = [" " * width for _ in range(height)]
    if not found or width <= 0 or height <= 0:
        return blank
    low, high = min(found), max(found)
    reach = (high - low) or 1.0
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for column, span in enumerate(spans):
        if span is None:
            before = None
            continue
        rows = [round((high - value) / reach * (down - 1)) for value in span]
        top, bottom = min(rows), max(rows)
        if before is not None:  # joined with the column to the left
            top, bottom = min(top, before), max(bottom, before)
        for row in range(top, bottom + 1):
            if ascii_only:
                cells[row][column] = 1
            else:
                cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
        before = rows[-1]
    if ascii_only:
        return ["".join("*" if dot else " " for dot in line) for line in cells]
    return ["".join(chr(0x2800 + bits) if bits else " " for bits in line) for line in cells]


def _spans(xs: Sequence[float], ys: Sequence[float], columns: int, *, log: bool) -> list[tuple[float, ...] | None]:
    """(lowest, highest, last) of each column's points, on a scale of half its unit (or its logarithm's)."""
    if not len(xs):
        return [None] * columns
    first, reach = xs[0], (xs[-1] - xs[0]) or 1.0
    found: list[list[float]] = [[] for _ in range(columns)]
    gaps = set()
    for x, y in zip(xs, ys, strict=True):
        if log:
            y = math.log10(y) if y > 0 and math.isfinite(y) else math.nan
        column = min(columns - 1, int((x - first) / reach * columns))
        if math.isfinite(y):
            found[column].append(y / 2)  # halved: the distance of two floats may not be a float
        else:
            gaps.add(column)
    spans: list[tuple[float, ...] | None] = [(min(p), max(p), p[-1]) if p else None for p in found]
    # Fewer points than columns: a straight line from each to the next.
    known = [i for i, span in enumerate(spans) if span is not None]
    if len(xs) < columns:
        for left, right in itertools.pairwise(known):
            start, end = spans[left], spans[right]
            if start is None or end is None or gaps.intersection(range(left, right + 1)):
                continue
            for i in range(left + 1, right):
                value = start[2] + (end[2] - start[2]) * ((i - left) / (right - left))
                spans[i] = (value, value, value)
    return spans


class Chart(Widget):
    """One measurement over steps, with its latest value at the top right and its range at the bottom."""

    def __init__(self, title: str, hue: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.border_title = title
        self._hue = hue
        self._title = title
        self._points: tuple[Sequence[float], Sequence[float]] = ((), ())
        self._value: Text = dash()
        self._log = False
        self._drawn: tuple[object, ...] = ()
        self.draws = 0

    def show(
        self, xs: Sequence[float], ys: Sequence[float], value: Text, stamp: object, *, log: bool = False, note: str = ""
    ) -> None:
        """Points and the value to print; redrawn only when `stamp` is another one than before."""
        key = (stamp, log, value.plain, note)
        if key == self._drawn:
            return
        self._drawn = key
        # Copies: the board's columns grow between this and the drawing.
        self._points, self._value, self._log = (list(xs), list(ys)), value, log
        finite = [y for y in ys if math.isfinite(y)]
        span = f"{_short(min(finite))} to {_short(max(finite))}" if finite else ""
        self.border_title = f"{self._title}{' (log)' if log else ''}"
        self.border_subtitle = "  ".join(part for part in (span, note) if part)
        self.draws += 1
        self.refresh()

    def render(self) -> Text:
        """The chart with its value over the top right corner."""
        width, height = self.size
        xs, ys = self._points
        if not any(math.isfinite(y) for y in ys):
            return Text("\n" * (max(0, height - 1) // 2) + "not known yet".center(width), style=DIM)
        lines = draw_chart(xs, ys, width, height, log=self._log, ascii_only=is_ascii())
        value = self._value.copy()
        value.stylize(STRONG)
        value = Text(" ") + value
        top = Text(lines[0][: max(0, width - value.cell_len)], style=self._hue)
        body = Text("\n".join(lines[1:]), style=self._hue)
        return Text("\n").join([top + value, body]) if len(lines) > 1 else top + value


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
