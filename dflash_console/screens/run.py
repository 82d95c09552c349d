"""Run: is it healthy, and if not, which part of it is not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal

from dflash_console.core.board import Board
from dflash_console.core.board_jobs import RunState
from dflash_console.core.curves import PHASES
from dflash_console.lines import acceptance, si
from dflash_console.screens.checkpoint_rows import checkpoint_rows
from dflash_console.screens.overview import run_taus
from dflash_console.screens.view import KeyHint, View
from dflash_console.widgets.chart import Chart
from dflash_console.widgets.columns import flow
from dflash_console.widgets.flow_text import FlowText
from dflash_console.widgets.looks import (
    DIM,
    DRAFTER,
    EVALUATION,
    GOOD,
    STRONG,
    TARGET,
    TROUBLE,
    WARN,
    age,
    bar,
    dash,
    duration,
    job_mark,
    number_text,
    plain,
    rate,
)
from dflash_console.widgets.row_list import RowList

__all__ = ["RunView", "run_facts", "run_heading"]

_SMOOTH = 10
"""Steps in a running mean: what a step's loss and rate do by themselves is mostly noise."""
_LOG_REACH = 8.0
"""A loss that shrinks by more than this is drawn on a log scale, unless the key says otherwise."""


def run_heading(board: Board, run: RunState, width: int) -> Text:
    """What it is, where it is, how far it is: one line, or two where it is narrow."""
    curve = run.curve
    job = run.job
    reachable = board.hosts[run.host].state == "up"
    parts = [
        Text.assemble((run.name, STRONG), (f" on {run.host}  ", DIM), job_mark(job.state), f" {job.state}"),
        plain(f"step {'-' if curve.step is None else curve.step}/{run.total_steps or '-'}"),
        Text.assemble(("epoch ", DIM), number_text(_number(curve.last.get("epoch")), ".2f")),
        Text.assemble((duration(curve.seconds if len(curve) else None), ""), (" of training", DIM)),
    ]
    if run.is_live:
        parts.append(Text.assemble(("left ", DIM), duration(run.eta_s())))
    if not reachable:
        told = age(board.clock() - run.last_t) if run.last_t is not None else "-"
        parts.insert(0, plain(f"? {run.host} is unreachable; as of {told} ago", WARN))
    return Text("\n").join(flow(parts, width, gap=2))


def run_facts(board: Board, run: RunState, width: int) -> Text:
    """Where a step goes, the ring, the last step, acceptance and alerts, a line each where they fit."""
    curve, plan = run.curve, run.plan
    shares = curve.shares()
    hues = {"wait": WARN, "capture": TARGET, "forward": DRAFTER, "backward": DRAFTER, "optimizer": DRAFTER}
    parts = [_label("where a step goes")]
    for name in PHASES:
        if name in shares:
            parts.append(Text.assemble((f"{name} ", DIM), bar(shares[name], 5, hues[name]), f" {shares[name]:4.0%}"))
    lines = _facts(parts, width)
    depth, slots = _number(curve.last.get("ring_depth")), _number(curve.last.get("ring_slots"))
    parts = [_label("ring")]
    if math.isfinite(depth) and slots > 0:
        parts.append(Text.assemble(bar(depth / slots, 5, TARGET), f" {depth:.0f} of {slots:.0f} full"))
    if plan:
        parts.append(plain(f"{plan.get('target_ranks', '-')} target + {plan.get('drafter_ranks', '-')} drafter ranks"))
    dropped = _number(curve.last.get("dropped"))
    if math.isfinite(dropped):
        parts.append(plain(f"dropped micro-batches {dropped:.0f}", TROUBLE if dropped > 0 else ""))
    lines += _facts(parts, width)
    parts = [_label("last step")]
    for name, form in (("accuracy", ".3f"), ("lr", ".2e"), ("grad_norm", ".3g")):
        parts.append(
            Text.assemble((f"{name.replace('_', ' ')} ", DIM), number_text(_number(curve.last.get(name)), form))
        )
    parts.append(Text.assemble(("block ", DIM), str(plan.get("block_size", "-"))))
    parts.append(Text.assemble(("parameters ", DIM), si(_number(plan.get("parameters")))))
    lines += _facts(parts, width)
    newest = next((e for e in board.ordered_evaluations() if _is_of(e.checkpoint, run.name) and e.result), None)
    parts = [_label("accepted by position")]
    if newest is not None and newest.result is not None:
        parts.append(plain(acceptance(newest.result.acceptance_by_position)))
        parts.append(plain(newest.checkpoint.partition(":")[2], DIM))
    lines += _facts(parts, width)
    parts = [_label("alerts")]
    if run.alerts:
        alert = run.alerts[-1]
        style = TROUBLE if alert.level == "error" else WARN
        ago = age(board.clock() - alert.t)
        parts.append(plain(f"{len(run.alerts)}, the last {ago} ago: {alert.message}", style))
    elif len(curve):
        parts.append(plain("none since start", GOOD))
    lines += _facts(parts, width)
    return Text("\n").join(lines)


def _label(words: str) -> Text:
    return plain(f"{words:<20}", DIM)


def _facts(parts: list[Text], width: int) -> list[Text]:
    return flow(parts if len(parts) > 1 else [*parts, dash()], width, gap=2)


def _is_of(checkpoint: str, run: str) -> bool:
    return checkpoint.partition(":")[0] == run


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


class RunView(View):
    """The selected run: charts, where its time goes, its checkpoints."""

    NAME = "Run"

    def __init__(self) -> None:
        super().__init__(id="run")
        self.log_scale: bool | None = None
        """None: as the values ask for."""

    def compose(self) -> ComposeResult:
        yield FlowText(id="run-heading")
        with Horizontal(id="run-charts"):
            yield Chart(f"loss, mean of {_SMOOTH}", DRAFTER, id="chart-loss")
            yield Chart(f"tokens/s, mean of {_SMOOTH}", TARGET, id="chart-rate")
            yield Chart("tau by checkpoint", EVALUATION, id="chart-tau")
        yield FlowText(id="run-facts")
        yield RowList(id="run-checkpoints")

    def draw(self) -> None:
        board, run = self.board, self.dashboard.selected_run()
        if run is None:
            self.query_one("#run-heading", FlowText).show(lambda width: plain(" no run yet", DIM))
            self.query_one("#run-facts", FlowText).show(lambda width: Text(""))
            self.main_list.show([])
            return
        curve = run.curve
        self.query_one("#run-heading", FlowText).show(lambda width: run_heading(board, run, width))
        steps = curve.columns["step"]
        stamp = (run.host, run.name, curve.step, len(curve))
        note = f"steps {steps[0]:.0f} to {steps[-1]:.0f}" if len(curve) else ""
        losses = curve.smoothed("loss", _SMOOTH)
        self._chart("loss").show(
            steps, losses, number_text(curve.recent_loss(), ".3f"), stamp, log=self._is_log(losses), note=note
        )
        rates = curve.smoothed_rates(_SMOOTH)
        self._chart("rate").show(steps, rates, rate(curve.recent_tokens_per_s()), stamp, note=note)
        newest, taus = run_taus(board, run.name)
        evaluated = _evaluated_steps(board, run.name)
        self._chart("tau").show(
            evaluated, taus, number_text(newest, ".3f"), (run.name, tuple(taus)), note=_steps_note(evaluated)
        )
        self.query_one("#run-facts", FlowText).show(lambda width: run_facts(board, run, width))
        rows = checkpoint_rows(board, [run.name], self.dashboard.filter_text(self))
        self.main_list.show(rows)

    def toggle_log(self) -> None:
        """Loss on the other scale."""
        run = self.dashboard.selected_run()
        if run is not None:
            self.log_scale = not self._is_log(run.curve.smoothed("loss", _SMOOTH))
            self.draw()

    def next_run(self, by: int) -> None:
        """Another run."""
        keys = [(run.host, run.name) for run in self.board.ordered_runs()]
        run = self.dashboard.selected_run()
        if keys and run is not None:
            at = keys.index((run.host, run.name))
            self.dashboard.run_key = keys[(at + by) % len(keys)]
            self.draw()

    def hints(self) -> list[KeyHint]:
        hints = self.dashboard.checkpoint_hints()
        hints.append(KeyHint("l", "log scale"))
        if len(self.board.runs) > 1:
            hints.append(KeyHint("←→", "run"))
        return hints

    def _chart(self, name: str) -> Chart:
        return self.query_one(f"#chart-{name}", Chart)

    def _is_log(self, losses: Sequence[float]) -> bool:
        if self.log_scale is not None:
            return self.log_scale
        finite = [value for value in losses if value > 0 and math.isfinite(value)]
        return bool(finite) and max(finite) > _LOG_REACH * min(finite)


def _evaluated_steps(board: Board, run: str) -> list[float]:
    steps = set()
    for evaluation in board.evaluations.values():
        name, _, checkpoint = evaluation.checkpoint.partition(":")
        step = checkpoint.removeprefix("step_")
        if name == run and step.isdigit() and evaluation.is_final:
            steps.add(int(step))
    return [float(step) for step in sorted(steps)]


def _steps_note(steps: list[float]) -> str:
    return f"steps {steps[0]:.0f} to {steps[-1]:.0f}" if len(steps) > 1 else ""
