"""Every attention backend against a plain loop, and the drafter's cache against no cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_engine.drafter.attention import Backend, attend, choose_backend
from dflash_engine.drafter.cache import DraftCache, LayerContext
from dflash_engine.drafter.checkpoint import load_drafter
from dflash_engine.drafter.visibility import LayerRule, Visibility
from tests.reference import DRAFTER


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Visibility, LayerRule]:
    rows, count, size = draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(2, 5))
    length = draw(st.integers(1, 24))
    anchors = torch.tensor(draw(st.lists(st.integers(0, length), min_size=rows * count, max_size=rows * count)))
    sizes = draw(st.none() | st.lists(st.integers(1, size), min_size=rows * count, max_size=rows * count))
    ends = draw(st.none() | st.integers(1, length))
    documents = None if ends is None else (torch.arange(length) >= ends).long().expand(rows, -1)
    visibility = Visibility(
        anchors.view(rows, count),
        size,
        length,
        sizes=None if sizes is None else torch.tensor(sizes).view(rows, count),
        documents=documents,
        window_origin=draw(st.sampled_from(["row", "anchor"])),
    )
    return visibility, LayerRule(draw(st.booleans()), draw(st.none() | st.integers(1, 12)))


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@settings(max_examples=25)
@given(case=blocks(), heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]))
def test_t7_every_backend_equals_the_loop(
    backend: Backend, case: tuple[Visibility, LayerRule], heads: tuple[int, int]
) -> None:
    visibility, rule = case
    rows = visibility.anchors.shape[0]
    results = []
    for name in ("loop", backend):
        generator = torch.Generator().manual_seed(0)
        shapes = [(heads[0], visibility.rows), (heads[1], visibility.columns), (heads[1], visibility.columns)]
        given_ = [torch.randn(rows, h, s, 16, generator=generator) for h, s in shapes]
        if backend == "flex":
            # Forward only: flex has no backward on a CPU.
            results.append([attend(*given_, visibility, rule, name)])
            continue
        given_ = [tensor.requires_grad_() for tensor in given_]
        out = attend(*given_, visibility, rule, name)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append([out, *(tensor.grad for tensor in given_)])
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@given(case=blocks())
def test_t1_no_row_sees_its_anchor_or_later_nor_another_block_or_document(case: tuple[Visibility, LayerRule]) -> None:
    visibility, rule = case
    size, length = visibility.block_size, visibility.context_length
    seen = visibility.dense(rule)
    for b, row, column in seen.nonzero().tolist():
        anchor = int(visibility.anchors[b, row // size])
        if column < length:
            assert column < anchor
        else:
            assert (column - length) // size == row // size
    assert bool(seen.diagonal(length, 1, 2).all())


def test_the_backend_goes_by_device_and_rows() -> None:
    assert choose_backend(torch.device("cpu"), 10_000) == "sdpa"
    assert choose_backend(torch.device("cuda"), 16) == "sdpa"
    assert choose_backend(torch.device("cuda"), 1024) == "flex"


def test_a_cache_gives_what_no_cache_gives_and_crops_by_length() -> None:
    drafter = load_drafter(DRAFTER)
    cache = DraftCache(drafter.config, 20, torch.device("cpu"), torch.float32)
    features = torch.randn(1, 14, drafter.config.hidden_size, generator=torch.Generator().manual_seed(0))
    whole = drafter.context_kv(features, torch.arange(14)[None])
    cache.append(whole)
    cache.crop(9)
    cache.append([LayerContext(c.keys[:, :, 9:12], c.values[:, :, 9:12]) for c in whole])
    for held, wanted in zip(cache.context(), whole, strict=True):
        assert torch.equal(held.keys, wanted.keys[:, :, :12])
        assert torch.equal(held.values, wanted.values[:, :, :12])
    with pytest.raises(ValueError, match="cannot crop a cache of 12 positions to 13"):
        cache.crop(13)
    with pytest.raises(ValueError, match="26 positions in a cache of 20"):
        cache.append(whole)
