"""A run's numbers: nothing invented, nothing twice, small for any length."""

from __future__ import annotations

import math
import statistics

import pytest

from dflash_console.core.curves import Curve


def curve(steps: int, **data: float) -> Curve:
    found = Curve()
    for n in range(1, steps + 1):
        found.take(float(n), {"step": n, "loss": 1.0 / n, "tokens": 100, "step_s": 0.5} | data)
    return found


def test_an_empty_curve_knows_nothing() -> None:
    found = Curve()
    assert found.step is None
    assert math.isnan(found.recent_loss())
    assert math.isnan(found.recent_tokens_per_s())
    assert math.isnan(found.median_tokens_per_s())
    assert found.shares() == {}


def test_the_rate_counts_the_waits() -> None:
    assert curve(30).recent_tokens_per_s() == pytest.approx(200.0)


def test_a_step_told_twice_stands_once_and_its_tokens_too() -> None:
    found = curve(5)
    found.take(9.0, {"step": 4, "loss": 7.0, "tokens": 50, "step_s": 1.0})
    assert list(found.columns["step"]) == [1, 2, 3, 4]
    assert found.columns["loss"][-1] == 7.0
    assert found.tokens == 350


def test_infinity_and_nan_travel_as_words_and_leave_gaps() -> None:
    found = curve(3)
    found.take(4.0, {"step": 4, "loss": "NaN", "tokens": 100, "step_s": 0.5})
    found.take(5.0, {"step": 5, "loss": "Infinity", "tokens": 100, "step_s": 0.5})
    assert math.isnan(found.columns["loss"][3])
    assert found.recent_loss() == pytest.approx(statistics.mean([1, 1 / 2, 1 / 3]))
    assert [math.isnan(value) for value in found.smoothed("loss", 10)] == [False, False, False, True, True]


def test_running_means_are_means_of_the_last_steps() -> None:
    found = curve(50)
    losses = list(found.columns["loss"])
    expected = [statistics.mean(losses[max(0, i - 9) : i + 1]) for i in range(50)]
    assert found.smoothed("loss", 10) == pytest.approx(expected)


def test_a_very_long_run_keeps_its_shape_in_bounded_memory() -> None:
    found = curve(250_000)
    assert len(found) <= 100_001
    steps = list(found.columns["step"])
    assert steps[0] == 1
    assert steps[-1] == 250_000
    assert steps == sorted(steps)
    assert found.tokens == 25_000_000


def test_a_part_ends_with_its_step() -> None:
    part = curve(10).until(4)
    assert list(part.columns["step"]) == [1, 2, 3, 4]
    assert part.tokens == 400


def test_shares_are_of_the_latest_step() -> None:
    found = curve(3, wait_s=0.25, forward_s=0.1)
    assert found.shares() == pytest.approx({"wait": 0.5, "forward": 0.2})
