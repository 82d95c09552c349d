"""`dflash-engine convert`: a drafter into the layout of a server, or a GGUF target into a Hugging Face folder.

Only names and the configuration change: tensors go over bit for bit, in their own dtype, and the configuration says
that dtype. Prefixes, optimizer state and other tensors beside the drafter's stay behind. An embedding or head of the
full vocabulary that equals the target's to the bit is the target's, and is left out; any other is kept.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_engine import durable
from dflash_engine.drafter.checkpoint import read_tensor, write_weights
from dflash_engine.drafter.config import SLIDING, DrafterConfig
from dflash_engine.drafter.documents import read_document, read_json, speculators_document, zlab_document
from dflash_engine.drafter.stored import DTYPE_NAMES, StoredWeights, read_weights
from dflash_engine.drafter.tensors import EMBEDDING, HEAD
from dflash_engine.errors import CheckpointError, EngineError
from dflash_engine.inspection import inspect_checkpoint
from dflash_engine.target.embedding import load_embedding_and_head

__all__ = ["convert_drafter", "main"]


def main(argv: list[str]) -> int:
    """`convert SRC DST --to LAYOUT`, or `convert gguf FILE OUT`."""
    if argv[:1] == ["gguf"]:
        from dflash_engine.target.gguf import main as gguf

        return gguf(argv)
    parser = argparse.ArgumentParser(
        prog="dflash-engine convert", description=__doc__, epilog="also: dflash-engine convert gguf FILE OUT"
    )
    parser.add_argument("source", type=Path, help="checkpoint folder in any layout that is read")
    parser.add_argument("destination", type=Path, help="folder to make; it must not exist")
    parser.add_argument("--to", required=True, choices=["z-lab", "speculators"])
    parser.add_argument("--target", type=Path, help="the target's folder: names it, and tells its embedding and head")
    arguments = parser.parse_args(argv)
    try:
        said = convert_drafter(arguments.source, arguments.destination, arguments.to, arguments.target)
    except EngineError as error:
        sys.stderr.write(f"dflash-engine: error: {error}\n")
        return error.exit_code
    for line in said:
        sys.stdout.write(f"convert: {line}\n")
    return 0


def convert_drafter(source: Path, destination: Path, to: str, target: Path | None) -> list[str]:
    """Make `destination` whole or not at all; returns what a user should know.

    Raises CheckpointError for a source that is not sound, for something that the layout has no place for, and
    where the destination exists.
    """
    if destination.exists():
        raise CheckpointError(f"{destination} exists already; name a folder that does not")
    faults = inspect_checkpoint(source, None)["faults"]
    if faults:
        raise CheckpointError(f"{source} is not sound: {'; '.join(fault['message'] for fault in faults)}")
    document = read_json(source / "config.json")
    config = read_document(document).config
    weights = read_weights(source)
    if config is None:
        raise CheckpointError(f"{source}: config.json has no configuration")
    tensors = {name: read_tensor(stored) for name, stored in weights.tensors.items()}
    said = _drop_the_targets(tensors, config, target)
    dtype = _dtype(weights, tensors)
    if to == "speculators":
        verifier, architectures = _verifier(document, target)
        written = speculators_document(config, dtype, verifier, architectures)
        if SLIDING in config.layer_types and len(set(config.layer_types)) > 1 and config.is_causal is None:
            said.append("vLLM reads this layout with every layer causal, the full ones too; serve the z-lab layout")
    else:
        written = zlab_document(config, dtype)
    said += [f"SGLang ignores the drafter's own {name} without a word" for name in (EMBEDDING, HEAD) if name in tensors]
    partial = destination.with_name(f".{destination.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    try:
        partial.mkdir(parents=True)
        write_weights(tensors, partial)
        durable.write_json(partial / "config.json", written)
        durable.publish_folder(partial, destination)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{destination} cannot be written: {error.strerror}") from error
    return [*said, f"{destination} is in the {to} layout, {len(tensors)} tensors, {dtype}"]


def _drop_the_targets(tensors: dict[str, Tensor], config: DrafterConfig, target: Path | None) -> list[str]:
    """Take out an embedding and head that are the target's; both are kept where nobody can tell."""
    held = [name for name in (EMBEDDING, HEAD) if name in tensors and not (name == HEAD and config.draft_vocab_size)]
    if not held:
        return []
    if target is None:
        return [f"{name} is kept: only with --target can it be told whether it is the target's" for name in held]
    said = []
    theirs = dict(zip((EMBEDDING, HEAD), load_embedding_and_head(target, dtype=torch.float32), strict=True))
    for name in held:
        if tensors[name].shape == theirs[name].shape and torch.equal(tensors[name].float(), theirs[name]):
            del tensors[name]
            said.append(f"{name} is the target's own and is left out")
        else:
            said.append(f"{name} differs from the target's and is kept")
    return said


def _dtype(weights: StoredWeights, tensors: dict[str, Tensor]) -> str:
    found = sorted({weights.tensors[name].dtype for name in tensors} & DTYPE_NAMES.keys())
    if len(found) > 1:
        raise CheckpointError(f"its tensors are {' and '.join(found)}; a configuration can name one dtype only")
    return DTYPE_NAMES[found[0]]


def _verifier(document: dict[str, Any], target: Path | None) -> tuple[str, list[str]]:
    """(name or path, architectures) of the target, from its folder or from a source that is in this layout already."""
    named = document.get("speculators_config", {}).get("verifier") if target is None else None
    if isinstance(named, dict):
        return str(named.get("name_or_path")), [str(name) for name in named.get("architectures") or []]
    if target is None:
        raise CheckpointError("the speculators layout names the target; say which with --target DIR")
    return str(target), [str(name) for name in read_json(target / "config.json").get("architectures") or []]
