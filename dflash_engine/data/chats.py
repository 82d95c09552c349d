"""Chats as JSON Lines, rendered with the target's own template into token ids with supervision.

A row is `{"id": ..., "messages": [{"role", "content"}, ...]}`, optionally `"truncated": true` where the last
answer was cut by a limit. Supervised is what the target itself would generate: each assistant turn from the
first token after its generation prompt to its stop token. The spans come from rendering the conversation up
to each boundary, never from searching the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_engine.errors import DataError

__all__ = ["ChatRenderer", "ChatSet", "Document", "load_chats"]

ChatRenderer = Callable[[list[dict[str, Any]], bool], list[int]]
"""(messages, add_generation_prompt) -> token ids, by the target's tokenizer and chat template."""


@dataclass(frozen=True)
class Document:
    """One chat: token ids and, for each, whether the target would have generated it."""

    id: str
    tokens: tuple[int, ...]
    supervised: tuple[bool, ...]


@dataclass(frozen=True)
class ChatSet:
    """The usable documents of some files, and what was left out and why."""

    documents: tuple[Document, ...]
    sha256: str
    """Over the files' bytes, one after the other."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason -> rows."""

    def label_ids(self) -> list[int]:
        """The distinct ids that occur as labels, ascending."""
        found = {
            token
            for document in self.documents
            for token, supervised in zip(document.tokens, document.supervised, strict=True)
            if supervised
        }
        return sorted(found)


def load_chats(paths: Sequence[Path], render: ChatRenderer, stop_ids: Sequence[int], *, max_length: int) -> ChatSet:
    """Read and render all files; rows that cannot be used are skipped and counted by reason.

    A row is cut to `max_length` tokens. Raises DataError where a file cannot be read, a line is not JSON, or
    no row is left.
    """
    documents: list[Document] = []
    skipped: dict[str, int] = {}
    digest = hashlib.sha256()
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"chats {path} cannot be read: {error.strerror}; expected a JSON Lines file") from error
        digest.update(content)
        for number, line in enumerate(content.split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"chats {path}, line {number}: not JSON ({error}); expected one chat a line") from error
            document = _render_row(row, f"{path.name}:{number}", render, frozenset(stop_ids), max_length)
            if isinstance(document, str):
                skipped[document] = skipped.get(document, 0) + 1
            else:
                documents.append(document)
    if not documents:
        reasons = ", ".join(f"{count} rows: {reason}" for reason, count in sorted(skipped.items())) or "no rows"
        raise DataError(f"no usable chat in {', '.join(str(path) for path in paths)} ({reasons})")
    return ChatSet(tuple(documents), digest.hexdigest(), skipped)


def _render_row(
    row: Any, fallback_id: str, render: ChatRenderer, stop_ids: frozenset[int], max_length: int
) -> Document | str:
    """The document, or the reason why the row cannot be used."""
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        return "no messages"
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return "a message without text"
        if message.get("role") not in ("system", "user", "assistant"):
            return "an unknown role"
    if messages[-1]["role"] != "assistant":
        return "the last turn is not an answer"
    tokens = render(messages, False)
    supervised = [False] * len(tokens)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:turn], True)
        through = render(messages[: turn + 1], False)
        if tokens[: len(prompt)] != prompt or tokens[: len(through)] != through:
            return "the template rewrites earlier turns"
        end = next((i + 1 for i in range(len(prompt), len(through)) if tokens[i] in stop_ids), len(through))
        cut_short = turn == len(messages) - 1 and row.get("truncated") is True
        if cut_short and tokens[end - 1] in stop_ids:
            # The target had not stopped there: the template's stop token is not its own.
            end -= 1
        supervised[len(prompt) : end] = [True] * (end - len(prompt))
    # What follows the last supervised token is the template's, and no label needs it.
    length = min(max_length, max((i + 1 for i, s in enumerate(supervised) if s), default=0))
    if sum(supervised[:length]) < 2:
        return f"fewer than two supervised tokens within {max_length}"
    return Document(str(row.get("id", fallback_id)), tuple(tokens[:length]), tuple(supervised[:length]))
