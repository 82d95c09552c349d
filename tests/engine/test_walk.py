"""The drafter's walk along the references against the published loop and against decoding with the target."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dflash_engine.drafter.checkpoint import load_drafter
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.drafter.visibility import Visibility
from dflash_engine.evaluation import walk as walk_module
from dflash_engine.evaluation.acceptance import PromptTrace
from dflash_engine.evaluation.walk import ReferencePath, walk
from dflash_engine.target.capture import capture
from dflash_engine.target.embedding import load_embedding_and_head
from dflash_engine.target.load import Target
from dflash_engine.target.tokens import TargetTokens
from tests.reference import DRAFTER, REFERENCE, TARGET

TRACES = [json.loads(line) for line in (REFERENCE / "traces" / "drafter_qwen3_small.jsonl").open()]


@cache
def target() -> Target:
    """The published loop's target; it has no tokenizer, the walk needs none."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32, attn_implementation="sdpa")
    return Target(TARGET, model.eval().requires_grad_(False), TargetTokens(None, ()))


@cache
def drafter() -> DFlashDrafter:
    return load_drafter(DRAFTER)


@cache
def embedding_and_head() -> tuple[Tensor, Tensor]:
    return load_embedding_and_head(TARGET, dtype=torch.float32)


def path(prompt: Sequence[int], completion: Sequence[int], max_new_tokens: int) -> ReferencePath:
    tokens = torch.tensor([*prompt, *completion])
    taps = capture(target(), tokens[None], torch.tensor([len(tokens)]), drafter().config.target_layer_ids)[0]
    return ReferencePath(len(prompt), tokens, taps, max_new_tokens)


def walked(
    paths: Sequence[ReferencePath],
    block_size: int,
    progress: Callable[[int, int, float | None], None] = lambda done, total, tau: None,
) -> list[PromptTrace]:
    return walk(drafter(), *embedding_and_head(), paths, block_size=block_size, progress=progress)


@pytest.mark.parametrize("block_size", sorted({row["block_size"] for row in TRACES}))
def test_every_acceptance_length_equals_the_published_loops(block_size: int) -> None:
    rows = [row for row in TRACES if row["block_size"] == block_size]
    paths = [path(row["prompt_ids"], row["output_ids"], row["max_new_tokens"]) for row in rows]
    found = walked(paths, block_size)
    assert {row["case"]: trace.yields for row, trace in zip(rows, found, strict=True)} == {
        row["case"]: row["acceptance_lengths"] for row in rows
    }
    for row, trace in zip(rows, found, strict=True):
        assert row["output_ids"][:1] + [t for step in trace.steps for t in step.tokens] == row["output_ids"]
        for ours, theirs in zip(trace.steps, row["steps"], strict=True):
            # Behind a stop token nothing is judged, so a match there is none of ours.
            assert ours.matched == min(theirs["matched"], ours.offered)


def test_the_reference_has_every_end_that_a_walk_can_come_to() -> None:
    cases = {row["case"] for row in TRACES}
    assert cases >= {
        "eos_first_token", "eos_in_block", "eos_last_accepted", "eos_as_bonus", "eos_two_ids", "max_new_1",
        "max_new_mid_block", "max_new_block_edge", "eos_and_budget_same_position",
    }  # fmt: skip
    mask = drafter().config.mask_token_id
    assert any(mask in row["output_ids"] for row in TRACES), "a target may emit the mask token itself"


@torch.no_grad()
def decode(prompt: list[int], block_size: int, max_new_tokens: int, stop_ids: set[int]) -> tuple[list[int], list[int]]:
    """Speculative decoding with the target in the loop: no cache, no mask, no batch. -> (new tokens, yields)."""
    model, verifier = drafter(), target().model
    embedding, head = embedding_and_head()

    def forward(ids: list[int]) -> tuple[Tensor, Tensor]:
        out = verifier(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        taps = torch.cat([out.hidden_states[i + 1] for i in model.config.target_layer_ids], dim=-1)
        return out.logits[0].argmax(-1), taps

    new = [int(forward(prompt)[0][-1])]
    yields = []
    while len(new) < max_new_tokens and new[-1] not in stop_ids:
        ids = prompt + new
        anchor = len(ids) - 1
        size = min(block_size, max_new_tokens - len(new) + 1)
        taps = forward(ids)[1][:, :anchor]
        context = model.context_kv(model.context_features(taps), torch.arange(anchor)[None])
        block = torch.tensor([[ids[-1]] + [model.config.mask_token_id] * (size - 1)])
        everything = Visibility(torch.tensor([[anchor]]), size, anchor)
        hidden = model(embedding[block], torch.arange(anchor, anchor + size)[None], context, everything)
        drafts = (hidden[0, 1:] @ head.T).argmax(-1).tolist()
        verified = forward(ids + drafts)[0][anchor:].tolist()
        matched = 0
        while matched < len(drafts) and drafts[matched] == verified[matched]:
            matched += 1
        added = [*drafts[:matched], verified[matched]][: max_new_tokens - len(new)]
        stops = [i for i, token in enumerate(added) if token in stop_ids]
        added = added[: stops[0] + 1] if stops else added
        new += added
        yields.append(len(added))
    return new, yields


@pytest.mark.parametrize(
    ("block_size", "max_new_tokens", "stop_ids"),
    [
        (2, 16, frozenset()),
        (4, 13, frozenset({329, 230})),
        (8, 22, frozenset()),
        (8, 22, frozenset({115, 31})),  # a stop token ahead: a block that shrinks for it drafts something else
    ],
    ids=str,
)
def test_the_walk_equals_decoding_with_the_target_in_the_loop(
    block_size: int, max_new_tokens: int, stop_ids: frozenset[int]
) -> None:
    prompts = [row["prompt_ids"] for row in TRACES if row["case"].startswith("plain")]
    decoded = [decode(prompt, block_size, max_new_tokens, set(stop_ids)) for prompt in prompts]
    paths = [path(prompt, new, max_new_tokens) for prompt, (new, _) in zip(prompts, decoded, strict=True)]
    assert [trace.yields for trace in walked(paths, block_size)] == [yields for _, yields in decoded]


def mixed_paths() -> list[ReferencePath]:
    rows = [row for row in TRACES if row["block_size"] == 8]
    return [path(row["prompt_ids"], row["output_ids"], row["max_new_tokens"]) for row in rows]


def test_a_small_memory_bound_changes_the_batches_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = mixed_paths()
    together = walked(paths, 8)
    calls: dict[str, int] = defaultdict(int)
    original = DFlashDrafter.context_kv
    monkeypatch.setattr(DFlashDrafter, "context_kv", lambda *args: calls.update(n=calls["n"] + 1) or original(*args))
    monkeypatch.setattr(walk_module, "_BATCH_BYTES", 40_000)
    assert walked(paths, 8) == together
    assert calls["n"] > 3


def test_states_at_and_behind_an_anchor_change_no_draft() -> None:
    rows = [row for row in TRACES if row["case"].startswith("plain")]
    first_steps = [row["output_ids"][: 1 + row["acceptance_lengths"][0]] for row in rows]
    clean = [path(row["prompt_ids"], new, 45) for row, new in zip(rows, first_steps, strict=True)]
    poisoned = []
    for one in clean:
        taps = one.taps.clone()
        taps[one.first_anchor :] = torch.randn(taps[one.first_anchor :].shape) * 100
        poisoned.append(dataclasses.replace(one, taps=taps))
    expected = walked(clean, 8)
    assert [trace.yields for trace in expected] == [row["acceptance_lengths"][:1] for row in rows]
    assert walked(poisoned, 8) == expected


def test_progress_ends_with_every_token_walked() -> None:
    paths, heard, taus = mixed_paths(), list[tuple[int, int]](), list[float | None]()

    def report(done: int, total: int, tau: float | None) -> None:
        heard.append((done, total))
        taus.append(tau)

    traces = walked(paths, 8, report)
    yields = [y for trace in traces for y in trace.yields]
    assert taus[-1] == sum(yields) / len(yields)
    behind_the_first = sum(len(p.tokens) - p.prompt_length - 1 for p in paths)
    assert heard == sorted(heard)
    assert heard[-1] == (behind_the_first, behind_the_first)
