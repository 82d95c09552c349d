"""The board: everything that is known now, put together from observations, read by whoever shows it.

One `apply` for a live watch and a replay alike. It holds no widget, asks no host and keeps bounded amounts.
`version` changes whenever something did, so that a reader redraws at its own pace and only when it must.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dflash_console.core.board_jobs import EvaluationState, RunState
from dflash_console.core.observations import (
    CheckpointSeen,
    CheckpointsSeen,
    EventSeen,
    HostSeen,
    JobReset,
    JobSeen,
    JobsSeen,
    LoadSeen,
    Observation,
    ResultSeen,
    Said,
    TransferSeen,
)
from dflash_engine.events import Event

__all__ = ["Board", "CheckpointState", "HostState", "LogLine", "Roles"]

_LOG_LINES = 2000
_NOT_LOGGED = frozenset({"train.step", "eval.prompt"})


@dataclass(frozen=True)
class Roles:
    """What the profile says that a host is for."""

    train: bool = False
    evaluate: bool = False


@dataclass
class HostState:
    """One host of the profile. Times are the board's clock."""

    name: str
    roles: Roles
    state: str = "connecting"
    fault: str = ""
    since: float = 0.0
    """Since when it is in this state."""
    retry_at: float | None = None
    clock_offset_s: float = 0.0
    load: LoadSeen | None = None
    load_at: float = 0.0
    listed: bool = False
    """Whether its jobs and checkpoints have been listed once."""


@dataclass
class CheckpointState:
    """A checkpoint by run and name, wherever it lies."""

    run: str
    name: str
    step: int | None
    copies: dict[str, CheckpointSeen] = field(default_factory=dict)

    @property
    def any_copy(self) -> CheckpointSeen:
        """The most complete copy."""
        order = {"whole": 0, "model only": 1, "foreign": 2, "incomplete": 3}
        return min(self.copies.values(), key=lambda copy: order.get(copy.state, 9))


@dataclass(frozen=True)
class LogLine:
    """Something worth a line: an event of a job, or (without one) the console's own words."""

    t: float
    host: str
    job: str
    event: Event | None
    text: str = ""
    level: str = "info"


class Board:
    """What is known. `clock` gives Unix seconds of this machine, or of the moment that a replay is at."""

    def __init__(self, name: str, hosts: Mapping[str, Roles], clock: Callable[[], float] = time.time) -> None:
        self.name = name
        self.clock = clock
        self.version = 0
        self.hosts = {host: HostState(host, roles, since=clock()) for host, roles in hosts.items()}
        self.runs: dict[tuple[str, str], RunState] = {}
        self.evaluations: dict[tuple[str, str], EvaluationState] = {}
        self.checkpoints: dict[tuple[str, str], CheckpointState] = {}
        self.transfers: dict[str, TransferSeen] = {}
        self.log: deque[LogLine] = deque(maxlen=_LOG_LINES)
        self._jobs: dict[tuple[str, str], JobSeen] = {}

    def add_hosts(self, hosts: Mapping[str, Roles]) -> None:
        """Hosts that became known later."""
        for name, roles in hosts.items():
            self.hosts.setdefault(name, HostState(name, roles, since=self.clock())).roles = roles
        self.version += 1

    def apply(self, seen: Observation) -> None:
        """Take in one observation; one of a host that is not the board's is ignored."""
        host = getattr(seen, "host", None)
        if host is not None and host not in self.hosts:
            return
        match seen:
            case HostSeen():
                self._host(seen)
            case LoadSeen():
                self.hosts[seen.host].load = seen
                self.hosts[seen.host].load_at = self.clock()
            case JobsSeen():
                self._jobs_of(seen.host, seen.jobs)
            case JobReset():
                self._reset(seen)
            case EventSeen():
                self._event(seen)
            case CheckpointsSeen():
                self._checkpoints_of(seen.host, seen.checkpoints)
            case ResultSeen():
                if (seen.host, seen.job) in self.evaluations:
                    self.evaluations[seen.host, seen.job].result = seen
            case TransferSeen():
                self._transfer(seen)
            case Said():
                self.log.append(LogLine(self.clock(), "", "", None, seen.text, seen.level))
        self.version += 1

    # What readers ask

    def ordered_runs(self) -> list[RunState]:
        """Live runs first, then the newest."""
        return sorted(self.runs.values(), key=lambda run: (not run.is_live, -run.created))

    def ordered_evaluations(self) -> list[EvaluationState]:
        """Live evaluations first, then the newest."""
        return sorted(self.evaluations.values(), key=lambda e: (not e.job.is_live, -e.job.created))

    def ordered_transfers(self) -> list[TransferSeen]:
        """Running ones first, then the latest."""
        latest_first = list(self.transfers.values())[::-1]
        return sorted(latest_first, key=lambda transfer: transfer.state != "running")

    def checkpoints_of(self, run: str) -> list[CheckpointState]:
        """A run's checkpoints on all hosts, the highest step first, unfinished ones last."""
        found = [state for state in self.checkpoints.values() if state.run == run]
        return sorted(found, key=lambda state: (state.step is None, -(state.step or 0), state.name))

    def run_names(self) -> list[str]:
        """Runs that are known by a job or by a checkpoint, in the order of `ordered_runs`, then by name."""
        names = [run.name for run in self.ordered_runs()]
        return list(dict.fromkeys([*names, *sorted({state.run for state in self.checkpoints.values()})]))

    def newest_usable(self, run: str, host: str | None = None) -> CheckpointState | None:
        """The highest step of a run that can be staged and evaluated, on any host or on one."""
        for state in self.checkpoints_of(run):
            copies = state.copies.values() if host is None else [state.copies[host]] if host in state.copies else []
            if state.step is not None and any(copy.is_usable for copy in copies):
                return state
        return None

    def evaluations_of(self, checkpoint: str) -> list[EvaluationState]:
        """The evaluations of `RUN:step_N`, live ones first, then the newest."""
        return [e for e in self.ordered_evaluations() if e.checkpoint == checkpoint]

    def earlier_result(self, evaluation: EvaluationState) -> EvaluationState | None:
        """The finished evaluation of the nearest lower step of the same run, comparable ones preferred."""
        run, step = _split(evaluation.checkpoint)
        earlier = [
            (other.comparable_with(evaluation), _split(other.checkpoint)[1], other.job.created, other)
            for other in self.evaluations.values()
            if other.result is not None and _split(other.checkpoint)[0] == run and _split(other.checkpoint)[1] < step
        ]
        return max(earlier, key=lambda found: found[:3])[3] if earlier else None

    def transfer_of(self, run: str, checkpoint: str, destination: str) -> TransferSeen | None:
        """The running transfer of a checkpoint to a host."""
        for transfer in self.transfers.values():
            where = (transfer.run, transfer.checkpoint, transfer.destination)
            if transfer.state == "running" and where == (run, checkpoint, destination):
                return transfer
        return None

    # How observations change it

    def _host(self, seen: HostSeen) -> None:
        host = self.hosts[seen.host]
        now = self.clock()
        # A retry that fails again is the same outage: its age counts from the first.
        is_same = host.state == seen.state or (host.state == "unreachable" and seen.state == "connecting")
        if not is_same:
            host.since = now
            if seen.state == "unreachable":
                self.log.append(LogLine(now, seen.host, "", None, f"unreachable: {seen.fault}", "error"))
            elif seen.state == "up":
                self.log.append(LogLine(now, seen.host, "", None, "connected"))
        if host.state == "unreachable" and seen.state == "connecting":
            return
        host.state, host.fault = seen.state, seen.fault
        host.retry_at = None if seen.retry_s is None else now + seen.retry_s
        if seen.state == "up":
            host.clock_offset_s = seen.clock_offset_s

    def _jobs_of(self, host: str, jobs: Sequence[JobSeen]) -> None:
        self.hosts[host].listed = True
        present = {job.id for job in jobs}
        for key in [key for key in self._jobs if key[0] == host and key[1] not in present]:
            self._forget(key)
        for job in jobs:
            self._jobs[host, job.id] = job
            if job.kind == "train" and job.run:
                run = self.runs.setdefault((host, job.run), RunState(host, job.run))
                run.see_job(job)
            elif job.kind == "evaluate":
                known = self.evaluations.get((host, job.id))
                if known is None:
                    self.evaluations[host, job.id] = EvaluationState(host, job)
                else:
                    known.job = job

    def _forget(self, key: tuple[str, str]) -> None:
        del self._jobs[key]
        self.evaluations.pop(key, None)
        for run_key, run in list(self.runs.items()):
            if run_key[0] == key[0] and run.forget_job(key[1]) and not run.jobs:
                del self.runs[run_key]

    def _reset(self, seen: JobReset) -> None:
        job = self._jobs.get((seen.host, seen.job))
        if job is None:
            return
        if (seen.host, seen.job) in self.evaluations:
            self.evaluations[seen.host, seen.job] = EvaluationState(seen.host, job)
        elif (seen.host, job.run) in self.runs:
            self.runs[seen.host, job.run].reset_job(seen.job)

    def _event(self, seen: EventSeen) -> None:
        job = self._jobs.get((seen.host, seen.job))
        t = seen.t - self.hosts[seen.host].clock_offset_s
        if seen.type not in _NOT_LOGGED and not (seen.type == "eval.step" and seen.data.get("state") == "progress"):
            self.log.append(LogLine(t, seen.host, seen.job, Event(t, seen.type, seen.data)))
        if job is None:
            return
        if (seen.host, seen.job) in self.evaluations:
            self.evaluations[seen.host, seen.job].take(t, seen)
        elif (seen.host, job.run) in self.runs:
            self.runs[seen.host, job.run].take(t, seen)

    def _checkpoints_of(self, host: str, checkpoints: Sequence[CheckpointSeen]) -> None:
        for key in [key for key, state in self.checkpoints.items() if host in state.copies]:
            del self.checkpoints[key].copies[host]
        for copy in checkpoints:
            key = (copy.run, copy.name)
            state = self.checkpoints.setdefault(key, CheckpointState(copy.run, copy.name, copy.step))
            state.copies[host] = copy
        for key in [key for key, state in self.checkpoints.items() if not state.copies]:
            del self.checkpoints[key]

    def _transfer(self, seen: TransferSeen) -> None:
        before = self.transfers.get(seen.id)
        self.transfers[seen.id] = seen
        if seen.state != "running" and (before is None or before.state == "running"):
            what = f"{seen.run}:{seen.checkpoint} {seen.source} → {seen.destination}"
            words = "staged, SHA-256 verified on both ends" if seen.state == "done" else f"{seen.state}: {seen.message}"
            level = "info" if seen.state == "done" else "error"
            self.log.append(LogLine(self.clock(), "", "", None, f"{what}: {words}", level))


def _split(checkpoint: str) -> tuple[str, int]:
    run, _, name = checkpoint.partition(":")
    step = name.removeprefix("step_")
    return run, int(step) if step.isdigit() else -1
