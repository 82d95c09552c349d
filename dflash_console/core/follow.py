"""Follow growing files on a host by byte offset: no process there, no line lost, nothing read twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import PurePosixPath

from dflash_console.core.errors import IntegrityError, JobFailedError, NotFoundError
from dflash_console.core.jobs import JobRef, view_job
from dflash_console.core.ssh import HostConnection
from dflash_engine.events import Event, EventReader, JobFinished

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
        except NotFoundError:
            if self.offset:
                raise IntegrityError(f"{self._conn.name}: {self._path} was removed while it was followed.") from None
            return b""
        if not data and self.offset:
            entry = await self._conn.stat(self._path)
            if entry is None or entry.size_bytes < self.offset:
                raise IntegrityError(
                    f"{self._conn.name}: {self._path} shrank below byte {self.offset} while it was followed; "
                    "event files only grow, so this is another file now."
                )
        self.offset += len(data)
        return data


async def follow_events(
    conn: HostConnection, job: JobRef, *, poll_s: float = 0.5, until_finished: bool = True
) -> AsyncIterator[Event]:
    """The events of a job from its first to `job.finished`, then no more.

    Polls fast while events come and every `poll_s` otherwise. With `until_finished` off it ends at the first
    moment without news. Raises JobFailedError, after all events, where the job is found dead without a last
    record, UnreachableError where the connection is lost.
    """
    follower = Follower(conn, job.path / "events.jsonl")
    reader = EventReader()
    pause = _FASTEST_POLL_S
    silent_s = 0.0
    while True:
        data = await follower.poll()
        for event in reader.feed(data):
            yield event
            if event.type == JobFinished.TYPE:
                return
        if data:
            pause, silent_s = _FASTEST_POLL_S, 0.0
            continue
        if not until_finished:
            return
        if silent_s >= _LOOK_S:
            silent_s = 0.0
            view = await view_job(conn, job.id)
            if view.state not in ("starting", "running"):
                # It may have ended right before the look: what it still wrote comes first.
                while rest := await follower.poll():
                    for event in reader.feed(rest):
                        yield event
                        if event.type == JobFinished.TYPE:
                            return
                raise JobFailedError(f"{conn.name}: job {job.id} is {view.state}: {view.reason}.")
        await asyncio.sleep(pause)
        silent_s += pause
        pause = min(poll_s, pause * 1.5)
