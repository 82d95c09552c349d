"""Preflight on a real host with a tiny target and drafter: what is checked, and how faults are told."""

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
from dflash_engine.fingerprint import model_fingerprint, tokenizer_fingerprint
from tests.checkpoint_folders import make_older, write_manifest
from tests.models import make_drafter, make_target

HUGE = 3 << 40


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` and `drafter`, made once and copied by each test."""
    folder = tmp_path_factory.mktemp("models")
    make_target(folder / "target")
    make_drafter(folder / "drafter")
    return folder


@pytest.fixture
def target(models: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(models / "target", tmp_path / "target"))


@pytest.fixture
async def host(ssh_host: Profile, target: Path) -> AsyncIterator[HostConnection]:
    changed = msgspec.structs.replace(ssh_host.hosts["ct200"], targets={"tiny": str(target)})
    async with Connections(msgspec.structs.replace(ssh_host, hosts={"ct200": changed})) as hosts:
        yield await hosts.get("ct200")


@pytest.fixture
def checkpoint(host: HostConnection, models: Path) -> Path:
    """`run1:step_5` on the host, trained for the target."""
    folder = Path(host.state, "runs", "run1", "checkpoints", "step_5")
    shutil.copytree(models / "drafter", folder)
    write_manifest(
        folder,
        "run1",
        5,
        target_fingerprint=model_fingerprint(models / "target"),
        tokenizer_fingerprint=tokenizer_fingerprint(models / "target"),
    )
    return folder


async def _preflight(
    host: HostConnection,
    *,
    target: str = "tiny",
    settings: EvaluationSettings | None = None,
    prompt_rows: int = 40,
) -> Preflight:
    return await preflight_evaluation(
        host,
        await deploy_engine(host),
        await one_checkpoint(host, "run1", "step_5"),
        target,
        settings=settings or EvaluationSettings(),
        prompt_rows=prompt_rows,
    )


@pytest.mark.usefixtures("checkpoint")
async def test_a_checkpoint_that_fits_passes_with_every_check_told(
    host: HostConnection, target: Path, models: Path
) -> None:
    passed = await _preflight(host)
    names = [check.name for check in passed.checks]
    assert names == ["packages", "target", "checkpoint", "fit", "memory", "disk"]
    assert all(check.ok and check.detail for check in passed.checks)
    assert str(passed.target) == str(target)
    assert passed.target_fingerprint == model_fingerprint(models / "target")
    assert passed.warnings == ()


def _reverse(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (lambda c, t: shutil.rmtree(t), NotFoundError, r"target: .*has no config.json.*no tokenizer.json"),
        (lambda c, t: (t / "tokenizer.json").unlink(), NotFoundError, "has no tokenizer.json"),
        (lambda c, t: (t / "model.safetensors").unlink(), NotFoundError, "has no .safetensors file"),
        (lambda c, t: _reverse(t / "model.safetensors"), NotFoundError, "target"),
        (
            lambda c, t: _reverse(c / "model.safetensors"),
            IntegrityError,
            r"checkpoint: model.safetensors has SHA-256 \w+, the manifest says",
        ),
        (lambda c, t: (c / "model.safetensors").unlink(), IntegrityError, "checkpoint: incomplete: model.saf"),
    ],
)
async def test_what_is_missing_or_damaged_is_named(
    host: HostConnection,
    checkpoint: Path,
    target: Path,
    damage: Callable[[Path, Path], object],
    error: type[ConsoleError],
    says: str,
) -> None:
    damage(checkpoint, target)
    with pytest.raises(error, match=says):
        await _preflight(host)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"target_layer_ids": [1, 7]}, r"fit: .*7"),
        ({"mask_token_id": 600}, r"fit: .*mask_token_id 600"),
        ({"target_layer_ids": None}, r"fit: .*target_layer_ids"),
    ],
)
async def test_a_checkpoint_that_does_not_fit_the_target_is_refused_with_the_reason(
    host: HostConnection, checkpoint: Path, change: dict[str, object], says: str
) -> None:
    document = json.loads((checkpoint / "config.json").read_text())
    document["dflash_config"] |= change
    (checkpoint / "config.json").write_text(json.dumps(document))
    write_manifest(checkpoint, "run1", 5, target_fingerprint="", tokenizer_fingerprint="")
    with pytest.raises(IntegrityError, match=says):
        await _preflight(host)


async def test_a_checkpoint_of_another_target_is_refused(host: HostConnection, checkpoint: Path) -> None:
    write_manifest(checkpoint, "run1", 5, target_fingerprint="9" * 64)
    with pytest.raises(IntegrityError, match=r"fit: the drafter was trained for target 999999999999.*tokenizer bbbb"):
        await _preflight(host)


async def test_all_faults_are_in_one_error_of_the_first_ones_class(
    host: HostConnection, checkpoint: Path, target: Path
) -> None:
    shutil.rmtree(target)
    (checkpoint / "config.json").unlink()
    with pytest.raises(NotFoundError, match=r"cannot start: target: .*; checkpoint: incomplete: config.json"):
        await _preflight(host)


@pytest.mark.usefixtures("checkpoint")
async def test_a_target_that_the_profile_does_not_name_is_answered_with_those_it_does(host: HostConnection) -> None:
    with pytest.raises(NotFoundError, match=r"no target 'other' for ct200 \(it has: tiny\)"):
        await _preflight(host, target="other")


async def test_memory_counts_the_targets_weights_in_the_evaluations_arithmetic(
    host: HostConnection, checkpoint: Path, target: Path
) -> None:
    write_manifest(checkpoint, "run1", 5, target_fingerprint="", tokenizer_fingerprint="")
    header = json.dumps({"huge": {"dtype": "U8", "shape": [HUGE], "data_offsets": [0, HUGE]}}).encode()
    with (target / "more.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + HUGE)  # a hole: only the size counts here
    with pytest.raises(HostNotReadyError, match=r"memory: about 3299\.\d GB are needed, \d+\.\d GB are available"):
        await _preflight(host)
    with pytest.raises(HostNotReadyError, match=r"memory: about 1649\.\d GB are needed"):
        await _preflight(host, settings=EvaluationSettings(dtype="bfloat16"))


@pytest.mark.usefixtures("checkpoint")
async def test_disk_counts_the_hidden_states_of_the_prompts_that_are_used(host: HostConnection) -> None:
    with pytest.raises(HostNotReadyError, match="disk: hidden states need about"):
        await _preflight(host, prompt_rows=10**10)
    await _preflight(host, prompt_rows=10**10, settings=EvaluationSettings(limit=3))


async def test_a_foreign_checkpoint_is_refused_with_the_remedy(host: HostConnection, checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    make_older(checkpoint)
    with pytest.raises(IntegrityError, match=r"checkpoint: foreign: it has no manifest.json; stage it here"):
        await _preflight(host)
