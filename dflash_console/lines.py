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

__all__ = ["LinePrinter", "acceptance", "demo_table", "si"]

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


class LinePrinter:
    """Writes one line for each event worth one; frequent ones are thinned out by time, never the last of a kind."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._steps = 0
        self._next_step = 0.0
        self._next_progress = 0.0

    def event(self, host: str, event: Event) -> None:
        """Write the line of an event of a job on `host`, or nothing."""
        text = self._text(event)
        if text:
            self._write(f"{host}  {text}")

    def _text(self, event: Event) -> str:
        data = event.data
        match event.type:
            case "job.started":
                start = f", resumed at step {data['start_step']}" if data.get("start_step") else ""
                return printable(f"{data.get('kind')} job {data.get('job')} started{start}", 300)
            case "train.plan":
                self._steps = int(number(data.get("steps")))
                return printable(
                    f"{data.get('steps')} steps, {data.get('target_ranks')} target + {data.get('drafter_ranks')} "
                    f"drafter ranks, block {data.get('block_size')}, taps {data.get('target_layer_ids')}, "
                    f"{si(number(data.get('parameters')))} parameters; {data.get('detail')}",
                    400,
                )
            case "train.step":
                return self._step(event)
            case "train.checkpoint":
                size = number(data.get("size_bytes")) / 1e6
                return printable(f"checkpoint {data.get('name')} written, {size:.1f} MB", 300)
            case "eval.step":
                return self._eval_step(event)
            case "eval.result":
                shares = [number(share) for share in data.get("acceptance_by_position") or []]
                return (
                    f"eval 5/5 done: tau {number(data.get('tau')):.3f} over {si(number(data.get('steps')))} "
                    f"verification steps; by position {acceptance(shares)}"
                )
            case "alert":
                return printable(f"{data.get('level')}: {data.get('message')}", 1000)
            case "job.finished":
                message = f": {data['message']}" if data.get("message") else ""
                return printable(f"job ended, {data.get('reason')}{message}", 600)
            case _:
                return ""

    def _step(self, event: Event) -> str:
        data = event.data
        step = number(data.get("step"))
        now = time.monotonic()
        if now < self._next_step and step != self._steps:
            return ""
        self._next_step = now + _STEP_INTERVAL_S
        of = f"/{self._steps}" if self._steps else ""
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
        now = time.monotonic()
        state = data.get("state")
        if state == "progress":
            if now < self._next_progress:
                return ""
            self._next_progress = now + _PROGRESS_INTERVAL_S
        head = f"eval {data.get('n')}/{data.get('of')} {data.get('name')}"
        done = f" {data.get('done')}/{data.get('total')} {data.get('unit')}" if data.get("total") else ""
        eta = number(data.get("eta_s"))
        left = f", {eta:.0f} s left" if math.isfinite(eta) and state == "progress" else ""
        detail = f" ({data['detail']})" if data.get("detail") else ""
        return printable(f"{head}: {state}{done if state == 'progress' else ''}{left}{detail}", 400)


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
