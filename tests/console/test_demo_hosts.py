"""The demo's hosts: they outlive whoever started them, are found again, and let nobody else in."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import asyncssh
import msgspec
import pytest

from dflash_console.core import demo_hosts
from dflash_console.core.demo_hosts import (
    DemoHosts,
    running_demo_hosts,
    start_demo_hosts,
    stop_demo_hosts,
    write_demo_profile,
)
from dflash_console.core.errors import HostNotReadyError, ProfileError, UnreachableError
from dflash_console.core.profiles import Profile, load_profile
from dflash_console.core.ssh import Connections

NAMES = ["ct200", "ct129"]


@pytest.fixture
async def root(tmp_path: Path) -> AsyncIterator[Path]:
    """Where a test's demo hosts live; none is left running."""
    folder = tmp_path / 'it\'s a "root"'
    yield folder
    await stop_demo_hosts(folder)


def profile_of(root: Path, hosts: DemoHosts) -> Profile:
    """The profile that the demo writes, loaded."""
    write_demo_profile(
        root,
        hosts,
        targets={"tiny": root / "tiny"},
        prompts={"heldout": root / "p.jsonl"},
        roles={"ct200": "train"},
    )
    return load_profile(str(demo_hosts.profile_path(root)), [])


def ended(pid: int, timeout_s: float = 10.0) -> bool:
    """Whether the process ends in time; waits for the kernel's word, not for a while."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


async def test_both_hosts_are_reached_through_the_profile_and_stopped(root: Path) -> None:
    assert await running_demo_hosts(root) is None
    hosts = await start_demo_hosts(root, NAMES)
    assert await running_demo_hosts(root) == hosts
    profile = profile_of(root, hosts)
    assert list(profile.hosts) == NAMES
    assert (profile.evaluate.target, profile.evaluate.prompts) == ("tiny", ("heldout",))
    assert profile.hosts["ct129"].targets == {"tiny": str(root / "tiny")}
    async with Connections(profile) as connections:
        for name in NAMES:
            conn = await connections.get(name)
            home = str(root / name / "home")
            result = await conn.run(["sh", "-c", 'printf "%s|" "$HOME" "$PWD" "$USER" "$DFLASH_DATA_DIR"'])
            assert result.stdout.decode().split("|") == [home, home, "demo", "", ""]
            assert await conn.sftp.realpath(".") == home
            assert str(conn.state) == f"{home}/dflash"
    assert await stop_demo_hosts(root)
    assert await running_demo_hosts(root) is None
    assert ended(hosts.pid, 0)
    assert not await stop_demo_hosts(root)
    with pytest.raises(UnreachableError):
        async with Connections(profile) as connections:
            await connections.get("ct200")


async def test_a_second_start_finds_the_first_and_two_at_once_start_one(root: Path) -> None:
    first, second = await asyncio.gather(*(start_demo_hosts(root, NAMES) for _ in range(2)))
    assert first == second == await start_demo_hosts(root, NAMES)
    with pytest.raises(HostNotReadyError, match=r"running: ct200, ct129.*--stop"):
        await start_demo_hosts(root, ["other"])


async def test_keys_are_private_and_kept_from_start_to_start(root: Path) -> None:
    def keys() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in root.rglob("*_ed25519")}

    await start_demo_hosts(root, NAMES)
    before = keys()
    assert len(before) == 3
    assert all(Path(path).stat().st_mode & 0o777 == 0o600 for path in before)
    await stop_demo_hosts(root)
    await start_demo_hosts(root, NAMES)
    assert keys() == before


async def test_only_the_clients_key_lets_anybody_in(root: Path) -> None:
    hosts = await start_demo_hosts(root, ["ct200"])
    stranger = asyncssh.generate_private_key("ssh-ed25519")
    for credentials in ({"client_keys": [stranger]}, {"client_keys": None, "password": "demo"}):
        with pytest.raises(asyncssh.PermissionDenied):
            await asyncssh.connect(
                "127.0.0.1",
                hosts.hosts["ct200"].port,
                username="demo",
                known_hosts=str(demo_hosts.known_hosts_path(root)),
                **credentials,
            )


async def test_a_console_killed_by_sigkill_leaves_its_hosts_up(root: Path) -> None:
    program = (
        "import asyncio, pathlib, sys, signal\n"
        "from dflash_console.core.demo_hosts import start_demo_hosts\n"
        "print(asyncio.run(start_demo_hosts(pathlib.Path(sys.argv[1]), ['ct200'])).pid, flush=True)\n"
        "signal.pause()\n"
    )
    checkout = str(Path(__file__).resolve().parents[2])
    console = subprocess.Popen(
        [sys.executable, "-c", program, str(root)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": checkout},
        start_new_session=True,
    )
    assert console.stdout is not None
    pid = int(await asyncio.to_thread(console.stdout.readline))
    os.killpg(console.pid, signal.SIGKILL)
    # End of file: nothing that is left holds the dead console's streams.
    assert await asyncio.to_thread(console.stdout.read) == b""
    console.wait()
    hosts = await running_demo_hosts(root)
    assert hosts is not None
    assert hosts.pid == pid
    async with Connections(profile_of(root, hosts)) as connections:
        assert (await (await connections.get("ct200")).run(["echo", "up"])).stdout == b"up\n"


async def test_a_recycled_pid_is_not_a_running_server(root: Path) -> None:
    root.mkdir()
    for changes in ({"start_ticks": 1}, {"boot_id": "another"}):
        identity = {"pid": os.getpid(), "start_ticks": 1, "boot_id": "x", "hosts": {}} | changes
        demo_hosts.hosts_path(root).write_bytes(msgspec.json.encode(identity))
        assert await running_demo_hosts(root) is None
        assert not await stop_demo_hosts(root)


async def test_a_command_dies_with_its_channel_unless_it_has_left_its_session(root: Path) -> None:
    hosts = await start_demo_hosts(root, ["ct200"])
    home = Path(hosts.hosts["ct200"].home)
    script = (
        "setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $! > detached; "
        "sleep 600 & echo $! > attached; mkfifo ready; echo > ready; wait"
    )
    async with Connections(profile_of(root, hosts)) as connections:
        conn = await connections.get("ct200")
        running = asyncio.create_task(conn.run(["sh", "-c", script]))
        while not (home / "ready").exists():
            await asyncio.wait([running], timeout=0.02)
        await asyncio.to_thread((home / "ready").read_bytes)
    await asyncio.gather(running, return_exceptions=True)
    attached, detached = (int((home / name).read_text()) for name in ("attached", "detached"))
    try:
        assert await asyncio.to_thread(ended, attached)
        assert not ended(detached, 0)
        await stop_demo_hosts(root)
        assert not ended(detached, 0)
    finally:
        os.kill(detached, signal.SIGKILL)


async def test_a_host_that_cannot_start_says_where_its_log_is(root: Path) -> None:
    root.mkdir()
    demo_hosts.identity_path(root).write_text("not a key")
    with pytest.raises(HostNotReadyError, match=r"ct200 are not up .*server\.log"):
        await start_demo_hosts(root, ["ct200"])
    assert "not a key" not in (root / "server.log").read_text()
    with pytest.raises(ProfileError, match="cannot be a host's name"):
        await start_demo_hosts(root, ["../ct200"])
