"""One SSH connection a host: opened once, verified, kept alive; commands and files over it.

Host keys are always verified, authentication is by key only, a dead peer is noticed in under 10 s, and
every operation has a time limit. What goes wrong becomes an error of `core.errors`, whose message names the
host. Paths on hosts are absolute.
"""

from __future__ import annotations

import asyncio
import secrets
import stat
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import PurePosixPath
from types import TracebackType
from typing import Literal, Self, cast

import asyncssh
import msgspec

from dflash_console.core.dialing import dial, expand_home, prepare_host
from dflash_console.core.errors import NotFoundError, RemoteCommandError, UnreachableError
from dflash_console.core.execution import CommandResult, Frame, exchange
from dflash_console.core.host_keys import HostKey, fetch_host_key, trust_host
from dflash_console.core.profiles import HostProfile, Profile, host_of
from dflash_console.core.quoting import printable
from dflash_console.core.translation import translated

__all__ = [
    "CommandResult",
    "Connections",
    "Entry",
    "HostConnection",
    "HostKey",
    "fetch_host_key",
    "trust_host",
]

_SFTP_TIMEOUT_S = 30.0
# OpenSSH allows ten sessions a connection; SFTP holds one.
_MAX_COMMANDS = 8
_READ_BYTES = 1 << 20


class Entry(msgspec.Struct, frozen=True):
    """One name in a remote folder, or what a path leads to. `mtime` is Unix seconds of the host's clock."""

    name: str
    size_bytes: int
    mtime: float
    kind: Literal["file", "dir", "link", "other"]


class Connections:
    """The connections of one profile, each opened when it is first asked for and closed together."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._open: dict[str, HostConnection] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, name: str) -> HostConnection:
        """The connection to a host of the profile; a lost one is opened anew.

        Raises UnknownHostError, UnreachableError, HostKeyError, AuthenticationError, HostNotReadyError.
        """
        host = host_of(self.profile, name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            known = self._open.get(name)
            if known is not None and not known.is_closed:
                return known
            self._open[name] = await HostConnection.open(host, self.profile.name)
            return self._open[name]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(conn.close() for conn in self._open.values()))
        self._open.clear()


class HostConnection:
    """A verified connection. `profile` is the host's, with `~` of `state`, `python`, `targets` expanded there.

    `clock_offset_s` is the host's clock minus this machine's, measured when the connection was made; half
    the duration of that exchange is its uncertainty.
    """

    def __init__(
        self,
        profile: HostProfile,
        connection: asyncssh.SSHClientConnection,
        sftp: asyncssh.SFTPClient,
        clock_offset_s: float,
    ) -> None:
        self.name = profile.name
        self.profile = profile
        self.state = PurePosixPath(profile.state)
        self.clock_offset_s = clock_offset_s
        self._connection = connection
        self._sftp = sftp
        self._commands = asyncio.Semaphore(_MAX_COMMANDS)

    @classmethod
    async def open(cls, host: HostProfile, profile_name: str) -> HostConnection:
        """Connect, verify, authenticate, make the state folder; raises what `Connections.get` does."""
        connection = await dial(host, profile_name)
        try:
            home, clock_offset_s = await prepare_host(connection, host)
            async with translated(host.name, "SFTP", host.connect_timeout_s):
                # Names that are not UTF-8 must not make a folder unreadable.
                sftp = await connection.start_sftp_client(path_errors="surrogateescape")
        except BaseException:
            connection.abort()
            raise
        return cls(expand_home(host, home), connection, sftp, clock_offset_s)

    @property
    def sftp(self) -> asyncssh.SFTPClient:
        """The SFTP session, for what has no method here; use it inside `translated`."""
        return self._sftp

    @property
    def is_closed(self) -> bool:
        """Whether the connection is gone, closed here or lost."""
        return self._connection.is_closed()

    def translated(self, what: str, timeout_s: float = _SFTP_TIMEOUT_S) -> AbstractAsyncContextManager[None]:
        """A block whose SSH errors become errors of `core.errors`; `what` (a path, say) stands in them.

        Missing files raise NotFoundError, a lost connection or `timeout_s` seconds UnreachableError, all
        else RemoteCommandError.
        """
        return translated(self.name, what, timeout_s)

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float = 30.0,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        max_output_bytes: int = 4 << 20,
    ) -> CommandResult:
        """Run a command to its end; a failing one does not raise, its `code` says so.

        Start-up files' output is dropped. Raises UnreachableError when the connection is lost or after
        `timeout_s` (the command may then still run), RemoteCommandError when either stream is longer than
        `max_output_bytes` or the host runs no command at all.
        """
        frame = Frame(argv, env or {})
        what = printable(PurePosixPath(argv[0]).name, 60)
        async with self._commands, translated(self.name, what, timeout_s):
            streams = await exchange(self._connection, frame.command_line, stdin, max_output_bytes)
        try:
            return frame.unwrap(*streams)
        except RemoteCommandError as error:
            if self.is_closed:
                raise UnreachableError(f"{self.name}: the connection was lost during {what}.") from error
            raise RemoteCommandError(f"{self.name}: {what}: {error}") from error

    async def stat(self, path: PurePosixPath | str) -> Entry | None:
        """What `path` leads to, links followed; None where it leads to nothing."""
        try:
            async with self.translated(f"{path}"):
                attributes = await self._sftp.stat(str(path))
        except NotFoundError:
            return None
        return _entry(PurePosixPath(path).name, attributes)

    async def list_dir(self, path: PurePosixPath | str) -> list[Entry]:
        """The entries of a folder by name, links not followed; a folder that is missing has none."""
        entries = []
        try:
            async with self.translated(f"{path}"):
                async for found in self._sftp.scandir(str(path)):
                    name = found.filename if isinstance(found.filename, str) else ""
                    if name not in ("", ".", ".."):
                        entries.append(_entry(name, found.attrs))
        except NotFoundError:
            return []
        return sorted(entries, key=lambda entry: entry.name)

    async def read_file(self, path: PurePosixPath | str, *, max_bytes: int) -> bytes:
        """A whole file. Raises NotFoundError, and RemoteCommandError for more than `max_bytes`."""
        data = bytearray()
        async with self.translated(f"{path}"), self._sftp.open(str(path), "rb") as file:
            # Its size is not asked for: files of /proc have none.
            while piece := await file.read(min(_READ_BYTES, max_bytes + 1 - len(data)), len(data)):
                data += cast(bytes, piece)
                if len(data) > max_bytes:
                    raise RemoteCommandError(
                        f"{self.name}: {printable(str(path), 300)} is larger than the {max_bytes} bytes that it "
                        "may have."
                    )
        return bytes(data)

    async def read_range(self, path: PurePosixPath | str, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset`; fewer at the end, none beyond it. Raises NotFoundError."""
        async with self.translated(f"{path}"), self._sftp.open(str(path), "rb") as file:
            return cast(bytes, await file.read(length, offset))

    async def write_file(self, path: PurePosixPath | str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace a file in one step: temporary name, flush, rename. Its folder must exist."""
        target = PurePosixPath(path)
        temporary = str(target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp"))
        async with self.translated(f"{path}"):
            try:
                attributes = asyncssh.SFTPAttrs(permissions=mode)
                async with self._sftp.open(temporary, "xb", attributes) as file:
                    await file.write(data)
                    with suppress(asyncssh.SFTPOpUnsupported):
                        await file.fsync()
                await self._sftp.posix_rename(temporary, str(target))
            except asyncssh.SFTPError:
                with suppress(asyncssh.SFTPError):
                    await self._sftp.remove(temporary)
                raise

    async def make_dir(self, path: PurePosixPath | str) -> bool:
        """Make one folder; whoever gets True made it. False where the name was taken.

        Raises NotFoundError where its parent is missing.
        """
        async with self.translated(f"{path}"):
            try:
                await self._sftp.mkdir(str(path))
            except (asyncssh.SFTPFailure, asyncssh.SFTPFileAlreadyExists):
                # Version 3 of the protocol, OpenSSH's, has one code for all failures.
                if not await self._sftp.lexists(str(path)):
                    raise
                return False
        return True

    async def make_dirs(self, path: PurePosixPath | str) -> None:
        """Make a folder and its missing parents. Raises RemoteCommandError where something else is there."""
        async with self.translated(f"{path}"):
            await self._sftp.makedirs(str(path), exist_ok=True)

    async def rename(self, old: PurePosixPath | str, new: PurePosixPath | str) -> None:
        """Rename a file or folder; what has the new name already is never replaced (RemoteCommandError)."""
        async with self.translated(f"{old} -> {new}"):
            await self._sftp.rename(str(old), str(new))

    async def remove_tree(self, path: PurePosixPath | str) -> None:
        """Remove a folder below the state folder and all in it, links themselves included.

        Raises RemoteCommandError for any other place. A folder that is missing is fine.
        """
        folder = PurePosixPath(path)
        if self.state not in folder.parents or ".." in folder.parts:
            raise RemoteCommandError(
                f"{self.name}: {printable(str(path), 300)} is not below the state folder {self.state}; only what "
                "is there is ever removed."
            )
        with suppress(NotFoundError):
            async with self.translated(f"{path}", 10 * _SFTP_TIMEOUT_S):
                await self._sftp.rmtree(str(folder))

    async def open_file(self, path: PurePosixPath | str, mode: str) -> asyncssh.SFTPClientFile:
        """An open remote file; read and write it inside `translated`. Raises NotFoundError."""
        async with self.translated(f"{path}"):
            return await self._sftp.open(str(path), mode)

    async def close(self) -> None:
        """End the connection; what was launched in sessions of its own stays."""
        self._sftp.exit()
        self._connection.close()
        try:
            async with asyncio.timeout(5.0):
                await self._connection.wait_closed()
        except TimeoutError:
            self._connection.abort()


def _entry(name: str, attributes: asyncssh.SFTPAttrs) -> Entry:
    return Entry(
        name=name,
        size_bytes=attributes.size or 0,
        mtime=(attributes.mtime or 0) + (attributes.mtime_ns or 0) / 1e9,
        kind=_kind(attributes.permissions or 0),
    )


def _kind(mode: int) -> Literal["file", "dir", "link", "other"]:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "dir"
    return "link" if stat.S_ISLNK(mode) else "other"
