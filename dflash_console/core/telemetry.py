"""What a host is busy with, read from /proc over SFTP: no process starts there, nothing is installed."""

from __future__ import annotations

from pathlib import PurePosixPath

import asyncssh

from dflash_console.core.errors import NotFoundError, RemoteCommandError
from dflash_console.core.observations import LoadSeen
from dflash_console.core.ssh import HostConnection

__all__ = ["Telemetry"]

_PROC_MAX_BYTES = 1 << 20


class Telemetry:
    """One host's load; the CPU's share is between two looks, so the first look has none."""

    def __init__(self) -> None:
        self._ticks: tuple[int, int] | None = None

    async def look(self, conn: HostConnection) -> LoadSeen:
        """Load, memory and free disk of the state folder's file system, None where the host does not tell.

        Raises UnreachableError.
        """
        stat = await _read(conn, "/proc/stat")
        memory = _memory(await _read(conn, "/proc/meminfo"))
        total, available = memory.get(b"MemTotal"), memory.get(b"MemAvailable")
        return LoadSeen(
            host=conn.name,
            cpu_share=self._cpu_share(stat),
            memory_used_bytes=None if total is None or available is None else total - available,
            memory_total_bytes=total,
            disk_free_bytes=await _disk_free(conn),
        )

    def _cpu_share(self, stat: bytes) -> float | None:
        """Busy share since the last look, from the first line of /proc/stat (proc(5): idle and iowait are not)."""
        fields = stat.split(b"\n", 1)[0].split()
        try:
            ticks = [int(value) for value in fields[1:9]]
            now = (sum(ticks) - ticks[3] - ticks[4], sum(ticks))
        except (ValueError, IndexError):
            return None
        before, self._ticks = self._ticks, now
        if before is None or now[1] <= before[1]:
            return None
        return max(0.0, min(1.0, (now[0] - before[0]) / (now[1] - before[1])))


async def _read(conn: HostConnection, path: str) -> bytes:
    try:
        return await conn.read_file(path, max_bytes=_PROC_MAX_BYTES)
    except (NotFoundError, RemoteCommandError):
        return b""


def _memory(meminfo: bytes) -> dict[bytes, int]:
    found = {}
    for line in meminfo.splitlines():
        name, _, value = line.partition(b":")
        words = value.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


async def _disk_free(conn: HostConnection) -> int | None:
    try:
        async with conn.translated(str(conn.state)):
            try:
                room = await conn.sftp.statvfs(str(PurePosixPath(conn.state)))
            except asyncssh.SFTPOpUnsupported:
                return None
    except (NotFoundError, RemoteCommandError):
        return None
    return int(room.bavail) * int(room.frsize)
