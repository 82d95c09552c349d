"""Follow growing files on a host by byte offset: no process there, no line lost, nothing read twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import PurePosixPath

from dflash_console.core.errors import IntegrityError, JobFailedError, NotFoundError
from dflash_console.core.jobs import JobRef, JobView, view_job
from dflash_console.core.ssh import HostConnection
from dflash_engine.events import Alert, Event, EventReader, JobFinished

__all__ = ["Follower", "follow_events"]

_READ_BYTES = 256 << 10
_FASTEST_POLL_S = 0.1
_LOOK_S = 2.0
"""Silence after which the host is asked whether the job still runs."""


class Follower:
    """One file's reader; `offset` is the next byte, good to resume from on another connection."""

    def __init__(self, conn: HostConnection, path: PurePosixPath, *, offset: int = 0) -> None:
        self._conn = conn
        self._path = path
        self.offset = offset

    async def poll(self) -> bytes:
        """New bytes, at most 256 KiB; empty where there are none or the file is not there yet.

        Raises IntegrityError where the file has become shorter than what was read of it, UnreachableError
        where the connection is lost.
        """
        try:
            data = await self._conn.read_range(self._path, self.offset, _READ_BYTES)
            if not data and self.offset:
                entry = await self._conn.stat(self._path)
                if entry is None or entry.size_bytes < self.offset:
                    raise self._replaced()
        except NotFoundError as error:
            if self.offset:
                raise self._replaced() from error
            return b""
        self.offset += len(data)
        return data

    def _replaced(self) -> IntegrityError:
        return IntegrityError(
            f"{self._conn.name}: {self._path} is gone or shorter than the {self.offset} bytes already read of it; "
            "a job's files only grow, so this is another file now. Follow it anew from its beginning."
        )


async def follow_events(
    conn: HostConnection, job: JobRef, *, poll_s: float = 0.5, until_finished: bool = True
) -> AsyncIterator[Event]:
    """The events of a job from its first to `job.finished`, then no more; its verdict is there by then.

    Polls every 0.1 s while events come, and ever more slowly, up to every `poll_s`, while none do. Lines that
    cannot be read are told by an alert. With `until_finished` off it ends at the first moment
    without news. Raises, after all events: JobFailedError where the job ended badly without a last event,
    UnreachableError where the connection is lost, IntegrityError where the file is another one.
    """
    follower = Follower(conn, job.path / "events.jsonl")
    reader = EventReader()
    pause_s = _FASTEST_POLL_S
    looked = time.monotonic()
    ended: JobView | None = None
    unreadable = 0
    while True:
        data = await follower.poll()
        events = reader.feed(data)
        if reader.unreadable > unreadable:
            yield _alert(conn, f"{reader.unreadable - unreadable} line(s) of {job.id}'s events cannot be read")
            unreadable = reader.unreadable
        for event in events:
            yield event
            if event.type == JobFinished.TYPE:
                return
        if data:
            pause_s, looked = _FASTEST_POLL_S, time.monotonic()
            if len(data) == _READ_BYTES:
                continue  # there is more already
        elif not until_finished:
            return
        elif time.monotonic() - looked > _LOOK_S:
            # Its last event comes just after the verdict: only a second look without news is the end.
            if ended is not None:
                if ended.state in ("finished", "stopped"):
                    return
                raise JobFailedError(f"{conn.name}: job {job.id} is {ended.state}: {ended.reason}.")
            view = await view_job(conn, job.id)
            ended = None if view.state in ("starting", "running") else view
            looked = time.monotonic()
        await asyncio.sleep(pause_s)
        if not data:
            pause_s = min(poll_s, pause_s * 1.5)


def _alert(conn: HostConnection, message: str) -> Event:
    return Event(time.time() + conn.clock_offset_s, Alert.TYPE, {"level": "warning", "message": message})
