"""The console's errors: each class is one kind of trouble, with the exit code that the README's table lists."""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AuthenticationError",
    "ConsoleError",
    "HostKeyError",
    "HostNotReadyError",
    "IntegrityError",
    "JobFailedError",
    "NotFoundError",
    "ProfileError",
    "RegistryError",
    "RemoteCommandError",
    "UnexpectedError",
    "UnknownHostError",
    "UnreachableError",
]


class ConsoleError(Exception):
    """Base: the message is whole sentences that say what was found, what was expected and what to do.

    Exit code 2 is missing below because usage errors are the command line's own.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)


class UnexpectedError(ConsoleError):
    """A fault of this program: whatever no other class covers."""

    exit_code = 1


class ProfileError(ConsoleError):
    """The profile is unknown, or a key or value in it (or in a recipe that it names) cannot be used."""

    exit_code = 3


class UnknownHostError(ConsoleError):
    """The profile has no host of that name."""

    exit_code = 4


class UnreachableError(ConsoleError):
    """No connection, or it was lost, or no answer in time. Says nothing about the host's jobs."""

    exit_code = 5


class HostKeyError(ConsoleError):
    """The host's key is unknown, revoked, or another one than before."""

    exit_code = 6


class AuthenticationError(ConsoleError):
    """The host refused our key, or there is no key to offer."""

    exit_code = 7


class HostNotReadyError(ConsoleError):
    """The host lacks something: Python, the engine's packages, room."""

    exit_code = 8


class NotFoundError(ConsoleError):
    """A target, checkpoint, run, job, prompt file or remote file is not there."""

    exit_code = 9


class IntegrityError(ConsoleError):
    """Bytes are not what they should be: incomplete, changed, or hashed to something else."""

    exit_code = 10


class JobFailedError(ConsoleError):
    """A job ended badly."""

    exit_code = 11


class RemoteCommandError(ConsoleError):
    """A remote command or file operation failed unexpectedly, or its answer cannot be read."""

    exit_code = 12


class RegistryError(ConsoleError):
    """A package could not be fetched."""

    exit_code = 13
