"""The supervisor with real processes: what it records, how it ends a job, and that nothing is left of one."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_engine.events import EventReader
from dflash_engine.processes import ProcessIdentity, is_alive, marked_processes, process_identity

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 30.0

PRELUDE = "import os, signal, sys; from tell import tell\n"
WAITS = "tell('up'); signal.pause()"
"""A job that works until it is killed."""
OBEYS = """
import pathlib, time
tell('up')
while not pathlib.Path(os.environ['DFLASH_JOB_DIR'], 'control', 'stop').exists():
    time.sleep(0.02)
"""
"""A job that looks at its control folder, as the trainer does once a step."""


class JobFolder:
    """A job folder whose command is a piece of Python; `tell(text)` in it is heard by `heard()` here."""

    def __init__(self, state: Path, code: str, **changes: Any) -> None:
        job_id = changes.get("id", "job-1")
        self.path = state / "jobs" / job_id
        self.path.mkdir(parents=True)
        self._fifo = self.path / "fifo"
        os.mkfifo(self._fifo)
        # Open for both, so that it never ends while nobody speaks.
        self._ear = os.open(self._fifo, os.O_RDWR | os.O_NONBLOCK)
        self._lines: list[str] = []
        (self.path / "tell.py").write_text(
            f"def tell(text):\n    with open({str(self._fifo)!r}, 'w') as f: f.write(str(text) + chr(10))\n"
        )
        record = {
            "v": 1,
            "id": job_id,
            "kind": "train",
            "run": None,
            "argv": [sys.executable, "-c", PRELUDE + code],
            "env": {"COLOUR": "green"},
            "cwd": str(self.path),
            "engine_hash": "0" * 64,
            "grace_s": 60.0,
            "created": 0.0,
            "request": {},
        }
        (self.path / "job.json").write_text(json.dumps(record | changes))
        self._supervisors: list[subprocess.Popen[str]] = []

    def start(self, *options: str) -> subprocess.Popen[str]:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "dflash_engine.supervise", str(self.path), *options],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._supervisors.append(supervisor)
        return supervisor

    def run(self, *options: str) -> tuple[int, str]:
        """Supervise to the end (or to the detachment); the code and what stood on standard error."""
        supervisor = self.start(*options)
        _, errors = supervisor.communicate(timeout=TIMEOUT_S)
        return supervisor.returncode, errors

    def heard(self) -> str:
        """The next thing that the job told."""
        if not self._lines:
            ready, _, _ = select.select([self._ear], [], [], TIMEOUT_S)
            assert ready, f"the job said nothing: {(self.path / 'output.log').read_text()}"
            self._lines = os.read(self._ear, 4096).decode().splitlines()
        return self._lines.pop(0)

    def read(self, name: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.path / name).read_bytes())
        return document

    def supervisor(self) -> ProcessIdentity:
        record = self.read("process.json")
        return ProcessIdentity(record["pid"], record["start_ticks"], record["boot_id"])

    def close(self) -> None:
        os.close(self._ear)
        for supervisor in self._supervisors:
            supervisor.kill()
        if (self.path / "process.json").exists():
            for process in [self.supervisor(), *marked_processes(self.read("process.json")["mark"])]:
                if is_alive(process):
                    os.kill(process.pid, signal.SIGKILL)
        for supervisor in self._supervisors:
            supervisor.communicate()


Make = Callable[..., JobFolder]


@pytest.fixture
def make(tmp_path: Path) -> Any:
    folders: list[JobFolder] = []

    def factory(code: str, **changes: Any) -> JobFolder:
        folders.append(JobFolder(tmp_path / "state", code, **changes))
        return folders[-1]

    yield factory
    for folder in folders:
        folder.close()


def wait_for_end(pid: int) -> None:
    """Until the process has ended; at once where there is none."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = select.select([fd], [], [], TIMEOUT_S)
        assert ready, f"process {pid} is still there"
    finally:
        os.close(fd)


def test_a_job_that_ends_well_is_finished_and_its_records_say_so(make: Make) -> None:
    job = make("print(os.environ['COLOUR'], flush=True); print('trouble', file=sys.stderr)")
    assert job.run() == (0, "")
    verdict = job.read("exit.json")
    assert (verdict["v"], verdict["reason"], verdict["code"], verdict["signal"]) == (1, "finished", 0, None)
    assert (job.path / "output.log").read_text() == "green\ntrouble\n"
    (event,) = EventReader().feed((job.path / "events.jsonl").read_bytes())
    assert (event.type, event.data["reason"]) == ("job.finished", "finished")
    assert set(job.read("process.json")) == {
        "v",
        "pid",
        "start_ticks",
        "boot_id",
        "child_pid",
        "child_start_ticks",
        "mark",
    }


def test_the_process_record_names_the_living_supervisor_and_its_child(make: Make) -> None:
    job = make("tell(f\"{os.getpid()} {os.environ['DFLASH_JOB_MARK']} {os.environ['DFLASH_JOB_ID']}\");" + WAITS)
    supervisor = job.start("--detach")
    out, errors = supervisor.communicate(timeout=TIMEOUT_S)
    assert (supervisor.returncode, errors) == (0, "")
    pid, mark, job_id = job.heard().split()
    record = job.read("process.json")
    assert json.loads(out) == record
    assert (record["child_pid"], record["mark"], job_id) == (int(pid), mark, "job-1")
    assert mark.startswith("job-1:")
    assert is_alive(job.supervisor())
    assert process_identity(int(pid)) == ProcessIdentity(int(pid), record["child_start_ticks"], record["boot_id"])


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(3)", ("failed", 3, None)),
        ("os.kill(os.getpid(), signal.SIGKILL)", ("killed", None, 9)),
    ],
)
def test_the_verdict_is_the_main_process_own_end(make: Make, code: str, expected: tuple[Any, ...]) -> None:
    job = make(code)
    assert job.run()[0] == 0
    verdict = job.read("exit.json")
    assert (verdict["reason"], verdict["code"], verdict["signal"]) == expected
    assert verdict["message"]


def test_a_job_that_ends_well_after_a_stop_request_is_stopped(make: Make) -> None:
    job = make(OBEYS)
    supervisor = job.start()
    assert job.heard() == "up"
    (job.path / "control" / "stop").touch()
    supervisor.communicate(timeout=TIMEOUT_S)
    assert job.read("exit.json")["reason"] == "stopped"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_supervisor_is_a_stop_request_to_the_job(make: Make, number: signal.Signals) -> None:
    job = make(OBEYS)
    supervisor = job.start()
    assert job.heard() == "up"
    supervisor.send_signal(number)
    supervisor.communicate(timeout=TIMEOUT_S)
    assert (job.path / "control" / "stop").exists()
    assert job.read("exit.json")["reason"] == "stopped"


def test_a_hangup_changes_nothing(make: Make) -> None:
    job = make(OBEYS)
    supervisor = job.start()
    assert job.heard() == "up"
    supervisor.send_signal(signal.SIGHUP)
    (job.path / "control" / "stop").touch()
    supervisor.communicate(timeout=TIMEOUT_S)
    assert job.read("exit.json")["reason"] == "stopped"


def test_a_job_that_fails_after_a_stop_request_has_failed(make: Make) -> None:
    job = make(OBEYS + "raise SystemExit(7)")
    supervisor = job.start()
    assert job.heard() == "up"
    (job.path / "control" / "stop").touch()
    supervisor.communicate(timeout=TIMEOUT_S)
    assert job.read("exit.json")["reason"] == "failed"


def test_a_job_that_ignores_stop_and_sigterm_is_killed_after_its_grace(make: Make) -> None:
    job = make("signal.signal(signal.SIGTERM, signal.SIG_IGN);" + WAITS, grace_s=0.2)
    supervisor = job.start()
    assert job.heard() == "up"
    child = process_identity(job.read("process.json")["child_pid"])
    assert child is not None
    (job.path / "control" / "stop").touch()
    supervisor.communicate(timeout=TIMEOUT_S)
    verdict = job.read("exit.json")
    assert (verdict["reason"], verdict["signal"]) == ("killed-after-grace", signal.SIGKILL)
    assert not is_alive(child)


@pytest.mark.parametrize("environment", ["os.environ", "{}"])
def test_a_grandchild_in_a_session_of_its_own_does_not_outlive_the_job(make: Make, environment: str) -> None:
    job = make(
        f"""
if (middle := os.fork()) == 0:
    if os.fork() == 0:
        os.setsid()
        code = "import os, signal; from tell import tell; tell(os.getpid()); signal.pause()"
        os.execve(sys.executable, [sys.executable, "-c", code], {environment})
    os._exit(0)
os.waitpid(middle, 0)
open("end").read()
"""
    )
    os.mkfifo(job.path / "end")
    supervisor = job.start()
    grandchild = process_identity(int(job.heard()))
    assert grandchild is not None
    assert os.getsid(grandchild.pid) == grandchild.pid
    (job.path / "end").write_text("now")
    supervisor.communicate(timeout=TIMEOUT_S)
    assert not is_alive(grandchild)
    verdict = job.read("exit.json")
    assert (verdict["reason"], verdict["leftovers_killed"]) == ("finished", 1)


def test_ranks_die_with_a_supervisor_that_is_killed_and_no_verdict_appears(make: Make) -> None:
    job = make(
        """
import subprocess
rank = "import os, signal; from dflash_engine.processes import die_with_parent; die_with_parent();"
rank += "print(os.getpid(), flush=True); signal.pause()"
process = subprocess.Popen([sys.executable, "-c", rank], stdout=subprocess.PIPE, text=True, start_new_session=True)
tell(process.stdout.readline())
process.wait()
"""
    )
    supervisor = job.start()
    rank = int(job.heard())
    child = job.read("process.json")["child_pid"]
    supervisor.kill()
    wait_for_end(child)
    wait_for_end(rank)
    assert not (job.path / "exit.json").exists()
    supervisor.wait(TIMEOUT_S)
    assert not is_alive(job.supervisor())


def test_the_second_job_of_a_run_is_not_started_and_names_the_first(make: Make) -> None:
    first = make(OBEYS, id="first", run="r1")
    first.start()
    assert first.heard() == "up"
    second = make("tell('up')", id="second", run="r1")
    code, errors = second.run()
    assert code == 9
    assert "run r1 is held by job first" in errors
    verdict = second.read("exit.json")
    assert verdict["reason"] == "not-started"
    assert "held by job first" in verdict["message"]
    assert not (second.path / "output.log").exists()


def test_the_detached_start_of_a_second_job_says_why_it_was_refused(make: Make) -> None:
    first = make(OBEYS, id="first", run="r1")
    first.start()
    assert first.heard() == "up"
    code, errors = make("tell('up')", id="second", run="r1").run("--detach")
    assert code == 9
    assert errors.count("\n") == 1
    assert "run r1 is held by job first" in errors


def test_the_next_job_of_a_run_starts_once_the_verdict_of_the_one_before_is_there(make: Make) -> None:
    assert make("", id="first", run="r1").run()[0] == 0
    assert make("", id="second", run="r1").run()[0] == 0


def test_a_run_stays_held_while_its_job_outlives_a_killed_supervisor(make: Make) -> None:
    outlives = "import ctypes; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0);" + WAITS
    first = make(outlives, id="first", run="r1")
    supervisor = first.start()
    assert first.heard() == "up"
    supervisor.kill()
    supervisor.wait(TIMEOUT_S)
    child = first.read("process.json")["child_pid"]
    # Nobody is named, so nobody's mark is looked for: the lock itself is the child's too.
    (first.path.parent.parent / "runs" / "r1" / "lock").write_text("")
    assert make("", id="second", run="r1").run()[0] == 9
    os.kill(child, signal.SIGKILL)
    wait_for_end(child)
    assert make("", id="third", run="r1").run()[0] == 0


def test_a_run_stays_held_while_a_rank_that_closed_the_lock_lives(make: Make) -> None:
    first = make(
        """
import subprocess
rank = "import signal; from tell import tell; tell('up'); signal.pause()"
process = subprocess.Popen([sys.executable, "-c", rank], start_new_session=True)
tell(process.pid)
process.wait()
""",
        id="first",
        run="r1",
    )
    supervisor = first.start()
    rank = int(next(said for said in (first.heard(), first.heard()) if said != "up"))
    supervisor.kill()
    supervisor.wait(TIMEOUT_S)
    wait_for_end(first.read("process.json")["child_pid"])
    second = make("", id="second", run="r1")
    code, errors = second.run()
    assert code == 9
    assert f"run r1 is held by job first (pids {rank});" in errors
    assert second.read("exit.json")["reason"] == "not-started"
    os.kill(rank, signal.SIGKILL)
    wait_for_end(rank)
    assert make("", id="third", run="r1").run()[0] == 0


def test_a_run_that_cannot_be_locked_is_a_job_that_was_not_started(make: Make) -> None:
    job = make("tell('up')", run="r1")
    (job.path.parent.parent / "runs").write_text("no folder")
    code, errors = job.run("--detach")
    assert code == 1
    assert "run r1 cannot be locked" in errors
    assert job.read("exit.json")["reason"] == "not-started"


def test_a_detached_supervisor_has_a_session_of_its_own_and_none_of_our_streams(make: Make) -> None:
    job = make(WAITS)
    assert job.run("--detach") == (0, "")  # returns although the job runs: nobody else holds the pipes
    assert job.heard() == "up"
    supervisor = job.supervisor().pid
    assert os.getsid(supervisor) == supervisor != os.getsid(0)
    streams = [os.readlink(f"/proc/{supervisor}/fd/{fd}") for fd in range(3)]
    assert streams == ["/dev/null", "/dev/null", str(job.path / "supervisor.log")]
    child = job.read("process.json")["child_pid"]
    assert os.getsid(child) == child
    assert os.readlink(f"/proc/{child}/fd/0") == "/dev/null"
    os.kill(supervisor, signal.SIGKILL)
    wait_for_end(child)


def test_a_job_that_ends_before_the_launcher_looks_was_started(make: Make) -> None:
    job = make("")
    assert job.run("--detach") == (0, "")
    wait_for_end(job.supervisor().pid)
    assert job.read("exit.json")["reason"] == "finished"


@pytest.mark.parametrize("options", [(), ("--detach",)])
def test_a_command_that_is_not_there_is_not_started(make: Make, options: tuple[str, ...]) -> None:
    job = make("", argv=["/no/such/python"])
    code, errors = job.run(*options)
    assert code == 1
    assert "/no/such/python cannot be started" in errors
    assert "Traceback" not in errors
    assert job.read("exit.json")["reason"] == "not-started"


def test_a_folder_is_used_once(make: Make) -> None:
    job = make("tell('up')")
    assert job.run()[0] == 0
    assert job.heard() == "up"
    before = job.read("exit.json")
    code, errors = job.run("--detach")
    assert code == 9
    assert "was started before" in errors
    assert job.read("exit.json") == before


def test_a_line_torn_by_a_crash_is_ended_before_the_last_event(make: Make) -> None:
    job = make('open(\'events.jsonl\', \'w\').write(\'{"v":1,"t":1.0,"type":"train.st\')')
    assert job.run()[0] == 0
    reader = EventReader()
    events = reader.feed((job.path / "events.jsonl").read_bytes())
    assert [event.type for event in events] == ["job.finished"]
    assert reader.unreadable == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2},
        {"argv": []},
        {"argv": "ls"},
        {"argv": [1]},
        {"env": {"A": 1}},
        {"env": None},
        {"cwd": None},
        {"grace_s": -1},
        {"grace_s": "soon"},
        {"run": "../../etc"},
    ],
)
def test_an_unusable_job_record_is_one_line_and_starts_nothing(make: Make, changes: dict[str, Any]) -> None:
    job = make("tell('up')", **changes)
    code, errors = job.run()
    assert code == 3
    assert errors.startswith("dflash-engine: error: ")
    assert errors.count("\n") == 1
    assert not (job.path / "process.json").exists()


def test_a_recycled_pid_or_another_boot_is_another_process() -> None:
    me = process_identity(os.getpid())
    assert me is not None
    assert is_alive(me)
    assert not is_alive(replace(me, start_ticks=me.start_ticks + 1))
    assert not is_alive(replace(me, boot_id="another"))


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = process_identity(child.pid)
    assert identity is not None
    child.kill()
    wait_for_end(child.pid)  # ended, and not reaped yet
    assert not is_alive(identity)
    child.communicate()
