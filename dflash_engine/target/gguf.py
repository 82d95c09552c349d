"""A GGUF file into a Hugging Face folder: weights dequantised to float32, tokenizer and chat template with them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from dflash_engine import durable, layout
from dflash_engine.errors import EngineError, RoomError, TargetError

__all__ = ["convert_gguf", "main"]

_GGUF_MAGIC = b"GGUF"


def convert_gguf(gguf: Path, out: Path, progress: Callable[[str], None]) -> None:
    """Convert `gguf` into the folder `out`, which appears whole or not at all; one that exists is kept.

    `progress` gets a phrase per stage. Raises TargetError where the file cannot be converted, RoomError where
    the result cannot be written. Memory: about twice the float32 weights.
    """
    if out.exists():
        progress(f"{out} exists already")
        return
    _check_magic(gguf)
    transformers_logging.disable_progress_bar()
    try:
        progress(f"reading {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB)")
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            local_files_only=True,
            **_dequantise(),
        )
        progress("reading its tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    except Exception as error:  # transformers and gguf raise anything for a damaged file
        raise TargetError(f"{gguf} cannot be converted: {type(error).__name__}: {error}") from error
    if isinstance(model.config.eos_token_id, int):
        # transformers 5.8 gives the tokenizer another end token than the file's.
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    partial = out.with_name(f"{out.name}{layout.PARTIAL_MARK}{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        progress(f"writing {sum(p.numel() for p in model.parameters()) * 4 / 1e6:.0f} MB as float32")
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        _clean_config(partial / "config.json")
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors makes its files private
        durable.publish_folder(partial, out)
    except FileExistsError:
        progress(f"{out} was made by another process meanwhile")
    except OSError as error:
        raise RoomError(f"{out} could not be written: {error}; make room there or choose another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress(f"done: {out}")


def main(argv: list[str]) -> int:
    """`convert gguf FILE OUT`: progress goes to standard output, one line `convert: ...` a stage."""
    if len(argv) != 3 or argv[0] != "gguf":
        sys.stderr.write("usage: dflash-engine convert gguf FILE OUT\n")
        return 2
    try:
        convert_gguf(Path(argv[1]), Path(argv[2]), _say)
    except EngineError as error:
        sys.stderr.write(f"dflash-engine: error: {error}\n")
        return error.exit_code
    return 0


def _say(phrase: str) -> None:
    sys.stdout.write(f"convert: {phrase}\n")
    sys.stdout.flush()


def _dequantise() -> dict[str, Any]:
    # transformers 5.24 keeps quantised weights unless told otherwise; 5.8 has no such option and never keeps them.
    if not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def _check_magic(gguf: Path) -> None:
    try:
        with gguf.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise TargetError(f"{gguf} cannot be read: {error.strerror}; expected a GGUF file") from error
    if magic != _GGUF_MAGIC:
        raise TargetError(f"{gguf} is no GGUF file: it begins with {magic!r}, expected {_GGUF_MAGIC!r}")


def _clean_config(path: Path) -> None:
    """The folder holds plain float32 weights: the quantisation they came from would mislead whoever loads it."""
    document = json.loads(path.read_bytes())
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        document.pop(key, None)
    durable.write_json(path, document)
