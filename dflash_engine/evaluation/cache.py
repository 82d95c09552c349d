"""References and hidden states that an evaluation may find ready: named by content, verified when used.

A key covers everything that changes the stored values and no path, so a wrong hit is impossible and a second
checkpoint of the same target costs only its own walk. Both kinds are published by rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_engine import durable, layout
from dflash_engine.errors import RoomError
from dflash_engine.manifest import hash_file
from dflash_engine.target.greedy import Completion

__all__ = ["content_key", "load_references", "load_states", "store_references", "store_states"]


def content_key(**parts: Any) -> str:
    """64 hexadecimal digits over the sorted parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def load_references(cache: Path, key: str) -> list[Completion] | None:
    """Stored completions, or None where there are none or they do not hold."""
    try:
        document = json.loads((cache / "references" / f"{key}.json").read_bytes())
        if document["v"] != 1 or document["key"] != key or document["sha256"] != _rows_hash(document["completions"]):
            return None
        return [Completion(tuple(row["tokens"]), row["finish"]) for row in document["completions"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_references(cache: Path, key: str, completions: Sequence[Completion]) -> None:
    """Keep completions for the next evaluation. Raises RoomError."""
    folder = cache / "references"
    rows = [{"tokens": list(completion.tokens), "finish": completion.finish} for completion in completions]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        durable.write_json(
            folder / f"{key}.json", {"v": 1, "key": key, "sha256": _rows_hash(rows), "completions": rows}
        )
    except OSError as error:
        raise RoomError(f"references could not be stored in {folder}: {error.strerror}") from error


def load_states(cache: Path, key: str, lengths: Sequence[int]) -> list[Tensor] | None:
    """Stored taps [S_i, K * H] of each prompt, or None; every byte is hashed and every length compared."""
    folder = cache / "hidden" / key
    try:
        index = json.loads((folder / "index.json").read_bytes())
        record = hash_file(folder / "states.safetensors")
        if index["v"] != 1 or (index["size_bytes"], index["sha256"]) != (record.size_bytes, record.sha256):
            return None
        tensors = load_file(folder / "states.safetensors")
        states = [tensors[str(i)] for i in range(len(lengths))]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return None
    return states if [len(taps) for taps in states] == list(lengths) else None


def store_states(cache: Path, key: str, states: Sequence[Tensor]) -> None:
    """Keep taps for the next evaluation; what another process published meanwhile stays. Raises RoomError."""
    final = cache / "hidden" / key
    partial = final.with_name(f"{key}{layout.PARTIAL_MARK}{os.getpid()}-{secrets.token_hex(3)}")
    try:
        partial.mkdir(parents=True)
        save_file({str(i): taps.contiguous() for i, taps in enumerate(states)}, partial / "states.safetensors")
        record = hash_file(partial / "states.safetensors")
        durable.write_json(
            partial / "index.json", {"v": 1, "key": key, "size_bytes": record.size_bytes, "sha256": record.sha256}
        )
        if final.exists() and load_states(cache, key, [len(taps) for taps in states]) is None:
            final.rename(partial.with_name(f"{partial.name}-spoiled"))
        durable.publish_folder(partial, final)
    except FileExistsError:
        pass
    except (OSError, SafetensorError) as error:
        raise RoomError(f"hidden states could not be stored in {final.parent}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(partial.with_name(f"{partial.name}-spoiled"), ignore_errors=True)


def _rows_hash(rows: Sequence[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
