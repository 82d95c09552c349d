"""Plain lines: what a host wrote is shown, never obeyed, and never the end of the console."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_console.lines import LinePrinter, acceptance, si
from dflash_engine.events import Event

TYPES = [
    "job.started",
    "train.plan",
    "train.step",
    "train.checkpoint",
    "eval.step",
    "eval.result",
    "alert",
    "job.finished",
]
KEYS = [
    "steps",
    "step",
    "loss",
    "tau",
    "ring_depth",
    "name",
    "message",
    "done",
    "eta_s",
    "acceptance_by_position",
    "step_s",
]
VALUES = st.one_of(
    st.none(), st.text(max_size=8), st.floats(), st.integers(), st.lists(st.text(max_size=3), max_size=2)
)


@given(kind=st.sampled_from(TYPES), data=st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_any_event_is_at_most_one_printable_line(kind: str, data: dict[str, Any]) -> None:
    lines: list[str] = []
    LinePrinter(lines.append).event("ct200", Event(0.0, kind, data))
    assert len(lines) <= 1
    # Other spaces than the common one are no controls, though Python calls them not printable.
    assert all(c.isprintable() or unicodedata.category(c) == "Zs" for line in lines for c in line)


def test_terminal_escapes_of_a_host_are_shown_not_obeyed() -> None:
    lines: list[str] = []
    LinePrinter(lines.append).event("ct200", Event(0.0, "train.step", {"step": 1, "ring_depth": "\x1b[2J\x1b]0;x\x07"}))
    assert "\x1b" not in lines[0]
    assert "\x07" not in lines[0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (987, "987"),
        (4123, "4.12K"),
        (19_500, "19.5K"),
        (397_000, "397K"),
        (1.2e6, "1.20M"),
        (float("nan"), "-"),
    ],
)
def test_counts_have_three_digits_and_a_prefix(value: float, text: str) -> None:
    assert si(value) == text


def test_acceptance_by_position_is_numbered_from_the_first_drafted_slot() -> None:
    assert acceptance([0.43, 0.147, 1.0]) == "1 .43  2 .15  3 1.00"
