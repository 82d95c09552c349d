"""Checkpoint folders as the trainer leaves them, made in milliseconds: real manifests, real layout."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

from dflash_engine.manifest import MANIFEST_NAME, Manifest, record_files


def safetensors_bytes(data_bytes: int, seed: int = 0) -> bytes:
    """A safetensors file of two uint8 tensors with so many bytes together."""
    half = data_bytes // 2
    spans = {"first": [0, half], "second": [half, data_bytes]}
    header = json.dumps(
        {
            name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
            for name, (begin, end) in spans.items()
        }
    ).encode()
    return len(header).to_bytes(8, "little") + header + random.Random(seed).randbytes(data_bytes)


def make_model_files(folder: Path, *, data_bytes: int = 4096, seed: int = 0) -> None:
    """`config.json` and `model.safetensors`, nothing else."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["DFlashDraftModel"], "seed": seed}))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(data_bytes, seed))


def make_checkpoint(
    state: Path, run: str, step: int, *, data_bytes: int = 4096, seed: int = 0, resume: bool = True
) -> Path:
    """A whole checkpoint of a run in a state folder, or a model-only one."""
    folder = state / "runs" / run / "checkpoints" / f"step_{step}"
    make_model_files(folder, data_bytes=data_bytes, seed=seed)
    trainer = []
    if resume:
        (folder / "trainer").mkdir()
        (folder / "trainer" / "optimizer.safetensors").write_bytes(safetensors_bytes(2 * data_bytes, seed + 1))
        (folder / "trainer" / "state.json").write_text('{"v": 1}')
        trainer = ["trainer/optimizer.safetensors", "trainer/state.json"]
    write_manifest(folder, run, step, resume=trainer)
    return folder


def write_manifest(
    folder: Path,
    run: str,
    step: int,
    *,
    resume: Sequence[str] = (),
    target_fingerprint: str = "a" * 64,
    tokenizer_fingerprint: str = "b" * 64,
) -> None:
    """A manifest of what lies in the folder now."""
    record = Manifest(
        run=run,
        step=step,
        tokens_seen=step * 100,
        created=1_800_000_000.0 + step,
        engine_hash="e" * 64,
        target_fingerprint=target_fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint,
        model=record_files(folder, ["config.json", "model.safetensors"]),
        resume=record_files(folder, list(resume)),
    )
    (folder / MANIFEST_NAME).write_text(json.dumps(record.to_json()))


def make_foreign(state: Path, run: str, name: str, *, age_s: float = 60.0, data_bytes: int = 4096) -> Path:
    """A checkpoint without a manifest, last written `age_s` seconds ago."""
    folder = state / "runs" / run / "checkpoints" / name
    make_model_files(folder, data_bytes=data_bytes)
    make_older(folder, age_s)
    return folder


def make_older(folder: Path, age_s: float = 60.0) -> None:
    """Set the files' times so many seconds back."""
    then = time.time() - age_s
    for file in folder.iterdir():
        os.utime(file, (then, then))
