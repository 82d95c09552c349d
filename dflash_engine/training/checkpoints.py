"""Checkpoints of a run: written whole or not at all, and resumed from the newest whole one.

`step_<n>.partial-<id>/` gets every file, is flushed, and is renamed; the parent is flushed too. `trainer/`
holds the optimizer's moments and the counters. Random numbers need no state: every draw is a function of the
run's seed and of what it is for (`data.batches.derived_seed`). Parameters are float32, so the weights in
`model.safetensors` are the masters.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dflash_engine import durable, layout, manifest
from dflash_engine.drafter.checkpoint import MODEL_FILES, load_drafter, save_drafter
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.errors import CheckpointError, RoomError
from dflash_engine.training.optimizer import DrafterOptimizer

__all__ = ["Position", "RunIdentity", "newest_whole", "restore", "save_checkpoint"]

_OPTIMIZER = "trainer/optimizer.safetensors"
_STATE = "trainer/state.json"


@dataclass(frozen=True)
class RunIdentity:
    """What a run's manifests repeat."""

    run: str
    engine_hash: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    recipe: dict[str, Any]
    data_sha256: str


@dataclass(frozen=True)
class Position:
    """Where the training stands."""

    step: int = 0
    """Optimizer steps done; the next micro-batch is step * micro_batches_per_step."""
    tokens_seen: int = 0


def save_checkpoint(
    folder: Path,
    drafter: DFlashDrafter,
    optimizer: DrafterOptimizer,
    position: Position,
    identity: RunIdentity,
) -> tuple[Path, int]:
    """Write `step_<n>` below `folder`; returns (path, bytes).

    A whole checkpoint of that step that is already there is kept. Raises RoomError before or while writing
    where the disk cannot hold it; the partial folder is removed then, and older checkpoints stay.
    """
    final = folder / layout.checkpoint_name(position.step)
    if final.exists():
        return final, _folder_bytes(final)
    partial = folder / f"{final.name}{layout.PARTIAL_MARK}{os.getpid()}-{secrets.token_hex(3)}"
    _require_room(folder, drafter)
    try:
        (partial / "trainer").mkdir(parents=True)
        save_drafter(drafter, partial)
        optimizer.save(partial / _OPTIMIZER)
        state = {
            "v": 1,
            "step": position.step,
            "tokens_seen": position.tokens_seen,
            "data": identity.data_sha256,
        }
        durable.write_json(partial / _STATE, state)
        record = manifest.Manifest(
            run=identity.run,
            step=position.step,
            tokens_seen=position.tokens_seen,
            created=time.time(),
            engine_hash=identity.engine_hash,
            target_fingerprint=identity.target_fingerprint,
            tokenizer_fingerprint=identity.tokenizer_fingerprint,
            model=manifest.record_files(partial, list(MODEL_FILES)),
            resume=manifest.record_files(partial, [_OPTIMIZER, _STATE]),
            recipe=identity.recipe,
        )
        durable.write_json(partial / manifest.MANIFEST_NAME, record.to_json())
        durable.publish_folder(partial, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RoomError(f"checkpoint {final} could not be written: {error}") from error
    return final, _folder_bytes(final)


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from, after hashing it, and a sentence for each newer one that was passed over."""
    passed_over = []
    steps = sorted(
        (step, path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (step := layout.checkpoint_step(path.name)) is not None
    )
    for _, path in reversed(steps):
        try:
            record = manifest.parse_manifest((path / manifest.MANIFEST_NAME).read_bytes())
        except (OSError, manifest.ManifestError) as error:
            passed_over.append(f"{path.name} is passed over: {error}")
            continue
        faults = manifest.verify_files(path, record.model | record.resume)
        if not faults and record.resume:
            return path, passed_over
        passed_over.append(f"{path.name} is passed over: {'; '.join(faults) or 'it has no resume set'}")
    return None, passed_over


def restore(path: Path, drafter: DFlashDrafter, optimizer: DrafterOptimizer, identity: RunIdentity) -> Position:
    """Load weights, moments and position. Raises CheckpointError where the checkpoint is of another training."""
    stored = manifest.parse_manifest((path / manifest.MANIFEST_NAME).read_bytes())
    for what, found, expected in (
        ("target", stored.target_fingerprint, identity.target_fingerprint),
        ("tokenizer", stored.tokenizer_fingerprint, identity.tokenizer_fingerprint),
        ("recipe", _what_must_agree(stored.recipe), _what_must_agree(identity.recipe)),
    ):
        if found != expected:
            raise CheckpointError(
                f"{path}: made with another {what} than this run's; resume with the same one, or start a new run"
            )
    state = json.loads((path / _STATE).read_bytes())
    if state.get("data") != identity.data_sha256:
        raise CheckpointError(f"{path}: made with other training data; resume with the same files")
    loaded = load_drafter(path)
    if loaded.config != drafter.config:
        raise CheckpointError(f"{path}: its drafter has another shape than the recipe's")
    drafter.load_state_dict(loaded.state_dict())
    optimizer.load(path / _OPTIMIZER)
    return Position(step=int(state["step"]), tokens_seen=int(state["tokens_seen"]))


def _what_must_agree(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe without its pipeline: another split of ranks trains the same drafter."""
    plain: dict[str, Any] = json.loads(json.dumps(recipe))
    plain.pop("pipeline", None)
    plain.get("data", {}).pop("files", None)  # the same data may lie elsewhere; its hash is compared
    return plain


def _require_room(folder: Path, drafter: DFlashDrafter) -> None:
    # Weights and two moments in float32, and a margin for the small files.
    needed = sum(p.numel() for p in drafter.parameters()) * 12 + (1 << 20)
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if free < needed:
        raise RoomError(
            f"a checkpoint in {folder} needs {needed / 1e6:.0f} MB, {free / 1e6:.0f} MB are free; make room there"
        )


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
