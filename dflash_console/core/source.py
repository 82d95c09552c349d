"""Where a dashboard gets its board from, and whom it asks to act: a live profile, the demo, or a recording."""

from __future__ import annotations

from typing import Protocol

from dflash_console.core.board import Board

__all__ = ["Source"]


class Source(Protocol):
    """One board and what can be done about it. All of it happens on the caller's event loop."""

    board: Board
    title: str
    """What the board shows, in a word or two: a profile's name, "demo", "replay of ..."."""
    read_only: str
    """Why nothing can be staged or evaluated here; empty where it can."""

    async def run(self) -> None:
        """Feed the board until cancelled, or until there is nothing more to come."""

    def stage(self, run: str, checkpoint: str, source: str, destination: str) -> None:
        """Start a staging in a process of its own; it goes on when the dashboard quits. Raises ConsoleError."""

    def evaluate(self, run: str, checkpoint: str, host: str, source: str) -> None:
        """Start an evaluation on a host, staged there first from `source` unless that is empty. Raises ConsoleError."""

    async def output(self, host: str, job: str) -> str:
        """The end of a job's output, printable lines. Raises ConsoleError."""
