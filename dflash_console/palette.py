"""The palette: everything that a key does, and everything there is to open, by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from textual.command import DiscoveryHit, Hit, Hits, Provider

if TYPE_CHECKING:
    from collections.abc import Callable

    from dflash_console.app import Dashboard

__all__ = ["DashboardCommands"]


class DashboardCommands(Provider):
    """Views, actions on the selected checkpoint, runs, evaluations."""

    def _commands(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        app: Dashboard = self.app  # type: ignore[assignment] # the only app that has this provider
        for index, view in enumerate(app.views):
            yield f"go to {view.NAME}", f"key {index + 1}", partial(app.action_view, index)
        for hint in app.checkpoint_hints():
            if not hint.why_not:
                action = {"s": app.action_stage, "S": app.action_stage_to, "e": app.action_evaluate}[hint.key]
                yield hint.words, f"key {hint.key}", action
        for run in app.source.board.ordered_runs():
            yield f"run {run.name}", f"on {run.host}", partial(app.open_key, ("run", run.host, run.name))
        for e in app.source.board.ordered_evaluations():
            key = ("evaluation", e.host, e.job.id)
            yield f"evaluation of {e.checkpoint or e.job.id}", f"on {e.host}", partial(app.open_key, key)
        yield "help", "key ?", app.action_help
        yield "quit", "key q; what runs goes on", app.exit

    async def discover(self) -> Hits:
        """What is offered before a letter is typed."""
        for words, explanation, action in self._commands():
            yield DiscoveryHit(_literal(words), action, text=words, help=explanation)

    async def search(self, query: str) -> Hits:
        """What matches the letters."""
        matcher = self.matcher(query)
        for words, explanation, action in self._commands():
            score = matcher.match(words)
            if score > 0:
                yield Hit(score, matcher.highlight(words), action, text=words, help=explanation)


def _literal(words: str) -> str:
    """Names come from hosts: a bracket in them is a bracket."""
    return words.replace("[", r"\[")
