"""A profile, live: every host watched, operations started and followed, all of it onto one board."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from dflash_console.core.board import Board, Roles
from dflash_console.core.demo_hosts import profile_path
from dflash_console.core.errors import HostNotReadyError, JobFailedError, NotFoundError
from dflash_console.core.jobs import read_output
from dflash_console.core.observations import Observation, Said
from dflash_console.core.operations import (
    DemoRequest,
    EvaluateRequest,
    OperationFinished,
    OperationRequest,
    Operations,
    ProfileReady,
    StageRequest,
    Summary,
)
from dflash_console.core.profiles import Profile, load_profile
from dflash_console.core.quoting import printable
from dflash_console.core.ssh import Connections
from dflash_console.core.watch_host import HostWatch
from dflash_engine.events import Event

__all__ = ["DemoSource", "LiveSource", "Recorder", "roles_of"]

_OPERATIONS_S = 0.25
_OUTPUT_BYTES = 64 << 10


def roles_of(profile: Profile) -> dict[str, Roles]:
    """What each host of a profile is for."""
    return {name: Roles("train" in host.roles, "evaluate" in host.roles) for name, host in profile.hosts.items()}


class Recorder:
    """Writes every observation of a board down, one JSON object a line, for a replay."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._began = time.time()

    def write(self, header: object) -> None:
        """The first line."""
        self._file.write(msgspec.json.encode(header) + b"\n")

    def observe(self, seen: Observation) -> None:
        """One more line: `at`, seconds since the recording began, and what was seen."""
        line = {"at": round(time.time() - self._began, 3), "seen": seen}
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()


class LiveSource:
    """A profile's hosts, watched over SSH. `operations` is this operator's own folder of them."""

    read_only = ""

    def __init__(self, profile: Profile, operations: Operations, record: Callable[[Observation], None] | None = None):
        self.profile: Profile | None = profile
        self.title = profile.name if "/" not in profile.name else profile.path.stem
        self.board = Board(self.title, roles_of(profile))
        self._operations = operations
        operations.profile = str(profile.path)
        self._record = record
        self._watches: list[HostWatch] = []
        self._hosts: Connections | None = None

    def tell(self, seen: Observation) -> None:
        """Put an observation on the board, and into the recording where there is one."""
        if self._record is not None:
            self._record(seen)
        self.board.apply(seen)

    async def run(self) -> None:
        """Watch all hosts and all operations until cancelled."""
        self._operations.prune()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_operations())
            group.create_task(self._watch_hosts())

    def stage(self, run: str, checkpoint: str, source: str, destination: str) -> None:
        self._start(StageRequest(self._profile_path(), run, checkpoint, source, destination))

    def evaluate(self, run: str, checkpoint: str, host: str, source: str) -> None:
        self._start(EvaluateRequest(self._profile_path(), run, checkpoint, host, source))

    async def output(self, host: str, job: str) -> str:
        if self._hosts is None:
            raise NotFoundError(f"{host}: not connected yet.")
        conn = await self._hosts.get(host)
        content = await read_output(conn, job, _OUTPUT_BYTES)
        return "\n".join(printable(line) for line in content.decode(errors="replace").splitlines())

    def _profile_path(self) -> str:
        if self.profile is None:
            raise JobFailedError("The hosts are not up yet; wait until they are.")
        return str(self.profile.path)

    def _start(self, request: OperationRequest) -> str:
        try:
            return self._operations.start(request)
        except OSError as error:
            raise HostNotReadyError(
                f"{self._operations.folder} cannot be written: {error.strerror}; make room there or set "
                "DFLASH_DATA_DIR."
            ) from error

    async def _watch_hosts(self) -> None:
        assert self.profile is not None  # noqa: S101 # subclasses wait for it
        async with Connections(self.profile) as hosts:
            self._hosts = hosts
            self._watches = [HostWatch(hosts, name, self.tell) for name in self.profile.hosts]
            await asyncio.gather(*(watch.run() for watch in self._watches))

    async def _follow_operations(self) -> None:
        while True:
            for operation, news in self._operations.news():
                if isinstance(news, Event):
                    self._heard(operation, news)
                else:
                    self.tell(news)
                    if getattr(news, "state", "") == "done":
                        self._look_at_checkpoints()
            await asyncio.sleep(_OPERATIONS_S)

    def _look_at_checkpoints(self) -> None:
        for watch in self._watches:
            watch.look_at_checkpoints()

    def _heard(self, operation: str, event: Event) -> None:
        """An operation's own event; only a demo's matter."""


class DemoSource(LiveSource):
    """The demo: an operation of its own starts the hosts and does the work, and their profile is watched."""

    def __init__(
        self, request: DemoRequest, operations: Operations, record: Callable[[Observation], None] | None = None
    ):
        self.profile = None
        self.title = "demo"
        self.board = Board("demo", {"ct200": Roles(train=True), "ct129": Roles(evaluate=True)})
        self.summary: dict[str, object] | None = None
        self.failure: Event | None = None
        self._request = request
        self._operations = operations
        operations.profile = str(profile_path(Path(request.root)))
        self._record = record
        self._watches = []
        self._hosts = None
        self._operation = ""
        self._ready = asyncio.Event()

    @property
    def is_busy(self) -> bool:
        """Whether anything still runs on the hosts or towards them."""
        board = self.board
        jobs = [run.is_live for run in board.runs.values()] + [e.job.is_live for e in board.evaluations.values()]
        return any(jobs) or any(transfer.state == "running" for transfer in board.transfers.values())

    @property
    def is_over(self) -> bool:
        """Whether the demo has come to its end, good or bad."""
        return self.summary is not None or self.failure is not None

    async def run(self) -> None:
        """Start the demo, or find the one that runs, and watch."""
        running = self._operations.running("demo")
        if running is not None:
            self.tell(Said("the demo is running already; this dashboard looks at it"))
        self._operation = running or self._start(self._request)
        await super().run()

    async def _watch_hosts(self) -> None:
        await self._ready.wait()
        await super()._watch_hosts()

    def _heard(self, operation: str, event: Event) -> None:
        if operation != self._operation:
            return
        if event.type == ProfileReady.TYPE:
            self.profile = load_profile(str(event.data["path"]), ())
            self.board.add_hosts(roles_of(self.profile))
            self._ready.set()
        elif event.type == Summary.TYPE:
            self.summary = dict(event.data["summary"])
            self.tell(Said("the demo is over"))
        elif event.type == OperationFinished.TYPE and self.summary is None:
            self.failure = event
