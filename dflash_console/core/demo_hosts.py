"""The demo's SSH hosts on this machine: start them, find them, stop them, and the profile that names them.

They are real SSH servers in one process of its own (`demo_server`), below one root folder: a home and a host
key for each, a client key, known_hosts, `hosts.json` (who serves, where) and `demo.toml`. The keys are made
at the first start and kept. A console that dies leaves them up, and the next one finds them.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

import dflash_console
from dflash_console.core.errors import HostNotReadyError, ProfileError
from dflash_engine.durable import write_text
from dflash_engine.layout import is_valid_name
from dflash_engine.processes import ProcessIdentity, is_alive

__all__ = [
    "USER",
    "DemoHost",
    "DemoHosts",
    "hosts_path",
    "identity_path",
    "known_hosts_path",
    "lock_path",
    "profile_path",
    "running_demo_hosts",
    "start_demo_hosts",
    "stop_demo_hosts",
    "write_demo_profile",
    "write_hosts",
]

USER = "demo"
"""The user name that the demo hosts show; any is accepted with the right key."""

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 10.0


class DemoHost(msgspec.Struct, frozen=True):
    """One demo host: its port on 127.0.0.1 and its home folder."""

    port: int
    home: str


class DemoHosts(msgspec.Struct, frozen=True):
    """A server process by its identity, and the hosts that it serves. Content of `hosts.json`."""

    pid: int
    start_ticks: int
    boot_id: str
    hosts: dict[str, DemoHost]


def hosts_path(root: Path) -> Path:
    """Who serves, and where; there while a server runs."""
    return root / "hosts.json"


def lock_path(root: Path) -> Path:
    """Locked by the server as long as it lives: one server a root."""
    return root / "lock"


def identity_path(root: Path) -> Path:
    """The client's private key."""
    return root / "client_ed25519"


def known_hosts_path(root: Path) -> Path:
    """The hosts' public keys, as known_hosts."""
    return root / "known_hosts"


def profile_path(root: Path) -> Path:
    """The profile of these hosts."""
    return root / "demo.toml"


def write_hosts(root: Path, hosts: DemoHosts) -> None:
    """Write `hosts.json` in one step."""
    write_text(hosts_path(root), msgspec.json.format(msgspec.json.encode(hosts)).decode() + "\n")


async def running_demo_hosts(root: Path) -> DemoHosts | None:
    """The hosts that are up below `root`, or None. A pid that now belongs to something else counts as none."""
    return _running(root)


async def start_demo_hosts(root: Path, names: Sequence[str]) -> DemoHosts:
    """Have hosts of these names up; returns once they accept connections.

    Running ones are returned as they are. Raises HostNotReadyError where they do not come up, or where
    others run below this root.
    """
    for name in names:
        if not is_valid_name(name):
            raise ProfileError(f"{name!r} cannot be a host's name; expected letters, digits, '.', '_' and '-'.")
    running = await running_demo_hosts(root)
    if running is None:
        await asyncio.to_thread(_spawn, root, names)
        running = await running_demo_hosts(root)
    if running is None or set(running.hosts) != set(names):
        found = ", ".join(running.hosts) if running else "none"
        raise HostNotReadyError(
            f"Demo hosts {', '.join(names)} are not up below {root}; running: {found}. "
            f"See {_log_path(root)}; `dflash-console demo --stop` ends running ones."
        )
    return running


async def stop_demo_hosts(root: Path) -> bool:
    """End the hosts below `root` and wait until they have; False where none ran. Homes and keys stay.

    Jobs that detached themselves go on, as they do on any host.
    """
    running = await running_demo_hosts(root)
    if running is None:
        return False
    await asyncio.to_thread(_end, running)
    hosts_path(root).unlink(missing_ok=True)
    return True


def write_demo_profile(
    root: Path,
    hosts: DemoHosts,
    *,
    targets: Mapping[str, Path],
    prompts: Mapping[str, Path],
    roles: Mapping[str, str],
    max_new_tokens: int = 64,
) -> Path:
    """Write the profile of these hosts; every host has all `targets`, and this Python. Returns its path.

    `roles` says what a host is for: `train` or `evaluate`.

    The first target and all prompts become the defaults of `run-eval`.
    """
    lines = ["# Written by `dflash-console demo`; each start writes it anew."]
    for name, host in hosts.hosts.items():
        lines += [
            "",
            f"[hosts.{_toml(name)}]",
            'address = "127.0.0.1"',
            f"port = {host.port}",
            f"user = {_toml(USER)}",
            f"identity = {_toml(str(identity_path(root).absolute()))}",
            f"known_hosts = {_toml(str(known_hosts_path(root).absolute()))}",
            'state = "~/dflash"',
            *([f"roles = [{_toml(roles[name])}]"] if name in roles else []),
            f"python = {_toml(sys.executable)}",
            "",
            f"[hosts.{_toml(name)}.targets]",
            *(f"{_toml(target)} = {_toml(str(folder.absolute()))}" for target, folder in targets.items()),
        ]
    lines += ["", "[prompts]"]
    lines += [f"{_toml(name)} = {_toml(str(path.absolute()))}" for name, path in prompts.items()]
    lines += ["", "[evaluate]", *(f"target = {_toml(name)}" for name in list(targets)[:1])]
    lines += [
        f"prompts = [{', '.join(_toml(name) for name in prompts)}]",
        f"max_new_tokens = {max_new_tokens}",
    ]
    write_text(profile_path(root), "\n".join(lines) + "\n")
    return profile_path(root)


def _running(root: Path) -> DemoHosts | None:
    try:
        hosts = msgspec.json.decode(hosts_path(root).read_bytes(), type=DemoHosts)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return hosts if is_alive(ProcessIdentity(hosts.pid, hosts.start_ticks, hosts.boot_id)) else None


def _log_path(root: Path) -> Path:
    return root / "server.log"


def _spawn(root: Path, names: Sequence[str]) -> None:
    """Start the server and wait for its word; it takes over nothing of ours but a log file and the pipe."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    reader, writer = os.pipe()
    try:
        command = [sys.executable, "-m", "dflash_console.core.demo_server", "--root", str(root.absolute())]
        command += ["--ready-fd", str(writer), *(word for name in names for word in ("--name", name))]
        with _log_path(root).open("ab") as log:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[writer],
                start_new_session=True,
                cwd=root,
                # From a checkout that is not installed, the packages lie where they lay for this process.
                env={**os.environ, "PYTHONPATH": str(Path(dflash_console.__file__).resolve().parents[1])},
                timeout=_START_TIMEOUT_S,
                check=False,
            )
        os.close(writer)
        writer = -1
        word = _wait_readable(reader, _START_TIMEOUT_S) and os.read(reader, 16)
    except subprocess.TimeoutExpired:
        return
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
    if word == b"busy":
        _wait_for_other(root)


def _wait_for_other(root: Path) -> None:
    """Another console is starting the hosts just now; its server writes `hosts.json` when they accept."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while _running(root) is None and time.monotonic() < deadline:
        time.sleep(0.05)


def _end(hosts: DemoHosts) -> None:
    try:
        process = os.pidfd_open(hosts.pid)
    except ProcessLookupError:
        return
    try:
        # Looked at again with the descriptor in hand: from here on the pid cannot mean another process.
        if not is_alive(ProcessIdentity(hosts.pid, hosts.start_ticks, hosts.boot_id)):
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(process, number)
            if _wait_readable(process, _STOP_TIMEOUT_S):
                return
    finally:
        os.close(process)


def _wait_readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _toml(text: str) -> str:
    """A TOML basic string; JSON's escapes are TOML's, which also wants DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
