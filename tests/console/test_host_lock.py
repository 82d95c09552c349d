"""The lock on a host: one console at a time, and a dead one loses its turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dflash_console.core import host_lock as module
from dflash_console.core.errors import RemoteCommandError
from dflash_console.core.host_lock import host_lock
from dflash_console.core.profiles import Profile
from dflash_console.core.ssh import Connections, HostConnection


@pytest.fixture
async def consoles(ssh_host: Profile) -> AsyncIterator[tuple[HostConnection, HostConnection]]:
    """Two connections to the same host, as two consoles have them."""
    async with Connections(ssh_host) as first, Connections(ssh_host) as second:
        yield await first.get("ct200"), await second.get("ct200")


def _locks(conn: HostConnection) -> list[str]:
    return sorted(path.name for path in Path(conn.state, "cache", "locks").iterdir())


async def test_the_second_console_enters_when_the_first_has_left(
    consoles: tuple[HostConnection, HostConnection],
) -> None:
    first, second = consoles
    order: list[str] = []
    waiting = asyncio.Event()

    async def enter_second() -> None:
        async with host_lock(second, "thing", on_wait=waiting.set):
            order.append("second")

    async with host_lock(first, "thing"):
        other = asyncio.create_task(enter_second())
        await waiting.wait()
        order.append("first")
    await other
    assert order == ["first", "second"]
    assert _locks(first) == []


async def test_many_consoles_at_once_are_never_inside_together(
    consoles: tuple[HostConnection, HostConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    inside = 0
    most = 0

    async def work(conn: HostConnection) -> None:
        nonlocal inside, most
        async with host_lock(conn, "thing"):
            inside += 1
            most = max(most, inside)
            await conn.list_dir(conn.state)
            inside -= 1

    await asyncio.gather(*(work(conn) for conn in consoles * 4))
    assert most == 1
    assert _locks(consoles[0]) == []


async def test_two_names_do_not_wait_for_each_other(consoles: tuple[HostConnection, HostConnection]) -> None:
    async with host_lock(consoles[0], "one"), host_lock(consoles[1], "other"):
        assert _locks(consoles[0]) == ["one.lock", "other.lock"]


async def test_the_lock_of_a_dead_console_is_taken_over_by_one_waiter(
    consoles: tuple[HostConnection, HostConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALE_AFTER_S", 1.2)
    dead = Path(consoles[0].state, "cache", "locks", "thing.lock")
    dead.mkdir(parents=True)
    (dead / "owner-0123").touch()
    entered: list[str] = []

    async def work(conn: HostConnection) -> None:
        async with host_lock(conn, "thing"):
            entered.append(next(dead.iterdir()).name)
            assert entered[-1] != "owner-0123"

    await asyncio.gather(*(work(conn) for conn in consoles))
    assert len(set(entered)) == 2
    assert _locks(consoles[0]) == []


async def test_an_empty_lock_folder_is_free(consoles: tuple[HostConnection, HostConnection]) -> None:
    Path(consoles[0].state, "cache", "locks", "thing.lock").mkdir(parents=True)
    async with host_lock(consoles[0], "thing"):
        assert _locks(consoles[0]) == ["thing.lock"]


async def test_a_living_owner_is_not_taken_for_dead_however_long_it_works(
    consoles: tuple[HostConnection, HostConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALE_AFTER_S", 1.5)
    waiting = asyncio.Event()

    async def enter_second() -> None:
        async with host_lock(consoles[1], "thing", on_wait=waiting.set):
            pass

    async with host_lock(consoles[0], "thing"):
        other = asyncio.create_task(enter_second())
        await waiting.wait()
        # Longer than the limit, and only time can show it.
        done, _ = await asyncio.wait([other], timeout=3.5)
        assert not done
    await other


async def test_an_owner_whose_lock_was_taken_over_is_stopped(
    consoles: tuple[HostConnection, HostConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALE_AFTER_S", 0.5)
    lock = Path(consoles[0].state, "cache", "locks", "thing.lock")

    async def lose_it() -> None:
        async with host_lock(consoles[0], "thing"):
            (owner,) = lock.iterdir()
            owner.rename(lock / "owner-somebody")
            await asyncio.Event().wait()

    with pytest.raises(RemoteCommandError, match="another console took over"):
        await lose_it()
    assert [path.name for path in lock.iterdir()] == ["owner-somebody"]


async def test_an_error_in_the_body_comes_out_as_itself_and_frees_the_lock(
    consoles: tuple[HostConnection, HostConnection],
) -> None:
    async def fail() -> None:
        async with host_lock(consoles[0], "thing"):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await fail()
    assert _locks(consoles[0]) == []
