"""The event stream of a job: one JSON object a line in `events.jsonl`, written by one process at a time.

Keys of every record: `v` (1), `t` (Unix seconds of the host's clock), `type` (dotted). Unknown types and
keys are kept and ignored by readers, so an older console reads a newer engine. NaN and Inf travel as the
strings "NaN", "Infinity" and "-Infinity", because JSON has no such numbers. Importable without torch.
"""

from __future__ import annotations

import builtins
import json
import math
import os
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

__all__ = [
    "Alert",
    "EvalPrompt",
    "EvalResult",
    "EvalStep",
    "Event",
    "EventReader",
    "EventWriter",
    "JobFinished",
    "JobStarted",
    "Record",
    "TrainCheckpoint",
    "TrainPlan",
    "TrainStep",
    "number",
    "parse_line",
]

EVENTS_VERSION = 1


@dataclass(frozen=True)
class Record:
    """Base of the typed records; `TYPE` is the dotted name on the wire."""

    TYPE: ClassVar[str] = ""


@dataclass(frozen=True)
class JobStarted(Record):
    """First record of a job; a resumed run's records after `start_step` of earlier jobs no longer count."""

    TYPE = "job.started"
    job: str
    kind: str
    run: str | None = None
    start_step: int = 0
    engine_hash: str = ""


@dataclass(frozen=True)
class TrainPlan(Record):
    """What the trainer will do, resolved: totals, split of ranks, ring, shapes."""

    TYPE = "train.plan"
    steps: int
    tokens_per_step: int
    target_ranks: int
    drafter_ranks: int
    ring_slots: int
    micro_batches_per_step: int
    checkpoint_every: int
    parameters: int
    block_size: int
    target_layer_ids: list[int]
    detail: str = ""


@dataclass(frozen=True)
class TrainStep(Record):
    """One optimizer step. Times are seconds spent in this step; `tokens_per_s` counts real (unpadded) tokens."""

    TYPE = "train.step"
    step: int
    epoch: float
    loss: float
    accuracy: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    step_s: float
    wait_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    ring_depth: int
    ring_slots: int
    capture_s: float
    target_wait_s: float
    dropped: int = 0


@dataclass(frozen=True)
class TrainCheckpoint(Record):
    """A checkpoint that has its final name."""

    TYPE = "train.checkpoint"
    step: int
    name: str
    size_bytes: int
    save_s: float


@dataclass(frozen=True)
class EvalStep(Record):
    """Progress of one of the five steps. `state`: started, progress, done or cached."""

    TYPE = "eval.step"
    n: int
    name: str
    state: str
    of: int = 5
    done: int = 0
    total: int = 0
    unit: str = ""
    eta_s: float | None = None
    detail: str = ""
    tau: float | None = None
    """Acceptance length over the verification steps so far; step 5 only."""


@dataclass(frozen=True)
class EvalPrompt(Record):
    """One prompt's outcome: `accepted` lists the tokens each verification step yielded (bonus included)."""

    TYPE = "eval.prompt"
    prompt: str
    tau: float
    steps: int
    tokens: int
    accepted: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class EvalResult(Record):
    """The evaluation's numbers; `result.json` in the job folder holds the whole result."""

    TYPE = "eval.result"
    evaluation: str
    checkpoint: str
    tau: float
    tau_per_prompt: float
    steps: int
    prompts: int
    acceptance_by_position: list[float]
    seconds: float


@dataclass(frozen=True)
class Alert(Record):
    """Something a person should look at. `level`: warning or error."""

    TYPE = "alert"
    level: str
    message: str


@dataclass(frozen=True)
class JobFinished(Record):
    """Last record, written by the supervisor once the process tree is gone; the same verdict as `exit.json`."""

    TYPE = "job.finished"
    reason: str
    code: int | None = None
    signal: int | None = None
    message: str = ""


@dataclass(frozen=True)
class Event:
    """A line as read: the time, the dotted type and all other keys, known or not."""

    t: float
    type: str
    data: dict[str, Any]

    def as_record(self, kind: builtins.type[Any]) -> Any:
        """This event as the record class `kind`; unknown keys are left out.

        Raises ValueError where the type is another one or a required key is missing.
        """
        if self.type != kind.TYPE:
            raise ValueError(f"event {self.type!r} is not {kind.TYPE!r}")
        known = {f.name for f in fields(kind)}
        try:
            return kind(**{key: value for key, value in self.data.items() if key in known})
        except TypeError as error:
            raise ValueError(f"event {self.type!r}: {error}") from error


def number(value: Any) -> float:
    """A number as it travels: "NaN", "Infinity" and "-Infinity" become floats; anything else unreadable is NaN."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def parse_line(line: str | bytes) -> Event:
    """One whole line (without its newline). Raises ValueError where it is not an event."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError("not an object")
    kind = document.pop("type", None)
    if not isinstance(kind, str) or not kind:
        raise ValueError("no 'type'")
    t = document.pop("t", None)
    if not isinstance(t, (int, float)) or isinstance(t, bool) or not math.isfinite(t):
        raise ValueError("no time 't'")
    document.pop("v", None)
    return Event(float(t), kind, document)


class EventReader:
    """Cuts a growing byte stream into events.

    A torn last line is kept until its newline comes; a whole line that cannot be read is counted in
    `unreadable`. A line longer than `max_line_bytes` is dropped and counted once.
    """

    def __init__(self, max_line_bytes: int = 1 << 20) -> None:
        self.unreadable = 0
        self._pending = b""
        self._skipping = False
        self._max_line_bytes = max_line_bytes

    def feed(self, data: bytes) -> list[Event]:
        """The events whose lines these bytes complete, in order."""
        *lines, rest = (self._pending + data).split(b"\n")
        events = []
        for line in lines:
            if self._skipping:
                self._skipping = False
                continue
            if not line.strip():
                continue
            if len(line) > self._max_line_bytes:
                self.unreadable += 1
                continue
            try:
                events.append(parse_line(line))
            except ValueError:
                self.unreadable += 1
        if self._skipping:
            rest = b""
        elif len(rest) > self._max_line_bytes:
            self.unreadable += 1
            self._skipping = True
            rest = b""
        self._pending = rest
        return events


class EventWriter:
    """Appends records to a job's stream, each with one `write` on an O_APPEND descriptor.

    One writer at a time, by contract: the drafter's rank 0 or the evaluator while it lives, the supervisor
    once the tree is gone. Opening ends an unfinished last line with a newline, so that a crash costs at
    most the line that it tore.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def write(self, record: Record) -> None:
        """Append one record, stamped with this host's clock."""
        document: dict[str, Any] = {"v": EVENTS_VERSION, "t": round(time.time(), 6), "type": record.TYPE}
        for f in fields(record):
            document[f.name] = _finite(getattr(record, f.name))
        os.write(self._fd, json.dumps(document, separators=(",", ":"), allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Release the descriptor; further writes fail."""
        os.close(self._fd)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value
