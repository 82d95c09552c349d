"""A recorded session, played through the same board: no SSH, no torch, nothing fetched.

A recording is gzip of JSON Lines: first `{"v": 1, "title", "began", "hosts": {name: roles}}`, then
`{"at": seconds since it began, "seen": observation}`. The board's clock runs as fast as the replay does, so
ages and rates are those of the recorded session.
"""

from __future__ import annotations

import asyncio
import gzip
import time
import zlib
from pathlib import Path

import msgspec

from dflash_console.core.board import Board, Roles
from dflash_console.core.errors import JobFailedError, NotFoundError
from dflash_console.core.observations import Observation
from dflash_console.core.profiles import shipped_profiles_dir

__all__ = ["ReplaySource", "recorded_demo"]

_TURN_S = 0.05
_READ_ONLY = "this is a replay: nothing can be started"


class _Header(msgspec.Struct, frozen=True):
    v: int
    title: str
    began: float
    hosts: dict[str, list[str]]


class _Line(msgspec.Struct, frozen=True):
    at: float
    seen: Observation


def recorded_demo() -> Path:
    """The recording that ships: one run of `dflash-console demo`."""
    return shipped_profiles_dir() / "replay" / "demo.jsonl.gz"


class ReplaySource:
    """Plays a recording `speed` times as fast as it was. Raises NotFoundError for a file that is no recording."""

    read_only = _READ_ONLY

    def __init__(self, path: Path, speed: float = 20.0) -> None:
        try:
            header, *lines = gzip.decompress(path.read_bytes()).splitlines()
            self._header = msgspec.json.decode(header, type=_Header)
            decoder = msgspec.json.Decoder(_Line)
            self._lines = [decoder.decode(line) for line in lines]
        except (OSError, EOFError, zlib.error, ValueError, msgspec.DecodeError) as error:
            raise NotFoundError(f"{path} is no recording of a session: {error}.") from error
        self.speed = speed
        self.title = f"REPLAY ×{speed:g} of {self._header.title}"
        hosts = {name: Roles("train" in roles, "evaluate" in roles) for name, roles in self._header.hosts.items()}
        self._now = self._header.began
        self.board = Board(self._header.title, hosts, clock=lambda: self._now)
        self._next = 0

    @property
    def seconds(self) -> float:
        """Length of the recorded session."""
        return self._lines[-1].at if self._lines else 0.0

    def play_until(self, at: float) -> None:
        """Everything up to `at` seconds after the beginning."""
        while self._next < len(self._lines) and self._lines[self._next].at <= at:
            line = self._lines[self._next]
            self._now = self._header.began + line.at
            self.board.apply(line.seen)
            self._next += 1
        self._now = self._header.began + at

    async def run(self) -> None:
        """Play to the end, then stand still."""
        began = time.monotonic()
        while self._next < len(self._lines):
            self.play_until(min((time.monotonic() - began) * self.speed, self.seconds))
            self.board.version += 1  # its clock has moved
            await asyncio.sleep(_TURN_S)
        self.title = f"REPLAY of {self._header.title}, at its end"
        self.board.version += 1

    def stage(self, run: str, checkpoint: str, source: str, destination: str) -> None:
        raise JobFailedError(_READ_ONLY)

    def evaluate(self, run: str, checkpoint: str, host: str, source: str) -> None:
        raise JobFailedError(_READ_ONLY)

    async def output(self, host: str, job: str) -> str:
        return "A recording holds no output of jobs, only their events."
