"""What is known of a run and of an evaluation, from their jobs' events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_console.core.curves import Curve
from dflash_console.core.observations import EventSeen, JobSeen, ResultSeen
from dflash_console.core.quoting import printable
from dflash_engine.events import number

__all__ = ["STEP_NAMES", "AlertSeen", "EvaluationState", "RunState", "StepState"]

STEP_NAMES = ("target", "checkpoint", "references", "hidden states", "drafter")
"""The five steps of an evaluation, in short."""
_MOST_ALERTS = 50


@dataclass(frozen=True)
class AlertSeen:
    """An alert of a job; `t` is this machine's clock."""

    t: float
    job: str
    level: str
    message: str


@dataclass
class _TrainJob:
    seen: JobSeen
    curve: Curve = field(default_factory=Curve)
    start_step: int = 0
    saved: dict[int, float] = field(default_factory=dict)
    """Step of each checkpoint of this job -> when it was written."""


class RunState:
    """One run on the host that trains it: its jobs, its curve, its plan."""

    def __init__(self, host: str, name: str) -> None:
        self.host = host
        self.name = name
        self.jobs: dict[str, _TrainJob] = {}
        self.plan: Mapping[str, Any] = {}
        self.alerts: list[AlertSeen] = []
        self.last_t: float | None = None
        """When the latest step was made, on this machine's clock."""
        self._merged: Curve | None = None

    @property
    def job(self) -> JobSeen:
        """The latest job."""
        return self._ordered()[-1].seen

    @property
    def is_live(self) -> bool:
        """Whether a job of it runs."""
        return any(job.seen.is_live for job in self.jobs.values())

    @property
    def created(self) -> float:
        """When the latest job was made."""
        return self.job.created

    @property
    def started(self) -> float:
        """When the first job was made."""
        return self._ordered()[0].seen.created

    @property
    def total_steps(self) -> int | None:
        """The plan's steps; None where none is known yet."""
        steps = number(self.plan.get("steps"))
        return int(steps) if math.isfinite(steps) else None

    @property
    def curve(self) -> Curve:
        """All jobs' steps; where a job resumed, what earlier ones recorded after that step does not count."""
        ordered = [job for job in self._ordered() if len(job.curve)]
        if len(ordered) == 1:
            return ordered[0].curve
        if self._merged is None:
            merged = Curve()
            for job in ordered:
                merged = merged.until(job.start_step)
                merged.extend(job.curve)
            self._merged = merged
        return self._merged

    def eta_s(self) -> float:
        """Seconds of training left at the present pace; NaN where unknown or where nothing runs."""
        step, total = self.curve.step, self.total_steps
        pace = self.curve.recent_step_s()
        return (total - step) * pace if self.is_live and total and step is not None else math.nan

    def next_checkpoint(self) -> tuple[int, float] | None:
        """Step and seconds until the next checkpoint that the plan has; None where unknown."""
        every, step, total = number(self.plan.get("checkpoint_every")), self.curve.step, self.total_steps
        pace = self.curve.recent_step_s()
        if not (self.is_live and every > 0 and step is not None and total and math.isfinite(pace)):
            return None
        at = min(int((step // every + 1) * every), total)
        return (at, (at - step) * pace) if at > step else None

    def see_job(self, seen: JobSeen) -> None:
        """A job of this run as the host's listing has it."""
        known = self.jobs.get(seen.id)
        if known is None:
            self.jobs[seen.id] = _TrainJob(seen)
        else:
            known.seen = seen

    def forget_job(self, job_id: str) -> bool:
        """A job that the host has no more; whether it was of this run."""
        self._merged = None
        return self.jobs.pop(job_id, None) is not None

    def reset_job(self, job_id: str) -> None:
        """A job whose events are void."""
        self.jobs[job_id] = _TrainJob(self.jobs[job_id].seen)
        self._merged = None

    def take(self, t: float, seen: EventSeen) -> None:
        """An event of one of its jobs; `t` is this machine's clock."""
        job = self.jobs.get(seen.job)
        if job is None:
            return
        data = seen.data
        match seen.type:
            case "job.started":
                start = number(data.get("start_step"))
                job.start_step = int(start) if math.isfinite(start) else 0
                self._merged = None
            case "train.plan":
                if seen.job == self.job.id:
                    self.plan = data
            case "train.step":
                job.curve.take(t, data)
                self._merged = None
                if self.last_t is None or t > self.last_t:
                    self.last_t = t
            case "train.checkpoint":
                step = number(data.get("step"))
                if math.isfinite(step):
                    job.saved[int(step)] = t
            case "alert":
                self.alerts = [*self.alerts, _alert(t, seen)][-_MOST_ALERTS:]

    def _ordered(self) -> list[_TrainJob]:
        return sorted(self.jobs.values(), key=lambda job: (job.seen.created, job.seen.id))


@dataclass
class StepState:
    """One of the five steps. `state`: waiting, started, progress, done, cached. `seconds` once it has ended."""

    state: str = "waiting"
    done: float = 0.0
    total: float = 0.0
    unit: str = ""
    eta_s: float = math.nan
    detail: str = ""
    began: float | None = None
    seconds: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it is over, made or found ready."""
        return self.state in ("done", "cached")

    @property
    def share(self) -> float:
        """How much of it is done, 0 to 1."""
        return 1.0 if self.has_ended else min(1.0, self.done / self.total) if self.total > 0 else 0.0


class EvaluationState:
    """One evaluation on the host that makes it."""

    def __init__(self, host: str, job: JobSeen) -> None:
        self.host = host
        self.job = job
        self.steps = [StepState() for _ in STEP_NAMES]
        self.tau_so_far = math.nan
        self.told: Mapping[str, Any] = {}
        """The event `eval.result`, once it has come."""
        self.result: ResultSeen | None = None
        self.alerts: list[AlertSeen] = []
        self.last_t: float | None = None

    @property
    def checkpoint(self) -> str:
        """`RUN:step_N`; empty where neither job nor result says it."""
        return self.job.checkpoint or (self.result.checkpoint if self.result else "")

    @property
    def tau(self) -> float:
        """Acceptance length: the result's, or over the verification steps so far; NaN before."""
        if self.result is not None:
            return self.result.tau
        told = number(self.told.get("tau"))
        return told if math.isfinite(told) else self.tau_so_far

    @property
    def is_final(self) -> bool:
        """Whether tau is the whole evaluation's."""
        return self.result is not None or bool(self.told)

    @property
    def current(self) -> int | None:
        """Number, 1 to 5, of the step that is being made; None before the first and after the last."""
        for n, step in enumerate(self.steps, start=1):
            if step.state in ("started", "progress"):
                return n
        return None

    def comparable_with(self, other: EvaluationState) -> bool:
        """Whether both results come from the same prompts, target, settings and definition."""
        return (
            self.result is not None
            and other.result is not None
            and self.result.comparable != ""
            and self.result.comparable == other.result.comparable
        )

    def take(self, t: float, seen: EventSeen) -> None:
        """An event of its job; `t` is this machine's clock."""
        self.last_t = t
        data = seen.data
        match seen.type:
            case "eval.step":
                self._step(t, data)
            case "eval.result":
                self.told = data
            case "alert":
                self.alerts = [*self.alerts, _alert(t, seen)][-_MOST_ALERTS:]

    def _step(self, t: float, data: Mapping[str, Any]) -> None:
        n = number(data.get("n"))
        if n not in (1, 2, 3, 4, 5):
            return
        step = self.steps[int(n) - 1]
        step.state = str(data.get("state"))
        if step.state == "started":
            step.began = t
        if step.state == "progress":
            step.done, step.total = number(data.get("done")), number(data.get("total"))
            step.unit, step.eta_s = printable(str(data.get("unit", "")), 20), number(data.get("eta_s"))
        if step.has_ended:
            step.seconds = None if step.began is None else t - step.began
        step.detail = printable(str(data.get("detail") or ""), 200) or step.detail
        tau = number(data.get("tau"))
        if n == 5 and math.isfinite(tau):
            self.tau_so_far = tau


def _alert(t: float, seen: EventSeen) -> AlertSeen:
    level = "error" if seen.data.get("level") == "error" else "warning"
    return AlertSeen(t, seen.job, level, printable(str(seen.data.get("message", "")), 500))
