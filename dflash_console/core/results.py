"""Stored results of evaluations, reduced to what is shown, and what may be concluded from two of them."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import msgspec

from dflash_console.core.observations import PromptSeen, ResultSeen
from dflash_console.core.quoting import printable

__all__ = ["Interval", "difference", "interval", "read_result"]

_Z = 1.96
_PIECE_CHARACTERS = 200


class _Prompt(msgspec.Struct, frozen=True):
    id: str
    tau: float | None
    accepted: list[int]
    matched: list[int] = []
    pieces: list[str] = []


class _Checkpoint(msgspec.Struct, frozen=True):
    run: str
    step: int | None
    block_size: int


class _Target(msgspec.Struct, frozen=True):
    fingerprint: str
    tokenizer_fingerprint: str = ""


class _Features(msgspec.Struct, frozen=True):
    mean: float
    std: float


class _Reference(msgspec.Struct, frozen=True):
    kind: str


class _Result(msgspec.Struct, frozen=True):
    tau: float
    tau_per_prompt: float
    steps: int
    tokens: int
    definition: str
    histogram: list[int]
    acceptance_by_position: list[float]
    checkpoint: _Checkpoint
    target: _Target
    prompts: list[_Prompt]
    prompts_sha256: str
    settings: dict[str, Any]
    reference: _Reference
    features: _Features | None = None
    seconds: dict[str, float] = {}


class Interval(msgspec.Struct, frozen=True):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


def read_result(host: str, job: str, content: bytes) -> ResultSeen | None:
    """What a `result.json` says; None where it is no result. Takes a while for a large one: call it in a thread."""
    try:
        found = msgspec.json.decode(content, type=_Result)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    conditions = {
        "definition": found.definition,
        "target": found.target.fingerprint,
        "tokenizer": found.target.tokenizer_fingerprint,
        "prompts": found.prompts_sha256,
        "block_size": found.checkpoint.block_size,
        "settings": found.settings,
    }
    digest = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()
    settings = found.settings
    words = [
        f"{len(found.prompts)} prompts",
        "greedy",
        f"block {found.checkpoint.block_size}",
        f"at most {settings.get('max_new_tokens', '-')} new tokens",
        f"reference {found.reference.kind}",
        str(settings.get("dtype", "")),
    ]
    run = printable(found.checkpoint.run, 100)
    return ResultSeen(
        host=host,
        job=job,
        checkpoint=f"{run}:step_{found.checkpoint.step}" if found.checkpoint.step is not None else run,
        tau=found.tau,
        tau_per_prompt=found.tau_per_prompt,
        steps=found.steps,
        tokens=found.tokens,
        block_size=found.checkpoint.block_size,
        histogram=found.histogram,
        acceptance_by_position=found.acceptance_by_position,
        prompts=[_prompt(row) for row in found.prompts],
        comparable=digest[:16],
        conditions=printable("   ".join(word for word in words if word), 200),
        feature_mean=found.features.mean if found.features else None,
        feature_std=found.features.std if found.features else None,
        step_seconds=found.seconds,
    )


def interval(result: ResultSeen) -> Interval | None:
    """Pooled tau with its 95 % interval, prompts being the sample; None for fewer than two prompts.

    Tokens over steps is a ratio estimator: its variance by linearisation is n / (n - 1) * sum (y - tau s)^2 /
    (sum s)^2 (Cochran, Sampling Techniques, 1977, eq. 6.13, without the finite-population factor).
    """
    return _interval(result.tau, _residuals(result))


def difference(result: ResultSeen, earlier: ResultSeen) -> Interval | None:
    """How much larger tau is than an earlier result's, with a 95 % interval, paired by prompt.

    None unless both come from the same prompts and settings.
    """
    if not result.comparable or result.comparable != earlier.comparable:
        return None
    ours, theirs = _residuals(result), _residuals(earlier)
    if len(ours) != len(theirs):
        return None
    return _interval(result.tau - earlier.tau, [a - b for a, b in zip(ours, theirs, strict=True)])


def _residuals(result: ResultSeen) -> list[float]:
    steps = sum(len(prompt.accepted) for prompt in result.prompts)
    return [
        (sum(prompt.accepted) - result.tau * len(prompt.accepted)) / steps if steps else 0.0
        for prompt in result.prompts
    ]


def _interval(value: float, residuals: list[float]) -> Interval | None:
    n = len(residuals)
    if n < 2:
        return None
    spread = _Z * math.sqrt(n / (n - 1) * sum(residual * residual for residual in residuals))
    return Interval(value, value - spread, value + spread)


def _prompt(row: _Prompt) -> PromptSeen:
    return PromptSeen(
        id=printable(row.id, 100),
        tau=row.tau,
        accepted=row.accepted,
        matched=row.matched,
        pieces=[_piece(piece) for piece in row.pieces],
    )


def _piece(piece: str) -> str:
    """A token's text, line breaks kept, all else that a terminal would act on made visible."""
    return "\n".join(printable(line, _PIECE_CHARACTERS) for line in piece.split("\n"))
