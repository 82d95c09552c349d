"""Linux processes by identity: a pid alone is recycled, a pid with its start time on one boot is not.

Standard library only: the supervisor and every rank use it before anything else is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "MARK_VARIABLE",
    "ProcessIdentity",
    "become_subreaper",
    "boot_id",
    "descendants",
    "die_with_parent",
    "end_tree",
    "is_alive",
    "marked_processes",
    "process_identity",
    "reap_orphans",
]

MARK_VARIABLE = "DFLASH_JOB_MARK"
"""Environment variable that all processes of one job inherit, whatever session or parent they end up with."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TERM_S = 5.0
_LOOK_S = 0.05


@dataclass(frozen=True)
class ProcessIdentity:
    """One process for good: pid, start time in clock ticks since boot, and the boot."""

    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    start_ticks: int


@functools.cache
def boot_id() -> str:
    """The kernel's random id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def process_identity(pid: int) -> ProcessIdentity | None:
    """Identity of a live process; None where there is none, or only its zombie."""
    stat = _stat(pid)
    if stat is None or stat.state in "ZX":
        return None
    return ProcessIdentity(pid, stat.start_ticks, boot_id())


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether exactly that process still runs: same pid, same start, same boot, not a zombie."""
    return identity == process_identity(identity.pid)


def marked_processes(mark: str) -> list[ProcessIdentity]:
    """All live processes whose initial environment carries this job mark."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for pid in _pids():
        # Identity first: where the pid changes hands in between, what is found is dead and no stranger.
        identity = process_identity(pid)
        if identity is None:
            continue
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(identity)
    return found


def descendants(pid: int) -> list[ProcessIdentity]:
    """All live processes below `pid` in the tree of parents, whatever their environment says."""
    children: dict[int, list[tuple[int, _Stat]]] = {}
    for child in _pids():
        if (stat := _stat(child)) is not None:
            children.setdefault(stat.parent, []).append((child, stat))
    found = []
    pending = [pid]
    while pending:
        for child, stat in children.pop(pending.pop(), []):
            pending.append(child)
            if stat.state not in "ZX":
                found.append(ProcessIdentity(child, stat.start_ticks, boot_id()))
    return found


def become_subreaper() -> None:
    """Orphaned descendants are re-parented to this process instead of init, so that it can reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel for SIGKILL when the parent dies; end at once where it is dead already.

    `parent` is its pid as known before the fork; without it, a parent that died before this call is not noticed.
    """
    expected = os.getppid() if parent is None else parent
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)


def end_tree(mark: str, main: int) -> int:
    """End every process with this mark and every descendant of this one; returns how many besides pid `main`.

    SIGTERM first, SIGKILL after 5 s, until none is left. Needs `become_subreaper`, or orphans without the mark
    are not found. Identities are checked right before each signal: a pid that was recycled meanwhile is a
    stranger's.
    """
    asked: set[ProcessIdentity] = set()
    deadline = time.monotonic() + _TERM_S
    # By mark for what is no descendant, by parent for what has dropped the mark.
    while alive := {*marked_processes(mark), *descendants(os.getpid())}:
        late = time.monotonic() > deadline
        for process in alive:
            if (late or process not in asked) and is_alive(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL if late else signal.SIGTERM)
        asked |= alive
        reap_orphans(main)
        time.sleep(_LOOK_S)
    return sum(process.pid != main for process in asked)


def reap_orphans(main: int) -> None:
    """Reap ended children that came here as orphans; the status of `main`, if it is a child, stays to be read."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == main:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 # names only


def _stat(pid: int) -> _Stat | None:
    """What /proc/<pid>/stat says; the command name in it may hold any character."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        rest = text[text.rindex(")") + 2 :].split()
        return _Stat(rest[0], int(rest[1]), int(rest[19]))
    except (OSError, ValueError, IndexError):
        return None
