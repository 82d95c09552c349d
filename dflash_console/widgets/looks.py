"""One meaning, one look: hues, glyphs with ASCII twins, and numbers in fixed widths.

Green, yellow and red are states and nothing else; target, drafter, evaluation and transfer have a hue each. A
state is a glyph and a colour, so it reads without colour too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from rich.text import Text

from dflash_console.lines import si

__all__ = [
    "DASH",
    "DIM",
    "DRAFTER",
    "EVALUATION",
    "GOOD",
    "STRONG",
    "TARGET",
    "TITLE",
    "TRANSFER",
    "TROUBLE",
    "WARN",
    "age",
    "bar",
    "dash",
    "drawable",
    "duration",
    "glyph",
    "host_mark",
    "is_ascii",
    "job_mark",
    "number_text",
    "plain",
    "size",
    "spark",
    "use_ascii",
]

TARGET = "#6cb6ff"
DRAFTER = "#b794f6"
EVALUATION = "#4fd1c5"
TRANSFER = "#f0a6ca"
GOOD = "#7ccf7c"
WARN = "#e8c15a"
TROUBLE = "bold #ff7b72"
DIM = "#7d8590"
STRONG = "bold #e6edf3"
TITLE = "bold #adbac7"

DASH = "-"

_GLYPHS = {
    "up": ("●", "*"),
    "connecting": ("◐", "~"),
    "unreachable": ("○", "o"),
    "attention": ("▲", "!"),
    "failed": ("✖", "x"),
    "running": ("▶", ">"),
    "done": ("✓", "+"),
    "stopped": ("■", "="),
    "incomplete": ("◌", "o"),
    "star": ("★", "*"),
    "arrow": ("→", "->"),
    "dot": ("·", "."),
    "rule": ("─", "-"),
}
_TWINS = str.maketrans("…→±·×⏎←─", "~>+.x<<-")
_BARS = (" ▁▂▃▄▅▆▇█", " .:-=+*#@")
_FULL, _REST = ("▇", "#"), ("░", ".")


class _Charset:
    ascii_only = False


def use_ascii(wanted: bool | None = None) -> bool:
    """Whether only ASCII is drawn; decided by the terminal's encoding, or by `wanted`."""
    if wanted is None:
        encoding = (getattr(sys.__stderr__, "encoding", None) or "ascii").lower()
        wanted = not encoding.startswith("utf")
    _Charset.ascii_only = wanted
    return wanted


def is_ascii() -> bool:
    """Whether only ASCII is drawn."""
    return _Charset.ascii_only


def drawable(text: Text) -> Text:
    """The text in the present character set: the few signs that are no glyphs have ASCII twins as well."""
    if not _Charset.ascii_only or text.plain.isascii():
        return text
    twin = text.copy()
    twin.plain = text.plain.translate(_TWINS)
    return twin


def glyph(name: str) -> str:
    """One glyph in the present character set."""
    return _GLYPHS[name][_Charset.ascii_only]


def plain(text: object, style: str = "") -> Text:
    """Text as it is: never read as markup."""
    return Text(str(text), style=style, no_wrap=True, overflow="ellipsis")


def dash() -> Text:
    """What is not known."""
    return plain(DASH, DIM)


def number_text(value: float | None, form: str = ".2f", style: str = "") -> Text:
    """A number, or a dim dash for what is not known."""
    if value is None or not math.isfinite(value):
        return dash()
    return plain(format(value, form), style)


def rate(value: float) -> Text:
    """A count a second with three digits, or a dim dash."""
    return plain(si(value)) if math.isfinite(value) else dash()


def size(value: float | None) -> str:
    """Bytes in SI units with three digits: 28.4 MB, 2.60 GB; a dash where unknown."""
    if value is None or not math.isfinite(value):
        return DASH
    for unit in ("B", "KB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.0f} B" if unit == "B" else f"{value:#.3g}".rstrip(".") + f" {unit}"
        value /= 1000
    return f"{value:#.3g}".rstrip(".") + " TB"


def duration(seconds: float | None) -> str:
    """A span in its two largest units: 12 s, 3 min 20 s, 36 h 12 min, 4 d 3 h; a dash where unknown."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    whole = max(0, round(seconds))
    for unit, length, part, divisor in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= length:
            return f"{whole // length} {unit} {whole % length // divisor} {part}"
    return f"{whole} s"


def age(seconds: float | None) -> str:
    """How old something is, in its largest unit: now, 40 s, 3 min, 5 h, 2 d; a dash where unknown."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    whole = max(0, round(seconds))
    if whole < 2:
        return "now"
    for unit, length in (("d", 2 * 86400), ("h", 2 * 3600), ("min", 120)):
        if whole >= length:
            return f"{whole // {'d': 86400, 'h': 3600, 'min': 60}[unit]} {unit}"
    return f"{whole} s"


def bar(share: float, width: int, style: str) -> Text:
    """A bar `width` columns wide, `share` of it filled."""
    filled = round(max(0.0, min(1.0, share if math.isfinite(share) else 0.0)) * width)
    which = _Charset.ascii_only
    return Text.assemble((_FULL[which] * filled, style), (_REST[which] * (width - filled), DIM))


def spark(values: Sequence[float], width: int, style: str, *, floor: float | None = None) -> Text:
    """The last part of a series as a line of bars, each column the mean of its share; gaps stay blank."""
    columns = _columns(values, width)
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return Text(" " * width)
    low = min(finite) if floor is None else floor
    span = max(finite) - low
    levels = _BARS[_Charset.ascii_only]
    marks = []
    for value in columns:
        if not math.isfinite(value):
            marks.append(" ")
        else:
            level = 1 if span <= 0 else 1 + round((value - low) / span * (len(levels) - 2))
            marks.append(levels[max(1, min(len(levels) - 1, level))])
    return Text("".join(marks).rjust(width), style=style)


def _columns(values: Sequence[float], width: int) -> list[float]:
    count = len(values)
    if count <= width:
        return list(values)
    columns = []
    for column in range(width):
        part = [v for v in values[column * count // width : (column + 1) * count // width] if math.isfinite(v)]
        columns.append(sum(part) / len(part) if part else math.nan)
    return columns


def host_mark(state: str) -> Text:
    """A host's state: glyph and colour."""
    style = {"up": GOOD, "connecting": WARN, "unreachable": TROUBLE}.get(state, DIM)
    return plain(glyph(state if state in _GLYPHS else "unreachable"), style)


def job_mark(state: str) -> Text:
    """A job's state: glyph and colour."""
    name, style = {
        "starting": ("connecting", WARN),
        "running": ("running", GOOD),
        "finished": ("done", GOOD),
        "stopped": ("stopped", DIM),
        "failed": ("failed", TROUBLE),
        "killed": ("failed", TROUBLE),
        "lost": ("failed", TROUBLE),
    }.get(state, ("attention", WARN))
    return plain(glyph(name), style)
