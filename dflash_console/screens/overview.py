"""Overview: what needs somebody, what runs, what is newest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.text import Text
from textual.app import ComposeResult

from dflash_console.core.attention import attention
from dflash_console.core.board import Board, HostState
from dflash_console.core.board_jobs import STEP_NAMES, EvaluationState, RunState
from dflash_console.core.observations import TransferSeen
from dflash_console.screens.view import KeyHint, View
from dflash_console.widgets.columns import Column, fit, header, line, wrap
from dflash_console.widgets.looks import (
    DIM,
    EVALUATION,
    GOOD,
    STRONG,
    TITLE,
    TRANSFER,
    TROUBLE,
    WARN,
    age,
    bar,
    dash,
    duration,
    glyph,
    host_mark,
    job_mark,
    number_text,
    plain,
    rate,
    size,
    spark,
)
from dflash_console.widgets.row_list import Row, RowList

__all__ = ["NARROW", "SECTIONS", "OverviewView", "overview_rows"]

NARROW = 100
"""Below this width one section is shown at a time."""
SECTIONS = ("runs", "evaluations", "transfers", "hosts")
_MOST = {"runs": 6, "evaluations": 6, "transfers": 4}

_HOSTS = (
    Column("", 1),
    Column("", 12, grow=1),
    Column("load", 5, "right"),
    Column("memory", 13, "right"),
    Column("disk free", 9, "right"),
    Column("target GPUs", 12, "right", rank=2),
    Column("drafter GPUs", 12, "right", rank=2),
    Column("clock", 8, "right", rank=1),
)
_RUNS = (
    Column("", 1),
    Column("", 12, grow=3),
    Column("step", 11, "right"),
    Column("tokens/s", 14, "right", rank=1),
    Column("loss", 14, "right"),
    Column("tau", 12, "right"),
    Column("newest whole", 17, rank=2),
    Column("next", 8, "right", rank=3),
)
_EVALUATIONS = (
    Column("", 1),
    Column("", 12, grow=3),
    Column("host", 7, rank=1),
    Column("step", 19),
    Column("", 12, rank=2),
    Column("left", 9, "right", rank=1),
    Column("tau", 7, "right"),
    Column("age", 6, "right"),
)
_TRANSFERS = (
    Column("", 1),
    Column("", 12, grow=3),
    Column("from, to", 15),
    Column("", 10, rank=2),
    Column("size", 17, "right"),
    Column("rate", 9, "right", rank=1),
    Column("", 20, rank=1, grow=1),
)


def overview_rows(board: Board, *, section: str | None) -> list[Row]:
    """The lines of the overview; `section` names the only one that is shown besides attention."""
    rows = _attention_rows(board)
    builders: dict[str, Callable[[Board], list[Row]]] = {
        "hosts": _host_rows,
        "runs": _run_rows,
        "evaluations": _evaluation_rows,
        "transfers": _transfer_rows,
    }
    if section is not None:
        rows += [Row.of(_tabs(board, section)), *builders[section](board)]
        if section == "runs":
            rows = _with_details(board, rows)
        return rows
    for name in ("hosts", "runs", "evaluations", "transfers"):
        rows += [Row.of(Text("")), *builders[name](board)]
    return rows


def _tabs(board: Board, chosen: str) -> Text:
    counts = {
        "runs": len(board.runs),
        "evaluations": len(board.evaluations),
        "transfers": len(board.transfers),
        "hosts": len(board.hosts),
    }
    parts = [plain(f"{name} {counts[name]}", STRONG + " reverse" if name == chosen else DIM) for name in SECTIONS]
    return Text(" ") + Text("   ").join(parts)


def _section(
    title: str,
    columns: Sequence[Column],
    rows: Sequence[tuple[tuple[str, ...], Sequence[Text]]],
    empty: str,
    more: int = 0,
) -> list[Row]:
    """A section: titles, then its rows; one dim line where there are none."""
    if not rows:
        return [Row.of(Text.assemble((f" {title}", TITLE), (f"  {empty}", DIM), no_wrap=True))]

    def titles(width: int) -> Text:
        widths = fit(columns, width - 1, indent=2)
        name = plain(f" {title}", TITLE)
        name.align("left", 2 + widths[0] + 2 + widths[1])
        return name + header(columns[2:], widths[2:], indent=2)

    def draw(cells: Sequence[Text]) -> Callable[[int], Text]:
        return lambda width: line(cells, columns, fit(columns, width - 1, indent=2), indent=2)

    drawn = [Row(None, titles), *(Row(key, draw(cells)) for key, cells in rows)]
    if more > 0:
        drawn.append(Row.of(plain(f"     {more} more: see their own view", DIM)))
    return drawn


def _attention_rows(board: Board) -> list[Row]:
    found = attention(board)
    if not found:
        unknown = [host.name for host in board.hosts.values() if host.state != "up"]
        calm = f"  nothing known yet of {', '.join(unknown)}" if unknown else "  nothing"
        return [Row.of(Text.assemble((" NEEDS ATTENTION", TITLE), (calm, DIM), no_wrap=True))]
    rows = [Row.of(plain(" NEEDS ATTENTION", TITLE))]
    for index, item in enumerate(found):
        style = TROUBLE if item.level == "error" else WARN
        mark = glyph("failed" if item.level == "error" else "attention")
        text = Text.assemble(("  ", ""), (mark, style), (f"  {item.subject}  ", STRONG), (item.text, ""), no_wrap=True)
        # What needs somebody is not cut: it goes on below.
        rows.append(Row(("attention", str(index), *item.key), _wrapper(text)))
    return rows


def _wrapper(text: Text) -> Callable[[int], Text]:
    return lambda width: wrap(text, width - 1, indent=5)


def _host_rows(board: Board) -> list[Row]:
    rows = [(("host", host.name), _host_cells(board, host)) for host in board.hosts.values()]
    return _section("HOSTS", _HOSTS, rows, "none in the profile")


def _host_cells(board: Board, host: HostState) -> list[Text]:
    load = host.load
    old = host.state != "up"
    name = plain(host.name, STRONG)
    roles = [word for word, held in (("trains", host.roles.train), ("evaluates", host.roles.evaluate)) if held]
    if roles:
        name.append(f"  {', '.join(roles)}", DIM)
    if old and load is not None:
        name.append(f"  as of {age(board.clock() - host.load_at)} ago", DIM)
    memory = dash()
    if load and load.memory_used_bytes is not None and load.memory_total_bytes:
        memory = plain(f"{load.memory_used_bytes / 1e9:.0f}/{load.memory_total_bytes / 1e9:.0f} GB")
    cells = [
        host_mark(host.state),
        name,
        dash() if load is None or load.cpu_share is None else plain(f"{load.cpu_share:.0%}"),
        memory,
        dash() if load is None or load.disk_free_bytes is None else plain(size(load.disk_free_bytes)),
        dash(),
        dash(),
        plain(f"{host.clock_offset_s:+.1f} s", DIM) if host.state == "up" else dash(),
    ]
    if old:
        for cell in cells[2:]:
            cell.stylize(DIM)
    return cells


def _run_rows(board: Board) -> list[Row]:
    runs = board.ordered_runs()
    shown = runs[: _MOST["runs"]]
    rows = [(("run", run.host, run.name), _run_cells(board, run)) for run in shown]
    return _section("RUNS", _RUNS, rows, "none yet", len(runs) - len(shown))


def _with_details(board: Board, rows: list[Row]) -> list[Row]:
    """Below each run what its narrow line has no room for."""
    found: list[Row] = []
    for row in rows:
        found.append(row)
        run = board.runs.get((row.key[1], row.key[2])) if row.key and row.key[0] == "run" else None
        if run is not None:
            newest, coming = board.newest_usable(run.name), run.next_checkpoint()
            words = "newest whole -" if newest is None else f"newest whole {newest.name}"
            if coming is not None:
                words += f"   step_{coming[0]} in ~{age(coming[1])}"
            found.append(Row.of(plain(f"     {run.name}  {run.host}", DIM)))
            found.append(Row.of(plain(f"     {words}", DIM)))
    return found


def _run_cells(board: Board, run: RunState) -> list[Text]:
    curve = run.curve
    stale = board.hosts[run.host].state != "up"
    tokens = rate(curve.recent_tokens_per_s()) if run.is_live or not len(curve) else rate(_mean_rate(run))
    loss = number_text(curve.recent_loss(), ".3f")
    newest = board.newest_usable(run.name)
    coming = run.next_checkpoint()
    best, taus = run_taus(board, run.name)
    name = plain(run.name)
    name.append(f"  {run.host}", DIM)
    cells = [
        job_mark(run.job.state),
        name,
        plain(f"{'-' if curve.step is None else curve.step}/{run.total_steps or '-'}"),
        Text.assemble(tokens, " ", spark(curve.smoothed_rates(10)[-400:], 6, DIM, floor=0.0)),
        Text.assemble(loss, " ", spark(_logs(curve.columns["loss"]), 6, DIM)),
        Text.assemble(number_text(best, ".3f", STRONG), " ", spark(taus, 6, EVALUATION)),
        dash() if newest is None else plain(f"{newest.name}  {age(_copy_age(board, run.host, newest.any_copy))}"),
        dash() if coming is None else plain(f"~{age(coming[1])}"),
    ]
    if stale:
        cells = [plain(cell.plain, DIM) for cell in cells]
        cells[0] = plain("?", WARN)
    return cells


def run_taus(board: Board, run: str) -> tuple[float, list[float]]:
    """The newest checkpoint's acceptance length, and those of all evaluated ones by step."""
    found: dict[int, float] = {}
    for evaluation in reversed(board.ordered_evaluations()):
        name, _, checkpoint = evaluation.checkpoint.partition(":")
        step = checkpoint.removeprefix("step_")
        if name == run and step.isdigit() and evaluation.is_final:
            found[int(step)] = evaluation.tau
    series = [found[step] for step in sorted(found)]
    return (series[-1] if series else math.nan), series


def _mean_rate(run: RunState) -> float:
    return run.curve.tokens / run.curve.seconds if run.curve.seconds else math.nan


def _logs(values: Sequence[float]) -> list[float]:
    return [math.log(value) if value > 0 and math.isfinite(value) else math.nan for value in values]


def _copy_age(board: Board, host: str, copy: object) -> float:
    return board.clock() + board.hosts[host].clock_offset_s - getattr(copy, "created", math.nan)


def _evaluation_rows(board: Board) -> list[Row]:
    evaluations = board.ordered_evaluations()
    shown = evaluations[: _MOST["evaluations"]]
    rows = [(("evaluation", e.host, e.job.id), evaluation_cells(board, e)) for e in shown]
    return _section("EVALUATIONS", _EVALUATIONS, rows, "none yet", len(evaluations) - len(shown))


def evaluation_cells(board: Board, evaluation: EvaluationState) -> list[Text]:
    """One evaluation on one line: mark, checkpoint, host, step, bar, time left, tau, age."""
    n = evaluation.current
    live = evaluation.job.is_live
    state, share, left = plain(evaluation.job.state, DIM), dash(), dash()
    if live and n is not None:
        step = evaluation.steps[n - 1]
        state = plain(f"{n}/5 {STEP_NAMES[n - 1]}", EVALUATION)
        share = bar(step.share, 7, EVALUATION) + plain(f" {step.share:3.0%}")
        left = plain(duration(step.eta_s)) if math.isfinite(step.eta_s) else dash()
    elif live:
        state = plain("starting", EVALUATION)
    tau = number_text(evaluation.tau, ".3f", STRONG if evaluation.is_final else DIM)
    born = board.clock() + board.hosts[evaluation.host].clock_offset_s - evaluation.job.created
    name = evaluation.checkpoint or evaluation.job.id
    run, _, checkpoint = name.partition(":")
    return [
        job_mark(evaluation.job.state),
        Text.assemble((checkpoint or run, ""), (f"  {run}" if checkpoint else "", DIM)),
        plain(evaluation.host),
        state,
        share,
        left,
        tau,
        plain(age(born), DIM),
    ]


def _transfer_rows(board: Board) -> list[Row]:
    transfers = board.ordered_transfers()
    shown = transfers[: _MOST["transfers"]]
    rows = [(("transfer", transfer.id), _transfer_cells(transfer)) for transfer in shown]
    return _section("TRANSFERS", _TRANSFERS, rows, "none", len(transfers) - len(shown))


def _transfer_cells(transfer: TransferSeen) -> list[Text]:
    running = transfer.state == "running"
    share = transfer.bytes_done / transfer.bytes_total if transfer.bytes_total else 0.0
    if running:
        mark, style = plain(glyph("running"), GOOD), ""
        left = (transfer.bytes_total - transfer.bytes_done) / transfer.rate if transfer.rate else math.nan
        words = transfer.phase if not math.isfinite(left) else f"{transfer.phase}, {duration(left)} left"
    elif transfer.state == "done":
        mark, style, words = plain(glyph("done"), GOOD), DIM, f"verified, took {duration(transfer.seconds)}"
    else:
        mark, style, words = plain(glyph("failed"), TROUBLE), "", f"{transfer.state}: {transfer.message}"
    done = size(transfer.bytes_done)
    amount = f"{done} of {size(transfer.bytes_total)}" if running else done
    name = Text.assemble((transfer.checkpoint, style), (f"  {transfer.run}", DIM))
    return [
        mark,
        name,
        plain(f"{transfer.source} {glyph('arrow')} {transfer.destination}", style),
        bar(share, 10, TRANSFER) if running else Text(""),
        plain(amount if transfer.bytes_total else "-", style),
        plain(f"{size(transfer.rate)}/s") if transfer.rate and running else dash(),
        plain(words, style),
    ]


class OverviewView(View):
    """The first view; at 80 columns one section at a time, attention always on top."""

    NAME = "Overview"

    def __init__(self) -> None:
        super().__init__(id="overview")
        self._section = 0

    def compose(self) -> ComposeResult:
        yield RowList(id="overview-list")

    def draw(self) -> None:
        board = self.board
        narrow = self.dashboard.size.width < NARROW
        section = SECTIONS[self._section] if narrow else None
        rows = self.main_list
        rows.show(overview_rows(board, section=section))
        if not rows.touched:  # until somebody moves it, the cursor is on what matters most
            best = [key for kind in ("attention", "run") for key in rows.keys if key[0] == kind]
            if best:
                rows.choose(best[0])

    def next_section(self, by: int) -> None:
        """Another section, where only one is shown."""
        self._section = (self._section + by) % len(SECTIONS)
        self.draw()

    def hints(self) -> list[KeyHint]:
        key = self.main_list.cursor
        hints = [KeyHint("enter", f"open {_subject(key)}")] if key else []
        hints += self.dashboard.checkpoint_hints()
        if self.dashboard.size.width < NARROW:
            hints.insert(0, KeyHint("←→", "section"))
        return hints

    def open(self, key: tuple[str, ...]) -> None:
        self.dashboard.open_key(key[2:] if key[0] == "attention" else key)


def _subject(key: tuple[str, ...]) -> str:
    kind, *rest = key[2:] if key[0] == "attention" else key
    if kind == "evaluation":
        return "evaluation"
    return "checkpoint" if kind in ("checkpoint", "transfer") else rest[-1] if kind == "run" else f"log of {rest[-1]}"
