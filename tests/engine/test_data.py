"""Chats into supervised documents, and which documents a micro-batch holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_engine.data.batches import BatchOrder, derived_seed
from dflash_engine.data.chats import load_chats
from dflash_engine.errors import DataError

STOP = 1


def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> list[int]:
    """A template in the manner of ChatML, one token a character: <role> content STOP newline."""
    out: list[int] = []
    for message in messages:
        out += [ord(message["role"][0]), *map(ord, message["content"]), STOP, ord("\n")]
    return [*out, ord("a")] if add_generation_prompt else out


def rewriting(messages: list[dict[str, Any]], add_generation_prompt: bool) -> list[int]:
    """A template that drops the first turn once there is a second one."""
    return render(messages[1:] if len(messages) > 2 else messages, add_generation_prompt)


def chat(*turns: str, **more: Any) -> dict[str, Any]:
    roles = ["user", "assistant"]
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)], **more}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def supervised_text(path: Path, max_length: int = 100) -> str:
    (document,) = load_chats([path], render, [STOP], max_length=max_length).documents
    return "".join(chr(t) for t, s in zip(document.tokens, document.supervised, strict=True) if s)


def test_t13_every_answer_is_supervised_to_its_stop_token_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", chat("why", "so", "and", "thus"))
    assert supervised_text(path) == f"so{chr(STOP)}thus{chr(STOP)}"


def test_a_cut_answer_has_no_supervised_stop_token(tmp_path: Path) -> None:
    assert supervised_text(write(tmp_path / "chats.jsonl", chat("why", "so", truncated=True))) == "so"


def test_a_row_is_cut_inside_its_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", chat("why", "because"))
    assert supervised_text(path, max_length=10) == "bec"


def test_a_document_ends_with_its_last_supervised_token(tmp_path: Path) -> None:
    (document,) = load_chats([write(tmp_path / "c.jsonl", chat("q", "ab"))], render, [STOP], max_length=99).documents
    assert document.tokens[-1] == STOP
    assert document.supervised[-1]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "no messages"),
        ("text", "no messages"),
        (chat("why"), "the last turn is not an answer"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "an unknown role"),
        ({"messages": [{"role": "user", "content": None}]}, "a message without text"),
    ],
)
def test_a_bad_row_is_skipped_and_counted_by_reason(tmp_path: Path, row: Any, reason: str) -> None:
    chats = load_chats([write(tmp_path / "c.jsonl", row, chat("q", "abc"))], render, [STOP], max_length=99)
    assert len(chats.documents) == 1
    assert chats.skipped == {reason: 1}


def test_a_template_that_rewrites_earlier_turns_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", chat("q", "a1", "r", "a2"), chat("q", "abc"))
    chats = load_chats([path], rewriting, [STOP], max_length=99)
    assert chats.skipped == {"the template rewrites earlier turns": 1}


def test_no_usable_row_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no usable chat .*1 rows: the last turn is not an answer"):
        load_chats([write(tmp_path / "c.jsonl", chat("q"))], render, [STOP], max_length=99)


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"messages": []}\n{"mess')
    with pytest.raises(DataError, match="line 2: not JSON"):
        load_chats([tmp_path / "c.jsonl"], render, [STOP], max_length=99)


@given(documents=st.integers(1, 40), rows=st.integers(1, 7), seed=st.integers(0, 2**40))
def test_every_epoch_has_every_document_once(documents: int, rows: int, seed: int) -> None:
    order = BatchOrder(documents, rows, seed)
    for epoch in range(3):
        seen = [order.document_at(epoch * documents + i) for i in range(documents)]
        assert sorted(seen) == list(range(documents))


def test_micro_batches_cover_the_stream_without_gaps_and_repeat_in_a_new_process() -> None:
    order = BatchOrder(7, 2, 5)
    positions = [p for i in range(10) for p in order.positions(i)]
    assert positions == list(range(20))
    assert [order.document_at(p) for p in positions] == [BatchOrder(7, 2, 5).document_at(p) for p in positions]


def test_derived_seeds_differ_by_purpose() -> None:
    assert len({derived_seed(0, "anchors", i) for i in range(100)} | {derived_seed(0, "order", 0)}) == 101
