"""The stop tokens that a target's configurations name. Importable without torch: the inspection reads them too."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_engine.errors import TargetError

__all__ = ["configured_stop_ids"]


def configured_stop_ids(folder: Path) -> frozenset[int]:
    """Every `eos_token_id` of generation_config.json and config.json, whether one or a list; empty where none is.

    Raises TargetError where a file that is there cannot be read.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            document = json.loads(path.read_bytes())
            text = document.get("text_config") or document
            values = (document.get("eos_token_id"), text.get("eos_token_id"))
        except (OSError, ValueError, AttributeError) as error:
            raise TargetError(f"target {folder}: {name} cannot be read: {error}; expected a JSON object") from error
        for value in values:
            found.update(i for i in (value if isinstance(value, list) else [value]) if type(i) is int)
    return frozenset(found)
