"""The recorded session: small, nobody's paths in it, played by the same board without SSH or torch."""

from __future__ import annotations

import asyncio
import gzip
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_console.core.errors import ConsoleError, NotFoundError
from dflash_console.core.replay import ReplaySource, recorded_demo

ROOT = Path(__file__).resolve().parents[2]


def test_what_ships_is_small_and_names_no_place_of_the_machine_it_came_from() -> None:
    assert recorded_demo().stat().st_size < 300_000
    text = gzip.decompress(recorded_demo().read_bytes()).decode()
    assert not re.search(r"/(root|home|tmp|work|usr|opt)/", text)


def test_it_ends_with_a_drafter_that_learnt_something() -> None:
    source = ReplaySource(recorded_demo())
    source.play_until(source.seconds)
    board = source.board
    (run,) = board.ordered_runs()
    assert (run.curve.step, run.job.state) == (800, "finished")
    after, before = board.ordered_evaluations()
    assert before.tau == pytest.approx(1.0)
    assert after.tau > before.tau + 0.4
    assert after.result is not None
    assert all("".join(prompt.pieces) for prompt in after.result.prompts)
    newest = board.newest_usable(run.name)
    assert newest is not None
    assert newest.name == "step_800"


def test_the_boards_clock_is_the_recorded_one() -> None:
    source = ReplaySource(recorded_demo())
    source.play_until(60.0)
    run = source.board.ordered_runs()[0]
    assert run.last_t is not None
    assert 0 <= source.board.clock() - run.last_t < 5


async def test_it_plays_as_fast_as_it_says() -> None:
    source = ReplaySource(recorded_demo(), speed=400.0)
    await asyncio.wait_for(source.run(), 10)
    assert "at its end" in source.title
    assert source.board.ordered_runs()[0].curve.step == 800


def test_nothing_can_be_started_from_it() -> None:
    source = ReplaySource(recorded_demo())
    with pytest.raises(ConsoleError, match="replay"):
        source.stage("demo", "step_1", "ct200", "ct129")
    with pytest.raises(ConsoleError, match="replay"):
        source.evaluate("demo", "step_1", "ct129", "")


@pytest.mark.parametrize("content", [b"", b"no gzip", gzip.compress(b""), gzip.compress(b'{"v":1}\n'), b"\x1f\x8b\x08"])
def test_what_is_no_recording_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gz").write_bytes(content)
    with pytest.raises(NotFoundError, match="no recording"):
        ReplaySource(tmp_path / "x.gz")


def test_a_replay_loads_neither_ssh_nor_torch() -> None:
    code = (
        "import sys, dflash_console.app, dflash_console.core.replay as r; r.ReplaySource(r.recorded_demo());"
        "print([m for m in ('asyncssh', 'torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
