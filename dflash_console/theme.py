"""The dashboard's colours of background and text; what has a meaning is in `widgets/looks.py`."""

from __future__ import annotations

from textual.theme import Theme

__all__ = ["THEME"]

THEME = Theme(
    name="dflash",
    primary="#adbac7",
    secondary="#7d8590",
    background="#0d1117",
    surface="#0d1117",
    panel="#161b22",
    foreground="#c9d1d9",
    success="#7ccf7c",
    warning="#e8c15a",
    error="#ff7b72",
    dark=True,
)
