"""Tables of text in fixed columns: numbers right-aligned, widths that do not jump, columns that give way.

The width of a column is its own, whatever its cells hold at the moment; where the line is too narrow the
columns of the highest `rank` go first, and a column that grows takes what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.text import Text

from dflash_console.widgets.looks import DIM

__all__ = ["Column", "fit", "flow", "header", "line", "wrap"]

_GAP = 2


@dataclass(frozen=True)
class Column:
    """One column. `rank` 0 never goes; `grow` columns share what is left over by that weight."""

    title: str
    width: int
    align: Literal["left", "right"] = "left"
    rank: int = 0
    grow: int = 0


def fit(columns: Sequence[Column], width: int, indent: int = 0) -> list[int]:
    """The width of each column on a line of `width`; 0 for one that has no room."""
    shown = [True] * len(columns)

    def needed() -> int:
        return indent + sum(c.width + _GAP for c, keep in zip(columns, shown, strict=True) if keep) - _GAP

    for rank in sorted({column.rank for column in columns if column.rank}, reverse=True):
        if needed() <= width:
            break
        for i in reversed([i for i, column in enumerate(columns) if column.rank == rank]):
            if needed() > width:
                shown[i] = False
    left = max(0, width - needed())
    weight = sum(column.grow for column, keep in zip(columns, shown, strict=True) if keep) or 1
    return [
        (column.width + left * column.grow // weight) if keep else 0
        for column, keep in zip(columns, shown, strict=True)
    ]


def line(cells: Sequence[Text], columns: Sequence[Column], widths: Sequence[int], indent: int = 0) -> Text:
    """One row; a cell that is too long ends in an ellipsis."""
    parts = []
    for cell, column, width in zip(cells, columns, widths, strict=True):
        if width:
            part = cell.copy()
            part.truncate(width, overflow="ellipsis")
            part.align(column.align, width)
            parts.append(part)
    return Text(" " * indent, no_wrap=True, end="") + Text(" " * _GAP).join(parts)


def flow(parts: Sequence[Text], width: int, *, indent: int = 1, gap: int = 3) -> list[Text]:
    """As many parts on a line as fit, the rest below; a part that is too long alone ends in an ellipsis."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + gap + part.cell_len < width:
            lines[-1] = lines[-1] + Text(" " * gap) + part
        else:
            lines.append(Text(" " * (indent if not lines else indent + 2), no_wrap=True) + part)
    for text in lines:
        text.truncate(max(20, width), overflow="ellipsis")
    return lines


def wrap(text: Text, width: int, *, indent: int, most: int = 6) -> Text:
    """A text of at most `most` lines, broken at spaces, those after the first indented; a longer one is cut."""
    lines: list[Text] = []
    rest = text
    while rest.cell_len > width and len(lines) < most - 1:
        cut = rest.plain.rfind(" ", indent + 1, width)
        cut = width if cut <= indent else cut
        lines.append(rest[:cut])
        rest = rest[cut:]
        rest = Text(" " * indent) + rest[len(rest.plain) - len(rest.plain.lstrip()) :]
    rest.truncate(width, overflow="ellipsis")
    return Text("\n").join([*lines, rest])


def header(columns: Sequence[Column], widths: Sequence[int], indent: int = 0, style: str = DIM) -> Text:
    """The titles, aligned as their columns are."""
    return line([Text(column.title, style=style) for column in columns], columns, widths, indent)
