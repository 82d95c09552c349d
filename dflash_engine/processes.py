"""Linux processes by identity: a pid alone is recycled, a pid with its start time on one boot is not.

Standard library only: the supervisor and every rank use it before anything else is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "MARK_VARIABLE",
    "ProcessIdentity",
    "become_subreaper",
    "boot_id",
    "die_with_parent",
    "is_alive",
    "marked_processes",
    "process_identity",
]

MARK_VARIABLE = "DFLASH_JOB_MARK"
"""Environment variable that all processes of one job inherit, whatever session or parent they end up with."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class ProcessIdentity:
    """One process for good: pid, start time in clock ticks since boot, and the boot."""

    pid: int
    start_ticks: int
    boot_id: str


@functools.cache
def boot_id() -> str:
    """The kernel's random id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def process_identity(pid: int) -> ProcessIdentity | None:
    """Identity of a live process; None where there is none, or only its zombie."""
    state_ticks = _stat(pid)
    if state_ticks is None or state_ticks[0] in "ZX":
        return None
    return ProcessIdentity(pid, state_ticks[1], boot_id())


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether exactly that process still runs: same pid, same start, same boot, not a zombie."""
    return identity == process_identity(identity.pid)


def marked_processes(mark: str) -> list[ProcessIdentity]:
    """All live processes whose initial environment carries this job mark."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):  # noqa: PTH208 # names only, and /proc changes while it is read
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            if wanted in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                identity = process_identity(int(entry))
                if identity is not None:
                    found.append(identity)
    return found


def become_subreaper() -> None:
    """Orphaned descendants are re-parented to this process instead of init, so that it can reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies; end at once where it is dead already."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _stat(pid: int) -> tuple[str, int] | None:
    """(state letter, start time in ticks) from /proc/<pid>/stat; the command name may hold any character."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        rest = text[text.rindex(")") + 2 :].split()
        return rest[0], int(rest[19])
    except (OSError, ValueError, IndexError):
        return None
