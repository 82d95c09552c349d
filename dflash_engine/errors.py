"""The engine's errors: each one line for a person, each with the exit code that the console knows."""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "CheckpointError",
    "DataError",
    "EngineError",
    "JobRefusedError",
    "PackagesError",
    "RecipeError",
    "RoomError",
    "TargetError",
]


class EngineError(Exception):
    """Base: the message says what was found, what was expected and what to do."""

    exit_code: ClassVar[int] = 1


class RecipeError(EngineError):
    """A recipe or an argument holds a value that cannot be used."""

    exit_code = 3


class PackagesError(EngineError):
    """A Python package that the engine needs is missing or too old."""

    exit_code = 4


class TargetError(EngineError):
    """The target model is missing or unusable."""

    exit_code = 5


class CheckpointError(EngineError):
    """A drafter checkpoint is refused, for the named reason."""

    exit_code = 6


class DataError(EngineError):
    """Chats or prompts are missing or unusable."""

    exit_code = 7


class RoomError(EngineError):
    """Too little memory or disk."""

    exit_code = 8


class JobRefusedError(EngineError):
    """The job may not run now: another one holds the run."""

    exit_code = 9
