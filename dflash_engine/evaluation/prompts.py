"""Prompt files: JSON Lines of `{"id", "messages"}`, rendered to token ids by the target's own template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_engine.errors import DataError
from dflash_engine.target.tokens import TargetTokens

__all__ = ["Prompt", "PromptSet", "load_prompts"]


@dataclass(frozen=True)
class Prompt:
    """One prompt as the target sees it, generation prompt included."""

    id: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class PromptSet:
    """The prompts of some files in order; `sha256` is over the files' bytes one after the other."""

    prompts: tuple[Prompt, ...]
    sha256: str


def load_prompts(paths: Sequence[Path], tokens: TargetTokens, *, limit: int) -> PromptSet:
    """Read and render prompt files; 0 as limit means all. Raises DataError naming file and line of a bad row."""
    digest = hashlib.sha256()
    prompts: list[Prompt] = []
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"prompts {path} cannot be read: {error.strerror}; expected a JSON Lines file") from error
        digest.update(content)
        for number, line in enumerate(content.split(b"\n"), start=1):
            if line.strip() and not (limit and len(prompts) >= limit):
                prompts.append(_prompt(line, f"{path}, line {number}", f"{path.stem}/{number}", tokens))
    if not prompts:
        raise DataError(f"no prompt in {', '.join(str(path) for path in paths)}; expected one JSON object a line")
    return PromptSet(tuple(prompts), digest.hexdigest())


def _prompt(line: bytes, where: str, fallback_id: str, tokens: TargetTokens) -> Prompt:
    try:
        row: Any = json.loads(line)
        messages = row["messages"]
        sound = bool(messages) and all(isinstance(m["content"], str) and isinstance(m["role"], str) for m in messages)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"prompts {where}: expected an object with messages of role and content ({error!r})") from error
    if not sound:
        raise DataError(f"prompts {where}: expected an object with messages of role and content")
    try:
        rendered = tokens.render(messages, True)
    except Exception as error:  # a template may raise anything for roles it does not know
        raise DataError(f"prompts {where}: the target's chat template refuses it: {error}") from error
    return Prompt(str(row.get("id", fallback_id)), tuple(rendered))
