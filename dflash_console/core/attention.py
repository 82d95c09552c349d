"""What needs a person: the rules that turn the board's state into a short list, the worst first.

Each says what was found and, where it can be known, why. A host that cannot be reached says nothing about its
jobs, so nothing old is counted against them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dflash_console.core.board import Board, HostState
from dflash_console.core.board_jobs import EvaluationState, RunState
from dflash_engine.events import number

__all__ = ["Attention", "attention"]

_SLOW_SHARE = 0.8
_SILENT_LEAST_S = 60.0
_SILENT_STEPS = 20
_CLOCK_SKEW_S = 2.0
_DISK_LEAST_BYTES = 2 << 30
_BAD_END_HOURS = 24.0
_WAITING_SHARE = 0.5
_ALERT_HOURS = 1.0


@dataclass(frozen=True)
class Attention:
    """One line. `key` is what `enter` opens: ("host", name), ("run", host, run) or ("evaluation", host, job)."""

    level: Literal["error", "warning"]
    subject: str
    text: str
    key: tuple[str, ...]


def attention(board: Board) -> list[Attention]:
    """Everything that needs somebody, errors first."""
    found: list[Attention] = []
    for host in board.hosts.values():
        found += _host(board, host)
    for run in board.ordered_runs():
        if board.hosts[run.host].state == "up":
            found += _run(board, run)
    for evaluation in board.ordered_evaluations():
        if board.hosts[evaluation.host].state == "up":
            found += _evaluation(board, evaluation)
    for transfer in board.ordered_transfers():
        if transfer.state in ("failed", "interrupted") and _is_latest_of_its_kind(board, transfer.id):
            what = f"{transfer.checkpoint} → {transfer.destination}"
            text = f"staging {what} {transfer.state}: {transfer.message}"
            found.append(Attention("error", transfer.run, text, ("checkpoint", transfer.run, transfer.checkpoint)))
    return sorted(found, key=lambda item: item.level != "error")


def _host(board: Board, host: HostState) -> list[Attention]:
    key = ("host", host.name)
    if host.state == "unreachable":
        since = _age(board.clock() - host.since)
        retry = "" if host.retry_at is None else f"; next try in {max(0.0, host.retry_at - board.clock()):.0f} s"
        reason = host.fault.removeprefix(f"{host.name} ").removeprefix(f"{host.name}: ").rstrip(".")
        text = f"unreachable for {since}{retry}: {reason}"
        return [Attention("error", host.name, text, key)]
    found = []
    if host.state == "up" and abs(host.clock_offset_s) > _CLOCK_SKEW_S:
        way = "ahead of" if host.clock_offset_s > 0 else "behind"
        text = f"its clock is {abs(host.clock_offset_s):.1f} s {way} this machine's; ages are corrected for it"
        found.append(Attention("warning", host.name, text, key))
    free = host.load.disk_free_bytes if host.load else None
    if host.state == "up" and free is not None and free < _DISK_LEAST_BYTES:
        found.append(Attention("error", host.name, f"{free / 1e9:.1f} GB of disk are free", key))
    return found


def _run(board: Board, run: RunState) -> list[Attention]:
    key = ("run", run.host, run.name)
    now = board.clock()

    def line(level: Literal["error", "warning"], text: str) -> Attention:
        return Attention(level, run.host, f"{run.name}  {text}", key)

    found = []
    job, curve = run.job, run.curve
    if job.ended_badly and now - job.created < _BAD_END_HOURS * 3600:
        found.append(line("error", f"{job.state}: {job.reason}"))
    if len(curve) and not math.isfinite(curve.columns["loss"][-1]):
        found.append(line("error", f"the loss of step {curve.step} is {curve.columns['loss'][-1]}"))
    if run.is_live:
        pace = curve.recent_step_s()
        silent = now - run.last_t if run.last_t is not None else 0.0
        if silent > max(_SILENT_LEAST_S, _SILENT_STEPS * (pace if math.isfinite(pace) else 0.0)):
            found.append(line("error", f"no step for {_age(silent)}; the job still runs"))
        else:
            recent, usual = curve.recent_tokens_per_s(), curve.median_tokens_per_s()
            if recent < _SLOW_SHARE * usual:
                text = f"{recent:.0f} tokens/s, {recent / usual:.0%} of its median{_bottleneck(run)}"
                found.append(line("warning", text))
    live = {alert.job for alert in run.alerts} & {job_id for job_id, j in run.jobs.items() if j.seen.is_live}
    fresh = [alert for alert in run.alerts if alert.job in live and now - alert.t < _ALERT_HOURS * 3600]
    if fresh:
        last = fresh[-1]
        found.append(line("error" if last.level == "error" else "warning", last.message))
    return found


def _bottleneck(run: RunState) -> str:
    last = run.curve.last
    waiting = run.curve.shares().get("wait", 0.0)
    depth, slots = number(last.get("ring_depth")), number(last.get("ring_slots"))
    ring = f" (ring {depth:.0f}/{slots:.0f})" if math.isfinite(depth) and math.isfinite(slots) else ""
    return f": waiting for data{ring}" if waiting > _WAITING_SHARE else ""


def _evaluation(board: Board, evaluation: EvaluationState) -> list[Attention]:
    job = evaluation.job
    if not job.ended_badly or board.clock() - job.created > _BAD_END_HOURS * 3600:
        return []
    newer = [
        other
        for other in board.evaluations_of(evaluation.checkpoint)
        if other.job.created > job.created and not other.job.ended_badly
    ]
    if newer:
        return []
    errors = [alert.message for alert in evaluation.alerts if alert.level == "error"]
    why = errors[-1] if errors else job.reason
    text = f"evaluation of {evaluation.checkpoint or job.id} {job.state}: {why}"
    return [Attention("error", evaluation.host, text, ("evaluation", evaluation.host, job.id))]


def _is_latest_of_its_kind(board: Board, transfer_id: str) -> bool:
    ids = list(board.transfers)
    asked = board.transfers[transfer_id]
    later = [board.transfers[i] for i in ids[ids.index(transfer_id) + 1 :]]
    same = (asked.run, asked.checkpoint, asked.destination)
    if any((t.run, t.checkpoint, t.destination) == same for t in later):
        return False
    state = board.checkpoints.get((asked.run, asked.checkpoint))
    return state is None or asked.destination not in state.copies


def _age(seconds: float) -> str:
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
