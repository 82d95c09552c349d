"""The draft model against the published one, and what its checkpoints hold."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_engine.drafter.checkpoint import load_drafter, save_drafter
from dflash_engine.drafter.documents import config_from_json, zlab_document
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.drafter.visibility import Visibility
from dflash_engine.errors import CheckpointError
from dflash_engine.target.embedding import load_embedding_and_head
from tests.reference import DRAFTER, TARGET, tensors


@pytest.fixture(scope="module")
def drafter() -> DFlashDrafter:
    return load_drafter(DRAFTER)


@torch.no_grad()
def test_one_block_equals_the_published_forward(drafter: DFlashDrafter) -> None:
    case = tensors("forward/qwen3_small")
    embedding, head = load_embedding_and_head(TARGET, dtype=torch.float32)
    features = drafter.context_features(case["one_block.context_feature"])
    torch.testing.assert_close(features, case["one_block.context_normed"], atol=5e-5, rtol=0)
    context_length = features.shape[1]
    context = drafter.context_kv(features, torch.arange(context_length)[None])
    block = embedding[case["one_block.noise_ids"]]
    positions = case["one_block.position_ids"][:, context_length:]
    visibility = Visibility(torch.tensor([[context_length]]), block.shape[1], context_length)
    hidden = drafter(block, positions, context, visibility)
    torch.testing.assert_close(hidden, case["one_block.draft_hidden"], atol=5e-5, rtol=0)
    logits = hidden[:, 1:] @ head.T
    torch.testing.assert_close(logits, case["one_block.draft_logits"], atol=2e-4, rtol=0)
    assert torch.equal(logits.argmax(-1), case["one_block.draft_argmax"])


@torch.no_grad()
def test_context_keys_and_values_equal_the_published_cache(drafter: DFlashDrafter) -> None:
    case = tensors("forward/qwen3_small")
    rows = case["cached.step1.cache_key0"].shape[2]
    features = drafter.context_features(case["cached.all_features"][:, :rows])
    context = drafter.context_kv(features, torch.arange(rows)[None])
    for layer, held in enumerate(context):
        torch.testing.assert_close(held.keys, case[f"cached.step1.cache_key{layer}"], atol=5e-5, rtol=0)
        torch.testing.assert_close(held.values, case[f"cached.step1.cache_value{layer}"], atol=5e-5, rtol=0)


def test_a_saved_drafter_is_the_loaded_one_with_the_published_names(drafter: DFlashDrafter, tmp_path: Path) -> None:
    save_drafter(drafter, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    published = load_file(DRAFTER / "model.safetensors")
    assert written.keys() == published.keys()
    assert all(torch.equal(written[name], published[name]) for name in published)
    assert load_drafter(tmp_path).config == drafter.config


def test_the_config_says_rope_and_block_size_where_either_schema_reads_them(drafter: DFlashDrafter) -> None:
    config = dataclasses.replace(drafter.config, rope_theta=5e5)
    document = zlab_document(config)
    assert document["rope_theta"] == document["rope_parameters"]["rope_theta"] == 5e5
    assert document["block_size"] == document["dflash_config"]["block_size"] == config.block_size
    assert config_from_json(document) == config


def _without(document: dict[str, Any], *path: str) -> dict[str, Any]:
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return document


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda d: _without(d, "dflash_config", "target_layer_ids"),
            "no target_layer_ids; they are never guessed",
        ),
        (lambda d: _without(d, "dflash_config"), "no dflash_config"),
        (lambda d: _without(d, "block_size"), "block_size is missing"),
        (lambda d: d["dflash_config"].update(block_size=4) or d, "block_size is 8 at the top and 4"),
        (lambda d: d["dflash_config"].update(target_layer_ids=[2, 6]) or d, r"\[6\] are outside 0..5"),
        (lambda d: d["dflash_config"].update(mask_token_id=512) or d, "512 is outside the vocabulary"),
        (lambda d: d.update(rope_scaling={"rope_type": "longrope"}) or d, "RoPE of type 'longrope'"),
        (lambda d: d.update(rope_scaling={"rope_type": "yarn"}) or d, "factor of yarn RoPE is None"),
        (lambda d: d.update(layer_types=["sliding_attention", "full_attention"]) or d, "sliding_window is None"),
        (lambda d: d.update(is_causal="yes") or d, "is_causal is 'yes'"),
        (lambda d: d.update(architectures=["LlamaForCausalLM"]) or d, "architectures"),
        (lambda d: d.update(hidden_size="64") or d, "hidden_size is '64', expected an integer"),
    ],
)
def test_a_config_that_cannot_be_trusted_is_refused_by_name(change: Any, says: str) -> None:
    document = json.loads((DRAFTER / "config.json").read_text())
    with pytest.raises(CheckpointError, match=says):
        config_from_json(change(document))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda t: t.pop("norm.weight"), "norm.weight is missing"),
        (lambda t: t.update({"gate.weight": torch.zeros(2, 2)}), "gate.weight does not belong to this"),
        (lambda t: t.update({"fc.weight": torch.zeros(64, 64)}), r"fc.weight has shape \[64, 64\]"),
        (lambda t: t["fc.weight"].fill_(float("nan")), "fc.weight holds NaN or Inf"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(fault: Any, says: str, tmp_path: Path) -> None:
    shutil.copy(DRAFTER / "config.json", tmp_path)
    found = load_file(DRAFTER / "model.safetensors")
    fault(found)
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        load_drafter(tmp_path)


def test_a_truncated_weight_file_is_refused(tmp_path: Path) -> None:
    shutil.copy(DRAFTER / "config.json", tmp_path)
    whole = (DRAFTER / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="does not fit its bytes"):
        load_drafter(tmp_path)
