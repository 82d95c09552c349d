"""Preflight: what is checked before an evaluation, and how faults are told."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from dflash_console.core.checkpoints import one_checkpoint
from dflash_console.core.deploy import deploy_engine
from dflash_console.core.errors import ConsoleError, HostNotReadyError, IntegrityError, NotFoundError
from dflash_console.core.preflight import Preflight, preflight_evaluation
from dflash_console.core.profiles import Profile
from dflash_console.core.ssh import Connections, HostConnection
from dflash_engine.evaluation.identity import EvaluationSettings
from tests.checkpoint_folders import make_checkpoint, make_foreign
from tests.scripted_python import ScriptedPython


@pytest.fixture
def python(tmp_path: Path) -> ScriptedPython:
    return ScriptedPython(tmp_path / "scripted")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


@pytest.fixture
async def host(ssh_host: Profile, python: ScriptedPython, target: Path) -> AsyncIterator[HostConnection]:
    behind = ssh_host.hosts["ct200"]
    changed = msgspec.structs.replace(behind, python=str(python.path), targets={"tiny": str(target)})
    profile = msgspec.structs.replace(ssh_host, hosts={"ct200": changed})
    async with Connections(profile) as hosts:
        yield await hosts.get("ct200")


async def _preflight(
    host: HostConnection,
    *,
    target: str = "tiny",
    name: str = "step_5",
    settings: EvaluationSettings | None = None,
    prompt_rows: int = 40,
) -> Preflight:
    return await preflight_evaluation(
        host,
        await deploy_engine(host),
        await one_checkpoint(host, "run1", name),
        target,
        settings=settings or EvaluationSettings(),
        prompt_rows=prompt_rows,
    )


async def test_a_checkpoint_that_fits_passes_with_every_check_told(host: HostConnection, target: Path) -> None:
    make_checkpoint(Path(host.state), "run1", 5)
    passed = await _preflight(host)
    assert [check.name for check in passed.checks] == [
        "packages",
        "target",
        "checkpoint",
        "fit",
        "target fingerprint",
        "tokenizer fingerprint",
        "memory",
        "disk",
    ]
    assert all(check.ok and check.detail for check in passed.checks)
    assert (str(passed.target), passed.target_fingerprint, passed.warnings) == (str(target), "a" * 64, ())


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (lambda c, t: shutil.rmtree(t), NotFoundError, r"target: .*has no config.json.*no tokenizer.json"),
        (lambda c, t: (t / "tokenizer.json").unlink(), NotFoundError, "has no tokenizer.json"),
        (lambda c, t: (t / "model.safetensors").unlink(), NotFoundError, "has no .safetensors file"),
        (
            lambda c, t: (c / "model.safetensors").write_bytes((c / "model.safetensors").read_bytes()[::-1]),
            IntegrityError,
            r"checkpoint: model.safetensors has SHA-256 \w+, the manifest says",
        ),
        (lambda c, t: (c / "model.safetensors").unlink(), IntegrityError, "checkpoint: incomplete: model.saf"),
    ],
)
async def test_what_is_missing_or_damaged_is_named(
    host: HostConnection,
    target: Path,
    damage: Callable[[Path, Path], object],
    error: type[ConsoleError],
    says: str,
) -> None:
    checkpoint = make_checkpoint(Path(host.state), "run1", 5)
    damage(checkpoint, target)
    with pytest.raises(error, match=says):
        await _preflight(host)


@pytest.mark.parametrize(
    ("inspection", "says"),
    [
        ({"faults": ["target_layer_ids are missing", "mask id 512 of 512"]}, "fit: target_layer_ids.*; mask id 512"),
        ({"target_fingerprint": "9" * 64}, "target fingerprint: tiny has 999999999999, .*trained with aaaaaaaaaaaa"),
        ({"tokenizer_fingerprint": "9" * 64}, "tokenizer fingerprint: tiny has 9999"),
    ],
)
async def test_a_checkpoint_that_does_not_fit_the_target_is_refused_with_the_reason(
    host: HostConnection, python: ScriptedPython, inspection: dict[str, object], says: str
) -> None:
    make_checkpoint(Path(host.state), "run1", 5)
    python.inspection(**inspection)
    with pytest.raises(IntegrityError, match=says):
        await _preflight(host)


async def test_all_faults_are_in_one_error_of_the_first_ones_class(host: HostConnection, target: Path) -> None:
    checkpoint = make_checkpoint(Path(host.state), "run1", 5)
    shutil.rmtree(target)
    (checkpoint / "config.json").unlink()
    with pytest.raises(NotFoundError, match=r"cannot start: target: .*; checkpoint: incomplete: config.json"):
        await _preflight(host)


async def test_a_target_that_the_profile_does_not_name_is_answered_with_those_it_does(host: HostConnection) -> None:
    make_checkpoint(Path(host.state), "run1", 5)
    with pytest.raises(NotFoundError, match=r"no target 'other' for .* \(it has: tiny\)"):
        await _preflight(host, target="other")


async def test_memory_counts_weights_in_the_evaluations_arithmetic(host: HostConnection, target: Path) -> None:
    make_checkpoint(Path(host.state), "run1", 5)
    with (target / "model.safetensors").open("r+b") as file:
        file.truncate(3 << 40)  # a hole: the size is what counts
    with pytest.raises(HostNotReadyError, match=r"memory: about 6597\.\d GB are needed, \d+\.\d GB are available"):
        await _preflight(host)
    with pytest.raises(HostNotReadyError, match=r"memory: about 3299\.\d GB are needed"):
        await _preflight(host, settings=EvaluationSettings(dtype="bfloat16"))


async def test_disk_counts_the_hidden_states_of_the_prompts_that_are_used(host: HostConnection) -> None:
    make_checkpoint(Path(host.state), "run1", 5)
    with pytest.raises(HostNotReadyError, match="disk: hidden states need about"):
        await _preflight(host, prompt_rows=10**10)
    await _preflight(host, prompt_rows=10**10, settings=EvaluationSettings(limit=3))


async def test_a_foreign_checkpoint_passes_with_a_warning_and_an_identity(host: HostConnection) -> None:
    make_foreign(Path(host.state), "run1", "step_3")
    passed = await _preflight(host, name="step_3")
    assert "does not say which target" in passed.warnings[0]
    assert len(passed.manifest.model_fingerprint()) == 64
