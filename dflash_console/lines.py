"""Events of jobs as plain lines: what a person without a dashboard reads, one fact a line, nothing redrawn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dflash_console.core.quoting import printable
from dflash_engine.events import Event, number

if TYPE_CHECKING:
    from dflash_console.core.demo import DemoSummary

__all__ = ["LinePrinter", "acceptance", "demo_table", "event_text", "si"]

_STEP_INTERVAL_S = 2.0
_PROGRESS_INTERVAL_S = 3.0


def si(value: float) -> str:
    """A count per second with three digits and its prefix: 987, 4.12K, 19.5K, 1.20M; a dash where unknown."""
    if not math.isfinite(value):
        return "-"
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, "K"), (1e9, 1e6, "M")):
        if abs(value) < limit:
            scaled = value / divisor
            return f"{scaled:.0f}" if not unit else f"{scaled:#.3g}".rstrip(".") + unit
    return f"{value:.3g}"


def acceptance(shares: list[float]) -> str:
    """Acceptance by position: `1 .42  2 .15  3 .05`."""
    return "  ".join(f"{k} {share:.2f}".replace(" 0.", " .") for k, share in enumerate(shares, start=1))


def event_text(event: Event) -> str:
    """An event as a line of its own, for those that come once; empty for others. Made printable by the caller."""
    data = event.data
    match event.type:
        case "job.started":
            start = f", resumed at step {data['start_step']}" if data.get("start_step") else ""
            return f"{data.get('kind')} job {data.get('job')} started{start}"
        case "train.plan":
            return (
                f"{data.get('steps')} steps, {data.get('target_ranks')} target + {data.get('drafter_ranks')} "
                f"drafter ranks, block {data.get('block_size')}, taps {data.get('target_layer_ids')}, "
                f"{si(number(data.get('parameters')))} parameters; {data.get('detail')}"
            )
        case "train.checkpoint":
            return f"checkpoint {data.get('name')} written, {number(data.get('size_bytes')) / 1e6:.1f} MB"
        case "eval.step":
            if data.get("state") in ("started", "progress"):
                return ""  # its end says more
            detail = f" ({data['detail']})" if data.get("detail") else ""
            return f"eval {data.get('n')}/{data.get('of')} {data.get('name')}: {data.get('state')}{detail}"
        case "eval.result":
            shares = data.get("acceptance_by_position")
            by_position = acceptance([number(share) for share in shares] if isinstance(shares, list) else [])
            return (
                f"eval done: tau {number(data.get('tau')):.3f} over {si(number(data.get('steps')))} "
                f"verification steps; by position {by_position}"
            )
        case "alert":
            return f"{data.get('level')}: {data.get('message')}"
        case "job.finished":
            message = f": {data['message']}" if data.get("message") else ""
            return f"job ended, {data.get('reason')}{message}"
        case _:
            return ""


class LinePrinter:
    """Writes one line for each event worth one; frequent ones are thinned out by time, never the last of a kind."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._steps = math.nan
        self._next_step = 0.0
        self._next_progress = 0.0

    def event(self, host: str, event: Event) -> None:
        """Write the line of an event of a job on `host`, or nothing. What the host wrote is made printable."""
        text = self._text(event)
        if text:
            self._write(printable(f"{host}  {text}", 1000))

    def _text(self, event: Event) -> str:
        match event.type:
            case "train.plan":
                self._steps = number(event.data.get("steps"))
            case "train.step":
                return self._step(event)
            case "eval.step":
                return self._eval_step(event)
        return event_text(event)

    def _step(self, event: Event) -> str:
        data = event.data
        step = number(data.get("step"))
        now = time.monotonic()
        if now < self._next_step and step != self._steps:
            return ""
        self._next_step = now + _STEP_INTERVAL_S
        of = f"/{self._steps:.0f}" if self._steps > 0 else ""
        took = number(data.get("step_s"))
        waiting = number(data.get("wait_s")) / took if took > 0 else math.nan
        dropped = f"  dropped {data['dropped']}" if data.get("dropped") else ""
        return (
            f"step {step:.0f}{of}  loss {number(data.get('loss')):.3f}  accuracy {number(data.get('accuracy')):.3f}  "
            f"{si(number(data.get('tokens_per_s')))} tokens/s  epoch {number(data.get('epoch')):.2f}  "
            f"ring {data.get('ring_depth')}/{data.get('ring_slots')}  waiting for data {waiting:.0%}{dropped}"
        )

    def _eval_step(self, event: Event) -> str:
        data = event.data
        if data.get("state") != "progress":
            return event_text(event)
        now = time.monotonic()
        if now < self._next_progress:
            return ""
        self._next_progress = now + _PROGRESS_INTERVAL_S
        eta, tau = number(data.get("eta_s")), number(data.get("tau"))
        left = f", {eta:.0f} s left" if math.isfinite(eta) else ""
        so_far = f", tau so far {tau:.3f}" if math.isfinite(tau) else ""
        return (
            f"eval {data.get('n')}/{data.get('of')} {data.get('name')}: progress {data.get('done')}/"
            f"{data.get('total')} {data.get('unit')}{left}{so_far}"
        )


def demo_table(summary: DemoSummary, *, keep: bool) -> list[str]:
    """The demo's result as lines of two columns: numbers, where everything lies, how to look further."""
    before, after = summary.untrained, summary.trained
    if summary.gain >= summary.expected_gain:
        verdict = f"+{summary.gain:.2f} (at least +{summary.expected_gain:.2f} is expected of the shipped recipe)"
    else:
        verdict = f"{summary.gain:+.2f}: SHORT of the +{summary.expected_gain:.2f} expected of the shipped recipe"
    rows = [
        ("run", summary.run),
        ("steps", f"{summary.steps}, {si(summary.tokens)} tokens in {summary.train_s:.0f} s of training"),
        ("tokens/s", f"{si(summary.tokens_per_s)}, waits included"),
        ("loss", f"{summary.loss_first:.3f} -> {summary.loss_last:.3f} (mean of the last ten steps)"),
        (
            "tau untrained",
            f"{before.tau:.3f}  per prompt {before.tau_per_prompt:.3f}  {before.steps} verification steps",
        ),
        (
            "tau trained",
            f"{after.tau:.3f}  per prompt {after.tau_per_prompt:.3f}  {after.steps} verification steps",
        ),
        ("gain", verdict),
        ("by position", f"untrained {acceptance(before.acceptance_by_position)}"),
        ("", f"trained   {acceptance(after.acceptance_by_position)}"),
        ("prompts", f"{after.prompts} held out, greedy, float32"),
        ("checkpoint", summary.checkpoint),
        ("staged copy", summary.staged),
        ("results", f"{before.path}/result.json"),
        ("", f"{after.path}/result.json"),
        ("whole demo", f"{summary.seconds:.0f} s"),
    ]
    lines = ["", *(f"{name:<14} {value}" for name, value in rows), ""]
    if keep:
        command = "dflash-console --profile demo"
        lines += [
            "The hosts are still up. Look further with",
            f"  {command} checkpoints",
            f"  {command} jobs",
            f"  {command} run-eval --host ct129",
            "  dflash-console demo --stop",
        ]
    else:
        lines += ["The hosts are stopped; what they made stays. Keep them up with: dflash-console demo --keep"]
    return lines
