"""Trainings of tiny targets under the real torchrun, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_engine.events import Event, EventReader

ROOT = Path(__file__).resolve().parents[1]

RECIPE = """
[drafter]
target_layer_ids = [1, 3]
mask_token_id = 258
block_size = 4
layers = 1
[data]
files = ["chats.jsonl"]
max_length = 60
[train]
steps = 10
rows = 2
anchors = 6
checkpoint_every = 100
[loss]
gamma = 2.0
vocabulary = "data"
[optimizer]
learning_rate = 1e-3
warmup = 0.2
[pipeline]
ring_slots = 2
threads = 1
"""


def write_recipe(folder: Path, rows: Sequence[dict[str, Any]] | None = None) -> Path:
    """A tiny recipe and its chats in a folder; returns the recipe's path."""
    folder.mkdir(parents=True, exist_ok=True)
    chats = rows or [
        {
            "messages": [
                {"role": "user", "content": f"say {i}"},
                {"role": "assistant", "content": f"{i} is {i * i} " * 3},
            ]
        }
        for i in range(7)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    (folder / "recipe.toml").write_text(RECIPE)
    return folder / "recipe.toml"


def start_training(
    recipe: Path, target: Path, run: Path, job: Path, *overrides: str, ranks: int = 2
) -> subprocess.Popen[str]:
    """Start torchrun as the console does."""
    job.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "dflash_engine.cli", "train", str(recipe), "--target", str(target), "--run-dir", str(run)]
    command += ["--job", str(job)]
    for override in overrides:
        command += ["--set", override]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DFLASH_ENGINE_HASH": "e" * 64,
        "TOKENIZERS_PARALLELISM": "false",
    }
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def train(recipe: Path, target: Path, run: Path, job: Path, *overrides: str, ranks: int = 2) -> tuple[int, str]:
    """Train to the end; returns the exit code and everything that was printed."""
    process = start_training(recipe, target, run, job, *overrides, ranks=ranks)
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()  # its ranks die with it
        raise
    return process.returncode, output


def events(job: Path, kind: str = "") -> list[Event]:
    """The job's events so far, all or those of one type."""
    path = job / "events.jsonl"
    found = EventReader().feed(path.read_bytes()) if path.exists() else []
    return [event for event in found if not kind or event.type == kind]
