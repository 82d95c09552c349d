"""The dashboard over real cores: it starts the demo with a tiny target, watches, stages, evaluates, loses a host.

One test, because it is one story: the same operator, the same hosts, one thing after the other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from dflash_console.app import Dashboard
from dflash_console.core import demo_hosts
from dflash_console.core.live import DemoSource, LiveSource
from dflash_console.core.operations import DemoRequest, Operations
from dflash_console.core.profiles import load_profile
from dflash_console.dashboard import settle_memory
from tests.console.test_dashboard import keys_text, screen_text
from tests.loop_stalls import measured_stalls
from tests.models import make_target
from tests.training import write_recipe

_LONGEST_STALL_S = 0.05


@pytest.fixture
async def root(tmp_path: Path) -> AsyncIterator[Path]:
    yield tmp_path / "demo"
    await demo_hosts.stop_demo_hosts(tmp_path / "demo")


async def until(pilot: Pilot[None], true: Callable[[], object], what: str, timeout_s: float = 90.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not true():
                await pilot.pause(0.05)
    except TimeoutError:
        assert isinstance(pilot.app, Dashboard)
        raise AssertionError(f"waited for {what}:\n{screen_text(pilot.app)}") from None


async def test_watch_stage_evaluate_lose_a_host_quit_and_come_back(root: Path, tmp_path: Path) -> None:
    material = tmp_path / "material"
    material.mkdir()
    make_target(material / "target")
    write_recipe(material)
    recipe = material / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("checkpoint_every = 100", "checkpoint_every = 10"))
    prompts = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"say {i}"}]} for i in range(3)]
    (material / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    operations = tmp_path / "operations"
    request = DemoRequest(
        root=str(root),
        steps=30,
        target=str(material / "target"),
        recipe=str(recipe),
        prompts=str(material / "prompts.jsonl"),
    )
    with measured_stalls() as stalls:
        demo = DemoSource(request, Operations(operations))
        app = Dashboard(demo)
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.pause()
            settle_memory()  # as the command does; this process holds torch, because it made the target
            await pilot.pause()
            stalls.begin()
            await until(pilot, lambda: demo.is_over, "the end of the demo")
            assert demo.failure is None
            await until(pilot, lambda: "finished" in screen_text(app), "the finished evaluations")
            (run,) = demo.board.ordered_runs()
            await until(pilot, lambda: all(e.result for e in demo.board.ordered_evaluations()), "both results")
            assert run.curve.step == 30
            assert len(demo.board.evaluations) == 2

            # A checkpoint of the middle is neither staged nor evaluated yet: both, by one key.
            await pilot.press("3")
            middle = next(s.name for s in demo.board.checkpoints_of(run.name) if set(s.copies) == {"ct200"})
            app.views[2].main_list.choose(("checkpoint", run.name, middle))
            await pilot.pause()
            assert f"stage {middle} to ct129" in keys_text(app)
            await pilot.press("s")
            await until(pilot, lambda: "ct129" in demo.board.checkpoints[run.name, middle].copies, "the staged copy")
            await until(pilot, lambda: f"evaluate {middle} on ct129" in keys_text(app), "e to be offered")
            await pilot.press("e")
            name = f"{run.name}:{middle}"
            await until(pilot, lambda: demo.board.evaluations_of(name), "the evaluation")
            await pilot.press("4")
            await until(pilot, lambda: demo.board.evaluations_of(name)[0].result, "its tau")
            assert all(step.has_ended for step in demo.board.evaluations_of(name)[0].steps)
            app.open_key(("evaluation", "ct129", demo.board.evaluations_of(name)[0].job.id))
            await pilot.pause()
            assert f"{demo.board.evaluations_of(name)[0].tau:.3f}" in screen_text(app)

            # The hosts go away; what was known stays, and is said to be old.
            await pilot.press("1")
            await demo_hosts.stop_demo_hosts(root)
            await until(pilot, lambda: "unreachable" in screen_text(app), "the loss to be said", 30.0)
            assert demo.board.runs[run.host, run.name].job.state == "finished"
            await pilot.press("q")
        assert stalls.longest_s <= _LONGEST_STALL_S, (stalls.longest_s, stalls.what)

    # Quit, and come back another day: hosts on other ports, the same state folders.
    running = await demo_hosts.start_demo_hosts(root, ["ct200", "ct129"])
    demo_hosts.write_demo_profile(
        root,
        running,
        targets={"tiny": material / "target"},
        prompts={"heldout": material / "prompts.jsonl"},
        roles={"ct200": "train", "ct129": "evaluate"},
    )
    source = LiveSource(load_profile(str(demo_hosts.profile_path(root)), ()), Operations(operations))
    again = Dashboard(source)
    async with again.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: len(source.board.evaluations) == 3, "the three evaluations")
        await until(pilot, lambda: all(e.result for e in source.board.ordered_evaluations()), "their results")
        await until(pilot, lambda: source.board.ordered_runs()[0].curve.step == 30, "the run's curve")
