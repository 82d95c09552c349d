"""Where things lie inside a host's state folder, and which names are allowed there.

Everything is a relative POSIX path, so that the same functions serve the engine (on the host's own file
system) and the console (over SFTP). Importable without torch.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

__all__ = [
    "CONTROL_SAVE",
    "CONTROL_STOP",
    "PARTIAL_MARK",
    "checkpoint_name",
    "checkpoint_step",
    "checkpoints_dir",
    "engine_dir",
    "is_partial_name",
    "is_valid_name",
    "job_dir",
    "run_dir",
]

CONTROL_SAVE = "save"
"""A file of this name in a job's `control/` asks the trainer for a checkpoint now."""
CONTROL_STOP = "stop"
"""A file of this name in a job's `control/` asks for a checkpoint and a clean end."""

PARTIAL_MARK = ".partial-"
"""Stands in the name of every folder that is still being written; what follows it is the writer's id."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,11})")


def is_valid_name(name: str) -> bool:
    """Whether a run, job, host or checkpoint may be called this: no separators, no leading dot, no controls."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def engine_dir(engine_hash: str) -> PurePosixPath:
    """The folder of one deployed engine; it holds `dflash_engine/`."""
    return PurePosixPath("engines") / engine_hash


def run_dir(run_id: str) -> PurePosixPath:
    """The folder of one run: `recipe.toml`, `run.json`, `lock`, `checkpoints/`."""
    return PurePosixPath("runs") / run_id


def checkpoints_dir(run_id: str) -> PurePosixPath:
    """The folder whose children are a run's checkpoints, on the training host and on hosts with copies alike."""
    return run_dir(run_id) / "checkpoints"


def job_dir(job_id: str) -> PurePosixPath:
    """The folder of one job: `job.json`, `process.json`, `events.jsonl`, `output.log`, `control/`, `exit.json`."""
    return PurePosixPath("jobs") / job_id


def checkpoint_name(step: int) -> str:
    """`step_<n>` for an optimizer step count of at least 0."""
    if step < 0:
        raise ValueError(f"a checkpoint's step is at least 0, not {step}")
    return f"step_{step}"


def checkpoint_step(name: str) -> int | None:
    """The step of a finished checkpoint's folder name, or None where the name is not one."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def is_partial_name(name: str) -> bool:
    """Whether the name says that its writer had not finished."""
    return PARTIAL_MARK in name
