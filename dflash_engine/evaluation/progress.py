"""What an evaluation tells while it runs: starts, progress and ends of its steps, then the numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from dflash_engine.evaluation.acceptance import Acceptance
from dflash_engine.evaluation.report import PromptRow
from dflash_engine.events import EvalPrompt, EvalResult, EvalStep, EventWriter

__all__ = ["ProgressReport", "StepEvents"]

_INTERVAL_S = 0.5
"""At most one progress record in this time."""
_NAMES = ("target", "drafter checkpoint", "greedy references", "hidden states", "drafter evaluation")


class ProgressReport(Protocol):
    """What takes done and total of a step, and the acceptance length so far where there is one."""

    def __call__(self, done: int, total: int, tau: float | None = None) -> None: ...


class StepEvents:
    """The five steps as events of one job; keeps the seconds that each took."""

    def __init__(self, writer: EventWriter) -> None:
        self.seconds: dict[str, float] = {}
        self._writer = writer
        self._last = 0.0

    @contextmanager
    def step(self, n: int) -> Iterator[Callable[[str, str], None]]:
        """Announce a step's start; the body calls the given function with state and detail at its end."""
        name = _NAMES[n - 1]
        began = self._last = time.perf_counter()
        self._writer.write(EvalStep(n, name, "started"))

        def done(state: str, detail: str) -> None:
            seconds = self.seconds[name] = time.perf_counter() - began
            self._writer.write(EvalStep(n, name, state, detail=f"{detail}, {seconds:.1f} s"))

        yield done

    def progress(self, n: int, unit: str) -> ProgressReport:
        """What reports step n's progress: at most twice a second, with an estimate of the time left."""
        began = time.perf_counter()

        def report(done: int, total: int, tau: float | None = None) -> None:
            now = time.perf_counter()
            if now - self._last < _INTERVAL_S:
                return
            self._last = now
            eta_s = round((now - began) * (total - done) / done, 1) if done else None
            self._writer.write(
                EvalStep(n, _NAMES[n - 1], "progress", done=done, total=total, unit=unit, eta_s=eta_s, tau=tau)
            )

        return report

    def result(self, evaluation: str, checkpoint: str, rows: Sequence[PromptRow], acceptance: Acceptance) -> None:
        """Every prompt, then the whole; only once the result is stored, because whoever hears of it may read it."""
        for row in rows:
            mean = row.trace.tau
            self._writer.write(
                EvalPrompt(
                    prompt=row.id,
                    tau=math.nan if mean is None else mean,
                    steps=len(row.trace.steps),
                    tokens=len(row.completion),
                    accepted=row.trace.yields,
                )
            )
        self._writer.write(
            EvalResult(
                evaluation=evaluation,
                checkpoint=checkpoint,
                tau=acceptance.tau,
                tau_per_prompt=acceptance.tau_per_prompt,
                steps=acceptance.steps,
                prompts=len(rows),
                acceptance_by_position=list(acceptance.acceptance_by_position),
                seconds=round(sum(self.seconds.values()), 3),
            )
        )
