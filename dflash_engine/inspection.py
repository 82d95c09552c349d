"""`dflash-engine inspect CHECKPOINT [--target DIR]`: what a drafter checkpoint is and whether it fits a target.

Reads configurations and tensor headers only: no torch, no weights, a fraction of a second. The answer is one
JSON document `{faults, warnings, config, fingerprint, target_fingerprint, tokenizer_fingerprint}`; faults keep
the checkpoint from being used, warnings do not. The exit code is 0 whenever there is an answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_engine.drafter.config import DrafterConfig, expected_tensors, read_config
from dflash_engine.drafter.fit import fit_faults
from dflash_engine.errors import EngineError, TargetError
from dflash_engine.fingerprint import model_fingerprint, read_header, tokenizer_fingerprint
from dflash_engine.manifest import MANIFEST_NAME, ManifestError, parse_manifest
from dflash_engine.target.stop_ids import configured_stop_ids

__all__ = ["inspect_checkpoint", "main"]

_DTYPES = ("F32", "BF16", "F16")


def main(argv: list[str]) -> int:
    """Print the inspection as JSON; an unreadable target is an error, an unusable checkpoint is an answer."""
    parser = argparse.ArgumentParser(prog="dflash-engine inspect", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--target", type=Path)
    arguments = parser.parse_args(argv)
    try:
        answer = inspect_checkpoint(arguments.checkpoint, arguments.target)
    except EngineError as error:
        sys.stderr.write(f"dflash-engine: error: {error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def inspect_checkpoint(folder: Path, target: Path | None) -> dict[str, Any]:
    """The inspection of a checkpoint folder, against a target where one is given. Raises TargetError for that one."""
    faults: list[str] = []
    warnings: list[str] = []
    config: DrafterConfig | None = None
    try:
        config = read_config(folder)
        faults += _tensor_faults(folder, config)
    except EngineError as error:
        faults.append(str(error))
    target_print = tokenizer_print = ""
    if target is not None:
        target_print, tokenizer_print = model_fingerprint(target), tokenizer_fingerprint(target)
        if config is not None:
            document = _target_config(target)
            faults += fit_faults(config, document) or _stop_faults(config, target)
            warnings += _rope_warnings(config, document)
    fingerprint = ""
    try:
        record = parse_manifest((folder / MANIFEST_NAME).read_bytes())
        fingerprint = record.model_fingerprint()
        for what, made_for, found in (
            ("target", record.target_fingerprint, target_print),
            ("tokenizer", record.tokenizer_fingerprint, tokenizer_print),
        ):
            if found and not made_for:
                warnings.append(f"the manifest does not say for which {what} the drafter was trained")
            elif found and made_for != found:
                faults.append(f"the drafter was trained for {what} {made_for[:12]}, this one is {found[:12]}")
    except FileNotFoundError:
        warnings.append("it has no manifest, so nothing says for which target it was trained")
    except (OSError, ManifestError) as error:
        faults.append(str(error))
    return {
        "faults": faults,
        "warnings": warnings,
        "config": {} if config is None else asdict(config),
        "fingerprint": fingerprint,
        "target_fingerprint": target_print,
        "tokenizer_fingerprint": tokenizer_print,
    }


def _stop_faults(config: DrafterConfig, target: Path) -> list[str]:
    """`fit_faults` knows config.json only; a stop token often stands in generation_config.json alone."""
    if config.mask_token_id not in configured_stop_ids(target):
        return []
    return [f"mask_token_id {config.mask_token_id} is a stop token of the target"]


def _rope_warnings(config: DrafterConfig, target: dict[str, Any]) -> list[str]:
    """A drafter may have its own base, but another one than the target's is more often a default that slipped in."""
    text = target.get("text_config", target)
    theta = (text.get("rope_parameters") or {}).get("rope_theta", text.get("rope_theta"))
    if theta is None or theta == config.rope_theta:
        return []
    return [f"its rope_theta is {config.rope_theta:g}, the target's {theta:g}; was it trained so?"]


def _tensor_faults(folder: Path, config: DrafterConfig) -> list[str]:
    """Names and shapes in the header against those that the configuration implies."""
    found = read_header(folder / "model.safetensors")
    expected = expected_tensors(config)
    faults = [f"tensor {name} is missing" for name in sorted(expected.keys() - found.keys())]
    faults += [f"tensor {name} does not belong to this architecture" for name in sorted(found.keys() - expected.keys())]
    faults += [
        f"tensor {name} has shape {list(found[name].shape)}, the configuration implies {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in found and found[name].shape != shape
    ]
    faults += [
        f"tensor {name} is {info.dtype}, expected one of {', '.join(_DTYPES)}"
        for name, info in sorted(found.items())
        if info.dtype not in _DTYPES
    ]
    return faults


def _target_config(target: Path) -> dict[str, Any]:
    try:
        document = json.loads((target / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise TargetError(f"target {target}: config.json cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise TargetError(f"target {target}: config.json does not hold an object")
    return document
