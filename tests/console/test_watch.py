"""Watching real hosts: what they do appears on the board, what they suffer is said, nothing is told twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

from dflash_console.core.board import Board
from dflash_console.core.live import LiveSource
from dflash_console.core.operations import Operations
from dflash_console.core.profiles import Profile
from dflash_engine.processes import process_identity
from tests.checkpoint_folders import make_checkpoint
from tests.hosts import OpenSSHHost


def line(kind: str, **data: object) -> bytes:
    return json.dumps({"v": 1, "t": time.time(), "type": kind, **data}).encode() + b"\n"


class Job:
    """A job folder on a host; this test's process stands for its supervisor."""

    def __init__(self, host: OpenSSHHost, name: str = "train-1", kind: str = "train", checkpoint: str = "") -> None:
        self.path = Path(host.profile.state) / "jobs" / name
        self.path.mkdir(parents=True)
        run = "demo" if kind == "train" else None
        record = {"id": name, "kind": kind, "created": time.time(), "run": run, "request": {"checkpoint": checkpoint}}
        identity = process_identity(os.getpid())
        assert identity is not None
        (self.path / "process.json").write_text(json.dumps(asdict(identity)))
        (self.path / "job.json").write_text(json.dumps(record))

    def append(self, data: bytes) -> None:
        with (self.path / "events.jsonl").open("ab") as file:
            file.write(data)

    def steps(self, *numbers: int) -> None:
        self.append(b"".join(line("train.step", step=n, loss=1.0, tokens=10, step_s=0.1) for n in numbers))

    def end(self, reason: str) -> None:
        (self.path / "exit.json").write_text(json.dumps({"reason": reason, "message": ""}))


@asynccontextmanager
async def watching(tmp_path: Path, *hosts: OpenSSHHost) -> AsyncIterator[Board]:
    profile = Profile(name="lab", path=tmp_path / "lab.toml", hosts={h.profile.name: h.profile for h in hosts})
    source = LiveSource(profile, Operations(tmp_path / "operations"))
    task = asyncio.create_task(source.run())
    try:
        yield source.board
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(true: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():  # a board has no event of its own
            await asyncio.sleep(0.02)


def steps_of(board: Board) -> list[float]:
    run = board.runs.get(("ct200", "demo"))
    return list(run.curve.columns["step"]) if run else []


async def test_a_run_that_somebody_else_started_is_found_with_all_that_it_did(
    openssh: OpenSSHHost, tmp_path: Path
) -> None:
    job = Job(openssh)
    job.steps(*range(1, 2001))
    make_checkpoint(Path(openssh.profile.state), "demo", 5)
    async with watching(tmp_path, openssh) as board:
        await until(lambda: len(steps_of(board)) == 2000 and board.newest_usable("demo"))
        assert board.runs["ct200", "demo"].is_live
        load = board.hosts["ct200"].load
        assert load is not None
        assert load.memory_total_bytes
        await until(lambda: (found := board.hosts["ct200"].load) and found.cpu_share is not None)
        job.steps(2001)
        await until(lambda: steps_of(board)[-1] == 2001)
        job.end("finished")
        await until(lambda: not board.runs["ct200", "demo"].is_live)


async def test_a_lost_connection_is_said_made_again_and_costs_no_step(openssh: OpenSSHHost, tmp_path: Path) -> None:
    job = Job(openssh)
    job.steps(1, 2, 3)
    async with watching(tmp_path, openssh) as board:
        await until(lambda: steps_of(board) == [1, 2, 3])
        openssh.signal_connections(signal.SIGKILL)
        await until(lambda: board.hosts["ct200"].state == "unreachable")
        assert board.runs["ct200", "demo"].is_live  # unreachable is not failed
        job.steps(4, 5)
        await until(lambda: board.hosts["ct200"].state == "up" and steps_of(board) == [1, 2, 3, 4, 5])
        assert sum(entry.event is not None and entry.event.type == "train.step" for entry in board.log) == 0
        assert any("unreachable" in entry.text for entry in board.log)


async def test_a_stopped_host_is_noticed_and_holds_up_no_other(tmp_path: Path) -> None:
    first, second = OpenSSHHost(tmp_path, "ct200"), OpenSSHHost(tmp_path, "ct129")
    try:
        Job(first).steps(1)
        other = Job(second, "eval-1", "evaluate", "demo:step_5")
        async with watching(tmp_path, first, second) as board:
            await until(lambda: steps_of(board) == [1] and board.evaluations)
            first.signal_connections(signal.SIGSTOP)
            stopped = time.monotonic()
            try:
                other.append(line("eval.step", n=1, name="target", state="done"))
                await until(lambda: board.evaluations["ct129", "eval-1"].steps[0].has_ended, 5.0)
                await until(lambda: board.hosts["ct200"].state == "unreachable", 25.0)
                assert time.monotonic() - stopped < 20
                assert board.hosts["ct129"].state == "up"
            finally:
                first.signal_connections(signal.SIGCONT)
    finally:
        first.close()
        second.close()


async def test_a_file_that_was_replaced_is_read_anew(openssh: OpenSSHHost, tmp_path: Path) -> None:
    job = Job(openssh)
    job.steps(*range(1, 11))
    async with watching(tmp_path, openssh) as board:
        await until(lambda: len(steps_of(board)) == 10)
        (job.path / "events.jsonl").write_bytes(line("train.step", step=1, loss=5.0, tokens=1, step_s=1.0))
        await until(lambda: steps_of(board) == [1])


async def test_a_line_that_is_no_event_is_said_and_the_others_count(openssh: OpenSSHHost, tmp_path: Path) -> None:
    job = Job(openssh)
    job.append(b"\xff\xfe rubbish\n")
    job.steps(1)
    async with watching(tmp_path, openssh) as board:
        await until(lambda: steps_of(board) == [1] and any("cannot be read" in entry.text for entry in board.log))
