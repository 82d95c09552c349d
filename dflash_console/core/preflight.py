"""The cheap checks before an evaluation: every fault in one message, seconds before hours would be wasted."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

import msgspec

from dflash_console.core.checkpoints import CheckpointView
from dflash_console.core.deploy import DeployedEngine, HostProbe, engine_json, probe
from dflash_console.core.errors import (
    ConsoleError,
    HostNotReadyError,
    IntegrityError,
    NotFoundError,
    RemoteCommandError,
)
from dflash_console.core.hashing import checkpoint_faults
from dflash_console.core.quoting import printable
from dflash_console.core.ssh import Entry, HostConnection
from dflash_engine.evaluation.identity import EvaluationSettings
from dflash_engine.manifest import Manifest

__all__ = ["Check", "Preflight", "preflight_evaluation"]

_PACKAGES = ("torch", "transformers", "safetensors")
_DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_CONFIG_MAX_BYTES = 1 << 20
_WORKING_BYTES = 512 << 20  # Python, torch and the activations of one batch
_PROMPT_TOKENS = 1024  # what a prompt is assumed to take where nothing has been tokenised yet


class Check(msgspec.Struct, frozen=True):
    """One check and what it found."""

    name: str
    ok: bool
    detail: str


class Preflight(msgspec.Struct, frozen=True):
    """A passed preflight: all checks, and the identities that the evaluation's id is made of."""

    checks: tuple[Check, ...]
    manifest: Manifest
    target: PurePosixPath
    target_fingerprint: str
    tokenizer_fingerprint: str
    warnings: tuple[str, ...]


class _Fault(msgspec.Struct, frozen=True):
    """What the inspection found: a code that does not change, and a sentence."""

    code: str
    message: str


class _Inspection(msgspec.Struct, frozen=True):
    """The part of `dflash-engine inspect`'s answer that is used here."""

    target_fingerprint: str
    tokenizer_fingerprint: str
    faults: tuple[_Fault, ...]
    warnings: tuple[_Fault, ...]
    config: dict[str, Any]


class _Findings:
    """Collects checks, and the class of the first fault for the error's exit code."""

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.error: type[ConsoleError] | None = None

    def add(self, name: str, fault: str, passed: str, error: type[ConsoleError]) -> bool:
        """Note a check; `fault` is empty where it passed. Returns whether it did."""
        self.checks.append(Check(name, not fault, fault or passed))
        if fault and self.error is None:
            self.error = error
        return not fault

    def refuse(self, what: str) -> None:
        """Raise the one error with every fault, where there is any."""
        if self.error is not None:
            faults = "; ".join(f"{check.name}: {check.detail}" for check in self.checks if not check.ok)
            raise self.error(f"{what} cannot start: {faults}.")


async def preflight_evaluation(
    conn: HostConnection,
    engine: DeployedEngine,
    checkpoint: CheckpointView,
    target_name: str,
    *,
    settings: EvaluationSettings,
    prompt_rows: int,
) -> Preflight:
    """Check packages, target, checkpoint (by hash), their fit and the room, without loading a weight.

    `prompt_rows` is the number of prompts, for the estimate of disk. All checks that can be made are made,
    then one error names every fault; its class (so its exit code) is the first fault's.
    """
    findings = _Findings()
    what = f"The evaluation of {checkpoint.run}:{checkpoint.name} on {conn.name}"
    host = await probe(conn, engine)
    missing = [name for name in _PACKAGES if host.packages.get(name) is None]
    findings.add(
        "packages",
        f"{', '.join(missing)} missing in {conn.profile.python}; install 'dflash-ops[engine]'" if missing else "",
        ", ".join(f"{name} {host.packages.get(name)}" for name in _PACKAGES),
        HostNotReadyError,
    )
    target, files = await _find_target(conn, target_name, findings)
    manifest = await _check_bytes(conn, engine, checkpoint, findings)
    if target is None or manifest is None:
        findings.refuse(what)
        raise RemoteCommandError(f"{what} cannot start, and no check says why; run it again.")
    inspection = await _inspect(conn, engine, checkpoint, target)
    findings.add(
        "fit",
        _phrases([fault.message for fault in inspection.faults]),
        "the checkpoint fits the target",
        IntegrityError,
    )
    dtype_factor = await _dtype_factor(conn, target, settings)
    weights = sum(entry.size_bytes for entry in files if entry.name.endswith(".safetensors"))
    _check_room(findings, host, int(weights * dtype_factor), inspection.config, settings, prompt_rows)
    findings.refuse(what)
    return Preflight(
        checks=tuple(findings.checks),
        manifest=manifest,
        target=target,
        target_fingerprint=inspection.target_fingerprint,
        tokenizer_fingerprint=inspection.tokenizer_fingerprint,
        warnings=tuple(printable(warning.message, 300) for warning in inspection.warnings),
    )


async def _find_target(
    conn: HostConnection, target_name: str, findings: _Findings
) -> tuple[PurePosixPath | None, list[Entry]]:
    if target_name not in conn.profile.targets:
        known = ", ".join(sorted(conn.profile.targets)) or "none"
        fault = f"the profile has no target {printable(target_name, 100)!r} for {conn.name} (it has: {known})"
        findings.add("target", fault, "", NotFoundError)
        return None, []
    folder = PurePosixPath(conn.profile.targets[target_name])
    files = await conn.list_dir(folder)
    names = {entry.name for entry in files}
    faults = []
    if "config.json" not in names:
        faults.append(f"{folder} has no config.json; expected a Hugging Face model folder")
    if not names & {"tokenizer.json", "tokenizer.model"}:
        faults.append(f"{folder} has no tokenizer.json")
    if not any(name.endswith(".safetensors") for name in names):
        faults.append(f"{folder} has no .safetensors file")
    passed = findings.add("target", "; ".join(faults), str(folder), NotFoundError)
    return (folder if passed else None), files


async def _check_bytes(
    conn: HostConnection, engine: DeployedEngine, checkpoint: CheckpointView, findings: _Findings
) -> Manifest | None:
    if checkpoint.state == "incomplete":
        findings.add("checkpoint", f"incomplete: {checkpoint.reason}", "", IntegrityError)
        return None
    if checkpoint.manifest is None:
        fault = "foreign: it has no manifest.json; stage it here from another host, which gives it one"
        findings.add("checkpoint", fault, "", IntegrityError)
        return None
    records = checkpoint.manifest.model
    faults = await checkpoint_faults(conn, engine, checkpoint.path, records)
    findings.add("checkpoint", _phrases(faults), f"{len(records)} files hold by SHA-256", IntegrityError)
    return None if faults else checkpoint.manifest


async def _inspect(
    conn: HostConnection, engine: DeployedEngine, checkpoint: CheckpointView, target: PurePosixPath
) -> _Inspection:
    arguments = ["inspect", str(checkpoint.path), "--target", str(target), "--json"]
    # 2 says that there are faults: an answer, and not a failure.
    answer = await engine_json(conn, engine, arguments, timeout_s=120.0, codes=(0, 2))
    try:
        return msgspec.convert(answer, _Inspection)
    except msgspec.ValidationError as error:
        raise RemoteCommandError(f"{conn.name}: the engine's inspection cannot be read: {error}.") from error


async def _dtype_factor(conn: HostConnection, target: PurePosixPath, settings: EvaluationSettings) -> float:
    """Bytes of a weight in memory over bytes of it on disk; 1 where the target's config does not say its
    type.
    """
    raw = await conn.read_file(target / "config.json", max_bytes=_CONFIG_MAX_BYTES)
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return 1.0
    stored = (document.get("dtype") or document.get("torch_dtype")) if isinstance(document, dict) else None
    stored_bytes = _DTYPE_BYTES.get(str(stored).removeprefix("torch."))
    return _DTYPE_BYTES[settings.dtype] / stored_bytes if stored_bytes else 1.0


def _check_room(
    findings: _Findings,
    host: HostProbe,
    weights_bytes: int,
    config: dict[str, Any],
    settings: EvaluationSettings,
    prompt_rows: int,
) -> None:
    memory = weights_bytes + _WORKING_BYTES
    findings.add(
        "memory",
        f"about {memory / 1e9:.1f} GB are needed, {host.memory_available_bytes / 1e9:.1f} GB are available"
        if host.memory_available_bytes < memory
        else "",
        f"about {memory / 1e9:.1f} of {host.memory_available_bytes / 1e9:.1f} GB",
        HostNotReadyError,
    )
    rows = min(prompt_rows, settings.limit) if settings.limit else prompt_rows
    disk = rows * (_PROMPT_TOKENS + settings.max_new_tokens) * _context_bytes_per_token(config)
    findings.add(
        "disk",
        f"hidden states need about {disk / 1e9:.1f} GB, {host.disk_free_bytes / 1e9:.1f} GB are free"
        if host.disk_free_bytes < disk
        else "",
        f"about {disk / 1e9:.1f} of {host.disk_free_bytes / 1e9:.1f} GB",
        HostNotReadyError,
    )


def _context_bytes_per_token(config: dict[str, Any]) -> int:
    layer_ids = config.get("target_layer_ids")
    hidden_size = config.get("target_hidden_size")
    if isinstance(layer_ids, list) and type(hidden_size) is int:
        return len(layer_ids) * hidden_size * 4
    return 0


def _phrases(faults: tuple[str, ...] | list[str]) -> str:
    return "; ".join(printable(fault, 300) for fault in faults)
