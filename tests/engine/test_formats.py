"""Checkpoints as people have them: read from every layout, written in the two that are served, refused by code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_engine.convert import convert_drafter, main
from dflash_engine.drafter.checkpoint import load_drafter
from dflash_engine.drafter.documents import read_config
from dflash_engine.drafter.faults import CODES
from dflash_engine.errors import CheckpointError
from dflash_engine.inspection import inspect_checkpoint
from tests.reference import REFERENCE, TARGET

MODELS = REFERENCE / "models"
SMALL = MODELS / "drafter_qwen3_small"
Tensors = dict[str, torch.Tensor]


def codes(folder: Path, *, deep: bool = False) -> list[str]:
    return [fault["code"] for fault in inspect_checkpoint(folder, None, deep=deep)["faults"]]


def folder_with(tmp_path: Path, change: Callable[[dict[str, Any]], object] = lambda d: None) -> Path:
    """A folder with the small drafter's configuration and no weights yet."""
    document = json.loads((SMALL / "config.json").read_bytes())
    change(document)
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(document))
    return tmp_path


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "drafter.", "model.", "module._orig_mod.drafter."])
@pytest.mark.parametrize("key", ["", "model_state_dict", "draft_state_dict"])
def test_home_made_torch_files_load_with_prefixes_and_an_optimizer_beside(
    tmp_path: Path, prefix: str, key: str
) -> None:
    weights = load_file(SMALL / "model.safetensors")
    state = {prefix + name: torch.nn.Parameter(tensor) for name, tensor in weights.items()}
    moments = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(4)}}, "param_groups": [{"lr": 1e-3}]}
    saved: Any = {key: state, "optimizer": moments, "step": 7} if key else state
    name = "training_state.pt" if key == "draft_state_dict" else "drafter.pt"
    torch.save(saved, folder_with(tmp_path) / name)
    found = load_drafter(tmp_path).state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[n], t) for n, t in weights.items())
    assert codes(tmp_path, deep=True) == []


def test_shards_and_a_model_prefix_load(tmp_path: Path) -> None:
    weights = {f"model.{n}": t for n, t in load_file(SMALL / "model.safetensors").items()}
    names = sorted(weights)
    places = {}
    folder_with(tmp_path)
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({n: weights[n] for n in part}, tmp_path / f"model-{i}.safetensors")
        places |= dict.fromkeys(part, f"model-{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert inspect_checkpoint(tmp_path, None)["container"] == "safetensors, 2 shards"
    assert torch.equal(load_drafter(tmp_path).fc.weight, weights["model.fc.weight"])
    (tmp_path / "model-1.safetensors").unlink()
    assert codes(tmp_path) == ["file_missing"]


class Payload:
    """Would make a file if anybody ran it."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_a_pickle_that_is_more_than_tensors_is_refused_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"fc.weight": torch.zeros(2, 2), "more": Payload()}, folder_with(tmp_path) / "drafter.pt")
    assert codes(tmp_path) == ["pickle_unsafe"]
    assert not (tmp_path / "ran").exists()
    (tmp_path / "drafter.pt").write_bytes(pickle.dumps({"fc.weight": 1}))
    assert codes(tmp_path) == ["file_damaged"]


@pytest.mark.parametrize(
    "name", ["drafter_qwen3_small", "drafter_qwen3_b8", "drafter_llama_b16", "drafter_qwen3_slide_b4"]
)
def test_z_lab_to_speculators_and_back_is_bit_for_bit(tmp_path: Path, name: str) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    convert_drafter(MODELS / name, there, "speculators", TARGET)
    convert_drafter(there, back, "z-lab", None)
    first, last = load_file(MODELS / name / "model.safetensors"), load_file(back / "model.safetensors")
    assert first.keys() == last.keys()
    assert all(torch.equal(first[n].view(torch.uint8), last[n].view(torch.uint8)) for n in first)
    before, after = vars(read_config(MODELS / name)), vars(read_config(back))
    # The one thing that the speculators layout has no place for is read from the target itself.
    assert {k for k in before if before[k] != after[k]} <= {"num_target_layers"}


@pytest.mark.parametrize("name", ["speculators_with_head", "speculators_reduced_vocab"])
def test_a_head_is_dropped_only_where_it_is_the_targets(tmp_path: Path, name: str) -> None:
    said = convert_drafter(REFERENCE / "formats" / name, tmp_path / "out", "z-lab", TARGET)
    held = load_file(tmp_path / "out" / "model.safetensors").keys() & {"lm_head.weight", "embed_tokens.weight", "d2t"}
    assert held == (set() if name == "speculators_with_head" else {"lm_head.weight", "d2t"}), said
    assert codes(tmp_path / "out") == []


def test_the_written_configuration_names_the_tensors_dtype_and_nothing_of_the_target(tmp_path: Path) -> None:
    convert_drafter(REFERENCE / "formats" / "specforge", tmp_path / "out", "z-lab", None)
    document = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert document["dtype"] == "float32"
    assert document["rope_theta"] == document["rope_parameters"]["rope_theta"]
    assert document["block_size"] == document["dflash_config"]["block_size"]
    assert not {k for k in document if k.startswith(("linear_", "mtp", "partial_rotary"))}


def test_a_conversion_that_would_lose_something_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_with(tmp_path / "src", lambda d: d["dflash_config"].update(output_multiplier=0.5))
    shutil.copy(SMALL / "model.safetensors", source)
    assert main([str(source), str(tmp_path / "out"), "--to", "speculators", "--target", str(TARGET)]) != 0
    assert "no place for output_multiplier" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="exists already"):
        convert_drafter(SMALL, source, "z-lab", None)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda d: d["dflash_config"].pop("target_layer_ids"), "layer_ids_missing"),
        (lambda d: d["dflash_config"].update(target_layer_ids=[]), "layer_ids_empty"),
        (lambda d: d["dflash_config"].update(target_layer_ids=[2, 9]), "layer_id_out_of_range"),
        (lambda d: d["dflash_config"].update(target_layer_ids=[2, 2]), "layer_ids_duplicate"),
        (lambda d: d["dflash_config"].update(target_layer_ids=[4, 2]), "layer_ids_unsorted"),
        (lambda d: d["dflash_config"].update(block_size=4), "block_size_conflict"),
        (lambda d: d["dflash_config"].update(mask_token_id=4096), "mask_id_outside_vocab"),
        (lambda d: d["dflash_config"].update(sample_from_anchor=True), "architecture_unknown"),
        (lambda d: d.update(rope_theta=1e4, rope_parameters={"rope_theta": 1e6}), "rope_conflict"),
        (lambda d: d.update(rope_scaling={"rope_type": "longrope"}), "rope_unknown"),
        (lambda d: d.update(layer_types=["sliding_attention"] * 2), "window_missing"),
        (lambda d: d.update(layer_types=["sliding_attention"] * 2, sliding_window=8), "window_nulled"),
        (lambda d: d.update(layer_types=["full_attention"]), "layer_types_count"),
        (lambda d: d.update(num_hidden_layers=3, layer_types=["full_attention"] * 3), "layer_count_mismatch"),
    ],
)
def test_t19_every_fault_of_the_export_contract_has_its_code(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], code: str
) -> None:
    shutil.copy(SMALL / "model.safetensors", folder_with(tmp_path, change))
    assert codes(tmp_path) == [code]
    assert code in CODES
    with pytest.raises(CheckpointError):
        load_drafter(tmp_path)


def test_values_are_looked_at_deeply_only_when_asked(tmp_path: Path) -> None:
    weights = load_file(SMALL / "model.safetensors")
    weights["layers.0.mlp.up_proj.weight"] = torch.zeros(128, 64)
    for name in weights:
        if "norm" in name:
            weights[name] = torch.ones_like(weights[name])
    save_file(weights, folder_with(tmp_path) / "model.safetensors")
    answer = inspect_checkpoint(tmp_path, None)
    assert "frozen_norms" in {warning["code"] for warning in answer["warnings"]}
    weights["fc.weight"][3, 5] = float("inf")
    save_file(weights, tmp_path / "model.safetensors")
    assert "not_finite" in codes(tmp_path, deep=True)
