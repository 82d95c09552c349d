"""The whole flow on real SSH servers with a tiny target: train, follow, check, stage, evaluate before and after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dflash_console.core import demo_hosts
from dflash_console.core.demo import TARGET_NAME, DemoOptions, DemoReport, run_demo, train_stage_evaluate
from dflash_console.core.errors import JobFailedError
from dflash_console.core.jobs import list_jobs
from dflash_console.core.profiles import Profile, load_profile
from dflash_console.core.ssh import Connections
from dflash_engine.events import Event
from tests.models import make_target
from tests.training import write_recipe

ROOT = Path(__file__).resolve().parents[2]


class Heard:
    """A report that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.events: list[tuple[str, Event]] = []

    def report(self) -> DemoReport:
        return DemoReport(self.said.append, lambda host, event: self.events.append((host, event)))

    def of(self, kind: str) -> list[Event]:
        return [event for _, event in self.events if event.type == kind]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, recipe, chats and prompts."""
    folder = tmp_path_factory.mktemp("material")
    make_target(folder / "target")
    write_recipe(folder)
    prompts = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"say {i}"}]} for i in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return folder


def options(material: Path, root: Path, steps: int = 0) -> DemoOptions:
    return DemoOptions(
        root=root,
        steps=steps,
        target=material / "target",
        recipe=material / "recipe.toml",
        prompts=material / "prompts.jsonl",
    )


def with_target(profile: Profile, target: Path) -> Profile:
    hosts = {
        name: msgspec.structs.replace(host, targets={TARGET_NAME: str(target)}) for name, host in profile.hosts.items()
    }
    return msgspec.structs.replace(profile, hosts=hosts)


async def test_train_stage_and_evaluate_on_either_kind_of_server(
    two_hosts: Profile, material: Path, tmp_path: Path
) -> None:
    heard = Heard()
    profile = with_target(two_hosts, material / "target")
    summary = await train_stage_evaluate(profile, options(material, tmp_path), heard.report(), began=time.monotonic())
    assert summary.steps == 10
    assert [event.data["step"] for event in heard.of("train.step")] == list(range(1, 11))
    assert summary.tokens == sum(event.data["tokens"] for event in heard.of("train.step"))
    assert summary.tokens_per_s == pytest.approx(summary.tokens / summary.train_s)
    results = [event.data for event in heard.of("eval.result")]
    assert [result["tau"] for result in results] == [summary.untrained.tau, summary.trained.tau]
    assert summary.gain == pytest.approx(summary.trained.tau - summary.untrained.tau)
    states = Counter((event.data["n"], event.data["state"]) for event in heard.of("eval.step"))
    assert all(states[n, "started"] == 2 for n in range(1, 6))
    # The second evaluation has another drafter, but the same target and prompts.
    assert (states[3, "cached"], states[4, "cached"]) == (1, 1)
    staged = Path(summary.staged)
    assert staged.is_dir()
    assert (staged / "model.safetensors").read_bytes() == Path(summary.checkpoint, "model.safetensors").read_bytes()
    assert not (staged / "trainer").exists()
    for measured in (summary.untrained, summary.trained):
        stored = json.loads(Path(measured.path, "result.json").read_text())
        assert stored["tau"] == measured.tau
        assert stored["engine_hash"]


async def test_a_training_that_cannot_start_is_said_with_its_reason(
    two_hosts: Profile, material: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    make_target(broken)
    (broken / "model.safetensors").write_bytes(b"nothing")
    heard = Heard()
    with pytest.raises(BaseExceptionGroup) as caught:
        await train_stage_evaluate(
            with_target(two_hosts, broken), options(material, tmp_path), heard.report(), began=time.monotonic()
        )
    assert caught.group_contains(JobFailedError, depth=1)
    assert any("model.safetensors" in event.data["message"] for event in heard.of("alert"))


@pytest.fixture
async def demo_root(tmp_path: Path) -> AsyncIterator[Path]:
    """Where demo hosts may be started; they are stopped whatever the test did."""
    yield tmp_path / "demo"
    await demo_hosts.stop_demo_hosts(tmp_path / "demo")


_CONSOLE = """
import asyncio, sys
from pathlib import Path
from dflash_console.core.demo import DemoOptions, DemoReport, run_demo
root, material, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
options = DemoOptions(root=root, steps=steps, target=material / "target", recipe=material / "recipe.toml",
                      prompts=material / "prompts.jsonl")
say = lambda text: print(text, flush=True)
asyncio.run(run_demo(options, DemoReport(say, lambda host, event: say(event.type))))
"""


async def test_kill_9_of_the_console_leaves_the_training_running_and_a_second_console_finds_it(
    demo_root: Path, material: Path
) -> None:
    steps = 1500  # long enough for the second console to connect while it runs
    first = subprocess.Popen(
        [sys.executable, "-c", _CONSOLE, str(demo_root), str(material), str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    assert first.stdout is not None
    assert any(line.strip() == "train.step" for line in first.stdout)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    heard = Heard()
    summary = await run_demo(options(material, demo_root, steps), heard.report())
    assert any("is running already" in text for text in heard.said)
    assert [event.data["step"] for event in heard.of("train.step")] == list(range(1, steps + 1))
    assert summary.steps == steps
    async with Connections(load_profile(str(demo_hosts.profile_path(demo_root)), ())) as hosts:
        jobs = await list_jobs(await hosts.get("ct200"))
    assert [(job.kind, job.state) for job in jobs] == [("train", "finished")]
