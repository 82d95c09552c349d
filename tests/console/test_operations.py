"""Operations: started by a key, done by a process of their own, seen by every dashboard of this operator."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from dflash_console.core.demo import DemoSummary, Measured
from dflash_console.core.observations import Said, TransferSeen
from dflash_console.core.operations import EvaluateRequest, OperationFinished, Operations, StageRequest
from dflash_console.core.profiles import Profile
from dflash_engine.events import Event, EventWriter
from dflash_engine.processes import process_identity
from tests.checkpoint_folders import make_checkpoint
from tests.hosts import serving

ROOT = Path(__file__).resolve().parents[2]


def profile_file(profile: Profile, path: Path) -> Path:
    """The profile as a TOML file, for a process that loads it by its path."""
    lines = []
    for host in profile.hosts.values():
        lines += [f"[hosts.{host.name}]", f'address = "{host.address}"', f"port = {host.port}", f'user = "{host.user}"']
        lines += [f'identity = "{host.identity}"', f'known_hosts = "{host.known_hosts}"', f'state = "{host.state}"']
        lines += [f'python = "{host.python}"']
    path.write_text("\n".join(lines) + "\n")
    return path


def heard(operations: Operations, timeout_s: float = 60.0) -> list[object]:
    """All news until an operation has finished."""
    found: list[object] = []
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for _, news in operations.news():
            found.append(news)
            if isinstance(news, Event) and news.type == OperationFinished.TYPE:
                return found
        time.sleep(0.02)
    raise AssertionError(f"not finished after {timeout_s} s: {found}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "operations"


def request(profile: Path) -> StageRequest:
    return StageRequest(str(profile), "demo", "step_5", "ct200", "ct129")


def test_a_staging_is_done_and_its_progress_told(tmp_path: Path, folder: Path) -> None:
    with serving("openssh", tmp_path, ["ct200", "ct129"]) as profile:
        path = profile_file(profile, tmp_path / "lab.toml")
        source = make_checkpoint(Path(profile.hosts["ct200"].state), "demo", 5)
        operations = Operations(folder, str(path))
        operations.start(request(path))
        news = heard(operations)
        last = [seen for seen in news if isinstance(seen, TransferSeen)][-1]
        assert (last.state, last.bytes_done) == ("done", last.bytes_total)
        copy = Path(profile.hosts["ct129"].state) / "runs/demo/checkpoints/step_5"
        assert (copy / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


_STARTER = """
import sys
from pathlib import Path
from dflash_console.core.operations import Operations, StageRequest
print(Operations(Path(sys.argv[1])).start(StageRequest(sys.argv[2], "demo", "step_5", "ct200", "ct129")), flush=True)
input()
"""


def test_it_goes_on_when_whoever_started_it_is_killed(tmp_path: Path, folder: Path) -> None:
    with serving("asyncssh", tmp_path, ["ct200", "ct129"]) as profile:
        path = profile_file(profile, tmp_path / "lab.toml")
        home = tmp_path / "demo" / "ct200" / "home" / "dflash"
        make_checkpoint(home, "demo", 5)
        starter = subprocess.Popen(
            [sys.executable, "-c", _STARTER, str(folder), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        assert starter.stdout is not None
        assert starter.stdout.readline().strip()
        os.killpg(starter.pid, signal.SIGKILL)
        starter.wait()
        news = heard(Operations(folder, str(path)))  # another dashboard
        assert [seen.state for seen in news if isinstance(seen, TransferSeen)][-1] == "done"


def test_a_failure_is_told_with_its_reason(tmp_path: Path, folder: Path) -> None:
    with serving("openssh", tmp_path, ["ct200", "ct129"]) as profile:
        path = profile_file(profile, tmp_path / "lab.toml")
        operations = Operations(folder, str(path))
        operations.start(request(path))
        news = heard(operations)
        (failed,) = [seen for seen in news if isinstance(seen, TransferSeen) and seen.state == "failed"]
        assert "no checkpoint demo:step_5" in failed.message
        assert any(isinstance(seen, Said) and seen.level == "error" for seen in news)


def test_a_killed_operation_is_called_interrupted(tmp_path: Path, folder: Path) -> None:
    # Its host takes the connection and never says a word, so that the process is there to be killed.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        path = tmp_path / "lab.toml"
        port = silent.getsockname()[1]
        host = f'address = "127.0.0.1"\nport = {port}\nconnect_timeout_s = 60.0\n'
        path.write_text(f"[hosts.ct200]\n{host}[hosts.ct129]\n{host}")
        operations = Operations(folder, str(path))
        name = operations.start(request(path))
        events = folder / name / "events.jsonl"
        deadline = time.monotonic() + 30
        while not (events.exists() and events.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(json.loads((folder / name / "process.json").read_text())["pid"], signal.SIGKILL)
        news = heard(operations)
        (transfer,) = [seen for seen in news if isinstance(seen, TransferSeen) and seen.state == "interrupted"]
        assert "staging again goes on from there" in transfer.message


def test_operations_of_other_profiles_and_long_ended_ones_are_no_news(tmp_path: Path, folder: Path) -> None:
    ours = Operations(folder, "/profiles/ours.toml")
    for name, profile in (("20260101-000000-stage-aaaaaa", "ours"), ("20260101-000001-stage-bbbbbb", "theirs")):
        place = folder / name
        place.mkdir(parents=True)
        asked = EvaluateRequest(f"/profiles/{profile}.toml", "demo", "step_5", "ct129")
        (place / "request.json").write_bytes(msgspec.json.encode(asked))
        writer = EventWriter(place / "events.jsonl")
        writer.write(OperationFinished(1, f"of {profile}"))
        writer.close()
        if profile == "ours":
            os.utime(place / "events.jsonl", (time.time() - 7200, time.time() - 7200))
    assert list(ours.news()) == []


def test_folders_of_last_week_are_removed_and_live_ones_never(folder: Path) -> None:
    operations = Operations(folder)
    old, live = folder / "20260101-000000-stage-aaaaaa", folder / "20260101-000001-stage-bbbbbb"
    for place in (old, live):
        place.mkdir(parents=True)
        (place / "events.jsonl").write_text("")
        os.utime(place / "events.jsonl", (0, 0))
        os.utime(place, (0, 0))
    identity = process_identity(os.getpid())
    assert identity is not None
    (live / "process.json").write_text(json.dumps(asdict(identity)))
    operations.prune()
    assert not old.exists()
    assert live.exists()


def test_the_summary_of_a_demo_survives_its_record() -> None:
    # The dashboard of a demo that ran to its end ended in an internal error: the profile's path came back as text.
    measured = Measured("c", 1.6, 1.7, [0.4, 0.1], prompts=4, steps=9, path="/r.json")
    summary = DemoSummary(
        run="r", steps=1, tokens=2, tokens_per_s=3.0, train_s=4.0, loss_first=5.0, loss_last=6.0, untrained=measured,
        trained=measured, gain=7.0, expected_gain=8.0, bytes_staged=9, seconds=10.0, profile=Path("/p.toml"),
        checkpoint="c", staged="s",
    )  # fmt: skip
    line = json.dumps(summary.to_builtins())
    assert DemoSummary.from_builtins(json.loads(line)) == summary
