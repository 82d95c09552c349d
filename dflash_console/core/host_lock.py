"""A lock on a host, kept over SFTP: one console at a time works on a thing, and a dead console loses its
turn.

The lock is a folder below `<state>/cache/locks/` that holds one file, `owner-<token>`. It is taken by
renaming a prepared folder onto the name: a rename onto a folder that is not empty fails, so exactly one
console wins, and what it wins already names it. The owner touches its file every few seconds. A waiter that
sees the file unchanged for `STALE_AFTER_S` of its own clock takes over by renaming `owner-<old>` to
`owner-<own>`, which works for one waiter only and never on a lock that changed hands meanwhile. An owner
that finds its file gone stops.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import PurePosixPath

from dflash_console.core.errors import ConsoleError, NotFoundError, RemoteCommandError
from dflash_console.core.ssh import HostConnection

__all__ = ["STALE_AFTER_S", "host_lock"]

STALE_AFTER_S = 20.0
"""Seconds without a sign of life after which an owner counts as dead."""

_POLL_S = 0.3
_RELEASE_TIMEOUT_S = 10.0
_MAX_BLIND_TRIES = 20  # renames refused although no owner is to be seen: the server does not do what we need


@asynccontextmanager
async def host_lock(
    conn: HostConnection, name: str, *, on_wait: Callable[[], None] | None = None
) -> AsyncIterator[None]:
    """Hold the lock `name` on the host while the body runs; waits as long as a living console holds it.

    `on_wait` is called once when there is someone to wait for. Raises RemoteCommandError where the lock was
    lost to another console during the body (which is cancelled), or where the host cannot do locks.
    """
    locks = conn.state / "cache" / "locks"
    await conn.make_dirs(locks)
    lock = locks / f"{name}.lock"
    token = secrets.token_hex(8)
    await _acquire(conn, lock, token, on_wait)
    owner = lock / f"owner-{token}"
    try:
        async with asyncio.TaskGroup() as group:
            heartbeat = group.create_task(_keep_alive(conn, owner))
            yield
            heartbeat.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    finally:
        # A lost connection leaves the lock behind, and it goes stale. Where another console has taken over,
        # the first removal fails and the lock stays; so does the second where one takes it in between.
        with suppress(ConsoleError):
            async with conn.translated(str(lock), _RELEASE_TIMEOUT_S):
                await conn.sftp.remove(str(owner))
                await conn.sftp.rmdir(str(lock))


async def _acquire(conn: HostConnection, lock: PurePosixPath, token: str, on_wait: Callable[[], None] | None) -> None:
    prepared = lock.with_name(f"{lock.name}.{token}")
    await conn.make_dir(prepared)
    try:
        await conn.write_file(prepared / f"owner-{token}", b"")
        await _wait_for_turn(conn, lock, prepared, token, on_wait)
    finally:
        # Gone already where it became the lock; the name is this console's own.
        await conn.remove_tree(prepared)


async def _wait_for_turn(
    conn: HostConnection,
    lock: PurePosixPath,
    prepared: PurePosixPath,
    token: str,
    on_wait: Callable[[], None] | None,
) -> None:
    blind_tries = 0
    seen: tuple[str, float] | None = None
    seen_since = time.monotonic()
    while True:
        try:
            await _move(conn, prepared, lock)
        except RemoteCommandError as refusal:
            owners = [entry for entry in await conn.list_dir(lock) if entry.name.startswith("owner-")]
            blind_tries = 0 if owners else blind_tries + 1
            if blind_tries > _MAX_BLIND_TRIES:
                raise RemoteCommandError(
                    f"{conn.name}: the lock {lock} can neither be taken nor has it an owner: {refusal}"
                ) from refusal
        else:
            return
        if owners:
            if seen is None and on_wait is not None:
                on_wait()
            sign = (owners[0].name, owners[0].mtime)
            if sign != seen:
                seen, seen_since = sign, time.monotonic()
            elif time.monotonic() - seen_since > STALE_AFTER_S and await _take_over(conn, lock, sign[0], token):
                return
        await asyncio.sleep(_POLL_S)


async def _take_over(conn: HostConnection, lock: PurePosixPath, dead_owner: str, token: str) -> bool:
    try:
        await _move(conn, lock / dead_owner, lock / f"owner-{token}")
    except (NotFoundError, RemoteCommandError):
        return False
    return True


async def _keep_alive(conn: HostConnection, owner: PurePosixPath) -> None:
    while True:
        await asyncio.sleep(STALE_AFTER_S / 5)
        if not await _touch(conn, owner):
            raise RemoteCommandError(
                f"{conn.name}: another console took over {owner.parent.name} because this one was not heard "
                f"of for {STALE_AFTER_S:.0f} s; run the command again to join it."
            )


async def _touch(conn: HostConnection, owner: PurePosixPath) -> bool:
    """Change the file's time, never make it: that would bring back an owner that was replaced."""
    now = time.time()
    try:
        async with conn.translated(str(owner)):
            await conn.sftp.utime(str(owner), (now, now))
    except NotFoundError:
        return False
    return True


async def _move(conn: HostConnection, old: PurePosixPath, new: PurePosixPath) -> None:
    """rename(2) as it is: atomic, over an empty folder too, never over one that holds something."""
    async with conn.translated(f"{old} -> {new}"):
        await conn.sftp.posix_rename(str(old), str(new))
