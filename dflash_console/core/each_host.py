"""The same question to several hosts at once; one that is down costs its own answer and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from dflash_console.core.errors import ConsoleError
from dflash_console.core.profiles import Profile
from dflash_console.core.ssh import Connections, HostConnection

__all__ = ["ask_each_host"]

_T = TypeVar("_T")


async def ask_each_host(
    profile: Profile, names: Sequence[str], ask: Callable[[HostConnection], Awaitable[_T]]
) -> list[_T | ConsoleError]:
    """`ask` on a connection to each host (none named: all of the profile), in that order; errors stand as answers."""
    async with Connections(profile) as hosts:

        async def one(name: str) -> _T | ConsoleError:
            try:
                return await ask(await hosts.get(name))
            except ConsoleError as error:
                return error

        return await asyncio.gather(*map(one, names or list(profile.hosts)))
