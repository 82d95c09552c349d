"""`dflash-engine inspect`: what it refuses, what it only mentions, and that it needs no torch for it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_engine.drafter.checkpoint import MODEL_FILES
from dflash_engine.drafter.documents import read_config
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.drafter.tensors import expected_tensors
from dflash_engine.errors import TargetError
from dflash_engine.fingerprint import model_fingerprint, tokenizer_fingerprint
from dflash_engine.inspection import inspect_checkpoint, main
from dflash_engine.manifest import MANIFEST_NAME, Manifest, record_files
from tests.models import END, make_drafter, make_target

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspection")
    make_target(folder / "target")
    make_drafter(folder / "drafter")
    return folder


@pytest.fixture
def target(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "target", tmp_path / "target"))


@pytest.fixture
def drafter(made: Path, target: Path, tmp_path: Path) -> Path:
    """A checkpoint with a manifest that names the target."""
    folder = Path(shutil.copytree(made / "drafter", tmp_path / "drafter"))
    _write_manifest(folder, model_fingerprint(target), tokenizer_fingerprint(target))
    return folder


def _write_manifest(folder: Path, target: str, tokenizer: str) -> Manifest:
    record = Manifest(
        run="run1",
        step=5,
        tokens_seen=500,
        created=1.0,
        engine_hash="",
        target_fingerprint=target,
        tokenizer_fingerprint=tokenizer,
        model=record_files(folder, list(MODEL_FILES)),
        resume={},
    )
    (folder / MANIFEST_NAME).write_text(json.dumps(record.to_json()))
    return record


def _edit(path: Path, change: Change) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


def test_a_checkpoint_that_fits_has_no_faults_and_tells_what_it_is(drafter: Path, target: Path) -> None:
    answer = inspect_checkpoint(drafter, target)
    assert answer == {
        "faults": [],
        "warnings": [],
        "layout": "z-lab",
        "container": "safetensors",
        "prefix": "",
        "architecture": "DFlash",
        "parameters": sum(t.numel() for t in load_file(drafter / "model.safetensors").values()),
        "bytes": sum(t.nbytes for t in load_file(drafter / "model.safetensors").values()),
        "dtypes": ["F32"],
        "own": [],
        "deep": False,
        "step": 5,
        "tokens_seen": 500,
        "config": asdict(read_config(drafter)),
        "fingerprint": _write_manifest(drafter, "", "").model_fingerprint(),
        "target_fingerprint": model_fingerprint(target),
        "tokenizer_fingerprint": tokenizer_fingerprint(target),
    }


def test_without_a_target_the_checkpoint_alone_is_inspected(drafter: Path) -> None:
    answer = inspect_checkpoint(drafter, None)
    assert (answer["faults"], answer["warnings"], answer["target_fingerprint"]) == ([], [], "")


def test_the_expected_tensors_are_those_of_the_model(drafter: Path) -> None:
    config = read_config(drafter)
    with torch.device("meta"):
        model = DFlashDrafter(config)
    assert expected_tensors(config) == {name: tuple(t.shape) for name, t in model.state_dict().items()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("layers.1.self_attn.k_norm.weight"), "tensor layers.1.self_attn.k_norm.weight is missing"),
        (lambda t: t.update(gate=torch.ones(1)), "tensor gate does not belong to this architecture"),
        (
            lambda t: t.update({"fc.weight": t["fc.weight"][:, :64].contiguous()}),
            r"tensor fc.weight has shape \[64, 64\], 2 tapped layers of width 64 imply \[64, 128\]",
        ),
        (
            lambda t: t.update({"norm.weight": t["norm.weight"].long()}),
            "tensor norm.weight is I64, expected F32 or",
        ),
    ],
)
def test_tensors_other_than_the_configurations_are_faults(drafter: Path, change: Change, says: str) -> None:
    tensors = load_file(drafter / "model.safetensors")
    change(tensors)
    save_file(tensors, drafter / "model.safetensors")
    _assert_one_fault(inspect_checkpoint(drafter, None), says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c["dflash_config"].pop("target_layer_ids"), "no target_layer_ids; they are never guessed"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[1, 6]), r"target_layer_ids \[6\] are outside 0\.\.5"),
        (lambda c: c["dflash_config"].update(mask_token_id=512), "mask_token_id 512 is outside the vocabulary of 512"),
        (lambda c: c["dflash_config"].update(mask_token_id=END), f"mask_token_id {END} is a stop token"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[1, 5]), r"tap the target's last layer \(5\)"),
        (lambda c: c.update(num_target_layers=7), "made for a target of 7 layers, this one has 6"),
        (lambda c: c.update(vocab_size=600), "vocabulary is 600, the target's 512"),
    ],
)
def test_a_configuration_that_is_wrong_or_of_another_target_is_a_fault(
    drafter: Path, target: Path, change: Change, says: str
) -> None:
    _edit(drafter / "config.json", change)
    _assert_one_fault(inspect_checkpoint(drafter, target), says)


def test_a_target_of_another_width_is_a_fault(drafter: Path, tmp_path: Path) -> None:
    wide = make_target(tmp_path / "wide", hidden_size=96)
    _write_manifest(drafter, model_fingerprint(wide), tokenizer_fingerprint(wide))
    _assert_one_fault(
        inspect_checkpoint(drafter, wide), "fc expects states of width 64, the target's have 96", some=True
    )


def test_a_stop_token_that_only_the_generation_configuration_names_counts(drafter: Path, target: Path) -> None:
    mask = read_config(drafter).mask_token_id
    _edit(target / "generation_config.json", lambda c: c.update(eos_token_id=[END, mask]))
    _assert_one_fault(inspect_checkpoint(drafter, target), f"mask_token_id {mask} is a stop token")


def test_another_target_or_tokenizer_than_the_manifests_is_a_fault(drafter: Path, target: Path) -> None:
    _write_manifest(drafter, "1" * 64, tokenizer_fingerprint(target))
    _assert_one_fault(inspect_checkpoint(drafter, target), "trained for target 111111111111, this one is")
    _write_manifest(drafter, model_fingerprint(target), "2" * 64)
    _assert_one_fault(inspect_checkpoint(drafter, target), "trained for tokenizer 222222222222, this one is")


def test_a_checkpoint_that_does_not_say_its_target_is_only_warned_about(drafter: Path, target: Path) -> None:
    _write_manifest(drafter, "", tokenizer_fingerprint(target))
    answer = inspect_checkpoint(drafter, target)
    assert (answer["faults"], len(answer["warnings"])) == ([], 1)
    (drafter / MANIFEST_NAME).unlink()
    answer = inspect_checkpoint(drafter, target)
    assert (answer["faults"], answer["fingerprint"]) == ([], "")
    assert "no manifest" in answer["warnings"][0]["message"]


def test_another_rope_base_than_the_targets_is_a_warning(drafter: Path, target: Path) -> None:
    _edit(drafter / "config.json", lambda c: c.update(rope_theta=1e6, rope_parameters={"rope_theta": 1e6}))
    answer = inspect_checkpoint(drafter, target)
    assert answer["faults"] == []
    assert "rope_theta is 1e+06, the target's 10000" in answer["warnings"][0]["message"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-9]), "safetensors"),
        (lambda d: (d / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda d: (d / "config.json").unlink(), "no config.json"),
        (lambda d: (d / "config.json").write_text("[]"), "does not hold a JSON object"),
        (lambda d: (d / MANIFEST_NAME).write_text("{}"), "manifest.json has version None"),
    ],
)
def test_damaged_files_are_faults_not_crashes(
    drafter: Path, target: Path, damage: Callable[[Path], object], says: str
) -> None:
    damage(drafter)
    _assert_one_fault(inspect_checkpoint(drafter, target), says)


def test_an_unreadable_target_is_an_error_of_one_line(
    drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(drafter), "--target", str(tmp_path / "nowhere")]) == TargetError.exit_code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("dflash-engine: error: ")


def test_the_command_answers_in_json_without_loading_torch(drafter: Path, target: Path) -> None:
    code = (
        "import sys; from dflash_engine.cli import main\n"
        f"assert main(['inspect', {str(drafter)!r}, '--target', {str(target)!r}, '--json']) == 0\n"
        "assert not {'torch', 'safetensors', 'transformers'} & set(sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert json.loads(done.stdout)["faults"] == []


def _assert_one_fault(answer: dict[str, Any], says: str, *, some: bool = False) -> None:
    assert some or len(answer["faults"]) == 1, answer["faults"]
    assert re.search(says, answer["faults"][0]["message"]), answer["faults"]
