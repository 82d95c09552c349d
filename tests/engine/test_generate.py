"""Speculative decoding: at temperature 0 the target's own text whatever the drafter, above it its distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash_engine.drafter.config import DrafterConfig
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.drafter.sampling import Sampling
from dflash_engine.errors import DataError, TargetError
from dflash_engine.generate import generate
from dflash_engine.target.state import TargetState

VOCAB = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
}


def full() -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**COMMON))


def sliding() -> Any:
    types = ["sliding_attention", "full_attention"] * 2
    return Gemma3ForCausalLM(Gemma3TextConfig(**COMMON, sliding_window=6, layer_types=types))


def hybrid() -> Any:
    types = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 3,
    }
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**COMMON, **linear, layer_types=types))


KINDS = [full, sliding, hybrid]


def made(kind: Callable[[], Any]) -> Any:
    torch.manual_seed(3)
    return kind().eval()


def random_drafter(seed: int = 0, block_size: int = 8) -> DFlashDrafter:
    config = DrafterConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=512,
        vocab_size=VOCAB,
        block_size=block_size,
        mask_token_id=VOCAB - 1,
        target_layer_ids=(0, 2),
        num_target_layers=4,
        target_hidden_size=32,
    )
    drafter = DFlashDrafter(config)
    drafter.initialise(torch.Generator().manual_seed(seed), std=0.3)
    return drafter.eval()


@torch.no_grad()
def plain_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """No cache at all: nothing can stay in it."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


class Oracle(DFlashDrafter):
    """Drafts what it is told: right, or wrong from some slot on."""

    def __init__(self, drafter: DFlashDrafter, script: list[int], right: int, start: int) -> None:
        super().__init__(drafter.config)
        self._script, self._right, self._start = script, right, start
        self._anchor = 0

    def forward(self, block_embeds: Any, positions: Any, *rest: Any) -> Any:
        self._anchor = int(positions[0, 0])
        return super().forward(block_embeds, positions, *rest)

    def logits(self, hidden: Any, target_head: Any) -> Any:
        out = torch.zeros(len(hidden), VOCAB)
        for slot in range(len(hidden)):
            at = self._anchor - self._start + 1 + slot
            token = self._script[at] if at < len(self._script) else 0
            out[slot, token if slot < self._right else (token + 1) % VOCAB] = 1.0
        return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts", ["perfect", "random", "wrong", "half"])
def test_t17_greedy_text_does_not_depend_on_the_drafter(kind: Callable[[], Any], drafts: str) -> None:
    model, prompt, count = made(kind), [5, 9, 2, 44, 17], 40
    wanted = plain_greedy(model, prompt, count)
    base = random_drafter()
    right = {"perfect": 99, "wrong": 0, "half": 3}
    drafter = base if drafts == "random" else Oracle(base, wanted, right[drafts], len(prompt))
    found = generate(drafter, model, prompt, max_new_tokens=count)
    assert list(found.tokens) == wanted
    assert 1 + sum(found.acceptance_lengths) == count
    if drafts == "perfect":
        assert max(found.acceptance_lengths) == 8
    if drafts == "wrong":
        assert max(found.acceptance_lengths) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_t17_after_seven_rejections_the_next_logits_are_those_of_a_clean_run(kind: Callable[[], Any]) -> None:
    model = made(kind)
    ids = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(1))
    state = TargetState(model, (0, 2))
    state.extend(ids[:, :13])
    state.extend(torch.cat([ids[:, 13:14], torch.full((1, 7), 3)], dim=1))
    state.keep(1)
    logits, taps = state.extend(ids[:, 14:20])
    clean = model(ids[:, :20], use_cache=False, output_hidden_states=True)
    torch.testing.assert_close(logits, clean.logits[0, 14:20], atol=1e-4, rtol=0)
    expected = torch.cat([clean.hidden_states[i + 1][0, 14:20] for i in (0, 2)], dim=-1)
    # Chunked and recurrent kernels of the linear layers round differently; a rejected token left in is off by 0.1.
    torch.testing.assert_close(taps, expected, atol=5e-4, rtol=0)
    assert state.length == 20


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_t3_taps_are_the_outputs_of_the_blocks_they_name(kind: Callable[[], Any]) -> None:
    model = made(kind)
    seen: dict[int, torch.Tensor] = {}
    for i, block in enumerate(model.get_decoder().layers):
        block.register_forward_hook(
            lambda _m, _a, out, i=i: seen.__setitem__(i, out[0] if isinstance(out, tuple) else out)
        )
    ids = torch.randint(0, VOCAB, (1, 11), generator=torch.Generator().manual_seed(2))
    for wanted in ((0, 2), (1,), (2, 0, 1)):
        _, taps = TargetState(model, wanted).extend(ids)
        assert torch.equal(taps, torch.cat([seen[i] for i in wanted], dim=-1)[0])


def test_t16_stop_token_and_limit_inside_a_block_cut_before_counting() -> None:
    model, prompt = made(full), [5, 9, 2]
    wanted = plain_greedy(model, prompt, 30)
    base = random_drafter()
    for stop in range(8):
        first = wanted.index(wanted[stop])
        drafter = Oracle(base, wanted, 99, len(prompt))
        found = generate(drafter, model, prompt, max_new_tokens=30, stop_ids=[VOCAB + 5, wanted[stop]])
        assert (list(found.tokens), found.finish) == (wanted[: first + 1], "stop")
        assert 1 + sum(found.acceptance_lengths) == first + 1
    for limit in range(1, 20):
        found = generate(Oracle(base, wanted, 99, len(prompt)), model, prompt, max_new_tokens=limit)
        assert (list(found.tokens), found.finish) == (wanted[:limit], "length")
        assert len(found.steps) == -(-(limit - 1) // 8)
        assert all(len(step.block) <= limit - (step.anchor - len(prompt)) for step in found.steps)


def test_sampled_text_has_the_targets_distribution() -> None:
    # Two new tokens behind one prompt: the second comes from a verified draft. 4,000 draws against the exact law.
    model, prompt = made(full), [5, 9, 2]
    drafter, sampling = random_drafter(block_size=2), Sampling(temperature=0.7, top_k=5)
    generator = torch.Generator().manual_seed(0)
    draws = [
        generate(drafter, model, prompt, max_new_tokens=2, sampling=sampling, generator=generator).tokens
        for _ in range(4000)
    ]
    with torch.no_grad():
        first = sampling.probabilities(model(torch.tensor([prompt])).logits[0, -1])
        expected = {}
        for a in first.nonzero().flatten().tolist():
            second = sampling.probabilities(model(torch.tensor([[*prompt, a]])).logits[0, -1])
            for b in second.nonzero().flatten().tolist():
                expected[(a, b)] = float(first[a] * second[b])
    assert set(draws) <= expected.keys()
    chi2 = sum((draws.count(pair) - 4000 * p) ** 2 / (4000 * p) for pair, p in expected.items() if 4000 * p >= 5)
    assert chi2 < 60  # about 20 degrees of freedom: beyond one in 100,000


def test_what_cannot_be_generated_is_said() -> None:
    model, drafter = made(full), random_drafter()
    for prompt, limit in (([], 4), ([1], 0), ([VOCAB], 4)):
        with pytest.raises(DataError, match="expected at least one of each"):
            generate(drafter, model, prompt, max_new_tokens=limit)
    with pytest.raises(TargetError, match=r"expected ids within 0\.\.2"):
        TargetState(model, (1, 3))
