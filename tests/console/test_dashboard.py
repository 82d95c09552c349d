"""The dashboard on recorded and made-up boards: keys, words, widths, and how often it draws."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.text import Text
from textual.pilot import Pilot

from dflash_console.app import Dashboard
from dflash_console.core.board import Board, Roles
from dflash_console.core.errors import HostNotReadyError
from dflash_console.core.observations import (
    CheckpointSeen,
    CheckpointsSeen,
    EventSeen,
    HostSeen,
    JobSeen,
    JobsSeen,
    Observation,
    Said,
)
from dflash_console.screens.checkpoint_rows import checkpoint_rows
from dflash_console.screens.evaluations import completion_text, evaluation_details
from dflash_console.screens.logs import log_rows
from dflash_console.screens.overview import SECTIONS, overview_rows
from dflash_console.screens.run import run_facts, run_heading
from dflash_console.widgets.chart import draw_chart
from dflash_console.widgets.key_bar import KeyBar
from dflash_console.widgets.looks import drawable, use_ascii
from dflash_console.widgets.row_list import Row, RowList
from tests.console.test_board import EVENTS, odd_board
from tools.pictures import SCREENS, SIZES, SNAPSHOTS, Still, picture, use_utc


class FakeSource:
    """A board that a test writes on, and a record of what was asked. No host stands behind it."""

    title = "lab"
    read_only = ""

    def __init__(self) -> None:
        self.board = Board("lab", {"ct200": Roles(train=True), "ct129": Roles(evaluate=True), "spare": Roles()})
        for host in self.board.hosts:
            self.board.apply(HostSeen(host, "up"))
        self.asked: list[tuple[str, ...]] = []
        self.fault: Exception | None = None

    async def run(self) -> None:
        await asyncio.Event().wait()

    def stage(self, *what: str) -> None:
        if self.fault is not None:
            raise self.fault
        self.asked.append(("stage", *what))

    def evaluate(self, *what: str) -> None:
        self.asked.append(("evaluate", *what))

    async def output(self, host: str, job: str) -> str:
        return f"output of {job} on {host}"


@asynccontextmanager
async def shown(source: Any, size: tuple[int, int] = (120, 40)) -> AsyncIterator[tuple[Dashboard, Pilot[None]]]:
    app = Dashboard(source)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield app, pilot


def screen_text(app: Dashboard) -> str:
    width, height = app.size
    return "\n".join("".join(s.text for s in line)[:width] for line in app.screen._compositor.render_strips()[:height])


def keys_text(app: Dashboard) -> str:
    return str(app.query_one(KeyBar).render().plain)


def with_run(source: FakeSource, state: str = "running") -> FakeSource:
    jobs = [JobSeen("train-1", "train", "demo", state, "", source.board.clock())]
    source.board.apply(JobsSeen("ct200", jobs))
    source.board.apply(JobsSeen("ct129", []))
    source.board.apply(JobsSeen("spare", []))
    source.board.apply(
        CheckpointsSeen(
            "ct200",
            [
                CheckpointSeen("demo", "step_400", 400, "whole", "", 10_000_000, source.board.clock()),
                CheckpointSeen("demo", "step_800", 800, "incomplete", "model.safetensors is 12 MB short", 1, 1.0),
            ],
        )
    )
    return source


async def test_the_questions_of_a_day_are_answered_with_the_keys_that_are_shown() -> None:
    async with shown(Still(None)) as (app, pilot):
        assert "REPLAY" in screen_text(app)
        await pilot.press("3")
        assert "step_800" in screen_text(app)
        assert "newest whole" in screen_text(app)
        await pilot.press("enter")  # its evaluation
        await pilot.pause()
        text = screen_text(app)
        assert "tau 1.616" in text
        assert "better" in text
        await pilot.press("tab")
        await pilot.pause()
        worst = next(line for line in screen_text(app).splitlines() if "worst " in line and "python-heldout" in line)
        assert "1.29" in worst
        for _ in range(4):
            await pilot.press("escape")
        assert "HOSTS" in screen_text(app)


async def test_s_and_e_act_on_what_is_selected_and_the_footer_says_on_what() -> None:
    source = with_run(FakeSource())
    async with shown(source) as (app, pilot):
        assert "s stage step_400 to ct129" in keys_text(app)
        await pilot.press("s")
        await pilot.press("e")
        assert source.asked == [
            ("stage", "demo", "step_400", "ct200", "ct129"),
            ("evaluate", "demo", "step_400", "ct129", "ct200"),
        ]
        await pilot.press("S")
        await pilot.pause()
        await pilot.press("down", "enter")
        await pilot.pause()
        assert source.asked[-1] == ("stage", "demo", "step_400", "ct200", "spare")


async def test_a_key_that_cannot_act_says_why() -> None:
    source = with_run(FakeSource())
    async with shown(source) as (app, pilot):
        await pilot.press("3", "up")
        app.views[2].main_list.choose(("checkpoint", "demo", "step_800"))
        await pilot.pause()
        await pilot.press("s")
        assert source.asked == []
        assert "step_800 is incomplete" in keys_text(app)
        source.board.apply(HostSeen("ct129", "unreachable", "ct129: refuses the connection"))
        app.views[2].main_list.choose(("checkpoint", "demo", "step_400"))
        await pilot.press("e")
        assert "ct129 is unreachable" in keys_text(app)
        assert source.asked == []


async def test_a_staging_that_cannot_start_is_said() -> None:
    source = with_run(FakeSource())
    source.fault = HostNotReadyError("the operations folder cannot be written: No space left on device")
    async with shown(source) as (app, pilot):
        await pilot.press("s")
        assert "No space left on device" in keys_text(app)


async def test_a_lost_host_is_on_top_with_its_reason() -> None:
    source = with_run(FakeSource())
    source.board.apply(HostSeen("ct200", "unreachable", "ct200 refuses the connection: no SSH server", retry_s=4.0))
    for size in SIZES:
        async with shown(source, size) as (app, _):
            lines = screen_text(app).splitlines()
            assert "NEEDS ATTENTION" in lines[1]
            assert "ct200" in lines[2]
            assert "unreachable" in lines[2]


async def test_filter_narrows_the_list_and_esc_brings_all_back() -> None:
    async with shown(Still(None)) as (app, pilot):
        await pilot.press("5", "slash", *"written", "enter")
        await pilot.pause()
        text = screen_text(app)
        assert "checkpoint step_400 written" in text
        assert "job ended" not in text
        assert "clear filter 'written'" in keys_text(app)
        await pilot.press("escape")
        assert "job ended" in screen_text(app)


async def test_the_output_of_a_job_is_one_key_away() -> None:
    async with shown(with_run(FakeSource())) as (app, pilot):
        await pilot.press("o")
        await pilot.pause(0.6)
        assert "output of train-1 on ct200" in screen_text(app)
        await pilot.press("escape", "escape")
        assert "HOSTS" in screen_text(app)


async def test_help_and_palette_open_and_close() -> None:
    async with shown(Still(None), (80, 24)) as (app, pilot):
        await pilot.press("question_mark")
        assert "stage the selected checkpoint" in screen_text(app)
        await pilot.press("escape")
        await pilot.press("ctrl+p")
        await pilot.pause(0.5)
        await pilot.press(*"logs")
        await pilot.pause(0.5)
        await pilot.press("enter")
        await pilot.pause(0.3)
        assert "checkpoint step_800 written" in screen_text(app)


async def test_q_quits_at_once() -> None:
    async with shown(with_run(FakeSource())) as (app, pilot):
        async with asyncio.timeout(2):
            await pilot.press("q")
        assert app.return_code == 0


async def test_a_storm_of_events_is_drawn_at_most_four_times_a_second() -> None:
    source = with_run(FakeSource())
    async with shown(source) as (app, pilot):
        await pilot.press("2")
        widgets = [*app.query("Chart"), *app.query("FlowText"), *app.query(RowList)]
        before = {widget: widget.draws for widget in widgets}  # type: ignore[attr-defined]
        loop = asyncio.get_running_loop()
        began = loop.time()
        n = 0
        while (seconds := loop.time() - began) < 2.0:
            for _ in range(20):
                n += 1
                data = {"step": n, "loss": 1.0 / n, "tokens": n, "step_s": 0.1, "ring_depth": n % 8, "ring_slots": 8}
                source.board.apply(EventSeen("ct200", "train-1", source.board.clock(), "train.step", data))
            await asyncio.sleep(0.005)
        most = max(widget.draws - before[widget] for widget in widgets)  # type: ignore[attr-defined]
        assert n > 1000
        assert 3 <= most <= 4 * seconds + 1


async def test_nothing_is_drawn_while_nothing_changes() -> None:
    async with shown(Still(None)) as (app, pilot):
        await pilot.press("4")
        await pilot.pause()
        widgets = [*app.query("Chart"), *app.query("FlowText"), *app.query(RowList)]
        before = [widget.draws for widget in widgets]  # type: ignore[attr-defined]
        await pilot.pause(1.2)
        assert [widget.draws for widget in widgets] == before  # type: ignore[attr-defined]


async def test_names_from_hosts_are_no_markup_and_no_escapes() -> None:
    source = with_run(FakeSource())
    source.board.apply(Said("[red]not red[/red] \\[x"))
    evil = JobSeen("eval-1", "evaluate", "", "failed", "[bold]x", source.board.clock(), "demo:[link=x]y")
    source.board.apply(JobsSeen("ct129", [evil]))
    async with shown(source) as (app, pilot):
        for key in ("1", "4", "5"):
            await pilot.press(key)
            await pilot.pause()
        assert "[red]not red[/red]" in screen_text(app)
        await pilot.press("ctrl+p")
        await pilot.pause(0.5)
        await pilot.press("escape")


@pytest.mark.parametrize("size", [(1, 1), (20, 5), (30, 8), (80, 24), (179, 30), (180, 30), (300, 90)])
async def test_every_view_fits_any_size(size: tuple[int, int]) -> None:
    async with shown(Still(45.0), size) as (app, pilot):
        for key in ("1", "2", "3", "4", "5", "question_mark", "escape"):
            await pilot.press(key)
            await pilot.pause()
        await pilot.resize_terminal(100, 30)
        await pilot.pause()
        assert "dflash" in screen_text(app)


def texts(board: Board, width: int) -> list[Text]:
    """Everything that the views make of a board."""
    rows: list[Row] = []
    for section in (None, *SECTIONS):
        rows += overview_rows(board, section=section)
    rows += checkpoint_rows(board, board.run_names())
    rows += log_rows(list(board.log))
    found = [row.draw(width) for row in rows]
    for run in board.ordered_runs():
        found += [run_heading(board, run, width), run_facts(board, run, width)]
    for evaluation in board.ordered_evaluations():
        found.append(evaluation_details(board, evaluation, width))
    return found


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(EVENTS, max_size=12), st.integers(20, 220))
def test_whatever_a_host_writes_can_be_drawn_and_holds_no_control(events: list[Observation], width: int) -> None:
    for text in texts(odd_board(events), width):
        assert not any(ord(c) < 32 and c != "\n" for c in text.plain)


@pytest.mark.parametrize("ascii_only", [True, False])
@given(st.lists(st.floats() | st.none(), max_size=400), st.integers(1, 60), st.integers(1, 12), st.booleans())
@example([0.0, 8.98846567431158e307], 2, 1, False)
@example([-1.7976931348623157e308, 1.7976931348623157e308], 60, 12, False)
def test_a_chart_has_its_size_whatever_the_values(
    ascii_only: bool, values: list[float | None], width: int, height: int, log: bool
) -> None:
    ys = [float("nan") if value is None else value for value in values]
    lines = draw_chart(list(range(len(ys))), ys, width, height, log=log, ascii_only=ascii_only)
    assert [len(line) for line in lines] == [width] * height


def test_a_chart_leaves_a_gap_where_a_value_is_no_number() -> None:
    lines = draw_chart([0, 1, 2, 3, 4], [1, 1, float("nan"), 1, 1], 10, 1, ascii_only=True)
    assert " " in lines[0].strip()


def test_ascii_terminals_get_ascii() -> None:
    use_ascii(True)
    try:
        source = Still(45.0)
        drawn = "\n".join(drawable(text).plain for text in texts(source.board, 120))
    finally:
        use_ascii(False)
    assert drawn.isascii()


def test_accepted_drafts_are_coloured_and_the_targets_own_underlined() -> None:
    source = Still(None)
    result = source.board.ordered_evaluations()[0].result
    assert result is not None
    prompt = result.prompts[0]
    text = completion_text(prompt)
    assert text.plain == "".join(prompt.pieces)
    underlined = sum(span.style == "underline" for span in text.spans)
    assert underlined == sum(y > m for y, m in zip(prompt.accepted, prompt.matched, strict=True))


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_screens_look_as_they_were_judged(
    screen: str, size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    use_utc()
    use_ascii(False)
    svg = await picture(screen, size)
    expected = SNAPSHOTS / f"{screen}-{size[0]}x{size[1]}.svg"
    if svg != expected.read_text():
        found = tmp_path / expected.name
        found.write_text(svg)
        pytest.fail(f"{expected.name} differs; look at {found}, and if it is right: python -m tools.pictures")
