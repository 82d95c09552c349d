"""A run's measurements over its steps, and what follows from them: rates, medians, shares of a step.

Columns of plain numbers: a run of a million steps must stay small, and a resumed run never has a step twice.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from dflash_engine.events import number

__all__ = ["PHASES", "Curve", "median"]

_COLUMNS = ("step", "t", "loss", "accuracy", "tokens", "step_s")
PHASES = ("wait", "capture", "forward", "backward", "optimizer")
"""Parts of a step that `train.step` has seconds for; `capture` runs on the target's side at the same time."""
_MOST_POINTS = 100_000
_RECENT_STEPS = 20


class Curve:
    """The steps of one job, in order; `last` holds the latest `train.step` as it came."""

    def __init__(self) -> None:
        self.columns = {name: array("d") for name in _COLUMNS}
        self.last: Mapping[str, Any] = {}
        self.tokens = 0.0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self.columns["step"])

    def take(self, t: float, data: Mapping[str, Any]) -> None:
        """Add a step; one that is not after the last replaces what it contradicts."""
        step = number(data.get("step"))
        if not math.isfinite(step):
            return
        while len(self) and self.columns["step"][-1] >= step:
            self._drop_last()
        for name in _COLUMNS:
            self.columns[name].append(t if name == "t" else number(data.get(name)))
        tokens = self.columns["tokens"][-1]
        self.tokens += tokens if math.isfinite(tokens) else 0.0
        self.last = data
        if len(self) > _MOST_POINTS:
            # The older half keeps every second point: a chart has a few hundred columns.
            half = len(self) // 2
            for name in _COLUMNS:
                column = self.columns[name]
                self.columns[name] = column[:half:2] + column[half:]

    def until(self, step: float) -> Curve:
        """The part up to and including `step`."""
        part = Curve()
        end = bisect_right(self.columns["step"], step)
        part.columns = {name: column[:end] for name, column in self.columns.items()}
        part.tokens = sum(value for value in part.columns["tokens"] if math.isfinite(value))
        part.last = self.last if end == len(self) else {}
        return part

    def extend(self, other: Curve) -> None:
        """Add a later part."""
        for name in _COLUMNS:
            self.columns[name].extend(other.columns[name])
        self.tokens += other.tokens
        self.last = other.last or self.last

    @property
    def step(self) -> int | None:
        """The latest step; None before the first."""
        return int(self.columns["step"][-1]) if len(self) else None

    @property
    def seconds(self) -> float:
        """Seconds spent in steps."""
        return sum(value for value in self.columns["step_s"] if math.isfinite(value))

    def recent_loss(self) -> float:
        """Mean of the finite losses of the last steps, because one step's is noisy; NaN where there is none."""
        recent = [value for value in self.columns["loss"][-10:] if math.isfinite(value)]
        return sum(recent) / len(recent) if recent else math.nan

    def recent_tokens_per_s(self) -> float:
        """Tokens a second over the last steps, waits included; NaN where unknown."""
        return _rate(self.columns["tokens"][-_RECENT_STEPS:], self.columns["step_s"][-_RECENT_STEPS:])

    def median_tokens_per_s(self) -> float:
        """Median over windows as long as the recent one; NaN before there are five of them."""
        if len(self) < 5 * _RECENT_STEPS:
            return math.nan
        stride = max(_RECENT_STEPS, len(self) // 200)
        tokens, seconds = self.columns["tokens"], self.columns["step_s"]
        rates = [
            _rate(tokens[at : at + _RECENT_STEPS], seconds[at : at + _RECENT_STEPS])
            for at in range(0, len(self) - _RECENT_STEPS + 1, stride)
        ]
        return median([rate for rate in rates if math.isfinite(rate)])

    def smoothed(self, name: str, window: int) -> list[float]:
        """A column as running means of `window` steps, the finite ones among them; NaN where there is none."""
        return _running_means(self.columns[name], window)

    def smoothed_rates(self, window: int) -> list[float]:
        """Tokens a second over `window` steps at each step; NaN where unknown."""
        tokens = _running_means(self.columns["tokens"], window)
        seconds = _running_means(self.columns["step_s"], window)
        return [t / s if s > 0 else math.nan for t, s in zip(tokens, seconds, strict=True)]

    def shares(self) -> dict[str, float]:
        """Share of the latest step that each of PHASES took; empty where the step's length is unknown."""
        whole = number(self.last.get("step_s"))
        if not whole > 0:
            return {}
        found = {name: number(self.last.get(f"{name}_s")) / whole for name in PHASES}
        return {name: share for name, share in found.items() if math.isfinite(share)}

    def recent_step_s(self) -> float:
        """Median seconds of the last steps; NaN where unknown."""
        return median([value for value in self.columns["step_s"][-_RECENT_STEPS:] if math.isfinite(value)])

    def _drop_last(self) -> None:
        for column in self.columns.values():
            value = column.pop()
            if column is self.columns["tokens"] and math.isfinite(value):
                self.tokens -= value


def _running_means(values: array[float], window: int) -> list[float]:
    means = []
    total, count = 0.0, 0
    for i, value in enumerate(values):
        if math.isfinite(value):
            total, count = total + value, count + 1
        if i >= window and math.isfinite(gone := values[i - window]):
            total, count = total - gone, count - 1
        means.append(total / count if count and math.isfinite(value) else math.nan)
    return means


def _rate(tokens: array[float], seconds: array[float]) -> float:
    spent = sum(seconds)
    return sum(tokens) / spent if spent > 0 else math.nan


def median(values: list[float]) -> float:
    """The middle value, of two the upper; NaN of none."""
    return sorted(values)[len(values) // 2] if values else math.nan
