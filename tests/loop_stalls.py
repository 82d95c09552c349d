"""How long single callbacks hold an event loop, without what the machine's other work takes away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Stalls:
    """Seconds of the longest callbacks and what they were; `begin` forgets what came before."""

    longest_s: float = 0.0
    what: str = ""
    over_10_ms: list[tuple[float, str]] = field(default_factory=list)

    def begin(self) -> None:
        """Count from now on."""
        self.longest_s, self.what = 0.0, ""
        self.over_10_ms.clear()


def _waited_s(path: Path) -> float:
    """Seconds that this thread was ready to run but did not (schedstat's second number, ns)."""
    return int(path.read_text().split()[1]) / 1e9


def _what(handle: Any) -> str:
    """The coroutine that a callback went on with, or the callback."""
    task = getattr(handle._callback, "__self__", None)
    return repr(task if isinstance(task, asyncio.Task) else handle)[:300]


@contextmanager
def measured_stalls() -> Iterator[Stalls]:
    """Times every callback of event loops of this thread: computing and blocking count, waiting for a core does not."""
    stalls = Stalls()
    schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    original = asyncio.events.Handle._run
    thread = threading.get_ident()

    def timed(handle: Any) -> None:
        if threading.get_ident() != thread:
            original(handle)
            return
        waited, began = _waited_s(schedstat), time.perf_counter()
        try:
            original(handle)
        finally:
            took = time.perf_counter() - began
            if took > 0.01:
                took -= _waited_s(schedstat) - waited
                stalls.over_10_ms.append((took, _what(handle)))
                if took > stalls.longest_s:
                    stalls.longest_s, stalls.what = took, _what(handle)

    asyncio.events.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield stalls
    finally:
        asyncio.events.Handle._run = original  # type: ignore[method-assign]
