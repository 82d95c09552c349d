"""Runs the job of a job folder, outlives whoever asked for it, and leaves nothing behind but its verdict.

The supervisor is a session leader without terminal or inherited streams, and a child subreaper: whatever the
job's processes fork, and whatever session that ends up in, is re-parented here and carries the job's mark in
its environment. Asking it to stop is a file in `control/`; its own SIGTERM becomes that file. After the grace
time it ends the whole tree. Standard library only, because it must run before and after everything else.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dflash_engine import durable, layout
from dflash_engine.errors import EngineError, JobRefusedError, RecipeError
from dflash_engine.events import EventWriter, JobFinished
from dflash_engine.processes import (
    MARK_VARIABLE,
    become_subreaper,
    die_with_parent,
    end_tree,
    marked_processes,
    process_identity,
    reap_orphans,
)

__all__ = ["main", "supervise"]

_POLL_S = 0.1
_DETACH_TIMEOUT_S = 20.0
_USAGE = "usage: dflash-engine supervise JOBDIR [--detach]"


@dataclass(frozen=True)
class _Job:
    """What of `job.json` the supervisor needs."""

    id: str
    run: str | None
    argv: list[str]
    env: dict[str, str]
    cwd: str
    grace_s: float


@dataclass(frozen=True)
class _Verdict:
    reason: str
    code: int | None = None
    signal: int | None = None
    message: str = ""


class _StopRequest:
    """Whether the job was asked to end, by file or by signal, and whether its time for that is over."""

    def __init__(self, control: Path, grace_s: float) -> None:
        self._file = control / layout.CONTROL_STOP
        self._grace_s = grace_s
        self._signalled = False
        self._since: float | None = None

    def on_signal(self, *_: object) -> None:
        """Signal handler: the supervisor's own SIGTERM asks the job to stop."""
        self._signalled = True

    def seen(self) -> bool:
        """Whether anybody has asked; the grace time begins when this first says so."""
        if self._since is None and (self._signalled or self._file.exists()):
            self._since = time.monotonic()
            # A full disk keeps the request from the trainer, but not the job from ending.
            with contextlib.suppress(OSError):
                self._file.touch()
        return self._since is not None

    def overdue(self) -> bool:
        """Whether the grace time after the request is over."""
        return self.seen() and time.monotonic() - (self._since or 0.0) > self._grace_s


def main(argv: list[str]) -> int:
    """Supervise the job of a folder, here or detached; 0 once it ran (or was started), else an error's code."""
    if not argv or argv[0].startswith("-") or argv[1:] not in ([], ["--detach"]):
        sys.stderr.write(_USAGE + "\n")
        return 2
    folder = Path(argv[0]).absolute()
    try:
        if argv[1:]:
            sys.stdout.write(json.dumps(_detach(folder)) + "\n")
        else:
            supervise(folder)
    except EngineError as error:
        sys.stderr.write(f"dflash-engine: error: {error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"dflash-engine: error: the job in {folder} cannot be kept: {error}\n")
        return EngineError.exit_code
    return 0


def supervise(folder: Path) -> None:
    """Run the job to its end and write `exit.json`.

    Raises RecipeError for an unusable `job.json`, JobRefusedError where the folder was used before or another
    job holds the run, EngineError where the command cannot be started.
    """
    job = _read_job(folder)
    _require_unused(folder)
    control = folder / "control"
    control.mkdir(exist_ok=True)
    stop = _StopRequest(control, job.grace_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.on_signal)
    # Not SIG_IGN, which the job would inherit.
    signal.signal(signal.SIGHUP, lambda *_: None)
    become_subreaper()
    mark = f"{job.id}:{secrets.token_hex(8)}"
    # Once before the start, so that a supervisor that dies in between is seen to be dead.
    _record_process(folder, mark, None)
    try:
        lock = _hold_run(folder, job)
        try:
            child = _start(folder, job, mark, lock)
            verdict, leftovers = _run(child, mark, stop, job.grace_s)
        finally:
            # Before the verdict: whoever reads it may start the run's next job at once.
            if lock is not None:
                os.close(lock)
    except EngineError as error:
        _finish(folder, _Verdict("not-started", message=str(error)), 0)
        raise
    _finish(folder, verdict, leftovers)


def _read_job(folder: Path) -> _Job:
    path = folder / "job.json"
    try:
        document = json.loads(path.read_bytes())
        if document["v"] != 1:
            raise ValueError(f"version {document['v']!r}")
        job = _Job(
            id=document["id"],
            run=document["run"],
            argv=document["argv"],
            env=document["env"],
            cwd=document["cwd"],
            grace_s=float(document["grace_s"]),
        )
        if not layout.is_valid_name(job.id) or not (job.run is None or layout.is_valid_name(job.run)):
            raise ValueError(f"'id' {job.id!r} or 'run' {job.run!r} is not a name")
        texts = (*job.argv, *job.env.values(), job.cwd)
        if not isinstance(job.argv, list) or not job.argv or not all(isinstance(text, str) for text in texts):
            raise ValueError("'argv', 'env' and 'cwd' hold something other than text, or no command")
        if not job.grace_s >= 0:
            raise ValueError(f"'grace_s' is {job.grace_s}")
    except KeyError as error:
        raise RecipeError(
            f"{path} has no key {error.args[0]!r}; expected the record that the console writes"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RecipeError(f"{path} cannot be used: {error}; expected the record that the console writes") from error
    return job


def _require_unused(folder: Path) -> None:
    for name in ("process.json", "exit.json"):
        if (folder / name).exists():
            raise JobRefusedError(f"job {folder.name} was started before ({name} is there); launch a new job instead")


def _hold_run(folder: Path, job: _Job) -> int | None:
    """Lock the run of a training job; the descriptor goes to the child too and keeps the lock while it lives."""
    if job.run is None:
        return None
    run = folder.parent.parent / layout.run_dir(job.run)
    try:
        run.mkdir(parents=True, exist_ok=True)
        fd = os.open(run / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _take(fd, folder, job)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise EngineError(f"run {job.run} cannot be locked: {error}") from error
    return fd


def _take(fd: int, folder: Path, job: _Job) -> None:
    """Lock the file and write this job's id into it. Raises JobRefusedError, naming the job that holds the run."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = True
    except BlockingIOError:
        locked = False
    holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
    # The mark as well: torchrun closes what its ranks would inherit, so a rank does not keep the lock.
    alive = _left_by(folder.with_name(holder)) if layout.is_valid_name(holder) else []
    if alive or not locked:
        pids = f" (pids {', '.join(map(str, alive))})" if alive else ""
        raise JobRefusedError(
            f"run {job.run} is held by job {holder or 'unknown'}{pids}; stop that one first or wait for its end, "
            "or end its processes if it is lost"
        )
    os.ftruncate(fd, 0)
    os.pwrite(fd, job.id.encode(), 0)


def _left_by(folder: Path) -> list[int]:
    """Pids of what runs of another job; none where its records do not say how to find it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        mark = json.loads((folder / "process.json").read_bytes())["mark"]
        return [process.pid for process in marked_processes(mark)]
    return []


def _start(folder: Path, job: _Job, mark: str, lock: int | None) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        **job.env,
        "DFLASH_JOB_DIR": str(folder),
        "DFLASH_JOB_ID": job.id,
        MARK_VARIABLE: mark,
    }
    try:
        with (folder / "output.log").open("ab") as output:
            child = subprocess.Popen(
                job.argv,
                cwd=job.cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=() if lock is None else (lock,),
                # Safe here: this process has one thread, so nothing can hold a lock across the fork.
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise EngineError(f"{job.argv[0]} cannot be started in {job.cwd}: {error}") from error
    try:
        _record_process(folder, mark, child.pid)
    except OSError as error:
        end_tree(mark, child.pid)
        raise EngineError(f"{folder} cannot be written, so nobody could find the job again: {error}") from error
    return child


def _record_process(folder: Path, mark: str, child: int | None) -> None:
    me = process_identity(os.getpid())
    theirs = process_identity(child) if child is not None else None
    document = {
        "v": 1,
        "pid": os.getpid(),
        "start_ticks": me.start_ticks if me else 0,
        "boot_id": me.boot_id if me else "",
        "child_pid": child,
        "child_start_ticks": theirs.start_ticks if theirs else None,  # it may have ended already
        "mark": mark,
    }
    durable.write_json(folder / "process.json", document)


def _run(child: subprocess.Popen[bytes], mark: str, stop: _StopRequest, grace_s: float) -> tuple[_Verdict, int]:
    """Wait for the job's main process, or end it when its grace time is over; then nothing of it is left."""
    overdue = False
    while child.poll() is None and not (overdue := stop.overdue()):
        reap_orphans(child.pid)
        time.sleep(_POLL_S)
    leftovers = end_tree(mark, child.pid)
    status = child.wait()
    code, number = (status, None) if status >= 0 else (None, -status)
    if overdue:
        message = f"it did not end within {grace_s:g} s after it was asked to stop"
        return _Verdict("killed-after-grace", code, number, message), leftovers
    if number is not None:
        return _Verdict("killed", None, number, f"signal {number} ({signal.strsignal(number)})"), leftovers
    if code:
        return _Verdict("failed", code, None, f"exit code {code}"), leftovers
    return _Verdict("stopped" if stop.seen() else "finished", 0), leftovers


def _finish(folder: Path, verdict: _Verdict, leftovers: int) -> None:
    """The tree is gone: this process is the stream's writer now.

    The verdict comes before the event, so that whoever sees the event finds the verdict.
    """
    document = {
        "v": 1,
        "t": time.time(),
        "reason": verdict.reason,
        "code": verdict.code,
        "signal": verdict.signal,
        "message": verdict.message,
        "leftovers_killed": leftovers,
    }
    durable.write_json(folder / "exit.json", document)
    writer = EventWriter(folder / "events.jsonl")
    writer.write(JobFinished(verdict.reason, verdict.code, verdict.signal, verdict.message))
    writer.close()


def _detach(folder: Path) -> dict[str, Any]:
    """Start the supervisor as a session leader without our streams; returns what it recorded of itself.

    A fresh interpreter and no mere fork: it shares nothing with whoever launched it. Raises JobRefusedError or
    EngineError where it ended before it had started the job, with its reason.
    """
    _read_job(folder)
    _require_unused(folder)
    with (folder / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            # -P: what lies in the folder is no module.
            [sys.executable, "-P", "-m", "dflash_engine.supervise", str(folder)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + _DETACH_TIMEOUT_S
    while time.monotonic() < deadline:
        code = process.poll()  # before the record is read: a job may have started and ended meanwhile
        with contextlib.suppress(FileNotFoundError):
            record: dict[str, Any] = json.loads((folder / "process.json").read_bytes())
            if record["child_pid"] is not None:
                return record
        if code is not None:
            _raise_early_end(folder, code)
        time.sleep(_POLL_S / 5)
    raise EngineError(
        f"the supervisor of {folder.name} did not start its job within {_DETACH_TIMEOUT_S:.0f} s; "
        f"it may still do so, see {folder / 'supervisor.log'}"
    )


def _raise_early_end(folder: Path, code: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        verdict = json.loads((folder / "exit.json").read_bytes())
        kind = JobRefusedError if code == JobRefusedError.exit_code else EngineError
        raise kind(f"job {folder.name} was not started: {verdict['message']}")
    lines = (folder / "supervisor.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise EngineError(f"the supervisor of {folder.name} ended with code {code}: {' '.join(lines[-1:])}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
