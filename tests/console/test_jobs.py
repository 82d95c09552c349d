"""Jobs on real hosts: launched over SSH, outliving the connection and the console, judged by their records."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dflash_console.core.deploy import DeployedEngine, deploy_engine
from dflash_console.core.errors import JobFailedError, NotFoundError, RemoteCommandError, UnreachableError
from dflash_console.core.follow import follow_events
from dflash_console.core.jobs import (
    JobExistsError,
    JobRef,
    JobRequest,
    JobView,
    launch,
    list_jobs,
    read_output,
    request_save,
    request_stop,
    view_job,
    wait_for_exit,
)
from dflash_console.core.profiles import Profile
from dflash_console.core.ssh import Connections, HostConnection
from dflash_engine.processes import boot_id, marked_processes, process_identity
from tests.hosts import OpenSSHHost
from tests.tcp_relay import Relay

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 30.0

OBEYS = """
import os, pathlib, time
from dflash_engine.events import EventWriter, JobStarted
job = pathlib.Path(os.environ["DFLASH_JOB_DIR"])
print("working", flush=True)
EventWriter(job / "events.jsonl").write(JobStarted(job.name, "train"))
while not (job / "control" / "stop").exists():
    time.sleep(0.02)
"""
"""A job that writes one event and looks at its control folder, as the trainer does."""


def request(code: str, engine: DeployedEngine, **changes: Any) -> JobRequest:
    made = JobRequest(kind="train", argv=[sys.executable, "-c", code], env={"PYTHONPATH": str(engine.path)})
    return msgspec.structs.replace(made, **changes)


def record(job: JobRef, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(job.path, name).read_bytes())
    return document


def wait_for_end(pid: int) -> None:
    """Until the process has ended; at once where there is none."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], TIMEOUT_S)[0], f"process {pid} is still there"
    finally:
        os.close(fd)


async def first_event(conn: HostConnection, job: JobRef) -> str:
    """Type of the first event; by then the job is at work."""
    return (await asyncio.wait_for(anext(follow_events(conn, job)), TIMEOUT_S)).type


async def events_of(conn: HostConnection, job: JobRef) -> list[str]:
    return [event.type async for event in follow_events(conn, job)]


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path) -> Iterator[None]:
    """Kill what a failed test has left running; asks the supervisors' records, whatever the host."""
    yield
    for path in tmp_path.rglob("process.json"):
        found = json.loads(path.read_bytes())
        if process_identity(found["pid"]) and found.get("mark"):
            for process in marked_processes(found["mark"]):
                os.kill(process.pid, signal.SIGKILL)


@pytest.fixture
async def hosts(ssh_host: Profile) -> AsyncIterator[Connections]:
    async with Connections(ssh_host) as connections:
        yield connections


@pytest.fixture
async def conn(hosts: Connections) -> HostConnection:
    return await hosts.get("ct200")


@pytest.fixture
async def engine(conn: HostConnection) -> DeployedEngine:
    return await deploy_engine(conn)


async def test_a_job_is_launched_seen_stopped_and_its_verdict_found(
    conn: HostConnection, engine: DeployedEngine
) -> None:
    began = time.monotonic()
    job = await launch(conn, engine, request(OBEYS, engine, run="r1", request={"who": "me"}))
    assert time.monotonic() - began < 5.0
    assert await first_event(conn, job) == "job.started"
    (view,) = await list_jobs(conn)
    assert (view.host, view.id, view.kind, view.run, view.state) == ("ct200", job.id, "train", "r1", "running")
    assert abs(view.created - time.time()) < 60
    assert (record(job, "job.json")["request"], record(job, "job.json")["engine_hash"]) == ({"who": "me"}, engine.hash)
    await request_stop(conn, job.id)
    assert await asyncio.wait_for(events_of(conn, job), TIMEOUT_S) == ["job.started", "job.finished"]
    # No waiting: whoever has seen the last event finds the verdict.
    assert (await view_job(conn, job.id)).state == "stopped"
    assert await read_output(conn, job.id, 1000) == b"working\n"
    assert await read_output(conn, job.id, 4) == b"ing\n"


def _processes_with(variable: str) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
        except OSError:
            continue  # it ended, or is somebody else's
    return found


async def test_a_launch_leaves_no_process_on_the_host_but_the_jobs(
    conn: HostConnection, engine: DeployedEngine
) -> None:
    job = await launch(conn, engine, request(OBEYS, engine))
    known = record(job, "process.json")
    assert _processes_with(f"PYTHONPATH={engine.path}") == {known["pid"], known["child_pid"]}
    await request_stop(conn, job.id)
    await wait_for_exit(conn, job, TIMEOUT_S)
    wait_for_end(known["pid"])
    assert _processes_with(f"PYTHONPATH={engine.path}") == set()


async def test_a_job_outlives_the_connection(ssh_host: Profile) -> None:
    async with Relay.to(ssh_host.hosts["ct200"]) as relay:
        behind = msgspec.structs.replace(ssh_host, hosts={"ct200": relay.host})
        async with Connections(behind) as hosts:
            conn = await hosts.get("ct200")
            engine = await deploy_engine(conn)
            job = await launch(conn, engine, request(OBEYS, engine))
            relay.cut()
            with pytest.raises(UnreachableError):
                await view_job(conn, job.id)
            # A new connection finds it, still at work.
            conn = await hosts.get("ct200")
            assert await first_event(conn, job) == "job.started"
            assert (await view_job(conn, job.id)).state == "running"
            await request_stop(conn, job.id)
            assert (await wait_for_exit(conn, job, TIMEOUT_S)).state == "stopped"


CONSOLE = """
import asyncio, sys
import msgspec
from dflash_console.core.deploy import deploy_engine
from dflash_console.core.jobs import JobRequest, launch
from dflash_console.core.profiles import Profile
from dflash_console.core.ssh import Connections

async def main():
    profile = msgspec.json.decode(sys.argv[1], type=Profile, dec_hook=lambda kind, value: kind(value))
    async with Connections(profile) as hosts:
        conn = await hosts.get("ct200")
        engine = await deploy_engine(conn)
        env = {"PYTHONPATH": str(engine.path)}
        job = await launch(conn, engine, JobRequest("train", [sys.executable, "-c", sys.argv[2]], env=env))
        print(job.id, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_job_outlives_a_console_that_is_killed(ssh_host: Profile) -> None:
    console = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CONSOLE,
        msgspec.json.encode(ssh_host, enc_hook=str).decode(),
        OBEYS,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert console.stdout is not None
    job_id = (await asyncio.wait_for(console.stdout.readline(), TIMEOUT_S)).decode().strip()
    console.kill()
    await console.wait()
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        (view,) = await list_jobs(conn)
        assert (view.id, view.state) == (job_id, "running")
        await request_stop(conn, job_id)
        job = JobRef("ct200", job_id, conn.state / "jobs" / job_id)
        assert (await wait_for_exit(conn, job, TIMEOUT_S)).state == "stopped"


async def test_a_job_whose_supervisor_is_killed_is_lost(conn: HostConnection, engine: DeployedEngine) -> None:
    job = await launch(conn, engine, request(OBEYS, engine))
    known = record(job, "process.json")
    assert await first_event(conn, job) == "job.started"
    os.kill(known["pid"], signal.SIGKILL)
    view = await wait_for_exit(conn, job, TIMEOUT_S)
    assert (view.state, "left no verdict" in view.reason) == ("lost", True)
    with pytest.raises(JobFailedError, match="is lost"):
        await asyncio.wait_for(events_of(conn, job), TIMEOUT_S)


async def test_a_second_job_of_a_run_is_refused_by_name_and_listed_as_failed(
    conn: HostConnection, engine: DeployedEngine
) -> None:
    first = await launch(conn, engine, request(OBEYS, engine, run="r1"))
    with pytest.raises(JobFailedError, match=f"run r1 is held by job {first.id}"):
        await launch(conn, engine, request(OBEYS, engine, run="r1", job_id="second"))
    view = await view_job(conn, "second")
    assert view.state == "failed"
    assert view.reason.startswith("not-started: run r1 is held")
    await request_stop(conn, first.id)
    await wait_for_exit(conn, first, TIMEOUT_S)


async def test_a_command_that_the_host_lacks_is_not_started(conn: HostConnection, engine: DeployedEngine) -> None:
    with pytest.raises(JobFailedError, match=r"ct200: job j was not started: /no/such cannot be started"):
        await launch(conn, engine, request("", engine, argv=["/no/such"], job_id="j"))


async def test_a_job_id_is_launched_once(conn: HostConnection, engine: DeployedEngine) -> None:
    both = (launch(conn, engine, request(OBEYS, engine, job_id="eval-1")) for _ in range(2))
    outcomes = await asyncio.gather(*both, return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["JobExistsError", "JobRef"]
    with pytest.raises(JobExistsError, match="ct200: job eval-1 exists already"):
        await launch(conn, engine, request(OBEYS, engine, job_id="eval-1"))
    (job,) = (outcome for outcome in outcomes if isinstance(outcome, JobRef))
    await request_stop(conn, "eval-1")
    await wait_for_exit(conn, job, TIMEOUT_S)


async def test_waiting_for_an_exit_ends_in_time_and_leaves_the_job_alone(
    conn: HostConnection, engine: DeployedEngine
) -> None:
    job = await launch(conn, engine, request(OBEYS, engine))
    with pytest.raises(TimeoutError):
        await wait_for_exit(conn, job, 0.5)
    await request_save(conn, job.id)
    assert Path(job.path, "control", "save").exists()
    assert (await view_job(conn, job.id)).state == "running"
    await request_stop(conn, job.id)
    await wait_for_exit(conn, job, TIMEOUT_S)
    with pytest.raises(JobFailedError, match="does not run, it is stopped"):
        await request_stop(conn, job.id)


class Records:
    """Job folders on one OpenSSH host whose records the test writes itself."""

    def __init__(self, conn: HostConnection) -> None:
        self.conn = conn

    def write(self, job_id: str, **documents: Any) -> Path:
        folder = Path(self.conn.state, "jobs", job_id)
        folder.mkdir(parents=True, exist_ok=True)
        for name, document in documents.items():
            text = document if isinstance(document, str) else json.dumps(document)
            (folder / f"{name}.json").write_text(text)
        return folder

    async def view(self, job_id: str, **documents: Any) -> JobView:
        job = {"v": 1, "id": job_id, "kind": "train", "run": None, "created": time.time()}
        self.write(job_id, **({"job": job} | documents))
        return await view_job(self.conn, job_id)


@pytest.fixture
async def records(openssh: OpenSSHHost) -> AsyncIterator[Records]:
    profile = Profile(name="test", path=openssh.root / "test.toml", hosts={"ct200": openssh.profile})
    async with Connections(profile) as hosts:
        yield Records(await hosts.get("ct200"))


def _process(**changes: Any) -> dict[str, Any]:
    me = process_identity(os.getpid())
    assert me is not None
    return {"v": 1, "pid": me.pid, "start_ticks": me.start_ticks, "boot_id": me.boot_id} | changes


async def test_running_means_this_pid_with_this_start_on_this_boot(records: Records) -> None:
    assert (await records.view("a", process=_process())).state == "running"
    recycled = _process(start_ticks=_process()["start_ticks"] - 1)
    assert (await records.view("b", process=recycled)).state == "lost"
    assert (await records.view("c", process=_process(boot_id=boot_id()[::-1]))).state == "lost"
    assert (await records.view("d", process=_process(pid=2**22 + 1))).state == "lost"


async def test_a_job_without_a_process_record_is_starting_at_first_and_lost_then(records: Records) -> None:
    job = {"id": "x", "kind": "train", "created": time.time() - 20}
    assert (await records.view("young", job=job)).state == "starting"
    assert (await records.view("old", job=job | {"created": time.time() - 40})).state == "lost"


@pytest.mark.parametrize("content", [None, "", '{"id": "x", "kind"', "[]"])
async def test_a_claim_without_a_job_record_is_starting_at_first_and_lost_then(
    records: Records, content: str | None
) -> None:
    folder = records.write("cut-off", **({} if content is None else {"job": content}))
    view = await view_job(records.conn, "cut-off")
    assert (view.kind, view.state) == ("unknown", "starting")
    os.utime(folder, (1.0, time.time() - 40))
    (view,) = await list_jobs(records.conn)
    assert (view.id, view.state) == ("cut-off", "lost")


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("finished", "finished"),
        ("stopped", "stopped"),
        ("failed", "failed"),
        ("killed", "killed"),
        ("killed-after-grace", "killed"),
        ("not-started", "failed"),
    ],
)
async def test_a_verdict_counts_whatever_runs_under_that_pid(records: Records, reason: str, state: str) -> None:
    verdict = {"v": 1, "reason": reason, "message": "so it is"}
    view = await records.view("j", process=_process(), exit=verdict)
    assert (view.state, view.reason) == (state, f"{reason}: so it is")


async def test_records_of_a_host_reach_the_terminal_without_its_escapes(records: Records) -> None:
    job = {"id": "j", "kind": "\x1b[31mtrain", "run": "r\x1b]0;", "created": 1.0}
    view = await records.view("j", job=job, exit={"reason": "failed", "message": "\x1b[2J\u202e"})
    assert (view.kind, view.run) == ("\\x1b[31mtrain", "r\\x1b]0;")
    assert view.reason == "failed: \\x1b[2J\\u202e"


async def test_a_record_of_unreasonable_size_is_refused(records: Records) -> None:
    with pytest.raises(RemoteCommandError, match="larger than"):
        await records.view("j", exit=json.dumps({"reason": "x" * (2 << 20)}))


async def test_an_id_that_is_not_there_or_cannot_be_one_is_not_found(records: Records) -> None:
    for job_id in ("nobody", "../jobs", "a/b", "", "\x1b[2J"):
        with pytest.raises(NotFoundError, match="ct200: "):
            await view_job(records.conn, job_id)
    assert await list_jobs(records.conn) == []


async def test_jobs_are_listed_oldest_first(records: Records) -> None:
    for n, job_id in enumerate(["c", "a", "b"]):
        await records.view(job_id, job={"id": job_id, "kind": "train", "created": 100.0 + n})
    Path(records.conn.state, "jobs", "a file").write_text("no job")
    assert [view.id for view in await list_jobs(records.conn)] == ["c", "a", "b"]


async def test_a_job_without_output_has_none(records: Records) -> None:
    records.write("quiet")
    assert await read_output(records.conn, "quiet", 100) == b""
