"""The dashboard: five views over one board, drawn at its own pace, and the keys that act.

The core feeds the board on this event loop; nothing here waits for a host. Four times a second the visible
view is told to draw, if the board changed or a second has passed, and a widget redraws only what differs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import ClassVar

from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Input

from dflash_console.core.board import CheckpointState
from dflash_console.core.board_jobs import EvaluationState, RunState
from dflash_console.core.errors import ConsoleError
from dflash_console.core.quoting import printable
from dflash_console.core.source import Source
from dflash_console.palette import DashboardCommands
from dflash_console.screens.checkpoints import CheckpointsView
from dflash_console.screens.choose import ChooseScreen
from dflash_console.screens.evaluations import EvaluationsView
from dflash_console.screens.help import HelpScreen
from dflash_console.screens.logs import LogsView
from dflash_console.screens.overview import NARROW, OverviewView
from dflash_console.screens.run import RunView
from dflash_console.screens.view import KeyHint, View
from dflash_console.theme import THEME
from dflash_console.widgets.key_bar import KeyBar
from dflash_console.widgets.looks import use_ascii
from dflash_console.widgets.row_list import RowList
from dflash_console.widgets.status_bar import StatusBar

__all__ = ["WIDE", "Dashboard"]

WIDE = 180
"""From this width on the selected run stands beside the overview."""
_DRAW_S = 0.26
"""Four times in any second, and not five."""
_NOTICE_S = 8.0
_OVERVIEW, _RUN, _CHECKPOINTS, _EVALUATIONS, _LOGS = range(5)


class Dashboard(App[None]):
    """The Textual app. It owns what is selected and what is shown; the source owns everything else."""

    CSS_PATH = "app.tcss"
    TITLE = "dflash-console"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS = {DashboardCommands}  # noqa: RUF012 # Textual's own declaration
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(i + 1), f"view({i})", show=False) for i in range(5)),
        Binding("s", "stage", show=False),
        Binding("S", "stage_to", show=False),
        Binding("e", "evaluate", show=False),
        Binding("o", "output", show=False),
        Binding("l", "log_scale", show=False),
        Binding("left", "sideways(-1)", show=False),
        Binding("right", "sideways(1)", show=False),
        Binding("slash", "filter", show=False),
        Binding("question_mark", "help", show=False),
        Binding("escape", "go_back", show=False),
        Binding("q", "quit", show=False),
    ]

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.source = source
        self.run_key: tuple[str, str] | None = None
        self.evaluation_key: tuple[str, str] | None = None
        self.views: list[View] = [OverviewView(), RunView(), CheckpointsView(), EvaluationsView(), LogsView()]
        self._status, self._key_bar = StatusBar(), KeyBar()
        self._field = Input(id="filter", placeholder="filter: part of a name; enter keeps it, esc clears it")
        self._current = _OVERVIEW
        self._before: list[int] = []
        self._wanted: dict[str, str] = {}
        self._notice: tuple[float, str, str] | None = None
        self._drawn: tuple[int, int] = (-1, -1)
        self._feeding: asyncio.Task[None] | None = None
        self._log_seen = 0.0
        self._clock = clock

    # Life

    def compose(self) -> ComposeResult:
        yield self._status
        with Horizontal(id="views"):
            yield from self.views
        yield self._field
        yield self._key_bar

    def on_mount(self) -> None:
        self.register_theme(THEME)
        self.theme = "dflash"
        use_ascii()
        self._field.display = False
        self._show(_OVERVIEW)
        self._log_seen = self.source.board.clock()
        self._feeding = asyncio.create_task(self._feed())
        self.set_interval(_DRAW_S, self._tick)

    async def _feed(self) -> None:
        """Run the source; a fault of this program in it ends the dashboard: nothing on it would be true any more."""
        try:
            await self.source.run()
        except Exception as error:  # noqa: BLE001 # whatever it is
            self._handle_exception(error)

    async def on_unmount(self) -> None:
        if self._feeding is not None:
            self._feeding.cancel()
            await asyncio.wait([self._feeding], timeout=0.5)

    @property
    def fault(self) -> Exception | None:
        """What ended the dashboard, where it did not end as it was asked to."""
        return self._exception

    def _fatal_error(self) -> None:
        """Textual would print a traceback with the values of all variables; who opened the dashboard reports."""
        self._close_messages_no_wait()

    def on_resize(self) -> None:
        self._drawn = (-1, -1)
        self._arrange()

    # Drawing

    def _tick(self) -> None:
        if not self._status.is_attached or len(self.screen_stack) > 1:
            return  # it is being closed, or a dialog is over it
        board = self.source.board
        self._hear_errors()
        now = (board.version, int(self._clock()))
        if now == self._drawn:
            return
        self._drawn = now
        self.redraw()

    def redraw(self) -> None:
        """Draw everything that is visible, as the board is now."""
        self._status.show(self.source.board, self.source.title, replay=bool(self.source.read_only))
        for view in self.views:
            if view.display:
                view.draw()
        self._draw_keys()

    def _draw_keys(self) -> None:
        notice = None
        if self._notice is not None:
            if self._clock() - self._notice[0] < _NOTICE_S:
                notice = self._notice[1:]
            else:
                self._notice = None
        hints = list(self._view.hints())
        wanted = self._wanted.get(self._view.NAME)
        if wanted:
            hints.insert(0, KeyHint("esc", f"clear filter '{wanted}'"))
        elif self._before or self._current != _OVERVIEW:
            hints.append(KeyHint("esc", "back"))
        self._key_bar.show([view.NAME for view in self.views], self._current, hints, notice)

    def say(self, words: str, level: str = "info") -> None:
        """Say something in the key bar for a while."""
        self._notice = (self._clock(), level, printable(words, 500))
        self._draw_keys()

    def _hear_errors(self) -> None:
        """New errors of the console's own log are said as they come; they stay in Logs."""
        log = self.source.board.log
        fresh = [line for line in log if line.t > self._log_seen and not line.host and line.event is None]
        if fresh:
            self._log_seen = max(line.t for line in fresh)
            last = fresh[-1]
            self.say(last.text, last.level)

    @property
    def _view(self) -> View:
        return self.views[self._current]

    def _show(self, index: int) -> None:
        self._current = index
        self._arrange()
        self._view.main_list.focus()
        self.redraw()

    def _arrange(self) -> None:
        beside = self.size.width >= WIDE and self._current == _OVERVIEW and bool(self.source.board.runs)
        self.views[_EVALUATIONS].set_class(self.size.width < NARROW, "-narrow")
        for index, view in enumerate(self.views):
            view.display = index == self._current or (beside and index == _RUN)
            view.set_class(beside and index == _RUN, "-beside")

    # What is selected

    def selected_run(self) -> RunState | None:
        """The run that was opened last, or the first."""
        board = self.source.board
        if self.run_key in board.runs:
            return board.runs[self.run_key]
        return next(iter(board.ordered_runs()), None)

    def selected_evaluation(self) -> EvaluationState | None:
        """The evaluation that was opened last, or the first."""
        board = self.source.board
        if self.evaluation_key in board.evaluations:
            return board.evaluations[self.evaluation_key]
        return next(iter(board.ordered_evaluations()), None)

    def selected_checkpoint(self) -> CheckpointState | None:
        """The checkpoint under the cursor; of a run or an evaluation, the one that it means."""
        board = self.source.board
        key = self._view.main_list.cursor
        if key is None:
            return None
        if key[0] == "attention":
            key = key[2:]
        match key[0]:
            case "checkpoint":
                return board.checkpoints.get((key[1], key[2]))
            case "run":
                return board.newest_usable(key[2])
            case "evaluation":
                evaluation = board.evaluations.get((key[1], key[2]))
                run, _, name = (evaluation.checkpoint if evaluation else "").partition(":")
                return board.checkpoints.get((run, name))
            case "transfer":
                transfer = board.transfers.get(key[1])
                return board.checkpoints.get((transfer.run, transfer.checkpoint)) if transfer else None
        return None

    def filter_text(self, view: View) -> str:
        """What a view is filtered by."""
        return self._wanted.get(view.NAME, "")

    def set_filter(self, view: View, text: str) -> None:
        """Filter a view; an empty text shows everything."""
        self._wanted[view.NAME] = text
        self.redraw()

    # What can be done

    def checkpoint_hints(self) -> list[KeyHint]:
        """The keys that act on the selected checkpoint, in the words of the thing."""
        state = self.selected_checkpoint()
        if state is None:
            return []
        if self.source.read_only:
            return [KeyHint("s", "", self.source.read_only), KeyHint("e", "", "")][:1]
        source, why_not = self._source_of(state)
        if why_not:
            return [KeyHint("s", "stage", why_not)]
        hints = []
        where = self._evaluator()
        if where is None:
            hints.append(KeyHint("e", "evaluate", "no host of the profile has the role evaluate"))
        else:
            there = where in state.copies and state.copies[where].is_usable
            transfer = self.source.board.transfer_of(state.run, state.name, where)
            down = self._down(where)
            if transfer is not None:
                hints.append(KeyHint("s", "stage", f"on its way to {where}"))
            elif there:
                hints.append(KeyHint("s", "stage", f"{where} has {state.name}"))
            else:
                hints.append(KeyHint("s", f"stage {state.name} to {where}", down))
            words = f"evaluate {state.name} on {where}" if there else f"stage and evaluate {state.name} on {where}"
            hints.append(KeyHint("e", words, down or self._evaluating(state, where)))
        hints.append(KeyHint("S", f"stage {state.name} elsewhere", "" if len(self._others(state)) else "no other host"))
        return hints if source else []

    def _evaluator(self) -> str | None:
        hosts = self.source.board.hosts.values()
        return next((host.name for host in hosts if host.roles.evaluate), None)

    def _down(self, host: str) -> str:
        state = self.source.board.hosts[host].state
        return "" if state == "up" else f"{host} is {state}"

    def _evaluating(self, state: CheckpointState, host: str) -> str:
        for evaluation in self.source.board.evaluations_of(f"{state.run}:{state.name}"):
            if evaluation.host == host and evaluation.job.is_live:
                return f"its evaluation runs ({evaluation.current or '-'}/5)"
        return ""

    def _source_of(self, state: CheckpointState) -> tuple[str, str]:
        """A reachable host that has a usable copy, a whole one if there is one; or why there is none."""
        hosts = self.source.board.hosts
        usable = [host for host, copy in state.copies.items() if copy.is_usable]
        if not usable:
            return "", f"{state.name} is {state.any_copy.state}: {state.any_copy.reason}"
        reachable = [host for host in usable if hosts[host].state == "up"]
        if not reachable:
            return "", f"{', '.join(usable)} is unreachable"
        return min(reachable, key=lambda host: state.copies[host].state != "whole"), ""

    def _others(self, state: CheckpointState) -> list[str]:
        return [
            name
            for name, host in self.source.board.hosts.items()
            if host.state == "up" and not (name in state.copies and state.copies[name].is_usable)
        ]

    def _refusal(self, key: str) -> str:
        """Why a key cannot act now; empty where it can."""
        hints = {hint.key: hint for hint in self.checkpoint_hints()}
        if key in hints:
            return hints[key].why_not
        if hints:
            return next(iter(hints.values())).why_not or "not now"
        return "select a checkpoint, a run or an evaluation first"

    # Keys

    def action_view(self, index: int) -> None:
        """One of the five views."""
        if index != self._current:
            self._before.append(self._current)
            del self._before[:-20]
            self._show(index)

    def action_stage(self) -> None:
        """Stage the selected checkpoint to the evaluating host."""
        state, where = self.selected_checkpoint(), self._evaluator()
        if refusal := self._refusal("s"):
            self.say(f"s: {refusal}", "warning")
        elif state is not None and where is not None:
            self._stage(state, where)
        else:
            self.action_stage_to()

    def action_stage_to(self) -> None:
        """Stage it to a host that the operator chooses."""
        state = self.selected_checkpoint()
        if refusal := self._refusal("S"):
            self.say(f"S: {refusal}", "warning")
            return
        assert state is not None  # noqa: S101 # there is no refusal
        answers = [(host, host) for host in self._others(state)]

        def chosen(host: str | None) -> None:
            if host is not None:
                self._stage(state, host)

        size = state.any_copy.size_bytes / 1e6
        question = f"Stage {state.run}:{state.name} ({size:.1f} MB) to which host?"
        self.push_screen(ChooseScreen(question, answers), chosen)

    def _stage(self, state: CheckpointState, where: str) -> None:
        source, why_not = self._source_of(state)
        if why_not:
            self.say(why_not, "warning")
            return
        try:
            self.source.stage(state.run, state.name, source, where)
        except ConsoleError as error:
            self.say(str(error), "error")
        else:
            self.say(f"staging {state.run}:{state.name} from {source} to {where}; it goes on if you quit")

    def action_evaluate(self) -> None:
        """Evaluate the selected checkpoint on the evaluating host, staged there first if need be."""
        state, where = self.selected_checkpoint(), self._evaluator()
        if refusal := self._refusal("e"):
            self.say(f"e: {refusal}", "warning")
            return
        assert state is not None and where is not None  # noqa: S101, PT018 # there is no refusal
        source, _ = self._source_of(state)
        there = where in state.copies and state.copies[where].is_usable
        try:
            self.source.evaluate(state.run, state.name, where, "" if there else source)
        except ConsoleError as error:
            self.say(str(error), "error")
        else:
            self.say(f"evaluating {state.run}:{state.name} on {where}; it goes on if you quit")

    def action_output(self) -> None:
        """The output of the job under the cursor."""
        key = self._view.main_list.cursor or ("",)
        if key[0] == "attention":
            key = key[2:]
        board = self.source.board
        logs = self.views[_LOGS]
        assert isinstance(logs, LogsView)  # noqa: S101 # made above
        job: tuple[str, str] | None = None
        if key[0] == "evaluation":
            job = (key[1], key[2])
        elif key[0] == "log" and key[4]:
            job = (key[3], key[4])
        elif (run := board.runs.get((key[1], key[2])) if key[0] == "run" else self.selected_run()) is not None:
            job = (run.host, run.job.id)
        if job is None:
            self.say("o: select a run, an evaluation or a job's line first", "warning")
            return
        self.action_view(_LOGS)
        logs.show_output(*job)

    def action_log_scale(self) -> None:
        """Loss on the other scale."""
        view = self.views[_RUN]
        if view.display and isinstance(view, RunView):
            view.toggle_log()

    def action_sideways(self, by: int) -> None:
        """Another section or another run."""
        view = self._view
        if isinstance(view, OverviewView):
            view.next_section(by)
        elif isinstance(view, RunView):
            view.next_run(by)
        self._draw_keys()

    def action_filter(self) -> None:
        """Type a filter for the shown view."""
        field = self._field
        field.value = self.filter_text(self._view)
        field.display = True
        field.focus()

    def action_help(self) -> None:
        """Keys, marks, words."""
        self.push_screen(HelpScreen())

    def action_go_back(self) -> None:
        """Out of the filter, out of a part of the view, then to the view before."""
        field = self._field
        if field.display:
            field.display = False
            self._wanted.pop(self._view.NAME, None)
            self._view.main_list.focus()
        elif self._view.back() or self._wanted.pop(self._view.NAME, ""):
            pass
        elif self._before:
            self._show(self._before.pop())
        elif self._current != _OVERVIEW:
            self._show(_OVERVIEW)
        self.redraw()

    async def action_quit(self) -> None:
        """At once; nothing that runs is stopped."""
        self.exit()

    def open_key(self, key: tuple[str, ...]) -> None:
        """Open what a row is about."""
        match key[0]:
            case "run":
                self.run_key = (key[1], key[2])
                self.action_view(_RUN)
            case "evaluation":
                self.evaluation_key = (key[1], key[2])
                self.action_view(_EVALUATIONS)
            case "checkpoint":
                self._open_checkpoint(key[1], key[2])
            case "transfer":
                transfer = self.source.board.transfers.get(key[1])
                if transfer is not None:
                    self._open_checkpoint(transfer.run, transfer.checkpoint)
            case "host":
                logs = self.views[_LOGS]
                self.action_view(_LOGS)
                assert isinstance(logs, LogsView)  # noqa: S101 # made above
                logs.filter_host(key[1])
        self.redraw()

    def _open_checkpoint(self, run: str, name: str) -> None:
        """Its evaluation if there is one; else the checkpoint among the others."""
        found = self.source.board.evaluations_of(f"{run}:{name}")
        if found and self._current in (_CHECKPOINTS, _RUN):
            self.open_key(("evaluation", found[0].host, found[0].job.id))
        elif self._current != _CHECKPOINTS:
            self.action_view(_CHECKPOINTS)
            self.views[_CHECKPOINTS].main_list.choose(("checkpoint", run, name))
        else:
            self.say(f"{name} has no evaluation yet", "warning")

    # Messages

    def on_row_list_opened(self, message: RowList.Opened) -> None:
        self._view.open(message.key)
        self.redraw()

    def on_row_list_chosen(self, message: RowList.Chosen) -> None:
        if message.key and message.row_list.id == "evaluation-list" and message.key[0] == "evaluation":
            self.evaluation_key = (message.key[1], message.key[2])
        if message.key and message.row_list.id == "overview-list" and message.key[0] == "run":
            self.run_key = (message.key[1], message.key[2])
        self._drawn = (-1, -1)
        self._draw_keys()  # what the keys do depends on what is chosen

    def on_input_changed(self, message: Input.Changed) -> None:
        if message.input.id == "filter" and message.input.display:
            self.set_filter(self._view, message.value)

    def on_input_submitted(self, message: Input.Submitted) -> None:
        if message.input.id == "filter":
            message.input.display = False
            self._view.main_list.focus()
            self.redraw()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """None of Textual's own: the palette holds what this program does."""
        return ()
