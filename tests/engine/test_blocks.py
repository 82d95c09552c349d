"""Anchors, the training mask and the loss: what a block may see, what it must predict, how it is weighed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_engine.drafter.checkpoint import load_drafter
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.drafter.visibility import Visibility
from dflash_engine.target.embedding import load_embedding_and_head
from dflash_engine.training.anchors import build_blocks, draw_anchors, eligible_anchors
from dflash_engine.training.loss import block_loss, slot_weights
from tests.reference import DRAFTER, TARGET, tensors


def _train_pass(
    drafter: DFlashDrafter, taps: torch.Tensor, embeds: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """Hidden states [b, N * B, H] of a training row, as the drafter rank computes them."""
    block = drafter.config.block_size
    rows, length = taps.shape[:2]
    positions = (anchors[:, :, None] + torch.arange(block)).flatten(1)
    context = drafter.context_kv(drafter.context_features(taps), torch.arange(length).expand(rows, -1))
    hidden: torch.Tensor = drafter(embeds, positions, context, Visibility(anchors, block, length))
    return hidden


def test_loss_and_every_gradient_equal_the_public_trainer() -> None:
    case = tensors("training/sf_small_b8_full_gradients")
    drafter = load_drafter(DRAFTER).train()
    embedding, head = load_embedding_and_head(TARGET, dtype=torch.float32)
    anchors, keep = case["in.anchors"], case["in.block_keep"]
    blocks = build_blocks(
        case["in.input_ids"],
        case["in.loss_mask"].bool(),
        [row[kept] for row, kept in zip(anchors, keep, strict=True)],
        count=anchors.shape[1],
        block_size=8,
        mask_id=509,
    )
    # SpecForge counts slots behind an unsupervised hole, this engine does not: compare with its own choice.
    theirs = case["out.label_mask"].bool()
    behind_anchor = torch.cat([keep[..., None], theirs[..., 1:]], dim=2).cumprod(2).bool()
    assert torch.equal(blocks.counted[..., 1:], behind_anchor[..., 1:])
    labels = case["out.target_ids"]
    hidden = _train_pass(drafter, case["in.hidden_states"], embedding[blocks.input_ids], blocks.anchors)
    shown = keep.repeat_interleave(8, dim=1)
    torch.testing.assert_close(hidden[shown], case["out.draft_hidden"][shown], atol=5e-5, rtol=0)
    parts = block_loss(hidden.unflatten(1, (-1, 8)), labels, theirs, head, gamma=4.0)
    loss = parts.numerator / parts.weight
    torch.testing.assert_close(loss, case["out.loss"], atol=0, rtol=1e-5)
    assert int(parts.correct) == int(case["out.accuracy_numerator"])
    loss.backward()
    for name, parameter in drafter.named_parameters():
        expected = case[f"grad.{name}"]
        assert parameter.grad is not None
        assert (parameter.grad - expected).norm() <= 1e-4 * expected.norm(), name


def test_t1_no_gradient_reaches_the_context_at_or_after_the_anchor() -> None:
    drafter = load_drafter(DRAFTER)
    anchors = torch.tensor([[8, 9, 10]])
    taps = torch.randn(1, 16, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    embeds = torch.randn(1, 3 * 8, 64, generator=torch.Generator().manual_seed(1))
    hidden = _train_pass(drafter, taps, embeds, anchors).unflatten(1, (3, 8))
    for block, anchor in enumerate([8, 9, 10]):
        (gradient,) = torch.autograd.grad(hidden[0, block].sum(), taps, retain_graph=True)
        touched = gradient[0].abs().sum(1).nonzero().flatten()
        assert touched.max() == anchor - 1
        assert touched.min() == 0


def test_a_block_sees_no_other_block() -> None:
    drafter = load_drafter(DRAFTER)
    embeds = torch.randn(1, 2 * 8, 64).requires_grad_()
    hidden = _train_pass(drafter, torch.randn(1, 16, 128), embeds, torch.tensor([[3, 5]]))
    (gradient,) = torch.autograd.grad(hidden[0, :8].sum(), embeds)
    assert gradient[0, :8].abs().sum() > 0
    assert gradient[0, 8:].abs().sum() == 0


def test_t6_padding_blocks_and_padding_rows_change_nothing_and_stay_finite() -> None:
    drafter = load_drafter(DRAFTER).train()
    generator = torch.Generator().manual_seed(3)
    long, short = torch.randn(1, 40, 128, generator=generator), torch.randn(1, 12, 128, generator=generator)
    embedding, head = load_embedding_and_head(TARGET, dtype=torch.float32)

    def gradient(taps: torch.Tensor, ids: torch.Tensor, supervised: torch.Tensor, count: int) -> list[torch.Tensor]:
        anchors = [eligible_anchors(row)[:count] for row in supervised]
        blocks = build_blocks(ids, supervised, anchors, count=count, block_size=8, mask_id=509)
        hidden = _train_pass(drafter, taps, embedding[blocks.input_ids], blocks.anchors)
        parts = block_loss(hidden.unflatten(1, (-1, 8)), blocks.labels, blocks.counted, head, gamma=4.0)
        return list(torch.autograd.grad(parts.numerator, list(drafter.parameters())))

    ids = torch.randint(0, 500, (2, 40), generator=generator)
    supervised = torch.zeros(2, 40, dtype=torch.bool)
    supervised[0, 10:] = True
    supervised[1, 9:12] = True
    taps = torch.zeros(2, 40, 128)
    taps[0], taps[1, :12] = long[0], short[0]
    together = gradient(taps, ids, supervised, 8)
    apart = [
        a + b
        for a, b in zip(
            gradient(long, ids[:1], supervised[:1], 8),
            gradient(short, ids[1:, :12], supervised[1:, :12], 8),
            strict=True,
        )
    ]
    for one, two in zip(together, apart, strict=True):
        assert bool(torch.isfinite(one).all())
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("supervised", "expected"),
    [
        ("..111", [2, 3]),
        ("....1", []),
        ("11", [0]),
        (".....", []),
        ("11.11", [0, 3]),
        ("...11", [3]),
    ],
)
def test_t8_an_anchor_needs_its_own_and_the_next_token(supervised: str, expected: list[int]) -> None:
    mask = torch.tensor([c == "1" for c in supervised])
    assert eligible_anchors(mask).tolist() == expected


@given(
    supervised=st.lists(st.booleans(), min_size=2, max_size=60),
    count=st.integers(1, 20),
    seed=st.integers(0, 2**60),
)
def test_drawn_anchors_are_eligible_distinct_and_repeat_with_their_seed(
    supervised: list[bool], count: int, seed: int
) -> None:
    mask = torch.tensor(supervised)
    drawn = draw_anchors(mask, count, seed)
    eligible = eligible_anchors(mask).tolist()
    assert len(drawn) == min(count, len(eligible))
    assert set(drawn.tolist()) <= set(eligible)
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    assert torch.equal(drawn, draw_anchors(mask, count, seed))


def test_t2_slot_k_predicts_the_token_at_anchor_plus_k() -> None:
    ids = torch.arange(100, 110)[None]
    supervised = torch.tensor([[False] * 4 + [True] * 6])
    blocks = build_blocks(ids, supervised, [torch.tensor([4, 8])], count=3, block_size=4, mask_id=7)
    assert blocks.input_ids[0].tolist() == [104, 7, 7, 7, 108, 7, 7, 7, 100, 7, 7, 7]
    assert blocks.labels[0, 0].tolist() == [0, 105, 106, 107]
    assert blocks.counted[0].tolist() == [
        [False, True, True, True],
        [False, True, False, False],  # the document ends at 109
        [False] * 4,  # padding
    ]


def test_an_unsupervised_hole_ends_the_block() -> None:
    supervised = torch.tensor([[True, True, False, True, True]])
    blocks = build_blocks(torch.arange(5)[None], supervised, [torch.tensor([0])], count=1, block_size=5, mask_id=7)
    assert blocks.counted[0, 0].tolist() == [False, True, False, False, False]


def test_slot_weights_start_at_one_for_the_first_predicted_token() -> None:
    assert slot_weights(4, 2.0).tolist() == pytest.approx([0, 1, math.exp(-0.5), math.exp(-1.0)])


def test_a_mask_with_a_dimension_too_many_is_refused() -> None:
    hidden, labels = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="counted"):
        block_loss(hidden, labels, torch.ones(1, 2, 4, 1, dtype=torch.bool), torch.zeros(10, 8), 2.0)
