"""`dflash-engine inspect CHECKPOINT [--target DIR]`: what a drafter checkpoint is and what is wrong with it.

Headers first, and only the bytes that are needed: no torch, a fraction of a second whatever the size. `--deep` reads
all tensors for NaN and Inf, in bounded memory. Every fault has a code that does not change (`drafter/faults.py`).
Exit code 0: sound; 1: warnings, with --strict; 2: faults.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_engine.drafter.config import DrafterConfig
from dflash_engine.drafter.documents import ReadConfig, read_document, read_json
from dflash_engine.drafter.faults import Fault
from dflash_engine.drafter.fit import fit_faults, fit_warnings
from dflash_engine.drafter.soundness import tensor_faults
from dflash_engine.drafter.stored import DTYPE_NAMES, DamagedFileError, StoredWeights, read_weights
from dflash_engine.errors import CheckpointError, EngineError, TargetError
from dflash_engine.fingerprint import model_fingerprint, tokenizer_fingerprint
from dflash_engine.manifest import MANIFEST_NAME, Manifest, ManifestError, parse_manifest
from dflash_engine.target.stop_ids import configured_stop_ids

__all__ = ["inspect_checkpoint", "main"]


def main(argv: list[str]) -> int:
    """Print the inspection; an unreadable target is an error, an unusable checkpoint is an answer."""
    parser = argparse.ArgumentParser(prog="dflash-engine inspect", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="folder")
    parser.add_argument("--target", type=Path, help="folder of the target that it shall draft for")
    parser.add_argument("--deep", action="store_true", help="read every value, not only headers and norms")
    parser.add_argument("--strict", action="store_true", help="exit 1 where there are warnings")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args(argv)
    try:
        answer = inspect_checkpoint(arguments.checkpoint, arguments.target, deep=arguments.deep)
    except EngineError as error:
        sys.stderr.write(f"dflash-engine: error: {error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(answer) + "\n" if arguments.json else _text(answer))
    if answer["faults"]:
        return 2
    return 1 if answer["warnings"] and arguments.strict else 0


def inspect_checkpoint(folder: Path, target: Path | None, *, deep: bool = False) -> dict[str, Any]:
    """The inspection of a checkpoint folder, against a target where one is given. Raises TargetError for that one.

    Faults keep the checkpoint from being used, warnings do not; both are lists of `{code, message, where}`.
    """
    look = _Look()
    look.read(folder, deep=deep)
    prints = _against_target(look, target) if target is not None else ("", "")
    record = look.manifest(folder, *prints)
    config, weights = look.config, look.weights
    tensors = {} if weights is None else weights.tensors
    return {
        "faults": [asdict(fault) for fault in look.faults],
        "warnings": [asdict(fault) for fault in look.warnings],
        "layout": "" if look.document is None else look.document.layout,
        "container": "" if weights is None else weights.container,
        "prefix": "" if weights is None else weights.prefix,
        "architecture": "" if config is None else "DFlash 2" if config.dflash2 else "DFlash",
        "parameters": sum(t.elements for t in tensors.values() if t.dtype in DTYPE_NAMES),
        "bytes": sum(t.end - t.begin for t in tensors.values()),
        "dtypes": sorted({t.dtype for t in tensors.values()}),
        "own": [] if weights is None else sorted(weights.own),
        "deep": deep,
        "step": None if record is None else record.step,
        "tokens_seen": None if record is None else record.tokens_seen,
        "config": {} if config is None else asdict(config),
        "fingerprint": "" if record is None else record.model_fingerprint(),
        "target_fingerprint": prints[0],
        "tokenizer_fingerprint": prints[1],
    }


class _Look:
    """Gathers what is found."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.warnings: list[Fault] = []
        self.document: ReadConfig | None = None
        self.weights: StoredWeights | None = None

    @property
    def config(self) -> DrafterConfig | None:
        return None if self.document is None else self.document.config

    def read(self, folder: Path, *, deep: bool) -> None:
        try:
            self.document = read_document(read_json(folder / "config.json"))
            self.faults += self.document.faults
        except CheckpointError as error:
            code = "file_damaged" if (folder / "config.json").is_file() else "file_missing"
            self.faults.append(Fault(code, str(error)))
        try:
            self.weights = read_weights(folder)
        except DamagedFileError as error:
            self.faults.append(error.fault)
        config, weights = self.config, self.weights
        if config is None or weights is None:
            return
        from dflash_engine.drafter.values import value_faults, value_warnings  # numpy: only where values are looked at

        self.faults += tensor_faults(config, weights)
        self.faults += value_faults(config, weights, deep=deep)
        self.warnings += value_warnings(weights)
        if weights.beside:
            message = f"{len(weights.beside)} other tensors stand beside the drafter's, such as {weights.beside[0]}"
            self.warnings.append(Fault("extra_tensor", message, weights.beside[0]))
        found = {t.dtype for n, t in weights.tensors.items() if n not in ("d2t", "t2d")}
        said = None if self.document is None else self.document.dtype
        if said is not None and found and {DTYPE_NAMES.get(dtype, dtype) for dtype in found} != {said}:
            message = f"the configuration says {said}, the tensors are {', '.join(sorted(found))}"
            self.warnings.append(Fault("dtype_mismatch", message, "dtype"))

    def manifest(self, folder: Path, target_print: str, tokenizer_print: str) -> Manifest | None:
        try:
            record = parse_manifest((folder / MANIFEST_NAME).read_bytes())
        except FileNotFoundError:
            message = "it has no manifest, so nothing says for which target it was trained"
            self.warnings.append(Fault("manifest_missing", message, MANIFEST_NAME))
            return None
        except (OSError, ManifestError) as error:
            self.faults.append(Fault("manifest_damaged", str(error), MANIFEST_NAME))
            return None
        for what, made_for, found in (
            ("target", record.target_fingerprint, target_print),
            ("tokenizer", record.tokenizer_fingerprint, tokenizer_print),
        ):
            if found and not made_for:
                message = f"the manifest does not say for which {what} the drafter was trained"
                self.warnings.append(Fault(f"{what}_unlike", message, MANIFEST_NAME))
            elif found and made_for != found:
                message = f"the drafter was trained for {what} {made_for[:12]}, this one is {found[:12]}"
                self.faults.append(Fault(f"{what}_unlike", message, MANIFEST_NAME))
        if record.step == 0:
            # Before the first step every norm is one, as it should be.
            self.warnings = [w for w in self.warnings if w.code != "frozen_norms"]
        return record


def _against_target(look: _Look, target: Path) -> tuple[str, str]:
    """(target fingerprint, tokenizer fingerprint), and what does not fit."""
    prints = model_fingerprint(target), tokenizer_fingerprint(target)
    config = look.config
    if config is not None:
        try:
            document = json.loads((target / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise TargetError(f"target {target}: config.json cannot be read: {error}") from error
        if not isinstance(document, dict):
            raise TargetError(f"target {target}: config.json does not hold an object")
        own: frozenset[str] = frozenset() if look.weights is None else look.weights.own
        stops = frozenset(configured_stop_ids(target))
        if look.document is not None and not look.document.faults:
            look.faults += fit_faults(config, document, stops, own)
        look.warnings += fit_warnings(config, document)
    return prints


def _text(answer: dict[str, Any]) -> str:
    config = answer["config"]
    lines = []
    if config:
        scaling = dict(config["rope_scaling"]).get("rope_type", "default")
        lines += [
            f"{answer['architecture']}, {answer['layout']} layout in {answer['container']}, "
            f"{answer['parameters'] / 1e6:.1f} M parameters, {answer['bytes'] / 1e6:.1f} MB, "
            f"{' '.join(answer['dtypes'])}",
            f"layers {config['num_hidden_layers']}, hidden {config['hidden_size']}, "
            f"heads {config['num_attention_heads']}/{config['num_key_value_heads']} of {config['head_dim']}, "
            f"block {config['block_size']}, mask token {config['mask_token_id']}",
            f"taps {' '.join(map(str, config['target_layer_ids']))} of a target "
            f"{config['target_hidden_size']} wide; RoPE {scaling}, base {config['rope_theta']:g}",
        ]
        if answer["own"]:
            lines.append(f"owns {', '.join(answer['own'])}")
    if answer["step"] is not None:
        lines.append(f"step {answer['step']}, {answer['tokens_seen']} tokens seen")
    lines += [f"fault {f['code']}: {f['message']}" for f in answer["faults"]]
    lines += [f"warning {f['code']}: {f['message']}" for f in answer["warnings"]]
    lines.append("not usable" if answer["faults"] else "sound")
    # Names come from a file that anybody may have made.
    return "".join(f"{''.join(c if c.isprintable() else '?' for c in line)}\n" for line in lines)
