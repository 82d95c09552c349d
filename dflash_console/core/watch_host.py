"""One host, watched: connection, load, jobs with their events, checkpoints and results, as observations.

Nothing is asked of the host that changes it. A connection that breaks is made again, ever more slowly, and the
tails go on at the byte where they stopped. One host's trouble is its own: another's watch never waits for it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import PurePosixPath

from dflash_console.core.checkpoints import list_checkpoints
from dflash_console.core.errors import ConsoleError, IntegrityError, NotFoundError, RemoteCommandError
from dflash_console.core.follow import Follower
from dflash_console.core.jobs import JobView, list_jobs
from dflash_console.core.observations import (
    CheckpointSeen,
    CheckpointsSeen,
    EventSeen,
    HostSeen,
    JobReset,
    JobSeen,
    JobsSeen,
    Observation,
    Said,
)
from dflash_console.core.quoting import printable
from dflash_console.core.results import read_result
from dflash_console.core.ssh import Connections, HostConnection
from dflash_console.core.telemetry import Telemetry
from dflash_engine import layout
from dflash_engine.events import EventReader

__all__ = ["HostWatch"]

_JOBS_S = 1.0
_CHECKPOINTS_S = 5.0
_LOAD_S = 2.0
_TAIL_S = 0.4
_RETRY_FIRST_S, _RETRY_MOST_S = 1.0, 30.0
_RESULT_MAX_BYTES = 64 << 20
_EVENTS_AT_ONCE = 100
"""After so many events the loop gets its turn: a week's file must not hold up the keyboard."""


class _Tail:
    """How far one job's events are read; `idle_looks` counts looks at an ended job that brought nothing."""

    def __init__(self) -> None:
        self.reader = EventReader()
        self.offset = 0
        self.unreadable = 0
        self.idle_looks = 0
        self.result_read = False


class HostWatch:
    """Watches one host of a profile until cancelled; `tell` hears every observation, on the event loop."""

    def __init__(self, hosts: Connections, name: str, tell: Callable[[Observation], None]) -> None:
        self._hosts = hosts
        self._name = name
        self._tell = tell
        self._tails: dict[str, _Tail] = {}
        self._jobs: dict[str, JobView] = {}
        self._checkpoints_due = asyncio.Event()

    def look_at_checkpoints(self) -> None:
        """List the checkpoints now and not at their next turn."""
        self._checkpoints_due.set()

    async def run(self) -> None:
        """Connect, watch, and connect again whenever the connection is lost."""
        retry_s = _RETRY_FIRST_S
        while True:
            self._tell(HostSeen(self._name, "connecting"))
            fault = ""
            try:
                conn = await self._hosts.get(self._name)
                self._tell(HostSeen(self._name, "up", clock_offset_s=conn.clock_offset_s))
                retry_s = _RETRY_FIRST_S
                await self._watch(conn)
            except* ConsoleError as group:
                fault = printable(str(_first(group)), 1000)
            # Jitter: many consoles that lost one host must not return to it in step.
            pause_s = retry_s * random.uniform(0.8, 1.2)  # noqa: S311 # no secret
            self._tell(HostSeen(self._name, "unreachable", fault, retry_s=pause_s))
            await asyncio.sleep(pause_s)
            retry_s = min(2 * retry_s, _RETRY_MOST_S)

    async def _watch(self, conn: HostConnection) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._load(conn))
            group.create_task(self._list_jobs(conn))
            group.create_task(self._list_checkpoints(conn))
            group.create_task(self._tail(conn))

    async def _load(self, conn: HostConnection) -> None:
        telemetry = Telemetry()
        while True:
            self._tell(await telemetry.look(conn))
            await asyncio.sleep(_LOAD_S)

    async def _list_jobs(self, conn: HostConnection) -> None:
        told: list[JobSeen] | None = None
        while True:
            with suppress(RemoteCommandError):
                views = await list_jobs(conn)
                self._jobs = {view.id: view for view in views}
                seen = [_job_seen(view) for view in views]
                if seen != told:
                    self._tell(JobsSeen(self._name, seen))
                    told = seen
            await asyncio.sleep(_JOBS_S)

    async def _list_checkpoints(self, conn: HostConnection) -> None:
        told: list[CheckpointSeen] | None = None
        while True:
            self._checkpoints_due.clear()
            with suppress(RemoteCommandError):
                views = await list_checkpoints(conn)
                seen = [
                    CheckpointSeen(
                        run=view.run,
                        name=view.name,
                        step=view.step,
                        state=view.state,
                        reason=printable(view.reason, 300),
                        size_bytes=view.size_bytes,
                        created=view.created,
                        fingerprint=view.manifest.model_fingerprint() if view.manifest else "",
                    )
                    for view in views
                ]
                if seen != told:
                    self._tell(CheckpointsSeen(self._name, seen))
                    told = seen
            with suppress(TimeoutError):
                await asyncio.wait_for(self._checkpoints_due.wait(), _CHECKPOINTS_S)

    async def _tail(self, conn: HostConnection) -> None:
        while True:
            for job in list(self._jobs.values()):
                tail = self._tails.setdefault(job.id, _Tail())
                live = job.state in ("starting", "running")
                if live:
                    tail.idle_looks = 0
                if live or tail.idle_looks < 2:
                    await self._read_events(conn, job, tail)
                elif not tail.result_read:
                    await self._read_result(conn, job, tail)
            await asyncio.sleep(_TAIL_S)

    async def _read_events(self, conn: HostConnection, job: JobView, tail: _Tail) -> None:
        path = conn.state / layout.job_dir(job.id) / "events.jsonl"
        while True:
            follower = Follower(conn, path, offset=tail.offset)
            try:
                data = await follower.poll()
            except IntegrityError:
                self._tails[job.id] = _Tail()
                self._tell(JobReset(self._name, job.id))
                return
            except RemoteCommandError as error:
                self._tell(Said(printable(str(error), 500), "warning"))
                tail.idle_looks += 1
                return
            tail.offset = follower.offset
            for count, event in enumerate(tail.reader.feed(data), start=1):
                self._tell(EventSeen(self._name, job.id, event.t, event.type, event.data))
                if event.type == "train.checkpoint":
                    self._checkpoints_due.set()
                if event.type == "eval.result":
                    tail.result_read = False
                if count % _EVENTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
            if tail.reader.unreadable > tail.unreadable:
                lost = tail.reader.unreadable - tail.unreadable
                self._tell(Said(f"{self._name}: {lost} line(s) of {job.id}'s events cannot be read", "warning"))
                tail.unreadable = tail.reader.unreadable
            if not data:
                tail.idle_looks += 1
                return
            tail.idle_looks = 0

    async def _read_result(self, conn: HostConnection, job: JobView, tail: _Tail) -> None:
        tail.result_read = True
        if job.kind != "evaluate" or job.state != "finished":
            return
        path: PurePosixPath = conn.state / layout.job_dir(job.id) / "result.json"
        try:
            content = await conn.read_file(path, max_bytes=_RESULT_MAX_BYTES)
        except (NotFoundError, RemoteCommandError) as error:
            self._tell(Said(printable(str(error), 500), "warning"))
            return
        result = await asyncio.to_thread(read_result, self._name, job.id, content)
        if result is None:
            self._tell(Said(f"{self._name}: result.json of {job.id} cannot be read as a result", "warning"))
        else:
            self._tell(result)


def _job_seen(view: JobView) -> JobSeen:
    return JobSeen(view.id, view.kind, view.run or "", view.state, view.reason, view.created, view.checkpoint)


def _first(group: BaseExceptionGroup[ConsoleError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
