"""Results and what may be concluded from them."""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

import pytest

from dflash_console.core.observations import ResultSeen
from dflash_console.core.results import difference, interval, read_result


def document(rows: list[list[int]], **changes: Any) -> dict[str, Any]:
    tokens, steps = sum(map(sum, rows)), sum(map(len, rows))
    return {
        "v": 1,
        "id": "0" * 64,
        "definition": "tokens per verification step",
        "tau": tokens / steps,
        "tau_per_prompt": statistics.mean(sum(row) / len(row) for row in rows),
        "steps": steps,
        "tokens": tokens,
        "histogram": [0, 1, 2, 3, 4],
        "acceptance_by_position": [0.5, 0.25, 0.1],
        "checkpoint": {"run": "demo", "step": 800, "block_size": 4, "path": "/x"},
        "target": {"fingerprint": "aa", "tokenizer_fingerprint": "bb"},
        "settings": {"max_new_tokens": 64, "dtype": "float32"},
        "prompts_sha256": "cc",
        "reference": {"kind": "local"},
        "features": {"mean": 0.0, "std": 1.0},
        "prompts": [
            {
                "id": f"p{i}",
                "tau": sum(row) / len(row),
                "accepted": row,
                "matched": [y - 1 for y in row],
                "pieces": ["x"],
            }
            for i, row in enumerate(rows)
        ],
        "seconds": {"target": 1.0},
    } | changes


def result(rows: list[list[int]], **changes: Any) -> ResultSeen:
    found = read_result("ct129", "eval-1", json.dumps(document(rows, **changes)).encode())
    assert found is not None
    return found


def random_rows(seed: int, prompts: int = 60) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randint(1, 4) for _ in range(draw.randint(5, 40))] for _ in range(prompts)]


def resampled(rows: list[list[int]], others: list[list[int]] | None = None) -> float:
    """Standard error of pooled tau, or of a paired difference, by resampling prompts."""
    draw = random.Random(1)
    found = []
    for _ in range(4000):
        picks = draw.choices(range(len(rows)), k=len(rows))
        value = sum(sum(rows[i]) for i in picks) / sum(len(rows[i]) for i in picks)
        if others is not None:
            value -= sum(sum(others[i]) for i in picks) / sum(len(others[i]) for i in picks)
        found.append(value)
    return statistics.stdev(found)


def test_the_interval_is_as_wide_as_resampling_prompts_makes_it() -> None:
    rows = random_rows(3)
    found = interval(result(rows))
    assert found is not None
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * resampled(rows), rel=0.05)
    assert (found.high + found.low) / 2 == pytest.approx(found.value)


def test_the_difference_is_paired_by_prompt() -> None:
    rows = random_rows(4)
    draw = random.Random(5)
    better = [[min(4, y + (draw.random() < 0.3)) for y in row] for row in rows]
    found = difference(result(better), result(rows))
    assert found is not None
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * resampled(better, rows), rel=0.05)
    assert found.low > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts_sha256": "other"},
        {"definition": "other"},
        {"target": {"fingerprint": "other"}},
        {"settings": {"max_new_tokens": 65}},
        {"checkpoint": {"run": "demo", "step": 800, "block_size": 8}},
    ],
)
def test_results_of_other_conditions_are_not_compared(changes: dict[str, Any]) -> None:
    rows = random_rows(6)
    assert difference(result(rows, **changes), result(rows)) is None


def test_one_prompt_has_no_interval() -> None:
    assert interval(result([[1, 2, 3]])) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"tau": "high"}', b"\xff\xfe", b"{" * 100_000])
def test_what_is_no_result_is_none(content: bytes) -> None:
    assert read_result("ct129", "eval-1", content) is None


def test_texts_from_a_host_are_data() -> None:
    rows = document([[1, 2], [2, 2]])
    rows["prompts"][0] |= {"id": "p\x1b[2J", "pieces": ["a\x1b]0;x\x07", "b\nc"]}
    found = read_result("ct129", "eval-1", json.dumps(rows).encode())
    assert found is not None
    assert "\x1b" not in found.prompts[0].id
    assert "\x1b" not in found.prompts[0].pieces[0]
    assert found.prompts[0].pieces[1] == "b\nc"
