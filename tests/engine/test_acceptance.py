"""What is counted, and over what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_engine.evaluation.acceptance import PromptTrace, VerificationStep, summarise


def step(offered: int, matched: int, emitted: int | None = None) -> VerificationStep:
    """A step that yields matched + 1 tokens unless it was cut."""
    return VerificationStep(offered, matched, tuple(range(matched + 1 if emitted is None else emitted)))


def trace(*steps: VerificationStep) -> PromptTrace:
    return PromptTrace(steps)


def test_a_step_yields_its_accepted_drafts_and_the_bonus() -> None:
    assert trace(step(3, 0), step(3, 2), step(3, 3)).yields == [1, 3, 4]


def test_tau_pools_all_steps_and_tau_per_prompt_averages_the_prompts_means() -> None:
    found = summarise([trace(step(3, 3)), trace(step(3, 0), step(3, 0), step(3, 0))], block_size=4)
    assert found.tau == 7 / 4
    assert found.tau_per_prompt == (4.0 + 1.0) / 2
    assert (found.steps, found.tokens) == (4, 7)


def test_a_prompt_without_a_step_is_in_neither_mean() -> None:
    assert trace().tau is None
    assert summarise([trace(), trace(step(3, 1))], block_size=4) == summarise([trace(step(3, 1))], block_size=4)


def test_no_step_at_all_is_an_error_and_not_a_number() -> None:
    with pytest.raises(ValueError, match="no prompt has a verification step"):
        summarise([trace(), trace()], block_size=4)


def test_a_cut_step_counts_what_it_added_and_not_what_it_could_have() -> None:
    found = summarise([trace(step(3, 3, emitted=3))], block_size=4)
    assert found.tau == 3.0
    assert found.histogram == (0, 0, 0, 1, 0)


def test_acceptance_of_a_position_is_over_the_steps_that_offered_it() -> None:
    found = summarise([trace(step(3, 3), step(3, 1), step(1, 1, emitted=1))], block_size=4)
    assert found.acceptance_by_position == (1.0, 1 / 2, 1 / 2)


def test_a_position_that_was_never_offered_has_no_acceptance() -> None:
    assert summarise([trace(step(1, 1))], block_size=4).acceptance_by_position == (1.0, 0.0, 0.0)


@st.composite
def traces(draw: st.DrawFn) -> list[PromptTrace]:
    def one() -> VerificationStep:
        offered = draw(st.integers(1, 7))
        return step(offered, draw(st.integers(0, offered)))

    prompts = [trace(*(one() for _ in range(draw(st.integers(0, 5))))) for _ in range(draw(st.integers(1, 4)))]
    return [*prompts, trace(one())]


@given(traces())
def test_the_numbers_agree_with_each_other(prompts: list[PromptTrace]) -> None:
    found = summarise(prompts, block_size=8)
    assert sum(found.histogram) == found.steps
    assert sum(y * count for y, count in enumerate(found.histogram)) == found.tokens
    assert found.tau == pytest.approx(found.tokens / found.steps)
    assert all(0.0 <= share <= 1.0 for share in found.acceptance_by_position)
    offered_all = [s for p in prompts for s in p.steps if s.offered == 7]
    if len(offered_all) == found.steps:  # full blocks only: then the shares add up to tau
        assert found.tau == pytest.approx(1 + sum(found.acceptance_by_position))
