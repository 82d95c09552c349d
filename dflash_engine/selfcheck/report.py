"""What a self-check found: one line a quantity, with the largest error and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Check", "Report"]


@dataclass(frozen=True)
class Check:
    """One quantity of one case."""

    case: str
    quantity: str
    error: float
    """Largest absolute difference, or for what must be equal the number of elements that are not."""
    tolerance: float

    @property
    def holds(self) -> bool:
        """NaN does not."""
        return self.error <= self.tolerance


@dataclass
class Report:
    """All checks so far."""

    checks: list[Check] = field(default_factory=list)

    def near(self, case: str, quantity: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
        """Floats: largest absolute difference."""
        error = math.nan
        if found.shape == expected.shape:
            error = float((found.detach().cpu().double() - expected.double()).abs().max()) if found.numel() else 0.0
        self.checks.append(Check(case, quantity, error, tolerance))

    def relative(self, case: str, quantity: str, found: float, expected: float, tolerance: float) -> None:
        """One number: difference over the expected value."""
        self.checks.append(Check(case, quantity, abs(found - expected) / abs(expected), tolerance))

    def same(self, case: str, quantity: str, found: Any, expected: Any) -> None:
        """What must be equal: tensors of integers or booleans, sequences, anything else as a whole."""
        if isinstance(found, Tensor) and isinstance(expected, Tensor):
            equal_shapes = found.shape == expected.shape
            different = int(torch.ne(found.detach().cpu(), expected).sum()) if equal_shapes else math.nan
        elif isinstance(found, Sequence) and isinstance(expected, Sequence) and not isinstance(found, str):
            different = sum(a != b for a, b in zip(found, expected, strict=False)) + abs(len(found) - len(expected))
        else:
            different = int(found != expected)
        self.checks.append(Check(case, quantity, different, 0))
