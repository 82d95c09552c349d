"""asyncssh's errors during the life of a connection, as the console's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncssh

from dflash_console.core.errors import NotFoundError, RemoteCommandError, UnreachableError
from dflash_console.core.quoting import printable

__all__ = ["translated"]

_LOST = (
    asyncssh.DisconnectError,
    asyncssh.SFTPConnectionLost,
    asyncssh.SFTPNoConnection,
    ConnectionError,
)


@asynccontextmanager
async def translated(host: str, what: str, timeout_s: float) -> AsyncIterator[None]:
    """A block of SSH work on `what` (a path, a command) with a time limit.

    A missing file raises NotFoundError; a lost connection, or none after `timeout_s` seconds,
    UnreachableError; whatever else the host refuses, RemoteCommandError.
    """
    subject = f"{host}: {printable(what, 300)}"
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise UnreachableError(
            f"{subject}: no answer within {timeout_s:g} s; the host or the way to it is stuck. Try again."
        ) from error
    except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath) as error:
        raise NotFoundError(f"{subject} does not exist.") from error
    except asyncssh.SFTPPermissionDenied as error:
        raise RemoteCommandError(f"{subject}: permission denied; check its owner and mode there.") from error
    except _LOST as error:
        raise UnreachableError(f"{subject}: the connection was lost ({_reason(error)}).") from error
    except asyncssh.ChannelOpenError as error:
        # asyncssh's own words for a connection that went away meanwhile; all others are the server's.
        if "connection closed" in error.reason.lower():
            raise UnreachableError(f"{subject}: the connection was lost ({_reason(error)}).") from error
        raise RemoteCommandError(
            f"{subject}: the host opens no further session ({_reason(error)}); see MaxSessions in its sshd_config."
        ) from error
    except asyncssh.SFTPBadMessage as error:
        raise RemoteCommandError(
            f"{subject}: the answer is not SFTP ({_reason(error)}). A shell start-up file there may print "
            "something; let it print only in interactive shells."
        ) from error
    except (asyncssh.Error, OSError) as error:
        raise RemoteCommandError(f"{subject}: refused by the host: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    text = error.reason if isinstance(error, asyncssh.Error) else str(error)
    return printable(text, 200) or type(error).__name__
