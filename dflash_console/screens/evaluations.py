"""Evaluations: one result deep, and against the one before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Static

from dflash_console.core.board import Board
from dflash_console.core.board_jobs import STEP_NAMES, EvaluationState
from dflash_console.core.observations import PromptSeen, ResultSeen
from dflash_console.core.results import difference, interval
from dflash_console.screens.overview import evaluation_cells
from dflash_console.screens.view import KeyHint, View
from dflash_console.widgets.columns import Column, fit, flow, header, line
from dflash_console.widgets.flow_text import FlowText
from dflash_console.widgets.looks import (
    DIM,
    EVALUATION,
    GOOD,
    STRONG,
    TITLE,
    TROUBLE,
    WARN,
    bar,
    dash,
    duration,
    glyph,
    number_text,
    plain,
)
from dflash_console.widgets.row_list import Row, RowList

__all__ = ["EvaluationsView", "completion_text", "evaluation_details", "prompt_rows"]

_LIST = (
    Column("", 1),
    Column("", 14, grow=1),
    Column("host", 8),
    Column("state", 19),
    Column("", 12, rank=1),
    Column("left", 9, "right", rank=2),
    Column("tau", 7, "right"),
    Column("age", 6, "right"),
)
_PROMPTS = (
    Column("prompt, worst first", 20, grow=1),
    Column("", 5),
    Column("tau", 6, "right"),
    Column("steps", 5, "right"),
    Column("tokens", 6, "right", rank=1),
    Column("tokens of each step", 16, rank=2, grow=1),
)
_BLOCK_HUES = ("#4fd1c5", "#8ab4f8", "#b794f6", "#d7ba7d")


def evaluation_rows(board: Board, wanted: str = "") -> list[Row]:
    """All evaluations, live ones first."""
    found = [e for e in board.ordered_evaluations() if wanted.lower() in f"{e.checkpoint} {e.host}".lower()]
    if not found:
        return [Row.of(plain(" no evaluation matches the filter" if wanted else " no evaluations yet", DIM))]

    def titles(width: int) -> Text:
        widths = fit(_LIST, width - 1, indent=2)
        name = plain(" EVALUATIONS", TITLE)
        name.align("left", 2 + widths[0] + 2 + widths[1])
        return name + header(_LIST[2:], widths[2:], indent=2)

    def draw(cells: Sequence[Text]) -> Callable[[int], Text]:
        return lambda width: line(cells, _LIST, fit(_LIST, width - 1, indent=2), indent=2)

    rows = [Row(("evaluation", e.host, e.job.id), draw(evaluation_cells(board, e))) for e in found]
    return [Row(None, titles), *rows]


def evaluation_details(board: Board, evaluation: EvaluationState, width: int) -> Text:
    """Conditions, the five steps, tau with its interval and against the one before, and how steps ended."""
    result = evaluation.result
    head = Text.assemble((evaluation.checkpoint or evaluation.job.id, STRONG), (f" on {evaluation.host}", DIM))
    conditions = [plain(word) for word in result.conditions.split("   ")] if result else [plain("conditions -", DIM)]
    lines = flow([head, *conditions], width)
    lines += flow(_step_parts(evaluation), width)
    lines += flow(_tau_parts(board, evaluation), width)
    if evaluation.job.ended_badly:
        errors = [alert.message for alert in evaluation.alerts if alert.level == "error"]
        why = errors[-1] if errors else evaluation.job.reason
        lines += flow([plain(f"{glyph('failed')} {evaluation.job.state}: {why}", TROUBLE)], width)
    elif evaluation.alerts:
        lines += flow([plain(f"{glyph('attention')} {evaluation.alerts[-1].message}", WARN)], width)
    for parts in _shape_parts(result):
        lines += flow(parts, width, gap=2)
    return Text("\n").join(lines)


def _step_parts(evaluation: EvaluationState) -> list[Text]:
    parts = []
    for n, (name, step) in enumerate(zip(STEP_NAMES, evaluation.steps, strict=True), start=1):
        part = plain(f"{n} {name} ", "" if step.state != "waiting" else DIM)
        if step.has_ended:
            part.append(glyph("done"), GOOD)
            took = "" if step.seconds is None else f" {duration(step.seconds)}"
            part.append(" found ready" if step.state == "cached" else took, DIM)
        elif step.state == "waiting":
            part.append_text(dash())
        elif not evaluation.job.is_live:
            part.append(f"{glyph('failed')} {evaluation.job.state}", TROUBLE)
        else:
            part.append_text(bar(step.share, 8, EVALUATION))
            part.append(f" {step.share:4.0%}")
            if math.isfinite(step.eta_s):
                part.append(f" {duration(step.eta_s)} left", DIM)
        parts.append(part)
    result = evaluation.result
    if result is not None and result.feature_mean is not None and result.feature_std is not None:
        parts.append(plain(f"fc mean {result.feature_mean:.3f} std {result.feature_std:.3f}", DIM))
    return parts


def _tau_parts(board: Board, evaluation: EvaluationState) -> list[Text]:
    result = evaluation.result
    head = Text.assemble(("tau ", DIM), number_text(evaluation.tau, ".3f", STRONG))
    if result is None:
        if math.isfinite(evaluation.tau) and not evaluation.is_final:
            head.append("  so far", DIM)
        return [head]
    spread = interval(result)
    if spread is not None:
        head.append(f"  [{spread.low:.3f} {spread.high:.3f}]", DIM)
    parts = [
        head,
        Text.assemble(("per prompt ", DIM), f"{result.tau_per_prompt:.3f}"),
        plain(f"{result.steps} verification steps", DIM),
    ]
    earlier = board.earlier_result(evaluation)
    if earlier is None or earlier.result is None:
        return parts
    gain = difference(result, earlier.result)
    against = Text.assemble((f"against {earlier.checkpoint.partition(':')[2]}  ", DIM))
    if gain is None:
        against.append("not comparable: other prompts, target or settings", WARN)
    else:
        verdict, style = "no clear change", ""
        if gain.low > 0:
            verdict, style = "better", GOOD
        elif gain.high < 0:
            verdict, style = "worse", TROUBLE
        against.append(f"{gain.value:+.3f}", STRONG)
        against.append(f"  [{gain.low:+.3f} {gain.high:+.3f}]  ", DIM)
        against.append(verdict, style)
    return [*parts, against]


def _shape_parts(result: ResultSeen | None) -> list[list[Text]]:
    if result is None or not sum(result.histogram):
        return []
    total = sum(result.histogram)
    counts = [plain("tokens per step     ", DIM)]
    for tokens, count in enumerate(result.histogram):
        if tokens:
            counts.append(
                Text.assemble((f"{tokens} ", DIM), bar(count / total, 5, EVALUATION), f" {count / total:3.0%}")
            )
    positions = [plain("accepted by position", DIM)]
    for k, share in enumerate(result.acceptance_by_position, start=1):
        positions.append(Text.assemble((f"{k} ", DIM), f"{share:.2f}".replace("0.", ".", 1)))
    return [counts, positions]


def prompt_rows(result: ResultSeen | None, wanted: str = "") -> list[Row]:
    """The prompts of a result, the worst first."""
    if result is None:
        return [Row.of(plain(" prompts: once the result is there", DIM))]
    ranked = sorted(result.prompts, key=lambda p: math.inf if p.tau is None else p.tau)
    judged = [prompt for prompt in ranked if prompt.tau is not None]
    found = [prompt for prompt in ranked if wanted.lower() in prompt.id.lower()]
    rows = [Row(None, lambda width: header(_PROMPTS, fit(_PROMPTS, width - 1, indent=1), indent=1))]
    for prompt in found:
        mark = "worst" if judged and prompt is judged[0] else "best" if judged and prompt is judged[-1] else ""
        rows.append(Row(("prompt", prompt.id), _prompt_drawer(prompt, mark)))
    if not found:
        rows.append(Row.of(plain(" no prompt matches the filter", DIM)))
    return rows


def _prompt_drawer(prompt: PromptSeen, mark: str) -> Callable[[int], Text]:
    style = TROUBLE if mark == "worst" else GOOD
    cells = [
        plain(prompt.id),
        plain(mark, style),
        number_text(prompt.tau, ".2f", STRONG),
        plain(len(prompt.accepted)),
        plain(sum(prompt.accepted)),
        plain(" ".join(map(str, prompt.accepted)), DIM),
    ]
    return lambda width: line(cells, _PROMPTS, fit(_PROMPTS, width - 1, indent=1), indent=1)


def completion_text(prompt: PromptSeen | None) -> Text:
    """The completion: accepted drafts coloured by block, the target's own tokens underlined."""
    if prompt is None:
        return Text("")
    if not prompt.pieces:
        return Text("This result holds no texts.", style=DIM)
    text = Text(prompt.pieces[0], style=DIM)
    at = 1
    for index, (emitted, matched) in enumerate(zip(prompt.accepted, prompt.matched or prompt.accepted, strict=False)):
        for k, piece in enumerate(prompt.pieces[at : at + emitted]):
            drafted = k < matched
            text.append(piece, _BLOCK_HUES[index % len(_BLOCK_HUES)] if drafted else "underline")
        at += emitted
    return text


class EvaluationsView(View):
    """A list of evaluations, the chosen one's details, its prompts and their texts."""

    NAME = "Evaluations"

    def __init__(self) -> None:
        super().__init__(id="evaluations")
        self._shown: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield RowList(id="evaluation-list")
        yield FlowText(id="evaluation-details")
        with Horizontal(id="evaluation-prompts"):
            yield RowList(id="prompt-list")
            with VerticalScroll(id="completion-box", can_focus=False):
                yield Static(id="completion-legend", markup=False)
                yield Static(id="completion", markup=False)

    def on_mount(self) -> None:
        legend = Text.assemble(("accepted drafts", _BLOCK_HUES[0]), (" coloured by block, ", DIM))
        legend.append("the target's own", "underline")
        legend.append(" underlined", DIM)
        self.query_one("#completion-legend", Static).update(legend)

    def draw(self) -> None:
        wanted = self.dashboard.filter_text(self)
        evaluations = self.main_list
        evaluations.show(evaluation_rows(self.board, "" if self.prompts.has_focus else wanted))
        chosen = self.dashboard.selected_evaluation()
        if chosen is not None:
            evaluations.choose(("evaluation", chosen.host, chosen.job.id))
        board = self.board
        self.query_one("#evaluation-details", FlowText).show(
            lambda width: evaluation_details(board, chosen, width) if chosen else Text("")
        )
        result = chosen.result if chosen else None
        self.prompts.show(prompt_rows(result, wanted if self.prompts.has_focus else ""))
        self._draw_completion(result)

    @property
    def prompts(self) -> RowList:
        """The list of prompts."""
        return self.query_one("#prompt-list", RowList)

    def _draw_completion(self, result: ResultSeen | None) -> None:
        key = self.prompts.cursor
        stamp = (result.host, result.job, key) if result and key else ()
        if stamp == self._shown:
            return
        self._shown = stamp
        prompt = next((p for p in result.prompts if key and p.id == key[1]), None) if result else None
        self.query_one("#completion", Static).update(completion_text(prompt))

    def hints(self) -> list[KeyHint]:
        hints = [KeyHint("tab", "prompts" if not self.prompts.has_focus else "evaluations")]
        if self.prompts.has_focus:
            hints.append(KeyHint("enter", "text of prompt" if not self.has_class("-text") else "back to prompts"))
        else:
            hints += self.dashboard.checkpoint_hints()
        return hints

    def open(self, key: tuple[str, ...]) -> None:
        if key[0] == "evaluation":
            self.prompts.focus()
        elif key[0] == "prompt":
            self.toggle_class("-text")

    def back(self) -> bool:
        if self.has_class("-text"):
            self.remove_class("-text")
            return True
        if self.prompts.has_focus:
            self.main_list.focus()
            return True
        return False
