"""Acceptance length and its companions, from the tokens that each verification step yielded.

A step verifies one block: the anchor is known, its drafted tokens are compared with the target, the accepted
run is kept and the target adds one token of its own (the bonus). Its yield is accepted + 1, cut at the first
stop token and at the token limit before counting. The token from the prefill belongs to no step. These are
the rules of dflash 0.1.0; the definition travels with every result (`identity.DEFINITION`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Acceptance", "PromptTrace", "VerificationStep", "summarise"]


@dataclass(frozen=True)
class VerificationStep:
    """One verified block."""

    offered: int
    """Drafted tokens that were judged: the block's size less the anchor, or fewer where the text stops before."""
    matched: int
    """Drafted tokens that equal the target's, counted from the first up to the first that differs."""
    tokens: tuple[int, ...]
    """What the step added: accepted drafts as they were drafted, then the bonus, cut at stop token and limit."""

    @property
    def emitted(self) -> int:
        """The step's yield: matched + 1, or fewer where a stop token or the limit cut it."""
        return len(self.tokens)


@dataclass(frozen=True)
class PromptTrace:
    """The steps of one prompt in order; none where the first token stops or the budget is one token."""

    steps: tuple[VerificationStep, ...]

    @property
    def yields(self) -> list[int]:
        """Tokens that each step added."""
        return [step.emitted for step in self.steps]

    @property
    def tau(self) -> float | None:
        """Mean tokens a step; None without a step."""
        return sum(self.yields) / len(self.steps) if self.steps else None


@dataclass(frozen=True)
class Acceptance:
    """All prompts together."""

    tau: float
    """Pooled: emitted tokens over steps."""
    tau_per_prompt: float
    """Mean of the prompts' own means, prompts without a step left out."""
    steps: int
    tokens: int
    """Emitted by steps; the prefill tokens are not among them."""
    histogram: tuple[int, ...]
    """histogram[y] is the number of steps that yielded y tokens; index 0 is always 0."""
    acceptance_by_position: tuple[float, ...]
    """[k - 1]: of the steps whose block offered slot k, the share that accepted slots 1 to k."""


def summarise(traces: Sequence[PromptTrace], block_size: int) -> Acceptance:
    """Every mean and count of some prompts. Raises ValueError where no prompt has a step."""
    steps = [step for trace in traces for step in trace.steps]
    if not steps:
        raise ValueError("no prompt has a verification step: every completion ended with its first token")
    means = [trace.tau for trace in traces if trace.tau is not None]
    histogram = [0] * (block_size + 1)
    for step in steps:
        histogram[step.emitted] += 1
    by_position = []
    for k in range(1, block_size):
        offered = [step for step in steps if step.offered >= k]
        by_position.append(sum(step.matched >= k for step in offered) / len(offered) if offered else 0.0)
    tokens = sum(step.emitted for step in steps)
    return Acceptance(
        tau=tokens / len(steps),
        tau_per_prompt=sum(means) / len(means),
        steps=len(steps),
        tokens=tokens,
        histogram=tuple(histogram),
        acceptance_by_position=tuple(by_position),
    )
