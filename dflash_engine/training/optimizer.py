"""AdamW with a learning rate that is a pure function of the step, so that a resumed run cannot jump."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from dflash_engine.errors import CheckpointError
from dflash_engine.training.recipe import OptimizerRecipe

__all__ = ["DrafterOptimizer", "learning_rate"]

_STATE_KEYS = ("exp_avg", "exp_avg_sq", "step")


def learning_rate(recipe: OptimizerRecipe, step: int, steps: int) -> float:
    """Rate of the step with this 0-based number: linear from near zero over the warm-up, then cosine to zero."""
    warmup = max(1, round(recipe.warmup * steps))
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return recipe.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


class DrafterOptimizer:
    """The drafter's parameters, their moments and their clipping; fp32 throughout."""

    def __init__(self, drafter: nn.Module, recipe: OptimizerRecipe, steps: int) -> None:
        self._names = [name for name, _ in drafter.named_parameters()]
        self._parameters = list(drafter.parameters())
        self._recipe = recipe
        self._steps = steps
        self._adamw = torch.optim.AdamW(
            self._parameters,
            lr=recipe.learning_rate,
            betas=(recipe.beta1, recipe.beta2),
            weight_decay=recipe.weight_decay,
        )

    def step(self, number: int, weight: float) -> tuple[float, float]:
        """Apply the gradients accumulated over step `number` (0-based), divided by the step's loss weight.

        Returns (learning rate, gradient norm before clipping) and clears the gradients. A norm that is not
        finite applies nothing: the caller reports the step as dropped.
        """
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(weight)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._recipe.clip))
        rate = learning_rate(self._recipe, number, self._steps)
        if math.isfinite(norm):
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return rate, norm

    def save(self, path: Path) -> None:
        """Moments and step counters as safetensors named `<parameter>.<state>`, in their own dtypes."""
        state = self._adamw.state
        tensors = {
            f"{name}.{key}": state[parameter][key].contiguous()
            for name, parameter in self._named()
            if parameter in state
            for key in _STATE_KEYS
        }
        save_file(tensors, path)
        path.chmod(0o644)

    def load(self, path: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError for anything missing: a lost moment is not a default."""
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not tensors:
            return  # step 0: no moments yet
        expected = {f"{name}.{key}" for name in self._names for key in _STATE_KEYS}
        if expected != tensors.keys():
            odd = sorted(expected ^ tensors.keys())
            raise CheckpointError(f"{path}: optimizer state does not fit the drafter, first difference {odd[0]}")
        for name, parameter in self._named():
            self._adamw.state[parameter] = {key: tensors[f"{name}.{key}"] for key in _STATE_KEYS}

    def _named(self) -> Iterable[tuple[str, nn.Parameter]]:
        return zip(self._names, self._parameters, strict=True)
