"""Checkpoints as lines: rows are checkpoints, columns are hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.text import Text

from dflash_console.core.board import Board, CheckpointState
from dflash_console.core.results import interval
from dflash_console.widgets.columns import Column, fit, header, line
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
    glyph,
    number_text,
    plain,
    size,
)
from dflash_console.widgets.row_list import Row

__all__ = ["checkpoint_rows"]


def checkpoint_rows(board: Board, runs: Sequence[str], wanted: str = "") -> list[Row]:
    """A titled table for each run; `wanted` keeps the checkpoints whose run or name holds it."""
    rows: list[Row] = []
    for run in runs:
        states = [s for s in board.checkpoints_of(run) if wanted.lower() in f"{s.run}:{s.name}".lower()]
        coming = _coming(board, run)
        if not states and (wanted or coming is None):
            continue
        columns = _columns(board)
        rows.append(Row(None, _titles(run, columns)))
        if coming is not None and not wanted:
            rows.append(Row.of(coming))
        rows += [Row(("checkpoint", state.run, state.name), _drawer(_cells(board, state), columns)) for state in states]
    if not rows:
        rows.append(Row.of(plain(" no checkpoint matches the filter" if wanted else " no checkpoints yet", DIM)))
    return rows


def _columns(board: Board) -> list[Column]:
    hosts = [Column(host, 15) for host in board.hosts]
    return [
        Column("", 1),
        Column("", 12, grow=1),
        Column("", 12, rank=1),
        *hosts,
        Column("size", 8, "right", rank=2),
        Column("age", 6, "right", rank=3),
        Column("tau val", 7, "right", rank=4),
        Column("tau eval", 12, "right"),
        Column("loads in", 8, rank=4, grow=2),
    ]


def _titles(run: str, columns: Sequence[Column]) -> Callable[[int], Text]:
    def draw(width: int) -> Text:
        widths = fit(columns, width - 1, indent=2)
        name = plain(f" {run}", TITLE)
        lead = 2 + widths[0] + 2 + widths[1] + (2 + widths[2] if widths[2] else 0)
        name.truncate(lead, overflow="ellipsis")
        name.align("left", lead)
        return name + header(columns[3:], widths[3:], indent=2)

    return draw


def _drawer(cells: Sequence[Text], columns: Sequence[Column]) -> Callable[[int], Text]:
    return lambda width: line(cells, columns, fit(columns, width - 1, indent=2), indent=2)


def _coming(board: Board, run: str) -> Text | None:
    for state in board.ordered_runs():
        if state.name == run and board.hosts[state.host].state == "up":
            coming = state.next_checkpoint()
            if coming is not None:
                return plain(f"     step_{coming[0]}  expected in ~{age(coming[1])}", DIM)
    return None


def _cells(board: Board, state: CheckpointState) -> list[Text]:
    newest = board.newest_usable(state.run)
    copy = state.any_copy
    which = "" if newest is not state else "newest whole" if copy.state == "whole" else f"newest {copy.state}"
    owner = next(host for host, found in state.copies.items() if found is copy)
    born = board.clock() + board.hosts[owner].clock_offset_s - copy.created
    return [
        plain(glyph("star"), GOOD) if newest is state else Text(""),
        plain(state.name, STRONG if newest is state else ""),
        plain(which, DIM),
        *(_copy_cell(board, state, host) for host in board.hosts),
        plain(size(copy.size_bytes)),
        plain(age(born), DIM),
        dash(),
        _tau_cell(board, state),
        dash(),
    ]


def _copy_cell(board: Board, state: CheckpointState, host: str) -> Text:
    transfer = board.transfer_of(state.run, state.name, host)
    if transfer is not None:
        share = transfer.bytes_done / transfer.bytes_total if transfer.bytes_total else 0.0
        return bar(share, 8, TRANSFER) + plain(f" {share:4.0%}")
    copy = state.copies.get(host)
    if copy is None:
        # A host that was never listed may well have one.
        return plain(glyph("dot"), DIM) if board.hosts[host].listed else dash()
    if copy.state == "incomplete":
        return Text.assemble((glyph("incomplete"), WARN), (f" {copy.reason or copy.state}", ""))
    reachable = board.hosts[host].state == "up"
    words = Text.assemble((glyph("up"), GOOD), f" {copy.state}")
    return words if reachable else plain(f"{glyph('unreachable')} {copy.state}?", DIM)


def _tau_cell(board: Board, state: CheckpointState) -> Text:
    for evaluation in board.evaluations_of(f"{state.run}:{state.name}"):
        if evaluation.job.is_live:
            return plain(f"running {evaluation.current or '-'}/5", EVALUATION)
        if evaluation.result is not None:
            found = interval(evaluation.result)
            tau = number_text(evaluation.tau, ".3f", STRONG)
            if found is not None and math.isfinite(found.high):
                tau.append(f" {'±'} {(found.high - found.low) / 2:.3f}".replace(" 0.", " ."), DIM)
            return tau
        if evaluation.job.ended_badly:
            return plain(f"{glyph('failed')} {evaluation.job.state}", TROUBLE)
    return dash()
