"""A training recipe: TOML in, typed records out, unknown keys refused. Importable without torch.

The console reads a recipe to know how many processes to start; the trainer reads it to train. What a recipe
does not say has the default below; every resolved value is stored in the run and in each manifest.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_engine.errors import RecipeError

__all__ = [
    "DataRecipe",
    "DrafterRecipe",
    "LossRecipe",
    "OptimizerRecipe",
    "PipelineRecipe",
    "Recipe",
    "TrainRecipe",
    "load_recipe",
    "parse_recipe",
]


@dataclass(frozen=True)
class DrafterRecipe:
    """The drafter's shape; 0 takes the target's value."""

    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    layers: int
    hidden_size: int = 0
    intermediate_size: int = 0
    attention_heads: int = 0
    key_value_heads: int = 0
    head_dim: int = 0


@dataclass(frozen=True)
class DataRecipe:
    """Which chats, and how long a row may be."""

    files: tuple[str, ...]
    """JSON Lines files, relative to the recipe."""
    max_length: int
    """Tokens a row is cut to, prompt and answer together."""


@dataclass(frozen=True)
class TrainRecipe:
    """How long and on how much."""

    steps: int
    """Optimizer steps of the whole run."""
    rows: int
    """Documents in one micro-batch."""
    anchors: int
    """Blocks drawn from one document each time it is seen."""
    micro_batches_per_step: int = 1
    seed: int = 0
    checkpoint_every: int = 2000
    """A checkpoint every so many steps, and always one at step 0 and at the end."""


@dataclass(frozen=True)
class LossRecipe:
    """Cross-entropy with position decay: slot k weighs exp(-(k - 1) / gamma) (arXiv 2602.06036)."""

    gamma: float
    vocabulary: str = "full"
    """`full`, or `data`: only the ids that occur as labels in the data compete (faster, small data sets)."""


@dataclass(frozen=True)
class OptimizerRecipe:
    """AdamW with linear warm-up and cosine decay to zero."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    warmup: float = 0.04
    """Share of the steps."""
    clip: float = 1.0
    """Largest gradient norm."""


@dataclass(frozen=True)
class PipelineRecipe:
    """Processes, ring and memory."""

    target_ranks: int = 1
    drafter_ranks: int = 1
    ring_slots: int = 4
    states_cache_mib: int = 0
    """Memory in which a target rank keeps captured states, so that later epochs need no second pass."""
    threads: int = 0
    """CPU threads of each rank; 0: as many as the host has cores."""


@dataclass(frozen=True)
class Recipe:
    """One training, whole."""

    drafter: DrafterRecipe
    data: DataRecipe
    train: TrainRecipe
    loss: LossRecipe
    optimizer: OptimizerRecipe
    pipeline: PipelineRecipe = field(default_factory=PipelineRecipe)

    def to_json(self) -> dict[str, Any]:
        """Every resolved value, as manifests store it."""
        return dataclasses.asdict(self)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file. Raises RecipeError naming the file and the key.

    `overrides` are `table.key=value` with a TOML value, as `--set` takes them.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror}; expected a TOML file") from error
    try:
        return parse_recipe(text, overrides)
    except RecipeError as error:
        raise RecipeError(f"recipe {path}: {error}") from error


def parse_recipe(text: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe's text. Raises RecipeError naming the key, what was found and what was expected."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"not TOML: {error}") from error
    for override in overrides:
        _override(document, override)
    recipe: Recipe = _build(Recipe, document, "")
    _check(recipe)
    return recipe


def _override(document: dict[str, Any], override: str) -> None:
    path, separator, value = override.partition("=")
    table, dot, key = path.strip().partition(".")
    if not separator or not dot or not key:
        raise RecipeError(f"override {override!r}: expected table.key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"override {override!r}: {value!r} is not a TOML value") from error
    inner = document.setdefault(table, {})
    if not isinstance(inner, dict):
        raise RecipeError(f"override {override!r}: {table!r} is not a table")
    inner[key] = parsed


def _build(kind: type[Any], table: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            meant = f"did you mean {near[0]!r}" if near else f"expected one of {', '.join(known)}"
            raise RecipeError(f"unknown key {where + key!r}; {meant}")
    values = {}
    for name, f in known.items():
        if name in table:
            values[name] = _convert(hints[name], table[name], where + name)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise RecipeError(f"{where + name!r} is missing")
    return kind(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise RecipeError(f"{where!r} is {value!r}, expected a table")
        return _build(hint, value, f"{where}.")
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise RecipeError(f"{where!r} is {value!r}, expected a list")
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise RecipeError(f"{where!r} is {value!r}, expected {hint.__name__}")
    return value


def _check(recipe: Recipe) -> None:
    positive = {
        "drafter.layers": recipe.drafter.layers,
        "data.max_length": recipe.data.max_length,
        "train.steps": recipe.train.steps,
        "train.rows": recipe.train.rows,
        "train.anchors": recipe.train.anchors,
        "train.micro_batches_per_step": recipe.train.micro_batches_per_step,
        "train.checkpoint_every": recipe.train.checkpoint_every,
        "loss.gamma": recipe.loss.gamma,
        "optimizer.learning_rate": recipe.optimizer.learning_rate,
        "optimizer.clip": recipe.optimizer.clip,
        "pipeline.target_ranks": recipe.pipeline.target_ranks,
        "pipeline.ring_slots": recipe.pipeline.ring_slots,
    }
    for name, value in positive.items():
        if not value > 0:
            raise RecipeError(f"{name!r} is {value}, expected more than 0")
    if recipe.drafter.block_size < 2:
        raise RecipeError(f"'drafter.block_size' is {recipe.drafter.block_size}, expected at least 2")
    if not recipe.drafter.target_layer_ids:
        raise RecipeError("'drafter.target_layer_ids' is empty; name the target layers to tap")
    if not recipe.data.files:
        raise RecipeError("'data.files' is empty; name at least one JSON Lines file")
    if recipe.loss.vocabulary not in ("full", "data"):
        raise RecipeError(f"'loss.vocabulary' is {recipe.loss.vocabulary!r}, expected 'full' or 'data'")
    if not 0 <= recipe.optimizer.warmup < 1:
        raise RecipeError(f"'optimizer.warmup' is {recipe.optimizer.warmup}, expected a share below 1")
    if recipe.pipeline.drafter_ranks != 1:
        raise RecipeError(
            f"'pipeline.drafter_ranks' is {recipe.pipeline.drafter_ranks}; this engine trains with one drafter rank"
        )
