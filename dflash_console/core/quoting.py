"""Text that crosses the border to a host: the one quoting of what goes there, the one cleaning of what comes.

Every remote command line is built by `quote_argv` and run by a POSIX shell there; every text from a host
passes `printable` before a person sees it.
"""

from __future__ import annotations

import shlex
import unicodedata
from collections.abc import Sequence

__all__ = ["printable", "quote_argv"]

_VISIBLE_SPACES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# Cc and Cf hold terminal escapes and bidi overrides; Zl and Zp break lines; Cs is what undecodable bytes
# become; Co and Cn have no agreed look.
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def quote_argv(argv: Sequence[str]) -> str:
    """One command line that a POSIX shell splits into exactly `argv`.

    Raises ValueError for an empty command and for NUL, which no argument can hold.
    """
    if not argv:
        raise ValueError("a command line needs at least the command")
    for argument in argv:
        if "\x00" in argument:
            raise ValueError(f"the argument {argument!r} holds a NUL byte, which no command line can carry")
    return shlex.join(argv)


def printable(text: str, limit: int = 2000) -> str:
    r"""`text` on one line, safe for a terminal: controls, escapes and bidi marks as `\x1b` or `\u202e`.

    At most `limit` characters; a cut says how many were left out. Printable text passes unchanged, so
    applying it twice changes nothing.
    """
    kept = text[:limit]
    visible = "".join(_visible(character) for character in kept)
    cut = len(visible) > limit or len(text) > limit
    if not cut:
        return visible
    mark = f"… ({len(text)} characters)"
    return visible[: max(0, limit - len(mark))] + mark


def _visible(character: str) -> str:
    if " " <= character <= "~":
        return character
    if character in _VISIBLE_SPACES:
        return _VISIBLE_SPACES[character]
    if unicodedata.category(character) not in _UNPRINTABLE:
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
