"""Jobs on a host: launch, list, look at, stop. A job belongs to its host and outlives every connection.

State comes from the job's own records and from /proc there: *running* means that the supervisor's pid with
its start time on that boot is alive; what cannot be reached is not judged at all.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Literal, TypeVar

import msgspec

from dflash_console.core.deploy import DeployedEngine, engine_json
from dflash_console.core.errors import (
    ConsoleError,
    JobFailedError,
    NotFoundError,
    RemoteCommandError,
    UnreachableError,
)
from dflash_console.core.quoting import printable
from dflash_console.core.ssh import HostConnection
from dflash_engine import layout

__all__ = [
    "JobExistsError",
    "JobRef",
    "JobRequest",
    "JobState",
    "JobView",
    "job_ref",
    "launch",
    "list_jobs",
    "read_output",
    "request_save",
    "request_stop",
    "view_job",
    "wait_for_exit",
]

JobState = Literal["starting", "running", "finished", "stopped", "failed", "killed", "lost"]

_RECORD_MAX_BYTES = 1 << 20
_PROC_MAX_BYTES = 8192
_STARTING_S = 30.0
_LAUNCH_TIMEOUT_S = 60.0
_AT_ONCE = 8
_EXIT_POLL_S = 0.25

_Record = TypeVar("_Record", bound=msgspec.Struct)


class JobExistsError(ConsoleError):
    """The job's folder exists: somebody launched the same job before."""

    exit_code = 11


class JobRequest(msgspec.Struct, frozen=True):
    """What to run. `argv` is the whole command; `request` is what a person asked for, kept for the record."""

    kind: Literal["train", "evaluate"]
    argv: list[str]
    run: str | None = None
    env: Mapping[str, str] = {}
    request: Mapping[str, Any] = {}
    grace_s: float = 60.0
    job_id: str | None = None


class JobRef(msgspec.Struct, frozen=True):
    """Where a job is: host name, id, absolute folder there."""

    host: str
    id: str
    path: PurePosixPath


class JobView(msgspec.Struct, frozen=True):
    """A job as its records and the host's processes show it; its texts are printable.

    `kind` is "unknown" where the launch was cut off before it said. `created` is the host's Unix time.
    """

    host: str
    id: str
    kind: str
    run: str | None
    state: JobState
    reason: str
    created: float
    checkpoint: str = ""
    """`RUN:step_N` where the job evaluates one."""


class _Asked(msgspec.Struct, frozen=True):
    checkpoint: str = ""


class _Job(msgspec.Struct, frozen=True):
    id: str
    kind: str
    created: float
    run: str | None = None
    request: _Asked = _Asked()


class _Process(msgspec.Struct, frozen=True):
    pid: int
    start_ticks: int
    boot_id: str


class _Exit(msgspec.Struct, frozen=True):
    reason: str
    message: str = ""


def job_ref(conn: HostConnection, job_id: str) -> JobRef:
    """The reference of a job by its id. Raises NotFoundError for what cannot be an id."""
    if not layout.is_valid_name(job_id):
        raise NotFoundError(f"{conn.name}: {printable(job_id, 100)!r} is no job id; `jobs` lists them.")
    return JobRef(conn.name, job_id, conn.state / layout.job_dir(job_id))


async def launch(conn: HostConnection, engine: DeployedEngine, request: JobRequest) -> JobRef:
    """Claim the job's folder, write `job.json`, start the supervisor detached; returns once it runs.

    Raises JobExistsError where the folder is there, JobFailedError where the job was not started (another job
    holds the run, no such command), RemoteCommandError where the supervisor did not report, UnreachableError
    where the connection was lost on the way.
    """
    created = time.time() + conn.clock_offset_s
    job_id = request.job_id or (
        f"{request.kind}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(created))}-{secrets.token_hex(3)}"
    )
    job = job_ref(conn, job_id)
    await conn.make_dirs(job.path.parent)
    if not await conn.make_dir(job.path):
        raise JobExistsError(f"{conn.name}: job {job_id} exists already.")
    await conn.make_dir(job.path / "control")
    document = {
        "v": 1,
        "id": job_id,
        "kind": request.kind,
        "run": request.run,
        "argv": request.argv,
        "env": dict(request.env),
        "cwd": str(job.path),
        "engine_hash": engine.hash,
        "grace_s": request.grace_s,
        "created": created,
        "request": dict(request.request),
    }
    encoded = msgspec.json.format(msgspec.json.encode(document), indent=1)
    await conn.write_file(job.path / "job.json", encoded)
    try:
        await engine_json(conn, engine, ["supervise", str(job.path), "--detach"], timeout_s=_LAUNCH_TIMEOUT_S)
    except UnreachableError as error:
        raise UnreachableError(f"{error} Job {job_id} may have been started all the same; `jobs` shows it.") from error
    except RemoteCommandError as error:
        verdict = await _read_record(conn, job.path / "exit.json", _Exit)
        if verdict is not None and verdict.reason == "not-started":
            said = printable(verdict.message, 500)
            raise JobFailedError(f"{conn.name}: job {job_id} was not started: {said}.") from error
        raise
    return job


async def list_jobs(conn: HostConnection) -> list[JobView]:
    """All jobs of a host, oldest first."""
    names = [
        entry.name
        for entry in await conn.list_dir(conn.state / "jobs")
        if entry.kind == "dir" and layout.is_valid_name(entry.name)
    ]
    gate = asyncio.Semaphore(_AT_ONCE)

    async def view(name: str) -> JobView | None:
        async with gate:
            try:
                return await view_job(conn, name)
            except NotFoundError:
                return None  # moved aside or removed since the listing

    views = await asyncio.gather(*map(view, names))
    return sorted((found for found in views if found is not None), key=lambda found: (found.created, found.id))


async def view_job(conn: HostConnection, job_id: str) -> JobView:
    """One job. Raises NotFoundError where the host has none of that id."""
    job = job_ref(conn, job_id)
    record = await _read_record(conn, job.path / "job.json", _Job)
    if record is None:
        return await _view_unwritten(conn, job)
    state, reason = await _judge(conn, job, record.created)
    run = None if record.run is None else printable(record.run, 100)
    asked = printable(record.request.checkpoint, 200)
    return JobView(conn.name, job_id, printable(record.kind, 40), run, state, reason, record.created, asked)


async def request_stop(conn: HostConnection, job_id: str) -> None:
    """Ask a job to save and end; its supervisor enforces the grace time. Raises NotFoundError, JobFailedError."""
    await _request(conn, job_id, layout.CONTROL_STOP)


async def request_save(conn: HostConnection, job_id: str) -> None:
    """Ask a training for a checkpoint now. Raises NotFoundError, JobFailedError."""
    await _request(conn, job_id, layout.CONTROL_SAVE)


async def read_output(conn: HostConnection, job_id: str, last_bytes: int) -> bytes:
    """The end of a job's `output.log`; empty where it wrote none."""
    path = job_ref(conn, job_id).path / "output.log"
    entry = await conn.stat(path)
    if entry is None:
        return b""
    return await conn.read_range(path, max(0, entry.size_bytes - last_bytes), last_bytes)


async def wait_for_exit(conn: HostConnection, job: JobRef, timeout_s: float) -> JobView:
    """Wait until a job has ended, in whatever way. Raises TimeoutError after `timeout_s`; the job goes on."""
    async with asyncio.timeout(timeout_s):
        # Nothing on this machine tells of what happens on the host.
        while (view := await view_job(conn, job.id)).state in ("starting", "running"):  # noqa: ASYNC110 # see above
            await asyncio.sleep(_EXIT_POLL_S)
    return view


async def _request(conn: HostConnection, job_id: str, what: str) -> None:
    view = await view_job(conn, job_id)
    if view.state not in ("running", "starting"):
        raise JobFailedError(f"{conn.name}: job {view.id} does not run, it is {view.state}: {view.reason}.")
    await conn.write_file(job_ref(conn, job_id).path / "control" / what, b"")


async def _view_unwritten(conn: HostConnection, job: JobRef) -> JobView:
    """A folder without a readable `job.json`: a launch that has just claimed it, or one that was cut off."""
    folder = await conn.stat(job.path)
    if folder is None or folder.kind != "dir":
        raise NotFoundError(f"{conn.name}: there is no job {job.id}; `jobs` lists them.")
    state: JobState = "starting" if _is_young(conn, folder.mtime) else "lost"
    reason = "its launch has not written job.json" + (" yet" if state == "starting" else ", or damaged it")
    return JobView(conn.name, job.id, "unknown", None, state, reason, folder.mtime)


def _is_young(conn: HostConnection, host_time: float) -> bool:
    return time.time() + conn.clock_offset_s - host_time < _STARTING_S


async def _judge(conn: HostConnection, job: JobRef, created: float) -> tuple[JobState, str]:
    verdict = await _read_record(conn, job.path / "exit.json", _Exit)
    if verdict is None:
        process = await _read_record(conn, job.path / "process.json", _Process)
        if process is None:
            if _is_young(conn, created):
                return "starting", "its supervisor has not reported yet"
            return "lost", "its supervisor never reported"
        if await _is_running(conn, process):
            return "running", f"supervisor pid {process.pid}"
        # It may have written its verdict and ended between the two looks.
        verdict = await _read_record(conn, job.path / "exit.json", _Exit)
        if verdict is None:
            return "lost", "its supervisor is gone and left no verdict"
    states: dict[str, JobState] = {
        "finished": "finished",
        "stopped": "stopped",
        "failed": "failed",
        "not-started": "failed",
        "killed": "killed",
        "killed-after-grace": "killed",
    }
    reason = f"{verdict.reason}: {verdict.message}" if verdict.message else verdict.reason
    return states.get(verdict.reason, "failed"), printable(reason, 500)


async def _is_running(conn: HostConnection, process: _Process) -> bool:
    path = PurePosixPath(f"/proc/{process.pid}/stat")
    try:
        boot = await conn.read_file("/proc/sys/kernel/random/boot_id", max_bytes=_PROC_MAX_BYTES)
        stat = await _read_proc(conn, path)
        fields = stat[stat.rindex(b")") + 2 :].split()
        state, start_ticks = fields[0], int(fields[19])
    except NotFoundError:
        return False
    except (ValueError, IndexError) as error:
        raise RemoteCommandError(f"{conn.name}: {path} is not what Linux writes there.") from error
    same = boot.strip() == process.boot_id.encode() and start_ticks == process.start_ticks
    return same and state not in (b"Z", b"X")


async def _read_proc(conn: HostConnection, path: PurePosixPath) -> bytes:
    try:
        return await conn.read_file(path, max_bytes=_PROC_MAX_BYTES)
    except RemoteCommandError:
        # A process that ends between opening and reading makes the read fail; the second opening then tells.
        return await conn.read_file(path, max_bytes=_PROC_MAX_BYTES)


async def _read_record(conn: HostConnection, path: PurePosixPath, kind: type[_Record]) -> _Record | None:
    """A JSON record, or None where it is missing or not one."""
    try:
        return msgspec.json.decode(await conn.read_file(path, max_bytes=_RECORD_MAX_BYTES), type=kind)
    except (NotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        return None
