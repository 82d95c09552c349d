"""Operations that a key press starts, each in a process of its own: the dashboard may quit, they go on.

An operation is a folder `<data>/operations/<id>/` with `request.json`, `events.jsonl` (the stream format of
jobs), `output.log` and `process.json` (who works on it). The process is `core.operation_worker`; it calls the
functions that the command line calls. Whoever looks, this dashboard or the next, reads the same files.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dflash_console.core.demo_hosts import profile_path
from dflash_console.core.observations import Observation, Said, TransferSeen
from dflash_console.core.quoting import printable
from dflash_engine.durable import write_text
from dflash_engine.events import Event, EventReader, Record, number
from dflash_engine.processes import ProcessIdentity, is_alive

__all__ = [
    "DemoRequest",
    "EvaluateRequest",
    "OperationFinished",
    "OperationRequest",
    "Operations",
    "ProfileReady",
    "StageRequest",
    "Summary",
    "Told",
    "TransferProgress",
]

_KEEP_S = 7 * 86400.0
_NEWS_S = 3600.0
_STARTING_S = 30.0
_READ_BYTES = 256 << 10


class StageRequest(msgspec.Struct, frozen=True, tag="stage"):
    """Copy the model set of a checkpoint from one host of a profile (the path of its file) to another."""

    profile: str
    run: str
    checkpoint: str
    source: str
    destination: str


class EvaluateRequest(msgspec.Struct, frozen=True, tag="evaluate"):
    """Evaluate a checkpoint on a host by the profile's defaults; staged there first from `source`, if named."""

    profile: str
    run: str
    checkpoint: str
    host: str
    source: str = ""


class DemoRequest(msgspec.Struct, frozen=True, tag="demo"):
    """A demo from start to table; see `core.demo.DemoOptions`."""

    root: str
    seed: int = 0
    steps: int = 0
    prompts_limit: int = 0
    target: str = ""
    recipe: str = ""
    prompts: str = ""


OperationRequest = StageRequest | EvaluateRequest | DemoRequest


@dataclass(frozen=True)
class TransferProgress(Record):
    """How far a staging is; `phase` is `core.staging.StageProgress`'s, or "done"."""

    TYPE = "transfer.progress"
    source: str
    destination: str
    run: str
    checkpoint: str
    phase: str
    bytes_done: int
    bytes_total: int
    seconds: float


@dataclass(frozen=True)
class Told(Record):
    """A sentence for a person."""

    TYPE = "operation.said"
    text: str
    level: str = "info"


@dataclass(frozen=True)
class ProfileReady(Record):
    """The demo's hosts are up, and this is their profile."""

    TYPE = "demo.profile"
    path: str


@dataclass(frozen=True)
class Summary(Record):
    """The demo's table, as `core.demo.DemoSummary` in builtins."""

    TYPE = "demo.summary"
    summary: dict[str, Any]


@dataclass(frozen=True)
class OperationFinished(Record):
    """Last record; `message` is the error's where `code` is not 0."""

    TYPE = "operation.finished"
    code: int
    message: str = ""


class _Open:
    """One operation that may still say something."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reader = EventReader()
        self.offset = 0
        self.transfer: TransferSeen | None = None
        self.copying: tuple[float, int] | None = None
        """Seconds and bytes at which the copying began: the rate is counted from there."""
        self.name = ""


class Operations:
    """This operator's operations below one folder: start one, and hear of each what is new.

    Heard are those on the hosts of one profile: `profile` is the path of its file.
    """

    def __init__(self, folder: Path, profile: str = "") -> None:
        self.folder = folder
        self.profile = profile
        self._open: dict[str, _Open] = {}
        self._over: set[str] = set()

    def start(self, request: OperationRequest) -> str:
        """Start an operation; returns its id. Raises OSError where the folder cannot be written."""
        kind = type(request).__struct_config__.tag
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{kind}-{secrets.token_hex(3)}"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        place, unborn = self.folder / name, self.folder / f".{name}"
        unborn.mkdir(mode=0o700)
        write_text(unborn / "request.json", msgspec.json.format(msgspec.json.encode(request)).decode() + "\n")
        unborn.rename(place)  # whoever sees an operation finds its request
        with (place / "output.log").open("ab") as log:
            subprocess.Popen(
                [sys.executable, "-P", "-m", "dflash_console.core.operation_worker", str(place)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": _import_path()},
            )
        return name

    def news(self) -> Iterator[tuple[str, Observation | Event]]:
        """What is new, as (operation's id, observation); the demo's own events come as they are.

        Files on this machine, a few KB each look: good to call on an event loop.
        """
        for name in self._names():
            if name in self._over:
                continue
            if name not in self._open:
                if self._is_old(name) or not self._is_ours(name):
                    self._over.add(name)
                    continue
                self._open[name] = _Open(self.folder / name)
            yield from ((name, seen) for seen in self._read(self._open[name], name))

    def running(self, kind: str) -> str | None:
        """The id of a live operation of a kind: stage, evaluate or demo."""
        for name in reversed(self._names()):
            if f"-{kind}-" not in name or self._is_finished(name) or not self._is_ours(name):
                continue
            if self._is_alive(self.folder / name):
                return name
        return None

    def prune(self) -> None:
        """Remove operations that ended more than a week ago."""
        for name in self._names():
            place = self.folder / name
            try:
                old = time.time() - (place / "events.jsonl").stat().st_mtime > _KEEP_S
            except OSError:
                old = time.time() - place.stat().st_mtime > _KEEP_S
            if old and not self._is_alive(place):
                shutil.rmtree(place, ignore_errors=True)

    def _names(self) -> list[str]:
        try:
            with os.scandir(self.folder) as entries:
                return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
        except FileNotFoundError:
            return []

    def _is_ours(self, name: str) -> bool:
        try:
            content = (self.folder / name / "request.json").read_bytes()
            request: OperationRequest = msgspec.json.decode(content, type=OperationRequest)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return False
        path = str(profile_path(Path(request.root))) if isinstance(request, DemoRequest) else request.profile
        return path == self.profile

    def _is_old(self, name: str) -> bool:
        """Whether it ended so long ago that it is no news for a dashboard that opens now."""
        try:
            age_s = time.time() - (self.folder / name / "events.jsonl").stat().st_mtime
        except OSError:
            return False
        return age_s > _NEWS_S and self._is_finished(name)

    def _is_finished(self, name: str) -> bool:
        try:
            with (self.folder / name / "events.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
                return OperationFinished.TYPE.encode() in file.read()
        except OSError:
            return False

    def _read(self, operation: _Open, name: str) -> Iterator[Observation | Event]:
        # Looked at before the reading: what a process wrote before it ended is there to be read.
        alive = self._is_alive(operation.folder)
        events: list[Event] = []
        try:
            with (operation.folder / "events.jsonl").open("rb") as file:
                file.seek(operation.offset)
                data = file.read(_READ_BYTES)
            operation.offset += len(data)
            events = operation.reader.feed(data)
        except FileNotFoundError:
            data = b""
        progress: TransferSeen | None = None
        for event in events:
            if event.type == TransferProgress.TYPE:
                progress = self._transfer(operation, name, event)  # of many, the last is what counts
                if progress.state == "running":
                    continue
            if progress is not None:
                yield progress
                progress = None
            if event.type == Told.TYPE:
                level = event.data.get("level")
                yield Said(
                    printable(str(event.data.get("text")), 1000),
                    level if level in ("info", "warning", "error") else "info",
                )
            elif event.type in (ProfileReady.TYPE, Summary.TYPE):
                yield event
            elif event.type == OperationFinished.TYPE:
                yield from self._finished(operation, name, event)
                return
        if progress is not None:
            yield progress
        if not alive and not data:
            yield from self._interrupted(operation, name)

    def _transfer(self, operation: _Open, name: str, event: Event) -> TransferSeen:
        data = event.data
        phase = printable(str(data.get("phase")), 20)
        seconds, done = number(data.get("seconds")), int(number(data.get("bytes_done")))
        if phase != "copying":
            operation.copying = None
        elif operation.copying is None:
            operation.copying = (seconds, done)
        rate = None
        if operation.copying is not None and seconds > operation.copying[0]:
            rate = (done - operation.copying[1]) / (seconds - operation.copying[0])
        transfer = TransferSeen(
            id=f"{name}/{data.get('checkpoint')}",
            source=printable(str(data.get("source")), 100),
            destination=printable(str(data.get("destination")), 100),
            run=printable(str(data.get("run")), 100),
            checkpoint=printable(str(data.get("checkpoint")), 100),
            state="done" if phase == "done" else "running",
            phase=phase,
            bytes_done=done,
            bytes_total=int(number(data.get("bytes_total"))),
            seconds=seconds,
            rate=rate,
        )
        operation.transfer = None if transfer.state == "done" else transfer
        return transfer

    def _finished(self, operation: _Open, name: str, event: Event) -> Iterator[Observation | Event]:
        self._over.add(name)
        del self._open[name]
        message = printable(str(event.data.get("message") or ""), 1000)
        if event.data.get("code") != 0:
            if operation.transfer is not None:
                yield msgspec.structs.replace(operation.transfer, state="failed", message=message, rate=None)
            yield Said(message, "error")
        yield event

    def _interrupted(self, operation: _Open, name: str) -> Iterator[Observation | Event]:
        self._over.add(name)
        del self._open[name]
        message = "its process is gone; what was sent is kept, staging again goes on from there"
        if operation.transfer is not None:
            yield msgspec.structs.replace(operation.transfer, state="interrupted", message=message, rate=None)
        else:
            yield Said(f"operation {name} was interrupted; see {operation.folder / 'output.log'}", "error")
        yield Event(time.time(), OperationFinished.TYPE, {"code": 1, "message": "interrupted"})

    def _is_alive(self, place: Path) -> bool:
        try:
            record = json.loads((place / "process.json").read_bytes())
            identity = ProcessIdentity(record["pid"], record["start_ticks"], record["boot_id"])
        except (OSError, ValueError, KeyError, TypeError):
            # Its process has not come to writing it yet, or never will.
            try:
                return time.time() - place.stat().st_mtime < _STARTING_S
            except OSError:
                return False
        return is_alive(identity)


def _import_path() -> str:
    """Where this package was imported from, so that the worker finds the same one."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
