"""A remote command whose output is only its own.

Shell start-up files print into the streams of every command, before it and sometimes after it. So the
command runs inside a small script that prints a mark, new for each call, around its output. The exit code
stands after the closing mark, where no shell's exit trap can change it.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress

import asyncssh
import msgspec

from dflash_console.core.errors import RemoteCommandError
from dflash_console.core.quoting import printable, quote_argv

__all__ = ["CommandResult", "Frame", "exchange"]

# The mark is put together from two arguments here: a shell that traces its commands (`set -x`) prints the
# arguments, and so never the mark.
_SCRIPT = (
    'm="$1-$2"; shift 2; printf "%s\\n" "$m" >&2; printf "%s\\n" "$m"; "$@"; c=$?; '
    'printf "%s:%s\\n" "$m" "$c"; printf "%s\\n" "$m" >&2; exit "$c"'
)
_PIECE_BYTES = 64 << 10
_SESSION_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
_NOISE_MAX_BYTES = 1 << 20


class CommandResult(msgspec.Struct, frozen=True):
    """What a command printed and its exit code; 128 + n where signal n ended it."""

    code: int
    stdout: bytes
    stderr: bytes


class Frame:
    """The command line of one call, and the way back from its streams to its output."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        first, second = secrets.token_hex(8), secrets.token_hex(8)
        self._mark = f"{first}-{second}".encode()
        variables = [f"{name}={value}" for name, value in env.items()]
        command = ["env", *variables, *argv] if variables else list(argv)
        self.command_line = quote_argv(["/bin/sh", "-c", _SCRIPT, "sh", first, second, *command])

    def unwrap(self, stdout: bytes, stderr: bytes) -> CommandResult:
        """The command's own output. Raises RemoteCommandError where the streams lack the marks."""
        begin = stdout.find(self._mark + b"\n")
        end = re.search(re.escape(self._mark) + rb":(\d{1,3})\n", stdout)
        if begin < 0 or end is None:
            said = printable((stderr or stdout).decode(errors="replace").strip(), 300) or "nothing"
            what = "was cut off" if begin >= 0 else "did not run; expected a POSIX shell as login shell"
            raise RemoteCommandError(f"the command {what}. It said: {said}")
        return CommandResult(
            code=int(end.group(1)),
            stdout=stdout[begin + len(self._mark) + 1 : end.start()],
            stderr=self._own_errors(stderr),
        )

    def _own_errors(self, stderr: bytes) -> bytes:
        begin = stderr.find(self._mark + b"\n")
        body = stderr[begin + len(self._mark) + 1 :] if begin >= 0 else stderr
        end = body.rfind(self._mark + b"\n")
        return body[:end] if end >= 0 else body


async def exchange(
    connection: asyncssh.SSHClientConnection, command_line: str, stdin: bytes, max_output_bytes: int
) -> tuple[bytes, bytes]:
    """Run a command line with `stdin`, return both output streams, each at most `max_output_bytes` and noise.

    Raises RemoteCommandError beyond that; asyncssh's own errors pass.
    """
    process = await _start(connection, command_line)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_feed(process.stdin, stdin))
            limit = max_output_bytes + _NOISE_MAX_BYTES
            stdout = group.create_task(_read(process.stdout, limit))
            stderr = group.create_task(_read(process.stderr, limit))
        return stdout.result(), stderr.result()
    except BaseException as error:
        with suppress(OSError):
            process.terminate()  # servers that cannot deliver signals ignore it; the command then runs on
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None
        raise
    finally:
        process.close()


async def _start(connection: asyncssh.SSHClientConnection, command_line: str) -> asyncssh.SSHClientProcess[bytes]:
    """Open a session. OpenSSH counts one that has just ended until it has reaped the process: then try again."""
    for pause_s in _SESSION_PAUSES_S:
        try:
            return await connection.create_process(command_line, encoding=None, request_pty=False)
        except asyncssh.ChannelOpenError as error:
            if error.code != asyncssh.OPEN_CONNECT_FAILED or connection.is_closed():
                raise
        await asyncio.sleep(pause_s)
    return await connection.create_process(command_line, encoding=None, request_pty=False)


async def _feed(stream: asyncssh.SSHWriter[bytes], data: bytes) -> None:
    try:
        for offset in range(0, len(data), _PIECE_BYTES):
            stream.write(data[offset : offset + _PIECE_BYTES])
            await stream.drain()
        stream.write_eof()
    except BrokenPipeError:
        return  # the command ended without reading all; its exit code says how


async def _read(stream: asyncssh.SSHReader[bytes], limit: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while piece := await stream.read(_PIECE_BYTES):
        size += len(piece)
        if size > limit:
            raise RemoteCommandError(f"the command printed more than {limit} bytes.")
        pieces.append(piece)
    return b"".join(pieces)
